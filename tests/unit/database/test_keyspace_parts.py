"""The parts in which a batch is written: as many records and bytes as one write may have."""

import itertools
from collections.abc import Sequence

import pytest

from jobsync import Components
from jobsync.database import keyspace as keyspace_module
from jobsync.database.keyspace import Keyspace, create_many, remove_many
from jobsync.stores.contract import Change, Outcome
from jobsync.stores.memory import MemoryStore

_numbers = itertools.count()


class NotingStore(MemoryStore):
    """Notes how many records each write has."""

    def __init__(self, *, is_atomic: bool = True) -> None:
        super().__init__(f"parts-{next(_numbers)}", Components.system())
        self.is_atomic = is_atomic
        self.sizes: list[int] = []

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self.sizes.append(len(changes))
        return await super().write(changes)


def open_keyspace(store: NotingStore) -> Keyspace:
    """Return the keyspace of some records."""
    return Keyspace(lambda: store, "data/things/", Components.system(), "things")


@pytest.mark.parametrize(
    ("is_atomic", "count", "sizes"),
    [
        (True, 5, [5]),
        (True, 6, [5, 1]),
        (True, 11, [5, 5, 1]),
        (False, 3, [3]),
        (False, 4, [3, 1]),
        (False, 9, [3, 3, 3]),
    ],
)
async def test_a_write_has_no_more_records_than_it_may(
    is_atomic: bool, count: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer where each record is a request of its own. Deletions likewise, and names in use."""
    assert (keyspace_module._MAX_RECORDS, keyspace_module._MAX_REQUESTS) == (10_000, 1_000)
    monkeypatch.setattr(keyspace_module, "_MAX_RECORDS", 5)
    monkeypatch.setattr(keyspace_module, "_MAX_REQUESTS", 3)
    store = NotingStore(is_atomic=is_atomic)
    keyspace = open_keyspace(store)
    values = {str(n): n for n in range(count)}
    assert [*(await create_many(keyspace, values)).written] == [*values]
    assert store.sizes == sizes
    store.sizes.clear()
    assert [*(await remove_many(keyspace, [*values, *values])).written] == [*values]
    assert store.sizes == sizes
    store.sizes.clear()
    # Where there are tombstones: what conflicted is read, and written once more.
    assert [*(await create_many(keyspace, values)).written] == [*values]
    assert store.sizes == [*sizes, *sizes]


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([10] * 8, [8]),
        ([40, 40, 20], [3]),
        ([40, 40, 21], [2, 1]),
        ([40, 40, 40, 40, 40], [2, 2, 1]),
        ([60, 60, 30, 10], [1, 3]),
        # One that is too large for any write goes alone: the store refuses it, or not.
        ([10, 200, 10], [1, 1, 1]),
        ([200], [1]),
    ],
)
async def test_a_write_has_no_more_bytes_than_it_may(
    lengths: list[int], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is as large as it can be."""
    monkeypatch.setattr(keyspace_module, "_MAX_BYTES", 100)
    store = NotingStore()
    # Two bytes are the quotes.
    values = {str(n): "x" * (length - 2) for n, length in enumerate(lengths)}
    assert [*(await create_many(open_keyspace(store), values)).written] == [*values]
    assert store.sizes == sizes
