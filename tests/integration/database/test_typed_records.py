"""Records of a type: verbs take and return objects, and the schema is that of the type."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest

from jobsync import Corrupt, Database, Document, Event, Invalid, InvalidRecord, Page, Resource
from jobsync.core.attributes import render


class User(msgspec.Struct):
    """A record."""

    name: str
    age: int | None = None
    tags: list[str] = []
    id: str | None = None
    version: str = msgspec.field(name="_version", default="")


class Stamped(msgspec.Struct):
    """A record that has what the library adds."""

    name: str
    id: str
    version: str = msgspec.field(name="_version")
    created: float = msgspec.field(name="_created_at")


@pytest.fixture
async def db() -> AsyncIterator[Database]:
    """A connected database."""
    async with Database("memory://") as db:
        yield db


def strip(user: User) -> User:
    """Return a user without what the store has added."""
    return msgspec.structs.replace(user, version="")


async def test_verbs_take_and_return_objects(db: Database) -> None:
    """All of them; other fields of a record stay as they are."""
    users = await db.create_resource("users", type=User, partitions={"by_age": ["age"]})
    assert render(users.schema.fields) == {
        "name": "string|required",
        "age": "integer",
        "tags": "array|items:string",
        "id": "string",
    }
    ann = await users.insert(User("ann", 3))
    assert ann.id
    assert ann.version
    assert strip(ann) == User("ann", 3, id=ann.id)
    await users.update(ann.id, {"age": 4}, if_version=ann.version)
    await db.resource("users").update(ann.id, {"more": "kept"})
    assert strip(await users.update(ann.id, User("anna", 5))) == User("anna", 5, id=ann.id)
    assert (await db.resource("users").get(ann.id)) == Doc(more="kept", name="anna")
    assert strip(await users.upsert(User("bob", id="b"))) == User("bob", id="b")
    assert strip(await users.upsert({"id": "b", "age": 7})) == User("bob", 7, id="b")
    assert strip(await users.replace("b", User("rob"))) == User("rob", id="b")
    more = await users.insert_many([User("eve", id="e"), {"name": "fay", "id": "f"}])
    assert list(map(strip, more)) == [User("eve", id="e"), User("fay", id="f")]
    names = {"anna", "rob", "eve", "fay"}
    assert {each.name for each in await users.list()} == names
    assert {each.name async for each in users} == names
    assert [each.name for each in await users.query({"age": 5})] == ["anna"]
    page = await users.page(size=2)
    assert isinstance(page, Page)
    assert all(isinstance(each, User) for each in page.items)
    found = await users.get_many(["e", "x"])
    assert [each and each.name for each in found] == ["eve", None]
    assert await users.get("x") is None
    assert await users.delete("e")
    assert isinstance(await db.resources.users.get("f"), Document)


async def _iterate(users: Resource[User]) -> list[User]:
    return [user async for user in users]


async def _read_page(users: Resource[User]) -> list[User]:
    return (await users.page(partition="by_age", partition_values={"age": 3})).items


async def _get_one(users: Resource[User]) -> list[User | None]:
    return [await users.get("a")]


READS: dict[str, Callable[[Resource[User]], Awaitable[Sequence[User | None]]]] = {
    "get": _get_one,
    "get_many": lambda users: users.get_many(["a"]),
    "list": lambda users: users.list(),
    "list of a partition": lambda users: users.list(
        partition="by_age", partition_values={"age": 3}
    ),
    "page of a partition": _read_page,
    "query": lambda users: users.query({"name": "ann"}, sort="-name"),
    "iterate": _iterate,
}


@pytest.mark.parametrize("verb", READS)
async def test_what_is_read_is_of_the_type(verb: str, db: Database) -> None:
    """By every verb; what is not of the type is refused, or reported and left out of several."""
    users = await db.create_resource("users", type=User, partitions={"by_age": ["age"]})
    reported: list[Event] = []
    db.on("store:record-set-aside", reported.append)
    await users.insert_many([User("ann", 3, id="a"), User("ann", 4, id="b")])
    (user, *_) = await READS[verb](users)
    assert type(user) is User
    assert strip(user) == User("ann", 3, id="a")
    (stored,) = await db.store.get_many(["data/users/a"])
    assert stored is not None
    damaged = {**stored.value, "tags": "odd"}
    await db.store.write([stored.replace(damaged, format=stored.format)])
    if verb.startswith("get"):
        with pytest.raises(Corrupt, match="data/users/a"):
            await READS[verb](users)
    elif "partition" not in verb:
        assert [user and user.id for user in await READS[verb](users)] == ["b"]
        (event,) = reported
        assert (event["store"], event["key"]) == ("data/users", "data/users/a")


class Doc:
    """Equal to a document with these fields."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Document) and self.fields.items() <= dict(other).items()

    __hash__ = None  # type: ignore[assignment]


async def test_a_type_may_require_what_the_library_adds(db: Database) -> None:
    """A record that is inserted as a dict has it when it is read."""
    stamped = await (await db.create_resource("stamped", type=Stamped)).insert({"name": "a"})
    assert stamped.id
    assert stamped.version
    assert stamped.created > 0
    with pytest.raises(Invalid, match="_version must be"):
        await (await db.create_resource("wrong", type=Misread)).insert({"name": "a"})
    assert await db.resources.wrong.count() == 0


class Misread(msgspec.Struct):
    """A type that no stored record has."""

    name: str
    version: int = msgspec.field(name="_version")


async def test_nothing_is_written_that_is_not_of_the_type(db: Database) -> None:
    """By a verb, by a change, or by a hook; whoever writes without the type is checked too."""
    users = await db.create_resource("users", type=User)
    await users.insert(User("ann", id="a"))
    with pytest.raises(InvalidRecord, match="age must be a whole number"):
        await users.insert({"name": "bob", "age": "x"})
    with pytest.raises(InvalidRecord, match="age must be a whole number"):
        await users.update("a", {"age": "x"})
    with pytest.raises(Invalid, match="nmae is not a field of User"):
        await users.update("a", {"nmae": "x"})
    with pytest.raises(Invalid, match="tags is missing"):
        await db.resource("users", type=Narrow).replace("a", {"name": "x"})
    with pytest.raises(Invalid, match="must be User or a dict"):
        await users.insert_many([Narrow("x", [])])  # type: ignore[list-item]
    with pytest.raises(InvalidRecord, match="name is missing"):
        await db.resources.users.insert({"id": "b"})
    users.before("insert", lambda record: {**record, "tags": [3]})
    with pytest.raises(InvalidRecord, match="tags"):
        await users.insert(User("bob"))
    assert await users.list_ids() == ["a"]
    assert strip((await users.list())[0]) == User("ann", id="a")


@pytest.mark.parametrize(
    "verb", ["insert", "insert_many", "update", "replace", "upsert", "upsert of a new one"]
)
async def test_no_verb_writes_what_only_the_type_refuses(db: Database, verb: str) -> None:
    """The schema of the resource would accept it."""
    await (await db.create_resource("users", type=User)).insert(User("ann", id="a"))
    users = db.resource("users", type=Narrow)
    wrong: Any = {"name": "x", "tags": None}
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "insert": lambda: users.insert(wrong),
        "insert_many": lambda: users.insert_many([{"name": "y", "tags": []}, wrong]),
        "update": lambda: users.update("a", wrong),
        "replace": lambda: users.replace("a", wrong),
        "upsert": lambda: users.upsert({"id": "a", **wrong}),
        "upsert of a new one": lambda: users.upsert({"id": "b", **wrong}),
    }
    with pytest.raises(Invalid, match="tags must be"):
        await calls[verb]()
    (left,) = await db.resource("users").list()
    assert (left.id, left.name, left.tags) == ("a", "ann", [])


class Narrow(msgspec.Struct):
    """A type that is narrower than the schema of its resource."""

    name: str
    tags: list[str]


async def test_a_record_that_is_not_of_the_type_is_reported(db: Database) -> None:
    """Lists leave it out, and to read it is an error; as a document it can be read."""
    reports: list[Any] = []
    db.on("store:record-set-aside", reports.append)
    plain = await db.create_resource("users")
    await plain.insert({"id": "a", "name": "ann", "tags": [3]})
    await plain.insert({"id": "b", "name": "bob", "tags": []})
    users = db.resource("users", type=Narrow)
    assert await users.list() == [Narrow("bob", [])]
    assert await users.query({"name": "ann"}) == []
    with pytest.raises(Corrupt, match=r"not of type Narrow: tags\[0\] must be `str`"):
        await users.get("a")
    assert [each.key for each in reports] == ["data/users/a"]
    assert len(await plain.list()) == 2


async def test_hooks_get_what_is_stored(db: Database) -> None:
    """The same hooks run for objects and for documents, whichever resource has added them."""
    seen: list[Any] = []
    users = await db.create_resource("users", type=User, hooks={"before_insert": seen.append})
    db.resources.users.after("insert", seen.append)
    await users.insert(User("ann", id="a"))
    assert seen == [
        {"name": "ann", "age": None, "tags": [], "id": "a", "_version": ""},
        Doc(name="ann"),
    ]


async def test_a_type_takes_the_place_of_attributes(db: Database) -> None:
    """Both would contradict each other. A type can change as attributes can."""
    with pytest.raises(Invalid, match="cannot be combined with type"):
        await db.create_resource("users", {"name": "string"}, type=User)  # type: ignore[call-overload]
    with pytest.raises(Invalid, match="not a type whose objects"):
        await db.create_resource("users", type=int)
    await db.create_resource("users", type=User)
    with pytest.raises(Invalid, match="tags: existing records may not have it"):
        await db.create_resource("users", type=Narrow)
