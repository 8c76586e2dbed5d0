"""The end of a connection: the order of its steps, whatever some of them do, and what is told."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from chance import FakeClock

from jobsync import Components, Database, Event, Events, Invalid
from jobsync.database.connection import (
    Connection,
    DatabaseDisconnected,
    DisconnectIncomplete,
    StoreTarget,
)
from jobsync.stores.memory import MemoryStore

DISCONNECTED = DatabaseDisconnected(store="stub")
STEPS = ["stop b", "stop a", "the session", "background work", "the store"]
"""What is waited for, in order."""


class Plugins(list[Any]):
    """Plugins, and what they say of the whole."""

    stop_time = 30.0

    def __init__(self, plugins: list[Any], running: list[str]) -> None:
        super().__init__(plugins)
        self._running = running

    def list_running(self) -> list[str]:
        """Return the user code that runs on."""
        return self._running


class Stage:
    """A connection of stubs that note when they are called."""

    def __init__(self, **ends: Callable[[], Awaitable[None]]) -> None:
        self.clock = FakeClock()
        self.calls: list[str] = []
        self.events: list[Event] = []
        self.times_left: list[float | None] = []
        self._ends = ends
        events = Events()
        events.on("db:*", self.hear)
        self.user_code: list[str] = []
        self.background: list[str] = []
        components = msgspec.structs.replace(Components.system(), clock=self.clock, events=events)
        plugins = [
            SimpleNamespace(
                name=f"stop {name}",
                stop=self.make_step(f"stop {name}"),
                prepare_stop=lambda name=name: self.prepare(name),
            )
            for name in ("a", "b")
        ]
        self.connection = Connection(
            cast("Any", SimpleNamespace(name="stub", close=self.make_step("the store"))),
            cast(
                "Any",
                SimpleNamespace(
                    stop=self.make_step("background work"), list_running=lambda: self.background
                ),
            ),
            cast("Any", SimpleNamespace(end=self.make_step("the session"))),
            cast("Any", Plugins(plugins, self.user_code)),
            components,
            owns_store=True,
        )

    def make_step(self, name: str) -> Callable[[], Any]:
        """Return a step that is noted, and ends as the test says."""

        async def step() -> None:
            self.calls.append(name)
            end = self._ends.get(name)
            if end is not None:
                await end()

        return step

    def prepare(self, name: str) -> None:
        """Note that a plugin was told to stop, and how much time it was told."""
        self.calls.append(f"prepare {name}")
        self.times_left.append(self.connection.time_left)

    def hear(self, event: Event) -> None:
        """Note an event."""
        self.calls.append(event.name)
        self.events.append(event)

    async def close(self, within: float | None = None) -> None:
        """Close the connection."""
        await self.connection.close(lambda: self.calls.append("end"), within, DISCONNECTED)


ORDER = ["prepare b", "prepare a", "stop b", "stop a", "db:disconnected", *STEPS[2:]]


async def test_a_connection_ends_step_by_step() -> None:
    """All plugins know before the first one stops; the event comes when the last one has."""
    stage = Stage()
    await stage.close()
    assert stage.calls == [*ORDER, "end"]
    assert stage.events == [DISCONNECTED]


@pytest.mark.parametrize(("within", "expected"), [(None, None), (0.0, 0.0), (7.5, 7.5)])
async def test_plugins_are_told_how_much_time_is_left(
    within: float | None, expected: float | None
) -> None:
    """No time at all is not the same as no limit."""
    stage = Stage()
    assert stage.connection.time_left is None
    await stage.close(within)
    assert stage.times_left == [expected, expected]


@pytest.mark.parametrize("failing", STEPS)
async def test_a_step_that_fails_keeps_none_of_the_others_from_running(failing: str) -> None:
    """Its error is raised at the end."""

    async def fail() -> None:
        raise ValueError(failing)

    stage = Stage(**{failing: fail})
    with pytest.raises(ValueError, match=failing):
        await stage.close()
    assert stage.calls == [*ORDER, "end"]


@pytest.mark.parametrize("hanging", STEPS)
async def test_what_was_cancelled_is_told(hanging: str) -> None:
    """Also if nothing runs on."""
    has_begun = asyncio.Event()

    async def hang() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    stage = Stage(**{hanging: hang})
    closing = asyncio.create_task(stage.close())
    await has_begun.wait()
    # Nobody has any time left.
    stage.connection.hurry(-60.0)
    await closing
    told = DisconnectIncomplete(store="stub", cancelled=(hanging,), running=())
    assert [event for event in stage.events if event != DISCONNECTED] == [told]
    assert [call for call in stage.calls if not call.startswith(("prepare", "db:"))] == [
        *STEPS,
        "end",
    ]


@pytest.mark.parametrize(
    ("user_code", "background"), [(["a: mail"], []), ([], ["work"]), (["a: x", "b: y"], ["work"])]
)
async def test_what_runs_on_is_told(user_code: list[str], background: list[str]) -> None:
    """The users' code, and the work of the database."""
    stage = Stage()
    stage.user_code += user_code
    stage.background += background
    await stage.close()
    running = (*user_code, *background)
    told = DisconnectIncomplete(store="stub", cancelled=(), running=running)
    assert stage.events == [DISCONNECTED, told]
    assert stage.calls[-2:] == ["db:disconnect-incomplete", "end"]


@pytest.mark.parametrize(
    "given",
    [
        {"url": "", "connection": "memory://"},
        {"url": "memory://", "connection_string": ""},
        {"connection_string": "", "connection": ""},
        {"url": "a", "connection_string": "b", "connection": MemoryStore()},
    ],
)
def test_only_one_argument_may_name_the_store(given: dict[str, Any]) -> None:
    """An empty text names one, too: an environment variable may be empty by mistake."""
    with pytest.raises(Invalid) as caught:
        Database(**given)
    assert (caught.value.field, caught.value.value) == ("url", len(given))


async def test_an_empty_url_is_not_taken_for_the_default() -> None:
    """Nothing is written to a file that nobody has named."""
    assert StoreTarget(url="").target == ""
    for database in (Database(""), Database(connection_string=""), Database(connection="")):
        with pytest.raises(Invalid, match="url has no scheme"):
            await database.connect()
