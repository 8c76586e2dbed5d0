"""Claims in flight: a worker believes in one only while it certainly stands in the store."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from chance import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from jobsync import Unavailable
from jobsync.coordination.membership import Membership
from jobsync.core.clock import Mono
from jobsync.queue.backend import Message, QueueBackend, Receipt
from jobsync.queue.in_flight import InFlight, WorkerListener

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


def build_in_flight(backend: ExtendingBackend, clock: FakeClock) -> InFlight:
    """Return the claims of a worker that nobody listens to."""
    return InFlight(
        cast("QueueBackend", backend),
        cast("Membership", SimpleNamespace(session=SESSION, trust_left=3600.0)),
        clock,
        VISIBILITY,
        cast("WorkerListener", SimpleNamespace(on_lost=lambda *_: None, on_failure=lambda _: None)),
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
