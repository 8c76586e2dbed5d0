"""Waiting for whichever comes first."""

import asyncio

import pytest

from jobsync.coordination.runner import listening


async def test_what_comes_while_the_block_runs_is_heard() -> None:
    """Nothing falls between reading and waiting."""
    hint = asyncio.Event()

    async def wait() -> None:
        # As a store does that tells only those who wait already.
        hint.clear()
        await hint.wait()

    async with asyncio.timeout(10), listening(wait()) as wait_for_change:
        hint.set()
        assert await wait_for_change(60)


async def test_patience_ends_it() -> None:
    """When nothing comes, it is over after so long, and nothing is left running."""
    waits = asyncio.Event()
    before = asyncio.all_tasks()
    async with listening(waits.wait(), waits.wait()) as wait_for_change:
        assert not await wait_for_change(0.001)
    assert asyncio.all_tasks() == before


async def test_what_a_wait_raises_is_raised_where_one_waits() -> None:
    """As it is, not in a group."""

    async def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        async with listening(fail(), asyncio.Event().wait()) as wait_for_change:
            await wait_for_change(60)


async def test_what_the_block_raises_ends_all_waits() -> None:
    """Nothing is left running."""
    before = asyncio.all_tasks()
    with pytest.raises(KeyError):
        async with listening(asyncio.Event().wait()):
            raise KeyError
    assert asyncio.all_tasks() == before


async def test_a_block_that_is_closed_waits_for_nothing_more() -> None:
    """As a program ends, or a simulated world: there is nobody left to go on with it."""
    hint = asyncio.Event()
    before = asyncio.all_tasks()

    async def listen() -> None:
        async with listening(hint.wait()) as wait_for_change:
            await wait_for_change(60)

    listener = listen()
    # By hand: a task would close it only when it is collected.
    listener.send(None)
    await asyncio.sleep(0)
    waits = asyncio.all_tasks() - before
    listener.send(None)
    listener.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.gather(*waits)
