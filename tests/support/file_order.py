"""The order of test files: some compute all the time, and others mostly wait."""

from collections import defaultdict
from collections.abc import Iterable

import pytest

__all__ = ["take_turns"]

_COMPUTING = "tests/simulation/"
_SHORT = "tests/unit/"


def take_turns(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return tests file by file: files that compute spread evenly among those that wait.

    Several processes run them in this order, so that a processor has work while others wait. Short
    files are last, so that all processes end together.
    """
    files: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)
    computing = [name for name in files if name.startswith(_COMPUTING)]
    short = [name for name in files if name.startswith(_SHORT)]
    others = [name for name in files if not name.startswith((_COMPUTING, _SHORT))]
    places = {
        name: (i + 0.5) / len(names)
        for names in (computing, others)
        for i, name in enumerate(names)
    }
    ordered = [*sorted(places, key=places.__getitem__), *short]
    return [test for name in ordered for test in files[name]]
