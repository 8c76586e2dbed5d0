"""Claim records, and what a node knows about the claims of other nodes.

A task that runs on another node is refused here until that node's session is dead, and for
`reclaim_after` longer. A task that another node has just finished is refused for
`handover_memory`, because lists of tasks that were read before may still contain it.
"""

import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from datetime import date
from typing import Literal, TypeAlias

import msgspec

from jobsync.coordination.membership import Membership
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.core.keys import KeySegment
from jobsync.errors import Corrupt
from jobsync.jobs.job_keys import JobKeys
from jobsync.stores.contract import Record, Store, Where
from jobsync.stores.corruption_log import CorruptionLog, convert_record, read_existing
from jobsync.stores.paging import scan_pages, split_pages

__all__ = [
    "CLAIM_PAGE",
    "Claim",
    "ClaimRules",
    "ClaimState",
    "ForeignClaims",
    "find_done",
    "read_claim",
    "scan_claims",
]

ClaimState: TypeAlias = Literal["running", "done", "failed"]

CLAIM_PAGE = 5000
"""Claims that are read in one request."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One task on one date."""

    task: str
    token: int
    """Its token when it was claimed."""
    date: str
    node: str
    owner: KeySegment
    """The incarnation that claimed it."""
    number: int
    """The assignment under which it was claimed."""
    run: int
    """How many times the task was claimed on this date."""
    state: ClaimState
    started: float
    """By the store's clock where it has one."""
    ended: float | None = None


def read_claim(record: Record) -> Claim:
    """Decode a claim's record.

    Raises:
        Corrupt: no version of this library wrote this.
    """
    claim = convert_record(record, Claim)
    try:
        date.fromisoformat(claim.date)
    except ValueError as error:
        raise Corrupt(record.key, str(error)) from error
    return claim


async def scan_claims(
    store: Store, keys: JobKeys, day: date, corruption_log: CorruptionLog, where: Where = None
) -> list[Claim]:
    """Return all claims of a date, or those that pass a filter."""
    pages = scan_pages(store, keys.claims(day), where=where, size=CLAIM_PAGE)
    return [
        claim async for records in pages for claim in corruption_log.read_all(read_claim, records)
    ]


async def read_claims(
    store: Store, keys: Sequence[str], corruption_log: CorruptionLog
) -> AsyncIterator[tuple[Record, Claim]]:
    """Yield the claims with these keys that exist and can be read, each after its record."""
    for page in split_pages(keys, CLAIM_PAGE):
        found = await read_existing(store, page, corruption_log.report)
        for record in found.values():
            if (claim := corruption_log.read(read_claim, record)) is not None:
                yield record, claim


async def find_done(
    store: Store, keys: Sequence[str], corruption_log: CorruptionLog
) -> dict[str, str]:
    """Return which of the tasks with these keys are done, each with the version of its claim."""
    claims = read_claims(store, keys, corruption_log)
    return {claim.task: record.version async for record, claim in claims if claim.state == "done"}


class _Refusal(msgspec.Struct, frozen=True):
    """Another node's claim that makes this node refuse the task for now."""

    key: str
    node: str
    owner: str
    until: Mono | None
    """None: until the owner is dead or has ended the task."""


class ClaimRules(msgspec.Struct, frozen=True, kw_only=True):
    """When a node may claim what another node has claimed before.

    Attributes:
        reclaim_after: seconds between an owner's death and the next claim of its tasks.
        reclaim_ended_after: likewise, if the owner's process had ended.
        handover_memory: seconds for which tasks that others finished around a handover are refused.
        once_per_date: whether a task that is done is never done again on the same date.
    """

    reclaim_after: float
    reclaim_ended_after: float = 0.0
    handover_memory: float
    once_per_date: bool


class ForeignClaims:
    """The claims of other nodes on one date, as far as this node knows them.

    Args:
        membership: this node's session; knows which other sessions are dead.
        keys: the fleet's keys.
        day: the date.
        corruption_log: reports records that cannot be read.
        token_of: returns a task's token.
        rules: when a task may be claimed that another node has claimed.
    """

    def __init__(
        self,
        membership: Membership,
        keys: JobKeys,
        day: date,
        corruption_log: CorruptionLog,
        token_of: Callable[[str], int],
        rules: ClaimRules,
    ) -> None:
        self._store = membership.store
        self._clock = membership.components.clock
        self._membership = membership
        self._keys = keys
        self._day = day
        self._corruption_log = corruption_log
        self._token_of = token_of
        self._rules = rules
        self._refusals: dict[str, _Refusal] = {}
        self._died_at: dict[str, Mono] = {}
        self._refreshed = self._clock.mono()

    async def load(self, tokens: Collection[int], recent: Mapping[str, Json]) -> None:
        """Read what others are doing, or have just done, under tokens that this node gains.

        Args:
            tokens: the tokens.
            recent: a filter for claims that have just ended.
        """
        done = {"state": "done", **({} if self._rules.once_per_date else recent)}
        wanted = {"$or": [{"state": "running"}, done]}
        prefix = self._keys.claims(self._day)
        async for records in scan_pages(self._store, prefix, where=wanted, size=CLAIM_PAGE):
            for claim in self._corruption_log.read_all(read_claim, records):
                # The token in the claim may be of earlier settings.
                if self._token_of(claim.task) in tokens:
                    self.remember(claim)
        self.watch_owners()

    async def refresh(self) -> None:
        """Read again, now and then, the tasks that ran elsewhere: a live owner may have ended them.

        Their owners' deaths are watched; their ends are not.
        """
        now = self._clock.mono()
        if now - self._refreshed < self._rules.handover_memory:
            return
        self._refreshed = now
        keys = [refusal.key for refusal in self._refusals.values() if refusal.until is None]
        async for _, claim in read_claims(self._store, keys, self._corruption_log):
            if claim.state != "running":
                self.remember(claim)
        self.watch_owners()

    def remember(self, claim: Claim, *, finished: bool = True) -> None:
        """Record what another node does or did with a task.

        Args:
            claim: the other node's claim; one of our own is ignored.
            finished: whether a task that is done was finished just now.
        """
        if claim.owner == self._membership.incarnation:
            return
        key = self._keys.claim(self._day, claim.task)
        forever = Mono(math.inf)
        rules = self._rules
        until = forever if rules.once_per_date else self._clock.mono() + rules.handover_memory
        if claim.state == "running":
            self._refusals[claim.task] = _Refusal(key, claim.node, claim.owner, None)
        elif claim.state == "done" and (rules.once_per_date or finished):
            self._refusals[claim.task] = _Refusal(key, claim.node, claim.owner, until)
        else:
            self._refusals.pop(claim.task, None)

    def is_refused(self, task: str) -> bool:
        """Whether a task runs on another node, or was just finished there."""
        refusal = self._refusals.get(task)
        return refusal is not None and not self._is_over(refusal)

    def was_running(self, task: str) -> bool:
        """Whether a task ran on another node when its claim was last read."""
        refusal = self._refusals.get(task)
        return refusal is not None and refusal.until is None

    def explain(self, task: str) -> str:
        """Return why a task is refused."""
        refusal = self._refusals[task]
        what = "is doing it" if refusal.until is None else "has just done it"
        return f"{refusal.node} {what}"

    def forget(self, task: str) -> None:
        """Forget what is known about a task."""
        self._refusals.pop(task, None)

    def clear(self) -> None:
        """Forget what is known about all tasks."""
        self._refusals.clear()

    def watch_owners(self) -> None:
        """Watch the sessions whose tasks this node may do when they are dead."""
        owners = {refusal.owner for refusal in self._refusals.values() if refusal.until is None}
        self._membership.watch("claims", owners)
        self._died_at = {owner: at for owner, at in self._died_at.items() if owner in owners}
        self.record_deaths()

    def record_deaths(self) -> None:
        """Record, by our own clock, when the watched owners were seen dead."""
        for owner in self._membership.watched("claims"):
            if owner not in self._died_at and self._membership.is_dead(owner):
                self._died_at[owner] = self._clock.mono()

    def _is_over(self, refusal: _Refusal) -> bool:
        now = self._clock.mono()
        if refusal.until is not None:
            return now >= refusal.until
        # A death that was written before this node looked comes without a notification.
        if refusal.owner not in self._died_at and self._membership.is_dead(refusal.owner):
            self._died_at.setdefault(refusal.owner, now)
        died_at = self._died_at.get(refusal.owner)
        if died_at is None:
            return False
        # Otherwise its process may still be doing the task without knowing that it is dead.
        has_ended = self._membership.has_process_ended(refusal.owner)
        rules = self._rules
        return now - died_at >= (rules.reclaim_ended_after if has_ended else rules.reclaim_after)
