"""Arguments that cannot be compared, shown or converted are refused before any write."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

import pytest

from jobsync import (
    CachePlugin,
    Database,
    Invalid,
    NotFound,
    SchedulerPlugin,
    TTLPlugin,
)
from jobsync.core.arguments import check_choice

HUGE = 10**400


class Hostile:
    """An object that cannot be compared, hashed or shown."""

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError("hostile")

    __eq__ = __hash__ = __repr__ = __str__ = __format__ = _refuse


class HostileText(str):
    """A text that cannot be compared or shown."""

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError("hostile")

    __eq__ = __hash__ = __repr__ = __str__ = __format__ = _refuse


@pytest.mark.parametrize("value", [Hostile(), 5, None, b"on", [], "onn", HostileText("onn")])
def test_a_choice_is_compared_only_as_text(value: Any) -> None:
    """Whatever else it is, the error has the field and the choices."""
    with pytest.raises(Invalid, match="mode is unknown") as caught:
        check_choice("mode", value, ("on", "off"))
    assert "on" in caught.value.fix
    assert check_choice("mode", HostileText("off"), ("on", "off")) == "off"


@pytest.mark.parametrize("value", [Hostile(), [], 5, {"a": Hostile()}, HostileText("x")])
async def test_hostile_names_are_refused(value: Any) -> None:
    """By the call's own error, which can be shown."""
    ttl = TTLPlugin(resources={"r": {"ttl": 5}})
    async with Database("memory://", plugins=[ttl]) as db:
        resource = await db.create_resource("r", partitions={"p": ["a"]})
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: resource.query({}, partition=value),
            lambda: resource.list(partition=value),
            lambda: ttl.cleanup_resource(value),
            lambda: db.drop_resource(value),
        ]
        for call in calls:
            with pytest.raises((Invalid, NotFound)) as caught:
                await call()
            assert str(caught.value)
        with pytest.raises(NotFound) as missing:
            db.resource(value)
        assert str(missing.value).startswith("There is no resource ")
        assert value not in db.resources


@pytest.mark.parametrize("value", [Hostile(), [], 5, "soft", HostileText("soft")])
def test_a_hostile_strategy_is_refused(value: Any) -> None:
    """Found: the == of an object was called, and raised."""
    with pytest.raises(Invalid, match=r"resources\.r\.on_expire is unknown") as caught:
        TTLPlugin(resources={"r": {"ttl": 5, "on_expire": value}})
    assert "hard-delete" in caught.value.fix or "soft-delete" in caught.value.fix


@pytest.mark.parametrize(
    ("plugin", "option"),
    [
        (SchedulerPlugin, "max_concurrent_jobs"),
        (SchedulerPlugin, "default_timeout"),
        (SchedulerPlugin, "grace"),
        (TTLPlugin, "cleanup_interval"),
        (TTLPlugin, "batch_size"),
        (CachePlugin, "max_size"),
    ],
)
def test_text_that_cannot_be_encoded_is_no_number(plugin: Callable[..., Any], option: str) -> None:
    """Found: UnicodeEncodeError."""
    with pytest.raises(Invalid, match=rf"{option} has a wrong value .*ud800") as caught:
        plugin(**{option: "\ud800"})
    assert "number" in caught.value.fix


@pytest.mark.parametrize(
    "hooks",
    [
        *(5, 0, True, "before_insert", b"x", [], print, Hostile()),
        *({"before_insrt": print}, {"before_insert": 5}, {5: print}),
        {"before_insert": [print, 5]},
    ],
)
async def test_wrong_hooks_write_nothing(hooks: Any) -> None:
    """Found: AttributeError, after the definition was written."""
    async with Database("memory://") as db:
        with pytest.raises(Invalid, match=r"hook|before_insert") as caught:
            await db.create_resource("r", hooks=hooks)
        assert str(caught.value)
        assert await db.list_resources() == []


@pytest.mark.parametrize("since", [HUGE, -HUGE, float("inf"), float("nan"), True, "2026"])
async def test_a_history_has_a_time_to_begin_at(since: Any) -> None:
    """Found: OverflowError."""
    scheduler = SchedulerPlugin()
    async with Database("memory://", plugins=[scheduler]):
        with pytest.raises(Invalid, match="since must be a time"):
            await scheduler.job_history(since=since)


async def test_a_huge_time_to_live_is_refused() -> None:
    """Where a float is needed, a whole number may be too large."""
    async with Database("memory://") as db:
        storage = db.open_storage("plugin")
        with pytest.raises(Invalid, match="ttl must be a number"):
            await storage.set("a", 1, ttl=HUGE)
        with pytest.raises(Invalid, match="by must be a number"):
            await storage.increment("n", HUGE)


@pytest.mark.parametrize("value", [HUGE, -HUGE, 2**53 + 1])
async def test_a_number_that_no_float_can_hold_is_refused_as_a_time(value: int) -> None:
    """However a record with an expiry is written; nothing is."""
    ttl = TTLPlugin(resources={"field": {"field": "at"}, "since": {"ttl": 5, "field": "at"}})
    async with Database("memory://", plugins=[ttl]) as db:
        for name in ("field", "since"):
            resource = await db.create_resource(name)
            await resource.insert({"id": "a", "at": 5})
            record = {"id": "b", "at": value}
            calls: list[Callable[[], Awaitable[Any]]] = [
                partial(resource.insert, record),
                partial(resource.insert_many, [record]),
                partial(resource.update, "a", {"at": value}),
                partial(resource.replace, "a", {"at": value}),
            ]
            for call in calls:
                with pytest.raises(Invalid, match=r"at must be within ±2⁵³ .*Store it as text"):
                    await call()
            assert [each["at"] for each in await resource.list()] == [5]
