"""Calls from other event loops than that of the database."""

import asyncio
from collections.abc import AsyncGenerator

from jobsync.database.home_loop import HomeLoop
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
