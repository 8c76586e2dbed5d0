"""Calls from other event loops than that of the database."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from jobsync.database.home_loop import HomeLoop, on_home_loop
from jobsync.errors import Unavailable
from jobsync.loop_calls import Background


async def test_items_that_are_left_early_are_closed_on_the_home_loop() -> None:
    """Where they are read; a page or a connection that they hold is free at once."""
    closed_on: list[object] = []

    async def read() -> AsyncGenerator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed_on.append(asyncio.get_running_loop())

    async def enter() -> object:
        home.enter()
        return asyncio.get_running_loop()

    home = HomeLoop(lambda: "store")
    background = Background("test", lambda: Unavailable("store", "it has ended", "connect again"))
    loop = await asyncio.to_thread(background.call, enter())
    # Somebody holds it: nothing closes it by chance.
    reading = read()
    items = home.iterate(reading)
    assert await anext(items) == 1
    await items.aclose()  # type: ignore[attr-defined]
    assert closed_on == [loop]
    await asyncio.to_thread(background.stop)


@pytest.mark.parametrize(
    ("options", "is_at_home"),
    [({}, True), ({"connection": None}, True), ({"connection": object()}, False)],
    ids=["none", "no connection", "a connection"],
)
async def test_a_call_runs_on_the_home_loop_unless_it_joins_a_connection(
    options: dict[str, object], is_at_home: bool
) -> None:
    """A connection of the caller belongs to the caller's loop or thread; None is no connection."""

    @on_home_loop
    class Homed:
        def __init__(self) -> None:
            self.home_loop: HomeLoop | None = None

        async def find_loop(self, connection: object = None) -> asyncio.AbstractEventLoop:
            """Return the loop on which this runs."""
            assert connection in (None, options.get("connection"))
            return asyncio.get_running_loop()

        async def enter(self) -> None:
            """Make the loop on which this runs the home loop."""
            self.home_loop = HomeLoop(lambda: "store")
            self.home_loop.enter()

    homed = Homed()
    background = Background("test", lambda: Unavailable("store", "it has ended", "connect again"))
    loops = [
        await asyncio.to_thread(background.call, work)
        for work in (homed.enter(), homed.find_loop())
    ]
    found = await homed.find_loop(**options)
    assert (found is loops[1]) is is_at_home
    assert (found is asyncio.get_running_loop()) is not is_at_home
    await asyncio.to_thread(background.stop)
