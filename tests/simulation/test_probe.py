"""The probe in the simulated world: faults neither fail a good store nor pass a bad one."""

import asyncio
from collections.abc import Sequence

import pytest

from jobsync import Applied, Conflicted, Put, Store, Unavailable
from jobsync.stores import probe as module
from jobsync.stores.contract import Change, Outcome
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.stores.probe import PROBE_KEYS, Finding, probe, probe_and_record, read_verdict
from jobsync.testing import Link, Weather, World

SEEDS = range(60)
WEATHER = Weather(
    refused=0.05, undecided=0.05, lost=0.05, unanswered=0.03, late=0.03, doubled=0.1, corrupt=0.03
)
DAY = 86400.0
CONDITIONS = {
    "a name is created once",
    "a stale version is refused",
    "equal content is a new version",
    "of many creators one wins",
    "a deleted name stays deleted",
}


class UnconditionalStore(StoreDecorator):
    """Ignores conditions: the latest write wins."""

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for change in changes:
            base = await self.inner.get(change.key, tombstones=True)
            value = change.value if isinstance(change, Put) else None
            outcomes += await self.inner.write([Put(change.key, value, base)])
        return outcomes


def run_probe(seed: int, *, is_good: bool) -> list[Finding] | None:
    """Probe a store in bad weather; return the findings, None if it was unavailable."""
    world = World(seed)

    async def story() -> list[Finding] | None:
        memory: Store = MemoryStore(components=world.components)
        store = memory if is_good else UnconditionalStore(memory)
        node = world.node("a")
        link = Link(world, node, store, WEATHER)
        try:
            findings = await probe(link, node.components)
        except Unavailable:
            findings = None
        # Late copies arrive; a probe of the next day removes what they left.
        link.mend()
        await node.clock.sleep(DAY + 3600)
        await probe(link, node.components)
        assert await memory.heads(PROBE_KEYS) == []
        return findings

    return world.run(story)


def failed(findings: list[Finding] | None) -> set[str]:
    """Return the names of the checks that failed."""
    return {finding.check for finding in findings or () if not finding.ok}


def test_faults_do_not_fail_a_good_store() -> None:
    """It passes every check, or it was unavailable."""
    results = [run_probe(seed, is_good=True) for seed in SEEDS]
    assert [failed(findings) for findings in results] == [set()] * len(results)
    assert sum(findings is not None for findings in results) > len(results) / 2


def test_faults_do_not_pass_a_store_that_ignores_conditions() -> None:
    """Each broken guarantee is found, or the store was unavailable."""
    results = [run_probe(seed, is_good=False) for seed in SEEDS]
    completed = [failed(findings) for findings in results if findings is not None]
    assert all(found >= CONDITIONS for found in completed)
    assert len(completed) > len(results) / 2


async def refuse_unknown(store: Store, change: Change) -> bool:
    """Take an unknown outcome for a refusal."""
    (outcome,) = await store.write([change])
    return not isinstance(outcome, Applied)


async def fail_unknown(store: Store, change: Change) -> bool:
    """Take an unknown outcome for an acceptance."""
    (outcome,) = await store.write([change])
    return isinstance(outcome, Conflicted)


def test_an_unknown_outcome_taken_for_a_refusal_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that ignores conditions would pass a check."""
    monkeypatch.setattr(module, "_refuses", refuse_unknown)
    with pytest.raises(AssertionError):
        test_faults_do_not_pass_a_store_that_ignores_conditions()


def test_an_unknown_outcome_taken_for_an_acceptance_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A good store would fail a check."""
    monkeypatch.setattr(module, "_refuses", fail_unknown)
    with pytest.raises(AssertionError):
        test_faults_do_not_fail_a_good_store()


@pytest.mark.parametrize("seed", range(20))
def test_a_probe_that_is_killed_disturbs_no_other(seed: int) -> None:
    """Whenever it dies, others find the truth, and nothing is left after another day."""
    world = World(seed)

    async def story() -> None:
        memory = MemoryStore(components=world.components)
        victim, other = world.node("a"), world.node("b")
        link = Link(world, victim, memory, Weather(late=0.2, late_by=600))
        victim.run(probe_and_record(link, victim.components))
        await asyncio.sleep(world.dice.uniform(0, 0.2))
        victim.kill()
        await probe_and_record(memory, other.components)
        assert await read_verdict(memory, other.components) is not None
        await asyncio.sleep(DAY + 3600)
        await probe(memory, other.components)
        assert await memory.heads(PROBE_KEYS) == []

    world.run(story)
