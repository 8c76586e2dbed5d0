"""Nodes of one fleet, from joining to leaving."""

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from job_nodes import SETTINGS, StartNode
from waiting import until

from jobsync import Components, Conflict, Corrupt, Misconfigured, OutcomeUnknown, Store, Unavailable
from jobsync.coordination.runner import WaitForChange
from jobsync.core.clock import Mono, Wall
from jobsync.core.pins import Pin
from jobsync.jobs import node_loop
from jobsync.jobs.events import (
    NodeFailed,
    NodeJoined,
    PinsExpired,
    PinsIgnored,
    Rebalanced,
    TokensChanged,
)
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.node_loop import NodeLoop
from jobsync.jobs.registration import NodeList
from jobsync.stores.contract import Record
from jobsync.stores.corruption_log import RecordSetAside
from jobsync.stores.memory import MemoryStore

HOUR = 3600.0


def make_pin(task: str, expires_at: float | None) -> Pin:
    """A pin to any node."""
    return Pin(task=task, token=1, patterns=("%",), created_by="a", expires_at=expires_at)


async def test_the_history_says_why_tokens_moved(start_node: StartNode, store: Store) -> None:
    """First all tokens are assigned, then a node joins, then one leaves."""
    first = await start_node("a")
    # A clock of which each reading takes a quarter of a second.
    readings = itertools.count()
    first._rebalancer._clock = SimpleNamespace(mono=lambda: Mono(0.25 * next(readings)))
    rebalanced: list[Rebalanced] = []
    changed: list[TokensChanged] = []
    first._events.on(Rebalanced.name, rebalanced.append)
    first._events.on(TokensChanged.name, changed.append)
    second = await start_node("b")
    await second.stop(30)
    lines = [entry.value for entry in await store.read(JobKeys(SETTINGS.fleet).rebalances)]
    reasons = [
        (line["trigger_reason"], line["nodes_before"], line["nodes_after"], line["tokens_moved"])
        for line in lines
    ]
    assert reasons == [
        ("initial_distribution", 0, 1, 20),
        ("membership_change", 1, 2, 10),
        ("membership_change", 2, 1, 10),
    ]
    assert {line["leader_node"] for line in lines} == {"a"}
    assert [line["duration_ms"] for line in lines[1:]] == [250.0, 250.0]
    await until(lambda: first.tokens == frozenset(range(20)), "it has all tokens again")
    # Events tell the same.
    told = [
        (event.node, event.reason, event.nodes_before, event.nodes_after, event.tokens_moved)
        for event in rebalanced
    ]
    assert told == [("a", *reason) for reason in reasons[1:]]
    numbers = [event.number for event in rebalanced]
    assert numbers == sorted({*numbers})
    assert 1 < numbers[0] < numbers[-1] <= first.number
    gains = [(event.tokens, event.added, event.removed) for event in changed]
    assert [gain for gain in gains if gain[1] or gain[2]] == [(10, 0, 10), (20, 10, 0)]
    assert {event.node for event in changed} == {"a"}
    assert changed[-1].number == first.number


async def test_nodes_are_dated_by_the_clock_of_the_store(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may differ from this machine's."""
    wall = Components.system().clock.wall

    async def now(_: MemoryStore) -> Wall:
        return wall() + HOUR

    monkeypatch.setattr(MemoryStore, "now", now)
    node = await start_node("a")
    await node.claims.store_clock.read()
    (found,) = await NodeList(node).active()
    for field in ("created_on", "last_heartbeat"):
        assert found[field].timestamp() == pytest.approx(wall().seconds + HOUR, abs=60)


async def test_a_node_records_the_date_that_it_still_works_on(
    start_node: StartNode, store: Store
) -> None:
    """At its start, and again while it works: nobody removes the claims of that date."""
    node = await start_node("a")
    key = JobKeys(SETTINGS.fleet).work_date(SETTINGS.day)
    first = await store.get(key)
    assert first is not None
    await store.put(first, {"used": first.value["used"] - 240 * HOUR})
    node._work_date._recorded -= 240 * HOUR
    node._wakeup.set()

    async def is_recorded() -> bool:
        latest = await store.get(key)
        return latest is not None and latest.value["used"] >= first.value["used"]

    await until(is_recorded, "it is recorded again")


async def test_a_node_that_sends_a_heartbeat_while_it_is_listed_has_one(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: it was listed as one that had never sent any. Those of an earlier boot are unknown."""
    node = await start_node("a")
    age, seen = MemoryStore.age, list[str]()

    async def age_after_a_heartbeat(store: MemoryStore, record: Record) -> float | None:
        seen.append(record.version)
        if len(seen) == 1:
            await until(lambda: has_changed(store, record), "it sends a heartbeat")
        return await age(store, record)

    async def has_changed(store: MemoryStore, record: Record) -> bool:
        return await store.get(record.key) != record

    monkeypatch.setattr(MemoryStore, "age", age_after_a_heartbeat)
    (found,) = await NodeList(node).active()
    assert found["last_heartbeat"] is not None
    assert len({*seen}) >= 2

    async def age_of_an_earlier_boot(_: MemoryStore, __: Record) -> float:
        return math.inf

    monkeypatch.setattr(MemoryStore, "age", age_of_an_earlier_boot)
    (found,) = await NodeList(node).active()
    assert found["last_heartbeat"] is None


async def test_an_observer_waits_for_no_node_and_owns_nothing(start_node: StartNode) -> None:
    """It is ready before any other node has joined."""
    observer = await start_node("watcher", is_observer=True)
    assert observer.tokens == frozenset()
    worker = await start_node("a")
    assert len(worker.tokens) == 20


async def test_tasks_can_be_pinned_before_tokens_are_assigned(
    start_node: StartNode, store: Store
) -> None:
    """Found: an observer without other nodes leads and assigns nothing; a pin was a TypeError."""
    observer = await start_node("watcher", is_observer=True)
    key = JobKeys(SETTINGS.fleet).assignment

    async def is_sealed() -> bool:
        return await store.get(key) is not None

    await until(is_sealed, "it leads")
    await observer.withhold_pinned({"t": observer.token("t")})
    worker = await start_node("a")
    assert worker.can_claim("t")


async def test_a_node_that_retires_claims_nothing_more_and_hands_over(
    start_node: StartNode,
) -> None:
    """It finishes its running task; another node soon owns everything else."""
    first, second = await start_node("a"), await start_node("b")
    mine = [str(number) for number in range(100) if first.can_claim(str(number))]
    assert await first.claim([mine[0]]) == {}
    first.retire()
    assert not any(first.can_claim(task) for task in mine)
    await until(lambda: len(second.tokens) == 20)
    assert first.tokens == frozenset()
    assert await first.finish([mine[0]]) == {}
    assert not second.can_claim(mine[0])
    assert second.can_claim(mine[1])


async def test_a_node_that_fails_owns_nothing_and_leaves(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that others take over, though its session could go on; the error is reported."""
    node = await start_node("a")
    assert len(node.tokens) == 20
    failed: list[NodeFailed] = []
    node._events.on(NodeFailed.name, failed.append)
    error, leaving = ZeroDivisionError("a bug"), asyncio.Event()

    async def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(node, "_run_once", fail)
    monkeypatch.setattr(node.membership, "start_leaving", leaving.set)
    node._wakeup.set()
    await until(lambda: failed, "it has failed")
    assert (node.tokens, node.failure, leaving.is_set()) == (frozenset(), error, True)
    assert failed == [NodeFailed(node="a", error="ZeroDivisionError: a bug")]


async def test_errors_that_may_go_away_end_no_node(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is waited out. Those that leave a request unanswered say so; damage is reported."""
    node = await start_node("a")
    reported: list[RecordSetAside] = []
    node._events.on(RecordSetAside.name, reported.append)
    run_once = node._run_once
    errors: list[Exception] = [
        Unavailable("store", "silent"),
        OutcomeUnknown("key", "lost"),
        Conflict("key"),
        Corrupt("key", "damaged"),
        Misconfigured("url", "x", "is refused", "wait"),
    ]
    raised: list[Exception] = []
    noted: list[bool] = []

    async def fail(wait_for_change: WaitForChange) -> None:
        if raised:
            noted.append(node._failed_at is not None)
            node._failed_at = None
        if errors:
            raised.append(errors.pop(0))
            raise raised[-1]
        monkeypatch.undo()
        await run_once(wait_for_change)

    monkeypatch.setattr(node, "_run_once", fail)
    node._wakeup.set()
    await until(lambda: len(noted) == 5, "all were raised")
    assert noted == [True, True, False, False, False]
    assert (len(node.tokens), node.failure) == (20, None)
    assert [(each.key, each.reason) for each in reported] == [("key", "damaged")]


async def test_pins_that_are_ignored_are_reported_when_their_number_changes(
    start_node: StartNode,
) -> None:
    """As long as there are any."""
    node = await start_node("a", locks_enabled=False)
    told: list[PinsIgnored] = []
    node._events.on(PinsIgnored.name, told.append)
    for count in (0, 2, 2, 1, 1, 0, 0, 1, 3):
        node._report_ignored_pins(count)
    assert told == [PinsIgnored(node="a", count=count) for count in (2, 1, 1, 3)]


async def test_pins_that_have_expired_are_removed_and_counted(start_node: StartNode) -> None:
    """Those that are left are in force."""
    node = await start_node("a")
    told: list[PinsExpired] = []
    node._events.on(PinsExpired.name, told.append)
    lasting = [make_pin(f"lasting {number}", None) for number in range(3)]
    await node.pins.add("a", [make_pin("x", 1.0), make_pin("y", 2.0), *lasting])
    for _ in range(2):
        assert {pin.task for pin in await node._read_pins()} == {pin.task for pin in lasting}
        await until(lambda: told, "they are removed")
    assert told == [PinsExpired(node="a", count=2)]


@pytest.mark.parametrize("own", ["there", "missing", "deleted", "damaged"])
@pytest.mark.parametrize("assignment", ["there", "missing", "damaged"])
async def test_a_node_looks_at_its_own_record_with_the_assignment(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, own: str, assignment: str
) -> None:
    """It writes what was deleted again; what is damaged is told of the assignment alone."""
    await start_node("a")
    node = await start_node("b")
    await node.stop(30)
    restored: list[bool] = []
    keys = JobKeys(SETTINGS.fleet)
    kinds = {keys.assignment: assignment, keys.node("b"): own}

    async def read(
        _: Store, wanted: Sequence[str], report: Callable[[Corrupt], object]
    ) -> dict[str, Record | None]:
        for key in wanted:
            if kinds[key] == "damaged":
                report(Corrupt(key, "damaged"))
        return {
            key: None if kind == "missing" else make_record(key, is_deleted=kind == "deleted")
            for key, kind in kinds.items()
            if kind != "damaged"
        }

    async def restore() -> None:
        restored.append(True)

    monkeypatch.setattr(node_loop, "read_each", read)
    monkeypatch.setattr(node._registration, "restore", restore)
    if assignment == "damaged":
        with pytest.raises(Corrupt, match=keys.assignment):
            await node._read_assignment()
        return
    found = await node._read_assignment()
    assert found == (make_record(keys.assignment) if assignment == "there" else None)
    assert restored == [True] * (own in ("missing", "deleted"))


def make_record(key: str, *, is_deleted: bool = False) -> Record:
    """A record, or a tombstone."""
    return Record(key, None if is_deleted else {}, "v", 1, 0, 1, "n", is_deleted)


@pytest.mark.parametrize(("numbers", "highest"), [([], 0), ([3], 3), ([0, 7, 3], 7), ([7, 0], 7)])
def test_the_highest_assignment_that_anybody_announces_counts(
    numbers: list[int], highest: int
) -> None:
    """A former leader may still announce its own; others announce none, or of other fleets."""
    keys = JobKeys(SETTINGS.fleet)
    facts = [{keys.assignment: number} if number else {"assignment/other": 9} for number in numbers]
    seen = {str(index): SimpleNamespace(facts=each) for index, each in enumerate(facts)}
    node: Any = SimpleNamespace(_keys=keys, membership=SimpleNamespace(seen=seen))
    assert NodeLoop._find_announced_number(node) == highest


async def test_a_node_takes_its_name_anew_until_the_fleet_has_its_settings(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another one with other settings has joined meanwhile; it has joined once, at the end."""
    node = await start_node("a")
    await node.stop(30)
    steps: list[object] = []
    node._events.on(NodeJoined.name, steps.append)
    answers = [False, False, True]

    def note(step: str, *answers: bool) -> Callable[..., Awaitable[bool]]:
        left = [*answers]

        async def work(*_: object, **changes: object) -> bool:
            steps.append((step, changes.get("stage")))
            return left.pop(0) if left else True

        return work

    monkeypatch.setattr(node.fleet_settings, "wait", note("wait"))
    monkeypatch.setattr(node.fleet_settings, "settle", note("settle", *answers))
    monkeypatch.setattr(node._registration, "take", note("take"))
    monkeypatch.setattr(node._registration, "update", note("update"))
    await node._join(10)
    attempt = [("wait", None), ("take", None), ("settle", None)]
    again = [*attempt, ("update", "left")]
    joined = NodeJoined(node="a", incarnation=node.membership.incarnation)
    assert steps == [*again, *again, *attempt, joined]
