"""Resource definitions: every process sees them, and they change only in compatible ways."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import pytest
from store_locations import StoreLocation

from jobsync import Conflict, Database, Event, Invalid, InvalidRecord, NotFound

Connect: TypeAlias = Callable[[], Any]


@pytest.fixture
async def connect(location: StoreLocation) -> AsyncIterator[Connect]:
    """A function that connects one more database, as another process would."""
    async with AsyncExitStack() as stack:

        async def connect() -> Database:
            store = await location.open()
            stack.push_async_callback(store.close)
            return await stack.enter_async_context(Database(connection=store))

        yield connect


async def test_another_process_sees_the_resources(connect: Connect) -> None:
    """A process that connects later has the resource, with its schema."""
    one = await connect()
    sessions = await one.create_resource("sessions", {"n": "number|required"})
    await sessions.insert({"id": "a", "n": 1})
    two = await connect()
    assert [*two.resources] == ["sessions"]
    assert two.resources.sessions is two.resources["sessions"] is two.resource("sessions")
    assert (await two.resources.sessions.get("a")).n == 1
    with pytest.raises(InvalidRecord, match=r"n .*\(got 'x'"):
        await two.resources.sessions.insert({"n": "x"})


async def test_list_resources_sees_what_others_define_and_drop(connect: Connect) -> None:
    """`list_resources` reads the store, and updates `resources`."""
    one, two = await connect(), await connect()
    await one.create_resource("b")
    await one.create_resource("a")
    assert "a" not in two.resources
    assert await two.list_resources() == ["a", "b"]
    assert [*two.resources] == ["a", "b"]
    await two.drop_resource("a")
    assert await one.list_resources() == ["b"]
    assert len(one.resources) == 1


async def test_an_unknown_resource_is_refused_with_the_known_ones(connect: Connect) -> None:
    """For a typo the error suggests the closest name."""
    database = await connect()
    await database.create_resource("sessions")
    with pytest.raises(
        NotFound, match=r"no resource 'sesions'\. Did you mean sessions\? Known: sessions"
    ):
        database.resource("sesions")
    with pytest.raises(NotFound, match="Known: sessions"):
        database.resources["sesions"]
    with pytest.raises(AttributeError, match=r"did you mean sessions\?"):
        database.resources.sesions  # noqa: B018 - reading it is the test
    with pytest.raises(NotFound):
        await database.drop_resource("sesions")


async def test_a_compatible_change_evolves_the_definition(connect: Connect) -> None:
    """Records stay, new rules apply, and a restart of an older release removes nothing."""
    emitted: list[Event] = []
    old, new = await connect(), await connect()
    new.on("db:resource-*", emitted.append)
    attributes = {"name": "string|required|min:3"}
    first = await old.create_resource("users", attributes)
    await first.insert({"id": "ann", "name": "Ann"})
    second = await new.create_resource("users", {**attributes, "role": "enum:a,b|default:a"})
    assert (await second.insert({"id": "bob", "name": "Bob"})).role == "a"
    assert (await second.update("ann", {"name": "Anne"})).role == "a"
    await new.create_resource("users", {"role": "enum:a,b|default:a", **attributes})
    assert [event.name for event in emitted] == ["db:resource-evolved"]
    again = await old.create_resource("users", attributes)
    assert again is first
    assert (await again.insert({"name": "Cem"})).role == "a"
    assert await new.create_resource("users") is second
    with pytest.raises(InvalidRecord, match=r"name .*\(got 'Al'"):
        await second.insert({"name": "Al"})


async def test_a_process_with_an_older_definition_keeps_up(connect: Connect) -> None:
    """Every process can write records that a newer definition allows."""
    old, new = await connect(), await connect()
    first = await old.create_resource("users", {"role": "enum:a,b", "n": "number"}, strict=True)
    second = await new.create_resource("users", {"role": "enum:a,b,c"}, strict=False)
    await second.insert({"id": "ann", "role": "c", "more": 1})
    assert (await first.update("ann", {"n": 1})).role == "c"
    await new.create_resource("users", {"role": "enum:a,b,c,d"})
    assert (await first.replace("ann", {"role": "d"})).role == "d"
    await new.create_resource("users", {"role": "enum:a,b,c,d,e"})
    assert (await first.insert({"role": "e"})).role == "e"
    await new.create_resource("users", {"role": "string"})
    assert [user.role for user in await first.insert_many([{"role": "f"}])] == ["f"]
    with pytest.raises(InvalidRecord, match=r"role .*\(got 5"):
        await first.insert({"role": 5})
    await new.drop_resource("users")
    with pytest.raises(InvalidRecord, match=r"role .*\(got 5"):
        await first.insert({"role": 5})


async def test_listing_keeps_resources_that_are_created_meanwhile(connect: Connect) -> None:
    """There is one resource per name, also while definitions are read concurrently."""
    database = await connect()
    for number in range(5):
        resource, _, _ = await asyncio.gather(
            database.create_resource(f"r{number}", {"n": "number"}),
            database.list_resources(),
            database.create_resource(f"r{number}", {"n": "number", "m": "number"}),
        )
        assert database.resources[f"r{number}"] is resource
        assert sorted(resource.schema.fields) == ["m", "n"]


async def test_strict_must_be_a_boolean(connect: Connect, location: StoreLocation) -> None:
    """Anything else is refused, and no definition is written."""
    database = await connect()
    with pytest.raises(Invalid, match="strict must be True or False"):
        await database.create_resource("users", strict="no")
    assert location.read_value("resource/users") is None


async def test_an_incompatible_change_is_refused_with_every_reason(
    connect: Connect, location: StoreLocation
) -> None:
    """Nothing is written, and the resource works as before."""
    database = await connect()
    users = await database.create_resource("users", {"name": "string", "age": "number"})
    before = location.read_value("resource/users")
    with pytest.raises(
        Invalid, match=r"age: existing records hold number.*email: .* do not have it"
    ):
        await database.create_resource("users", {"age": "string", "email": "email|required"})
    assert location.read_value("resource/users") == before
    assert (await users.insert({"age": 5})).age == 5


async def test_an_undeclared_definition_is_replaced_by_the_first_declared_one(
    connect: Connect,
) -> None:
    """Plugins may create it before the user does; unless existing records would not pass."""
    database = await connect()
    await database.create_resource("users")
    await database.create_resource("users")
    users = await database.create_resource("users", {"email": "email|required"}, strict=True)
    assert users.schema.fields["email"].required
    with pytest.raises(InvalidRecord):
        await users.insert({})
    with pytest.raises(Invalid, match="name: existing records do not have it"):
        await database.create_resource("users", {"name": "string|required"})
    notes = await database.create_resource("notes")
    await notes.insert({"text": "a"})
    with pytest.raises(Invalid, match="title: existing records do not have it"):
        await database.create_resource("notes", {"title": "string|required"})
    await notes.delete_all()
    await database.create_resource("notes", {"title": "string|required"})


async def test_concurrent_definitions_are_merged(connect: Connect) -> None:
    """Each process evolves what the others have defined."""
    databases = [await connect() for _ in range(4)]
    await asyncio.gather(
        *(db.create_resource("x", {f"f{n}": "number"}) for n, db in enumerate(databases))
    )
    last = await connect()
    assert sorted(last.resources.x.schema.fields) == ["f0", "f1", "f2", "f3"]


async def test_fields_that_newer_code_adds_to_a_definition_survive(
    connect: Connect, location: StoreLocation
) -> None:
    """Unknown fields of a stored definition stay when it evolves."""
    database = await connect()
    await database.create_resource("users", {"name": "string"})
    text = location.read_value("resource/users")
    assert text is not None
    location.corrupt("resource/users", text[:-1] + ',"later":{"a":1}}')
    await database.create_resource("users", {"name": "string", "age": "number"})
    assert '"later":{"a":1}' in (location.read_value("resource/users") or "")


async def test_an_unreadable_definition_is_set_aside(
    connect: Connect, location: StoreLocation
) -> None:
    """The others are usable, and it is not overwritten."""
    one = await connect()
    await one.create_resource("a")
    await one.create_resource("b")
    location.corrupt("resource/a", '{"name":"a","attributes":{"x":"strong"}}')
    two = await connect()
    assert [*two.resources] == ["b"]


async def test_a_dropped_resource_loses_its_records(connect: Connect) -> None:
    """Defined again, it is empty."""
    database = await connect()
    old = await database.create_resource("users", {"name": "string"})
    await old.insert_many([{"id": str(n)} for n in range(20)])
    await database.drop_resource("users")
    assert await database.list_resources() == []
    new = await database.create_resource("users", {"name": "number"})
    assert await new.list() == []
    assert (await new.insert({"id": "1", "name": 5})).name == 5


async def test_a_cleanup_keeps_what_exists(connect: Connect) -> None:
    """It removes no record, no value and no young tombstone, from any process."""
    database, other = await connect(), await connect()
    users = await database.create_resource("users", {"name": "string"})
    await users.insert_many([{"id": str(n)} for n in range(5)])
    await users.delete_many(["1", "2"])
    await (await database.create_resource("old")).insert({"id": "x"})
    await database.drop_resource("old")
    await database.open_storage("queue").set("key", 1, ttl=60)
    for tidied in await asyncio.gather(database.tidy(), other.tidy()):
        assert (tidied.buried, tidied.swept) == (0, 0)
    assert await users.list_ids() == ["0", "3", "4"]
    assert await database.open_storage("queue").get("key") == 1
    assert (await users.insert({"id": "1"})).id == "1"


async def test_a_definition_that_changes_meanwhile_is_not_dropped(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gets a conflict if another process has just evolved the resource."""
    database, other = await connect(), await connect()
    users = await database.create_resource("users")

    async def evolve_meanwhile() -> int:
        await other.create_resource("users", {"n": "number"})
        return 0

    monkeypatch.setattr(users, "delete_all", evolve_meanwhile)
    with pytest.raises(Conflict, match="its definition was changed"):
        await database.drop_resource("users")
    assert await other.list_resources() == ["users"]


@pytest.mark.parametrize("name", ["", "1a", "a/b", "a b", "_a", "é", "a" * 101, 5])
async def test_an_invalid_resource_name_is_refused(connect: Connect, name: Any) -> None:
    """Names of resources are part of keys and of SQL, so few characters are allowed."""
    database = await connect()
    with pytest.raises(Invalid, match="must be a valid resource name"):
        await database.create_resource(name)
