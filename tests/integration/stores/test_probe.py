"""The probe of a store."""

from collections.abc import Sequence
from typing import Any

import pytest

from jobsync import Applied, Components, Conflicted, Misconfigured, Put, Unknown
from jobsync.stores.contract import Change, Outcome, StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.stores.probe import VERDICT_KEY, probe, probe_and_record, read_verdict

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


@pytest.mark.parametrize("outcome", [Conflicted(), Unknown("no answer")])
async def test_a_store_that_refuses_everything_fails(outcome: Outcome) -> None:
    """It is a misconfigured store, not a conflict that a caller could resolve."""
    store = FixedOutcomeStore(MemoryStore())
    store.outcome = outcome
    with pytest.raises(Misconfigured, match="fails the probe"):
        await probe_and_record(store, COMPONENTS)


async def test_the_verdict_is_stored() -> None:
    """It is read back, and written again after it was deleted."""
    store = MemoryStore()
    assert await read_verdict(store) is None
    await probe_and_record(store, COMPONENTS)
    verdict = await read_verdict(store)
    assert verdict is not None
    assert "a name is created once" in verdict.passed
    record = await store.get(VERDICT_KEY)
    assert record is not None
    await store.delete(record)
    await probe_and_record(store, COMPONENTS)
    assert await read_verdict(store) is not None


@pytest.mark.parametrize("value", [5, {}, {"at": 1, "passed": [], "traits": 3}])
async def test_a_record_that_is_not_a_verdict_is_refused(value: Any) -> None:
    """The error has the fix."""
    store = MemoryStore()
    outcomes = await store.write([Put(VERDICT_KEY, value)])
    assert isinstance(outcomes[0], Applied)
    with pytest.raises(Misconfigured, match="remove meta/probe by hand"):
        await read_verdict(store)
