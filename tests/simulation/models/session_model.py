"""A session and its observer: while the holder trusts itself, its record does not read dead.

The holder beats in place of its own last version. A beat may be applied and not answered,
be sent again, be given up and land later, more than one at a time. The observer's reads
are slow: one starts, shows what is there at some later moment, and returns later still.
Either of them may stand still between any two steps. The holder's clock is slow and the
observer's slow or fast at every tick, by the 5 % that are allowed; a holder whose clock is
faster trusts itself for less.

Nor does a session take itself for lost while its record lives; and whatever happened, as
long as nobody calls it dead, it can come to trust itself again.

The window of trust and the observer's count are the library's own: `Timing.trusted_until`,
`Watch.look`, `Watch.expired`.
"""

from collections.abc import Iterator
from functools import cache
from typing import Literal, TypeAlias

import msgspec
from explorer import Model, Step

from jobsync.core.clock import Mono
from jobsync.core.trust import Timing, Watch

__all__ = ["MUTATIONS", "WORLDS", "Scene", "SessionModel"]

Beating: TypeAlias = Literal["", "sent", "applied", "conflicted", "unheard", "pending"]
Life: TypeAlias = Literal["live", "lost", "ended"]

DEATH = 99
"""The version of a record that reads dead, among those to come."""

TICK = 20
SLOW, FAST = 19, 21
"""What a clock may count while a tick of 20 passes."""

replace = msgspec.structs.replace


class Scene(msgspec.Struct, frozen=True):
    """How patient everybody is, and how bad the network."""

    timing: Timing
    strays: int = 1
    """How many beats that were given up may be under way at a time."""
    rates: tuple[int, ...] = (SLOW, FAST)
    """What the observer's clock may count at a tick."""
    server_clock: bool = False
    """Whether the store has a clock of its own, which may jump."""


class Beat(msgspec.Struct, frozen=True, gc=False):
    """A write of the holder: a version in place of another."""

    version: int
    base: int
    age: int
    """How long ago it was first sent, by the holder's clock."""


class Read(msgspec.Struct, frozen=True, gc=False):
    """A look of the observer at the record."""

    version: int | None
    """What it will show; None until it reaches the store."""
    age: int = 0
    """How long ago it began, by the observer's clock; kept only by who counts from there."""


class Watched(msgspec.Struct, frozen=True, gc=False):
    """What the observer knows: a `Watch` whose times are ages."""

    version: int
    since: int
    looked: int


class State(msgspec.Struct, frozen=True, gc=False):
    """Everything. Versions count up: 1 is the record's, 0 any earlier one, 2 and up are to come.

    So a state says how versions relate, and not how many there ever were.
    """

    dead: bool = False
    age: int = 0
    """How long ago the beat that made the record was first sent, by the holder's clock."""
    life: Life = "live"
    base: int = 1
    trust: int = 0
    """How long ago, by the holder's clock, the moment was from which it counts its trust."""
    beat: Beat | None = None
    beating: Beating = ""
    strays: frozenset[Beat] = frozenset()
    watched: Watched | None = None
    read: Read | None = None
    doomed: bool = False
    """Whether a write that says `dead` in place of the record may land."""
    jumped: bool = False
    """Whether by the store's clock the session has been silent for too long."""


@cache
def trusts(timing: Timing, age: int) -> bool:
    """Say whether trust lasts that was counted from so long ago."""
    return Mono(0) < timing.trusted_until(Mono(-age))


@cache
def look(timing: Timing, watched: Watched | None, read: Read) -> tuple[Watched, bool]:
    """Take in a read that returns now; say whether what it shows has expired."""
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
    """Whether the observer counts from when its read began, and not from when it returned."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._timing = scene.timing
        self._timeout = int(scene.timing.timeout)

    def starts(self) -> Iterator[State]:
        yield State()

    def steps(self, state: State) -> Iterator[Step[State]]:
        if state.life != "live":
            # It holds nothing any more, whatever becomes of its record.
            return
        yield from self._hold(state)
        for stray in state.strays:
            yield Step("a beat that was given up lands", _land(state, stray))
        if not state.dead:
            yield self._observe(state)
        if state.doomed:
            dead = _renew(replace(state, dead=True), DEATH, state.age)
            yield Step("the record is written dead", dead, misfortune=True)
        if self._scene.server_clock and not state.jumped:
            jumped = replace(state, jumped=True)
            yield Step("the store's clock jumps forward", jumped, misfortune=True)
        for rate in self._scene.rates:
            yield Step(f"a tick: the clocks count {SLOW} and {rate}", self._pass(state, rate))

    def wrong(self, state: State) -> str | None:
        if state.dead and self.trusted(state):
            return "the holder trusts itself, and its record reads dead"
        if state.life == "lost" and not state.dead:
            return "the session takes itself for lost, and its record lives"
        return None

    def reached(self, state: State) -> bool:
        return state.life != "live" or self.trusted(state)

    def trusted(self, state: State) -> bool:
        return state.life == "live" and self.trusts(state.trust)

    # What the mutations change.

    def trusts(self, age: int) -> bool:
        return trusts(self._timing, age)

    def condemns(self, state: State, *, expired: bool) -> bool:
        """Say whether a session is to be called dead. A clock of the store can only forbid it."""
        return expired

    def doom(self, state: State, version: int) -> State:
        """Send the death in place of the version that was watched."""
        return replace(state, doomed=state.doomed or version == 1)

    def heard(self, beat: Beat) -> int:
        """Give the age from which trust counts when a beat is known to be applied."""
        return beat.age

    def adopted(self, state: State) -> int:
        """Give the age from which trust counts when an earlier beat is found in the record."""
        return state.age

    def resent(self, beat: Beat) -> Beat:
        return beat

    def refused(self, state: State) -> State:
        """Find something else in the record than what the beat was to replace."""
        if state.dead:
            return _idle(replace(state, life="lost"))
        return self._trust(replace(state, base=1), self.adopted(state))

    def end(self, state: State) -> State:
        """Leave in good order: trust ends when that is sent."""
        return _idle(replace(state, life="ended"))

    # Who does what.

    def _hold(self, state: State) -> Iterator[Step[State]]:
        beat = state.beat
        if beat is None:
            newest = max([1, *(stray.version for stray in state.strays)]) + 1
            sent = replace(state, beat=Beat(newest, state.base, 0), beating="sent")
            yield Step("the holder sends a beat", sent)
            ended = replace(self.end(state), doomed=state.doomed or state.base == 1)
            yield Step("the holder sends its end", ended, misfortune=True)
        elif state.beating == "sent":
            answer: Beating = "applied" if beat.base == 1 else "conflicted"
            landed = _land(state, beat)
            yield Step(f"the beat lands: {answer}", replace(landed, beating=answer))
            yield Step("the holder hears nothing", self._give_up(state, beat))
        elif state.beating == "applied":
            known = self._trust(replace(state, base=beat.version), self.heard(beat))
            yield Step("the holder hears that its beat was applied", known)
            yield Step("the holder hears nothing", replace(state, beating="unheard"))
        elif state.beating == "conflicted":
            yield Step("the holder hears of a conflict, and looks", self._find(state, beat))
        else:
            yield Step("the holder gives the beat up", _idle(state))
            if state.beating == "pending":
                again = replace(state, beat=self.resent(beat), beating="sent")
                yield Step("the holder sends the beat again", again)
            elif beat.base == 1:
                yield Step("the holder looks: pending", replace(state, beating="pending"))
            else:
                yield Step("the holder looks", self._find(state, beat))

    def _find(self, state: State, beat: Beat) -> State:
        """Look at the record after a beat that was not heard to be applied."""
        if beat.version == 1:
            return self._trust(replace(state, base=1), self.heard(beat))
        return self.refused(state)

    def _give_up(self, state: State, beat: Beat) -> State:
        """Stop waiting for an answer; what was sent may land later."""
        strays = state.strays
        if beat.base == 1 and len(strays - {beat}) < self._scene.strays:
            strays |= {beat}
        return replace(state, beating="unheard", strays=strays)

    def _trust(self, state: State, age: int) -> State:
        return _idle(replace(state, trust=min(state.trust, age)))

    def _observe(self, state: State) -> Step[State]:
        read = state.read
        if read is None:
            if self.counts_from_start:
                return Step("the observer starts to read", replace(state, read=Read(None)))
            return Step("a read of the observer reaches the store", replace(state, read=Read(1)))
        if read.version is None:
            return Step("the read reaches the store", replace(state, read=replace(read, version=1)))
        watched, expired = look(self._timing, state.watched, read)
        after = replace(state, watched=watched, read=None)
        if not self.condemns(state, expired=expired):
            return Step("the read returns", after)
        return Step("the read returns; the observer sends death", self.doom(after, read.version))

    def _pass(self, state: State, rate: int) -> State:
        """Let a tick pass, which the observer's clock counts as it may."""
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
    """Be done with a beat."""
    return replace(state, beat=None, beating="")


def _land(state: State, beat: Beat) -> State:
    return state if beat.base != 1 else _renew(state, beat.version, beat.age)


def _renew(state: State, version: int, age: int) -> State:
    """Make another version the record's. Nothing that is based on the one before can land now."""

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
    """Trust counts from when a beat was answered, not from when it was sent."""

    def heard(self, beat: Beat) -> int:
        return 0


class TrustFromAResend(SessionModel):
    """Trust counts from the latest send; an earlier copy is what was applied."""

    def resent(self, beat: Beat) -> Beat:
        return replace(beat, age=0)


class TrustFromTheAdoption(SessionModel):
    """An earlier beat that is found in the record counts from when it is found."""

    def adopted(self, state: State) -> int:
        return 0


class CountFromTheStart(SessionModel):
    """The observer counts from when it began to read; the beat that it saw came later."""

    counts_from_start = True


class NoMargin(SessionModel):
    """Trust lasts as long as the timeout; a fast clock counts that sooner than a slow one."""

    def trusts(self, age: int) -> bool:
        return age < self._timeout


class LosesToItself(SessionModel):
    """Any conflict means lost; it was an earlier beat, given up, that landed."""

    def refused(self, state: State) -> State:
        return _idle(replace(state, life="lost"))


class NothingAdopted(SessionModel):
    """A conflict with an earlier beat teaches nothing; no beat is ever applied again."""

    def refused(self, state: State) -> State:
        return super().refused(state) if state.dead else _idle(state)


class DeathOfAnyVersion(SessionModel):
    """The observer calls dead what it finds, not what it watched."""

    def doom(self, state: State, version: int) -> State:
        return replace(state, doomed=True)


class EndBelievedTooLong(SessionModel):
    """A holder that leaves trusts itself until its end is answered."""

    def end(self, state: State) -> State:
        return state


class ServerClockAlone(SessionModel):
    """What the store's clock calls overdue is called dead, watched or not; the clock jumps."""

    def condemns(self, state: State, *, expired: bool) -> bool:
        return state.jumped or expired


class TrustIsCached(SessionModel):
    """Once trusted, the holder asks its clock no more."""

    def trusted(self, state: State) -> bool:
        return state.life == "live"


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
    EndBelievedTooLong: "short",
    ServerClockAlone: "a jumping server",
    TrustIsCached: "short",
}
