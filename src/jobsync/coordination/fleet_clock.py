"""The time by which something is due, the same for all processes of a fleet.

It decides which instants of a schedule have come and which records have expired.

Where the store has a clock, that clock decides. It is compared with this machine's monotonic clock
once a beat, so that reading the time costs nothing, and a step of this machine's wall clock changes
nothing. What is returned between two comparisons is never ahead of the store's clock, as long as
the rates of both differ by at most 5 %: it is the least that the store's time can be. On SQLite and
in memory that clock is this machine's own, which all share.

On objects the wall clock decides, but only while it agrees with the server's time of this worker's
own heartbeats. A disagreement is a veto: this process must not decide what is due, and another
should lead. A veto protects people from a wrong clock. It proves nothing: that each instant fires
once, and that a renewed record stays, does not depend on clocks, because the store decides it.
"""

from datetime import UTC, datetime

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.errors import Misconfigured, Unavailable
from jobsync.stores.contract import Store

__all__ = ["MAX_SKEW", "FleetClock"]

MAX_SKEW = 30.0
"""Seconds by which a wall clock may disagree with the object store's."""

_AGREED_SKEW = 25.0
"""Seconds within which it agrees again. Less, so that a role does not change hands to and fro."""

_MAX_AGE = 60.0
"""Seconds for which a comparison holds while the store does not answer: clocks drift apart."""

_DRIFT = 0.053
"""Seconds that a clock gains or loses in a second against another, if their rates differ by 5 %."""

_CLOSE = 0.01
"""Seconds of doubt about the time that are not worth another comparison."""

_UNKNOWN = "the store's time is not known yet"


class FleetClock:
    """The time by which something is due.

    Call `refresh` once a beat in a process that decides what is due, or that stands back because
    of its clock.

    `now` never goes back behind a time that was not vetoed, so an instant that was due stays due.
    If the clock that decides is set back, it goes on at half speed until both agree: for two
    minutes after a step of one minute. After a step of an hour that takes two hours. Instants are
    due early in that time, but jobs do not stand still. A process that starts meanwhile goes by the
    corrected clock at once, and fires nothing that was fired already. A step forward counts from
    the next refresh: the instants between are late, as after an outage.

    If the store does not answer, its time is unknown after a minute, for the doubt grows.

    `measured_now` follows the clock that decides at once, also backwards. It is for what must not
    be due early and can wait, such as the removal of a record. `estimate` is for times that are
    shown to people: it is as likely ahead as behind.

    Args:
        membership: compares this machine's clock with an object store's.
        store: its clock decides if it has one.
        components: this machine's clocks.
    """

    def __init__(self, membership: Membership, store: Store, components: Components) -> None:
        self._membership = membership
        self._store = store
        self._clock = components.clock
        self._uses_wall = False
        """Whether the store is known to have no clock."""
        self._offsets: tuple[float, float] | None = None
        """The least and the most that the store's time minus the monotonic time was then."""
        self._offset: float | None = None
        """What is likely. It stays while it is possible, so that slow requests do not move it."""
        self._measured_at = 0.0
        """The monotonic time of that comparison."""
        self._has_failed = False
        """Whether the store has not answered since."""
        self._disagreement = ""
        self._shown: tuple[float, float] | None = None
        """The latest time that was not vetoed, and the monotonic time then."""

    async def refresh(self) -> None:
        """Compare the clocks. If the store does not answer, the last comparison stands for a while.

        That costs a request on SQL. On objects it costs none in a process that leads anything, and
        one in two timeouts in others.
        """
        try:
            if not self._uses_wall:
                await self._measure_offset()
            if self._uses_wall:
                await self._membership.measure_clock()
        except (Unavailable, Misconfigured):
            # Nothing can be done either while the store does not answer. If it never has,
            # `veto` says that its time is unknown.
            self._has_failed = True

    def now(self) -> float:
        """Return the time in Unix seconds; it does not go back.

        Under a veto it is the best guess, which is good enough to end a run that had begun: the
        object store's time as far as it is known, else this machine's.
        """
        mono, veto = self._clock.mono().seconds, self.veto
        now = self.measured_now()
        if self._shown is not None:
            shown, then = self._shown
            now = max(now, shown + (mono - then) / 2)
        if not veto:
            # Otherwise a guess could hold up the time after the correction.
            self._shown = (now, mono)
        return now

    def estimate(self) -> float:
        """Return the likely time in Unix seconds, to say when something has happened."""
        now = self.now()
        return now if self._offset is None else max(now, self._clock.mono().seconds + self._offset)

    async def reach(self, instant: float) -> None:
        """Compare the clocks again if only that can tell whether a time has come.

        A request for each time that something is due, rather than one for each look at the clock.
        """
        if self.measure_wait(instant) <= 0 and self.now() < instant:
            await self.refresh()

    @property
    def latest(self) -> float:
        """The latest that the time may be, in Unix seconds."""
        if self._offsets is None:
            return self.now()
        _, most = self._offsets
        return max(self.now(), self._clock.mono().seconds + most + self._find_drift())

    def measure_wait(self, instant: float) -> float:
        """Return how many seconds to wait until a time has come, or may have."""
        wait = instant - self.now()
        doubt = 0.0 if self._offsets is None or self._has_failed else self._find_drift()
        return max(0.0, wait - doubt if doubt > _CLOSE else wait)

    def measured_now(self) -> float:
        """Return the time in Unix seconds as it was last measured; it may go back."""
        if self._offsets is not None:
            least, _ = self._offsets
            return self._clock.mono().seconds + least - self._find_drift()
        skew = self._membership.clock_skew if self.is_off else None
        return self._clock.wall().seconds - (skew or 0.0)

    @property
    def veto(self) -> str:
        """Why nothing may be due now, for people; empty if all is well. Reads the clock each time.

        The text stays the same until the clocks agree again.
        """
        if self._offsets is not None:
            is_old = self._clock.mono().seconds - self._measured_at > _MAX_AGE
            return _UNKNOWN if is_old and self._has_failed else ""
        skew = self._membership.clock_skew
        if not self._uses_wall or skew is None:
            return _UNKNOWN
        if abs(skew) <= (_AGREED_SKEW if self._disagreement else MAX_SKEW):
            self._disagreement = ""
        elif not self._disagreement:
            self._disagreement = _describe(skew, self._clock.wall().seconds)
        return self._disagreement

    @property
    def is_off(self) -> bool:
        """Whether this machine's clock is the reason of the veto, so that another should lead."""
        return self.veto not in {"", _UNKNOWN}

    async def _measure_offset(self) -> None:
        sent = self._clock.mono().seconds
        server = await self._store.now()
        received = self._clock.mono().seconds
        if server is None:
            self._uses_wall = True
            return
        # The server read its clock between the two, and went on at its own rate since. What was
        # known before narrows that down.
        least = server.seconds - received
        most = server.seconds - sent + _DRIFT * (received - sent)
        if self._offsets is not None:
            drift = self._find_drift()
            low, high = self._offsets[0] - drift, self._offsets[1] + drift
            if low <= most and least <= high:
                least, most = max(low, least), min(high, most)
        self._offsets, self._measured_at, self._has_failed = (least, most), received, False
        self._offset = least if self._offset is None else min(max(self._offset, least), most)

    def _find_drift(self) -> float:
        """Return how many seconds the clocks may have drifted apart since they were compared."""
        return _DRIFT * (self._clock.mono().seconds - self._measured_at)


def _describe(skew: float, wall: float) -> str:
    # Whole seconds, so that the two times differ by what the sentence says.
    here, ahead = round(wall), round(skew)
    direction = "ahead of" if ahead > 0 else "behind"
    return (
        f"this machine's clock is {abs(ahead)} s {direction} the object store's "
        f"({_format(here)} here, {_format(here - ahead)} there)"
    )


def _format(instant: int) -> str:
    return f"{datetime.fromtimestamp(instant, UTC):%Y-%m-%d %H:%M:%S} UTC"
