"""What a worker does with the answers of its store: what it has then, and when it asks again."""

import contextlib
from collections.abc import Sequence
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, Unavailable
from jobsync.coordination.membership import Membership
from jobsync.core.messages import Cancel, Completed, Failed, HandlerVerdict, Returned, Snooze
from jobsync.core.retry import Retries
from jobsync.errors import Corrupt
from jobsync.events import Events
from jobsync.queue.backend import (
    ClaimResult,
    EndedClaim,
    Message,
    QueueBackend,
    Receipt,
    Settlement,
)
from jobsync.queue.executor import Executor, MessageHandler
from jobsync.queue.handler_slots import running_delivery
from jobsync.queue.in_flight import Delivery
from jobsync.queue.reporter import QueueReporter
from jobsync.queue.settings import QueueSettings
from jobsync.queue.worker import Worker, find_calling_worker

NOTHING = ClaimResult([], suspects=False, due=None, lapse=None, more=False)
LAPSED = ClaimResult([], suspects=False, due=None, lapse=0.0, more=False)
DOWN = Unavailable("queue", "a test says so")
ENDED = EndedClaim(id="id-9", state="waiting", attempt=1, session="dead")


def build_message(name: str, claim: str = "claim-1") -> Message:
    """Return a message as it is claimed."""
    return Message(
        receipt=Receipt(name, 1, claim),
        value={"id": name},
        attempt=1,
        max_attempts=4,
        timeout=None,
        is_suspect=False,
        enqueued=0.0,
    )


def read(message: Message) -> Any:
    """Read a message, unless its name says otherwise."""
    if message.id.startswith("odd"):
        raise Corrupt(message.id, "it is odd")
    return message.value


class Surroundings:
    """A store whose answers a test gives, and a worker whose handlers never start."""

    is_billed, queue = False, "default/tasks"
    max_result, max_depth, transactions = 1000, 10, None

    def __init__(self, *, until_empty: bool = False) -> None:
        self.clock = FakeClock()
        self.incarnation = "first"
        self.answers: list[ClaimResult | Exception] = []
        self.ended: list[EndedClaim] = []
        self.kept: list[list[str]] = []
        self.claims = 0
        self.takes: float = 0.0
        """Seconds until a claim is answered."""
        self.is_replaced = False
        """Whether the session is another one then."""
        self.reported: list[tuple[str, Any]] = []
        executor = Executor(auto_acknowledge=True)
        executor.add("", MessageHandler(lambda _: None))
        self.worker = Worker(
            cast("QueueBackend", self),
            cast("Membership", self),
            executor,
            QueueSettings(concurrency=3, poll_interval=10.0),
            Retries(),
            None,
            Components(clock=self.clock, randomness=SeededRandomness(1), events=Events()),
            cast("QueueReporter", self),
            read,
            until_empty=until_empty,
        )
        cast("Any", self.worker._slots).add = lambda _: None
        self.submitted: list[tuple[Settlement, Delivery | None]] = []
        cast("Any", self.worker._completer).submit = lambda *sent: self.submitted.append(sent)

    worker_id, is_trusted, trust_left = "worker-1", True, 100.0

    @property
    def session(self) -> Any:
        return SimpleNamespace(is_trusted_at=lambda _: True, incarnation=self.incarnation)

    async def claim(self, limit: int, **options: Any) -> ClaimResult:
        del limit
        assert options["session"] == "first"
        self.claims += 1
        self.clock.mono_seconds += self.takes
        if self.is_replaced:
            self.incarnation = "second"
        answer = self.answers.pop(0) if self.answers else NOTHING
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def end_claims(self, *, keep: Sequence[str]) -> list[EndedClaim]:
        self.kept.append([*keep])
        return self.ended

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *facts: self.reported.append((name, facts))
        raise AttributeError(name)

    async def take(self, *messages: Message) -> list[Delivery]:
        """Claim messages; return those in flight."""
        self.answers = [ClaimResult([*messages], suspects=False, due=None, lapse=None, more=False)]
        await self.worker._fetch()
        return [*self.worker._in_flight]


async def test_a_claim_counts_from_its_request_and_for_the_session_that_sent_it() -> None:
    """The answer may come late, and to a process that has another session by then."""
    around = Surroundings()
    sent, around.takes, around.is_replaced = around.clock.mono(), 7.0, True
    (delivery,) = await around.take(build_message("id-1"))
    assert (delivery.sent, delivery.session) == (sent, "first")
    assert not around.worker._in_flight.check(delivery, around.clock.mono())


@pytest.mark.parametrize("names", [["odd-1", "a", "b"], ["a", "odd-1", "b"], ["a", "b", "odd-1"]])
async def test_an_unreadable_message_is_buried_and_the_others_are_handled(names: list[str]) -> None:
    """Wherever it stands in a claim; the report names it."""
    around = Surroundings()
    found = await around.take(*(build_message(name) for name in names))
    assert [delivery.id for delivery in found] == ["a", "b"]
    ((settlement, delivery),) = around.submitted
    assert (settlement.receipt.id, settlement.move, delivery) == ("odd-1", "bury", None)
    ((kind, (error, name)),) = around.reported
    assert (kind, str(error), name) == ("on_failure", settlement.error, "odd-1")


async def test_a_worker_never_ends_its_own_claims() -> None:
    """Nor those that are being settled: the answer may be under way."""
    around = Surroundings()
    settling, _ = await around.take(build_message("id-1"), build_message("id-2"))
    around.worker.conclude(settling, Completed())
    around.answers = [LAPSED]
    await around.worker._fetch()
    assert around.kept == [["id-1", "id-2"]]


@pytest.mark.parametrize("until_empty", [False, True])
@pytest.mark.parametrize("ended", [[], [ENDED]])
async def test_the_messages_of_claims_that_were_ended_are_there_to_claim(
    ended: list[EndedClaim], *, until_empty: bool
) -> None:
    """A worker polls again at once, and one that ends with the queue does not end before."""
    around = Surroundings(until_empty=until_empty)
    around.ended, around.answers = ended, [LAPSED]
    claimed = await around.worker._fetch()
    assert claimed is not None
    assert claimed.more == (until_empty and bool(ended))
    assert around.worker._changed.is_set() == bool(ended)
    assert [facts for kind, facts in around.reported if kind == "on_ended"] == (
        [([ENDED],)] if ended else []
    )
    # If there was nothing to end, it waits before it looks again.
    assert claimed.lapse == (0.0 if ended else 1.0)


async def test_claims_that_others_ended_wake_the_worker() -> None:
    """Whoever found them: the coordinator, or the reaper."""
    around = Surroundings()
    around.worker.on_ended([ENDED])
    assert around.worker._changed.is_set()


async def test_the_silence_of_a_store_counts_from_the_first_claim_without_an_answer() -> None:
    """However often it is asked meanwhile; an answer ends it, and so does a pause."""
    around = Surroundings()
    around.takes = 5.0
    assert around.worker.silence == 0.0
    for seconds in (5.0, 10.0, 15.0):
        around.answers = [DOWN]
        with pytest.raises(Unavailable):
            await around.worker._fetch()
        assert around.worker.silence == seconds
    await around.worker._fetch()
    assert around.worker.silence == 0.0
    around.answers = [DOWN]
    with pytest.raises(Unavailable):
        await around.worker._fetch()
    assert around.worker.silence == 5.0
    around.worker.is_paused = True
    assert await around.worker._fetch() is None
    assert around.worker.silence == 0.0


@pytest.mark.parametrize(
    ("verdict", "handled"),
    [
        (Completed(), 1),
        (Failed("it failed"), 1),
        (Snooze(5), 1),
        (Cancel("unwanted"), 1),
        (Returned(), 0),
    ],
)
@pytest.mark.parametrize("is_accepted", [True, False])
async def test_what_was_returned_or_refused_was_not_handled(
    verdict: HandlerVerdict, handled: int, *, is_accepted: bool
) -> None:
    """A drain says how many messages it has handled."""
    around = Surroundings()
    (delivery,) = await around.take(build_message("id-1"))
    around.worker.conclude(delivery, verdict)
    around.worker.on_answer(delivery, is_accepted=is_accepted)
    assert around.worker.handled == (handled if is_accepted else 0)
    assert delivery.is_lost != is_accepted
    assert len(around.worker._in_flight) == 0


async def test_a_claim_is_open_until_all_of_its_messages_are_submitted() -> None:
    """Where requests are billed, its settlements are gathered until then."""
    around = Surroundings()
    first, second, other = await around.take(
        build_message("id-1"), build_message("id-2"), build_message("id-3", "claim-2")
    )
    assert around.worker.list_open_claims() == {"claim-1", "claim-2"}
    around.worker.conclude(first, Completed())
    around.worker.conclude(other, Completed())
    assert around.worker.list_open_claims() == {"claim-1"}
    around.worker.conclude(second, Completed())
    assert around.worker.list_open_claims() == set()


@pytest.mark.parametrize("how", ["stops", "pauses", "nothing"])
async def test_nothing_is_claimed_after_suspects_by_a_worker_that_stops_meanwhile(how: str) -> None:
    """The request for suspects is followed by another one only while it works."""
    around = Surroundings()
    around.worker._quarantine.notice()
    claim = around.claim

    async def claim_suspects(limit: int, **options: Any) -> ClaimResult:
        if how == "stops":
            around.worker.finish()
        around.worker.is_paused = how == "pauses"
        return await claim(limit, **options)

    cast("Any", around).claim = claim_suspects
    claimed = await around.worker._fetch()
    assert around.claims == (2 if how == "nothing" else 1)
    assert (claimed is None) == (how != "nothing")


async def test_the_pauses_of_a_new_outage_are_short_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow while the store does not answer, and each answer begins anew."""
    around = Surroundings()
    pauses: list[int] = []

    async def sleep(failures: int, *_: Any) -> None:
        pauses.append(failures)

    monkeypatch.setattr("jobsync.queue.worker._BACKOFF", SimpleNamespace(sleep=sleep))
    more = ClaimResult([], suspects=False, due=None, lapse=None, more=True)
    around.answers = [DOWN, DOWN, DOWN, more, DOWN, DOWN, more, DOWN]
    fetch = around.worker._fetch

    async def fetch_until_done() -> ClaimResult | None:
        if not around.answers:
            around.worker.finish()
        return await fetch()

    cast("Any", around.worker)._fetch = fetch_until_done
    await around.worker._fetch_until_done()
    assert pauses == [1, 2, 3, 1, 2, 1]
    # And each failure is reported.
    assert [facts for name, facts in around.reported if name == "on_failure"] == [(DOWN,)] * 6


@pytest.mark.parametrize(
    ("due", "lapse", "wait"),
    [
        (None, None, 10.0),
        (3.0, None, 3.0),
        (None, 4.0, 4.0),
        (5.0, 4.0, 4.0),
        (3.0, 4.0, 3.0),
        (99.0, 98.0, 10.0),
        (0.0, None, 0.0),
    ],
)
def test_a_worker_polls_at_the_next_change_that_is_known(
    due: float | None, lapse: float | None, wait: float
) -> None:
    """The end of a delay, or of a claim; and in each interval."""
    claimed = ClaimResult([], suspects=False, due=due, lapse=lapse, more=False)
    assert Surroundings().worker._find_poll_wait(claimed) == wait


def test_polls_of_an_empty_queue_become_rarer_until_there_is_a_message() -> None:
    """Three times the interval at most."""
    worker = Surroundings().worker
    full = ClaimResult([build_message("id-1")], suspects=False, due=None, lapse=None, more=False)
    found = [worker._find_poll_wait(each) for each in (*[NOTHING] * 5, full, NOTHING, NOTHING)]
    assert found == [10, 20, 30, 30, 30, 10, 10, 20]


async def test_the_worker_that_calls_is_that_of_the_same_queue() -> None:
    """A handler may wait for the end of another queue, and must not wait for its own."""
    around, other = Surroundings(), Surroundings()
    (delivery,) = await around.take(build_message("id-1"))
    own, another = cast("QueueBackend", around), cast("QueueBackend", other)
    assert find_calling_worker(own) is None

    def call() -> None:
        running_delivery.set((around.worker, delivery))
        assert find_calling_worker(own) is None
        for handled in (around.worker._slots.running, around.worker._called_back):
            handled[delivery] = None
            assert find_calling_worker(own) is around.worker
            assert find_calling_worker(another) is None
            assert find_calling_worker(None) is None
            del handled[delivery]

    copy_context().run(call)


@pytest.mark.parametrize("error", [None, ValueError("a part has failed")])
async def test_no_handler_starts_without_a_part_of_its_worker(error: Exception | None) -> None:
    """However the part has ended: nobody would renew or settle what it does."""
    worker = Surroundings().worker

    async def run() -> None:
        assert not worker._slots.is_stopping
        if error is not None:
            raise error

    with contextlib.suppress(ValueError):
        await worker._run_part(run)
    assert worker._slots.is_stopping
