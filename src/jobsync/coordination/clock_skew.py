"""How far this machine's wall clock is ahead of a server's that tells its time only in listings.

A listing tells when the server wrote this worker's last heartbeat. The heartbeat was written after
it was sent and before its result was known, both by the monotonic clock. So the server's time is
known within the duration of that request and the second that the listing may leave out. Of the
skews that are possible, the one nearest to zero is reported: an honest clock is never accused,
however slow the request was.

The wall clock is read when the skew is asked for, so a step of it counts at once, by comparison
with the monotonic clock. If a hypervisor stops both, and the wall clock is corrected afterwards,
that looks like a step too, until the next heartbeat is compared.
"""

import msgspec

from jobsync.components import Components
from jobsync.core.clock import Clock, Mono
from jobsync.stores.contract import Head, Put, Store, unwrap

__all__ = ["ClockComparison", "ProbedListing", "WriteTimes", "list_with_probe", "measure_time"]

_RESOLUTION = 1.0
"""Seconds: `Last-Modified` has no fraction."""

_LEFT_BEHIND = 3600.0
"""Seconds after which whoever wrote a record to learn the time no longer needs it."""

_PAGE = 1000


class WriteTimes(msgspec.Struct, frozen=True):
    """Between which moments a write was applied."""

    sent: Mono
    """When it was first sent."""
    known: Mono
    """When it was known to be applied."""


class _Measurement(msgspec.Struct, frozen=True):
    """The bounds of what the server's time minus the monotonic time was at a write."""

    low: float
    high: float
    at: Mono


class ClockComparison:
    """Compares this machine's wall clock with the server's, by the writes of a session.

    Read from any thread; changed by the member loop alone.

    Args:
        clock: this machine's clocks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._listed: Head | None = None
        """A version whose write is not known yet: its reply is under way."""
        self._measurement: _Measurement | None = None

    @property
    def skew(self) -> float | None:
        """Seconds that the wall clock is ahead of the server's; None while unknown."""
        measurement = self._measurement
        if measurement is None:
            return None
        offset = self._clock.wall().seconds - self._clock.mono().seconds
        least, most = offset - measurement.high, offset - measurement.low
        return least if least > 0 else min(most, 0.0)

    @property
    def age(self) -> float | None:
        """Seconds since the write that was last compared; None if there is none."""
        measurement = self._measurement
        return None if measurement is None else self._clock.mono() - measurement.at

    def note_listed(self, head: Head | None, writes: dict[str, WriteTimes]) -> None:
        """Compare the version that a listing has shown, now or once its write is known.

        Args:
            head: the session's own entry in the listing.
            writes: the latest writes of the session, by version.
        """
        # The reply to the write that the last listing showed may have come since.
        self.note_writes(writes)
        if head is not None and head.written_at is not None:
            self._listed = head
            self.note_writes(writes)

    def note_writes(self, writes: dict[str, WriteTimes]) -> None:
        """Compare the version that was listed, if its write is known."""
        head = self._listed
        if head is None or head.written_at is None or head.version not in writes:
            return
        write = writes[head.version]
        self._listed = None
        self._measurement = _Measurement(
            head.written_at - write.known.seconds,
            head.written_at + _RESOLUTION - write.sent.seconds,
            write.sent,
        )


class ProbedListing(msgspec.Struct, frozen=True):
    """A listing with a record that was written just before, so its time is the present."""

    heads: dict[str, Head]
    """By key."""
    probe: Head | None
    """The record; None if it is not among the heads."""
    write: WriteTimes

    @property
    def now(self) -> float | None:
        """The server's time, perhaps without the fraction; None if the listing does not tell."""
        return None if self.probe is None else self.probe.written_at


async def list_with_probe(store: Store, probes: str, components: Components) -> ProbedListing:
    """Write a record, list it with all others of its level, and remove it.

    Those that were left an hour ago, by processes that ended in between, are removed with it.

    Args:
        store: to ask.
        probes: how the keys of such records begin, and of no others.
        components: this machine's clocks.

    Raises:
        Unavailable: the store does not answer.
        OutcomeUnknown: the record may have been written, may still be, or never.
    """
    clock = components.clock
    (record_id,) = components.ids.records(1)
    put, sent = Put(f"{probes}{record_id}", {}), clock.mono()
    (outcome,) = await store.write([put])
    unwrap(outcome, put.key)
    level = probes[: probes.rindex("/") + 1]
    heads = {head.key: head for head in await store.heads(level, limit=_PAGE)}
    listing = ProbedListing(heads, heads.get(put.key), WriteTimes(sent, clock.mono()))
    now = clock.wall().seconds if listing.now is None else listing.now
    old = [
        head.key
        for head in heads.values()
        if head.key.startswith(probes)
        and head.written_at is not None
        and head.written_at < now - _LEFT_BEHIND
    ]
    await store.drop([put.key, *old])
    return listing


async def measure_time(store: Store, prefix: str, components: Components) -> float:
    """Return the store's time, in Unix seconds, for a process without a session.

    A store without a clock tells it in listings: a record is written, listed and removed. If
    listings do not tell it either, the time is this machine's.

    Args:
        store: to ask.
        prefix: where the record is written; nothing else is there.
        components: this machine's clocks.

    Raises:
        Unavailable: the store does not answer.
        OutcomeUnknown: the record may have been written, may still be, or never.
    """
    if (stored := await store.now()) is not None:
        return stored.seconds
    clock, comparison = components.clock, ClockComparison(components.clock)
    listing = await list_with_probe(store, prefix, components)
    if listing.probe is not None:
        comparison.note_listed(listing.probe, {listing.probe.version: listing.write})
    return clock.wall().seconds - (comparison.skew or 0.0)
