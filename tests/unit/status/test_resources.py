"""Resources and how far their indexes are, from what is stored."""

from typing import Any

import pytest

from jobsync import Components, Database, Put
from jobsync.core.expiry import ExpiryRule
from jobsync.database.index_notes import progress_key
from jobsync.status import resources as module
from jobsync.status.resources import ResourceStatus, read_resources_status
from jobsync.stores.memory import MemoryStore
from jobsync.stores.paging import scan_pages

PARTITIONS: dict[str, Any] = {
    "by_city": {"fields": {"city": "string"}},
    "by_day": {"fields": {"placed": "date"}},
}


async def read(store: MemoryStore) -> list[ResourceStatus]:
    """Return the status as a command reads it."""
    return await read_resources_status(store, Components.system())


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
async def test_the_resources_of_all_pages_are_shown(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """By name, however many fit on a page."""
    store = MemoryStore()
    names = [f"r{number}" for number in range(5)]
    async with Database(connection=store) as database:
        for name in reversed(names):
            await database.create_resource(name)
    monkeypatch.setattr(
        module, "scan_pages", lambda store, prefix: scan_pages(store, prefix, size=size)
    )
    assert [each.definition.name for each in await read(store)] == names


@pytest.mark.parametrize(
    ("done", "shown"),
    [
        (None, "not begun"),
        (0, "0 records done"),
        (7, "7 records done"),
        (1500, "1,500 records done"),
    ],
)
async def test_each_index_has_its_own_progress(done: int | None, shown: str) -> None:
    """Partitions and the expiry alike: until they are ready, how many records they know."""
    store = MemoryStore()
    async with Database(connection=store) as database:
        resource = await database.create_resource("orders", {"city": "string", "placed": "date"})
        await resource.insert({"city": "Rome"})
        await database.create_resource("orders", partitions=PARTITIONS)
        await database.define_resource("orders", rules=[ExpiryRule()])
    indexes = await read_with_note(store, "", None)
    assert len(indexes) == 3
    for chosen in indexes:
        found = await read_with_note(store, chosen.state.key, done)
        progress = {each.state.key: each.progress for each in found}
        expected = dict.fromkeys(progress, "not begun")
        assert progress == {**expected, chosen.state.key: shown}


async def read_with_note(store: MemoryStore, key: str, done: int | None) -> list[Any]:
    """Return the indexes while one backfill has looked at so many records."""
    if done is not None:
        await store.write([Put(progress_key(key), {"after": "", "done": done})])
    (status,) = await read(store)
    note = await store.get(progress_key(key))
    if note is not None:
        await store.delete(note)
    return [*status.partitions, status.expiry]
