"""By which clock `jobsync ttl run` judges what has expired."""

from typing import Any

import msgspec
import pytest
from chance import FakeClock

from jobsync.cli.ttl import sweep_resources
from jobsync.components import Components
from jobsync.core.clock import Wall
from jobsync.core.expiry import ExpiryRule
from jobsync.database.database import Database
from jobsync.errors import Unavailable
from jobsync.stores.contract import Head
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

NOW = 1_800_000_000.0
"""The time of the server."""


class ClockedServer(StoreDecorator):
    """Can be asked for its time."""

    async def now(self) -> Wall | None:
        return Wall(NOW)


class ListingServer(StoreDecorator):
    """Tells its time in listings only, as object stores do."""

    async def now(self) -> Wall | None:
        return None

    async def heads(self, prefix: str, **options: Any) -> list[Head]:
        heads = await super().heads(prefix, **options)
        return [msgspec.structs.replace(head, written_at=NOW) for head in heads]


async def sweep(server: type[StoreDecorator], ahead: float) -> list[str]:
    """Sweep from a machine whose clock is so far ahead; return the ids that are left."""
    machine = FakeClock()
    machine.wall_seconds = NOW + ahead
    components = msgspec.structs.replace(Components.system(), clock=machine)
    store = server(MemoryStore(components=components))
    async with Database(connection=store, components=components) as database:
        sessions = await database.define_resource("sessions", rules=[ExpiryRule()])
        await sessions.insert_many(
            [{"id": "live", "expires_at": NOW + 60}, {"id": "old", "expires_at": NOW - 60}]
        )
        try:
            await sweep_resources(database, None)
        finally:
            left = await sessions.list_ids()
    return left


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
async def test_the_stores_clock_decides_where_it_has_one(ahead: float) -> None:
    """An operator whose clock is an hour ahead removes nothing that lives."""
    assert await sweep(ClockedServer, ahead) == ["live"]


@pytest.mark.parametrize("ahead", [-20.0, 0.0, 20.0])
async def test_an_object_stores_time_is_measured(ahead: float) -> None:
    """A record is written, listed and removed."""
    assert await sweep(ListingServer, ahead) == ["live"]


@pytest.mark.parametrize(("ahead", "words"), [(-3600.0, "s behind"), (3600.0, "s ahead of")])
async def test_a_wrong_clock_is_refused_on_an_object_store(ahead: float, words: str) -> None:
    """As in the fleet: it would date what it writes wrongly."""
    with pytest.raises(Unavailable, match=words):
        await sweep(ListingServer, ahead)
