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


async def test_a_record_that_expires_beyond_the_calendar_is_shown(url: str) -> None:
    """Milliseconds instead of seconds are a common mistake, which people want to see."""
    async with Database(url) as database:
        await database.resource("sessions").insert({"id": "ms", "expires_at": NOW * 1000})
    lines = on_terminal(url, 120, "ttl", "next", "sessions")
    assert any("ms" in line and "after the year 9999" in line for line in lines)
    assert any("later" in line for line in lines)


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


async def test_run_deals_with_what_has_expired_by_the_stored_rules(url: str) -> None:
    """In one resource, or in all; what has not expired stays."""
    async with Database(url) as database:
        rules = {
            "users": ExpiryRule(on_expire="soft-delete", delete_field="gone_at"),
            "orders": ExpiryRule(on_expire="archive", archive_resource="old_orders"),
        }
        for name, rule in rules.items():
            # A new name: an index of existing records would have to be built first.
            records = await database.define_resource(f"{name}2", rules=[rule])
            await records.insert({"id": "1", "expires_at": NOW - FAR})
    (row,) = read_json(url, "ttl", "run", "sessions")
    assert (row["resource"], row["deleted"], row["errors"]) == ("sessions", 2, 0)
    rows = {row["resource"]: row for row in read_json(url, "ttl", "run")}
    assert (rows["users2"]["soft_deleted"], rows["orders2"]["archived"]) == (1, 1)
    assert rows["sessions"]["deleted"] == rows["tokens"]["deleted"] == 0
    async with Database(url) as database:
        resources = database.resources
        assert await resources["sessions"].list_ids() == ["late", "later"]
        assert await resources["tokens"].count() == 1
        (user,) = await resources["users2"].list()
        assert user["gone_at"] == pytest.approx(NOW, abs=FAR / 2)
        assert await resources["orders2"].count() == 0
        (order,) = await resources["old_orders"].list()
        assert order["original_id"] == "1"
    assert read_json(url, "ttl", "backlog")["records"] == []


async def test_a_callback_cannot_run_from_the_command_line(locate: servers.Locate) -> None:
    """By name it is refused; among others it is left out, and said to be."""
    place = locate("sqlite")
    async with Database(place) as database:
        rule = ExpiryRule(on_expire="callback")
        users = await database.define_resource("users", rules=[rule])
        await users.insert({"id": "1", "expires_at": NOW - FAR})
    done = run(place, "ttl", "run", "users")
    assert done.returncode == 2
    assert "a callback decides" in done.stderr
    (row,) = read_json(place, "ttl", "run")
    assert (row["deleted"], row["note"]) == (0, "skipped: a callback decides")
    assert [row["id"] for row in read_json(place, "ttl", "backlog")["records"]] == ["1"]
