"""What cannot be read, and who waits."""

import asyncio
import contextlib
from typing import Any

import pytest

from jobsync import Conflict, Corrupt, Store


@pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', "nonsense", '"\\ud800"', "[" * 5000])
async def test_a_corrupt_record_is_reported_and_left(store: Store, place: Any, text: str) -> None:
    """Reading it raises, listing skips and reports it once, and nothing overwrites it."""
    await store.create("n/bad", 1)
    await store.create("n/good", {"x": 1})
    place.damage("n/bad", text)
    other = await place.open()

    with pytest.raises(Corrupt, match="n/bad cannot be read"):
        await other.get("n/bad")
    assert [record.key for record in await other.scan("n/")] == ["n/good"]
    assert [record.key for record in await other.scan("n/", where={"x": 1})] == ["n/good"]
    assert [record.key for record in await other.scan("n/", limit=1)] == ["n/good"]
    assert [head.key for head in await other.heads("n/")] == ["n/bad", "n/good"]
    with pytest.raises(Conflict):
        await other.create("n/bad", 2)
    assert place.stored("n/bad") == text
    await other.close()


async def test_a_corrupt_record_is_reported_once(
    place: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An event tells which record and why; the second listing stays quiet."""
    store = await place.open()
    await store.create("n/bad", 1)
    place.damage("n/bad", "{")
    await store.scan("n/")
    await store.scan("n/")
    lines = [line for line in caplog.messages if line.startswith("store:record-set-aside")]
    assert len(lines) == 1
    assert "key=n/bad" in lines[0]
    await store.close()


async def test_waiting_ends_when_something_changes(store: Store, place: Any) -> None:
    """A change under the prefix, made through another handle, ends the wait early."""
    other = await place.open()
    waiting = asyncio.create_task(store.wait("n/", 60))
    made = await other.create("n/1", 0)
    # A wait that had not begun may miss a change; it sees one of these.
    async with asyncio.timeout(30):
        while not waiting.done():
            made = await other.put(made, made.seq)
            await asyncio.sleep(0)
    await waiting
    await other.close()


async def test_waiting_for_a_history_ends_when_it_grows(store: Store) -> None:
    """A line appended ends the wait early."""
    waiting = asyncio.create_task(store.wait("history/a", 60))
    async with asyncio.timeout(30):
        while not waiting.done():
            await store.append("history/a", [1])
            await asyncio.sleep(0)
    await waiting


async def test_waiting_in_vain_ends_with_its_time(store: Store) -> None:
    """Nothing changed is no error."""
    async with asyncio.timeout(30):
        await store.wait("n/", 0.01)


async def test_a_cancelled_wait_leaves_the_store_usable(store: Store) -> None:
    """Cancellation passes through."""
    waiting = asyncio.create_task(store.wait("n/", 60))
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await store.create("n/1", 0)


async def test_a_store_can_be_closed_twice(place: Any) -> None:
    """Closing again does nothing."""
    store = await place.open()
    await store.close()
    await store.close()
