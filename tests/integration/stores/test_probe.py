"""The probe of a store."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from chance import FakeClock

from jobsync import (
    Applied,
    Components,
    Conflicted,
    Misconfigured,
    OutcomeUnknown,
    Put,
    Record,
    Unavailable,
    Unknown,
)
from jobsync.stores.contract import Change, Head, Outcome
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.stores.probe import (
    PROBE_KEYS,
    VERDICT_KEY,
    probe,
    probe_and_record,
    read_verdict,
)
from jobsync.stores.record_codec import assign_nonces

COMPONENTS = Components.system()


class FixedOutcomeStore(StoreDecorator):
    """Returns one outcome for every write."""

    outcome: Outcome = Conflicted()

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        return [self.outcome for _ in changes]


class UnconditionalStore(StoreDecorator):
    """Ignores conditions: the latest write wins."""

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for change in changes:
            base = await self.inner.get(change.key, tombstones=True)
            value = change.value if isinstance(change, Put) else None
            outcomes += await self.inner.write([Put(change.key, value, base)])
        return outcomes


class TwiceSendingStore(StoreDecorator):
    """Sends the first write twice, and returns the answer to the second copy."""

    sent_twice = 0

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        changes = assign_nonces(changes, COMPONENTS.ids)
        if not self.sent_twice:
            self.sent_twice += 1
            await self.inner.write(changes)
        return await self.inner.write(changes)


class ForbiddenStore(StoreDecorator):
    """Has no answer at first, and then refuses a write for lack of permission."""

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self.writes = getattr(self, "writes", 0) + 1
        if self.writes == 3:
            raise Misconfigured("url", self.name, "must be writable", "allow it")
        return [Unknown("no answer") for _ in changes]


class UnremovableStore(StoreDecorator):
    """Loses the requests that remove records."""

    async def drop(self, keys: Sequence[str]) -> None:
        raise OutcomeUnknown(f"{len(keys)} keys", "no answer")


class SilentStore(StoreDecorator):
    """Never answers a request that removes records."""

    async def drop(self, keys: Sequence[str]) -> None:
        del keys
        await asyncio.Event().wait()


class BrokenStore(StoreDecorator):
    """Breaks one promise of the contract.

    Args:
        fault: which one.
    """

    def __init__(self, fault: str) -> None:
        super().__init__(MemoryStore())
        self._fault = fault
        self._listed: list[Head] | None = None

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        (change,) = changes
        current = await self.inner.get(change.key, tombstones=True)
        is_first = change.base is None
        outcomes = await self.inner.write(changes)
        if isinstance(outcomes[0], Applied):
            return outcomes
        match self._fault:
            case "a create replaces a record" if is_first and current and not current.deleted:
                return await self._force(change, current)
            case "a create replaces a tombstone" if is_first and current and current.deleted:
                return await self._force(change, current)
            case "a stale write is applied" if change.base and current:
                return await self._force(change, current)
            case "a refused create is stored" if is_first and current and not current.deleted:
                await self._force(change, current)
            case "a refused stale write is stored" if change.base and current:
                await self._force(change, current)
        return outcomes

    async def _force(self, change: Change, current: Record) -> list[Outcome]:
        value = change.value if isinstance(change, Put) else None
        return await self.inner.write([Put(change.key, value, current)])

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        found = await self.inner.heads(prefix, after=after, until=until, limit=limit)
        if self._fault == "a listing shows nothing":
            return []
        if self._fault == "a listing is old":
            before, self._listed = self._listed, found
            return found if before is None else before
        return found


FAULTS = {
    "a create replaces a record": {"a name is created once", "of many creators one wins"},
    "a create replaces a tombstone": {"a deleted name stays deleted"},
    "a stale write is applied": {"a stale version is refused", "equal content is a new version"},
    "a refused create is stored": {"of many creators one wins"},
    "a refused stale write is stored": {"a stale version is refused"},
    "a listing shows nothing": {"a listing shows what was written"},
    "a listing is old": {"a listing shows what was written"},
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_each_check_finds_what_it_is_for(fault: str) -> None:
    """A store that breaks one promise fails the checks of that promise, and no others."""
    findings = await probe(BrokenStore(fault), COMPONENTS)
    assert {finding.check for finding in findings if not finding.ok} == FAULTS[fault]
    for finding in findings:
        assert bool(finding.fix) is not finding.ok
        assert finding.detail or finding.ok


@pytest.mark.parametrize("skew", [0.0, 29.9, 30.1, -29.9, -30.1, 86400.0])
async def test_a_difference_of_the_clocks_is_reported_with_the_fix(skew: float) -> None:
    """It does not fail the probe: it affects only what people see."""
    clock = FakeClock()
    store = MemoryStore(components=at(clock))
    ours = FakeClock()
    ours.wall_seconds = clock.wall_seconds + skew
    *_, finding = await probe(store, at(ours))
    assert (finding.check, finding.ok) == ("clocks agree", True)
    words = f"this machine is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
    assert finding.detail == words
    assert bool(finding.fix) is (abs(skew) > 30)


async def test_what_an_interrupted_probe_has_left_is_removed_a_day_later() -> None:
    """Records and tombstones; not those of a probe that may still run."""
    clock = FakeClock()
    store = MemoryStore(components=at(clock))
    for day in range(3):
        for name in ("record", "tombstone"):
            key = f"{PROBE_KEYS}{at(clock).ids.batch()}"
            record = await store.create(key, name)
            if name == "tombstone":
                await store.delete(record)
        clock.wall_seconds += 86400.0 - 1
        clock.mono_seconds += 86400.0 - 1
        await probe(store, at(clock))
        # A tombstone is removed after an hour, a record after a day: that of today stays.
        left = [record.value for record in await store.scan(PROBE_KEYS)]
        assert left == ["record"], day
        assert len(store._data.records) == 1


def at(clock: FakeClock) -> Components:
    """Return components with this clock."""
    return Components(clock=clock, randomness=COMPONENTS.randomness, events=COMPONENTS.events)


async def test_a_good_store_passes_and_is_left_as_it_was() -> None:
    """Every check passes, and no key is left."""
    store = MemoryStore()
    findings = await probe(store, COMPONENTS)
    assert [finding.check for finding in findings if not finding.ok] == []
    assert store._data.records == {}


async def test_a_store_that_ignores_conditions_fails() -> None:
    """Each broken guarantee is named."""
    findings = await probe(UnconditionalStore(MemoryStore()), COMPONENTS)
    failed = {finding.check for finding in findings if not finding.ok}
    assert failed >= {
        "a name is created once",
        "a stale version is refused",
        "equal content is a new version",
        "of many creators one wins",
    }
    with pytest.raises(Misconfigured, match="fails the probe: a name is created once"):
        await probe_and_record(UnconditionalStore(MemoryStore()), COMPONENTS)


async def test_a_store_that_refuses_everything_fails() -> None:
    """It is a misconfigured store, not a conflict that a caller could resolve."""
    store = FixedOutcomeStore(MemoryStore())
    with pytest.raises(Misconfigured, match="fails the probe"):
        await probe_and_record(store, COMPONENTS)


async def test_a_store_that_never_answers_is_unavailable(clock: FakeClock) -> None:
    """An unknown outcome is not a refusal: nothing is recorded after 30 seconds of trials."""
    memory = MemoryStore()
    store = FixedOutcomeStore(memory)
    store.outcome = Unknown("no answer")
    with pytest.raises(Unavailable, match=r"no definite answer came within 30 s \(no answer\)"):
        await probe_and_record(store, at(clock))
    assert memory._data.records == {}


async def test_a_write_that_was_refused_and_stored_is_tried_again() -> None:
    """Something in between sent it twice, and returned the second answer."""
    store = TwiceSendingStore(MemoryStore())
    findings = await probe(store, COMPONENTS)
    assert store.sent_twice == 1
    assert [finding.check for finding in findings if not finding.ok] == []


class ForgetfulStore(StoreDecorator):
    """Loses the replies to its first writes."""

    lost = 0

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        outcomes = await self.inner.write(changes)
        if self.lost == 20:
            return outcomes
        self.lost += 1
        return [Unknown("no answer") for _ in outcomes]


async def test_a_check_that_is_tried_again_leaves_nothing(clock: FakeClock) -> None:
    """Each trial has a key of its own; all of them are removed."""
    memory = MemoryStore(components=at(clock))
    findings = await probe(ForgetfulStore(memory), at(clock))
    assert [finding.check for finding in findings if not finding.ok] == []
    assert memory._data.records == {}
    assert memory._data.levels == {}


async def test_a_store_that_cannot_be_written_ends_the_probe_at_once(clock: FakeClock) -> None:
    """The other checks do not go on until their deadline."""
    store = ForbiddenStore(MemoryStore())
    begun = clock.mono()
    with pytest.raises(Misconfigured, match="must be writable"):
        await probe(store, at(clock))
    assert clock.mono() - begun < 1


async def test_a_lost_removal_does_not_spoil_the_findings() -> None:
    """What stays in the store is removed by the next probe a day later; younger keys stay."""
    memory = MemoryStore()
    findings = await probe(UnremovableStore(memory), COMPONENTS)
    assert all(finding.ok for finding in findings)
    left = {head.key for head in await memory.heads(PROBE_KEYS)}
    assert len(left) >= 5
    await probe(memory, COMPONENTS)
    assert {head.key for head in await memory.heads(PROBE_KEYS)} == left
    clock = FakeClock()
    clock.wall_seconds = COMPONENTS.clock.wall().seconds + 86400 + 60
    await probe(memory, at(clock))
    assert await memory.heads(PROBE_KEYS) == []


async def test_a_removal_without_an_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The findings are complete without it."""
    monkeypatch.setattr("jobsync.stores.probe._REMOVAL_TIMEOUT", 0.01)
    findings = await probe(SilentStore(MemoryStore()), COMPONENTS)
    assert all(finding.ok for finding in findings)


async def test_the_verdict_is_stored() -> None:
    """It is read back, and written again after it was deleted."""
    store = MemoryStore()
    assert await read_verdict(store, COMPONENTS) is None
    await probe_and_record(store, COMPONENTS)
    verdict = await read_verdict(store, COMPONENTS)
    assert verdict is not None
    assert "a name is created once" in verdict.passed
    record = await store.get(VERDICT_KEY)
    assert record is not None
    await store.delete(record)
    await probe_and_record(store, COMPONENTS)
    assert await read_verdict(store, COMPONENTS) is not None


@pytest.mark.parametrize("value", [5, {}, {"at": 1, "passed": [], "traits": 3}])
async def test_a_record_that_is_not_a_verdict_is_refused(value: Any) -> None:
    """The error has the fix."""
    store = MemoryStore()
    outcomes = await store.write([Put(VERDICT_KEY, value)])
    assert isinstance(outcomes[0], Applied)
    with pytest.raises(Misconfigured, match="remove meta/probe by hand"):
        await read_verdict(store, COMPONENTS)
