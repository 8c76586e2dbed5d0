"""The public namespace."""

import difflib
import importlib.util
import inspect
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from public_api import RECORDED, describe

import jobsync


def test_every_public_name_exists_sorted_and_once() -> None:
    """`__all__` lists the names that users may import."""
    assert jobsync.__all__ == sorted(set(jobsync.__all__))
    assert all(hasattr(jobsync, name) for name in jobsync.__all__)


def test_names_are_listed_before_they_are_used() -> None:
    """An interpreter completes them though their modules are not loaded yet."""
    spec = importlib.util.find_spec("jobsync")
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert not {"Database", "Store"} & vars(fresh).keys()
    assert set(jobsync.__all__) <= set(dir(fresh))


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


_PARTS = {
    "Definition",
    "ElectionSettings",
    "ExpiryRule",
    "HomeLoop",
    "Ids",
    "Partition",
    "Session",
    "SessionRecord",
    "SharedSession",
    "SqlAccess",
    "Timing",
    "TransactionBlock",
}
"""What only parts of this library pass to each other."""


def test_what_public_calls_return_can_be_imported() -> None:
    """So that a program can annotate its own functions."""
    public = [getattr(jobsync, name) for name in jobsync.__all__]
    missing = {
        f"{found.__name__}, of {kind.__name__}.{name}"
        for kind in public
        if isinstance(kind, type)
        for name in dir(kind)
        if not name.startswith("_")
        for returned in _find_returned(inspect.getattr_static(kind, name))
        for found in _list_classes(returned)
        if found.__name__ not in {*jobsync.__all__, *_PARTS}
    }
    assert missing == set()


def _find_returned(member: Any) -> list[Any]:
    function = member.fget if isinstance(member, property) else member
    function = inspect.unwrap(function) if callable(function) else function
    if not inspect.isfunction(function):
        return []
    # Some names are imported for type checkers only.
    known = {name: getattr(jobsync, name) for name in jobsync.__all__} | dict.fromkeys(_PARTS)
    each = [function, *typing.get_overloads(function)]
    return [typing.get_type_hints(one, localns=known).get("return") for one in each]


def _list_classes(kind: Any) -> Iterator[type]:
    """Yield the classes of this library within an annotation."""
    if isinstance(kind, list | tuple):
        for each in kind:
            yield from _list_classes(each)
        return
    yield from _list_classes(typing.get_args(kind))
    found = typing.get_origin(kind) or kind
    if isinstance(found, type) and found.__module__.startswith("jobsync."):
        yield found


def test_a_mistyped_name_is_suggested() -> None:
    """Python suggests a name if the error has the module; two modules need no import."""
    with pytest.raises(AttributeError, match="has no attribute 'Databse'") as caught:
        jobsync.Databse  # noqa: B018 - the name alone raises
    assert (caught.value.name, caught.value.obj) == ("Databse", jobsync)
    assert jobsync.sync.Database is not jobsync.Database
    assert jobsync.testing.World


def test_blocking_and_asynchronous_classes_are_not_mixed() -> None:
    """The error has the fix."""
    blocking: Any = jobsync.sync.QueuePlugin("emails")
    with pytest.raises(jobsync.Invalid, match="Import both from jobsync, or"):
        jobsync.Database("memory://", plugins=[blocking])
