"""Model of a session and its observer: while the holder trusts itself, its record is not dead.

A heartbeat replaces the holder's own last version. It may be applied without a reply, be resent, or
be abandoned and land later, more than one at a time. The observer's reads are slow: one starts,
shows the record at some later moment, and returns later still. Either of them may pause between
any two steps. The holder's clock is slow, and the observer's slow or fast at every tick, by the
allowed 5 %; a holder with a faster clock trusts itself for less.

A session also does not consider itself lost while its record is live; and from every state, unless
it is declared dead, it can come to trust itself again.

The model uses the library's own `Timing.trusted_until`, `Watch.observe` and `Watch.has_expired`.
"""

from collections.abc import Iterator
from functools import cache
from typing import Literal, TypeAlias

import msgspec
from explorer import Model, Step

from jobsync.core.clock import Mono
from jobsync.core.trust import Timing, Watch

__all__ = ["MUTATIONS", "WORLDS", "Scene", "SessionModel"]

BeatPhase: TypeAlias = Literal["", "sent", "applied", "conflicted", "unanswered", "pending"]
Phase: TypeAlias = Literal["live", "lost", "ended"]

DEATH = 99
"""The version of the record that reads dead."""

TICK = 20
SLOW, FAST = 19, 21
"""What a clock may measure while a tick of 20 passes."""

replace = msgspec.structs.replace


class Scene(msgspec.Struct, frozen=True):
    """The timing, and the faults that may happen."""

    timing: Timing
    strays: int = 1
    """The number of abandoned heartbeats that may be under way at a time."""
    rates: tuple[int, ...] = (SLOW, FAST)
    """What the observer's clock may measure in a tick."""
    server_clock: bool = False
    """Whether the store has a clock of its own, which may jump."""


class Beat(msgspec.Struct, frozen=True, gc=False):
    """A heartbeat of the holder: a version in place of another."""

    version: int
    base: int
    age: int
    """How long ago it was first sent, by the holder's clock."""


class Read(msgspec.Struct, frozen=True, gc=False):
    """A read of the record by the observer."""

    version: int | None
    """What it will show; None until it reaches the store."""
    age: int = 0
    """How long ago it started, by the observer's clock; only for models that count from there."""


class Watched(msgspec.Struct, frozen=True, gc=False):
    """What the observer knows: a `Watch` with ages instead of times."""

    version: int
    since: int
    looked: int


class State(msgspec.Struct, frozen=True, gc=False):
    """The whole model. Version 1 is the record's, 0 any earlier one, 2 and above are later ones.

    So a state has the order of versions, and not their total number.
    """

    dead: bool = False
    age: int = 0
    """How long ago the record's heartbeat was first sent, by the holder's clock."""
    phase: Phase = "live"
    base: int = 1
    trust: int = 0
    """The age of the moment from which trust counts, by the holder's clock."""
    beat: Beat | None = None
    beat_phase: BeatPhase = ""
    strays: frozenset[Beat] = frozenset()
    watched: Watched | None = None
    read: Read | None = None
    doomed: bool = False
    """Whether a write that replaces the record by `dead` may land."""
    jumped: bool = False
    """Whether the session has timed out by the store's clock."""


@cache
def trusts(timing: Timing, age: int) -> bool:
    """Whether trust that counts from that long ago still lasts."""
    return Mono(0) < timing.trusted_until(Mono(-age))


@cache
def look(timing: Timing, watched: Watched | None, read: Read) -> tuple[Watched, bool]:
    """Return the watch after a read that returns now, and whether it has expired."""
    version, now = str(read.version), Mono(-read.age)
    before = Watch(version, now, now)
    if watched is not None:
        before = Watch(str(watched.version), Mono(-watched.since), Mono(-watched.looked))
    after = before.observe(version, now, timing)
    ages = (int(-after.since.seconds), int(-after.last_read.seconds))
    return Watched(int(str(after.version)), *ages), after.has_expired(timing.timeout)


class SessionModel(Model[State]):
    """One holder, one observer, one record."""

    counts_from_start = False
    """Whether the observer counts from the start of its read instead of its return."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._timing = scene.timing
        self._timeout = int(scene.timing.timeout)

    def starts(self) -> Iterator[State]:
        yield State()

    def steps(self, state: State) -> Iterator[Step[State]]:
        if state.phase != "live":
            # It holds nothing any more, whatever happens to its record.
            return
        yield from self._step_holder(state)
        for stray in state.strays:
            yield Step("an abandoned heartbeat lands", _land(state, stray))
        if not state.dead:
            yield self._step_observer(state)
        if state.doomed:
            dead = _renew(replace(state, dead=True), DEATH, state.age)
            yield Step("the session is declared dead", dead, is_fault=True)
        if self._scene.server_clock and not state.jumped:
            jumped = replace(state, jumped=True)
            yield Step("the store's clock jumps forward", jumped, is_fault=True)
        for rate in self._scene.rates:
            yield Step(f"a tick: the clocks measure {SLOW} and {rate}", self._tick(state, rate))

    def find_violation(self, state: State) -> str | None:
        if state.dead and self.trusted(state):
            return "the holder trusts itself, and its record reads dead"
        if state.phase == "lost" and not state.dead:
            return "the session considers itself lost, and its record is live"
        return None

    def is_goal(self, state: State) -> bool:
        return state.phase != "live" or self.trusted(state)

    def trusted(self, state: State) -> bool:
        return state.phase == "live" and self.trusts(state.trust)

    # Overridden by mutations.

    def trusts(self, age: int) -> bool:
        return trusts(self._timing, age)

    def should_declare_dead(self, state: State, *, expired: bool) -> bool:
        """Whether to declare a session dead. The store's clock can only prevent it."""
        return expired

    def send_death(self, state: State, version: int) -> State:
        """Send the death, in place of the version that was watched."""
        return replace(state, doomed=state.doomed or version == 1)

    def trust_after(self, beat: Beat) -> int:
        """Return the age from which trust counts after an applied heartbeat."""
        return beat.age

    def trust_after_adoption(self, state: State) -> int:
        """Return the age from which trust counts after an earlier heartbeat was adopted."""
        return state.age

    def resent(self, beat: Beat) -> Beat:
        return beat

    def on_conflict(self, state: State) -> State:
        """Process a record that is not the base of the heartbeat."""
        if state.dead:
            return _idle(replace(state, phase="lost"))
        return self._trust(replace(state, base=1), self.trust_after_adoption(state))

    def end(self, state: State) -> State:
        """End the session: trust ends when that is sent."""
        return _idle(replace(state, phase="ended"))

    # Steps.

    def _step_holder(self, state: State) -> Iterator[Step[State]]:
        beat = state.beat
        if beat is None:
            newest = max([1, *(stray.version for stray in state.strays)]) + 1
            sent = replace(state, beat=Beat(newest, state.base, 0), beat_phase="sent")
            yield Step("the holder sends a heartbeat", sent)
            ended = replace(self.end(state), doomed=state.doomed or state.base == 1)
            yield Step("the holder sends its end", ended, is_fault=True)
        elif state.beat_phase == "sent":
            answer: BeatPhase = "applied" if beat.base == 1 else "conflicted"
            landed = _land(state, beat)
            yield Step(f"the heartbeat lands: {answer}", replace(landed, beat_phase=answer))
            yield Step("the holder gets no reply", self._abandon(state, beat))
        elif state.beat_phase == "applied":
            known = self._trust(replace(state, base=beat.version), self.trust_after(beat))
            yield Step("the holder gets the reply: applied", known)
            yield Step("the holder gets no reply", replace(state, beat_phase="unanswered"))
        elif state.beat_phase == "conflicted":
            yield Step(
                "the holder gets the reply: conflicted, and reads", self._read_record(state, beat)
            )
        else:
            yield Step("the holder abandons the heartbeat", _idle(state))
            if state.beat_phase == "pending":
                again = replace(state, beat=self.resent(beat), beat_phase="sent")
                yield Step("the holder resends the heartbeat", again)
            elif beat.base == 1:
                yield Step("the holder reads: pending", replace(state, beat_phase="pending"))
            else:
                yield Step("the holder reads", self._read_record(state, beat))

    def _read_record(self, state: State, beat: Beat) -> State:
        """Read the record after a heartbeat without the reply `applied`."""
        if beat.version == 1:
            return self._trust(replace(state, base=1), self.trust_after(beat))
        return self.on_conflict(state)

    def _abandon(self, state: State, beat: Beat) -> State:
        """Stop waiting for a reply; the heartbeat may land later."""
        strays = state.strays
        if beat.base == 1 and len(strays - {beat}) < self._scene.strays:
            strays |= {beat}
        return replace(state, beat_phase="unanswered", strays=strays)

    def _trust(self, state: State, age: int) -> State:
        return _idle(replace(state, trust=min(state.trust, age)))

    def _step_observer(self, state: State) -> Step[State]:
        read = state.read
        if read is None:
            if self.counts_from_start:
                return Step("the observer starts to read", replace(state, read=Read(None)))
            return Step("a read of the observer reaches the store", replace(state, read=Read(1)))
        if read.version is None:
            return Step("the read reaches the store", replace(state, read=replace(read, version=1)))
        watched, expired = look(self._timing, state.watched, read)
        after = replace(state, watched=watched, read=None)
        if not self.should_declare_dead(state, expired=expired):
            return Step("the read returns", after)
        return Step(
            "the read returns; the observer sends death", self.send_death(after, read.version)
        )

    def _tick(self, state: State, rate: int) -> State:
        """Advance time by a tick; the observer's clock measures `rate`."""
        cap = self._timeout
        watched, read = state.watched, state.read
        if watched is not None:
            looked = min(watched.looked + rate, 2 * int(self._timing.heartbeat) + 1)
            watched = Watched(watched.version, min(watched.since + rate, cap), looked)
        if read is not None and self.counts_from_start:
            read = Read(read.version, min(read.age + rate, cap))
        return replace(
            state,
            age=min(state.age + SLOW, cap),
            trust=min(state.trust + SLOW, cap),
            beat=None if state.beat is None else _older(state.beat, cap),
            strays=frozenset(_older(stray, cap) for stray in state.strays),
            watched=watched,
            read=read,
        )


def _older(beat: Beat, cap: int) -> Beat:
    return replace(beat, age=min(beat.age + SLOW, cap))


def _idle(state: State) -> State:
    """Return the state without a current heartbeat."""
    return replace(state, beat=None, beat_phase="")


def _land(state: State, beat: Beat) -> State:
    return state if beat.base != 1 else _renew(state, beat.version, beat.age)


def _renew(state: State, version: int, age: int) -> State:
    """Replace the record's version. Nothing based on the earlier one can land now."""

    def rename(old: int) -> int:
        return 1 if old == version else min(old, 2) if old > 1 else 0

    beat, watched, read = state.beat, state.watched, state.read
    return replace(
        state,
        age=age,
        base=rename(state.base),
        beat=beat and replace(beat, version=rename(beat.version), base=rename(beat.base)),
        strays=frozenset(),
        watched=None
        if state.dead
        else watched and replace(watched, version=rename(watched.version)),
        read=None if state.dead else read and replace(read, version=read.version and 0),
        doomed=False,
        jumped=False,
    )


class TrustFromTheReply(SessionModel):
    """Trust counts from the reply to a heartbeat, not from its send."""

    def trust_after(self, beat: Beat) -> int:
        return 0


class TrustFromAResend(SessionModel):
    """Trust counts from the last send; an earlier copy was applied."""

    def resent(self, beat: Beat) -> Beat:
        return replace(beat, age=0)


class TrustFromTheAdoption(SessionModel):
    """After an adoption trust counts from the read, not from the send."""

    def trust_after_adoption(self, state: State) -> int:
        return 0


class CountFromTheStart(SessionModel):
    """The observer counts from the start of its read; the heartbeat that it saw came later."""

    counts_from_start = True


class NoMargin(SessionModel):
    """Trust lasts for the whole timeout; a fast clock measures that sooner than a slow one."""

    def trusts(self, age: int) -> bool:
        return age < self._timeout


class LosesToItself(SessionModel):
    """Any conflict means lost; but an abandoned earlier heartbeat had landed."""

    def on_conflict(self, state: State) -> State:
        return _idle(replace(state, phase="lost"))


class NothingAdopted(SessionModel):
    """An earlier heartbeat is not adopted; no heartbeat is ever applied again."""

    def on_conflict(self, state: State) -> State:
        return super().on_conflict(state) if state.dead else _idle(state)


class DeathOfAnyVersion(SessionModel):
    """The observer declares dead the version that it finds, not the one that it watched."""

    def send_death(self, state: State, version: int) -> State:
        return replace(state, doomed=True)


class TrustsUntilEndIsAnswered(SessionModel):
    """A holder that leaves trusts itself until the reply."""

    def end(self, state: State) -> State:
        return state


class ServerClockAlone(SessionModel):
    """The store's clock alone decides death; it jumps."""

    def should_declare_dead(self, state: State, *, expired: bool) -> bool:
        return state.jumped or expired


class TrustIsCached(SessionModel):
    """Once trusted, the holder does not read its clock any more."""

    def trusted(self, state: State) -> bool:
        return state.phase == "live"


SHORT = Timing(heartbeat=TICK, timeout=3 * TICK)
LONG = Timing(heartbeat=2 * TICK, timeout=6 * TICK)

WORLDS = {
    "short": Scene(SHORT, rates=(FAST,)),
    "uneven clocks": Scene(SHORT),
    "two strays": Scene(SHORT, strays=2, rates=(FAST,)),
    "a jumping server": Scene(SHORT, rates=(FAST,), server_clock=True),
    "long": Scene(LONG, rates=(FAST,)),
}

MUTATIONS: dict[type[SessionModel], str] = {
    TrustFromTheReply: "short",
    TrustFromAResend: "short",
    TrustFromTheAdoption: "short",
    CountFromTheStart: "short",
    NoMargin: "short",
    LosesToItself: "short",
    NothingAdopted: "short",
    DeathOfAnyVersion: "short",
    TrustsUntilEndIsAnswered: "short",
    ServerClockAlone: "a jumping server",
    TrustIsCached: "short",
}
