"""Notes on indexes: their ages by the store's clock, without anything left behind."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from chance import FakeClock
from fleets import BilledStore

from jobsync import Components
from jobsync.database.index_notes import (
    NOTES,
    list_old_notes,
    measure_ages,
    progress_key,
    remove_notes,
    since_key,
)
from jobsync.stores.contract import Change, Delete, Outcome


class Bucket(BilledStore):
    """A store whose clients may die before they drop a record."""

    is_dying = False

    async def drop(self, keys: Sequence[str]) -> None:
        """Drop records, or die before that."""
        if self.is_dying:
            raise asyncio.CancelledError
        await super().drop(keys)


class Stage:
    """One process, its clock and its bucket."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.components = msgspec.structs.replace(Components.system(), clock=self.clock)
        self.bucket = Bucket(components=self.components)

    async def list_keys(self) -> list[str]:
        """Return the keys of all notes and probes."""
        return [head.key for head in await self.bucket.heads(NOTES)]

    async def die_while_measuring(self) -> None:
        """Measure the age of a note; end before the probe is dropped."""
        self.bucket.is_dying = True
        with pytest.raises(asyncio.CancelledError):
            await measure_ages(self.bucket, await self.bucket.scan(NOTES), self.components)
        self.bucket.is_dying = False


async def test_ages_are_those_of_the_listing() -> None:
    """Less the second that a listing may leave out."""
    stage = Stage()
    note = await stage.bucket.create(since_key("a.1.x"), {})
    stage.clock.wall_seconds += 60
    assert await measure_ages(stage.bucket, [note], stage.components) == [59.0]
    assert await stage.list_keys() == [note.key]


async def test_probes_of_processes_that_died_are_removed_after_an_hour() -> None:
    """By whoever measures next. A partition may be called as a probe is."""
    stage = Stage()
    note = await stage.bucket.create(since_key("probe-1.1.x"), {})
    await stage.die_while_measuring()
    assert len(await stage.list_keys()) == 2
    stage.clock.wall_seconds += 3500
    await measure_ages(stage.bucket, [note], stage.components)
    assert len(await stage.list_keys()) == 2
    stage.clock.wall_seconds += 200
    await measure_ages(stage.bucket, [note], stage.components)
    assert await stage.list_keys() == [note.key]


@pytest.mark.parametrize("times", range(3))
async def test_notes_are_removed_though_others_write_them_meanwhile(times: int) -> None:
    """Whichever of both, and however often; those on other indexes stay."""

    class SharedBucket(Bucket):
        left = times

        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            if self.left and isinstance(changes[0], Delete):
                self.left -= 1
                record = await self.get(changes[self.left % len(changes)].key)
                assert record is not None
                await super().write([record.replace({"left": self.left})])
            return await super().write(changes)

    stage = Stage()
    bucket = SharedBucket(components=stage.components)
    for index in ("a.1.x", "a.1.y"):
        for key in (progress_key(index), since_key(index)):
            await bucket.create(key, {})
    await remove_notes(bucket, "a.1.x")
    assert bucket.left == 0
    left = [note.key for note in await bucket.scan(NOTES)]
    assert left == [progress_key("a.1.y"), since_key("a.1.y")]


async def test_notes_are_old_after_an_hour() -> None:
    """A process that works on an index writes its note again."""
    stage = Stage()
    old = await stage.bucket.create(since_key("a.1.x"), {})
    stage.clock.wall_seconds += 3000
    await stage.bucket.create(since_key("b.1.x"), {})
    stage.clock.wall_seconds += 700
    assert await list_old_notes(stage.bucket, stage.components) == [old]
