"""Races of real processes on one store: one winner, no lost update, no lockout."""

import asyncio
import itertools
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import racing

from jobsync import open_store

Locate: TypeAlias = Callable[[int], str]


@pytest.fixture(params=["sqlite", "postgres", "s3"])
def locate(request: pytest.FixtureRequest, tmp_path: Path) -> Locate:
    """Returns the URL of the n-th empty store of a kind."""
    match request.param:
        case "sqlite":
            return lambda n: f"sqlite:///{tmp_path / f'{n}.db'}"
        case "postgres":
            url = request.getfixturevalue("postgres").url
            return lambda n: f"{url}?schema={request.node.originalname}_{n}"
        case _:
            url = request.getfixturevalue("bucket_url")
            return lambda n: f"{url}-{n}"


def read(url: str, keys: list[str]) -> list[Any]:
    """Read values."""

    async def ask() -> list[Any]:
        store = await open_store(url)
        records = await store.get_many(keys)
        await store.close()
        return [record and record.value for record in records]

    return asyncio.run(ask())


def test_of_many_creators_one_wins(locate: Locate, rounds: int, proof: Any) -> None:
    """Of many processes and tasks that create one record, one succeeds."""
    races = [(locate(0), f"race/{i}") for i in range(rounds)]
    brought = list(racing.race(racing.create, races, proof.tell))
    winners = [list(itertools.chain.from_iterable(names)) for names in brought]
    assert winners == [[value] for value in read(locate(0), [key for _, key in races])]
    proof.record("creators", url=locate(0).partition(":")[0], rounds=rounds, racers=racing.RACERS)


def test_no_increment_is_lost(locate: Locate, rounds: int, proof: Any) -> None:
    """Concurrent read-change-write loops of several processes all count."""
    races = [(locate(0), f"race/{i}") for i in range(rounds)]
    brought = list(racing.race(racing.increment, races, proof.tell))
    assert [sum(added) for added in brought] == read(locate(0), [key for _, key in races])
    proof.record("increments", url=locate(0).partition(":")[0], rounds=rounds, racers=racing.RACERS)


def test_all_may_connect_first(locate: Locate, rounds: int, proof: Any) -> None:
    """Processes that all connect first to an empty store all succeed."""
    races = [(locate(i), "race/x") for i in range(rounds)]
    for (url, _), keys in zip(
        races, racing.race(racing.connect_at_once, races, proof.tell), strict=True
    ):
        assert sorted(read(url, keys)) == list(range(racing.PROCESSES))
    proof.record("first connects", url=locate(0).partition(":")[0], rounds=rounds)


def test_an_endless_reader_does_not_block_writers(tmp_path: Path, proof: Any) -> None:
    """While a read transaction is open, every process can write."""
    path = tmp_path / "read.db"
    url = f"sqlite:///{path}"
    assert read(url, ["race/x"]) == [None]
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        before = reader.execute("SELECT count(*) FROM jobsync_record").fetchone()
        (added,) = racing.race(racing.increment, [(url, "race/x")], proof.tell)
        assert reader.execute("SELECT count(*) FROM jobsync_record").fetchone() == before
    assert read(url, ["race/x"]) == [sum(added)]
