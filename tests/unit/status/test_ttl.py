"""Which records expire and when, from the names of index entries alone."""

from collections.abc import AsyncIterator

import pytest

from jobsync import Components, Database, NotFound
from jobsync.core.clock import Wall
from jobsync.core.expiry import ExpiryRule
from jobsync.status.ttl import MAX_COUNTED, TTLStatus, describe_rule, read_ttl_status
from jobsync.stores.memory import MemoryStore
from jobsync.stores.metered import S3_TARIFF, Meter, MeteredStore

NOW = 1_800_000_000.0
AT_FIELD = ExpiryRule()


class FixedStore(MemoryStore):
    """A store whose clock stands still, years ahead of this machine's."""

    async def now(self) -> Wall:
        """Return the same time always."""
        return Wall(NOW)


@pytest.fixture
async def database() -> AsyncIterator[Database]:
    """A database with a store that has a clock of its own."""
    async with Database(connection=FixedStore()) as database:
        yield database


async def add(database: Database, resource: str, *expiries: float) -> None:
    """Add records that expire so many seconds from now, each named by that number."""
    records = await database.define_resource(resource, rules=[AT_FIELD])
    await records.insert_many(
        [{"id": f"{offset:g}", "expires_at": NOW + offset} for offset in expiries]
    )


async def read(database: Database) -> TTLStatus:
    """Return the status as a command reads it."""
    return await read_ttl_status(database.store, database.components)


async def test_what_is_due_is_counted_by_the_clock_of_the_store(database: Database) -> None:
    """Years before it is due by this machine's clock; what expires now is due, too."""
    await add(database, "sessions", -30, -10, 0, 0.001, 60)
    (sessions,) = await (await read(database)).resources()
    assert (sessions.backlog, sessions.is_counted) == (3, True)
    assert sessions.oldest_due == NOW - 30
    assert sessions.next_expiry == NOW + 0.001
    assert sessions.seen == NOW


@pytest.mark.parametrize("limit", [1, 2, 3, 9])
@pytest.mark.parametrize("resource", [None, "a", "b"])
async def test_a_limit_counts_over_all_resources(
    database: Database, resource: str | None, limit: int
) -> None:
    """The first of all of them, or of the one that is chosen."""
    await add(database, "a", -40, -20, 10, 30)
    await add(database, "b", -30, -10, 20, 40)
    status = await read(database)
    offsets = {"a": [-40, -20, 10, 30], "b": [-30, -10, 20, 40]}
    chosen = sorted(
        offset for name in offsets if resource in (None, name) for offset in offsets[name]
    )
    for found, expected in (
        (await status.due(resource, limit), [each for each in chosen if each < 0]),
        (await status.next(resource, limit), [each for each in chosen if each > 0]),
    ):
        assert [each.expires_at - NOW for each in found] == expected[:limit]
        assert all(float(each.id) in offsets[each.resource] for each in found)


async def test_nothing_is_due(database: Database) -> None:
    """Without records, and without due ones."""
    await add(database, "empty")
    await add(database, "sessions", 5)
    empty, sessions = await (await read(database)).resources()
    assert (empty.backlog, empty.oldest_due, empty.next_expiry) == (0, None, None)
    assert (sessions.backlog, sessions.oldest_due, sessions.next_expiry) == (0, None, NOW + 5)


async def test_resources_without_a_rule_are_left_out(database: Database) -> None:
    """They cannot be chosen either, and the error names those that can."""
    await add(database, "sessions", 5)
    await database.create_resource("users")
    status = await read(database)
    assert [each.resource for each in await status.resources()] == ["sessions"]
    with pytest.raises(NotFound, match="sessions"):
        await status.resources("users")


async def test_records_are_listed_in_the_order_of_expiry(database: Database) -> None:
    """Of one resource, or of all together; never more than the limit."""
    await add(database, "sessions", -3, -1, 2, 9)
    await add(database, "tokens", -2, 1)
    status = await read(database)
    due, later = await status.due(None, 2), await status.next(None, 10)
    assert [(each.resource, each.id) for each in due] == [("sessions", "-3"), ("tokens", "-2")]
    assert [each.id for each in later] == ["1", "2", "9"]
    assert [each.expires_at for each in await status.next("sessions", 1)] == [NOW + 2]


async def test_records_that_expire_at_once_are_listed_by_resource_then_by_id(
    database: Database,
) -> None:
    """In the same order each time, whatever the order in which they were written."""
    for resource in ("b", "a", "c"):
        records = await database.define_resource(resource, rules=[AT_FIELD])
        for name, offset in (("z", -5), ("x", -5), ("y", 5), ("w", 5)):
            await records.insert({"id": f"{name}{resource}", "expires_at": NOW + offset})
    status = await read(database)
    for found, ids in ((await status.due(None, 99), "xz"), (await status.next(None, 99), "wy")):
        expected = [(resource, f"{name}{resource}") for resource in "abc" for name in ids]
        assert [(each.resource, each.id) for each in found] == expected


async def test_a_resource_that_is_not_known_is_refused_with_the_one_that_was_meant(
    database: Database,
) -> None:
    """The error lists the others too, in order."""
    for resource in ("tokens", "sessions"):
        await add(database, resource, 5)
    status = await read(database)
    for name, hint in (("session", "Did you mean sessions?"), ("tokns", "Did you mean tokens?")):
        with pytest.raises(NotFound) as caught:
            status.choose(name)
        assert hint in str(caught.value)
    with pytest.raises(NotFound, match="Known: sessions, tokens"):
        status.choose("qqq")


async def test_a_long_backlog_is_not_counted_to_its_end(database: Database) -> None:
    """The count is a bound then, and says so."""
    await add(database, "sessions", *range(-MAX_COUNTED - 5, 0), 10)
    (sessions,) = await (await read(database)).resources()
    assert (sessions.backlog, sessions.is_counted) == (MAX_COUNTED, False)
    assert sessions.oldest_due == NOW - MAX_COUNTED - 5
    assert sessions.next_expiry == NOW + 10


async def test_only_names_of_entries_are_read(database: Database) -> None:
    """By S3's tariff: the definitions, then two listings for a resource, whatever it holds."""
    await add(database, "sessions", *range(-100, 100))
    meter = Meter(S3_TARIFF)
    components = Components.system()
    store = MeteredStore(database.store, meter, components.clock)
    status = await read_ttl_status(store, components)
    await status.resources()
    assert meter["get"].calls == meter["get_many"].calls == meter["write"].calls == 0
    assert (meter["scan"].requests, meter["heads"].requests) == (2, 2)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (ExpiryRule(), "at expires_at, then deleted"),
        (ExpiryRule(ttl=3600), "1 h after _created_at, then deleted"),
        (ExpiryRule(ttl=90), "90 s after _created_at, then deleted"),
        (ExpiryRule(ttl=1234.5), "1,234.5 s after _created_at, then deleted"),
        (ExpiryRule(ttl=90 * 60), "90 min after _created_at, then deleted"),
        (ExpiryRule(ttl=36 * 3600), "36 h after _created_at, then deleted"),
        (ExpiryRule(ttl=1000 * 86_400), "1,000 d after _created_at, then deleted"),
        (ExpiryRule(ttl=0.5), "0.5 s after _created_at, then deleted"),
        (
            ExpiryRule(ttl=30 * 86_400, field="seen", on_expire="soft-delete", delete_field="gone"),
            "30 d after seen, then marked in gone",
        ),
        (
            ExpiryRule(field="ends", on_expire="archive", archive_resource="old"),
            "at ends, then moved to old",
        ),
        (
            ExpiryRule(ttl=120, on_expire="callback"),
            "2 min after _created_at, then a callback decides",
        ),
    ],
)
def test_a_rule_is_described_in_words(rule: ExpiryRule, words: str) -> None:
    """When, and what then."""
    assert describe_rule(rule) == words
