"""What cannot be decoded is reported once, and hides nothing else."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from jobsync import Corrupt, Events, Invalid, Put, Record
from jobsync.events import Event
from jobsync.stores.corruption_log import (
    CorruptionLog,
    RecordSetAside,
    convert_record,
    read_each,
    read_existing,
)
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore


class RecordedEvents(Events):
    """Keeps what is emitted."""

    def __init__(self) -> None:
        super().__init__()
        self.emitted: list[Event] = []

    def emit(self, event: Event) -> None:
        self.emitted.append(event)


def test_each_record_is_reported_once_for_each_reason() -> None:
    """In the order in which they are found, however often; by each store itself."""
    events = RecordedEvents()
    log = CorruptionLog("store", events)
    pairs = [("n/a", "one"), ("n/b", "one"), ("n/a", "two"), ("n/b", "two")]
    for key, reason in (*pairs, *pairs[::-1], *pairs):
        log.report(Corrupt(key, reason))
    assert events.emitted == [
        RecordSetAside(store="store", key=key, reason=reason) for key, reason in pairs
    ]
    CorruptionLog("other", events).report(Corrupt("n/a", "one"))
    assert events.emitted[4:] == [RecordSetAside(store="other", key="n/a", reason="one")]


def test_the_others_are_decoded() -> None:
    """Those that are None or corrupt are left out; only the latter are reported."""

    def decode(number: int) -> int | None:
        if number % 3 == 0:
            raise Corrupt(f"n/{number}", "three")
        return None if number % 3 == 1 else number

    events = RecordedEvents()
    log = CorruptionLog("store", events)
    assert log.read_all(decode, range(9)) == [2, 5, 8]
    assert len(events.emitted) == 3
    assert (log.read(decode, 2), log.read(decode, 1), log.read(decode, 0)) == (2, None, None)
    assert len(events.emitted) == 3


def test_a_value_of_another_kind_is_corrupt() -> None:
    """The error names the record."""
    record = Record("n/a", {"n": "x"}, "A" * 12, 1, 0, 1, "A" * 12)
    assert convert_record(record, dict[str, str]) == {"n": "x"}
    with pytest.raises(Corrupt) as caught:
        convert_record(record, dict[str, int])
    assert caught.value.key == "n/a"


class Checked(msgspec.Struct, frozen=True):
    """A value with a check of its own."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise Invalid("n", self.n, "must be 0 or more", "use 0")


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        ({"n": "x"}, "Expected `int`, got `str`"),
        ({}, "missing required field `n`"),
        ([5], "Expected `object`, got `array`"),
        (None, "Expected `object`, got `null`"),
        ({"n": -1}, "n must be 0 or more (got -1)"),
    ],
)
def test_a_value_that_breaks_a_rule_is_corrupt_with_the_reason(value: Any, detail: str) -> None:
    """Of its type, or of a check of its own: a damaged record is no mistake of the caller."""
    assert convert_record(Record("n/a", {"n": 0}, "v", 1, 0, 1, "A" * 12), Checked) == Checked(0)
    with pytest.raises(Corrupt) as caught:
        convert_record(Record("n/a", value, "v", 1, 0, 1, "A" * 12), Checked)
    assert caught.value.key == "n/a"
    assert detail in caught.value.detail


class DamagedStore(StoreDecorator):
    """Cannot decode some records."""

    def __init__(self, damaged: Sequence[str]) -> None:
        super().__init__(MemoryStore())
        self._damaged = damaged
        self.requests = 0

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        self.requests += 1
        for key in keys:
            if key in self._damaged:
                raise Corrupt(key, "damaged")
        return await super().get_many(keys, tombstones=tombstones)


async def test_every_record_is_read_that_can_be() -> None:
    """Whichever are damaged, missing or deleted; in one request if none is damaged."""
    keys = [f"n/{name}" for name in "abcde"]
    for damaged in itertools.chain.from_iterable(
        itertools.combinations(keys, count) for count in range(len(keys) + 1)
    ):
        store, found = DamagedStore(damaged), list[str]()
        await store.inner.write([Put(key, 1) for key in keys[:4]])
        deleted = await store.inner.get("n/b")
        assert deleted is not None
        await store.inner.delete(deleted)

        def report(corrupt: Corrupt, found: list[str] = found) -> None:
            found.append(corrupt.key)

        read = await read_each(store, keys, report)
        assert list(read) == [key for key in keys if key not in damaged]
        assert {key: record and record.deleted for key, record in read.items()} == {
            key: None if key == "n/e" else key == "n/b" for key in keys if key not in damaged
        }
        assert found == list(damaged)
        assert store.requests == 1 or damaged
        assert await read_each(store, [], report) == {}
        existing = await read_existing(store, keys, report)
        assert list(existing) == [
            key for key in keys if key not in damaged and key not in {"n/b", "n/e"}
        ]
