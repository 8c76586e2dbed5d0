"""Claims that a program has asked for: how long a suspect keeps the others from it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components
from jobsync.coordination.membership import Membership
from jobsync.core.messages import Completed
from jobsync.core.retry import Retries
from jobsync.database.home_loop import HomeLoop
from jobsync.events import Events
from jobsync.queue.backend import Message, QueueBackend, Receipt
from jobsync.queue.in_flight import Delivery, read_document
from jobsync.queue.pull import PulledClaims
from jobsync.queue.reporter import QueueReporter
from jobsync.queue.settings import QueueSettings


def build_claims() -> PulledClaims:
    """Return the claims of a program, without a queue behind them."""
    components = Components(clock=FakeClock(), randomness=SeededRandomness(1), events=Events())
    return PulledClaims(
        cast("QueueBackend", SimpleNamespace(is_billed=False, queue="mails")),
        cast("Membership", SimpleNamespace()),
        QueueSettings(),
        Retries(),
        components,
        cast(
            "QueueReporter",
            SimpleNamespace(on_lost=lambda *_: None, on_settled=lambda *_: None),
        ),
        cast("HomeLoop", None),
        read_document,
    )


def add(claims: PulledClaims, name: str) -> Delivery:
    """Put a message in flight."""
    message = Message(
        receipt=Receipt(name, 1, f"claim of {name}"),
        value={"id": name},
        attempt=1,
        max_attempts=4,
        timeout=None,
        is_suspect=True,
        enqueued=0.0,
    )
    return claims._in_flight.add(message, "me", FakeClock().mono())


def end(claims: PulledClaims, delivery: Delivery, how: str) -> None:
    """End the claim of a message."""
    if how == "lost":
        claims._in_flight.lose(delivery, "its claim has ended")
    else:
        delivery.verdict, delivery.is_settling = Completed(), True
        claims.on_answer(delivery, is_accepted=how == "settled")


@pytest.mark.parametrize("how", ["settled", "refused", "lost"])
async def test_a_suspect_keeps_others_waiting_until_its_claim_has_ended(how: Any) -> None:
    """In whatever way, and not longer; the end of another message changes nothing."""
    claims = build_claims()
    suspect, other = add(claims, "suspect"), add(claims, "other")
    claims._quarantine.start(suspect)
    end(claims, other, how)
    assert claims._quarantine.wait(is_free=False) > 0
    end(claims, suspect, how)
    assert claims._quarantine.wait(is_free=False) == 0
    assert len(claims._in_flight) == 0
    # A settlement of a message that was never in flight is nobody's.
    claims._quarantine.start(suspect)
    claims.on_answer(None, is_accepted=True)
    assert claims._quarantine.wait(is_free=False) > 0
