"""Claims in flight: a worker believes in one only while it certainly stands in the store."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from chance import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from jobsync import Unavailable
from jobsync.coordination.membership import Membership
from jobsync.core.clock import Mono
from jobsync.queue.backend import Message, QueueBackend, Receipt
from jobsync.queue.in_flight import InFlight, Prefetch, WorkerListener, read_document
from jobsync.queue.settings import QueueSettings

VISIBILITY = 10.0
SESSION = SimpleNamespace(is_trusted_at=lambda _: True, incarnation="me")


class ExtendingBackend:
    """Stores until when a claim stands. Requests and replies take time, or are lost."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.due = Mono(0.0)
        self.way = (0.0, 0.0)
        """Seconds that the next request and its reply take."""
        self.is_lost = False
        """Whether the reply never arrives."""

    async def extend(self, receipts: Sequence[Receipt], visibility: float) -> list[bool]:
        """Extend the claim; never shorten it."""
        there, back = self.way
        self._clock.mono_seconds += there
        now = self._clock.mono()
        stands = now < self.due
        if stands:
            self.due = max(self.due, now + visibility)
        self._clock.mono_seconds += back
        if self.is_lost:
            raise Unavailable("queue", "no reply")
        return [stands] * len(receipts)


durations = st.integers(0, 40).map(lambda tenths: tenths / 10)
extensions = st.tuples(
    st.sampled_from(["renew", "extend"]),
    st.integers(1, 300).map(lambda tenths: tenths / 10),
    durations,
    durations,
    st.booleans(),
)
in_flight_steps = st.lists(st.one_of(durations, extensions), max_size=12)


def build_in_flight(
    backend: ExtendingBackend,
    clock: FakeClock,
    session: SimpleNamespace = SESSION,
    on_lost: Callable[..., object] = lambda *_: None,
) -> InFlight:
    """Return the claims of a worker, of which nobody hears unless it is passed."""
    return InFlight(
        cast("QueueBackend", backend),
        cast("Membership", SimpleNamespace(session=session, trust_left=3600.0)),
        clock,
        VISIBILITY,
        cast("WorkerListener", SimpleNamespace(on_lost=on_lost, on_failure=lambda _: None)),
    )


def build_message(number: int) -> Message:
    """Return a delivery of the same message."""
    return Message(
        receipt=Receipt("id-1", number, f"claim-{number}"),
        value={"id": "id-1"},
        attempt=number,
        max_attempts=3,
        timeout=None,
        is_suspect=False,
        enqueued=0.0,
    )


@settings(deadline=None)
@given(there=durations, back=durations, steps=in_flight_steps)
async def test_a_claim_is_believed_only_while_it_stands(
    there: float, back: float, steps: list[Any]
) -> None:
    """However long requests and replies take, and whatever duration is asked for.

    What is asked for is never trusted from the reply on, nor for longer than it is granted.
    """
    clock = FakeClock()
    backend = ExtendingBackend(clock)
    in_flight = build_in_flight(backend, clock)
    sent = clock.mono()
    clock.mono_seconds += there
    backend.due = clock.mono() + VISIBILITY
    clock.mono_seconds += back
    message = build_message(1)
    delivery = in_flight.add(message, "me", sent)
    for step in steps:
        if isinstance(step, float):
            clock.mono_seconds += step
        elif in_flight.find(message) is not None:
            kind, seconds, *backend_way, backend.is_lost = step
            backend.way = cast("tuple[float, float]", tuple(backend_way))
            try:
                if kind == "extend":
                    await in_flight.extend(message, seconds)
                else:
                    await in_flight._renew_due()
            except Unavailable:
                pass
        assert not in_flight.check(delivery, clock.mono()) or clock.mono() < backend.due


def test_a_delivery_that_is_being_settled_stays_when_its_message_comes_again() -> None:
    """Each of them is accounted for until it is removed or lost."""
    clock = FakeClock()
    in_flight = build_in_flight(ExtendingBackend(clock), clock)
    deliveries = []
    for number in range(1, 4):
        deliveries.append(in_flight.add(build_message(number), "me", clock.mono()))
        deliveries[-1].is_settling = True
    assert sorted(each.message.receipt.claim for each in in_flight) == [
        "claim-1",
        "claim-2",
        "claim-3",
    ]
    in_flight.remove(deliveries[1])
    in_flight.lose(deliveries[0], "its worker has failed")
    assert list(in_flight) == [deliveries[2]]
    assert len(in_flight) == 1
    in_flight.remove(deliveries[2])
    assert not in_flight


@pytest.mark.parametrize("is_trusted", [True, False])
@pytest.mark.parametrize("incarnation", ["me", "me-again"])
@pytest.mark.parametrize("is_settling", [True, False])
def test_a_claim_is_that_of_the_session_that_made_it(
    is_trusted: bool, incarnation: str, is_settling: bool
) -> None:
    """The next session of the same worker is trusted too, and has no part in earlier claims.

    Only the store knows what becomes of a claim that is being settled.
    """
    clock = FakeClock()
    session = SimpleNamespace(is_trusted_at=lambda _: True, incarnation="me")
    lost: list[Any] = []
    in_flight = build_in_flight(
        ExtendingBackend(clock), clock, session, lambda *it: lost.append(it)
    )
    delivery = in_flight.add(build_message(1), "me", clock.mono())
    assert in_flight.check(delivery, clock.mono())
    delivery.is_settling = is_settling
    session.is_trusted_at, session.incarnation = (lambda _: is_trusted), incarnation
    is_kept = is_settling or (is_trusted and incarnation == "me")
    assert in_flight.check(delivery, clock.mono()) is is_kept
    assert [delivery for delivery, _ in lost] == ([] if is_kept else [delivery])


@pytest.mark.parametrize("seconds", [0.5, 5.0, VISIBILITY, 30.0])
@pytest.mark.parametrize("by", ["extend", "confirm", "renew"])
async def test_an_extension_never_shortens_what_is_believed(by: str, seconds: float) -> None:
    """The store keeps the longer one, so the worker does; it counts from the request."""
    clock = FakeClock()
    backend = ExtendingBackend(clock)
    backend.due = clock.mono() + VISIBILITY
    in_flight = build_in_flight(backend, clock)
    message = build_message(1)
    added = clock.mono()
    delivery = in_flight.add(message, "me", added)
    clock.mono_seconds += 4
    backend.way = (1.0, 1.0)
    sent = clock.mono()
    if by == "extend":
        assert await in_flight.extend(message, seconds)
    else:
        seconds = VISIBILITY
        await (in_flight.confirm("id-1") if by == "confirm" else in_flight._renew_due())
    margin = VISIBILITY / 10
    left = max(0.0, sent - added - max(0.0, VISIBILITY - seconds))
    end = added + (VISIBILITY - margin + left)
    assert in_flight.check(delivery, end + -0.01)
    assert not in_flight.check(delivery, end)


class AnsweringBackend(ExtendingBackend):
    """Something happens in the worker while a renewal is under way; then it is refused."""

    def __init__(self, clock: FakeClock, meanwhile: Callable[[], object]) -> None:
        super().__init__(clock)
        self.meanwhile = meanwhile

    async def extend(self, receipts: Sequence[Receipt], visibility: float) -> list[bool]:
        del visibility
        self.meanwhile()
        return [False] * len(receipts)


@pytest.mark.parametrize("by", ["extend", "confirm", "renew"])
@pytest.mark.parametrize(
    ("meanwhile", "lost"),
    [("nothing", [1]), ("settling", []), ("settled", []), ("claimed again", [1]), ("lost", [1])],
)
async def test_a_refused_renewal_counts_only_for_the_claim_that_it_was_about(
    by: str, meanwhile: str, lost: list[int]
) -> None:
    """While it was under way, the claim may have been settled or lost, or the message be here anew.

    A settlement ends the claim in the store, so the renewal after it is refused: nothing is lost.
    """
    clock = FakeClock()
    found: list[int] = []

    def act() -> None:
        if meanwhile in {"settling", "settled"}:
            delivery.is_settling = True
        if meanwhile == "settled":
            in_flight.remove(delivery)
        if meanwhile == "claimed again":
            in_flight.add(build_message(2), "me", clock.mono())
        if meanwhile == "lost":
            in_flight.lose(delivery, "the session of this worker is in doubt")

    in_flight = build_in_flight(
        AnsweringBackend(clock, act),
        clock,
        on_lost=lambda delivery, _: found.append(delivery.message.attempt),
    )
    message = build_message(1)
    delivery = in_flight.add(message, "me", clock.mono())
    clock.mono_seconds += VISIBILITY / 2
    if by == "extend":
        await in_flight.extend(message, 5.0)
    else:
        await (in_flight.confirm("id-1") if by == "confirm" else in_flight._renew_due())
    assert found == lost
    left = {"settling": [1], "claimed again": [2]}
    assert [each.message.attempt for each in in_flight] == left.get(meanwhile, [])


@pytest.mark.parametrize(
    ("watched_since", "is_woken"), [(None, True), (-1.0, False), (0.0, False), (1.0, True)]
)
def test_a_claim_that_ends_before_the_next_check_wakes_the_watcher(
    watched_since: float | None, *, is_woken: bool
) -> None:
    """An answer that took long may be that of an older request than those in flight."""
    clock = FakeClock()
    in_flight = build_in_flight(ExtendingBackend(clock), clock)
    woken: list[bool] = []
    in_flight._wakeup = cast("Any", SimpleNamespace(set=lambda: woken.append(True)))
    sent = clock.mono()
    in_flight._watched_since = None if watched_since is None else sent + watched_since
    in_flight.add(build_message(1), "me", sent)
    assert bool(woken) == is_woken


@pytest.mark.parametrize(
    ("trust_left", "sent", "wait"),
    [
        (3600.0, [0.0], 9.0),
        (3600.0, [-4.0, -5.0], 4.0),
        (3.0, [-4.0], 3.0),
        (3.0, [-7.0], 2.0),
        (-1.0, [-4.0], 0.01),
        (3600.0, [-20.0], 0.01),
        (3.0, [], None),
    ],
)
def test_the_next_check_is_when_the_first_claim_may_be_lost(
    trust_left: float, sent: list[float], wait: float | None
) -> None:
    """By its own end or with the session; one that is being settled is not lost."""
    clock = FakeClock()
    in_flight = build_in_flight(ExtendingBackend(clock), clock)
    cast("Any", in_flight._membership).trust_left = trust_left
    now = clock.mono()
    for number, seconds in enumerate([-8.5, *sent]):
        message = msgspec.structs.replace(
            build_message(1), receipt=Receipt(f"id-{number}", 1, "claim-1")
        )
        delivery = in_flight.add(message, "me", now + seconds)
        delivery.is_settling = number == 0
    found = in_flight._find_next_check()
    assert (None if found is None else found - now) == (wait and pytest.approx(wait))


@pytest.mark.parametrize(
    ("options", "seconds", "limit"),
    [
        ({}, None, 2),
        ({"prefetch": 1}, None, 1),
        ({"prefetch": 0}, None, 0),
        ({}, 0.1, 20),
        ({}, 1.0, 2),
        ({}, 4.0, 0),
        ({"visibility_timeout": 1.0}, 0.1, 10),
        ({"visibility_timeout": 1.0, "prefetch": 4}, 0.1, 4),
        ({"visibility_timeout": 1.0, "prefetch": 40}, 0.1, 10),
        ({"prefetch": 500}, 0.1, 20),
        ({}, 0.0001, 100),
        ({}, 0.001, 40),
        ({"max_concurrency": 5}, 0.1, 0),
        ({"rate_limit": "5/second"}, None, 0),
    ],
)
def test_a_second_of_work_is_claimed_in_advance_at_most(
    options: dict[str, Any], seconds: float | None, limit: int
) -> None:
    """And half the visibility timeout; not more than is configured, and nothing of limited work."""
    prefetch = Prefetch(QueueSettings(concurrency=2, **options))
    if seconds is not None:
        prefetch.measure(seconds)
    assert prefetch.limit == limit


@pytest.mark.parametrize(
    ("seconds", "most"), [(None, 0), (1.0, 30), (0.1, 100), (20.0, 1), (40.0, 0)]
)
def test_of_a_page_half_the_visibility_timeout_is_claimed(seconds: float | None, most: int) -> None:
    """At most; nothing more than wanted before a handler was measured."""
    prefetch = Prefetch(QueueSettings(concurrency=2))
    if seconds is not None:
        prefetch.measure(seconds)
    assert prefetch.find_most(100) == most


@pytest.mark.parametrize("value", [{"n": 1}, {"id": 7, "n": 1}, [1]])
def test_the_document_of_a_task_has_the_id_of_its_message(value: Any) -> None:
    """Also if one of its arguments has that name."""
    message = msgspec.structs.replace(build_message(1), value=value, task="send")
    document = read_document(message)
    assert document.id == "id-1"
    if isinstance(value, dict):
        assert document["n"] == 1
    else:
        assert document["arguments"] == value
