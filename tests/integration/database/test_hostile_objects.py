"""A user's object that cannot be shown stops nothing: each place reports it and goes on."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hostile import HOSTILE, build_error, build_object, contain
from waiting import until

from jobsync import CoordinatorPlugin, Database, Event, InvalidRecord, Plugin, Unavailable
from jobsync.events import HandlerFailed
from jobsync.jobs.events import Callbacks, TokenChange

CHANGE = TokenChange(1, frozenset({1}), frozenset(), is_initial=False)


class Report:
    """The events of a database, and whether it still works."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.events: list[Event] = []
        db.on("*", self.events.append)

    def named(self, name: str) -> list[Any]:
        """Return the events of this name."""
        return [event for event in self.events if event.name == name]

    async def until_reported(self, name: str = HandlerFailed.name) -> None:
        """Wait until an event with a text of the hostile error was emitted."""
        await until(lambda: self.named(name), f"{name} is emitted")
        assert "Hostile" in self.named(name)[0]["error"]
        assert len(self.named(name)[0]["error"]) <= 2000


async def _listen(report: Report, kind: str) -> None:
    report.db.on("db:connected", build_object(kind, __call__=_raising(kind)))
    report.db.on("resource:*", _raising(kind))
    await report.db.resources.things.insert({"id": "listened"})
    await report.until_reported()


async def _listen_later(report: Report, kind: str) -> None:
    async def listener(_: Event) -> None:
        raise build_error(kind)

    report.db.on("resource:*", listener)
    await report.db.resources.things.insert({"id": "listened"})
    await report.until_reported()


async def _hook(report: Report, kind: str) -> None:
    report.db.resources.things.after("insert", build_object(kind, __call__=_raising(kind)))
    await report.db.resources.things.insert({"id": "hooked"})
    await report.until_reported()


async def _coordinate(report: Report, kind: str) -> None:
    class Failing(CoordinatorPlugin):
        async def on_become_coordinator(self) -> None:
            raise build_error(kind)

        async def coordinator_work(self) -> None:
            raise build_error(kind)

    plugin = await report.db.use_plugin(Failing())
    await until(lambda: len(report.named(HandlerFailed.name)) >= 2, "both hooks were reported")
    await report.until_reported()
    assert plugin.is_coordinator


async def _postpone(report: Report, kind: str) -> None:
    error = build_error(kind, base=Away)
    failed = asyncio.Event()

    async def work() -> None:
        if not failed.is_set():
            failed.set()
            raise error

    report.db.run_in_background(work, "work")
    await until(lambda: report.named("db:work-postponed"), "the work is postponed")


async def _count_tokens(report: Report, kind: str) -> None:
    callbacks = Callbacks(report.db.events, None, build_object(kind, __call__=_raising(kind)), None)
    callbacks.notify(CHANGE)
    callbacks.stop(10)
    await report.until_reported()


async def _refuse(report: Report, kind: str) -> None:
    value = build_object(kind, hides_class=False)
    with pytest.raises(InvalidRecord) as refused:
        await report.db.resources.things.insert({"id": "refused", "age": value})
    assert "age" in str(refused.value)
    document = await report.db.resources.things.insert({"id": "kept"})
    with pytest.raises(AttributeError, match="read-only"):
        document.age = value


PLACES: dict[str, Callable[[Report, str], Awaitable[None]]] = {
    "listener": _listen,
    "coroutine-listener": _listen_later,
    "after-hook": _hook,
    "coordinator-hooks": _coordinate,
    "background-work": _postpone,
    "job-callback": _count_tokens,
    "refused-value": _refuse,
}


class Away(Unavailable):
    """The store is away."""

    def __init__(self, argument: str) -> None:
        super().__init__("store", argument)


def _raising(kind: str) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise build_error(kind)

    return call


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("place", PLACES)
async def test_an_object_that_cannot_be_shown_stops_nothing(place: str, kind: str) -> None:
    """It is reported, and the database still works."""
    with contain():
        async with Database("memory://") as db:
            await db.create_resource("things", {"id": "string", "age": "number|optional"})
            report = Report(db)
            await PLACES[place](report, kind)
            assert db.unready() == []
            assert report.named("db:failed") == []
            assert await db.resources.things.list_ids() is not None


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_database_that_fails_says_why(kind: str) -> None:
    """Whatever the error that ended its work does, it is reported, and readiness tells it."""
    with contain():
        database = Database("memory://")
        report = Report(database)

        class Failing(Plugin):
            async def on_start(self) -> None:
                async def fail() -> None:
                    # A task group cannot hold an exception that hides its class.
                    raise build_error(kind, hides_class=False)

                self.run_in_background(fail, "failing")

        await database.use_plugin(Failing())
        await database.connect()
        await report.until_reported("db:failed")
        assert "Hostile" in database.unready()[0]
        try:
            await database.disconnect()
        except BaseException as error:  # noqa: BLE001 - it is the cause
            assert type.__repr__(type(error)) == "<class 'hostile.Hostile'>"  # noqa: PT017
