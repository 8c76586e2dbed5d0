"""By which clock `jobsync ttl run` judges what has expired, and what its commands tell."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from chance import FakeClock
from click.testing import CliRunner

from jobsync.cli import ttl as module
from jobsync.cli.render import Column
from jobsync.cli.ttl import sweep_resources, ttl
from jobsync.components import Components
from jobsync.core.clock import Wall
from jobsync.core.expiry import ExpiryRule
from jobsync.database.database import Database
from jobsync.database.definition import IndexState
from jobsync.errors import Invalid, Unavailable
from jobsync.status.resources import IndexStatus
from jobsync.status.ttl import ExpiryStatus
from jobsync.stores.contract import Head
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

NOW = 1_800_000_000.0
"""The time of the server."""


class ClockedServer(StoreDecorator):
    """Can be asked for its time."""

    async def now(self) -> Wall | None:
        return Wall(NOW)


class ListingServer(StoreDecorator):
    """Tells its time in listings only, as object stores do."""

    async def now(self) -> Wall | None:
        return None

    async def heads(self, prefix: str, **options: Any) -> list[Head]:
        heads = await super().heads(prefix, **options)
        return [msgspec.structs.replace(head, written_at=NOW) for head in heads]


async def sweep(server: type[StoreDecorator], ahead: float) -> list[str]:
    """Sweep from a machine whose clock is so far ahead; return the ids that are left."""
    machine = FakeClock()
    machine.wall_seconds = NOW + ahead
    components = msgspec.structs.replace(Components.system(), clock=machine)
    store = server(MemoryStore(components=components))
    async with Database(connection=store, components=components) as database:
        sessions = await database.define_resource("sessions", rules=[ExpiryRule()])
        await sessions.insert_many(
            [{"id": "live", "expires_at": NOW + 60}, {"id": "old", "expires_at": NOW - 60}]
        )
        try:
            await sweep_resources(database, None)
        finally:
            left = await sessions.list_ids()
    return left


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
async def test_the_stores_clock_decides_where_it_has_one(ahead: float) -> None:
    """An operator whose clock is an hour ahead removes nothing that lives."""
    assert await sweep(ClockedServer, ahead) == ["live"]


@pytest.mark.parametrize("ahead", [-20.0, 0.0, 20.0])
async def test_an_object_stores_time_is_measured(ahead: float) -> None:
    """A record is written, listed and removed."""
    assert await sweep(ListingServer, ahead) == ["live"]


@pytest.mark.parametrize(("ahead", "words"), [(-3600.0, "s behind"), (3600.0, "s ahead of")])
async def test_a_wrong_clock_is_refused_on_an_object_store(ahead: float, words: str) -> None:
    """As in the fleet: it would date what it writes wrongly."""
    with pytest.raises(Unavailable, match=words):
        await sweep(ListingServer, ahead)


@pytest.mark.parametrize(
    ("errors", "code"), [([], 0), ([0, 0], 0), ([0, 1], 1), ([2, 0], 1), ([3, 4], 1)]
)
def test_one_record_that_fails_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, errors: list[int], code: int
) -> None:
    """Of whatever resource; what was done is shown all the same."""
    counts = {"deleted": 5, "soft_deleted": 0, "archived": 0, "note": None}
    rows = [{"resource": f"r{count}", "errors": count, **counts} for count in errors]
    monkeypatch.setattr(module, "run_on_database", lambda _, __: rows)
    done = CliRunner().invoke(ttl, ["run", "--json"])
    assert (done.exit_code, json.loads(done.stdout)) == (code, rows)


@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("is_ready", [False, True])
@pytest.mark.parametrize("words", [[], ["list"]])
def test_all_that_is_known_of_an_expiry_is_listed(
    monkeypatch: pytest.MonkeyPatch, words: list[str], is_ready: bool, is_counted: bool
) -> None:
    """Without a command, too; the numbers are those of the index."""
    rule = ExpiryRule(ttl=60.0, field="seen")
    state = IndexState("index", rule, is_ready)
    status = ExpiryStatus(
        resource="sessions",
        rule=rule,
        backlog=3,
        is_counted=is_counted,
        oldest_due=NOW - 5,
        next_expiry=NOW + 7,
        index=IndexStatus(rule=rule, state=state, done=4),
        seen=NOW,
    )
    monkeypatch.setattr(module, "_run_on_ttl", lambda _, __: [status])
    assert json.loads(CliRunner().invoke(ttl, [*words, "--json"]).stdout) == [
        {
            "resource": "sessions",
            "due": 3,
            "is_counted": is_counted,
            "oldest_due": NOW - 5,
            "next_expiry": NOW + 7,
            "rule": "1 min after seen, then deleted",
            "on_expire": "hard-delete",
            "is_ready": is_ready,
            "progress": "ready" if is_ready else "4 records done",
        }
    ]


def test_the_group_has_its_own_help() -> None:
    """Which names its commands; an option of `list` needs no command."""
    shown = CliRunner().invoke(ttl, ["--help"])
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in ("backlog", "list", "next", "run"))
    assert CliRunner().invoke(ttl, ["--no-such-option"]).exit_code == 2


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0"), (999, "999"), (1000, "1,000+"), (None, "-")]
)
def test_a_count_at_its_limit_has_a_plus(count: object, shown: str) -> None:
    """There may be more."""
    assert module._format_due(count) == shown


@pytest.mark.parametrize("words", [["backlog"], ["next"], ["backlog", "a"], ["next", "a"]])
def test_a_resource_is_chosen_by_its_name(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Without one all are asked for; the limit is that of the command."""
    asked: list[tuple[Any, ...]] = []

    class Status:
        async def resources(self, *arguments: Any) -> list[Any]:
            asked.append(("resources", *arguments))
            return []

        async def due(self, *arguments: Any) -> list[Any]:
            asked.append(("due", *arguments))
            return []

        async def next(self, *arguments: Any) -> list[Any]:
            asked.append(("next", *arguments))
            return []

    monkeypatch.setattr(module, "_run_on_ttl", lambda _, work: asyncio.run(work(Status())))
    assert CliRunner().invoke(ttl, [*words, "--limit", "7"]).exit_code == 0
    command, *rest = words
    chosen = rest[0] if rest else None
    if command == "next":
        assert asked == [("next", chosen, 7)]
    else:
        assert asked == [("resources", chosen), ("due", chosen, 7)]


@pytest.mark.parametrize("words", [["run"], ["run", "sessions"]])
def test_what_is_cleaned_is_chosen_by_its_name(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Without one, all that expires is."""
    asked: list[tuple[object, ...]] = []

    async def sweep(*arguments: object) -> list[Any]:
        asked.append(arguments)
        return []

    monkeypatch.setattr(module, "sweep_resources", sweep)
    monkeypatch.setattr(module, "run_on_database", lambda _, work: asyncio.run(work("db")))
    assert CliRunner().invoke(ttl, words).exit_code == 0
    assert asked == [("db", words[1] if words[1:] else None)]


@pytest.mark.parametrize("chosen", [None, "plain", "asked"])
async def test_what_a_callback_decides_is_left_to_the_fleet(chosen: str | None) -> None:
    """It is skipped beside others, and refused if it alone is meant; others are left alone, too."""
    store = ClockedServer(MemoryStore())
    async with Database(connection=store) as database:
        for name, rule in (
            ("asked", ExpiryRule(on_expire="callback")),
            ("marked", ExpiryRule(on_expire="soft-delete")),
            ("plain", ExpiryRule()),
        ):
            resource = await database.define_resource(name, rules=[rule])
            old = [{"id": f"{name}{n}", "expires_at": NOW - 60} for n in range(2)]
            await resource.insert_many(old[: 2 if name == "plain" else 1])
        if chosen == "asked":
            with pytest.raises(Invalid, match=r"^RESOURCE cannot be cleaned here: a callback"):
                await sweep_resources(database, chosen)
            return
        rows = {row.pop("resource"): row for row in await sweep_resources(database, chosen)}
        none = dict.fromkeys(("deleted", "soft_deleted", "archived", "kept", "errors"), 0)
        nothing: dict[str, object] = {**none, "note": None}
        every = {
            "asked": {**nothing, "note": "skipped: a callback decides"},
            "marked": {**nothing, "soft_deleted": 1},
            "plain": {**nothing, "deleted": 2},
        }
        assert rows == (every if chosen is None else {chosen: every[chosen]})
        assert await database.resource("asked").list_ids() == ["asked0"]
        assert await database.resource("plain").list_ids() == []


async def test_a_record_that_could_not_be_handled_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its resource, apart from the answer; so is what went wrong for all of them."""

    class Sweep:
        def __init__(self, *arguments: Any) -> None:
            *_, self.listener, self.counts = arguments

        async def run(self) -> None:
            self.listener.on_error("a b", "it is locked")
            self.listener.on_error(None, "the store is gone")

    monkeypatch.setattr("jobsync.ttl.sweep.ResourceSweep", Sweep)
    async with Database(connection=ClockedServer(MemoryStore())) as database:
        await database.define_resource("sessions", rules=[ExpiryRule()])
        await sweep_resources(database, None)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "jobsync: sessions 'a b': it is locked",
        "jobsync: sessions: the store is gone",
    ]


def test_ages_are_told_by_the_clock_that_decides() -> None:
    """Not by this machine's."""
    rule = ExpiryRule(ttl=60.0, field="seen")
    status = ExpiryStatus(
        resource="sessions",
        rule=rule,
        backlog=3,
        is_counted=True,
        oldest_due=NOW - 300,
        next_expiry=NOW + 300,
        index=IndexStatus(rule=rule, state=IndexState("index", rule, True), done=4),
        seen=NOW,
    )
    columns = {each.name: each for each in map(_to_column, module._build_columns([status]))}
    assert columns["oldest_due"].format(status.oldest_due) == "5 min ago"
    assert columns["next_expiry"].format(status.next_expiry) == "in 5 min"


def _to_column(column: Column | str) -> Column:
    return column if isinstance(column, Column) else Column(column)
