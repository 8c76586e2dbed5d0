"""`jobsync ttl` on every store: what is due, what expires next, and by which rule."""

import pytest
import servers
from terminal import on_terminal, read_json, read_tsv, run

from jobsync import Components, Database
from jobsync.core.expiry import ExpiryRule

NOW = Components.system().clock.wall().seconds
FAR = 86_400.0
"""Seconds that no test takes."""


@pytest.fixture(params=["sqlite", "postgres", "s3"])
async def url(request: pytest.FixtureRequest, locate: servers.Locate) -> str:
    """A store with two resources whose records expire, and one whose do not."""
    place = locate(request.param)
    async with Database(place) as database:
        sessions = await database.define_resource("sessions", rules=[ExpiryRule()])
        tokens = await database.define_resource("tokens", rules=[ExpiryRule(ttl=FAR)])
        await database.create_resource("users")
        await sessions.insert_many(
            [{"id": name, "expires_at": NOW + offset} for name, offset in EXPIRIES.items()]
        )
        await tokens.insert({"id": "t1"})
    return place


EXPIRIES = {"late": FAR, "old": -FAR, "later": 2 * FAR, "recent": -FAR / 2}


async def test_the_list_has_rules_backlogs_and_the_next_expiry(url: str) -> None:
    """With and without the word `list`; in a pipe and on a terminal."""
    sessions, tokens = read_json(url, "ttl")
    assert sessions["rule"] == "at expires_at, then deleted"
    assert (sessions["due"], sessions["is_counted"]) == (2, True)
    assert sessions["oldest_due"] == pytest.approx(NOW - FAR, abs=0.002)
    assert sessions["next_expiry"] == pytest.approx(NOW + FAR, abs=0.002)
    assert (tokens["due"], tokens["oldest_due"], tokens["is_ready"]) == (0, None, True)
    assert read_json(url, "ttl", "list") == [sessions, tokens]
    (row, _) = read_tsv(run(url, "ttl").stdout)
    assert row["due"] == "2"
    lines = on_terminal(url, 120, "ttl")
    assert any("sessions" in line and "24 h ago" in line and "in 24 h" in line for line in lines)


async def test_the_backlog_has_the_records_that_expired_first(url: str) -> None:
    """Of all resources, or of one."""
    found = read_json(url, "ttl", "backlog")
    assert [(row["resource"], row["due"]) for row in found["backlog"]] == [
        ("sessions", 2),
        ("tokens", 0),
    ]
    assert [row["id"] for row in found["records"]] == ["old", "recent"]
    found = read_json(url, "ttl", "backlog", "sessions", "--limit", "1")
    assert [row["id"] for row in found["records"]] == ["old"]
    assert read_json(url, "ttl", "backlog", "tokens")["records"] == []


async def test_next_has_the_records_that_expire_next(url: str) -> None:
    """Never those that are due."""
    assert [row["id"] for row in read_json(url, "ttl", "next")] == ["late", "t1", "later"]
    (row,) = read_json(url, "ttl", "next", "sessions", "--limit", "1")
    assert row["expires_at"] == pytest.approx(NOW + FAR, abs=0.002)


async def test_a_resource_without_expiry_is_refused_with_the_others(url: str) -> None:
    """Exit code 1, as for every unknown name."""
    done = run(url, "ttl", "next", "users")
    assert done.returncode == 1
    assert "sessions, tokens" in done.stderr


async def test_a_rule_for_existing_records_is_shown_as_building(locate: servers.Locate) -> None:
    """What is counted is not complete then."""
    place = locate("sqlite")
    async with Database(place) as database:
        users = await database.create_resource("users")
        await users.insert({"expires_at": NOW - FAR})
        await database.define_resource("users", rules=[ExpiryRule()])
    (row,) = read_json(place, "ttl")
    assert (row["due"], row["is_ready"], row["progress"]) == (0, False, "not begun")
    assert any("not begun" in line for line in on_terminal(place, 120, "ttl"))
