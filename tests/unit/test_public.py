"""The public namespace."""

import difflib

from public_api import RECORDED, describe

import jobsync


def test_every_public_name_exists_sorted_and_once() -> None:
    """`__all__` lists the names that users may import."""
    assert jobsync.__all__ == sorted(set(jobsync.__all__))
    assert all(hasattr(jobsync, name) for name in jobsync.__all__)


def test_nothing_else_is_public() -> None:
    """A name without underscore that is not a module of ours is in `__all__`."""
    for name in jobsync.__all__:
        # Names are loaded when they are used.
        getattr(jobsync, name)
    modules = {name for name, thing in vars(jobsync).items() if type(thing) is type(jobsync)}
    public = {name for name in vars(jobsync) if not name.startswith("_")}
    assert public - modules == set(jobsync.__all__)


def test_the_public_interface_is_as_recorded() -> None:
    """Names, signatures, attributes, events and commands change on purpose only."""
    recorded = RECORDED.read_text(encoding="utf-8").splitlines()
    actual = describe().splitlines()
    changes = difflib.unified_diff(recorded, actual, "recorded", "actual", lineterm="", n=2)
    shown = "\n".join(changes)
    assert not shown, f"the public interface has changed; if on purpose, run `make api`:\n{shown}"
