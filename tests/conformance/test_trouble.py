"""Corrupt records, and waiting."""

import asyncio
import contextlib
from typing import Any

import pytest

from jobsync import Conflict, Corrupt, Store


@pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', "nonsense", '"\\ud800"', "[" * 5000])
async def test_a_corrupt_record_is_reported_and_left(
    store: Store, location: Any, text: str
) -> None:
    """Reading it raises, listing skips and reports it once, and nothing overwrites it."""
    await store.create("n/bad", 1)
    await store.create("n/good", {"x": 1})
    location.corrupt("n/bad", text)
    other = await location.open()

    with pytest.raises(Corrupt, match="n/bad cannot be read"):
        await other.get("n/bad")
    assert [record.key for record in await other.scan("n/")] == ["n/good"]
    assert [record.key for record in await other.scan("n/", where={"x": 1})] == ["n/good"]
    assert [record.key for record in await other.scan("n/", limit=1)] == ["n/good"]
    assert [head.key for head in await other.heads("n/")] == ["n/bad", "n/good"]
    with pytest.raises(Conflict):
        await other.create("n/bad", 2)
    assert location.read_value("n/bad") == text
    await other.close()


async def test_a_corrupt_record_is_reported_once(
    location: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The event has the key and the reason; the second listing emits none."""
    store = await location.open()
    await store.create("n/bad", 1)
    location.corrupt("n/bad", "{")
    await store.scan("n/")
    await store.scan("n/")
    lines = [line for line in caplog.messages if line.startswith("store:record-set-aside")]
    assert len(lines) == 1
    assert "key=n/bad" in lines[0]
    await store.close()


async def test_waiting_ends_when_something_changes(store: Store, location: Any) -> None:
    """A change under the prefix, made through another store, ends the wait early."""
    other = await location.open()
    waiting = asyncio.create_task(store.wait("n/", 60))
    made = await other.create("n/1", 0)
    # A wait that has not started may miss a change; it sees one of these.
    async with asyncio.timeout(30):
        while not waiting.done():
            made = await other.put(made, made.seq)
            await asyncio.sleep(0)
    await waiting
    await other.close()


async def test_waiting_for_a_history_ends_when_it_grows(store: Store) -> None:
    """An appended entry ends the wait early."""
    waiting = asyncio.create_task(store.wait("history/a", 60))
    async with asyncio.timeout(30):
        while not waiting.done():
            await store.append("history/a", [1])
            await asyncio.sleep(0)
    await waiting


async def test_waiting_ends_at_the_timeout(store: Store) -> None:
    """A timeout is not an error."""
    async with asyncio.timeout(30):
        await store.wait("n/", 0.01)


async def test_a_cancelled_wait_leaves_the_store_usable(store: Store) -> None:
    """Cancellation is passed on."""
    waiting = asyncio.create_task(store.wait("n/", 60))
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await store.create("n/1", 0)


async def test_a_store_can_be_closed_twice(location: Any) -> None:
    """Closing again does nothing."""
    store = await location.open()
    await store.close()
    await store.close()
