"""History: append, read, discard."""

from typing import Any

import pytest

from jobsync import Components, Invalid, Store
from jobsync.core.clock import SystemClock
from jobsync.core.codec import MAX_VALUE


async def test_entries_are_read_in_the_order_of_one_writer(store: Store) -> None:
    """A batch keeps its order, with ids that sort so and plausible times."""
    await store.append("history/a", [{"n": 1}, "two", None])
    entries = await store.read("history/a")
    assert [entry.value for entry in entries] == [{"n": 1}, "two", None]
    assert [entry.id for entry in entries] == sorted({entry.id for entry in entries})
    assert {entry.stream for entry in entries} == {"history/a"}
    assert all(abs(entry.at - SystemClock().wall()) < 60 for entry in entries)


async def test_reading_continues_after_an_id(store: Store) -> None:
    """All pages together are the complete history, each entry once."""
    await store.append("history/a", list(range(10)))
    await store.append("history/a", list(range(10, 25)))
    seen: list[Any] = []
    after = ""
    while page := await store.read("history/a", after=after, limit=4):
        seen += [entry.value for entry in page]
        after = page[-1].id
    assert sorted(seen) == list(range(25))


async def test_histories_are_separate(store: Store) -> None:
    """One history does not show another's entries, even if their names are similar."""
    await store.append("history/a", [1])
    await store.append("history/a/b", [2])
    await store.append("history/ab", [3])
    assert [entry.value for entry in await store.read("history/a")] == [1]
    assert await store.read("history") == []


async def test_a_batch_sent_again_is_appended_once(store: Store) -> None:
    """A named batch is safe to repeat, also after a lost reply."""
    batch = "1794731956371-ca547d85fb8b"
    for _ in range(3):
        await store.append("history/a", ["x", "y"], batch=batch)
    entries = await store.read("history/a")
    assert [entry.value for entry in entries] == ["x", "y"]
    assert entries[0].at.seconds == 1794731956.371


async def test_an_empty_batch_appends_nothing(store: Store) -> None:
    """No entry is read."""
    await store.append("history/a", [])
    assert await store.read("history/a") == []


async def test_old_entries_are_discarded(store: Store, location: Any, clock: Any) -> None:
    """Only entries of that history and over that age are deleted."""
    now = SystemClock().wall().seconds
    system = Components.system()
    clock.wall_seconds = now - 1000
    past = await location.open(
        Components(clock=clock, randomness=system.randomness, events=system.events)
    )
    await past.append("history/a", ["old"])
    await past.append("history/b", ["old"])
    await past.close()
    await store.append("history/a", ["new"])
    assert await store.discard("history/a", older_than=2000) == 0
    assert await store.discard("history/a", older_than=500) == 1
    assert [entry.value for entry in await store.read("history/a")] == ["new"]
    assert [entry.value for entry in await store.read("history/b")] == ["old"]


@pytest.mark.parametrize(
    ("stream", "entries", "batch", "message"),
    [
        ("history//a", [1], "", "empty segment"),
        ("history/a", [1, {2}], "", r"entries\[1\]"),
        ("history/a", [0] * 10_001, "", "Append in parts"),
        ("history/a", ["x" * (MAX_VALUE // 2)] * 2, "", "Append in parts"),
        ("history/a", [1], "mine", r"batch .*\(got 'mine'\)"),
    ],
)
async def test_an_invalid_append_adds_nothing(
    store: Store, stream: str, entries: list[Any], batch: str, message: str
) -> None:
    """The error names the argument, its value and the fix."""
    with pytest.raises(Invalid, match=message):
        await store.append(stream, entries, batch=batch)
    assert await store.read("history/a") == []


async def test_a_position_must_be_an_id(store: Store) -> None:
    """Reading after something that is not an id is refused."""
    with pytest.raises(Invalid, match=r"after .*\(got 'x'\)"):
        await store.read("history/a", after="x")
