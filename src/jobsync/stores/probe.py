"""Probe: checks that a store keeps the contract, before anything relies on it.

Guarantee: a finding rests on the store's own answers. An answer that is lost, late or damaged
proves nothing: its check starts again under another key. If that goes on for 30 seconds, the
probe ends in `Unavailable`, and nothing is recorded. A store that ignores conditions fails
here, instead of losing updates silently.

The store must not settle its writes. Settling infers from a later read what became of a write;
a request that never arrived then looks like one that the store refused.

The verdict is stored. It is renewed after 30 days, because a server may be upgraded or
replaced, and when the checks have changed since.

Every check uses keys that nobody else uses, and they are removed afterwards. A probe that was
interrupted may leave small records under `probe/`; a later probe removes them, a day later.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Self, TypeAlias, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.core.clock import Wall
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import Conflict, Corrupt, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.stores.contract import Applied, Change, Conflicted, Put, Record, Store, Unknown, unwrap
from jobsync.stores.record_codec import first_id_at
from jobsync.stores.settling import SettlingStore

__all__ = [
    "PROBE_DEADLINE",
    "PROBE_KEYS",
    "VERDICT_KEY",
    "Finding",
    "ProbeVerdict",
    "Trials",
    "apply_change",
    "probe",
    "probe_and_record",
    "read_verdict",
    "renew_verdict",
]

VERDICT_KEY = "meta/probe"
"""The key of the latest verdict, which later connects read instead of probing again."""

PROBE_KEYS = "probe/"
"""The prefix of the keys that checks use. A key has the time of its trial."""

PROBE_DEADLINE = 30.0
"""Seconds after which a check without definite answers is given up."""

_REVISION = 1
"""The revision of the checks. Verdicts of an earlier one may rest on answers that were lost."""

_DAY = 86400.0
_VERDICT_LIFETIME = 30 * _DAY
_REMOVAL_TIMEOUT = 5.0
_BACKOFF = ExponentialBackoff(first=0.05, longest=1.0)
_RACERS = 8
_MAX_SKEW = 30.0
_FIX = "use a store that honours conditional writes; jobsync would lose updates on this one"

T = TypeVar("T")


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    check: str
    ok: bool
    detail: str = ""
    fix: str = ""


_CheckResult: TypeAlias = tuple[bool, str]
_Check: TypeAlias = Callable[[Store, str], Awaitable[_CheckResult]]


class Trials:
    """Runs checks until their answers are definite, and removes their records at the end.

    Args:
        store: the store; it must not settle its writes.
        components: time, randomness and ids.
        deadline: seconds after which a check is not started again.
    """

    def __init__(
        self, store: Store, components: Components, deadline: float = PROBE_DEADLINE
    ) -> None:
        self._store = store
        self._clock = components.clock
        self._randomness = components.randomness
        self._ids = components.ids
        self._deadline = deadline
        self._give_up_at = self._clock.mono() + deadline
        self._keys: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # A request that is still in flight may write after this, and a lost reply may hide that
        # nothing was removed. Whatever stays is removed by a later probe.
        with suppress(OutcomeUnknown, Unavailable, TimeoutError):
            async with asyncio.timeout(_REMOVAL_TIMEOUT):
                await self._store.drop(self._keys)

    async def run(self, check: Callable[[str], Awaitable[T]]) -> T:
        """Run a check on a new key, again and again until all its answers are definite.

        Raises:
            Unavailable: they were not, within the deadline.
        """
        attempt = 0
        while True:
            key = f"{PROBE_KEYS}{self._ids.batch()}"
            self._keys.append(key)
            try:
                return await check(key)
            except Unavailable:
                if self._clock.mono() >= self._give_up_at:
                    raise
            except (Corrupt, OutcomeUnknown) as error:
                if self._clock.mono() >= self._give_up_at:
                    reason = f"no definite answer came within {self._deadline:g} s ({error.detail})"
                    raise Unavailable(self._store.name, reason) from error
            attempt += 1
            await _BACKOFF.sleep(attempt, self._clock, self._randomness)


async def probe(store: Store, components: Components) -> list[Finding]:
    """Run all checks at once, each on its own keys.

    Args:
        store: the store; it must not settle its writes.
        components: time, randomness and ids.

    Raises:
        Misconfigured: the store cannot be written at all, with the fix.
        Unavailable: it does not answer, or a check had no definite answer.
    """
    async with Trials(store, components) as trials:
        try:
            async with asyncio.TaskGroup() as group:
                checks = [
                    group.create_task(_run_check(trials, name, partial(check, store)))
                    for name, check in _CHECKS
                ]
                clocks = group.create_task(_compare_clocks(trials, store, components))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
    await _remove_leftovers(store, components)
    return [check.result() for check in [*checks, clocks]]


async def _remove_leftovers(store: Store, components: Components) -> None:
    """Remove what interrupted probes have left. Those that may still run are younger."""
    end = f"{PROBE_KEYS}{first_id_at(components.clock.wall() + -_DAY)}"
    # Nothing depends on it: a later probe tries again.
    with suppress(OutcomeUnknown, Unavailable, TimeoutError):
        async with asyncio.timeout(_REMOVAL_TIMEOUT):
            heads = await store.heads(PROBE_KEYS)
            await store.drop([head.key for head in heads if head.key < end])
            await store.bury(PROBE_KEYS)


async def _run_check(
    trials: Trials, name: str, check: Callable[[str], Awaitable[_CheckResult]]
) -> Finding:
    try:
        ok, detail = await trials.run(check)
    except Conflict:
        ok, detail = False, "a write that met its condition was refused"
    return Finding(name, ok, detail, "" if ok else _FIX)


async def apply_change(store: Store, change: Change) -> Record:
    """Apply a change that no other writer can conflict with; return the new record.

    Raises:
        Conflict: it was refused, and the record is still the one that it replaces.
        OutcomeUnknown: no definite answer came.
    """
    (outcome,) = await store.write([change])
    if isinstance(outcome, Conflicted):
        found = await store.get(change.key, tombstones=True)
        # Something between here and the store may have sent the change twice.
        if _version(found) != _version(change.base):
            raise OutcomeUnknown(change.key, "a refused write was stored")
    return unwrap(outcome, change.key)


def _version(record: Record | None) -> str | None:
    return None if record is None else record.version


async def _refuses(store: Store, change: Change) -> bool:
    """Whether the store refuses a change.

    Raises:
        OutcomeUnknown: no definite answer came.
    """
    (outcome,) = await store.write([change])
    if isinstance(outcome, Unknown):
        raise OutcomeUnknown(change.key, outcome.reason)
    return isinstance(outcome, Conflicted)


class ProbeVerdict(msgspec.Struct, frozen=True):
    """The record that a store has passed the probe, with the traits that were found."""

    at: float
    passed: list[str]
    traits: dict[str, bool]
    revision: int = 0
    """The revision of the checks that were passed."""

    def is_current(self, now: Wall) -> bool:
        """Whether it may be relied on: its checks are not out of date, and it is not too old."""
        is_recent = abs(now.seconds - self.at) < _VERDICT_LIFETIME
        return is_recent and self.revision >= _REVISION


async def read_verdict(store: Store, components: Components) -> ProbeVerdict | None:
    """Read the verdict of an earlier probe; None if the store must be probed.

    An outdated verdict is good enough for a process that may only read: it cannot probe, and what
    a probe checks concerns those who write.

    Raises:
        Misconfigured: the record is not a verdict.
        Unavailable: the store does not answer.
    """
    verdict = await _find_verdict(store)
    if verdict is None or verdict.is_current(components.clock.wall()):
        return verdict
    return None if await _may_replace(verdict, store) else verdict


async def _may_replace(verdict: ProbeVerdict, store: Store) -> bool:
    """Whether this process may write. Changes nothing: the record exists, and has this value."""
    try:
        await store.write([Put(VERDICT_KEY, msgspec.to_builtins(verdict))])
    except Misconfigured:
        return False
    return True


async def _find_verdict(store: Store) -> ProbeVerdict | None:
    try:
        record = await store.get(VERDICT_KEY)
        return None if record is None else msgspec.convert(record.value, ProbeVerdict)
    except (Corrupt, msgspec.ValidationError) as error:
        raise Misconfigured(
            "url",
            store.name,
            f"answers with something that jobsync did not write ({error})",
            f"check the address; if it is right, remove {VERDICT_KEY} by hand",
        ) from error


async def probe_and_record(store: Store, components: Components) -> None:
    """Probe a store and write the verdict.

    Args:
        store: the store; it must not settle its writes.
        components: time, randomness and ids.

    Raises:
        Misconfigured: it does not keep the contract.
        Unavailable: it does not answer, or a check had no definite answer.
    """
    findings = await probe(store, components)
    failed = [finding.check for finding in findings if not finding.ok]
    if failed:
        raise Misconfigured("url", store.name, f"fails the probe: {', '.join(failed)}", _FIX)
    await _record(store, findings, components)


async def renew_verdict(
    store: Store, findings: list[Finding], components: Components
) -> ProbeVerdict | None:
    """Replace the stored verdict, if there is one, with the findings of a probe that passed.

    Returns the verdict that was replaced.
    """
    replaced = await _find_verdict(store)
    if replaced is not None:
        await _record(store, findings, components)
    return replaced


async def _record(store: Store, findings: list[Finding], components: Components) -> None:
    verdict = ProbeVerdict(
        components.clock.wall().seconds,
        [finding.check for finding in findings],
        {name: bool(trait) for name, trait in store.traits.items()},
        _REVISION,
    )
    base = await store.get(VERDICT_KEY, tombstones=True)
    # On a conflict another process has written its verdict first. If it is not current, or if
    # this one is lost, the next connect probes again.
    settling = SettlingStore(store, components)
    await settling.write([Put(VERDICT_KEY, msgspec.to_builtins(verdict), base)])


async def _create_twice(store: Store, key: str) -> _CheckResult:
    await apply_change(store, Put(key, 0))
    ok = await _refuses(store, Put(key, 1))
    return ok, "" if ok else "a second create of one name was not refused"


async def _write_stale(store: Store, key: str) -> _CheckResult:
    old = await apply_change(store, Put(key, 0))
    new = await apply_change(store, old.replace(1))
    is_refused = await _refuses(store, old.replace(2))
    ok = is_refused and _version(await store.get(key)) == new.version
    return ok, "" if ok else "a write based on an old version was not refused"


async def _return_to_equal(store: Store, key: str) -> _CheckResult:
    first = await apply_change(store, Put(key, "a"))
    between = await apply_change(store, first.replace("b"))
    again = await apply_change(store, between.replace("a"))
    ok = await _refuses(store, first.replace("c")) and first.version != again.version
    return ok, "" if ok else "equal content was taken for an unchanged record"


async def _create_at_once(store: Store, key: str) -> _CheckResult:
    outcomes = await asyncio.gather(*(store.write([Put(key, n)]) for n in range(_RACERS)))
    winners = [outcome.record for (outcome,) in outcomes if isinstance(outcome, Applied)]
    # A creator without an answer may be the winner.
    if not winners and Unknown in {type(outcome) for (outcome,) in outcomes}:
        raise OutcomeUnknown(key, "the winner of a race is unknown")
    detail = f"{len(winners)} of {_RACERS} concurrent creators won"
    if len(winners) != 1:
        return False, detail
    # If others had no answer: none of them has replaced the record, and a late one would not.
    is_kept = _version(await store.get(key)) == winners[0].version
    ok = is_kept and await _refuses(store, Put(key, _RACERS))
    return ok, detail if ok else "the record of a creator that won was replaced"


async def _list_after_write(store: Store, key: str) -> _CheckResult:
    created = await apply_change(store, Put(key, 0))
    is_listed = await _listed_version(store, key) == created.version
    await apply_change(store, created.delete())
    ok = is_listed and await _listed_version(store, key) is None
    return ok, "" if ok else "a listing did not show what had been written before it"


async def _listed_version(store: Store, key: str) -> str | None:
    # Starts just before the key: others may probe too.
    heads = await store.heads(PROBE_KEYS, after=key[:-1], limit=1)
    return next((head.version for head in heads if head.key == key), None)


async def _stay_deleted(store: Store, key: str) -> _CheckResult:
    tombstone = await apply_change(store, (await apply_change(store, Put(key, 0))).delete())
    if not await _refuses(store, Put(key, 1)):
        return False, "a deleted name was created over its tombstone"
    back = await apply_change(store, tombstone.replace(2))
    ok = await store.get(key) == back
    return ok, "" if ok else "a write over a tombstone was not found"


async def _compare_clocks(trials: Trials, store: Store, components: Components) -> Finding:
    """Compare clocks. A difference is reported; it affects only the times shown to people."""
    check = "clocks agree"
    store_time = await trials.run(lambda _: store.now())
    if store_time is None:
        return Finding(check, ok=True, detail="the store has no clock")
    skew = components.clock.wall() - store_time
    detail = f"this machine is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
    fix = "" if abs(skew) <= _MAX_SKEW else "synchronise this machine's clock (NTP)"
    return Finding(check, ok=True, detail=detail, fix=fix)


_CHECKS: tuple[tuple[str, _Check], ...] = (
    ("a name is created once", _create_twice),
    ("a stale version is refused", _write_stale),
    ("equal content is a new version", _return_to_equal),
    ("of many creators one wins", _create_at_once),
    ("a listing shows what was written", _list_after_write),
    ("a deleted name stays deleted", _stay_deleted),
)
