"""Workers whose heartbeats and checks come one by one: what elections promise in term after term.

Workers join, leave, stand back, lose their sessions and ask for the role, in random order. The
rules are checked against everything that was written, and against what each session says.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from chance import FakeClock, SeededRandomness
from fleets import BilledStore

from jobsync import (
    Components,
    CoordinatorSettings,
    Events,
    Misconfigured,
    OutcomeUnknown,
    Unavailable,
    Unknown,
)
from jobsync.coordination.election import Election
from jobsync.coordination.member_loop import MemberLoop
from jobsync.coordination.observer import DEAD_SESSION_TTL
from jobsync.coordination.role import (
    CHECK_FRACTION,
    ROLES,
    HeldTerm,
    Role,
    read_role,
    worker_of,
)
from jobsync.coordination.session import (
    SESSIONS,
    SessionOwner,
    SessionRecord,
    read_session_record,
    read_withheld,
)
from jobsync.coordination.succession import REQUESTS, HandoverRequest, request_handover
from jobsync.core.trust import Timing
from jobsync.stores.contract import Applied, Change, Outcome, Put
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

ROLE = "default/work"
TIMING = Timing(heartbeat=5, timeout=15)
LEAST, MOST = 20.0, 60.0
"""Seconds of a mandate."""
SETTINGS = CoordinatorSettings(
    min_epoch_duration=LEAST, max_epoch_duration=MOST, skip_cold_start=True
)


class Commit:
    """A write that was applied, and when."""

    def __init__(self, change: Put, at: float, *, was_candidate: bool) -> None:
        self.key = change.key
        self.value = change.value
        self.at = at
        self.was_candidate = was_candidate
        """Whether its writer was a candidate when it was sent."""


class HandLink(StoreDecorator):
    """One worker's way to the store. Writes to a role may get no reply, and land later."""

    def __init__(self, inner: MemoryStore, worker: "HandWorker", commits: list[Commit]) -> None:
        super().__init__(inner)
        self._worker = worker
        self._commits = commits
        self.withholds = False
        self._pending: tuple[Sequence[Change], bool] | None = None

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if self.withholds and changes[0].key.startswith(ROLES):
            self._pending = self._pending or (changes, self._worker.stands)
            return [Unknown("no reply") for _ in changes]
        return await self._apply(changes, was_candidate=self._worker.stands)

    async def land(self) -> None:
        """Deliver a write that was withheld."""
        pending, self._pending = self._pending, None
        if pending is not None:
            await self._apply(pending[0], was_candidate=pending[1])

    async def _apply(self, changes: Sequence[Change], *, was_candidate: bool) -> list[Outcome]:
        outcomes = await self.inner.write(changes)
        now = self._worker.components.clock.wall().seconds
        self._commits.extend(
            Commit(change, now, was_candidate=was_candidate)
            for change, outcome in zip(changes, outcomes, strict=True)
            if isinstance(outcome, Applied) and isinstance(change, Put)
        )
        return outcomes


class HandWorker:
    """A worker that sends a heartbeat and checks when the test says."""

    def __init__(
        self, number: int, store: MemoryStore, clock: FakeClock, commits: list[Commit]
    ) -> None:
        self.components = Components(
            clock=clock, randomness=SeededRandomness(number), events=Events()
        )
        self.link = HandLink(store, self, commits)
        self.name = f"worker-{number}"
        self.member = MemberLoop(
            SessionOwner(self.link, self.components, TIMING, self.name), lambda: None
        )
        self.settings = SETTINGS.for_store(store, TIMING)
        self.election: Election | None = None
        """Its candidacy."""
        self.number_of_facts = 0

    @property
    def stands(self) -> bool:
        """Whether it is a candidate."""
        return self.election is not None and not self.election.withheld

    @property
    def holds(self) -> bool:
        """Whether it holds the role."""
        return self.election is not None and self.election.held_term is not None

    def join(self) -> None:
        """Become a candidate."""
        self.election = self.member.add_candidacy(ROLE, self.settings, ())

    async def leave(self) -> None:
        """Stop being a candidate."""
        self.election = None
        await self.member.withdraw(ROLE)

    def stand_back(self, reason: str) -> None:
        """Stand back, or stand again without a reason."""
        assert self.election is not None
        self.election.withheld = reason
        self.member.publish_withheld(ROLE, reason)

    def publish(self) -> None:
        """Publish another fact."""
        self.number_of_facts += 1
        self.member.heartbeats.publish({"number": self.number_of_facts})

    async def check(self) -> None:
        """Check once; where the store notifies, what has changed is read."""
        if self.election is not None and not self.link.is_billed:
            self.election.mark_stale()
        await self.member._check()


class Stage:
    """Three workers on one store, and everything that they wrote."""

    def __init__(self, seed: int, store: type[MemoryStore], *, loses: bool) -> None:
        self.dice = random.Random(seed)
        self.clock = FakeClock()
        components = Components(clock=self.clock, randomness=SeededRandomness(0), events=Events())
        self.store = store(components=components)
        self.commits: list[Commit] = []
        self.loses = loses
        self.workers: list[HandWorker] = []
        self._waited: dict[str, float] = {}
        """Since when something stands still that must not do so for long."""

    async def add(self) -> None:
        """Start a worker."""
        worker = HandWorker(len(self.workers), self.store, self.clock, self.commits)
        await worker.member.open()
        worker.join()
        self.workers.append(worker)

    async def tick(self) -> None:
        """Wait for a heartbeat interval."""
        self.clock.mono_seconds += TIMING.heartbeat
        self.clock.wall_seconds += TIMING.heartbeat
        for worker in self.workers:
            await worker.member.heartbeats._send()
        for worker in self.dice.sample(self.workers, len(self.workers)):
            await worker.check()

    async def act(self) -> None:
        """Do something."""
        worker, other = self.dice.choice(self.workers), self.dice.choice(self.workers)
        actions = ["leave", "rejoin", "back", "force", "lose", "publish"]
        match self.dice.choice([*actions, *["mute", "rejoin"] * 3] if self.loses else actions):
            case "leave" if worker.election is not None:
                await worker.leave()
            case "leave":
                worker.join()
            case "rejoin":
                await worker.leave()
                worker.join()
            case "back" if worker.election is not None:
                worker.stand_back("" if worker.election.withheld else "a wrong clock")
            case "force":
                await self._force(worker, other)
            case "lose":
                await self._end_session(worker)
            case "publish":
                worker.publish()
            case "mute":
                worker.link.withholds = not worker.link.withholds
                if self.dice.random() < 0.5:
                    await worker.link.land()

    async def read(self) -> Role | None:
        """Return the role as it is stored."""
        return read_role(await self.store.get(f"{ROLES}{ROLE}"))

    async def _force(self, worker: HandWorker, desired: HandWorker) -> None:
        role = await self.read()
        if role is not None and role.owner is not None:
            request = HandoverRequest(
                epoch=role.epoch, by=worker.name, desired=desired.name, forced=True
            )
            await request_handover(self.store, ROLE, request)

    async def _end_session(self, worker: HandWorker) -> None:
        record = await self.store.get(f"{SESSIONS}{worker.member.session.incarnation}")
        assert record is not None
        await self.store.put(record, {**record.value, "state": "dead"})

    async def check_sessions(self) -> None:
        """Check what each session says, as of its last heartbeat."""
        for worker in self.workers:
            record = await self.store.get(f"{SESSIONS}{worker.member.session.incarnation}")
            assert record is not None
            session = read_session_record(record)
            assert session.works == ((ROLE,) if worker.stands else ())
            assert session.facts.get("number", 0) == worker.number_of_facts
            reason = "" if worker.election is None else worker.election.withheld
            assert read_withheld(session) == ({ROLE: reason} if reason else {})

    async def check_progress(self) -> None:
        """Check that whatever is due happens in time."""
        role = await self.read()
        epoch, owner = (0, None) if role is None else (role.epoch, role.owner)
        standing = [worker for worker in self.workers if worker.stands]
        holders = [worker for worker in standing if worker.holds]
        self._limit("nobody leads", 3 * TIMING.timeout, is_so=bool(standing) and not holders)
        for worker in standing:
            is_older = owner is not None and worker.name < worker_of(owner)
            self._limit(
                f"{worker.name} waits in {epoch}", MOST + 2 * TIMING.timeout, is_so=is_older
            )
            record = await self.store.get(f"{REQUESTS}{ROLE}")
            wish = {} if record is None else record.value
            is_wanted = (wish.get("epoch"), wish.get("desired")) == (epoch, worker.name)
            is_wanted = is_wanted and owner is not None and worker_of(owner) != worker.name
            is_wanted = is_wanted and self.clock.wall_seconds - self._find_start(epoch) >= LEAST
            # Without notifications a leader reads requests every other timeout.
            reading = 2 * TIMING.timeout if self.store.is_billed else 0.0
            limit = TIMING.timeout + 2 * TIMING.heartbeat + reading
            self._limit(f"{worker.name} is desired in {epoch}", limit, is_so=is_wanted)

    def _find_start(self, epoch: int) -> float:
        """Return when a term began."""
        roles = (commit for commit in self.commits if commit.key.startswith(ROLES))
        return next(commit.at for commit in roles if commit.value["epoch"] == epoch)

    def _limit(self, what: str, seconds: float, *, is_so: bool) -> None:
        """Fail if something has been so for too long."""
        now = self.clock.mono_seconds
        since = self._waited.setdefault(what, now)
        if not is_so:
            del self._waited[what]
        assert now - since <= seconds, f"for {now - since} s {what}"

    def check_commits(self) -> None:
        """Check mandates, requests and past terms by what was written."""
        ended: list[int] = []
        last: dict[str, float] = {}
        terms: list[tuple[int, str | None]] = [(0, None)]
        asked: list[int] = []
        for commit in self.commits:
            if commit.key.startswith(ROLES):
                epoch, owner = commit.value["epoch"], commit.value["owner"]
                if terms[-1][1] is not None and (epoch, owner) != terms[-1]:
                    ended.append(terms[-1][0])
                is_renewal = owner is not None and (epoch, owner) == terms[-1]
                if is_renewal and not self.loses:
                    assert MOST <= commit.at - last["mandate"] <= MOST + 2 * TIMING.heartbeat
                if owner is not None:
                    last["mandate"] = commit.at
                    assert commit.value["until"] == commit.at + MOST or self.loses
                elif commit.was_candidate:
                    assert commit.value["past"][-1]["why"] in {"handed over", "died"}
                terms.append((epoch, owner))
                past = [term["epoch"] for term in commit.value["past"]]
                assert past == ended[-8:]
            if commit.key.startswith(REQUESTS) and not commit.value["forced"]:
                asked.append(commit.value["epoch"])
                assert commit.was_candidate
        # A forced request may replace one, and another worker asks again then.
        assert len(asked) <= 2 * len(set(asked))
        assert len(ended) > 8 or self.loses


async def run_stage(stage: Stage, ticks: int) -> None:
    """Run workers that do anything for a while, then nothing."""
    for _ in range(3):
        await stage.add()
        await stage.tick()
    for _ in range(ticks):
        for _ in range(stage.dice.choice([0, 0, 0, 1, 2])):
            await stage.act()
        await stage.tick()
        if not stage.loses:
            await stage.check_sessions()
            await stage.check_progress()
    for worker in stage.workers:
        worker.link.withholds = False
        await worker.link.land()
        if worker.election is None:
            worker.join()
        worker.stand_back("")
    for _ in range(round((MOST + 4 * TIMING.timeout) / TIMING.heartbeat)):
        await stage.tick()
    settled = await stage.read()
    for _ in range(round(MOST / TIMING.heartbeat)):
        await stage.tick()
        await stage.check_sessions()
    role = await stage.read()
    assert settled is not None
    assert role is not None
    assert role.owner == settled.owner == stage.workers[0].member.session.incarnation
    assert role.epoch == settled.epoch
    assert [worker.holds for worker in stage.workers] == [True, False, False]
    stage.check_commits()


@pytest.mark.parametrize("store", [MemoryStore, BilledStore])
@pytest.mark.parametrize("loses", [False, True], ids=["calm", "lossy"])
@pytest.mark.parametrize("seed", range(3))
async def test_every_term_is_as_the_first_whatever_workers_do(
    seed: int, store: type[MemoryStore], *, loses: bool
) -> None:
    """Mandates, requests, candidacies, facts, and at the end the oldest leads."""
    await run_stage(Stage(seed, store, loses=loses), 150)


class Pair:
    """An older and a younger worker on one store, which test by test see what somebody wrote."""

    def __init__(self, store: type[MemoryStore] = MemoryStore) -> None:
        self.clock = FakeClock()
        components = Components(clock=self.clock, randomness=SeededRandomness(0), events=Events())
        self.store = store(components=components)
        self.older, self.younger = (
            HandWorker(number, self.store, self.clock, []) for number in (1, 2)
        )

    async def start(self, *workers: HandWorker) -> None:
        """Open the sessions of workers, which are candidates from then on."""
        for worker in workers:
            await worker.member.open()
            worker.join()
            await worker.member.heartbeats._send()

    async def write_role(self, **fields: object) -> None:
        """Write the role as somebody else does, with some fields as given."""
        key = f"{ROLES}{ROLE}"
        record = await self.store.get(key, tombstones=True)
        now = self.clock.wall_seconds
        role = Role(epoch=1, owner=None, since=now, until=now, timeout=TIMING.timeout)
        stored = {} if record is None or record.deleted else record.value
        value = {**msgspec.to_builtins(role), **stored, **fields}
        (outcome,) = await self.store.write([Put(key, value, record)])
        assert isinstance(outcome, Applied)

    async def lead(self) -> Election:
        """Start the older worker, which leads; return its candidacy."""
        await self.start(self.older)
        await self.older.check()
        assert self.older.holds
        assert self.older.election is not None
        return self.older.election


@pytest.mark.parametrize(
    ("change", "is_over"),
    [
        ({}, False),
        ({"until": 5.0}, False),
        ({"epoch": 2}, True),
        ({"owner": None}, True),
        ({"owner": "worker-0.0badcafe"}, True),
        ({"epoch": 2, "owner": "worker-0.0badcafe"}, True),
    ],
    ids=str,
)
async def test_a_term_is_over_if_the_role_has_another_epoch_or_another_owner(
    change: dict[str, object], *, is_over: bool
) -> None:
    """Either is enough; whatever else changes, the term goes on."""
    pair = Pair()
    election = await pair.lead()
    term = election.held_term
    assert term is not None
    election.can_take = False
    await pair.write_role(**change)
    await pair.older.check()
    assert election.held_term is (None if is_over else term)
    assert election.end_reason == ((1, "replaced") if is_over else (0, ""))


@pytest.mark.parametrize("store", [MemoryStore, BilledStore])
@pytest.mark.parametrize("renewals", [1, 2])
async def test_a_role_can_be_released_right_after_its_mandate_was_renewed(
    renewals: int, store: type[MemoryStore]
) -> None:
    """By one write, based on the renewal; and the worker knows until when it was renewed."""
    pair = Pair(store)
    election = await pair.lead()
    ends: set[float] = set()
    while len(ends) <= renewals:
        assert pair.clock.mono_seconds < 1_000.0 + (renewals + 2) * MOST
        await pair.clock.sleep(TIMING.heartbeat)
        await pair.older.member.heartbeats._send()
        await pair.older.check()
        record = await pair.store.get(f"{ROLES}{ROLE}")
        assert record is not None
        assert election.role is not None
        assert election.role.until == record.value["until"]
        ends.add(record.value["until"])
    assert pair.older.holds
    await pair.older.leave()
    record = await pair.store.get(f"{ROLES}{ROLE}")
    assert record is not None
    assert (record.value["owner"], record.value["epoch"]) == (None, 1)


@pytest.mark.parametrize("highest", ["role", "tombstone", "governed", "removed", "seen", "told"])
async def test_the_next_epoch_is_above_every_one_that_is_known_in_any_way(highest: str) -> None:
    """The record, what it governs, what this worker has seen, and what others told it, alone."""
    pair = Pair()
    worker, key = pair.older, f"{ROLES}{ROLE}"
    await worker.member.open()
    worker.election = election = worker.member.add_candidacy(ROLE, worker.settings, ("single/a",))
    match highest:
        case "role":
            await pair.store.create(key, {"epoch": 7, "owner": None, "since": 0.0, "until": 0.0})
            await pair.write_role(timeout=TIMING.timeout)
        case "tombstone":
            await pair.store.delete(await pair.store.create(key, None, epoch=7))
        case "governed":
            await pair.store.create("single/a", None, epoch=7)
        case "removed":
            await pair.store.delete(await pair.store.create("single/a", None, epoch=7))
        case "seen":
            await pair.write_role(epoch=7, owner="worker-0.0badcafe")
            await worker.check()
            await pair.store.drop([key])
        case _:
            await worker.check()
            await worker.member.step_down(ROLE, 1, 7)
            # Somebody else tells of an earlier one, later.
            await worker.member.step_down(ROLE, 1, 3)
    await worker.check()
    term = election.held_term
    assert term is not None
    assert term.epoch == 8


async def test_who_was_told_late_that_a_term_is_fenced_keeps_the_next_one() -> None:
    """Only the term that it is about is released, once."""
    pair = Pair()
    election = await pair.lead()
    member = pair.older.member
    await member.step_down(ROLE, 1, 4)
    assert not pair.older.holds
    await pair.older.check()
    term = election.held_term
    assert term is not None
    assert term.epoch == 5
    await member.step_down(ROLE, 1, 4)
    assert election.held_term is term
    assert election.end_reason == (1, "fenced")


@pytest.mark.parametrize("happens", ["nothing", "lapse", "loss"])
async def test_a_role_that_was_taken_by_a_session_of_before_is_not_held(happens: str) -> None:
    """Trust ran out and came back, or the session was replaced, while the write was under way."""
    pair = Pair()
    await pair.start(pair.older)
    member = pair.older.member

    class SlowLink(HandLink):
        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            outcomes = await super().write(changes)
            if changes[0].key.startswith(ROLES) and happens != "nothing":
                pair.clock.mono_seconds += TIMING.timeout
                if happens == "loss":
                    await self.inner.drop([f"{SESSIONS}{member.session.incarnation}"])
                await member.heartbeats._send()
            return outcomes

    slow = SlowLink(pair.store, pair.older, [])
    pair.older.link = slow
    member._settled.inner = slow
    await pair.older.check()
    assert member.session.trusted
    assert pair.older.holds == (happens == "nothing")
    happens = "nothing"
    await pair.older.check()
    assert pair.older.holds


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("how", ["stands back", "closes"])
async def test_who_stops_being_a_candidate_while_it_takes_a_role_releases_it_at_once(
    how: str, moment: str
) -> None:
    """Whether or not the write had arrived: it neither holds the role nor keeps it from others."""
    pair = Pair()
    await pair.start(pair.older)
    assert pair.older.election is not None
    election: Election = pair.older.election

    class SlowLink(HandLink):
        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            outcomes = await super().write(changes) if moment == "after" else []
            if how == "closes":
                election.close()
            else:
                election.withheld = "a wrong clock"
            return outcomes or await super().write(changes)

    pair.older.member._settled.inner = SlowLink(pair.store, pair.older, [])
    await pair.older.check()
    assert election.held_term is None
    role = read_role(await pair.store.get(f"{ROLES}{ROLE}"))
    assert role is not None
    assert (role.epoch, role.owner) == (1, None)
    await pair.older.check()
    assert election.is_clear
    reason = "stopped" if how == "closes" else "a wrong clock"
    assert (election.end_reason, role.past[-1].why) == ((1, reason), reason)


@pytest.mark.parametrize("lands", [True, False])
async def test_a_candidacy_is_not_over_while_a_write_may_still_give_it_the_role(
    *, lands: bool
) -> None:
    """However often the role is read as it was: only another version shows what became of it."""
    pair = Pair()
    await pair.start(pair.older)
    assert pair.older.election is not None
    election: Election = pair.older.election
    pair.older.link.withholds = True
    await pair.older.check()
    election.close()
    for _ in range(3):
        await pair.older.member.heartbeats._send()
        await pair.older.check()
        assert not election.is_clear
    pair.older.link.withholds = False
    if lands:
        await pair.older.link.land()
    for _ in range(2):
        await pair.older.check()
    assert election.is_clear
    await pair.older.link.land()
    role = read_role(await pair.store.get(f"{ROLES}{ROLE}"))
    assert role is not None
    assert role.owner is None


@pytest.mark.parametrize("epochs", [{}, {ROLE: 2}, {"default/other": 1}, {ROLE: 1}], ids=str)
async def test_a_role_is_read_unless_its_owners_session_lists_it_with_the_known_epoch(
    epochs: dict[str, int],
) -> None:
    """Not at all, another role, or the role in another term: each may mean that it has changed."""
    pair = Pair(BilledStore)
    await pair.lead()
    await pair.older.member.heartbeats._send()
    await pair.start(pair.younger)
    election = pair.younger.election
    assert election is not None
    for _ in range(2):
        await pair.younger.check()
    record = await pair.store.get(f"{SESSIONS}{pair.older.member.session.incarnation}")
    assert record is not None
    told = read_session_record(await pair.store.put(record, {**record.value, "holds": epochs}))
    living = {pair.older.member.session.incarnation: told}
    assert election.keys_to_read() == []
    is_led = epochs == {ROLE: 1}
    assert election.keys_to_read_unless_led(living) == ([] if is_led else [f"{ROLES}{ROLE}"])


@pytest.mark.parametrize(
    ("former", "released", "is_ready"),
    [
        ("worker-0.0badcafe", 1.0, True),
        ("worker-0.0badcafe", 2 * TIMING.timeout, False),
        (None, 1.0, False),
    ],
)
async def test_only_who_takes_over_from_another_leads_without_a_delay(
    former: str | None, released: float, *, is_ready: bool
) -> None:
    """Otherwise workers may just have started, and the elected one prepares."""
    pair = Pair()
    settings = CoordinatorSettings(
        cold_start_preparation_delay=2.0, cold_start_observation_window=0.0
    )
    pair.older.settings = settings.for_store(pair.store, TIMING)
    await pair.write_role(former=former, since=pair.clock.wall_seconds - released)
    election = await pair.lead()
    assert election.cold_start.is_ready == is_ready
    pair.clock.mono_seconds += 2.0
    await pair.older.check()
    assert election.cold_start.is_ready


@pytest.mark.parametrize("store", [MemoryStore, BilledStore])
@pytest.mark.parametrize("reads_role", [False, True])
async def test_a_change_that_is_notified_during_a_look_is_read_at_the_next_one(
    store: type[MemoryStore], *, reads_role: bool
) -> None:
    """What the look has read may be older, whether or not it read the role; and it is read once."""
    pair = Pair(store)
    await pair.lead()
    await pair.older.member.heartbeats._send()
    await pair.start(pair.younger)
    election = pair.younger.election
    assert election is not None
    for _ in range(3):
        await pair.younger.member._check()
    key = f"{ROLES}{ROLE}"
    assert election.keys_to_read() == []
    read = pair.younger.member._read_sessions

    async def read_and_change(*arguments: Any) -> Any:
        answer = await read(*arguments)
        election.mark_stale()
        return answer

    if reads_role:
        election.mark_stale()
    pair.younger.member._read_sessions = cast(  # type: ignore[method-assign]
        "Any", read_and_change
    )
    await pair.younger.member._check()
    pair.younger.member._read_sessions = read  # type: ignore[method-assign]
    assert election.keys_to_read() == [key]
    await pair.younger.member._check()
    assert election.keys_to_read() == []


@pytest.mark.parametrize(
    ("of_younger", "waits"),
    [((), True), (("successor",), False), (("owner",), False), (("former",), True)],
    ids=str,
)
async def test_who_is_named_by_a_role_takes_it_before_an_older_candidate(
    of_younger: tuple[str, ...], *, waits: bool
) -> None:
    """As its successor, or after a take of its own whose reply was lost; others let it go first."""
    pair = Pair()
    await pair.start(pair.older, pair.younger)
    name = pair.younger.member.session.incarnation
    await pair.write_role(**dict.fromkeys(of_younger, name))
    await pair.younger.check()
    assert pair.younger.holds != waits
    pair.clock.mono_seconds += TIMING.heartbeat
    pair.clock.wall_seconds += TIMING.heartbeat
    await pair.younger.check()
    assert pair.younger.holds


async def test_each_time_that_a_role_is_damaged_is_reported() -> None:
    """Once for each damage, also if the same one comes back after a repair."""
    pair = Pair()
    halts: list[str] = []
    pair.older.components.events.on("coord:election-halted", lambda event: halts.append(event.role))
    await pair.lead()
    for number in range(1, 4):
        await pair.write_role(timeout=-1.0)
        for _ in range(2):
            await pair.older.check()
            assert halts == [ROLE] * number
        await pair.write_role(timeout=TIMING.timeout)
        await pair.older.check()
    assert halts == [ROLE] * 3


@pytest.mark.parametrize("needed", ["as an owner", "by a caller", ""])
async def test_a_session_that_died_long_ago_is_kept_while_something_refers_to_it(
    needed: str,
) -> None:
    """A role that nobody could take, or a caller that watches it."""
    pair = Pair()
    await pair.lead()
    await pair.start(pair.younger)
    name = pair.younger.member.session.incarnation
    await pair.younger.member.session.end()
    member = pair.older.member
    await pair.older.check()
    if needed == "as an owner":
        other = member.add_candidacy("default/other", pair.older.settings, ())
        other.can_take = False
        await pair.write_role()
        role = Role(epoch=1, owner=name, since=0.0, until=0.0, timeout=TIMING.timeout)
        await pair.store.create(f"{ROLES}default/other", msgspec.to_builtins(role))
    elif needed:
        member.watched = frozenset({name})
    await pair.older.check()
    pair.clock.mono_seconds += 2 * DEAD_SESSION_TTL
    await member.heartbeats._send()
    for _ in range(2):
        await pair.older.check()
    assert pair.older.holds
    left = await pair.store.get(f"{SESSIONS}{name}")
    assert (left is not None) == bool(needed)


@pytest.mark.parametrize("store", [MemoryStore, BilledStore])
@pytest.mark.parametrize("held", ["", "a", "b", "ab"])
async def test_released_roles_are_looked_for_while_any_is_not_held(
    held: str, store: type[MemoryStore]
) -> None:
    """Also by who leads something else, where no notification tells of a release."""
    pair = Pair(store)
    member = pair.older.member
    await member.open()
    term = HeldTerm(1, "worker-1.a", 0, pair.clock.mono())
    for name in "ab":
        candidacy = SimpleNamespace(
            held_term=term if name in held else None, next_change=lambda _: None
        )
        member.elections[name] = cast("Any", candidacy)
    now = pair.clock.mono()
    polls = pair.store.is_billed and held != "ab"
    part = CHECK_FRACTION if polls else 1.0
    assert member._next_check(now, now) - now == pytest.approx(part * TIMING.heartbeat)


async def test_what_a_closed_candidacy_has_left_is_clear_once_the_session_is_another() -> None:
    """A take that arrives after all names a dead session, from which anyone may take the role."""
    pair = Pair()
    await pair.start(pair.older)
    member = pair.older.member
    pair.older.link.withholds = True
    await pair.older.check()
    await pair.older.leave()
    assert len(member._closing) == 1
    record = await pair.store.get(f"{SESSIONS}{member.session.incarnation}")
    assert record is not None
    await pair.store.put(record, {**record.value, "state": "dead"})
    pair.older.link.withholds = False
    await pair.older.link.land()
    await member.heartbeats._send()
    for _ in range(2):
        await pair.older.check()
    assert member._closing == []


@pytest.mark.parametrize("damage", [{}, {"state": "dead"}, {"beat": "no number"}], ids=str)
async def test_a_worker_leaves_whatever_has_become_of_its_session(damage: dict[str, Any]) -> None:
    """Its roles are released, and nothing is raised."""
    pair = Pair()
    await pair.lead()
    member = pair.older.member
    record = await pair.store.get(f"{SESSIONS}{member.session.incarnation}")
    assert record is not None
    await pair.store.put(record, {**record.value, **damage})
    await member._leave()
    role = read_role(await pair.store.get(f"{ROLES}{ROLE}"))
    assert role is not None
    assert (role.owner, member.elections) == (None, {})


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("store", "it does not answer"),
        Misconfigured("url", "s", "is refused", "allow it"),
        OutcomeUnknown("key", "no reply"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_who_listens_waits_for_an_interval_while_the_store_is_away(error: Exception) -> None:
    """It does not ask again and again."""
    pair = Pair()

    async def fail(*_: object) -> bool:
        raise error

    pair.older.link.wait = cast("Any", fail)  # type: ignore[method-assign]
    for number in range(1, 3):
        await pair.older.member._wait_for_change(f"{ROLES}default/")
        assert pair.clock.mono_seconds == 1_000.0 + number * TIMING.heartbeat


async def test_whoever_waits_is_told_of_each_thing_that_changes_alone() -> None:
    """Of every election, of each session that is seen, of all that live or died; and only then."""
    pair = Pair()
    told: list[str] = []
    owner = SessionOwner(pair.store, pair.older.components, TIMING, "worker-1")
    member = MemberLoop(owner, lambda: told.append("changed"))
    await member.open()
    candidacy = SimpleNamespace(held_term=None, leading_term=None, role=None)
    member.elections["default/work"] = cast("Any", candidacy)
    member.seen = {"worker-2.a": see()}
    member.watched = frozenset({"worker-3.a"})
    member._report_changes()
    told.clear()
    term = HeldTerm(1, "worker-1.a", 0, pair.clock.mono())
    role = Role(epoch=1, owner="worker-2.a", since=0.0, until=0.0, timeout=TIMING.timeout)
    observer = member._observer
    changes: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "held": lambda: setattr(candidacy, "held_term", term),
        "leads": lambda: setattr(candidacy, "leading_term", term),
        "role": lambda: setattr(candidacy, "role", role),
        "renewed": lambda: setattr(candidacy, "role", msgspec.structs.replace(role, until=9.0)),
        "beat": lambda: setattr(member, "seen", {"worker-2.a": see(beat=2)}),
        "works": lambda: setattr(member, "seen", {"worker-2.a": see(works=("a/b",))}),
        "no works": lambda: setattr(member, "seen", {"worker-2.a": see()}),
        "holds": lambda: setattr(member, "seen", {"worker-2.a": see(holds={"a/b": 1})}),
        "epoch": lambda: setattr(member, "seen", {"worker-2.a": see(holds={"a/b": 2})}),
        "holds no more": lambda: setattr(member, "seen", {"worker-2.a": see()}),
        "facts": lambda: setattr(member, "seen", {"worker-2.a": see(facts={"pid": 1})}),
        "gone": lambda: setattr(member, "seen", {}),
        "living": lambda: setattr(observer, "living", frozenset({"worker-4.a"})),
        "dead": lambda: observer._mark_dead("worker-3.a", pair.clock.mono(), ended=False),
        "dead, and not watched": lambda: observer._mark_dead(
            "worker-5.a", pair.clock.mono(), ended=False
        ),
        "session": lambda: setattr(member.session, "incarnation", "worker-1.b"),
    }
    for name, change in changes.items():
        for is_new in (True, False):
            if is_new:
                change()
            member._report_changes()
            expected = is_new and name not in {"nothing", "beat", "dead, and not watched"}
            assert (name, told) == (name, ["changed"] * expected)
            told.clear()


def see(**fields: Any) -> SessionRecord:
    """Return the record of another session."""
    values = {"worker": "worker-2", "state": "live", "beat": 1, "timing": TIMING}
    return SessionRecord(**{**values, **fields})


@pytest.mark.parametrize("store", [MemoryStore, BilledStore])
@pytest.mark.parametrize("fails", range(3))
async def test_a_renewal_that_fails_is_tried_again_at_the_next_check(
    monkeypatch: pytest.MonkeyPatch, fails: int, store: type[MemoryStore]
) -> None:
    """Told and counted once it is written, in each mandate of a term."""
    pair = Pair(store)
    election = await pair.lead()
    worker, term = pair.older, election.held_term
    told: list[float] = []
    worker.components.events.on(
        "coord:coordinator-epoch-renewed", lambda event: told.append(event.until)
    )
    tries: list[float] = []

    async def write(changes: Sequence[Change]) -> list[Outcome]:
        if changes[0].key.startswith(ROLES):
            tries.append(pair.clock.wall_seconds)
            if len(tries) % (fails + 1):
                raise Unavailable("the store", "a write was refused")
        return await pair.store.write(changes)

    monkeypatch.setattr(worker.link, "write", write)
    for number in range(1, 4):
        before = pair.clock.wall_seconds
        while len(told) < number:
            pair.clock.mono_seconds += TIMING.heartbeat
            pair.clock.wall_seconds += TIMING.heartbeat
            await worker.member.heartbeats._send()
            with suppress(Unavailable):
                await worker.check()
        role = read_role(await pair.store.get(f"{ROLES}{ROLE}"))
        assert role is not None
        assert told == [*told[: number - 1], role.until]
        assert role.until == pair.clock.wall_seconds + MOST
        assert tries[-fails - 1 :] == [
            before + MOST + late * TIMING.heartbeat for late in range(fails + 1)
        ]
        assert len(tries) == number * (fails + 1)
        assert election.held_term is term is not None


@pytest.mark.parametrize(
    ("change", "takes_it"),
    [
        ({}, False),
        ({"epoch": 2}, False),
        ({"epoch": 2, "former": "own"}, False),
        ({"epoch": 2, "former": "worker-0.0badcafe"}, True),
        # Of the same epoch: it was over before this worker started.
        ({"former": "worker-0.0badcafe"}, False),
    ],
    ids=str,
)
async def test_a_cold_start_ends_when_somebody_else_has_led_meanwhile(
    change: dict[str, object], *, takes_it: bool
) -> None:
    """Although that term is over again: whoever leads a fleet has observed it for long enough."""
    pair = Pair()
    worker = pair.older
    slow = CoordinatorSettings(cold_start_observation_window=100.0)
    worker.settings = slow.for_store(pair.store, TIMING)
    await pair.write_role()
    await pair.start(worker)
    await worker.check()
    assert not worker.holds
    fields = {
        name: worker.member.session.incarnation if value == "own" else value
        for name, value in change.items()
    }
    await pair.write_role(**fields)
    for _ in range(2):
        await worker.check()
    assert worker.holds == takes_it
