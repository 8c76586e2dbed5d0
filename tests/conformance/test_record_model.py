"""In random sequences of calls every store gives the same results as a dictionary."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from store_locations import StoreLocation

from jobsync import Applied, Conflicted, Put, Record, Store
from jobsync.core.clock import SystemClock
from jobsync.core.keys import parent
from jobsync.stores.contract import TRAIL_LENGTH, Change, Delete, Outcome

STEPS = {"memory": 1000, "sqlite": 400, "postgres": 250, "s3": 80}
"""How many steps there are on each store: requests to a server take longer."""

KEYS = ["n/a", "n/a-", "n/b", "n/c/d", "n/c/e", "m", "session/a", "session/b", "role/x"]
LEVELS = ["n/", "n/c/", "session/", "role/", "o/"]


class RecordModel:
    """The records of a store, tombstones too, and all versions that there ever were."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.versions: dict[str, list[Record]] = {key: [] for key in KEYS}

    def find(self, key: str, *, tombstones: bool) -> Record | None:
        """Return the record of a key."""
        found = self.records.get(key)
        return None if found is None or (found.deleted and not tombstones) else found

    def list_level(self, prefix: str, *, dead: bool = False) -> list[Record]:
        """Return the live or the dead records of one level, in order."""
        found = (self.records[key] for key in sorted(self.records) if parent(key) == prefix)
        return [record for record in found if record.deleted is dead]

    def is_base(self, change: Change) -> bool:
        """Whether a change is based on the current record."""
        current, base = self.records.get(change.key), change.base
        if current is None or base is None:
            return current is base
        return current.version == base.version

    def check_write(self, changes: Sequence[Change], outcomes: Sequence[Outcome]) -> None:
        """Compare the outcomes of a batch with what must become of it."""
        for change, outcome in zip(changes, outcomes, strict=True):
            if not self.is_base(change):
                assert outcome == Conflicted()
                continue
            assert isinstance(outcome, Applied)
            self._check_record(change, outcome.record)
            self.records[change.key] = outcome.record
            self.versions[change.key].append(outcome.record)

    def _check_record(self, change: Change, record: Record) -> None:
        base = change.base
        trail = [record.nonce, *(base.trail.split(" ") if base else [])]
        assert record.trail.split(" ") == trail[:TRAIL_LENGTH]
        assert record.key == change.key
        assert record.seq == (base.seq + 1 if base else 1)
        assert record.epoch == (change.epoch or (base.epoch if base else 0))
        assert record.format == change.format
        assert record.deleted is isinstance(change, Delete)
        assert record.value == (change.value if isinstance(change, Put) else None)
        for earlier in self.versions[record.key]:
            assert earlier.version != record.version


class RecordWalk:
    """Random calls, each of one of several stores on the same records."""

    def __init__(self, stores: list[Store], seed: int) -> None:
        self._stores = stores
        self._dice = random.Random(seed)
        self._model = RecordModel()
        self._calls = (
            *(self._write,) * 6,
            *(self._read, self._list, self._scan, self._age, self._bury, self._drop, self._drop),
        )

    async def run(self, steps: int) -> None:
        """Make calls, and compare all results with the model's."""
        for _ in range(steps):
            await self._dice.choice(self._calls)(self._dice.choice(self._stores))
        found = await self._stores[0].get_many(KEYS, tombstones=True)
        assert found == [self._model.records.get(key) for key in KEYS]

    def _draw_change(self, key: str) -> Change:
        """Return a change that is based on any version that there ever was, or on none."""
        dice, current = self._dice, self._model.records.get(key)
        versions = self._model.versions[key]
        # A key that was removed and created again has had other versions with the same count.
        twins = [old for old in versions if current and old.seq == current.seq]
        base = dice.choice([None, current, current, *twins[-3:], *versions[-2:]])
        least = base or Record(key, None, "", 0, 0, 1, "")
        epoch = dice.choice([None, least.epoch, least.epoch + 1])
        form = least.format + (dice.random() < 0.1)
        if base is not None and dice.random() < 0.4:
            return base.delete(epoch=epoch, format=form)
        return Put(key, {"n": dice.randrange(4)}, base, epoch, form)

    async def _write(self, store: Store) -> None:
        keys = self._dice.sample(KEYS, self._dice.choice([1, 1, 2, 4, len(KEYS)]))
        changes = [self._draw_change(key) for key in keys]
        self._model.check_write(changes, await store.write(changes))

    async def _read(self, store: Store) -> None:
        keys = self._dice.choices(KEYS, k=self._dice.choice([1, 1, 3, 12]))
        tombstones = self._dice.random() < 0.5
        found = await store.get_many(keys, tombstones=tombstones)
        assert found == [self._model.find(key, tombstones=tombstones) for key in keys]

    def _draw_range(self) -> tuple[str, str, str, int]:
        prefix = self._dice.choice(LEVELS)
        bounds = ["", *(key for key in KEYS if parent(key) == prefix), f"{prefix}~"]
        after, until = self._dice.choice(bounds), self._dice.choice(bounds)
        return prefix, after, until, self._dice.choice([1, 2, 1000])

    async def _list(self, store: Store) -> None:
        prefix, after, until, limit = self._draw_range()
        heads = await store.heads(prefix, after=after, until=until, limit=limit)
        wanted = [
            (record.key, record.version)
            for record in self._model.list_level(prefix)
            if record.key > after and (not until or record.key < until)
        ]
        assert [(head.key, head.version) for head in heads] == wanted[:limit]

    async def _scan(self, store: Store) -> None:
        prefix, after, _, limit = self._draw_range()
        where = self._dice.choice([None, {"n": {"$gte": 2}}])
        wanted = [
            record
            for record in self._model.list_level(prefix)
            if record.key > after and (where is None or record.value["n"] >= 2)
        ]
        assert await store.scan(prefix, after=after, limit=limit, where=where) == wanted[:limit]

    async def _age(self, store: Store) -> None:
        key = self._dice.choice(KEYS)
        for version in self._model.versions[key][-6:]:
            age = await store.age(version)
            is_current = version == self._model.records.get(key)
            assert (age is not None) == (is_current and not store.is_billed)

    async def _bury(self, store: Store) -> None:
        prefix, limit = self._dice.choice(LEVELS), self._dice.choice([1, 2, 1000])
        is_possible = store.traits.get("conditional_delete", True)
        dead = self._model.list_level(prefix, dead=True) if is_possible else []
        assert await store.bury(prefix, limit=limit) == 0
        assert await store.bury(prefix, older_than=-60.0, limit=limit) == min(limit, len(dead))
        left = await store.get_many([record.key for record in dead], tombstones=True)
        gone = [record for record, found in zip(dead, left, strict=True) if found is None]
        assert len(gone) == min(limit, len(dead))
        for record in gone:
            del self._model.records[record.key]

    async def _drop(self, store: Store) -> None:
        keys = self._dice.sample(KEYS, self._dice.choice([0, 1, 2, 4]))
        await store.drop(keys)
        for key in keys:
            self._model.records.pop(key, None)


@pytest.mark.parametrize("seed", [1, 2])
async def test_records_are_those_of_a_dictionary(
    location: StoreLocation, seed: int, request: pytest.FixtureRequest, full_scale: bool
) -> None:
    """Whatever was deleted, removed and created again, and whichever version a write names."""
    stores = [await location.open(), await location.open()]
    steps = STEPS[request.node.callspec.params["location"]]
    await RecordWalk(stores, seed).run(steps * (20 if full_scale else 1) // 2)
    for store in stores:
        await store.close()


STREAMS = ["h/a", "h/a/b", "session/h"]
WRITERS = ["ca547d85fb8b", "000000000000", "ffffffffffff"]


class HistoryWalk:
    """Random calls on histories, beside a dictionary of their entries."""

    def __init__(self, stores: list[Store], seed: int, now: float) -> None:
        self._stores = stores
        self._dice = random.Random(seed)
        self._now = now
        self._sent: list[tuple[str, str, list[Any]]] = []
        self._entries: dict[str, dict[str, Any]] = {stream: {} for stream in STREAMS}
        self._calls = (self._append, self._append, self._resend, self._read, self._discard)

    async def run(self, steps: int) -> None:
        """Make calls, and compare all results with those of the dictionary."""
        for _ in range(steps):
            await self._dice.choice(self._calls)(self._dice.choice(self._stores))
        for stream in STREAMS:
            found = {entry.id: entry.value for entry in await self._stores[0].read(stream)}
            assert found == self._entries[stream]

    async def _append(self, store: Store) -> None:
        # Hundreds of seconds apart, so that the time of this test plays no part.
        at = int(1000 * (self._now - 100 - 1000 * self._dice.randrange(5)))
        batch = f"{at + self._dice.randrange(3):013d}-{self._dice.choice(WRITERS)}"
        values = [{"n": self._dice.randrange(4)} for _ in range(self._dice.choice([0, 1, 2, 7]))]
        if all(batch != sent for _, sent, _ in self._sent):
            self._sent.append((self._dice.choice(STREAMS), batch, values))
            await self._send(store, *self._sent[-1])

    async def _resend(self, store: Store) -> None:
        if self._sent:
            await self._send(store, *self._dice.choice(self._sent))

    async def _send(self, store: Store, stream: str, batch: str, values: list[Any]) -> None:
        await store.append(stream, values, batch=batch)
        self._entries[stream] |= {f"{batch}-{i:05d}": value for i, value in enumerate(values)}

    async def _read(self, store: Store) -> None:
        stream, limit = self._dice.choice(STREAMS), self._dice.choice([1, 3, 7, 1000])
        where = self._dice.choice([None, {"n": {"$lt": 2}}])
        everything = sorted(self._entries[stream].items())
        after = self._dice.choice(["", *(entry_id for entry_id, _ in everything)])
        wanted = [
            (entry_id, value)
            for entry_id, value in everything
            if entry_id > after and (where is None or value["n"] < 2)
        ]
        found = await store.read(stream, after=after, limit=limit, where=where)
        assert [(entry.id, entry.value) for entry in found] == wanted[:limit]
        assert [entry.at.seconds for entry in found] == [
            int(entry_id[:13]) / 1000 for entry_id, _ in wanted[:limit]
        ]

    async def _discard(self, store: Store) -> None:
        stream, age = self._dice.choice(STREAMS), self._dice.choice([600.0, 2600.0, 4600.0])
        end = f"{int(1000 * (self._now - age)):013d}"
        entries = self._entries[stream]
        old = [entry_id for entry_id in entries if entry_id < end]
        assert await store.discard(stream, older_than=age) == len(old)
        for entry_id in old:
            del entries[entry_id]


async def test_histories_are_those_of_a_dictionary(
    location: StoreLocation, request: pytest.FixtureRequest, full_scale: bool
) -> None:
    """Whoever appends what when, sends it again, reads any page of it, and discards what is old."""
    stores = [await location.open(), await location.open()]
    steps = STEPS[request.node.callspec.params["location"]]
    walk = HistoryWalk(stores, 1, SystemClock().wall().seconds)
    await walk.run(steps * (20 if full_scale else 1) // 2)
    for store in stores:
        await store.close()
