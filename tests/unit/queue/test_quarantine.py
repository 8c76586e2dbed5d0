"""When a worker claims a suspect, and how long other messages wait for it."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobsync import Components
from jobsync.core.clock import Clock, Mono
from jobsync.queue.in_flight import Delivery
from jobsync.queue.reaper import Quarantine
from jobsync.queue.worker import Worker

SUSPECT, OTHER = cast("Delivery", object()), cast("Delivery", object())


class ManualClock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def mono(self) -> Mono:
        """Return the time."""
        return Mono(self.seconds)


def build() -> tuple[Quarantine, ManualClock]:
    """Return a quarantine of ten seconds, and its clock."""
    clock: Any = ManualClock()
    return Quarantine(cast("Clock", clock), 10.0), clock


def test_without_suspects_nothing_waits() -> None:
    """Whatever is in flight."""
    quarantine, _ = build()
    assert not quarantine.is_wanted
    assert quarantine.wait(is_free=False) == 0


def test_a_suspect_is_claimed_once_nothing_is_in_flight() -> None:
    """Until then nothing else is claimed, for a while."""
    quarantine, clock = build()
    quarantine.notice()
    assert quarantine.is_wanted
    assert quarantine.wait(is_free=False) == 10
    assert quarantine.wait(is_free=True) == 0
    clock.seconds = 4
    quarantine.notice()
    assert quarantine.wait(is_free=False) == 6
    clock.seconds = 10
    assert quarantine.wait(is_free=False) == 0
    assert quarantine.is_wanted


def test_nothing_is_claimed_while_a_suspect_runs() -> None:
    """Nor another suspect; afterwards claims continue."""
    quarantine, clock = build()
    quarantine.notice()
    quarantine.start(SUSPECT)
    quarantine.notice()
    assert not quarantine.is_wanted
    clock.seconds = 9
    assert quarantine.wait(is_free=False) == 1
    quarantine.release(OTHER)
    assert quarantine.wait(is_free=False) == 1
    quarantine.release(SUSPECT)
    assert quarantine.wait(is_free=False) == 0


def test_a_long_suspect_does_not_block_others() -> None:
    """After a while others are claimed beside it, and the next suspect may start."""
    quarantine, clock = build()
    quarantine.start(SUSPECT)
    clock.seconds = 10
    assert quarantine.wait(is_free=False) == 0
    quarantine.notice()
    assert quarantine.is_wanted


def test_a_suspect_that_another_worker_claimed_is_forgotten() -> None:
    """Nothing waits for it any longer."""
    quarantine, _ = build()
    quarantine.notice()
    quarantine.start(None)
    assert not quarantine.is_wanted
    assert quarantine.wait(is_free=False) == 0


def test_a_quarantine_accepts_any_clock() -> None:
    """Also the machine's clock."""
    quarantine = Quarantine(Components.system().clock, 0.0)
    quarantine.notice()
    assert quarantine.wait(is_free=False) == 0


@pytest.mark.parametrize("in_flight", [[], [OTHER]])
@pytest.mark.parametrize("running", [[], [OTHER]])
@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_worker_is_alone_when_it_has_no_claim_and_no_handler_runs(
    is_trusted: bool, running: list[Delivery], in_flight: list[Delivery]
) -> None:
    """A handler may run on although its message is settled: a suspect waits for it, too."""
    quarantine, _ = build()
    quarantine.notice()
    worker: Any = SimpleNamespace(
        _membership=SimpleNamespace(is_trusted=is_trusted),
        _quarantine=quarantine,
        _in_flight=in_flight,
        _slots=SimpleNamespace(running=running),
    )
    is_alone = not (running or in_flight)
    expected = 0.0 if is_alone else 10.0
    assert Worker._find_wait(worker) == (expected if is_trusted else 0.25)


@pytest.mark.parametrize(("quota", "room"), [(None, 8), (20, 8), (10, 4), (6, 0)])
def test_a_worker_that_rests_for_any_reason_has_no_room(quota: int | None, room: int) -> None:
    """Each is enough; otherwise there is as much as its slots have, and what is left of a quota."""
    for is_paused, is_stopping, has_callbacks in itertools.product([False, True], repeat=3):
        worker: Any = SimpleNamespace(
            is_paused=is_paused,
            is_waiting_for_callbacks=has_callbacks,
            _slots=SimpleNamespace(is_stopping=is_stopping, find_room=lambda: 8),
            _quota=quota,
            handled=4,
            _in_flight=[OTHER, SUSPECT],
        )
        is_resting = is_paused or is_stopping or has_callbacks
        assert max(0, Worker._find_room(worker)) == (0 if is_resting else room)


@pytest.mark.parametrize(
    ("rooms", "finds", "asked"),
    [
        ([5], True, [(1, True)]),
        ([5, 5], False, [(1, True), (5, False)]),
        ([5, 0], False, [(1, True)]),
        ([0], True, []),
        ([-2], True, []),
    ],
)
async def test_a_worker_claims_a_suspect_only_if_it_has_room(
    rooms: list[int], asked: list[tuple[int, bool]], *, finds: bool
) -> None:
    """A stuck one would let it wait for a slot, and one with a quota would exceed it.

    Args:
        rooms: how many messages may be claimed, at each look.
        finds: whether there is a suspect.
        asked: what is claimed.
    """
    claims: list[tuple[int, bool]] = []

    async def claim(limit: int, *, suspects: bool, **_: Any) -> Any:
        claims.append((limit, suspects))
        return SimpleNamespace(result=SimpleNamespace(messages=[SUSPECT] * finds))

    worker: Any = SimpleNamespace(
        is_paused=False,
        _find_wait=lambda: 0.0,
        _find_room=iter(rooms).__next__,
        _quarantine=SimpleNamespace(is_wanted=True),
        _claim=claim,
        _quota=None,
        backend=SimpleNamespace(is_billed=False),
    )
    claimed = await Worker._fetch(worker)
    assert claims == asked
    assert (claimed is None) == (rooms[-1] <= 0)
