"""The verbs of resources give the same results on every store."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, get_args

import pytest
from chance import FakeClock, SeededRandomness
from store_locations import StoreLocation

from jobsync import (
    Components,
    Conflict,
    Corrupt,
    Database,
    Document,
    Event,
    Events,
    Incomplete,
    Invalid,
    InvalidRecord,
    NotFound,
    Resource,
    Unavailable,
)
from jobsync.components import Ids
from jobsync.core.keys import escape
from jobsync.database.hooks import Verb
from jobsync.stores.metered import S3_TARIFF, Meter, MeteredStore

SESSION = {
    "user_id": "string|required",
    "expires_at": "number|required",
    "active": "boolean|default:true",
    "device": {"os": "string", "size": {"x": "number", "y": "number"}},
}
ANN = {"id": "ann", "user_id": "u1", "expires_at": 100}
BOB = {"id": "bob", "user_id": "u2", "expires_at": 200, "active": False}
CEM = {"id": "cem", "user_id": "u1", "expires_at": 300, "device": {"os": "linux"}}


@pytest.fixture
async def database(location: StoreLocation, clock: FakeClock) -> AsyncIterator[Database]:
    """A connected database with a clock that the test controls."""
    components = Components(clock=clock, randomness=SeededRandomness(2), events=Events())
    store = await location.open()
    async with Database(connection=store, components=components) as database:
        yield database
    await store.close()


@pytest.fixture
async def sessions(database: Database) -> Resource:
    """A resource without records."""
    return await database.create_resource(name="sessions", attributes=SESSION)


def content(document: Document | None) -> dict[str, Any]:
    """Return a record's own fields."""
    assert document is not None
    return {name: value for name, value in document.items() if not name.startswith("_")}


async def test_an_inserted_record_is_read_back(sessions: Resource) -> None:
    """Complete, with defaults, times and a version."""
    inserted = await sessions.insert(ANN)
    found = await sessions.get("ann")
    assert found == inserted
    assert content(found) == {**ANN, "active": True}
    assert found is not None
    assert found.user_id == found["user_id"] == "u1"
    assert found._created_at == found["_updated_at"] == 1_700_000_000
    assert found._version == inserted["_version"]


async def test_a_missing_id_is_generated_even_where_required(database: Database) -> None:
    """Each record without an id, or with None, gets a UUID that sorts by time."""
    tasks = await database.create_resource("tasks", {"id": "uuid|required", "n": "number"})
    inserted = [await tasks.insert({"n": 0}), await tasks.insert({"id": None, "n": 1})]
    inserted += [await tasks.upsert({"n": 2}), await tasks.upsert({"id": None, "n": 2})]
    inserted += await tasks.insert_many([{"n": 3}, {"n": 4}, {"id": None, "n": 5}])
    assert len({task.id for task in inserted}) == 7
    batch = [task.n for task in await tasks.list() if task.n >= 3]
    assert batch == [3, 4, 5]


@pytest.mark.parametrize("schema", [{}, {"id": "string"}, {"id": "string|optional"}], ids=str)
async def test_a_missing_id_is_generated_where_the_schema_does_not_require_one(
    database: Database, schema: dict[str, str]
) -> None:
    """Nor says anything of ids: alone, in a batch, and where the record may be there."""
    tasks = await database.create_resource("tasks", {**schema, "n": "number"})
    inserted = [
        await tasks.insert({"id": None, "n": 1}),
        await tasks.upsert({"id": None, "n": 2}),
        *await tasks.insert_many([{"id": None, "n": 3}, {"n": 4}]),
    ]
    assert {task.id: task.n for task in await tasks.list()} == {
        task.id: number for number, task in enumerate(inserted, 1)
    }


async def test_every_invalid_field_is_listed_and_nothing_is_written(sessions: Resource) -> None:
    """A refused record is not stored; the error lists all its problems."""
    bad = {"id": "x", "expires_at": "soon", "active": 1, "_mine": 1}
    with pytest.raises(InvalidRecord) as caught:
        await sessions.insert(bad)
    assert {problem.field for problem in caught.value.problems} == {
        *("user_id", "expires_at", "active", "_mine")
    }
    with pytest.raises(InvalidRecord, match=r"\[1\].user_id is missing \(got None"):
        await sessions.insert_many([ANN, bad])
    with pytest.raises(InvalidRecord, match=r"id must be text \(got 5"):
        await sessions.insert({**ANN, "id": 5})
    with pytest.raises(Invalid, match="must be a dictionary"):
        await sessions.insert("ann")  # type: ignore[arg-type]
    assert await sessions.count() == 0


@pytest.mark.parametrize("bad", [2**70, float("nan"), {1: 2}, "\ud800"])
@pytest.mark.parametrize("size", [2, 1_500, 10_001])
async def test_a_value_that_is_not_json_is_refused_before_anything_is_written(
    database: Database, size: int, bad: object
) -> None:
    """Also the last of so many that they are written in parts."""
    loose = await database.create_resource("loose", {})
    rows: list[dict[str, object]] = [{"id": f"{n:05d}"} for n in range(size)]
    rows[-1]["value"] = bad
    with pytest.raises((Invalid, InvalidRecord), match="value"):
        await loose.insert_many(rows)
    assert await loose.count() == 0


async def test_unknown_fields_are_stored_unless_strict(database: Database) -> None:
    """With `strict`, fields that the schema does not describe are refused."""
    loose = await database.create_resource("loose", {"n": "number"})
    assert (await loose.insert({"n": 1, "more": [1, {"a": None}]})).more == [1, {"a": None}]
    strict = await database.create_resource("strict", {"number": "number"}, strict=True)
    with pytest.raises(
        InvalidRecord, match=r"numbr is not in the schema: did you mean number\? \(got 1"
    ):
        await strict.insert({"numbr": 1})
    inserted = await strict.insert({"number": 1})
    with pytest.raises(InvalidRecord, match=r"numbr .*\(got 1"):
        await strict.update(inserted.id, {"numbr": 1})
    assert (await strict.replace(inserted.id, {**inserted, "number": 2})).number == 2


async def test_an_id_in_use_cannot_be_inserted(sessions: Resource) -> None:
    """The second insert is a conflict and changes nothing."""
    inserted = await sessions.insert(ANN)
    with pytest.raises(Conflict, match="sessions/ann"):
        await sessions.insert({**ANN, "user_id": "u9"})
    assert await sessions.get("ann") == inserted


async def test_a_deleted_id_can_be_used_again(sessions: Resource) -> None:
    """For single records and for batches."""
    first = await sessions.insert(ANN)
    assert await sessions.delete("ann") is True
    assert await sessions.delete("ann") is False
    assert await sessions.get("ann") is None
    again = await sessions.insert({**ANN, "user_id": "u9"})
    assert again._version != first._version
    assert content(await sessions.get("ann")) == {**ANN, "user_id": "u9", "active": True}
    await sessions.delete("ann")
    await sessions.insert_many([ANN, BOB])
    assert await sessions.list_ids() == ["ann", "bob"]


async def test_update_merges(sessions: Resource, clock: FakeClock) -> None:
    """Objects are merged recursively; all other values are replaced."""
    await sessions.insert({**CEM, "device": {"os": "linux", "size": {"x": 1, "y": 2}}, "tags": [1]})
    await clock.sleep(5)
    changed = await sessions.update(
        "cem", {"active": False, "device": {"size": {"x": 9}}, "tags": [2], "note": None}
    )
    assert content(changed) == {
        **CEM,
        "active": False,
        "device": {"os": "linux", "size": {"x": 9, "y": 2}},
        "tags": [2],
        "note": None,
    }
    assert await sessions.get("cem") == changed
    assert changed._updated_at == changed._created_at + 5


async def test_replace_drops_all_old_fields(sessions: Resource, clock: FakeClock) -> None:
    """A replaced record has the new fields, the old id and the old creation time."""
    before = await sessions.insert({**CEM, "note": "x"})
    await clock.sleep(5)
    after = await sessions.replace("cem", {"user_id": "u3", "expires_at": 1})
    assert content(after) == {"id": "cem", "user_id": "u3", "expires_at": 1, "active": True}
    assert (after._created_at, after._updated_at) == (before._created_at, before._created_at + 5)
    # A document that was read can be written back: library fields are ignored.
    assert content(await sessions.replace("cem", before)) == content(before)


async def test_library_fields_of_newer_code_survive(
    location: StoreLocation, sessions: Resource
) -> None:
    """Fields with a leading _ that this code does not know stay after every write."""
    await sessions.insert(ANN)
    text = location.read_value("data/sessions/ann")
    assert text is not None
    location.corrupt("data/sessions/ann", text[:-1] + ',"_later":1}')
    assert (await sessions.update("ann", {"active": False}))["_later"] == 1
    assert (await sessions.replace("ann", ANN))["_later"] == 1


async def test_a_change_must_respect_the_schema_and_the_id(sessions: Resource) -> None:
    """A refused change leaves the record as it was."""
    inserted = await sessions.insert(ANN)
    with pytest.raises(InvalidRecord, match=r"active .*\(got 'yes'"):
        await sessions.update("ann", {"active": "yes"})
    with pytest.raises(InvalidRecord, match=r"user_id is missing \(got None"):
        await sessions.replace("ann", {"expires_at": 1})
    with pytest.raises(InvalidRecord, match=r"id differs from 'ann' \(got 'bob'"):
        await sessions.update("ann", {"id": "bob"})
    assert await sessions.get("ann") == inserted


async def test_a_missing_record_cannot_be_changed(sessions: Resource) -> None:
    """Whether it never existed or was deleted."""
    await sessions.insert(ANN)
    await sessions.delete("ann")
    for name in ("ann", "nobody"):
        with pytest.raises(NotFound, match=f"no record of sessions '{name}'"):
            await sessions.update(name, {"active": False})
        with pytest.raises(NotFound):
            await sessions.replace(name, ANN)
    with pytest.raises(Invalid, match=r"id must be text \(got 5\)"):
        await sessions.get(5)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"id .*\(got ''\)"):
        await sessions.get("")


async def test_an_outdated_version_is_a_conflict(sessions: Resource) -> None:
    """With `if_version` no other writer's change is overwritten."""
    first = await sessions.insert(ANN)
    second = await sessions.update("ann", {"active": False}, if_version=first._version)
    for stale in (
        sessions.update("ann", {"active": True}, if_version=first._version),
        sessions.replace("ann", ANN, if_version=first._version),
        sessions.delete("ann", if_version=first._version),
    ):
        with pytest.raises(Conflict, match="it no longer has version"):
            await stale
    assert await sessions.get("ann") == second
    third = await sessions.replace("ann", ANN, if_version=second._version)
    assert await sessions.delete("ann", if_version=third._version) is True


async def test_concurrent_updates_lose_nothing(sessions: Resource) -> None:
    """Concurrent updates of different fields all end up in the record."""
    await sessions.insert(ANN)
    await asyncio.gather(*(sessions.update("ann", {f"field{n}": n}) for n in range(8)))
    found = await sessions.get("ann")
    assert found is not None
    assert [found[f"field{n}"] for n in range(8)] == list(range(8))


async def test_upsert_inserts_or_merges(sessions: Resource) -> None:
    """The first inserts, the second merges, one after a deletion inserts again."""
    assert content(await sessions.upsert(ANN)) == {**ANN, "active": True}
    merged = await sessions.upsert({"id": "ann", "active": False})
    assert content(merged) == {**ANN, "active": False}
    await sessions.delete("ann")
    assert content(await sessions.upsert(ANN)) == {**ANN, "active": True}
    assert (await sessions.upsert({"user_id": "u", "expires_at": 1})).id != "ann"
    with pytest.raises(InvalidRecord):
        await sessions.upsert({"id": "new"})


async def test_batches_keep_the_order_of_their_arguments(sessions: Resource) -> None:
    """When they insert, read and delete; missing ids are None, or not counted."""
    inserted = await sessions.insert_many([CEM, ANN, BOB])
    assert [document.id for document in inserted] == ["cem", "ann", "bob"]
    found = await sessions.get_many(["bob", "nobody", "ann", "bob"])
    assert [document and document.id for document in found] == ["bob", None, "ann", "bob"]
    assert await sessions.exists("cem") is True
    assert await sessions.delete_many(["cem", "nobody", "cem", "bob"]) == 2
    assert await sessions.list_ids() == ["ann"]
    assert await sessions.exists("cem") is False
    assert await sessions.insert_many([]) == []
    assert await sessions.get_many([]) == []
    assert await sessions.delete_many([]) == 0


async def test_a_batch_reports_what_it_could_not_write(sessions: Resource) -> None:
    """The error lists ids that are taken; the others are written all the same."""
    await sessions.insert_many([ANN, BOB])
    await sessions.delete("bob")
    with pytest.raises(Incomplete) as caught:
        await sessions.insert_many([{**ANN, "user_id": "u9"}, BOB, CEM])
    assert caught.value.conflicts == ("ann",)
    assert set(caught.value.written) == {"bob", "cem"}
    assert [document.user_id for document in await sessions.list()] == ["u1", "u2", "u1"]
    with pytest.raises(Invalid, match=r"id is given twice \(got 'ann'\)"):
        await sessions.insert_many([ANN, ANN])


async def test_reads_are_in_the_order_of_the_ids(sessions: Resource) -> None:
    """Lists, ids, counts and pages agree, by the bytes of the ids."""
    names = ["a", "a b", "a/b", "B", "é", "z", "漢"]
    await sessions.insert_many([{**ANN, "id": name} for name in names])
    expected = sorted(names, key=str.encode)
    assert await sessions.list_ids() == expected
    assert [document.id for document in await sessions.list()] == expected
    assert [document.id async for document in sessions] == expected
    assert await sessions.count() == 7
    assert await sessions.list_ids(limit=2, offset=1) == expected[1:3]
    assert [document.id for document in await sessions.list(limit=2, offset=5)] == expected[5:]
    assert await sessions.list(limit=0) == []
    first = await sessions.page(size=3)
    second = await sessions.page(size=3, after=first.next)
    third = await sessions.page(size=3, after=second.next)
    assert [d.id for page in (first, second, third) for d in page.items] == expected
    assert (first.next, second.next, third.next) == (expected[2], expected[5], None)


async def test_queries_filter_sort_and_cut(sessions: Resource) -> None:
    """The query of the specification, and others like it."""
    await sessions.insert_many([ANN, BOB, CEM])
    expired = await sessions.query({"expires_at": {"$lt": 250}, "active": True})
    assert [document.id for document in expired] == ["ann"]
    assert await sessions.count({"user_id": "u1"}) == 2
    assert await sessions.count({}) == 3
    by_user = await sessions.query(sort=["user_id", "-expires_at"])
    assert [document.id for document in by_user] == ["cem", "ann", "bob"]
    latest = await sessions.query({"user_id": "u1"}, sort="-expires_at", limit=1)
    assert [document.id for document in latest] == ["cem"]
    assert [d.id for d in await sessions.query(sort="device.os")] == ["ann", "bob", "cem"]
    assert [d.id for d in await sessions.query(sort="-id", limit=1, offset=1)] == ["bob"]
    assert [d.id for d in await sessions.query({"id": {"$gt": "ann"}}, limit=1)] == ["bob"]
    assert len(await sessions.query({"_created_at": {"$gt": 0}})) == 3
    page = await sessions.page({"user_id": "u1"}, size=1)
    assert ([d.id for d in page.items], page.next) == (["ann"], "ann")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filter": {"n": {"$lessthan": 1}}}, "is not an operator"),
        ({"filter": {"$not": {"_version": "x"}}}, r"cannot use this field \(got '_version'\)"),
        ({"limit": -1}, r"limit must be 0 or more \(got -1\)"),
        ({"offset": 1.5}, r"offset must be 0 or more \(got 1.5\)"),
        ({"sort": "-"}, r"sort must be a field name \(got '-'\)"),
        ({"sort": 5}, r"sort must be a field name \(got 5\)"),
    ],
)
async def test_an_invalid_query_is_refused(
    sessions: Resource, arguments: dict[str, Any], message: str
) -> None:
    """A query with an error is refused, not answered with an empty list."""
    with pytest.raises(Invalid, match=message):
        await sessions.query(**arguments)


async def test_batches_accept_any_iterable_except_text(sessions: Resource) -> None:
    """A text is one id, not a list of letters, so nothing is deleted by mistake."""
    inserted = await sessions.insert_many({**ANN, "id": name} for name in ("a", "b", "ab"))
    assert [document.id for document in inserted] == ["a", "b", "ab"]
    assert len(await sessions.get_many(iter(["a", "b"]))) == 2
    one: Any = ANN
    for verb in (sessions.delete_many("ab"), sessions.get_many("ab"), sessions.insert_many(one)):
        with pytest.raises(Invalid, match="must be a list"):
            await verb
    assert await sessions.delete_many({"ab", "b"}) == 2
    assert await sessions.list_ids() == ["a"]


async def test_an_invalid_page_is_refused(sessions: Resource) -> None:
    """The error names the argument."""
    for size in (0, -1, "5", 100_001):
        with pytest.raises(Invalid, match=rf"size must be between 1 and .*\(got {size!r}\)"):
            await sessions.page(size=size)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"after must be an id \(got 5\)"):
        await sessions.page(after=5)  # type: ignore[arg-type]
    await sessions.insert_many([ANN, BOB])
    for size in (1, 2, 3, 100_000):
        page = await sessions.page(size=size)
        assert [d.id for d in page.items] == ["ann", "bob"][:size]
        assert page.next == ([None, "ann", "bob"][size] if size <= 2 else None)


async def test_an_unreadable_record_is_set_aside(
    location: StoreLocation, database: Database, sessions: Resource
) -> None:
    """It is reported, left out of lists, and not overwritten."""
    emitted: list[Event] = []
    database.on("store:record-set-aside", emitted.append)
    await sessions.insert_many([ANN, BOB, CEM])
    location.corrupt("data/sessions/bob", "[1]")
    assert [document.id for document in await sessions.list()] == ["ann", "cem"]
    assert [d.id for d in (await sessions.page(size=2)).items] == ["ann"]
    assert (await sessions.page(size=2)).next == "bob"
    assert [event["key"] for event in emitted] == ["data/sessions/bob"]
    for verb in (sessions.get("bob"), sessions.update("bob", {}), sessions.replace("bob", BOB)):
        with pytest.raises(Corrupt, match="a record is an object"):
            await verb
    assert location.read_value("data/sessions/bob") == "[1]"


async def test_hooks_run_around_every_verb(sessions: Resource) -> None:
    """Before-hooks can change or refuse the input; after-hooks receive the result."""
    received: list[tuple[str, Any]] = []

    @sessions.before("insert")
    async def normalise(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "user_id": record["user_id"].upper()}

    @sessions.before("delete")
    def protect_ann(name: str) -> None:
        if name == "ann":
            raise PermissionError(name)

    sessions.before("query", lambda where: {**(where or {}), "active": True})
    verbs = ["insert", "get", "update", "delete", "query", "upsert", "count"]
    for verb in verbs:
        sessions.after(verb, lambda result, verb=verb: received.append((verb, result)))  # type: ignore[call-overload]

    assert (await sessions.insert({**ANN, "user_id": "u1"})).user_id == "U1"
    assert [d.user_id for d in await sessions.insert_many([BOB, CEM])] == ["U2", "U1"]
    with pytest.raises(PermissionError):
        await sessions.delete("ann")
    with pytest.raises(PermissionError):
        await sessions.delete_many(["bob", "ann"])
    assert await sessions.delete("bob") is True
    assert [d.id for d in await sessions.query()] == ["ann", "cem"]
    assert (await sessions.upsert({**ANN, "user_id": "low"})).user_id == "low"
    assert (await sessions.upsert({**BOB, "user_id": "low"})).user_id == "LOW"
    assert await sessions.count() == 3
    assert [verb for verb, _ in received] == [
        *("insert", "insert", "insert", "delete", "query"),
        *("update", "upsert", "insert", "upsert", "count"),
    ]
    with pytest.raises(Invalid, match=r"Did you mean before_insert\?"):
        sessions.before("inser", print)  # type: ignore[call-overload]
    with pytest.raises(Invalid, match=r"before_insert must be callable \(got None\)"):
        sessions.add_hooks({"before_insert": None})


async def test_a_hook_may_return_an_empty_input(sessions: Resource) -> None:
    """Only None leaves the input as it was."""
    await sessions.insert_many([ANN, BOB])
    nothing = {"user_id": "nobody"}
    verbs: list[Verb] = ["query", "count", "page", "update"]
    for verb in verbs:
        sessions.before(verb, lambda _: None)
    assert await sessions.query(nothing) == (await sessions.page(nothing)).items == []
    assert await sessions.count(nothing) == 0
    assert (await sessions.update("bob", nothing)).user_id == "nobody"
    for verb in verbs:
        sessions.before(verb, lambda _: {})
    assert len(await sessions.query(nothing)) == len((await sessions.page(nothing)).items) == 2
    assert await sessions.count(nothing) == 2
    assert (await sessions.update("ann", nothing)).user_id == "u1"


REFUSALS: list[tuple[Verb, str, Callable[[Resource], Awaitable[Any]]]] = [
    ("insert", "insert", lambda sessions: sessions.insert(CEM)),
    ("insert", "insert_many", lambda sessions: sessions.insert_many([CEM, {**CEM, "id": "dan"}])),
    ("insert", "upsert", lambda sessions: sessions.upsert(CEM)),
    ("update", "upsert", lambda sessions: sessions.upsert({**ANN, "user_id": "u9"})),
    ("upsert", "upsert", lambda sessions: sessions.upsert(CEM)),
    ("update", "update", lambda sessions: sessions.update("ann", {"user_id": "u9"})),
    ("replace", "replace", lambda sessions: sessions.replace("ann", CEM)),
    ("delete", "delete", lambda sessions: sessions.delete("ann")),
    ("delete", "delete_many", lambda sessions: sessions.delete_many(["ann", "bob"])),
    ("get", "get", lambda sessions: sessions.get("ann")),
    ("exists", "exists", lambda sessions: sessions.exists("ann")),
    ("list", "list", lambda sessions: sessions.list()),
    ("list_ids", "list_ids", lambda sessions: sessions.list_ids()),
    ("count", "count", lambda sessions: sessions.count()),
    ("page", "page", lambda sessions: sessions.page()),
    ("query", "query", lambda sessions: sessions.query()),
]
"""Each verb with a hook, and each call that runs it."""


def test_every_verb_has_a_refusal() -> None:
    """A verb that is added later must be refused here too."""
    assert {hooked for hooked, _, _ in REFUSALS} == set(get_args(Verb))


@pytest.mark.parametrize(
    "error",
    [
        NotFound("user", "u1"),
        Conflict("user", "it has changed"),
        Unavailable("another store", "it does not answer"),
        PermissionError("not yours"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_hook_refuses_a_verb_with_any_error(
    database: Database, sessions: Resource, error: Exception
) -> None:
    """The caller gets that error, also one that the verb itself knows; nothing else happens."""
    await sessions.insert_many([ANN, BOB])
    before = await sessions.list()
    emitted: list[Event] = []
    database.on("resource:*", emitted.append)
    calls: list[Verb] = []
    refused: Verb | None = None

    def refuse(verb: Verb) -> None:
        calls.append(verb)
        assert len(calls) == 1, "the hook is called again after it has refused"
        raise error

    for hooked in get_args(Verb):
        sessions.before(hooked, lambda _, verb=hooked: refuse(verb) if verb == refused else None)
        sessions.after(hooked, lambda _, verb=hooked: calls.append(verb))
    for hooked, name, call in REFUSALS:
        calls.clear()
        refused = hooked
        with pytest.raises(type(error)) as raised:
            await call(sessions)
        assert raised.value is error, name
        assert calls == [hooked], name
        refused = None
        assert await sessions.list() == before, name
    assert emitted == []


async def test_an_error_in_an_after_hook_becomes_an_event(
    database: Database, sessions: Resource
) -> None:
    """The write stays, and the other hooks are called."""
    failures: list[Event] = []
    called: list[Any] = []
    database.on("jobsync:handler-failed", failures.append)
    hooks = {"after_insert": [lambda _: 1 / 0, called.append]}
    await database.create_resource("sessions", SESSION, hooks=hooks)
    assert await database.create_resource("sessions", hooks=hooks) is sessions
    inserted = await sessions.insert(ANN)
    assert called == [inserted]
    assert [event["event"] for event in failures] == ["after_insert"]


async def test_writes_emit_events(database: Database, sessions: Resource) -> None:
    """Listeners of a resource receive its events; listeners of the database receive all."""
    other = await database.create_resource("other")
    all_emitted: list[Event] = []
    emitted: list[Event] = []
    database.on("resource:*", all_emitted.append)
    sessions.on("resource:*", emitted.append)
    await sessions.insert_many([ANN, BOB])
    await sessions.update("ann", {"active": False})
    await sessions.delete("bob")
    await sessions.delete("bob")
    await other.insert({"id": "x"})
    assert [(event.name, event["ids"]) for event in emitted] == [
        ("resource:inserted", ("ann", "bob")),
        ("resource:updated", ("ann",)),
        ("resource:deleted", ("bob",)),
    ]
    assert [event["resource"] for event in all_emitted] == ["sessions"] * 3 + ["other"]


async def test_insert_and_get_are_one_request_each(location: StoreLocation) -> None:
    """By S3's tariff: a record is one object, and an insert reads nothing first."""
    meter = Meter(S3_TARIFF)
    store = MeteredStore(await location.open(), meter, Components.system().clock)
    async with Database(connection=store) as database:
        tasks = await database.create_resource("tasks", {"n": "number"})

        async def cost(verb: Any) -> int:
            before = meter.requests
            await verb
            return meter.requests - before

        assert await cost(tasks.insert({"id": "a", "n": 1})) == 1
        assert await cost(tasks.get("a")) == 1
        assert await cost(tasks.exists("a")) == 1
        assert await cost(tasks.update("a", {"n": 2})) == 2
        assert await cost(tasks.delete("a")) == 2
        assert await cost(tasks.insert({"id": "a", "n": 1})) == 3
        writes = meter["write"].calls
        assert await cost(tasks.insert_many([{"n": n} for n in range(10)])) == 10
        assert meter["write"].calls == writes + 1
    await store.close()


async def test_records_are_plain_documents(location: StoreLocation, sessions: Resource) -> None:
    """The store has the record as JSON, under a readable key."""
    await sessions.insert(ANN)
    text = location.read_value("data/sessions/ann")
    assert text is not None
    assert text.startswith(
        '{"id":"ann","user_id":"u1","expires_at":100,"active":true,"_created_at":'
    )


def test_generated_ids_are_valid_keys(ids: Ids) -> None:
    """A generated id needs no escaping."""
    (name,) = ids.records(1)
    assert escape(name) == name
