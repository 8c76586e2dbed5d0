"""Heartbeats: what is reported of outages, and what is published, the second time as the first."""

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness
from fleets import BilledStore

from jobsync import Components, Event, Events, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.coordination import session as session_module
from jobsync.coordination.events import HeartbeatLate, StoreSilent, WorkerHeartbeat
from jobsync.coordination.heartbeats import Heartbeats
from jobsync.coordination.runner import Wakeup
from jobsync.coordination.session import SESSIONS, HookFailure, SessionOwner, read_session_record
from jobsync.core.clock import Mono
from jobsync.core.trust import Timing
from jobsync.stores.contract import Change, Head, Outcome

TIMING = Timing(heartbeat=5, timeout=15)


class Bucket(BilledStore):
    """A store that can be away, and whose listings may be older than their replies."""

    is_away = False
    unanswered: list[Sequence[Change]] | None = None
    """Writes that get no reply, and may be applied later."""
    open_failures = 0
    """How many sessions cannot be opened."""
    listings = 0
    held_back: list[Head] | None = None
    """What the next listing returns."""

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if self.unanswered is not None:
            self.unanswered.append(changes)
        if self.is_away or self.unanswered is not None:
            raise Unavailable(self.name, "it is away")
        if self.open_failures and changes[0].base is None:
            self.open_failures -= 1
            raise Unavailable(self.name, "it is away")
        return await super().write(changes)

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        self.listings += 1
        found = await super().heads(prefix, after=after, until=until, limit=limit)
        return found if self.held_back is None else self.held_back


class HeartStage:
    """One worker whose heartbeats come when the test says."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.components = Components(
            clock=self.clock, randomness=SeededRandomness(1), events=Events()
        )
        self.bucket = Bucket(components=self.components)
        self.works = ["default/work"]
        self.replaced: list[Any] = []
        self.heartbeats = Heartbeats(
            SessionOwner(self.bucket, self.components, TIMING, "worker-1", {"host": "web-1"}),
            list_roles=lambda: self.works,
            list_held=dict,
            on_lost=lambda: None,
            on_replaced=self.replaced.append,
        )
        self.events: list[Event] = []
        self.components.events.on("coord:*", self.events.append)

    def pass_time(self, seconds: float) -> None:
        """Advance the clock."""
        self.clock.mono_seconds += seconds
        self.clock.wall_seconds += seconds

    async def beat(self, *, is_away: bool = False) -> None:
        """Send one heartbeat, as the loop does."""
        self.pass_time(TIMING.heartbeat)
        started = self.clock.mono()
        self.bucket.is_away = is_away
        session = self.heartbeats.session
        before = session.heartbeats
        await self.heartbeats._send()
        if session.heartbeats == before:
            self.heartbeats.report_outage(Unavailable("store", "it is away"), started)
        self.bucket.is_away = False

    def count(self, name: str) -> int:
        """Return how many events there were."""
        return sum(event.name == name for event in self.events)


async def check_outages(history: tuple[str, ...]) -> None:
    """Compare what is reported with what happens: answers, outages, and late failures."""
    stage = HeartStage()
    await stage.heartbeats.session.open()
    expected, is_out = 0, False
    for step in ("a", *history):
        if step == "s":
            sent = stage.clock.mono() + -TIMING.heartbeat
            stage.heartbeats.report_outage(Unavailable("store", "a slow request"), sent)
        else:
            await stage.beat(is_away=step == "o")
            expected += step == "o" and not is_out
            is_out = step == "o"
        assert stage.count("coord:store-silent") == expected
    assert stage.count("coord:worker-heartbeat") == 1 + history.count("a")


async def test_each_outage_is_reported_once_and_no_other() -> None:
    """Nor the failure of a slow request that was sent before the last answer."""
    for history in itertools.product("aos", repeat=4):
        await check_outages(history)


@pytest.mark.parametrize("late", range(4))
async def test_a_listing_that_took_several_heartbeats_is_compared(late: int) -> None:
    """The last writes are remembered for as long as a listing may take."""
    stage = HeartStage()
    await stage.heartbeats.session.open()
    await stage.beat()
    stage.clock.wall_seconds += 100
    stage.bucket.held_back = await stage.bucket.heads(SESSIONS)
    for _ in range(late):
        await stage.beat()
    await stage.heartbeats.measure_clock()
    skew = stage.heartbeats.clock_comparison.skew
    assert skew is not None
    assert 98 < skew <= 100
    age = stage.heartbeats.clock_comparison.age
    assert age == late * TIMING.heartbeat


async def test_the_clock_is_compared_again_and_again() -> None:
    """Each comparison is at most two timeouts and a heartbeat old, by few requests."""
    stage = HeartStage()
    await stage.heartbeats.session.open()
    for _ in range(60):
        await stage.beat()
        await stage.heartbeats.measure_clock()
        age = stage.heartbeats.clock_comparison.age
        assert age is not None
        assert age <= 2 * TIMING.timeout + TIMING.heartbeat
    assert stage.bucket.listings <= 60 * TIMING.heartbeat / (2 * TIMING.timeout) + 1


async def test_every_session_publishes_all_from_its_first_record_on() -> None:
    """What was published before the last one was lost, too; and each record has the latest."""
    stage = HeartStage()
    await stage.heartbeats.session.open()
    for number in range(3):
        stage.heartbeats.publish({"number": number})
        stage.heartbeats.withheld = {"default/other": "why"} if number == 1 else {}
        stage.works = ["default/work", "default/other"][: number + 1]
        failure = HookFailure(callback="work", error="no", at=0.0, times=number)
        stage.heartbeats.publish_failure("default/work", failure if number == 1 else None)
        await stage.beat()
        record = await stage.bucket.get(f"{SESSIONS}{stage.heartbeats.session.incarnation}")
        assert record is not None
        told = read_session_record(record)
        assert told.facts["number"] == number
        assert ("withheld" in told.facts, "failing" in told.facts) == (number == 1, number == 1)
        works = set(stage.works) - stage.heartbeats.withheld.keys()
        assert told.works == tuple(sorted(works))
        await stage.bucket.drop([record.key])
        await stage.beat()
        session = stage.heartbeats.session
        assert stage.replaced[-1] is session
        assert len(stage.replaced) == stage.count("coord:session-lost") == number + 1
        fresh = await stage.bucket.get(f"{SESSIONS}{session.incarnation}")
        assert fresh is not None
        first = read_session_record(fresh)
        assert (first.beat, first.works) == (0, told.works)
        assert (first.facts["number"], first.facts["host"]) == (number, "web-1")


class Waits(Wakeup):
    """Waits by moving the clock, so often; sets count."""

    def __init__(self, clock: FakeClock, left: int) -> None:
        super().__init__(clock, 0.0)
        self.fake_clock = clock
        self.left = left
        self.sets = 0

    def set(self) -> None:
        self.sets += 1

    async def wait(self, until: Mono) -> None:
        self.left -= 1
        if not self.left:
            raise asyncio.CancelledError
        self.fake_clock.mono_seconds = max(self.fake_clock.mono_seconds, until - Mono(0.0))


@pytest.mark.parametrize(
    ("latency", "starts"), [(0.0, [0, 5, 10, 15]), (2.0, [0, 5, 10, 15]), (7.0, [0, 7, 14, 21])]
)
async def test_heartbeats_have_the_same_interval_however_slow_the_store_is(
    latency: float, starts: list[float]
) -> None:
    """A late answer does not delay the next, unless it takes longer than that."""
    stage = HeartStage()
    sent: list[float] = []

    async def send() -> None:
        sent.append(stage.clock.mono_seconds - 1_000.0)
        stage.pass_time(latency)

    stage.heartbeats._send = send  # type: ignore[method-assign]
    stage.heartbeats._wakeup = Waits(stage.clock, 4)
    with suppress(asyncio.CancelledError):
        await stage.heartbeats.run()
    assert sent == starts


async def test_heartbeats_go_on_after_each_error_of_an_outage() -> None:
    """Another error is a bug, and ends them."""
    stage = HeartStage()
    outages = (
        Unavailable("store", "silent"),
        Misconfigured("url", "x", "is refused", "wait"),
        OutcomeUnknown("session", "lost"),
    )
    errors: list[Exception] = [*outages, ZeroDivisionError()]

    async def send() -> None:
        stage.heartbeats._is_outage_reported = False
        raise errors.pop(0)

    stage.heartbeats._send = send  # type: ignore[method-assign]
    stage.heartbeats._wakeup = Waits(stage.clock, 10)
    with pytest.raises(ZeroDivisionError):
        await stage.heartbeats.run()
    assert stage.events == [
        StoreSilent(worker_id="worker-1", reason=str(error)) for error in outages
    ]


async def test_what_is_published_goes_out_at_once() -> None:
    """A failure of a hook may wait for the next heartbeat."""
    stage = HeartStage()
    waits = stage.heartbeats._wakeup = Waits(stage.clock, 4)
    stage.heartbeats.publish({"number": 1})
    stage.heartbeats.send_now()
    assert waits.sets == 2
    stage.heartbeats.publish_failure("default/work", None)
    assert waits.sets == 2


async def test_each_heartbeat_tells_which_roles_are_held() -> None:
    """With their epochs, as they are then."""
    stage = HeartStage()
    await stage.heartbeats.session.open()
    for held in ({}, {"default/work": 3}, {"default/work": 4, "other/work": 1}, {}):
        stage.heartbeats._list_held = held.copy
        await stage.beat()
        record = await stage.bucket.get(f"{SESSIONS}{stage.heartbeats.session.incarnation}")
        assert record is not None
        assert read_session_record(record).holds == held


class LateClock(FakeClock):
    """A clock whose sleeps end late, until none is left."""

    lags: Sequence[float] = ()

    async def sleep(self, seconds: float) -> None:
        if not self.lags:
            raise asyncio.CancelledError
        lag, *self.lags = self.lags
        await super().sleep(seconds + lag)


async def test_a_late_thread_is_reported_if_it_lost_a_tenth_of_its_timeout() -> None:
    """Each time anew, with how late it was."""
    stage = HeartStage()
    clock = stage.heartbeats._clock = LateClock()
    clock.lags = [0.0, 1.0, 1.5, 1.75, 0.25, 20.0]
    with suppress(asyncio.CancelledError):
        await stage.heartbeats.watch_lag()
    assert stage.events == [
        HeartbeatLate(worker_id="worker-1", lag=lag, worker_timeout=15) for lag in (1.75, 20.0)
    ]


async def test_events_of_heartbeats_say_whose_and_when() -> None:
    """By the wall clock of this worker; an outage with its reason."""
    stage = HeartStage()
    await stage.heartbeats.session.open()
    await stage.beat()
    told: list[Event] = [WorkerHeartbeat(worker_id="worker-1", timestamp=stage.clock.wall_seconds)]
    assert stage.events == told
    await stage.beat(is_away=True)
    assert stage.events[1:] == [
        StoreSilent(worker_id="worker-1", reason=str(Unavailable("store", "it is away")))
    ]


async def test_each_lost_session_is_reported_once_however_often_it_cannot_be_replaced() -> None:
    """Also the next one; and nothing is on the way meanwhile but the same attempt again."""
    stage = HeartStage()
    losses: list[str] = []
    stage.heartbeats._on_lost = lambda: losses.append(stage.heartbeats.session.incarnation)
    await stage.heartbeats.session.open()
    names: list[str] = []
    for failures in (0, 1, 3):
        names.append(stage.heartbeats.session.incarnation)
        await stage.bucket.drop([f"{SESSIONS}{names[-1]}"])
        stage.bucket.open_failures = failures
        for _ in range(failures):
            with pytest.raises(Unavailable):
                await stage.beat()
            assert stage.heartbeats.session.state == "lost"
        await stage.beat()
        assert stage.heartbeats.session.state == "live"
        reported = [event for event in stage.events if event.name == "coord:session-lost"]
        assert [event["incarnation"] for event in reported] == losses == names


async def test_a_session_that_ends_after_others_found_it_dead_does_not_say_that_it_left() -> None:
    """Its record stays as they wrote it; one that was alive says so."""
    for death in ({}, {"state": "dead"}, {"state": "dead", "ended": True}):
        stage = HeartStage()
        session = stage.heartbeats.session
        await session.open()
        key = f"{SESSIONS}{session.incarnation}"
        record = await stage.bucket.get(key)
        assert record is not None
        if death:
            record = await stage.bucket.put(record, {**record.value, **death})
        await session.end()
        last = await stage.bucket.get(key)
        assert last is not None
        told = read_session_record(last)
        assert (told.state, told.left is True) == ("dead", not death)
        assert (last.version == record.version) == bool(death)


async def test_an_open_that_failed_is_repeated_under_another_name() -> None:
    """However often: a record that lands late belongs to nobody, and dies."""
    stage = HeartStage()
    session = stage.heartbeats.session
    names: list[str] = []
    for is_away in (True, True, False):
        stage.bucket.is_away = is_away
        with suppress(Unavailable):
            await session.open()
        names.append(session.incarnation)
        assert session.trusted == (not is_away)
    assert len(set(names)) == 3
    assert [head.key for head in await stage.bucket.heads(SESSIONS)] == [f"{SESSIONS}{names[-1]}"]


@pytest.mark.parametrize("lands", range(3))
async def test_a_heartbeat_that_lands_late_renews_trust_from_its_first_send(lands: int) -> None:
    """Whichever of several that got no reply; later ones do not count, for they never arrived."""
    stage = HeartStage()
    session = stage.heartbeats.session
    await session.open()
    sent: list[float] = []
    changes: list[Sequence[Change]] = []
    for _ in range(3):
        stage.pass_time(1.0)
        stage.bucket.unanswered = []
        sent.append(stage.clock.mono_seconds)
        await session.heartbeat()
        changes.append(stage.bucket.unanswered[0])
    stage.bucket.unanswered = None
    await stage.bucket.write(changes[lands])
    stage.clock.mono_seconds = sent[lands] + TIMING.heartbeat
    assert await session.heartbeat() == "live"
    left = TIMING.timeout - TIMING.margin - TIMING.heartbeat
    assert session.trust_left == pytest.approx(left)
    assert session.heartbeats == 2


async def test_a_forked_child_trusts_nothing_by_any_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever asks, and in whatever way."""
    stage = HeartStage()
    session = stage.heartbeats.session
    await session.open()

    def ask() -> tuple[bool, bool, float]:
        now = stage.clock.mono()
        return session.trusted, session.is_trusted_at(now), session.trust_left

    assert ask() == (True, True, TIMING.timeout - TIMING.margin)
    monkeypatch.setattr(session_module, "_forks", session_module.count_forks() + 1)
    assert ask() == (False, False, 0.0)


async def test_what_is_left_of_trust_ends_with_trust() -> None:
    """All questions agree at each moment, also at the last one, and after the end."""
    stage = HeartStage()
    session = stage.heartbeats.session
    assert (session.trusted, session.trust_left) == (False, 0.0)
    await session.open()
    end = TIMING.timeout - TIMING.margin
    for age in (0.0, end - 0.25, end, end + 0.25):
        stage.clock.mono_seconds = 1_000.0 + age
        assert session.trusted == session.is_trusted_at(stage.clock.mono()) == (age < end)
        assert session.trust_left == pytest.approx(max(0.0, end - age))
    await session.heartbeat()
    assert session.trusted
    session.abandon()
    assert (session.trusted, session.trust_left, session.state) == (False, 0.0, "ended")
