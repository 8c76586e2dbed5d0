"""How long a session may trust itself, and when others may call it dead. Pure.

One formula keeps the two apart:

    trusted until  =  first send of the last beat that was applied  +  timeout - margin
    expired at     =  return of the first read that showed that beat +  timeout

The read returns after the beat was sent, so with clocks that run at the same rate the
holder stops at least `margin` before anybody may call it dead. The margin pays for clocks
whose rates differ by up to 5 %.
"""

import msgspec

from jobsync.core.clock import Mono
from jobsync.errors import Invalid

__all__ = ["Timing", "Watch", "check_duration"]

_LONGEST = 3600.0


def check_duration(field: str, value: float | None, *, least: float | None = None) -> None:
    """Refuse a duration that was probably given in milliseconds, or is none.

    Raises:
        Invalid: says which number was probably meant.
    """
    if value is None or (least is not None and least <= value <= _LONGEST):
        return
    if not 0 < value <= _LONGEST:
        wanted = "more than 0" if least is None else f"{least:g} or more"
        fix = f"did you mean {value / 1000:g}?" if value > _LONGEST else f"give {wanted}"
        raise Invalid(field, value, "durations are seconds", fix)


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How often a session beats, and after how long a silence it is dead.

    Raises:
        Invalid: they do not fit together; says which number to change.
    """

    beat: float
    timeout: float

    def __post_init__(self) -> None:
        # Asked of every session that is read; what follows only says what is wrong.
        least = max(3 * self.beat, 2 * self.beat + self.margin)
        if self.beat > 0 and least <= self.timeout <= _LONGEST:
            return
        check_duration("heartbeat_interval", self.beat)
        check_duration("worker_timeout", self.timeout)
        if self.timeout < 3 * self.beat:
            raise Invalid(
                "worker_timeout",
                self.timeout,
                f"is less than three beats of {self.beat:g} s",
                f"give at least {3 * self.beat:g}, or beat more often",
            )
        if self.timeout - self.margin < 2 * self.beat:
            raise Invalid(
                "worker_timeout",
                self.timeout,
                f"leaves less than two beats after the margin of {self.margin:g} s",
                f"give at least {2 * self.beat + 0.2:g}, or beat more often",
            )

    @property
    def margin(self) -> float:
        """What separates the end of trust from the moment of death."""
        return max(0.2, self.timeout / 10)

    def trusted_until(self, first_send: Mono) -> Mono:
        """Give the moment up to which a beat lets its session trust itself."""
        return first_send + (self.timeout - self.margin)


class Watch(msgspec.Struct, frozen=True):
    """What an observer knows of one session. None is the version of what is not there."""

    version: str | None
    since: Mono
    """When the first read that showed this version returned."""
    looked: Mono
    """When the latest read returned."""

    def look(self, version: str | None, returned: Mono, timing: Timing) -> "Watch":
        """Take in another read.

        An observer that could not look in time starts its count again: an outage of the
        store silences everybody and must kill nobody.
        """
        blind = returned - self.looked > 2 * timing.beat
        if blind or version != self.version:
            return Watch(version, returned, returned)
        return Watch(version, self.since, returned)

    def expires(self, timeout: float) -> Mono:
        """Give the moment from which a look that still shows this version proves death."""
        return self.since + timeout

    def expired(self, timeout: float) -> bool:
        """Say whether this version was seen, without a gap, for the whole timeout."""
        return self.looked >= self.expires(timeout)
