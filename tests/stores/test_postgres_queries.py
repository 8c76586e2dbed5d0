"""A query on PostgreSQL is answered by the server, which sends what matches and no more."""

from typing import Any

import psycopg
import pytest
from places_postgres import PostgresPlace
from servers import PostgresServer

from jobsync import Database
from jobsync.stores.postgrespool import PostgresPool


async def test_a_filtered_query_does_not_fetch_all(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, full_scale: bool
) -> None:
    """One statement; by its plan the server drops what does not match."""
    total = 100_000 if full_scale else 10_000
    place = PostgresPlace(postgres.url)
    store = await place.open()
    async with Database(connection=store) as database:
        sessions = await database.create_resource("sessions", {"expires_at": "number"})
        others = await database.create_resource("others")
        for start in range(0, total, 10_000):
            await sessions.insert_many(
                [{"expires_at": n, "active": n % 2 == 0} for n in range(start, start + 10_000)]
            )
        await others.insert_many([{"expires_at": n, "active": True} for n in range(1000)])
        sent: list[tuple[str, Any]] = []
        run = PostgresPool.run

        async def watch(self: PostgresPool, query: str, parameters: Any = ()) -> Any:
            sent.append((query, parameters))
            return await run(self, query, parameters)

        monkeypatch.setattr(PostgresPool, "run", watch)
        found = await sessions.query({"expires_at": {"$lt": 20}, "active": True})
        monkeypatch.undo()
        assert [session.expires_at for session in found] == list(range(0, 20, 2))
    await store.close()
    ((statement, parameters),) = sent
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        # Statistics as they are in a database that has run for a while.
        connection.execute(f'ANALYZE "{place.schema}".jobsync_record')
        query = f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}"
        ((plan,),) = connection.execute(query, parameters).fetchall()
    nodes = list(_walk(plan[0]["Plan"]))
    # Numbers are compared with some slack; the last word has the reference matcher.
    sent_back = nodes[0]["Actual Rows"]
    assert len(found) <= sent_back <= len(found) + 1
    # Where several processes of the server scan together, each tells its average.
    removed = sum(
        (node.get("Rows Removed by Filter", 0) + 1) * node["Actual Loops"] for node in nodes
    )
    assert removed >= total - sent_back
    place.remove()


def _walk(node: dict[str, Any]) -> Any:
    yield node
    for child in node.get("Plans", ()):
        yield from _walk(child)
