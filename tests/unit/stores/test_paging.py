"""All that is below a prefix is read page by page, with no more requests than needed."""

from collections.abc import Sequence

import pytest

from jobsync import Components
from jobsync.stores.contract import Put, Store
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.stores.metered import Meter, MeteredStore
from jobsync.stores.paging import drop_all, head_pages, scan_pages, split_pages


async def _fill(count: int) -> tuple[Store, Meter]:
    components = Components.system()
    meter = Meter()
    store = MeteredStore(MemoryStore(components=components), meter, components.clock)
    await store.write([Put(f"paged/{n}", {"n": n}) for n in range(count)])
    return store, meter


@pytest.mark.parametrize(
    ("count", "limit", "sizes", "requests"),
    [
        (0, None, [], 1),
        (3, None, [3], 1),
        (4, None, [4], 2),
        (9, None, [4, 4, 1], 3),
        (9, 0, [], 0),
        (9, 4, [4], 1),
        (9, 6, [4, 2], 2),
        (3, 6, [3], 1),
    ],
)
async def test_pages_are_full_but_for_the_last(
    count: int, limit: int | None, sizes: list[int], requests: int
) -> None:
    """A short page is the last one, and none is empty."""
    store, meter = await _fill(count)
    scanned = [page async for page in scan_pages(store, "paged/", size=4, limit=limit)]
    listed = [page async for page in head_pages(store, "paged/", size=4, limit=limit)]
    assert [len(page) for page in scanned] == [len(page) for page in listed] == sizes
    keys = [f"paged/{n}" for n in range(count)][:limit]
    assert [record.key for page in scanned for record in page] == keys
    assert [head.key for page in listed for head in page] == keys
    assert meter["scan"].calls == meter["heads"].calls == requests


async def test_pages_begin_after_a_key_and_are_filtered() -> None:
    """As one request would do."""
    store, _ = await _fill(9)
    pages = scan_pages(store, "paged/", after="paged/2", where={"n": {"$ne": 5}}, size=2)
    assert [record.value["n"] async for page in pages for record in page] == [3, 4, 6, 7, 8]
    heads = head_pages(store, "paged/", after="paged/2", size=4, limit=5)
    assert [head.key[-1] async for page in heads for head in page] == list("34567")


async def test_everything_below_a_prefix_is_dropped() -> None:
    """Nothing else is."""
    store, _ = await _fill(9)
    await store.create("other/1", {})
    assert await drop_all(store, "paged/") == 9
    assert await drop_all(store, "paged/") == 0
    assert [head.key for head in await store.heads("other/")] == ["other/1"]


async def test_everything_is_dropped_and_counted_also_beyond_a_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page is what one request lists."""
    monkeypatch.setattr("jobsync.stores.paging.PAGE_SIZE", 4)
    store, _ = await _fill(9)
    assert await drop_all(store, "paged/") == 9
    assert await store.heads("paged/") == []


class BusyStore(StoreDecorator):
    """Others write below the same prefix: before, between and after what was listed."""

    def __init__(self, inner: Store, keys: list[str]) -> None:
        super().__init__(inner)
        self._keys = keys

    async def drop(self, keys: Sequence[str]) -> None:
        await self.inner.drop(keys)
        if self._keys:
            await self.inner.create(self._keys.pop(), {})


async def test_what_is_written_meanwhile_is_dropped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is in the order, and counted; what was deleted leaves a tombstone."""
    monkeypatch.setattr("jobsync.stores.paging.PAGE_SIZE", 4)
    store, _ = await _fill(9)
    deleted = await store.get("paged/3")
    assert deleted is not None
    await store.delete(deleted)
    busy = BusyStore(store, ["paged/5", "paged/9", "paged/0", "paged/1"])
    assert await drop_all(busy, "paged/") == 8 + 4
    assert await store.heads("paged/") == []
    assert await store.get("paged/3", tombstones=True) is not None


async def test_pages_end_early_for_those_who_want_no_more() -> None:
    """Nothing is read ahead; tombstones take no place on a page."""
    store, meter = await _fill(9)
    for key in ("paged/1", "paged/4"):
        record = await store.get(key)
        assert record is not None
        await store.delete(record)
    async for page in scan_pages(store, "paged/", after="paged/0", size=3):
        assert [record.key[-1] for record in page] == list("235")
        break
    async for heads in head_pages(store, "paged/", after="paged/0", size=3):
        assert [head.key[-1] for head in heads] == list("235")
        break
    assert meter["scan"].calls == meter["heads"].calls == 1


def test_a_sequence_is_split() -> None:
    """The last part may be shorter."""
    assert list(split_pages("abcde", 2)) == ["ab", "cd", "e"]
    assert list(split_pages([])) == []
