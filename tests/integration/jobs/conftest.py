"""Nodes on a store in memory, and empty stores of every kind."""

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from job_nodes import StartNode, start_nodes_on
from servers import Locate

from jobsync import Components, Store, open_store
from jobsync.stores.memory import MemoryStore

_numbers = itertools.count()


@pytest.fixture
def memory() -> Iterator[str]:
    """The URL of an empty store in memory, which lasts as long as the test."""
    name = f"jobs-{next(_numbers)}"
    store = MemoryStore(name, Components.system())
    yield f"memory://{name}"
    del store


@pytest.fixture
async def store(memory: str) -> AsyncIterator[Store]:
    """The store of `memory`."""
    opened = await open_store(memory)
    yield opened
    await opened.close()


@pytest.fixture
async def start_node(memory: str) -> AsyncIterator[StartNode]:
    """Starts nodes on that store."""
    async with AsyncExitStack() as stack:
        yield start_nodes_on(memory, stack)


@pytest.fixture(params=["memory", "sqlite", "postgres", "s3"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """The URL of an empty store of each kind."""
    if request.param == "memory":
        return str(request.getfixturevalue("memory"))
    return locate(request.param)
