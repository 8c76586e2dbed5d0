"""Nodes on a store in memory, and empty places of every kind."""

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from hiring import Hire, hire_on
from servers import Locate

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
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """An empty place of each kind."""
    if request.param == "memory":
        return str(request.getfixturevalue("memory"))
    return locate(request.param)
