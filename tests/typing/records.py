"""Types of records: right uses, and wrong ones with the errors of each checker.

Nothing here runs; see `tasks.py`.
"""

from typing import assert_type

import msgspec

from jobsync import Database, Document, Page, Resource, sync


class User(msgspec.Struct):
    """A record."""

    name: str
    age: int = 0
    id: str | None = None


class Pet(msgspec.Struct):
    """A record of another type."""

    name: str


async def right(db: Database, blocking: sync.Database) -> None:
    """What is accepted, and its types."""
    users = await db.create_resource("users", type=User, partitions={"by_age": ["age"]})
    assert_type(users, Resource[User])
    assert_type(db.resource("users", type=User), Resource[User])
    assert_type(await users.insert(User("ann")), User)
    assert_type(await users.insert({"name": "ann"}), User)
    assert_type(await users.update("x", {"age": 3}, if_version="1"), User)
    assert_type(await users.upsert(User("ann", id="x")), User)
    assert_type(await users.get("x"), User | None)
    assert_type(await users.list(limit=3), list[User])
    assert_type(await users.query({"age": 3}), list[User])
    assert_type(await users.get_many(["x"]), list[User | None])
    assert_type(await users.insert_many([User("a"), {"name": "b"}]), list[User])
    assert_type(await users.page(size=3), Page[User])
    async for user in users:
        assert_type(user, User)
    plain = await db.create_resource("plain", {"name": "string|required"})
    assert_type(plain, Resource[Document])
    assert_type(await plain.get("x"), Document | None)
    without_parameters: Resource = plain
    assert_type(await without_parameters.insert({}), Document)
    assert_type(blocking.resource("users", type=User), sync.Resource[User])
    assert_type(blocking.create_resource("users", type=User).list(), list[User])
    assert_type(blocking.resource("users").get("x"), Document | None)
    for user in blocking.resource("users", type=User):
        assert_type(user, User)


async def wrong(db: Database, blocking: sync.Database) -> None:
    """What is refused."""
    users = db.resource("users", type=User)
    await users.insert(Pet("rex"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await users.update("x", Pet("rex"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await users.insert_many([Pet("rex")])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    await users.list(limt=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await db.create_resource("users", typ=User)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    await db.create_resource("users", {"name": "string"}, type=User)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    db.resource("users", type="User")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    await db.resource("users").insert(User("ann"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    blocking.resource("users", type=User).insert(Pet("rex"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
