"""A process that dies at any write leaves every record complete, once, and findable."""

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import pytest
from store_locations import StoreLocation

from jobsync import (
    Conflict,
    Database,
    Document,
    Incomplete,
    NotFound,
    Resource,
    Store,
    Unavailable,
)
from jobsync.stores.contract import Change, Outcome
from jobsync.stores.decorator import StoreDecorator

Step: TypeAlias = Callable[[Resource], Awaitable[Any]]
State: TypeAlias = dict[str, int]


class Crashed(BaseException):
    """The process has died."""


class CrashingStore(StoreDecorator):
    """Applies a number of changes, then dies: before the next one, or before its reply.

    Batches end half-way, as on a store without transactions.
    """

    def __init__(self, inner: Store, changes: int, *, replies: bool) -> None:
        super().__init__(inner)
        self.applied = 0
        self._changes = changes
        self._replies = replies

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Write, up to the crash."""
        left = self._changes - self.applied
        self.applied += len(changes)
        if left >= len(changes):
            return await super().write(changes)
        if part := changes[: max(left, 0) + (not self._replies)]:
            await self.inner.write(part)
        raise Crashed


def row(name: str, n: int) -> dict[str, Any]:
    """Return a record."""
    return {"id": name, "n": n}


STORY: list[tuple[Step, State]] = [
    (lambda r: r.insert(row("a", 1)), {"a": 1}),
    (lambda r: r.insert_many([row(x, 1) for x in "bcd"]), {"a": 1, "b": 1, "c": 1, "d": 1}),
    (lambda r: r.update("a", {"n": 2}), {"a": 2, "b": 1, "c": 1, "d": 1}),
    (lambda r: r.upsert(row("e", 1)), {"a": 2, "b": 1, "c": 1, "d": 1, "e": 1}),
    (lambda r: r.upsert(row("b", 3)), {"a": 2, "b": 3, "c": 1, "d": 1, "e": 1}),
    (lambda r: r.replace("c", {"n": 4}), {"a": 2, "b": 3, "c": 4, "d": 1, "e": 1}),
    (lambda r: r.delete("d"), {"a": 2, "b": 3, "c": 4, "e": 1}),
    (lambda r: r.insert(row("d", 5)), {"a": 2, "b": 3, "c": 4, "d": 5, "e": 1}),
    (lambda r: r.delete_many(["a", "b", "e"]), {"c": 4, "d": 5}),
    (lambda r: r.insert_many([row("a", 6), row("f", 6)]), {"a": 6, "c": 4, "d": 5, "f": 6}),
]
"""Steps, and the records after each."""

CHANGES = 18
"""Number of changes in the story, including the definition's."""


async def find_all(resource: Resource) -> State:
    """Read in every way; all of them must agree."""
    listed = await resource.list()
    found = {document.id: document.n for document in listed}
    assert len(found) == len(listed), "duplicated"
    assert await resource.list_ids() == sorted(found)
    assert await resource.count() == len(found)
    assert {d.id: d.n for d in await resource.query({"n": {"$gt": 0}})} == found
    one_by_one = await resource.get_many(list("abcdef"))
    assert {d.id: d.n for d in one_by_one if isinstance(d, Document)} == found
    return found


async def run_story(store: Store, name: str) -> int:
    """Run the story up to the crash; return the number of steps done."""
    done = 0
    async with Database(connection=store) as database:
        try:
            resource = await database.create_resource(name, {"n": "number|required"})
            for step, _ in STORY:
                await step(resource)
                done += 1
        except Crashed:
            pass
    return done


@pytest.mark.parametrize("replies", [True, False], ids=["before", "after"])
async def test_a_crash_at_any_write_loses_and_duplicates_nothing(
    location: StoreLocation, replies: bool
) -> None:
    """Each record is as before or after the interrupted step, which can be repeated."""
    store = await location.open()
    for changes in range(CHANGES + 1):
        name = f"r{changes}"
        crashing = CrashingStore(store, changes, replies=replies)
        done = await run_story(crashing, name)
        assert (done == len(STORY)) is (changes == CHANGES)
        before = STORY[done - 1][1] if done else {}
        after = STORY[min(done, len(STORY) - 1)][1]
        async with Database(connection=store) as database:
            resource = await database.create_resource(name, {"n": "number|required"})
            found = await find_all(resource)
            for letter in "abcdef":
                assert found.get(letter) in {before.get(letter), after.get(letter)}
            for step, _ in itertools.islice(STORY, done, None):
                try:
                    await step(resource)
                except (Conflict, Incomplete, NotFound):
                    # All or part of it was done before the crash.
                    assert step is STORY[done][0]
            assert await find_all(resource) == STORY[-1][1]
    await store.close()


async def test_an_interrupted_drop_can_be_repeated(location: StoreLocation) -> None:
    """The resource still exists, or is completely gone; dropping it again finishes the drop."""
    store = await location.open()
    for changes in range(6):
        name = f"r{changes}"
        async with Database(connection=store) as database:
            resource = await database.create_resource(name)
            await resource.insert_many([row(x, 1) for x in "abc"])
        crashing = CrashingStore(store, changes, replies=True)
        async with Database(connection=crashing) as database:
            try:
                await database.drop_resource(name)
            except Crashed:
                assert changes < 5
        async with Database(connection=store) as database:
            assert (name in database.resources) is (changes < 5)
            if name in database.resources:
                await database.drop_resource(name)
            assert await (await database.create_resource(name)).list() == []
    await store.close()


async def test_a_batch_reports_what_was_written_when_the_store_goes_away(
    location: StoreLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Unavailable` if nothing was; otherwise which records were, and which to send again."""
    monkeypatch.setattr("jobsync.database.keyspace._MAX_RECORDS", 2)

    class AwayStore(StoreDecorator):
        writes = 0

        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            if self.writes == 0:
                raise Unavailable(self.name, "away")
            self.writes -= 1
            return await super().write(changes)

    store = AwayStore(await location.open())
    store.writes = 1
    async with Database(connection=store) as database:
        resource = await database.create_resource("r")
        batch = [row(x, 1) for x in "abcde"]
        with pytest.raises(Unavailable):
            await resource.insert_many(batch)
        assert await resource.list_ids() == []
        store.writes = 1
        with pytest.raises(Incomplete) as caught:
            await resource.insert_many(batch)
        assert caught.value.written == ("a", "b")
        assert caught.value.unsent == ("c", "d", "e")
        assert isinstance(caught.value.__cause__, Unavailable)
        store.writes = 9
        with pytest.raises(Incomplete) as caught:
            await resource.insert_many(batch)
        assert caught.value.conflicts == ("a", "b")
        assert await resource.list_ids() == ["a", "b", "c", "d", "e"]
        store.writes = 1
        with pytest.raises(Incomplete) as caught:
            await resource.delete_many(list("abcde"))
        assert (caught.value.written, caught.value.unsent) == (("a", "b"), ("c", "d", "e"))
    await store.close()
