"""The stores on which the conformance suite runs. A new one is one more case here."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from store_locations import (
    MemoryLocation,
    ObjectsLocation,
    PostgresLocation,
    SqliteLocation,
    StoreLocation,
)

from jobsync import Store
from jobsync.core.urls import ObjectsUrl, parse_url


@pytest.fixture(params=["memory", "sqlite", "postgres", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreLocation]:
    """A fresh location on each kind of store."""
    match request.param:
        case "memory":
            yield MemoryLocation()
        case "sqlite":
            yield SqliteLocation(tmp_path / "jobs.db")
        case "postgres":
            location = PostgresLocation(request.getfixturevalue("postgres").url)
            yield location
            location.remove()
        case "s3":
            url = parse_url(request.getfixturevalue("bucket_url"))
            assert isinstance(url, ObjectsUrl)
            quirks = request.getfixturevalue("quirks")
            yield ObjectsLocation(
                url,
                bare_etags=quirks.bare_etags,
                conditional_delete=quirks.conditional_delete,
            )


@pytest.fixture
async def store(location: StoreLocation) -> AsyncIterator[Store]:
    """A store that is open on the location."""
    store = await location.open()
    yield store
    await store.close()
