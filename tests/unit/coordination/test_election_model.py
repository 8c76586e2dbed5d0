"""Workers whose heartbeats and checks come one by one: what elections promise in term after term.

Workers join, leave, stand back, lose their sessions and ask for the role, in random order. The
rules are checked against everything that was written, and against what each session says.
"""

import random
from collections.abc import Sequence

import pytest
from chance import FakeClock, SeededRandomness
from fleets import BilledStore

from jobsync import Components, CoordinatorSettings, Events, Unknown
from jobsync.coordination.election import Election
from jobsync.coordination.member_loop import MemberLoop
from jobsync.coordination.role import ROLES, Role, read_role, worker_of
from jobsync.coordination.session import SESSIONS, SessionOwner, read_session_record, read_withheld
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
