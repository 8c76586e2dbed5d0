"""The stores on which the conformance suite runs. A new one is one more case here."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from places import MemoryPlace, Place, SqlitePlace
from places_objects import ObjectsPlace
from places_postgres import PostgresPlace

from jobsync import Store
from jobsync.core.urls import ObjectsUrl, parse_url


@pytest.fixture(params=["memory", "sqlite", "postgres", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A fresh place on each kind of store."""
    match request.param:
        case "memory":
            yield MemoryPlace()
        case "sqlite":
            yield SqlitePlace(tmp_path / "jobs.db")
        case "postgres":
            place = PostgresPlace(request.getfixturevalue("postgres").url)
            yield place
            place.remove()
        case "s3":
            url = parse_url(request.getfixturevalue("bucket_url"))
            assert isinstance(url, ObjectsUrl)
            manners = request.getfixturevalue("manners")
            yield ObjectsPlace(
                url,
                bare_etags=manners.bare_etags,
                conditional_delete=manners.conditional_delete,
            )


@pytest.fixture
async def store(place: Place) -> AsyncIterator[Store]:
    """A store that is open on the place."""
    store = await place.open()
    yield store
    await store.close()
