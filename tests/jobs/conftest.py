"""Nodes on a store in memory, and empty places of every kind."""

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hiring import Hire, hire_on

from jobsync import Components, Store, open_store
from jobsync.stores.memory import MemoryStore

_numbers = itertools.count()


@pytest.fixture
def memory() -> Iterator[str]:
    """The URL of an empty store in memory, which stays as long as the test."""
    name = f"jobs-{next(_numbers)}"
    kept = MemoryStore(name, Components.system())
    yield f"memory://{name}"
    del kept


@pytest.fixture
async def store(memory: str) -> AsyncIterator[Store]:
    """That store."""
    opened = await open_store(memory)
    yield opened
    await opened.close()


@pytest.fixture
async def hire(memory: str) -> AsyncIterator[Hire]:
    """Makes nodes on that store."""
    async with AsyncExitStack() as stack:
        yield hire_on(memory, stack)


@pytest.fixture(params=["memory", "sqlite", "postgres", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of each kind."""
    match request.param:
        case "memory":
            return str(request.getfixturevalue("memory"))
        case "sqlite":
            return f"sqlite:///{tmp_path / 'jobs.db'}"
        case "postgres":
            return f"{request.getfixturevalue('postgres').url}?schema=jobs_{next(_numbers)}"
        case _:
            return str(request.getfixturevalue("bucket_url"))
