"""`jobsync resources list` shows partitions, and how far new ones are."""

from pathlib import Path

import pytest
from terminal import on_terminal, read_json

from jobsync import Components, Database, Put, open_store
from jobsync.database.definition import IndexState
from jobsync.database.index_notes import progress_key
from jobsync.status.resources import read_resources_status


@pytest.fixture
async def url(tmp_path: Path) -> str:
    """A store with two resources, one of which got a partition after its first record."""
    place = f"sqlite:///{tmp_path / 'app.db'}"
    async with Database(place) as database:
        await database.create_resource(
            "users",
            {"city": "string"},
            partitions={"by_place": {"fields": {"city": "string|maxlength:3"}}},
        )
        orders = await database.create_resource("orders", {"placed": "datetime"})
        await orders.insert({"placed": "2026-01-31T08:00:00Z"})
        await database.create_resource(
            "orders", partitions={"by_day": {"fields": {"placed": "date"}}}
        )
    return place


async def test_partitions_are_listed_with_their_fields(url: str) -> None:
    """As they are written in `create_resource`; one of a new resource is ready at once."""
    orders, users = read_json(url, "resources", "list")
    assert users["partitions"] == {
        "by_place": {
            "fields": {"city": "string|maxlength:3"},
            "is_ready": True,
            "progress": "ready",
        }
    }
    assert orders["partitions"]["by_day"]["fields"] == {"placed": "date"}
    lines = on_terminal(url, 120, "resources", "list")
    assert any("by_place (city)" in line and "building" not in line for line in lines)


async def test_a_new_partition_of_existing_records_is_shown_as_building(url: str) -> None:
    """Before its backfill has begun, and with the number of records afterwards."""
    (orders, _) = read_json(url, "resources", "list")
    assert not orders["partitions"]["by_day"]["is_ready"]
    assert orders["partitions"]["by_day"]["progress"] == "not begun"
    await note_progress(url, 1500)
    (orders, _) = read_json(url, "resources", "list")
    assert orders["partitions"]["by_day"]["progress"] == "1,500 records done"
    lines = on_terminal(url, 120, "resources", "list")
    assert any("by_day (placed): building, 1,500 records done" in line for line in lines)


async def note_progress(url: str, done: int) -> None:
    """Store how far the backfill of the new partition is, as a backfill does."""
    store = await open_store(url)
    try:
        orders, _ = await read_resources_status(store, Components.system())
        state: IndexState = orders.partitions[0].state
        await store.write([Put(progress_key(state.key), {"after": "", "done": done})])
    finally:
        await store.close()
