"""How long a session may trust itself, and when others may declare it dead. Pure.

One formula keeps the two apart:

    trusted until  =  first send of the last heartbeat that was applied  +  timeout - margin
    expires at     =  return of the first read that showed that heartbeat +  timeout

The read returns after the heartbeat was sent. With clocks that run at the same rate, the
session therefore stops at least `margin` before anybody may declare it dead. The margin
covers clocks whose rates differ by up to 5 %.
"""

import msgspec

from jobsync.core.clock import Mono, Seconds
from jobsync.errors import Invalid

__all__ = ["LONGEST_HEARTBEAT", "Timing", "Watch", "check_duration"]

_MAX_DURATION = 3600.0

LONGEST_HEARTBEAT: Seconds = _MAX_DURATION / 3
"""Three of them fit into the longest timeout."""


def check_duration(
    field: str,
    value: Seconds | None,
    *,
    least: Seconds | None = None,
    most: Seconds = _MAX_DURATION,
) -> None:
    """Check a duration of at most an hour; a longer one was probably given in milliseconds.

    Raises:
        Invalid: it is out of range; suggests the number that was probably meant.
    """
    if value is None or (least is not None and least <= value <= most):
        return
    if not 0 < value <= most:
        wanted = "more than 0" if least is None else f"{least:g} or more"
        fix = f"did you mean {value / 1000:g}?" if value > most else f"use {wanted}"
        problem = f"must be a number of seconds, {wanted} and at most {most:g}"
        raise Invalid(field, value, problem, fix)


def _round_down(seconds: Seconds) -> Seconds:
    """Return a duration without rounding errors: 3 * 0.1 is a little over 0.3."""
    return min(seconds, round(seconds, 9))


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The interval of a session's heartbeat, and the silence after which the session is dead.

    Raises:
        Invalid: the two do not fit together; states which number to change.
    """

    heartbeat: Seconds = msgspec.field(name="beat")  # the stored name
    timeout: Seconds

    def __post_init__(self) -> None:
        # Runs for every session that is read; the rest only explains what is wrong.
        three = _round_down(3 * self.heartbeat)
        two = _round_down(2 * self.heartbeat + self.margin)
        if self.heartbeat > 0 and max(three, two) <= self.timeout <= _MAX_DURATION:
            return
        check_duration("heartbeat_interval", self.heartbeat, most=LONGEST_HEARTBEAT)
        check_duration("worker_timeout", self.timeout)
        if self.timeout < three:
            raise Invalid(
                "worker_timeout",
                self.timeout,
                f"must be at least three heartbeats of {self.heartbeat:g} s",
                f"use {three:g} or more, or a shorter heartbeat",
            )
        if self.timeout < two:
            raise Invalid(
                "worker_timeout",
                self.timeout,
                f"must leave two heartbeats after the margin of {self.margin:g} s",
                f"use {2 * self.heartbeat + 0.2:g} or more, or a shorter heartbeat",
            )

    @property
    def margin(self) -> Seconds:
        """Return the time between the end of trust and the moment of death."""
        return max(0.2, self.timeout / 10)

    def trusted_until(self, first_send: Mono) -> Mono:
        """Return the moment until which an applied heartbeat lets its session trust itself."""
        return first_send + (self.timeout - self.margin)


class Watch(msgspec.Struct, frozen=True):
    """What an observer knows of one session. The version of an absent session is None."""

    version: str | None
    since: Mono
    """When the first read that showed this version returned."""
    last_read: Mono
    """When the latest read returned."""

    def observe(self, version: str | None, returned: Mono, timing: Timing) -> "Watch":
        """Return the watch after another read.

        An observer that could not read in time starts its count again: an outage of the store
        silences every session and must kill none.
        """
        was_blind = returned - self.last_read > 2 * timing.heartbeat
        if was_blind or version != self.version:
            return Watch(version, returned, returned)
        return Watch(version, self.since, returned)

    def expires_at(self, timeout: Seconds) -> Mono:
        """Return the moment from which a read that still shows this version proves death."""
        return self.since + timeout

    def has_expired(self, timeout: Seconds) -> bool:
        """Whether this version was seen, without a gap, for all of the timeout."""
        return self.last_read >= self.expires_at(timeout)
