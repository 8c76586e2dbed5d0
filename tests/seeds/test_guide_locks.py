"""The guide's query of all locks, when several nodes have made the same pins."""

from typing import Any

import pytest
from guide import SQL, SQLITE_SQL
from servers import Locate
from teams import Team, start_team

_ALL_LOCKS = 4


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_pin_of_several_nodes_is_one_row(kind: str, locate: Locate) -> None:
    """It ends when the last of them ends, and never if one has no end."""
    query = SQL[_ALL_LOCKS] if kind == "postgres" else SQLITE_SQL[_ALL_LOCKS]
    with start_team(locate(kind)) as team:
        jobs = [team.add(name) for name in "abc"]
        for job in jobs:
            job.register_task_locks_bulk([(1, "%", "why"), (2, "%", "why")], expires_in_days=7)
            job.register_task_lock(3, "c")
        jobs[0].register_task_lock(1, "%", "another reason", expires_in_days=7)
        rows = _ask(team, query)
        found = {
            (row["node_pattern"], row["reason"]): sorted(row["registered_by"].split(","))
            for row in rows
        }
        assert found == {
            ("%", "why"): ["a", "b", "c"],
            ("c", None): ["a", "b", "c"],
            ("%", "another reason"): ["a"],
        }
        assert len(rows) == 3
        # One of them has no end.
        jobs[1].register_task_locks_bulk([(1, "%", "why"), (2, "%", "why")])
        (row,) = [row for row in _ask(team, query) if row["reason"] == "why"]
        assert (row["status"], row["expires_at"]) == ("never", None)


def _ask(team: Team, query: str) -> list[dict[str, Any]]:
    with team.make("reader", observer=True) as job:
        cursor = job.connection.execute(query)
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
