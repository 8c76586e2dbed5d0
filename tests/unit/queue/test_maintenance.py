"""The central work of a queue, in virtual time: what it removes, how often, and what it reports."""

from typing import Any, cast

import pytest
from chance import FakeClock

from jobsync.queue.backend import SeenKeys
from jobsync.queue.maintenance import Maintenance
from jobsync.queue.settings import QueueSettings

WORK_INTERVAL = 5.0
"""Seconds between two calls of a coordinator's work on SQL."""


class FinishedMessages:
    """Messages that are finished at a steady rate. A removal takes time."""

    def __init__(self, clock: FakeClock, rate: float, *, begin: float = 0.0) -> None:
        self.removed = 0
        self.most = 0
        """The most that were stored at any time."""
        self.largest_batch = 0
        self.calls: list[str] = []
        self.newer: dict[int, int] = {}
        self.keys: list[int] = []
        self.key_looks = 0
        self.looked_at = ""
        self._clock = clock
        self._rate = rate
        self._start = clock.mono_seconds + begin

    def count(self, before: float | None = None) -> int:
        """Return how many are stored that were finished before a time."""
        until = self._clock.mono_seconds if before is None else before
        return max(0, int(self._rate * (until - self._start)) - self.removed)

    async def forget(self, state: str, *, older_than: float, limit: int) -> int:
        """Remove some."""
        self.calls.append(state)
        self.most = max(self.most, self.count())
        found = min(limit, self.count(self._clock.mono_seconds - older_than))
        self._clock.mono_seconds += 0.001 + found * 20e-6
        if state == "completed":
            self.removed += found
            self.largest_batch = max(self.largest_batch, found)
            return found
        return 0

    async def find_newer(self) -> dict[int, int]:
        """Return the messages of newer code."""
        self.calls.append("newer")
        return self.newer

    async def forget_keys(self, *, after: str, limit: int) -> SeenKeys:
        """Look at keys: there are as many batches as numbers, each of which is removed."""
        assert limit == 1_000
        assert after == self.looked_at
        removed = self.keys.pop(0) if self.keys else 0
        self.key_looks += 1
        self.looked_at = f"key-{self.key_looks}" if self.keys else ""
        return SeenKeys(self.looked_at, removed)


def build(**settings: Any) -> tuple[Maintenance, list[tuple[int, int]]]:
    """Return the maintenance of a queue, and what it reports."""
    reported: list[tuple[int, int]] = []
    checked = QueueSettings(**settings)
    work = Maintenance(
        checked, lambda: checked.completed_ttl, lambda *found: reported.append(found)
    )
    return work, reported


async def work_for(seconds: float, work: Maintenance, stored: Any, clock: FakeClock) -> None:
    """Do the work as a coordinator does."""
    end = clock.mono_seconds + seconds
    while clock.mono_seconds < end:
        await work.run(stored, clock)
        await clock.sleep(WORK_INTERVAL)


@pytest.mark.parametrize("per_minute", [60, 10_000, 60_000, 600_000])
@pytest.mark.parametrize("begin", [0.0, 27.0, 49.0])
async def test_finished_messages_stay_for_their_time_and_a_minute(
    clock: FakeClock, per_minute: int, begin: float
) -> None:
    """At any rate, in batches of at most 1,000."""
    rate = per_minute / 60
    stored = FinishedMessages(clock, rate, begin=begin)
    work, _ = build(completed_ttl=300)
    await work_for(1_800, work, stored, clock)
    assert stored.most <= (300 + 60) * rate
    assert stored.largest_batch <= 1_000
    assert stored.removed >= (1_800 - begin - 300 - 60) * rate


async def test_a_backlog_leaves_others_half_of_the_time(clock: FakeClock) -> None:
    """A million old messages are removed in one call, with pauses as long as the removals."""
    stored = FinishedMessages(clock, 1_000.0, begin=-1_000.0)
    paused: list[float] = []
    sleep = clock.sleep

    async def watch(seconds: float) -> None:
        paused.append(seconds)
        await sleep(seconds)

    clock.sleep = watch  # type: ignore[method-assign]
    work, _ = build(completed_ttl=0)
    start = clock.mono_seconds
    await work.run(stored, clock)  # type: ignore[arg-type]
    assert stored.count(start) == 0
    assert sum(paused) >= 0.49 * (clock.mono_seconds - start)


async def test_an_idle_queue_costs_about_one_statement_a_minute(clock: FakeClock) -> None:
    """Messages of newer code are counted every five minutes."""
    stored = FinishedMessages(clock, 0.0)
    work, _ = build()
    await work_for(3_600, work, stored, clock)
    assert stored.calls.count("completed") <= 72
    assert stored.calls.count("newer") <= 12
    assert {*stored.calls} == {"completed", "newer"}


async def test_dead_and_cancelled_messages_have_a_time_of_their_own(clock: FakeClock) -> None:
    """They keep their payload: without `dead_ttl` they stay."""
    stored = FinishedMessages(clock, 0.0)
    work, _ = build(dead_ttl=86_400)
    await work.run(stored, clock)  # type: ignore[arg-type]
    assert stored.calls == ["completed", "dead", "cancelled", "newer"]


async def test_messages_of_newer_code_are_reported_once(clock: FakeClock) -> None:
    """Once for each format, with their number."""
    stored = FinishedMessages(clock, 0.0)
    work, reported = build()
    stored.newer = {2: 5}
    await work_for(900, work, stored, clock)
    stored.newer = {2: 7, 99: 1}
    await work_for(900, work, stored, clock)
    assert reported == [(5, 2), (1, 99)]


async def test_keys_that_nobody_holds_are_removed_as_fast_as_there_are(clock: FakeClock) -> None:
    """At most 20 batches of keys that are mostly held each time; the next time goes on there."""
    stored = FinishedMessages(clock, 0.0)
    work, _ = build()
    stored.keys = [1_000] * 50 + [499] * 30 + [500] * 3
    await work.run(cast("Any", stored), clock)
    assert stored.key_looks == 70
    await work.run(cast("Any", stored), clock)
    assert stored.key_looks == 70
    clock.mono_seconds += 300
    await work.run(cast("Any", stored), clock)
    assert stored.key_looks == 83
    assert stored.looked_at == ""
    # From the first key again.
    clock.mono_seconds += 300
    stored.keys = [1_000, 3]
    await work.run(cast("Any", stored), clock)
    assert stored.key_looks == 85


async def test_a_change_of_the_time_counts_from_the_next_removal(clock: FakeClock) -> None:
    """Plugins that govern completed messages can be added later."""
    ttl = 300.0
    stored = FinishedMessages(clock, 1.0)
    work = Maintenance(QueueSettings(), lambda: ttl, lambda *_: None)
    await work_for(1_000, work, stored, clock)
    assert stored.removed > 0
    ttl = 86_400.0
    await work_for(10, work, stored, clock)
    removed = stored.removed
    await work_for(10_000, work, stored, clock)
    assert stored.removed == removed


async def test_nothing_completed_is_removed_while_its_time_is_not_known(clock: FakeClock) -> None:
    """Dead letters have their own. The next call after that removes what is due."""
    ttl: float | None = None
    stored = FinishedMessages(clock, 1.0, begin=-1_000.0)
    work = Maintenance(QueueSettings(dead_ttl=100), lambda: ttl, lambda *_: None)
    await work_for(10, work, stored, clock)
    assert set(stored.calls) == {"dead", "cancelled", "newer"}
    ttl = 300.0
    await work.run(stored, clock)  # type: ignore[arg-type]
    assert stored.removed >= 700


@pytest.mark.parametrize("backlog", [None, "completed", "dead", "cancelled"])
async def test_a_full_batch_of_any_kind_is_followed_by_the_next_at_once(
    clock: FakeClock, backlog: str | None
) -> None:
    """Whichever kind has it; otherwise the next removal is in a minute."""
    calls: list[str] = []

    async def forget(state: str, *, older_than: float, limit: int) -> int:
        assert older_than == (300 if state == "completed" else 86_400)
        calls.append(state)
        return limit if state == backlog and calls.count(state) == 1 else 0

    stored = FinishedMessages(clock, 0.0)
    stored.forget = forget  # type: ignore[method-assign]
    work, _ = build(completed_ttl=300, dead_ttl=86_400)
    await work.run(stored, clock)  # type: ignore[arg-type]
    first = len(calls)
    assert first == (3 if backlog is None else 4)
    await work.run(stored, clock)  # type: ignore[arg-type]
    assert len(calls) - first == (0 if backlog is None else 3)
