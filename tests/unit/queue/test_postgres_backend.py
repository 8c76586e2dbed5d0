"""What the backend on PostgreSQL asks the server, with answers of the test."""

import asyncio
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeVar, cast, get_args

import pytest
from chance import FakeClock, SeededRandomness
from waiting import until

from jobsync import Components, Events, OutcomeUnknown, Unavailable
from jobsync.core.messages import Transition
from jobsync.queue.backend import NewMessage, Receipt, Settlement
from jobsync.queue.settings import QueueOrder
from jobsync.queue.single_message import StoredResult
from jobsync.queue.sql import common, postgres_transactions
from jobsync.queue.sql.postgres import PostgresBackend
from jobsync.queue.sql.postgres_directory import PostgresQueueDirectory
from jobsync.queue.sql.postgres_statements import build_copy, fill_in_schema
from jobsync.stores.sql import Parameters, PostgresAccess, Steps, as_array

T = TypeVar("T")

Answer = list[Any] | Exception | Callable[[], list[Any]]


class ScriptedAccess(PostgresAccess):
    """Answers each statement by its name, and records what it was asked."""

    schema = '"jobs"'
    channel = "changes"

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """Of the statements, by their texts."""
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.answers: defaultdict[str, list[Answer]] = defaultdict(list)
        self.woken: list[str] = []

    async def run(self, statement: str, parameters: Parameters, place: str) -> list[Any]:
        """Return the next answer of the statement; without one, no rows."""
        del place
        assert isinstance(parameters, Mapping)
        name = self.names[statement]
        self.asked.append((name, parameters))
        answer = self.answers[name].pop(0) if self.answers[name] else []
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer

    async def run_steps(self, build: Callable[[], Steps[T]], place: str) -> T:
        """Run each statement."""
        steps = build()
        try:
            statement, parameters = next(steps)
            while True:
                statement, parameters = steps.send(await self.run(statement, parameters, place))
        except StopIteration as end:
            return cast("T", end.value)

    async def run_and_notify(
        self, statement: str, notifying: str, parameters: Mapping[str, Any], topic: str
    ) -> list[Any]:
        """Run a statement."""
        del notifying
        return await self.run(statement, parameters, topic)

    async def copy_and_notify(self, statement: str, rows: Iterable[bytes], topic: str) -> None:
        """Is not used here."""
        raise NotImplementedError

    def wake(self, topic: str) -> None:
        """Record it."""
        self.woken.append(topic)

    async def wait(self, topic: str, timeout: float) -> None:
        """Is not used here."""
        raise NotImplementedError

    def list_asked(self, name: str) -> list[Mapping[str, Any]]:
        """Return the parameters of a statement, each time that it was asked."""
        return [parameters for each, parameters in self.asked if each == name]


@pytest.fixture
def access() -> ScriptedAccess:
    """A server of the test."""
    return ScriptedAccess()


def open_backend(
    access: ScriptedAccess, clock: FakeClock, order: QueueOrder = "fifo"
) -> PostgresBackend:
    """Open a queue on it."""
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    backend = PostgresBackend(access, "emails", components, order)
    access.names = {text: name for name, text in backend._sql.items()}
    return backend


@pytest.fixture
def backend(access: ScriptedAccess, clock: FakeClock) -> PostgresBackend:
    """A queue on it."""
    return open_backend(access, clock)


def build_claim(*ids: str, lowest: int | None = None, found: int | None = None) -> list[Any]:
    """Return the rows of a claim of these messages."""
    head = (lowest, len(ids) if found is None else found, False, None, None, False)
    rows = [(*head, name, "1", 1, 0, 4, None, False, 0.0, "") for name in ids]
    return rows or [(*head, *[None] * 9)]


async def claim(
    backend: PostgresBackend, limit: int = 10, *, suspects: bool = False, task: str = ""
) -> Any:
    """Claim messages, of a task or of none."""
    return await backend.claim(
        limit, session="me", visibility=60.0, suspects=suspects, tasks=[task]
    )


FULL = (0, None)


def list_scans(access: ScriptedAccess, name: str = "claim") -> list[tuple[int, float | None]]:
    """Return from which position and time each claim has looked for messages."""
    scans = [(each["floor"], each["since"]) for each in access.list_asked(name)]
    access.asked.clear()
    return scans


async def test_a_claim_looks_from_where_the_last_one_found_messages(
    access: ScriptedAccess, backend: PostgresBackend, clock: FakeClock
) -> None:
    """The first looks at all; then one does so every five seconds."""
    access.answers["claim"] = [
        build_claim("a", lowest=7),
        build_claim("b", lowest=9),
        # It found only messages that had waited.
        build_claim("c", lowest=None),
        build_claim("d", lowest=4),
        build_claim("e", lowest=11),
        build_claim("f", lowest=12),
    ]
    for seconds in (0.0, 1.0, 1.0, 2.0, 1.0, 4.0):
        clock.mono_seconds += seconds
        await claim(backend)
    assert list_scans(access) == [FULL, (7, 120.0), (9, 120.0), (9, 120.0), FULL, (11, 120.0)]


@pytest.mark.parametrize(("seconds", "pause"), [(0.0, 5.0), (0.05, 5.0), (1.0, 50.0), (4.0, 200.0)])
async def test_slow_looks_at_all_messages_are_rare(
    access: ScriptedAccess,
    backend: PostgresBackend,
    clock: FakeClock,
    seconds: float,
    pause: float,
) -> None:
    """They take a fiftieth of the time, however long each of them takes."""

    def take_time() -> list[Any]:
        clock.mono_seconds += seconds
        return build_claim("a", lowest=7)

    access.answers["claim"] = [take_time, *(build_claim("b", lowest=7) for _ in range(2))]
    await claim(backend)
    clock.mono_seconds += pause - 0.25
    await claim(backend)
    clock.mono_seconds += 0.5
    await claim(backend)
    assert list_scans(access) == [FULL, (7, 120.0), FULL]


async def test_a_claim_that_finds_nothing_looks_at_all_messages_every_half_second(
    access: ScriptedAccess, backend: PostgresBackend, clock: FakeClock
) -> None:
    """A longer transaction may have committed messages below those that were found."""
    access.answers["claim"] = [
        build_claim("a", lowest=7),
        build_claim(),
        build_claim(),
        build_claim("b", lowest=3),
        build_claim(),
    ]
    await claim(backend)
    clock.mono_seconds += 0.4
    assert (await claim(backend)).messages == []
    clock.mono_seconds += 0.2
    assert [each.id for each in (await claim(backend)).messages] == ["b"]
    clock.mono_seconds += 0.4
    await claim(backend)
    assert list_scans(access) == [FULL, (7, 120.0), (7, 120.0), FULL, (3, 120.0)]


async def test_after_a_suspect_the_next_claim_looks_for_more_of_any_age(
    access: ScriptedAccess, backend: PostgresBackend
) -> None:
    """One that finds no suspect changes nothing for the next."""
    for suspects, *ids in ((False, "a"), (True, "b"), (False, "c"), (True,), (False, "d")):
        access.answers["claim"] = [build_claim(*map(str, ids), lowest=7)]
        await claim(backend, suspects=bool(suspects))
    assert list_scans(access) == [FULL, FULL, FULL, FULL, (7, 120.0)]


async def test_claims_of_other_tasks_look_for_themselves(
    access: ScriptedAccess, backend: PostgresBackend
) -> None:
    """What was found of one task says nothing of those of another."""
    for task, lowest in (("one", 7), ("two", 9), ("one", 8), ("two", 9)):
        access.answers["claim_tasks"] = [build_claim("a", lowest=lowest)]
        await claim(backend, task=task)
    assert list_scans(access, "claim_tasks") == [FULL, FULL, (7, 120.0), (9, 120.0)]


@pytest.mark.parametrize(
    ("ids", "found", "more"), [("ab", 2, True), ("a", 1, False), ("a", 2, True), ("", 0, False)]
)
async def test_there_may_be_more_if_a_claim_was_full_or_ended_early(
    access: ScriptedAccess, backend: PostgresBackend, ids: str, found: int, *, more: bool
) -> None:
    """It ends early if its messages are large."""
    access.answers["claim"] = [build_claim(*ids, found=found)]
    assert (await claim(backend, 2)).more is more


@pytest.mark.parametrize(("ids", "more"), [("ab", True), ("a", False)])
async def test_a_claim_whose_reply_was_lost_is_read(
    access: ScriptedAccess, backend: PostgresBackend, ids: str, *, more: bool
) -> None:
    """What else there is, is not known: the next claim comes at once."""
    access.answers["claim"] = [OutcomeUnknown("queue/emails", "lost")]
    access.answers["find_claimed"] = [[row[6:] for row in build_claim(*ids)]]
    found = await claim(backend, 2)
    assert [each.id for each in found.messages] == [*ids]
    assert (found.due, found.lapse, found.more) == (0.0, 60.0, more)


@pytest.mark.parametrize(
    ("older_than", "statement", "answers_age", "progress_age"),
    [
        (1.0, "forget_completed", 300.0, 86_400.0),
        (299.0, "forget_completed", 300.0, 86_400.0),
        (300.0, "forget_claims", 300.0, 86_400.0),
        (7_200.0, "forget_claims", 7_200.0, 86_400.0),
        (100_000.0, "forget_claims", 100_000.0, 100_000.0),
    ],
)
async def test_what_belongs_to_completed_messages_is_removed_to_the_end(
    access: ScriptedAccess,
    backend: PostgresBackend,
    older_than: float,
    statement: str,
    answers_age: float,
    progress_age: float,
) -> None:
    """Answers to settlements, results and progress, page by page, and none of them too early."""
    access.answers |= {
        "forget": [[(0,)]],
        statement: [[(1,)]],
        "forget_in_claims": [[(0,)]],
        "forget_answers": [[(2,)], [(2,)], [(1,)]],
        "forget_results": [[(2,)], [(2,)], [(0,)]],
    }
    assert await backend.forget("completed", older_than=older_than, limit=2) == 1
    ages = [(name, parameters["older_than"]) for name, parameters in access.asked]
    assert ages == [
        ("forget", older_than),
        (statement, older_than),
        ("forget_in_claims", older_than),
        *[("forget_answers", answers_age)] * 3,
        *[("forget_results", older_than)] * 3,
        ("forget_progress", progress_age),
    ]


@pytest.mark.parametrize(("counts", "total"), [((2,), 2), ((0, 2, 0), 2), ((1, 0, 1), 2)])
async def test_results_stay_while_there_are_messages_to_forget(
    access: ScriptedAccess, backend: PostgresBackend, counts: Sequence[int], total: int
) -> None:
    """A full page of messages may not be the last one."""
    names = ("forget", "forget_completed", "forget_in_claims")
    for name, count in zip(names, counts, strict=False):
        access.answers[name] = [[(count,)]]
    access.answers["forget_answers"] = [[(0,)]]
    assert await backend.forget("completed", older_than=1.0, limit=2) == total
    assert not access.list_asked("forget_results")


@pytest.mark.parametrize(("seen", "last"), [(0, ""), (1, ""), (2, "k")])
async def test_only_a_full_page_of_keys_has_another(
    access: ScriptedAccess, backend: PostgresBackend, seen: int, last: str
) -> None:
    """However many of them were removed."""
    access.answers["forget_keys"] = [[("k", 1, seen)]]
    found = await backend.forget_keys(after="a", limit=2)
    assert (found.last, found.removed, found.is_end) == (last, 1, not last)


REDRIVES: dict[str, tuple[int | None, Sequence[int], Sequence[int], int]] = {
    "fewer than a page": (None, [3], [10], 10),
    "a full page, and others": (None, [10, 4], [10, 10], 99),
    "as many as there were": (None, [10, 10, 5], [10, 10, 5], 15),
    "fewer than the limit": (25, [10, 3], [10, 10], 99),
    "as many as the limit": (25, [10, 10, 5], [10, 10, 5], 99),
    "a limit of one page": (10, [10], [10], 99),
    "a small limit": (4, [4], [4], 99),
}
"""A limit, how many there are for each transaction, how many each asks for, and how many dead
letters there are after the first."""


@pytest.mark.parametrize(("limit", "counts", "sizes", "dead"), REDRIVES.values(), ids=REDRIVES)
async def test_dead_letters_are_put_back_in_parts(
    access: ScriptedAccess,
    backend: PostgresBackend,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
    counts: Sequence[int],
    sizes: Sequence[int],
    dead: int,
) -> None:
    """At most so many as the limit; without one, those that were there when it began."""
    monkeypatch.setattr(common, "_REDRIVE_BATCH", 10)
    access.answers["choose_dead"] = [[(str(n), None) for n in range(count)] for count in counts]
    access.answers["count"] = [[("dead", dead)]]
    assert await backend.redrive(limit=limit) == sum(counts)
    chosen = access.list_asked("choose_dead")
    assert [each["limit"] for each in chosen] == sizes
    assert all(each["all"] for each in chosen)
    assert len(access.list_asked("insert_redriven")) == len(counts)
    assert len(access.list_asked("delete_redriven")) == len(counts)


@pytest.mark.parametrize(
    ("limit", "counts", "asked"),
    [
        # That one part has fewer says nothing of the next.
        (None, [1, 2, 1], [("0 1", 2), ("2 3", 2), ("4", 2)]),
        (3, [2, 1], [("0 1", 2), ("2 3", 1)]),
        (2, [2], [("0 1", 2)]),
    ],
)
async def test_dead_letters_are_put_back_by_their_ids_in_parts(
    access: ScriptedAccess,
    backend: PostgresBackend,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
    counts: Sequence[int],
    asked: Sequence[tuple[str, int]],
) -> None:
    """Each part of the list once, and nothing else."""
    monkeypatch.setattr(common, "_REDRIVE_BATCH", 2)
    access.answers["choose_dead"] = [[(str(n), None) for n in range(count)] for count in counts]
    assert await backend.redrive([str(n) for n in range(5)], limit=limit) == sum(counts)
    chosen = access.list_asked("choose_dead")
    expected = [(as_array(ids.split()), size, False) for ids, size in asked]
    assert [(each["ids"], each["limit"], each["all"]) for each in chosen] == expected


def settlement(name: str, move: Transition, *, result: bool = False) -> Settlement:
    """Return how a message is settled, each in a claim of its own."""
    kept = StoredResult("1") if result else None
    return Settlement(receipt=Receipt(name, 1, f"claim-{name}"), move=move, result=kept)


@pytest.mark.parametrize("first", ["complete_with_results", "settle"])
async def test_what_was_settled_in_part_is_settled_again(
    access: ScriptedAccess, backend: PostgresBackend, first: str
) -> None:
    """A part that was refused leaves the batch in doubt: it is sent again as a whole."""
    refused = Unavailable("server", "gone")
    if first == "settle":
        # The claim of one has groups, which another transaction settles.
        batch = [settlement("a", "retry"), settlement("b", "retry")]
        access.answers["settle"] = [
            [("a", None), (None, "claim-b")],
            refused,
            [("a", None), (None, "claim-b")],
            [("b", None)],
        ]
    else:
        batch = [settlement("a", "complete", result=True), settlement("b", "retry")]
        access.answers["complete_with_results"] = [[("a", None)], [("a", None)]]
        access.answers["settle"] = [refused, [("b", None)]]
    assert await backend.settle(batch) == [True, True]
    assert not access.answers["settle"]


class FakeOpening:
    """Connections for handlers, which open when the test lets them."""

    def __init__(self) -> None:
        self.may_open = threading.Event()
        self.closed = threading.Event()
        self.limits: list[Any] = []

    def open_blocking_connection(self) -> Any:
        """Open one."""
        assert self.may_open.wait(60)
        block = SimpleNamespace(__enter__=lambda: None)
        return SimpleNamespace(transaction=lambda: block, close=self.closed.set)


async def test_an_opening_that_is_cancelled_leaves_no_connection(
    access: ScriptedAccess, backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that opens it cannot be cancelled, so what it opens is closed."""
    opening = FakeOpening()
    access.user_connections = cast("Any", opening)
    monkeypatch.setattr(postgres_transactions, "_execute_blocking", lambda *_: [("1",)])
    assert backend.transactions is not None
    beginning = asyncio.create_task(backend.transactions.begin(1.0, is_blocking=True))
    await asyncio.sleep(0)
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    assert not opening.closed.is_set()
    opening.may_open.set()
    await until(opening.closed.is_set, "the connection is closed")


async def test_a_transaction_that_is_closed_leaves_no_file_open() -> None:
    """Its own copy of the socket is closed, too."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection: Any = SimpleNamespace(pgconn=SimpleNamespace(socket=ours.fileno()))
        connection.close = lambda: None
        opened = postgres_transactions._PostgresTransaction(connection, None, "1", 60.0, "queue/a")
        number = opened._socket.fileno()
        os.fstat(number)
        await opened.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


@pytest.mark.parametrize(("limit", "text"), [(0.5, "5500"), (10.0, "15000"), (3600.0, "3605000")])
def test_the_server_ends_a_transaction_later_than_its_process(limit: float, text: str) -> None:
    """Whose error says more; the server is for a process that is frozen."""
    found = postgres_transactions._build_limits(limit)
    assert found == {"idle": text, "statement": text}


def settle_as(*moves: tuple[Transition, float], result: Any = None) -> Any:
    """Return a call that settles messages, each with a delay."""
    batch = [
        Settlement(receipt=Receipt(f"id-{number}", 1, "c"), move=move, delay=delay, result=result)
        for number, (move, delay) in enumerate(moves)
    ]
    return lambda backend: backend.settle(batch)


def push_as(**place: Any) -> Any:
    """Return a call that pushes a message."""
    message = NewMessage(id="id-1", value=1, max_attempts=4, **place)
    return lambda backend: backend.push([message])


WORK, ENDS = "queue/emails", "queue/emails/ends"
RESULT = StoredResult("1")
AWAY = Unavailable("queue/emails", "it is away")
WAKES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "push with a priority": (push_as(priority=1), {}, [WORK]),
    "push that fails": (push_as(priority=1), {"insert_placed": [AWAY]}, [WORK]),
    "complete": (settle_as(("complete", 0.0)), {}, []),
    "complete with a result": (settle_as(("complete", 0.0), result=RESULT), {}, [ENDS]),
    "bury": (settle_as(("bury", 0.0)), {}, []),
    "retry": (settle_as(("retry", 0.0)), {}, [WORK]),
    "retry later": (settle_as(("retry", 1.0)), {}, []),
    "release one of two": (settle_as(("complete", 0.0), ("release", 0.0)), {}, [WORK]),
    "snooze": (settle_as(("snooze", 5.0)), {}, []),
    "end claims": (
        lambda backend: backend.end_claims(),
        {"end_claims": [[("id-1", "waiting", 1, "me", None)]]},
        [WORK],
    ),
    "end the claims of the dead": (
        lambda backend: backend.end_claims(["me"]),
        {"end_claims": [[("id-1", "waiting", 1, "me", None)]]},
        [WORK],
    ),
    "end no claims": (lambda backend: backend.end_claims(["me"]), {}, []),
    "redrive": (lambda backend: backend.redrive(), {}, [WORK]),
    "redrive that fails": (lambda backend: backend.redrive(), {"choose_dead": [AWAY]}, [WORK]),
    "resume": (lambda backend: backend.resume(), {"resume": [[(1,)]]}, [WORK]),
    "pause": (lambda backend: backend.pause(), {"pause": [[(1,)]]}, []),
    "purge": (lambda backend: backend.purge(["ready"]), {"purge": [[(5, [])]]}, [WORK]),
    "purge of nothing": (lambda backend: backend.purge(["ready"]), {"purge": [[(0, [])]]}, []),
    "cancel": (lambda backend: backend.cancel("a"), {"cancel_waiting": [[(1, "", None)]]}, [ENDS]),
    "cancel a head": (
        lambda backend: backend.cancel("a"),
        {"cancel_claimed": [[(1, "me", "group")]], "lock_groups": [[("group", 1)]]},
        [WORK, ENDS],
    ),
    "cancel nothing": (lambda backend: backend.cancel("a"), {}, []),
    "delete": (lambda backend: backend.delete("a"), {"delete_waiting": [[(None,)]]}, [ENDS]),
    "delete a finished one": (
        lambda backend: backend.delete("a"),
        {"delete_finished": [[(1,)]]},
        [ENDS],
    ),
    "delete nothing": (lambda backend: backend.delete("a"), {}, []),
    "run now": (lambda backend: backend.run_now("a"), {"run_now": [[(1,)]]}, [WORK]),
    "run nothing now": (lambda backend: backend.run_now("a"), {}, []),
}
"""What is done, what the server answers, and who is told."""


@pytest.mark.parametrize("name", WAKES)
async def test_who_waits_is_told_if_there_may_be_something_for_them(
    access: ScriptedAccess, backend: PostgresBackend, name: str
) -> None:
    """Workers of something to claim, others of the end of a message; and nobody in vain."""
    call, answers, woken = WAKES[name]
    access.answers.update(answers)
    with suppress(Unavailable):
        await call(backend)
    assert access.woken == woken


async def test_settlements_are_announced_while_somebody_waits_for_an_end(
    access: ScriptedAccess, backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two who wait each counts, and nobody is told after they have gone."""
    gates = [asyncio.Event(), asyncio.Event()]
    waits = iter(gates)

    async def wait(topic: str, timeout: float) -> None:
        assert (topic, timeout) == (ENDS, 9.0)
        await next(waits).wait()

    monkeypatch.setattr(access, "wait", wait)
    waiting = [asyncio.ensure_future(backend.wait_for_end(9.0)) for _ in gates]
    await asyncio.sleep(0)
    for gate, each in zip(gates, waiting, strict=True):
        await settle_as(("complete", 0.0))(backend)
        assert access.woken == [ENDS]
        access.woken.clear()
        gate.set()
        await each
    await settle_as(("complete", 0.0))(backend)
    assert access.woken == []


@pytest.mark.parametrize("order", get_args(QueueOrder))
def test_the_name_of_a_schema_may_have_the_sign_of_parameters(order: QueueOrder) -> None:
    """In statements with parameters it is doubled; that which copies has none."""
    statements = fill_in_schema('"a%s b"', order)
    assert '"a%%s b"' in statements["claim"]
    assert [name for name, text in statements.items() if '"a%s b"' in text] == []
    assert '"a%s b"' in build_copy('"a%s b"')


DIRECTORY_CALLS: dict[str, Callable[[PostgresQueueDirectory], Awaitable[Any]]] = {
    "read_contents": lambda directory: directory.read_contents(),
    "find": lambda directory: directory.find(["id-1"]),
    "find_head": lambda directory: directory.find_head("emails", "a"),
    "list": lambda directory: directory.list("emails", "queue", after="", limit=5),
    "list dead": lambda directory: directory.list("emails", "dead", after="", limit=5),
}


@pytest.mark.parametrize("call", DIRECTORY_CALLS)
async def test_a_directory_that_cannot_be_read_is_unavailable(
    access: ScriptedAccess, call: str
) -> None:
    """Whatever became of the request: it changes nothing."""
    directory = PostgresQueueDirectory(access, Components.system())
    for name in ("summarize", "list_pauses", "find", "find_head", "list_live", "list_dead"):
        access.names[directory._sql[name]] = name
        access.answers[name] = [OutcomeUnknown("queues", "the reply was lost")]
    with pytest.raises(Unavailable, match="the reply was lost") as failed:
        await DIRECTORY_CALLS[call](directory)
    assert isinstance(failed.value.__cause__, OutcomeUnknown)


@pytest.mark.parametrize(
    ("due", "seconds", "expected"), [(None, 5.0, 5.0), (3.0, 5.0, 3.0), (7.0, 5.0, 5.0)]
)
def test_a_rate_lets_a_worker_look_again_in_time(
    due: float | None, seconds: float, expected: float
) -> None:
    """When it allows more, or when a delay ends before."""
    rows = common.ClaimedRows([], suspects=True, due=due, lapse=9.0, more=True)
    assert rows.limit_due(seconds) == rows._replace(due=expected, rate=seconds)
