"""Settling after every sequence of faults: no outcome is reported as another."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import (
    Applied,
    Components,
    Conflicted,
    Corrupt,
    Events,
    Misconfigured,
    OutcomeUnknown,
    Put,
    Record,
    Unavailable,
    Unknown,
)
from jobsync.stores.contract import Change, Delete, Outcome
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.stores.settling import DEADLINE, SettlingStore

UNANSWERED = ("lost", "dropped", "late")
"""It arrives and the reply does not; it does not arrive; it arrives with a later request."""
REFUSED = ("refused", "forbidden")
NONCE = "A" * 12


class FaultyStore(StoreDecorator):
    """Has one fault for each request, in order; then none.

    Args:
        script: the faults.
        rival_at: the number of the request before which another process writes the record.
        rival: what that does, "writes" or "deletes".
    """

    def __init__(
        self, script: Sequence[str], rival_at: int | None = None, rival: str = "writes"
    ) -> None:
        super().__init__(MemoryStore(components=build_components()))
        self.applied: list[str] = []
        self._script = iter(script)
        self._rival_at = rival_at
        self._rival = rival
        self._requests = itertools.count()
        self._late: list[Any] = []
        self.clock = FakeClock()
        self.sent_at: list[float] = []
        """When writes were sent."""

    async def deliver(self) -> None:
        """Deliver all requests that are late."""
        while self._late:
            await self._late.pop(0)()

    async def _begin(self) -> str:
        await self.deliver()
        if next(self._requests) == self._rival_at:
            current = await self.inner.get("n/a", tombstones=True)
            await self._apply([Put("n/a", "rival", current)])
            if self._rival == "deletes":
                found = await self.inner.get("n/a")
                assert found is not None
                await self._apply([found.delete()])
        fault = next(self._script, "none")
        if fault == "refused":
            raise Unavailable(self.name, "busy")
        if fault == "forbidden":
            raise Misconfigured("url", self.name, "has other rights", "grant them")
        return fault

    async def _apply(self, changes: Sequence[Change]) -> list[Outcome]:
        outcomes = await self.inner.write(changes)
        self.applied += [o.record.nonce for o in outcomes if isinstance(o, Applied)]
        return outcomes

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        if await self._begin() == "damaged":
            raise Corrupt(keys[0], "damaged")
        return await self.inner.get_many(keys, tombstones=tombstones)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self.sent_at.append(self.clock.mono_seconds)
        fault = await self._begin()
        if fault == "none":
            return await self._apply(changes)
        if fault == "lost":
            await self._apply(changes)
        if fault == "late":
            self._late.append(lambda: self._apply(changes))
        # What is not in doubt has its outcome, whatever became of the first.
        return [Unknown(fault), *(Conflicted() for _ in changes[1:])]

    async def append(self, stream: str, entries: Sequence[Any], *, batch: str = "") -> None:
        fault = await self._begin()
        if fault == "late":
            self._late.append(lambda: self.inner.append(stream, entries, batch=batch))
        if fault in {"none", "lost"}:
            await self.inner.append(stream, entries, batch=batch)
        if fault != "none":
            raise OutcomeUnknown(stream, fault)


def build_components(clock: FakeClock | None = None) -> Components:
    """Return components whose clock moves with each pause."""
    clock = clock or FakeClock()
    return Components(clock=clock, randomness=SeededRandomness(1), events=Events())


async def settle(
    store: FaultyStore, base: Record | None, deadline: float, *, deletes: bool = False
) -> Outcome | str:
    """Write or delete a record; return the outcome, or the name of the error."""
    change: Change = Put("n/a", "mine", base, nonce=NONCE)
    if base is not None and deletes:
        change = Delete(base, nonce=NONCE)
    settling = SettlingStore(store, build_components(store.clock), deadline)
    begun = store.clock.mono_seconds
    try:
        (outcome,) = await settling.write([change])
    except (Unavailable, Misconfigured) as error:
        return type(error).__name__
    finally:
        # Nothing is sent again after the deadline.
        assert all(at < begun + deadline for at in store.sent_at[1:])
        await store.deliver()
    return outcome


def check(store: FaultyStore, outcome: Outcome | str, base: Record | None) -> None:
    """Compare what was reported with what has happened."""
    assert store.applied.count(NONCE) <= 1
    if isinstance(outcome, Applied):
        record = outcome.record
        assert NONCE in store.applied
        assert (record.value, record.nonce) == (None if record.deleted else "mine", NONCE)
        assert record.trail.split(" ") == [NONCE, *(base.trail.split(" ") if base else [])]
        assert record.seq == (base.seq + 1 if base else 1)
    elif not isinstance(outcome, Unknown):
        assert NONCE not in store.applied


@pytest.mark.parametrize("first", UNANSWERED)
@pytest.mark.parametrize("rival", ["writes", "deletes"])
@pytest.mark.parametrize("change", ["create", "replace", "delete"])
async def test_a_write_without_an_answer_is_settled_after_any_faults(
    first: str, rival: str, change: str
) -> None:
    """Whatever became of each read and resend, and whenever another process writes it too.

    Once the faults are over, the outcome is definite. Only after the deadline, or if a record
    could not be read, it may stay unknown.
    """
    reads = ("none", "damaged", *REFUSED)
    sends = ("none", *UNANSWERED, *REFUSED)
    for *rest, rival_at, deadline in itertools.product(
        reads, sends, ("none", "refused"), (None, 0, 1, 2, 3), (30.0, 1e-9)
    ):
        store = FaultyStore([first, *rest], rival_at, rival)
        base = await store.inner.create("n/a", "before") if change != "create" else None
        outcome = await settle(store, base, deadline, deletes=change == "delete")
        check(store, outcome, base)
        assert not isinstance(outcome, str), (rest, rival_at)
        if isinstance(outcome, Applied):
            assert outcome.record.deleted is (change == "delete")
        if deadline == 30.0 and "damaged" not in rest:
            assert not isinstance(outcome, Unknown), (rest, rival_at)


@pytest.mark.parametrize("first", [*REFUSED, "none"])
async def test_a_write_that_was_answered_is_not_sent_again(first: str) -> None:
    """One that was refused before it was written is an error; nothing is settled."""
    store = FaultyStore([first])
    outcome = await settle(store, None, 30.0)
    check(store, outcome, None)
    errors = {"refused": "Unavailable", "forbidden": "Misconfigured"}
    assert outcome == errors[first] if first in errors else isinstance(outcome, Applied)
    assert next(store._requests) == 1


@pytest.mark.parametrize("call", ["write", "append"])
async def test_a_store_in_trouble_is_asked_less_and_less_often(call: str) -> None:
    """Until the time is up, and it is still a minute's work at most."""
    store = FaultyStore(["dropped"] * 1000)
    pauses: list[float] = []
    sleep = store.clock.sleep

    async def count(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(seconds)

    store.clock.sleep = count  # type: ignore[method-assign]
    settling = SettlingStore(store, build_components(store.clock))
    if call == "write":
        (outcome,) = await settling.write([Put("n/a", 1)])
        assert isinstance(outcome, Unknown)
    else:
        with pytest.raises(OutcomeUnknown):
            await settling.append("h", [1])
    limits = [min(0.05 * 2**number, 4.0) for number in range(len(pauses))]
    assert all(pause <= limit for pause, limit in zip(pauses, limits, strict=True))
    # A random part of what is allowed, each time.
    assert max(pauses) > 1
    assert DEADLINE <= sum(pauses) < DEADLINE + 4


@pytest.mark.parametrize("seconds", [29.0, 31.0])
@pytest.mark.parametrize("call", ["write", "append"])
async def test_the_time_of_the_first_request_counts(call: str, seconds: float) -> None:
    """After it nothing is sent again: a copy must not arrive when nobody expects it any more."""
    store = FaultyStore(["dropped"] * 1000)
    begun, last = store.clock.mono_seconds, store.clock.mono_seconds

    async def begin() -> str:
        nonlocal last
        last = store.clock.mono_seconds
        if last == begun:
            store.clock.mono_seconds += seconds
        return "dropped"

    store._begin = begin  # type: ignore[method-assign]
    settling = SettlingStore(store, build_components(store.clock))
    if call == "write":
        assert isinstance((await settling.write([Put("n/a", 1)]))[0], Unknown)
        last = store.sent_at[-1]
    else:
        with pytest.raises(OutcomeUnknown):
            await settling.append("h", [1])
    # The last copy of an append is sent after a pause that began before.
    assert last <= begun + DEADLINE + (4 if call == "append" else 0)
    assert (last == begun) is (seconds > DEADLINE)


async def test_the_others_of_a_batch_keep_their_outcomes() -> None:
    """Only what is in doubt is read and sent again."""
    for rest in itertools.product(("none", *REFUSED), ("none", *UNANSWERED, *REFUSED)):
        store = FaultyStore(["dropped", *rest])
        changes = [Put("n/a", 1), Put("n/b", 1), Put("n/c", 1)]
        outcomes = await SettlingStore(store, build_components()).write(changes)
        assert [type(outcome) for outcome in outcomes] == [Applied, Conflicted, Conflicted]
        assert [head.key for head in await store.inner.heads("n/")] == ["n/a"]


class DividedStore(StoreDecorator):
    """Answers the writes of a batch one by one, or not, by what the test says of each key."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        super().__init__(MemoryStore(components=build_components()))
        self._answers = answers
        self._sent: Counter[str] = Counter()

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for change in changes:
            self._sent[change.key] += 1
            answer = self._answers[change.key]
            if answer == "taken" and self._sent[change.key] == 1:
                await self.inner.write([Put(change.key, "rival")])
            if answer == "never" or (answer == "second" and self._sent[change.key] == 1):
                outcomes.append(Unknown("dropped"))
                continue
            found = await self.inner.write([change])
            outcomes += [Unknown("lost")] if answer in {"lost", "taken"} else found
        return outcomes


@pytest.mark.parametrize("deadline", [1e-9, DEADLINE])
async def test_each_change_of_a_batch_has_the_outcome_that_was_found_for_it(
    deadline: float,
) -> None:
    """What was settled stays so, also if another change of the batch cannot be."""
    expected = {
        "answered": Applied,
        "lost": Applied,
        "second": Applied,
        "taken": Conflicted,
        "never": Unknown,
    }
    for answers in itertools.product(expected, repeat=3):
        by_key = dict(zip(("n/a", "n/b", "n/c"), answers, strict=True))
        changes = [Put(key, "mine") for key in by_key]
        settling = SettlingStore(DividedStore(by_key), build_components(), deadline)
        outcomes = await settling.write(changes)
        assert [type(outcome) for outcome in outcomes] == [expected[each] for each in answers]


def expect_append(script: Sequence[str], deadline: float) -> str:
    """Return what must become of an append."""
    may_have_arrived = False
    for number, fault in enumerate(script):
        if fault == "none":
            return "stored"
        may_have_arrived |= fault in UNANSWERED
        if not may_have_arrived:
            return {"refused": "Unavailable", "forbidden": "Misconfigured"}[fault]
        # The tiny deadline is over after the first pause.
        if deadline == 0.0 or (deadline < 1 and number):
            return "OutcomeUnknown"
    return "stored"


async def test_an_append_is_stored_once_or_in_doubt_after_any_faults() -> None:
    """It is never reported as not written if a copy may still arrive."""
    faults = ("none", *UNANSWERED, *REFUSED)
    for *script, deadline in itertools.product(faults, faults, faults, (30.0, 1e-9, 0.0)):
        store = FaultyStore(script)
        try:
            await SettlingStore(store, build_components(), deadline).append("h", [1, 2])
            end = "stored"
        except (OutcomeUnknown, Unavailable, Misconfigured) as error:
            end = type(error).__name__
        await store.deliver()
        found = [entry.value for entry in await store.inner.read("h")]
        assert end == expect_append(script, deadline), (script, deadline)
        assert found in ([1, 2], []) if end == "OutcomeUnknown" else True
        assert found == ([1, 2] if end == "stored" else found)
        assert end not in {"Unavailable", "Misconfigured"} or found == []
