"""Finds out what became of a write whose reply was lost.

Promise: every change ends as applied or conflicted, truly, or stays unknown; nothing is
applied twice and nothing is reported as the other outcome. It rests on records that keep
the nonces of their latest 16 writes, and on requests that arrive within 15 minutes.

How: read the record. If it is still the base, the write is pending: it may be lost or
still under way, and the one safe thing is to send the identical request again, because
whichever copy comes second finds its base gone. If the record has moved on, the write was
applied if and only if its nonce is in the trail; if the trail no longer reaches back to
the base, nobody can know. After `deadline` seconds nothing is sent any more.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from jobsync.components import Components
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.errors import Corrupt, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.stores.contract import (
    TRAIL_LENGTH,
    Applied,
    Change,
    Conflicted,
    Outcome,
    Record,
    Store,
    StoreDecorator,
    Unknown,
)
from jobsync.stores.record_codec import draft, stamp

__all__ = ["DEADLINE", "SettlingStore", "judge"]

DEADLINE = 30.0
"""Seconds after which an unknown write is no longer sent again."""

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 4.0

WriteFate: TypeAlias = Literal["pending", "applied", "conflicted", "unknowable"]


def judge(base: Record | None, nonce: str, current: Record | None) -> WriteFate:
    """Say what became of a write, from the record that is there now, tombstone or not."""
    before = 0 if base is None else base.seq
    if current is None:
        # What was there is gone, and the evidence with it.
        return "pending" if base is None else "unknowable"
    if base is not None and current.version == base.version:
        return "pending"
    if current.remembers(nonce):
        return "applied"
    return "conflicted" if 0 < current.seq - before <= TRAIL_LENGTH else "unknowable"


class SettlingStore(StoreDecorator):
    """A store whose writes are followed up until their outcome is known.

    Args:
        inner: the store that does the work.
        components: the clock that bounds, and the randomness that spreads, what is resent.
        deadline: seconds to follow up.
    """

    def __init__(self, inner: Store, components: Components, deadline: float = DEADLINE) -> None:
        super().__init__(inner)
        self._clock = components.clock
        self._randomness = components.randomness
        self._ids = components.ids
        self._deadline = deadline

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make changes, and find out what became of each."""
        give_up = self._clock.mono() + self._deadline
        changes = stamp(changes, self._ids)
        outcomes = await self.inner.write(changes)
        if Unknown not in map(type, outcomes):
            return outcomes
        unknown = {
            change.key: change
            for change, outcome in zip(changes, outcomes, strict=True)
            if isinstance(outcome, Unknown)
        }
        settled = await self._settle(unknown, give_up)
        return [
            settled.get(change.key, outcome)
            for change, outcome in zip(changes, outcomes, strict=True)
        ]

    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Add lines to a history; a named batch can be sent until it is there."""
        give_up = self._clock.mono() + self._deadline
        batch = batch or self._ids.batch()
        pause = _FIRST_PAUSE
        sent = False
        while True:
            try:
                return await self.inner.append(stream, entries, batch=batch)
            except OutcomeUnknown:
                sent = True
                if self._clock.mono() >= give_up:
                    raise
            except (Unavailable, Misconfigured) as error:
                # Of this copy nothing was written; an earlier one may yet arrive.
                if not sent:
                    raise
                if self._clock.mono() >= give_up:
                    raise OutcomeUnknown(stream, str(error)) from error
            pause = await self._rest(pause)

    async def _settle(self, pending: dict[str, Change], give_up: Mono) -> dict[str, Outcome]:
        """Read, judge and resend until nothing is pending or time is up."""
        settled: dict[str, Outcome] = {}
        pause = _FIRST_PAUSE
        while pending:
            pending = await self._look(pending, settled)
            if pending and self._clock.mono() < give_up:
                pending = await self._resend(pending, settled)
            if pending and self._clock.mono() >= give_up:
                why = Unknown(f"not settled within {self._deadline:g} s")
                return settled | dict.fromkeys(pending, why)
            if pending:
                pause = await self._rest(pause)
        return settled

    async def _look(
        self, pending: dict[str, Change], settled: dict[str, Outcome]
    ) -> dict[str, Change]:
        """Read the records, settle what they tell, and give what is still pending."""
        try:
            found = await self.inner.get_many(list(pending), tombstones=True)
        except (Unavailable, Misconfigured):
            # Even where rights are gone by now: something was sent before.
            return pending
        except Corrupt as corrupt:
            settled |= dict.fromkeys(pending, Unknown(str(corrupt)))
            return {}
        left: dict[str, Change] = {}
        for change, current in zip(pending.values(), found, strict=True):
            match judge(change.base, change.nonce, current):
                case "pending":
                    left[change.key] = change
                case "applied":
                    settled[change.key] = Applied(self._made(change, current))
                case "conflicted":
                    settled[change.key] = Conflicted()
                case "unknowable":
                    settled[change.key] = Unknown("the record has forgotten this write")
        return left

    def _made(self, change: Change, current: Record | None) -> Record:
        """Give the record that a change left, even if it has been replaced since."""
        if current is not None and current.nonce == change.nonce:
            return current
        (record,), _ = draft([change], self._ids)
        return record

    async def _resend(
        self, pending: dict[str, Change], settled: dict[str, Outcome]
    ) -> dict[str, Change]:
        """Send the identical requests again; give those that must be looked at again.

        A conflict is no verdict here: an earlier copy of this very request may have won.
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

    async def _rest(self, pause: float) -> float:
        """Wait a random part of a pause; give the next, longer one."""
        await self._clock.sleep(self._randomness.uniform(0, pause))
        return min(pause * 2, _LONGEST_PAUSE)
