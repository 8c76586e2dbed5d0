"""A pytest plugin that reports which blocks of the source each test runs, and how long it takes.

The blocks of all processes are in one memory: a test clears it, and copies it when it has ended.
What a fixture of several tests does counts for each test that uses the fixture.
"""

import base64
import json
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ran_blocks import ran  # type: ignore[import-not-found]  # a copy that records has it


class BlockRecorder:
    """Writes a line of JSON for each test.

    Args:
        report: the file.
    """

    def __init__(self, report: Path) -> None:
        self._report = report
        self._of_fixtures: defaultdict[str, int] = defaultdict(int)
        self._outcomes: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._outcomes.clear()
        _clear()
        started = time.monotonic()
        result = yield
        seconds = time.monotonic() - started
        found = _read()
        for name in getattr(item, "fixturenames", ()):
            found |= self._of_fixtures[name]
        packed = zlib.compress(found.to_bytes(len(ran) // 8 + 1, "little"))
        fact = {
            "test": item.nodeid,
            "seconds": round(seconds, 3),
            "passed": self._outcomes == ["passed", "passed", "passed"],
            "ran": base64.b64encode(packed).decode(),
        }
        with self._report.open("a", encoding="utf-8") as report:
            report.write(json.dumps(fact) + "\n")
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._outcomes.append(report.outcome)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = ran[:]
        _clear()
        try:
            return (yield)
        finally:
            self._of_fixtures[fixturedef.argname] |= _read()
            for place, has_run in enumerate(before):
                if has_run:
                    ran[place] = 1


def _clear() -> None:
    ran[:] = bytes(len(ran))


def _read() -> int:
    """Return a number whose bit n says whether block n has run."""
    digits = ran[::-1].translate(bytes.maketrans(b"\0\1", b"01"))
    return int(digits, 2)
