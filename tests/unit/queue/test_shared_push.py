"""Small pushes of concurrent callers: sent together, each with its own outcome."""

import asyncio
from collections.abc import Sequence

import pytest

from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.queue.backend import NewMessage
from jobsync.queue.shared_push import SharedPush


class Database:
    """Where messages are pushed to; a commit ends when the test says so."""

    def __init__(self) -> None:
        self.commits: list[list[str]] = []
        """The ids of each commit, from its beginning."""
        self.ends: list[asyncio.Future[None]] = []

    async def push(self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]) -> None:
        """Begin a commit."""
        assert [message.id.encode() for message in new_messages] == [p[:9] for p in payloads]
        self.commits.append([message.id for message in new_messages])
        self.ends.append(asyncio.get_running_loop().create_future())
        await self.ends[-1]

    async def end(self, error: BaseException | None = None) -> None:
        """End the oldest commit that has not ended, and let its callers go on."""
        future = next(end for end in self.ends if not end.done())
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
        await settle()


async def settle() -> None:
    """Run everything that can run."""
    for _ in range(10):
        await asyncio.sleep(0)


class Callers:
    """Tasks that push one message each, unless told otherwise."""

    def __init__(self) -> None:
        self.database = Database()
        self.shared = SharedPush("queue/emails", self.database.push)

    async def start(self, *names: str, size: int = 9) -> list[asyncio.Task[None]]:
        """Start a task for each name; a name with a comma is a push of several messages."""
        tasks = []
        for name in names:
            ids = name.split(",")
            new_messages = [NewMessage(id=each, value=None, max_attempts=1) for each in ids]
            payloads = [each.encode()[:9].ljust(size, b" ") for each in ids]
            tasks.append(asyncio.create_task(self.shared.push(new_messages, payloads)))
        await settle()
        return tasks


@pytest.fixture
def callers() -> Callers:
    """Return callers of an empty queue."""
    return Callers()


def name(number: int) -> str:
    """Return an id of nine characters."""
    return f"id-{number:06}"


A, B, C, D, E = map(name, range(5))


async def test_those_that_come_during_a_commit_share_the_next(callers: Callers) -> None:
    """In their order; the first one waits for nobody."""
    (first,) = await callers.start(A)
    others = await callers.start(B, f"{C},{D}", E)
    assert callers.database.commits == [[A]]
    await callers.database.end()
    assert first.done()
    assert callers.database.commits == [[A], [B, C, D, E]]
    assert not any(task.done() for task in others)
    await callers.database.end()
    await asyncio.gather(first, *others)


@pytest.mark.parametrize("size", [1024, 3 * 1024 * 1024, 4 * 1024 * 1024, 5 * 1024 * 1024])
async def test_however_large_a_push_is_it_is_sent(callers: Callers, size: int) -> None:
    """Alone if it is larger than what is sent together."""
    (first,) = await callers.start(A)
    others = await callers.start(B, size=size)
    others += await callers.start(f"{C},{D}", E, size=size)
    while not all(task.done() for task in (first, *others)):
        await callers.database.end()
    assert [each for commit in callers.database.commits for each in commit] == [A, B, C, D, E]


async def test_one_after_another_each_has_a_commit(callers: Callers) -> None:
    """Nobody waits for others that may come."""
    for number in range(3):
        (task,) = await callers.start(name(number))
        await callers.database.end()
        await task
    assert callers.database.commits == [[name(0)], [name(1)], [name(2)]]


@pytest.mark.parametrize(
    "error", [OutcomeUnknown("queue", "reply lost"), Unavailable("queue", "down"), KeyError("bug")]
)
async def test_an_outcome_is_that_of_its_own_commit(callers: Callers, error: Exception) -> None:
    """All callers of a commit get its error, nobody else does, and the queue can be used again."""
    (first,) = await callers.start(A)
    second = await callers.start(B, C)
    await callers.database.end()
    third = await callers.start(D)
    await callers.database.end(error)
    assert [task.exception() for task in second] == [error, error]
    await callers.database.end()
    await asyncio.gather(first, *third)
    (fourth,) = await callers.start(E)
    await callers.database.end()
    await fourth
    assert callers.database.commits == [[A], [B, C], [D], [E]]


async def test_a_first_push_that_fails_is_not_the_others_concern(callers: Callers) -> None:
    """They are sent all the same."""
    (first,) = await callers.start(A)
    (second,) = await callers.start(B)
    await callers.database.end(Unavailable("queue", "down"))
    assert isinstance(first.exception(), Unavailable)
    await callers.database.end()
    await second


async def test_a_cancelled_caller_is_left_out(callers: Callers) -> None:
    """If its messages were not sent yet; the others are sent."""
    (first,) = await callers.start(A)
    second, third = await callers.start(B, C)
    second.cancel()
    await settle()
    await callers.database.end()
    await callers.database.end()
    await asyncio.gather(first, third)
    assert second.cancelled()
    assert callers.database.commits == [[A], [C]]


async def test_a_cancelled_caller_ends_no_commit_of_others(callers: Callers) -> None:
    """Neither the first, whose commit is its own, nor one whose messages are being sent."""
    (first,) = await callers.start(A)
    second, third = await callers.start(B, C)
    first.cancel()
    await settle()
    assert callers.database.commits == [[A], [B, C]]
    second.cancel()
    await settle()
    await callers.database.end()
    await third
    assert (first.cancelled(), second.cancelled()) == (True, True)


async def test_nothing_is_left_when_all_waiting_callers_are_cancelled(callers: Callers) -> None:
    """The next push is sent at once."""
    (first,) = await callers.start(A)
    (second,) = await callers.start(B)
    second.cancel()
    await callers.database.end()
    await first
    (third,) = await callers.start(C)
    assert callers.database.commits == [[A], [C]]
    await callers.database.end()
    await third


async def test_a_large_push_is_sent_on_its_own(callers: Callers) -> None:
    """Neither waits for others, nor lets others wait."""
    (first,) = await callers.start(A)
    many = [name(number) for number in range(1000, 1101)]
    (large,) = await callers.start(",".join(many))
    (small,) = await callers.start(B)
    assert callers.database.commits == [[A], many]
    await callers.database.end()
    await callers.database.end()
    await asyncio.gather(first, large)
    await callers.database.end()
    await small


@pytest.mark.parametrize(("count", "size", "commits"), [(1500, 9, 3), (1000, 9, 2), (20, 2**18, 3)])
async def test_a_commit_has_its_limits(
    callers: Callers, count: int, size: int, commits: int
) -> None:
    """Of messages and of bytes; the rest comes in the next one."""
    (first,) = await callers.start(A)
    others = await callers.start(*(name(number) for number in range(1, count + 1)), size=size)
    for _ in range(commits):
        await callers.database.end()
    await asyncio.gather(first, *others)
    assert len(callers.database.commits) == commits
    sent = [each for ids in callers.database.commits for each in ids]
    assert sent == [name(number) for number in range(count + 1)]


def test_a_program_that_ends_during_a_commit_leaves_nobody_waiting(callers: Callers) -> None:
    """What was being sent is unknown, the rest was not sent; the next loop begins anew."""

    async def end_early() -> list[asyncio.Task[None]]:
        first = await callers.start(A)
        second = await callers.start(B)
        await callers.database.end()
        return [*first, *second, *(await callers.start(C))]

    tasks = asyncio.run(end_early())
    assert [task.cancelled() for task in tasks] == [False, True, True]

    async def begin_anew() -> None:
        (task,) = await callers.start(D)
        await callers.database.end()
        await task

    callers.database.ends.clear()
    asyncio.run(begin_anew())
    assert callers.database.commits == [[A], [B], [D]]


def test_a_sender_that_is_cancelled_says_so(callers: Callers) -> None:
    """To callers that go on, though nobody but the end of a loop cancels it."""

    async def cancel_sender() -> list[BaseException | None]:
        await callers.start(A)
        (second,) = await callers.start(B)
        await callers.database.end()
        (third,) = await callers.start(C)
        sender = callers.shared._sender
        assert sender is not None
        sender.cancel()
        await asyncio.wait([second, third])
        return [second.exception(), third.exception()]

    unknown, unsent = asyncio.run(cancel_sender())
    assert isinstance(unknown, OutcomeUnknown)
    assert isinstance(unsent, Unavailable)


@pytest.mark.parametrize(("most", "commits"), [(100, 1), (27, 1), (26, 2), (18, 2), (9, 3), (1, 3)])
async def test_a_commit_has_as_many_bytes_as_its_store_allows(most: int, commits: int) -> None:
    """Counted over all of its messages; a push is never divided."""
    callers = Callers()
    callers.shared = SharedPush("queue/emails", callers.database.push, max_bytes=most)
    (first,) = await callers.start(A)
    others = await callers.start(B, C, D)
    for _ in range(1 + commits):
        await callers.database.end()
    await asyncio.gather(first, *others)
    assert len(callers.database.commits) == 1 + commits
    assert [each for ids in callers.database.commits for each in ids] == [A, B, C, D]


async def test_pushes_are_shared_again_after_a_loop_that_ended_during_a_commit(
    callers: Callers,
) -> None:
    """Those of the next loop wait for nobody of the first one."""
    former = asyncio.new_event_loop()
    former.close()
    callers.shared._loop = former
    first = await callers.start(A)
    others = await callers.start(B, C)
    for _ in range(2):
        await callers.database.end()
    assert callers.database.commits == [[A], [B, C]]
    await asyncio.gather(*first, *others)
