"""Hooks of a resource: how they are added, in which order they run, and what is told of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from jobsync import Database, Document, Events, Invalid
from jobsync.database.hooks import HookedVerbs, ResourceHooks
from jobsync.events import HandlerFailed


def upper(text: str) -> str:
    """Return other input."""
    return text.upper()


async def double(text: str) -> str:
    """Return other input later."""
    return 2 * text


def fail(_: object) -> None:
    """Raise an error."""
    raise ValueError("no")


@pytest.mark.parametrize(
    "functions", [[upper, double], (upper, double), [upper, double, upper], (double, upper, double)]
)
@pytest.mark.parametrize("is_repeated", [False, True])
async def test_hooks_run_once_in_the_order_in_which_they_were_added(
    functions: Any, *, is_repeated: bool
) -> None:
    """Whether they come as a list or a tuple; a resource that is defined again has no more."""
    verbs = HookedVerbs(Events())
    for _ in range(2 if is_repeated else 1):
        verbs.add_hooks({"before_insert": functions, "before_get": fail})
    assert await verbs._hooks.before("insert", "ab") == "ABAB"
    assert await verbs._hooks.before_all("insert", ["a", "b"]) == ["AA", "BB"]
    assert await verbs._hooks.before_all("update", ["a"]) == ["a"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_decorated_function_stays_what_it_is(when: Literal["before", "after"]) -> None:
    """Each way to add a hook returns it, also if it was added before."""
    verbs = HookedVerbs(Events())
    add: Callable[..., Any] = getattr(verbs, when)
    for _ in range(2):
        assert add("insert")(upper) is upper
        assert add("insert", upper) is upper
    assert verbs._hooks._hooks == {f"{when}_insert": [upper]}


@pytest.mark.parametrize(
    "wrong",
    [{"before_inser": upper}, {"after_get": 5}, {"after_get": [upper, None]}, {5: upper}, [upper]],
)
def test_of_hooks_of_which_one_is_wrong_none_is_added(wrong: Any) -> None:
    """Whatever comes before and after it."""
    verbs = HookedVerbs(Events())
    hooks = (
        {"before_insert": upper, **wrong, "after_insert": upper}
        if isinstance(wrong, dict)
        else wrong
    )
    with pytest.raises(Invalid):
        verbs.add_hooks(hooks)
    assert verbs._hooks._hooks == {}


async def test_each_failing_hook_is_told_for_each_result() -> None:
    """By the name of the hook and of the function; the others run all the same."""
    events, told, called = Events(), list[Any](), list[int]()
    events.on("jobsync:handler-failed", told.append)
    hooks = ResourceHooks(events)
    for hook in (fail, called.append):
        hooks.add("after_insert", hook)
    await hooks.after_all("insert", iter([1, 2]))
    await hooks.after_all("get", iter([3]))
    assert called == [1, 2]
    name = f"{__name__}.fail"
    failure = HandlerFailed(event="after_insert", callback=name, error="ValueError: no")
    assert told == [failure, failure]


@dataclass
class User:
    """A type of records."""

    name: str
    id: str | None = None


async def test_hooks_of_typed_records_get_what_is_stored() -> None:
    """A document after each verb, whatever the verb returns to its caller."""
    seen: dict[str, Any] = {}
    async with Database("memory://") as database:
        users = await database.create_resource("users", type=User)
        verbs: list[Any] = ["insert", "update", "replace", "upsert", "get"]
        for verb in verbs:
            users.after(verb, lambda given, verb=verb: seen.setdefault(verb, given))
        returned = [
            await users.upsert(User("new", "2")),
            await users.insert(User("a", "1")),
            await users.upsert(User("b", "1")),
            await users.update("1", {"name": "c"}),
            await users.replace("1", User("d")),
            await users.get("1"),
        ]
    assert [type(each) for each in returned] == [User] * 6
    assert returned[0] == User("new", "2")
    assert sorted(seen) == sorted(verbs)
    assert {type(each) for each in seen.values()} == {Document}
