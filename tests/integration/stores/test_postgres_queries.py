"""Queries on PostgreSQL: what the server reads, and what it sends."""

from typing import Any

import psycopg
import pytest
from servers import PostgresServer
from store_locations import PostgresLocation

from jobsync import Database
from jobsync.stores.postgres.pool import PostgresPool

TOTAL = 100_000

# Filled by the server, as `insert_many` would, but many times faster.
FILL = """
INSERT INTO "{schema}".jobsync_record (key, value, seq, epoch, format, trail)
SELECT 'data/sessions/' || to_char(n, 'FM000000'), json_build_object(
  'id', to_char(n, 'FM000000'), 'expires_at', n, 'active', n %% 2 = 0,
  '_created_at', 1.5, '_updated_at', 1.5
)::text, 1, 0, 1, 'abcdefghijkl'
FROM generate_series(0, %s - 1) AS n
"""


async def test_a_filtered_query_does_not_fetch_all(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One statement; its plan shows that the server drops the other rows."""
    place = PostgresLocation(postgres.url)
    store = await place.open()
    async with Database(connection=store) as database:
        sessions = await database.create_resource("sessions", {"expires_at": "number"})
        others = await database.create_resource("others")
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute(FILL.format(schema=place.schema), [TOTAL])
        await others.insert_many([{"expires_at": n, "active": True} for n in range(1000)])
        sent: list[tuple[str, Any]] = []
        run = PostgresPool.run

        async def watch(self: PostgresPool, query: str, parameters: Any = ()) -> Any:
            # Notifications of the inserts may be sent meanwhile.
            if "pg_notify" not in query:
                sent.append((query, parameters))
            return await run(self, query, parameters)

        monkeypatch.setattr(PostgresPool, "run", watch)
        found = await sessions.query({"expires_at": {"$lt": 20}, "active": True})
        monkeypatch.undo()
        assert await sessions.count() == TOTAL
        assert [session.expires_at for session in found] == list(range(0, 20, 2))
    await store.close()
    ((statement, parameters),) = sent
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        # Statistics as in a database that has run for a while.
        connection.execute(f'ANALYZE "{place.schema}".jobsync_record')
        query = f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}"
        ((plan,),) = connection.execute(query, parameters).fetchall()
    nodes = list(_walk(plan[0]["Plan"]))
    # Numbers are compared with some slack; the reference matcher decides.
    sent_back = nodes[0]["Actual Rows"]
    assert len(found) <= sent_back <= len(found) + 1
    # In a parallel scan each process reports its average.
    removed = sum(
        (node.get("Rows Removed by Filter", 0) + 1) * node["Actual Loops"] for node in nodes
    )
    assert removed >= TOTAL - sent_back
    place.remove()


async def test_a_listing_of_a_range_reads_only_the_range(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One statement; its plan shows that no row outside of the range is read."""
    place = PostgresLocation(postgres.url)
    store = await place.open()
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(FILL.format(schema=place.schema), [TOTAL])
        connection.execute(f'ANALYZE "{place.schema}".jobsync_record')
    sent: list[tuple[str, Any]] = []
    run = PostgresPool.run

    async def watch(self: PostgresPool, query: str, parameters: Any = ()) -> Any:
        sent.append((query, parameters))
        return await run(self, query, parameters)

    monkeypatch.setattr(PostgresPool, "run", watch)
    level = "data/sessions/"
    found = await store.heads(level, after=f"{level}040000", until=f"{level}040021", limit=50)
    monkeypatch.undo()
    assert [head.key for head in found] == [f"{level}{n:06d}" for n in range(40_001, 40_021)]
    await store.close()
    ((statement, parameters),) = sent
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        query = f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}"
        ((plan,),) = connection.execute(query, parameters).fetchall()
    nodes = list(_walk(plan[0]["Plan"]))
    (read,) = [node for node in nodes if node.get("Index Name") == "jobsync_record_pkey"]
    assert f"(key < '{level}040021'::text)" in read["Index Cond"]
    assert [node["Actual Rows"] for node in nodes] == [20] * len(nodes)
    assert not any(node.get("Rows Removed by Filter") for node in nodes)
    place.remove()


def _walk(node: dict[str, Any]) -> Any:
    yield node
    for child in node.get("Plans", ()):
        yield from _walk(child)
