"""Settling: finds the outcome of a write whose reply was lost.

Guarantee: every change ends as applied or conflicted, correctly, or stays unknown; nothing is
applied twice, and no outcome is reported as another. It relies on records that keep the nonces
of their latest 16 writes, and on requests that arrive within 15 minutes.

How: read the record. If it is still the base, the write is pending: it may be lost or still
in flight. Sending the identical request again is safe, because the second copy to arrive
conflicts. If the record has changed, the write was applied if and only if its nonce is in the
trail; if the trail no longer reaches back to the base, the outcome cannot be known. After
`deadline` seconds nothing is sent again.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from jobsync.components import Components
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import Corrupt, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.stores.contract import (
    TRAIL_LENGTH,
    Applied,
    Change,
    Conflicted,
    Outcome,
    Record,
    Store,
    Unknown,
)
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.record_codec import assign_nonces, build_records

__all__ = ["DEADLINE", "SettlingStore", "judge_write"]

DEADLINE = 30.0
"""Seconds after which an unknown write is not sent again."""

_BACKOFF = ExponentialBackoff(first=0.05, longest=4.0)

WriteFate: TypeAlias = Literal["pending", "applied", "conflicted", "unknowable"]


def judge_write(base: Record | None, nonce: str, current: Record | None) -> WriteFate:
    """Return what happened to a write, given the current record or tombstone."""
    before = 0 if base is None else base.seq
    if current is None:
        # The record was removed, and the evidence with it.
        return "pending" if base is None else "unknowable"
    if base is not None and current.version == base.version:
        return "pending"
    if current.remembers(nonce):
        return "applied"
    return "conflicted" if 0 < current.seq - before <= TRAIL_LENGTH else "unknowable"


class SettlingStore(StoreDecorator):
    """A store that settles writes with an unknown outcome.

    Args:
        inner: the store that does the work.
        components: clock and randomness, for the deadline and the pauses between resends.
        deadline: seconds to try to settle a write.
    """

    def __init__(self, inner: Store, components: Components, deadline: float = DEADLINE) -> None:
        super().__init__(inner)
        self._clock = components.clock
        self._randomness = components.randomness
        self._ids = components.ids
        self._deadline = deadline

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes, and settle those with an unknown outcome."""
        give_up_at = self._clock.mono() + self._deadline
        changes = assign_nonces(changes, self._ids)
        outcomes = await self.inner.write(changes)
        if Unknown not in map(type, outcomes):
            return outcomes
        unknown = {
            change.key: change
            for change, outcome in zip(changes, outcomes, strict=True)
            if isinstance(outcome, Unknown)
        }
        settled = await self._settle(unknown, give_up_at)
        return [
            settled.get(change.key, outcome)
            for change, outcome in zip(changes, outcomes, strict=True)
        ]

    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Append entries to a history; a named batch can be sent again until it is stored."""
        give_up_at = self._clock.mono() + self._deadline
        batch = batch or self._ids.batch()
        attempt = 0
        may_have_arrived = False
        while True:
            try:
                return await self.inner.append(stream, entries, batch=batch)
            except OutcomeUnknown:
                may_have_arrived = True
                if self._clock.mono() >= give_up_at:
                    raise
            except (Unavailable, Misconfigured) as error:
                # This copy was not written, but an earlier one may still arrive.
                if not may_have_arrived:
                    raise
                if self._clock.mono() >= give_up_at:
                    raise OutcomeUnknown(stream, str(error)) from error
            attempt += 1
            await _BACKOFF.sleep(attempt, self._clock, self._randomness)

    async def _settle(self, pending: dict[str, Change], give_up_at: Mono) -> dict[str, Outcome]:
        """Read, judge and resend until nothing is pending or time is up."""
        settled: dict[str, Outcome] = {}
        attempt = 0
        while pending:
            pending = await self._judge_pending(pending, settled)
            if pending and self._clock.mono() < give_up_at:
                pending = await self._resend(pending, settled)
            if pending and self._clock.mono() >= give_up_at:
                unknown = Unknown(f"not settled within {self._deadline:g} s")
                return settled | dict.fromkeys(pending, unknown)
            if pending:
                attempt += 1
                await _BACKOFF.sleep(attempt, self._clock, self._randomness)
        return settled

    async def _judge_pending(
        self, pending: dict[str, Change], settled: dict[str, Outcome]
    ) -> dict[str, Change]:
        """Read the records and settle what they show; return what is still pending."""
        try:
            found = await self.inner.get_many(list(pending), tombstones=True)
        except (Unavailable, Misconfigured):
            # Also if the rights were revoked meanwhile: the change was sent before.
            return pending
        except Corrupt as corrupt:
            settled |= dict.fromkeys(pending, Unknown(str(corrupt)))
            return {}
        left: dict[str, Change] = {}
        for change, current in zip(pending.values(), found, strict=True):
            match judge_write(change.base, change.nonce, current):
                case "pending":
                    left[change.key] = change
                case "applied":
                    settled[change.key] = Applied(self._record_of(change, current))
                case "conflicted":
                    settled[change.key] = Conflicted()
                case "unknowable":
                    settled[change.key] = Unknown(
                        "the record no longer has the nonce of this write"
                    )
        return left

    def _record_of(self, change: Change, current: Record | None) -> Record:
        """Return the record after a change, even if it has been replaced since."""
        if current is not None and current.nonce == change.nonce:
            return current
        (record,), _ = build_records([change], self._ids)
        return record

    async def _resend(
        self, pending: dict[str, Change], settled: dict[str, Outcome]
    ) -> dict[str, Change]:
        """Send the identical requests again; return those that must be judged again.

        A conflict proves nothing here: an earlier copy of the same request may have won.
        """
        try:
            outcomes = await self.inner.write(list(pending.values()))
        except (Unavailable, Misconfigured):
            return pending
        left: dict[str, Change] = {}
        for change, outcome in zip(pending.values(), outcomes, strict=True):
            if isinstance(outcome, Applied):
                settled[change.key] = outcome
            else:
                left[change.key] = change
        return left
