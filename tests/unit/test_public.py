"""The public namespace."""

import jobsync


def test_every_public_name_is_there_sorted_and_once() -> None:
    """`__all__` is the list of what users may import."""
    assert jobsync.__all__ == sorted(set(jobsync.__all__))
    assert all(hasattr(jobsync, name) for name in jobsync.__all__)


def test_nothing_else_is_public() -> None:
    """A name without underscore that is not a module of ours is in `__all__`."""
    modules = {name for name, thing in vars(jobsync).items() if type(thing) is type(jobsync)}
    public = {name for name in vars(jobsync) if not name.startswith("_")}
    assert public - modules == set(jobsync.__all__)
