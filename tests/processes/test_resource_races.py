"""Races of real processes on one resource: nothing is lost, and all agree."""

import asyncio
from typing import Any

import pytest
import racing
import racing_resources
from servers import Locate

from jobsync import Database


@pytest.fixture(params=["sqlite", "postgres", "s3"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """An empty store of each kind."""
    return locate(request.param)


def test_processes_that_update_with_a_version_lose_nothing(
    url: str, rounds: int, proof: Any
) -> None:
    """A process that read an older version is refused, reads again, and counts once."""
    names = [f"c{i}" for i in range(max(rounds // 4, 3))]
    races = [(url, name) for name in names]
    brought = list(racing.race(racing_resources.add_if_version, races, proof.tell))

    async def read() -> list[int]:
        async with Database(url) as database:
            return [found.n for found in await database.resources.counters.get_many(names) if found]

    assert asyncio.run(read()) == [sum(added) for added in brought]
    proof.record("updates if_version", url=url.partition(":")[0], rounds=len(names))


def test_processes_that_define_one_resource_agree(url: str, proof: Any) -> None:
    """Each adds a field; all processes see all fields."""
    races = [(url, f"r{i}") for i in range(3)]
    for brought in racing.race(racing_resources.define_at_once, races, proof.tell):
        assert brought == [[f"f{n}" for n in range(racing.PROCESSES)]] * racing.PROCESSES
