"""Real processes on one store: one winner, no update lost, nobody locked out."""

import asyncio
import itertools
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import racing

from jobsync import open_store


@pytest.fixture(params=["sqlite"])
def places(request: pytest.FixtureRequest, tmp_path: Path, rounds: int) -> list[str]:
    """As many empty places as there are rounds."""
    return [f"sqlite:///{tmp_path / f'{i}.db'}" for i in range(rounds)]


def read(url: str, key: str) -> Any:
    """Read one value."""

    async def ask() -> Any:
        store = await open_store(url)
        record = await store.get(key)
        await store.close()
        return record and record.value

    return asyncio.run(ask())


def test_of_many_creators_one_wins(places: list[str], proof: Any) -> None:
    """However many processes and tasks create one record, one of them has made it."""
    for url, winners in zip(places, racing.race(racing.create, places, proof.tell), strict=True):
        (winner,) = itertools.chain.from_iterable(winners)
        assert read(url, "race/prize") == winner
    proof.record("creators", rounds=len(places), racers=racing.PROCESSES * racing.TASKS)


def test_no_increment_is_lost(places: list[str], proof: Any) -> None:
    """Concurrent read-change-write loops of several processes all count."""
    for url, added in zip(places, racing.race(racing.increment, places, proof.tell), strict=True):
        assert read(url, "race/count") == sum(added)
    proof.record("increments", rounds=len(places), racers=racing.PROCESSES * racing.TASKS)


def test_all_may_connect_first(places: list[str], proof: Any) -> None:
    """Processes that all connect to a place where nothing is yet all get through."""
    for url, keys in zip(
        places, racing.race(racing.connect_at_once, places, proof.tell), strict=True
    ):
        assert all(read(url, key) is not None for key in keys)
    proof.record("first connects", rounds=len(places), racers=racing.PROCESSES)


def test_a_reader_that_never_finishes_stops_no_writer(tmp_path: Path, proof: Any) -> None:
    """With a read transaction open all the while, every process writes on."""
    path = tmp_path / "read.db"
    url = f"sqlite:///{path}"
    asyncio.run(_prepare(url))
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        before = reader.execute("SELECT count(*) FROM jobsync_record").fetchone()
        ((*added,),) = racing.race(racing.increment, [url], proof.tell)
        assert reader.execute("SELECT count(*) FROM jobsync_record").fetchone() == before
    assert read(url, "race/count") == sum(added)


async def _prepare(url: str) -> None:
    store = await open_store(url)
    await store.create("race/other", 0)
    await store.close()
