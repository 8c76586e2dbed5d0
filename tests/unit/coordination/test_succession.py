"""Requests to hand over: which of two is stored, and when; and who waits for whom."""

import itertools
import math
from typing import Any, cast

import msgspec
import pytest
from chance import FakeClock

from jobsync import CoordinatorSettings
from jobsync.coordination.role import HeldTerm, Role
from jobsync.coordination.succession import (
    REQUESTS,
    HandoverRequest,
    Mandate,
    Precedence,
    read_request,
    request_handover,
)
from jobsync.core.clock import Mono
from jobsync.core.trust import Timing
from jobsync.stores.memory import MemoryStore

DESIRED = (None, "worker-1", "worker-2")
KINDS = [*itertools.product((False, True), DESIRED)]


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
async def test_a_forced_request_replaces_any_other_one(
    first: tuple[bool, str | None], second: tuple[bool, str | None]
) -> None:
    """One that is not forced replaces none: the holder hands over in any case."""
    store = MemoryStore()
    for forced, desired in (first, second):
        request = HandoverRequest(epoch=3, by="worker-9", desired=desired, forced=forced)
        assert await request_handover(store, "role", request)
    stored = read_request(await store.get(f"{REQUESTS}role"), 3)
    assert stored is not None
    assert (stored.forced, stored.desired) == (second if second[0] else first)


async def test_a_request_about_another_term_is_void() -> None:
    """It neither counts nor is in the way."""
    store = MemoryStore()
    for epoch in (3, 4):
        assert await request_handover(store, "role", HandoverRequest(epoch=epoch, by="worker-9"))
    record = await store.get(f"{REQUESTS}role")
    assert read_request(record, 3) is None
    assert read_request(record, 4) is not None


TIMING = Timing(heartbeat=5, timeout=15)
LEAST, MOST = 20.0, 300.0


class Fellows:
    """The candidates for the role, and how often they were listed."""

    def __init__(self) -> None:
        self.eligible = ["worker-1.a"]
        self.listings = 0

    async def list_for(self, _: str) -> list[str]:
        """Return the candidates."""
        self.listings += 1
        return self.eligible


async def hold(clock: FakeClock, epoch: int, requested_at: float, there_at: float) -> float:
    """Hold a term until it is handed over; return its age then.

    Args:
        clock: of the holder.
        epoch: of the term.
        requested_at: the age at which the second worker asks for the role.
        there_at: the age at which it is a candidate.
    """
    store, fellows = MemoryStore(), Fellows()
    settings = CoordinatorSettings(min_epoch_duration=LEAST, max_epoch_duration=MOST)
    mandate = Mandate(clock, TIMING, settings.for_store(store, TIMING), lambda _: None)
    term = HeldTerm(epoch, "worker-1.a", 0, clock.mono())
    while (age := clock.mono() - term.since) < 2 * MOST:
        if age == requested_at:
            request = HandoverRequest(epoch=epoch, by="worker-2", desired="worker-2", forced=True)
            assert await request_handover(store, "role", request)
        if age == there_at:
            fellows.eligible.append("worker-2.a")
        mandate.request = await store.get(f"{REQUESTS}role")
        match await mandate.decide("role", term, cast("Any", fellows)):
            case ("hand over to", successor):
                assert successor == "worker-2.a"
                return age
            case decision:
                is_over = clock.mono() - mandate.renewed_at >= MOST
                assert decision == ("renew" if is_over else "keep")
                mandate.renewed_at = clock.mono() if is_over else mandate.renewed_at
        # Listing costs a request, so it is not done at every heartbeat.
        waited = max(0.0, age - max(LEAST, requested_at))
        assert fellows.listings <= 2 + waited / TIMING.timeout
        clock.mono_seconds += TIMING.heartbeat
    return math.inf


async def test_a_request_is_met_soon_after_it_can_be() -> None:
    """Not before the minimum, and at once then if its worker is a candidate by that time.

    One that becomes a candidate later waits for a timeout at most.
    """
    clock = FakeClock()
    ages = [5.0 * number for number in range(14)]
    for epoch, (requested_at, there_at) in enumerate(itertools.product(ages, repeat=2), 1):
        age = await hold(clock, epoch, requested_at, there_at)
        earliest = max(LEAST, requested_at, there_at)
        is_candidate = there_at <= max(LEAST, requested_at)
        assert earliest <= age <= earliest + (0.0 if is_candidate else TIMING.timeout)
    assert await hold(clock, 1, math.inf, 0.0) == math.inf


@pytest.mark.parametrize("waits", [0.0, TIMING.heartbeat, TIMING.timeout])
async def test_a_request_is_not_held_up_by_one_that_could_not_be_met(waits: float) -> None:
    """A new one is considered at once, whenever the one before was; the same one only later."""
    clock, store, fellows = FakeClock(), MemoryStore(), Fellows()
    fellows.eligible.append("worker-2.a")
    settings = CoordinatorSettings(min_epoch_duration=0.0, max_epoch_duration=MOST)
    mandate = Mandate(clock, TIMING, settings.for_store(store, TIMING), lambda _: None)
    term = HeldTerm(1, "worker-1.a", 0, clock.mono())

    async def ask(desired: str) -> object:
        request = HandoverRequest(epoch=1, by="worker-2", desired=desired, forced=True)
        assert await request_handover(store, "role", request)
        mandate.request = await store.get(f"{REQUESTS}role")
        return await mandate.decide("role", term, cast("Any", fellows))

    assert await ask("worker-8") == "keep"
    clock.mono_seconds += waits
    for absent in ("worker-8", "worker-8", "worker-9"):
        listings = fellows.listings
        assert await ask(absent) == "keep"
        is_new = absent == "worker-9" or (waits == TIMING.timeout and listings == 1)
        assert fellows.listings == listings + is_new
    assert await ask("worker-2") == ("hand over to", "worker-2.a")


async def test_whoever_waits_for_another_candidate_checks_when_the_wait_is_over() -> None:
    """In each of several terms, after a release to a successor, a release, and a death."""
    clock = FakeClock()
    precedence = Precedence(clock, TIMING)
    fellows = ["worker-1.a", "worker-2.a"]
    held = Role(epoch=1, owner="worker-0.a", since=0.0, until=0.0, timeout=TIMING.timeout)
    for epoch in range(1, 7):
        role = msgspec.structs.replace(held, epoch=epoch)
        if epoch % 3:
            successor = "worker-1.a" if epoch % 3 == 1 else None
            role = role.without_owner("stopped", clock.wall_seconds, successor)
        precedence.update(f"version {epoch}", epoch)
        began, told = clock.mono(), list[Mono]()
        answers: list[tuple[bool, bool]] = []
        for _ in range(50):
            is_reserved = precedence.is_reserved(role, "worker-2.a")
            defers = not is_reserved and precedence.should_defer(role, "worker-2.a", fellows)
            answer = (is_reserved, defers)
            if answers and answer != answers[-1]:
                # Nothing was read: only the time has passed.
                assert clock.mono() in told
            answers.append(answer)
            told += precedence.list_ends(role)
            clock.mono_seconds += TIMING.heartbeat / 20
            clock.wall_seconds += TIMING.heartbeat / 20
        assert True in answers[0]
        assert answers[-1] == (False, False)
        # An interval for the successor, and one for the oldest.
        assert max(told) - began <= TIMING.heartbeat * (1 if role.successor is None else 2)
        assert not precedence.is_reserved(role, "worker-1.a")
