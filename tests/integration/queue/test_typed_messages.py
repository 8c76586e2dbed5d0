"""Messages of a type: checked before they are stored, and objects when they are handled."""

import sqlite3
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from servers import Locate
from waiting import until

from jobsync import BlockingContext, Context, Database, Document, Invalid, QueuePlugin, sync


class Mail(msgspec.Struct, forbid_unknown_fields=True):
    """A message."""

    to: str
    copies: list[str] = []


@pytest.fixture(params=["sqlite", "postgres", "memory"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """A fresh store of each kind."""
    return locate(request.param)


@pytest.fixture
async def db(url: str) -> AsyncIterator[Database]:
    """A connected database."""
    async with Database(url) as db:
        yield db


async def test_a_handler_gets_objects(db: Database) -> None:
    """From objects, from dicts and through the resource; its callbacks do too."""
    handled: list[Any] = []
    completed: list[Any] = []

    async def handle(mail: Mail, context: Context) -> None:
        handled.append((mail, context.attempt))

    queue = QueuePlugin(
        "emails",
        payload=Mail,
        on_message=handle,
        on_complete=lambda mail, _: completed.append(mail),
    )
    await db.use_plugin(queue)
    first = await queue.enqueue(Mail("a", ["b"]))
    await queue.enqueue({"to": "c"}, delay=0.001)
    await db.resources.emails.enqueue({"to": "d"})
    await db.resource("emails", type=Mail).enqueue(Mail("e"))
    await until(lambda: len(completed) == 4)
    mails = [Mail("a", ["b"]), Mail("c"), Mail("d"), Mail("e")]
    assert sorted(completed, key=lambda mail: mail.to) == mails
    assert sorted(handled, key=lambda each: each[0].to) == [(mail, 1) for mail in mails]
    info = await queue.get(first)
    assert info is not None
    assert info.state == "completed"


async def test_plain_handlers_and_programs_with_a_loop_get_objects(db: Database) -> None:
    """A plain function on a thread, and what `claim` returns."""
    handled: list[Any] = []
    queue = await db.use_plugin(QueuePlugin("emails", payload=Mail))
    await queue.enqueue(Mail("a"))
    (claimed,) = await queue.claim(wait=30)
    assert claimed.data == Mail("a")
    assert await claimed.ack()

    @queue.handler
    def handle(mail: Mail, context: BlockingContext) -> None:
        handled.append((mail, context.attempt))

    await queue.enqueue(Mail("b"))
    await until(lambda: handled == [(Mail("b"), 1)])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"to": 3}, "to must be `str`"),
        ({"too": "a"}, "too is not a field of Mail.*Did you mean to"),
        ({}, "to is missing"),
        (3, "must be Mail or a dict"),
        (Mail(3), "to must be `str`"),  # type: ignore[arg-type]
    ],
)
async def test_what_is_not_of_the_type_is_not_stored(data: Any, reason: str) -> None:
    """Nothing of a batch is, and a check says the same."""
    async with Database("memory://") as db:
        queue = await db.use_plugin(QueuePlugin("emails", payload=Mail))
        with pytest.raises(Invalid, match=reason):
            await queue.enqueue_many([Mail("a"), data])
        with pytest.raises(Invalid, match=reason):
            queue.check_messages([data])
        assert await queue.count("all") == 0


async def test_what_is_not_of_the_type_is_set_aside(db: Database) -> None:
    """Other code has stored it. The worker buries it with the reason, and handles the next."""
    handled: list[Mail] = []
    other = await db.use_plugin(QueuePlugin("emails"))
    wrong = [await other.enqueue({}), await other.enqueue({"to": "a", "more": 1})]
    right = await other.enqueue({"to": "b", "id": "of its own"})
    await other.stop()

    async with Database(connection=db.store) as second:
        queue = QueuePlugin("emails", payload=Mail, on_message=handled.append)
        await second.use_plugin(queue)
        await until(lambda: handled == [Mail("b")])
        await until(lambda: queue.stats()["completed"] == 1)

        async def are_dead() -> bool:
            return await queue.count("dead") == len(wrong)

        await until(are_dead)
        dead = await queue.dead_letters()
        errors = {each.id: each.errors[-1].error for each in dead}
        assert "it is not of type Mail: to is missing" in errors[wrong[0]]
        assert "it is not of type Mail: more is not a known field" in errors[wrong[1]]
        info = await queue.get(right)
        assert info is not None
        assert info.state == "completed"


async def test_tasks_stand_beside_typed_messages(db: Database) -> None:
    """Their messages have the arguments of their functions."""
    handled: list[Mail] = []
    queue = QueuePlugin("emails", payload=Mail, on_message=handled.append)

    @queue.task
    async def double(n: int) -> int:
        return 2 * n

    await db.use_plugin(queue)
    await queue.enqueue(Mail("a"))
    assert await (await double.enqueue(4)).result(timeout=30) == 8
    await until(lambda: handled == [Mail("a")])
    with pytest.raises(Invalid, match="to is not a parameter"):
        await queue.enqueue({"to": "a"}, task=double.name)


def test_callers_that_block_have_types_too(locate: Locate) -> None:
    """Messages, records and tasks of `jobsync.sync`."""
    handled: list[Any] = []
    queue = sync.QueuePlugin("emails", payload=Mail)

    @queue.handler
    def handle(mail: Mail) -> None:
        handled.append(mail)

    @queue.task
    def double(n: int) -> int:
        return 2 * n

    @queue.task(name="tripled", max_retries=0)
    async def triple(n: int) -> int:
        return 3 * n

    with pytest.raises(Invalid, match="Did you mean max_retries"):
        queue.task(max_retrys=3)  # type: ignore[call-overload]
    with sync.Database(locate("sqlite"), plugins=[queue]) as db:
        name = queue.enqueue(Mail("a"))
        assert queue.result(name, timeout=30) is None
        assert handled == [Mail("a")]
        with pytest.raises(Invalid, match="to must be"):
            queue.enqueue({"to": 3})
        assert double.enqueue(4).result(timeout=30) == 8
        assert [each.result(timeout=30) for each in triple.enqueue_many([{"n": 5}])] == [15]
        later = double.with_options(delay=3600).enqueue(n=4)
        assert isinstance(later, sync.TaskHandle)
        assert later.cancel()
        info = later.get()
        assert info is not None
        assert info.state == "cancelled"
        assert double(4) == 8
        assert double.queue == queue
        with pytest.raises(Invalid, match="n must be `int`"):
            double.enqueue("4")  # type: ignore[arg-type]
        mails = db.create_resource("mails", type=Mail)
        assert mails.insert(Mail("a")) == Mail("a")
        assert list(mails) == mails.list() == [Mail("a")]
        assert isinstance(db.resources.mails.list()[0], Document)


def test_a_task_is_enqueued_within_a_transaction_of_a_caller_that_blocks(locate: Locate) -> None:
    """It exists once the transaction commits."""
    url = locate("sqlite")
    queue = sync.QueuePlugin("tasks")

    @queue.task
    def double(n: int) -> int:
        return 2 * n

    with sync.producer(url, plugins=[queue]):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        handle = double.with_options(connection=connection).enqueue(4)
        assert handle.get() is None
        connection.commit()
        connection.close()
        info = handle.get()
        assert info is not None
        assert info.value == {"n": 4}
