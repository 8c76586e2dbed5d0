"""Probe: checks that a store keeps the contract, before anything relies on it.

All checks use keys that nobody else uses, and remove them afterwards. A store that ignores
conditions fails here, instead of losing updates silently.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.errors import Conflict, Corrupt, Misconfigured, OutcomeUnknown
from jobsync.stores.contract import Applied, Conflicted, Put, Store, Unknown

__all__ = ["VERDICT_KEY", "Finding", "ProbeVerdict", "probe", "probe_and_record", "read_verdict"]

VERDICT_KEY = "meta/probe"
"""The key of the first probe's verdict, which later connects read instead of probing again."""

_RACERS = 8
_MAX_SKEW = 30.0
_FIX = "use a store that honours conditional writes; jobsync would lose updates on this one"


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    check: str
    ok: bool
    detail: str = ""
    fix: str = ""


_CheckResult: TypeAlias = tuple[bool, str]
_Check: TypeAlias = Callable[[Store, str], Awaitable[_CheckResult]]


async def probe(store: Store, components: Components) -> list[Finding]:
    """Run all checks at once, each on its own key.

    Raises:
        Misconfigured: the store cannot be written at all, with the fix.
        Unavailable: it does not answer.
    """
    (tag,) = components.ids.nonces(1)
    prefix = f"probe/{tag.strip('-_')}x"
    try:
        results = await asyncio.gather(
            *(_run_check(store, f"{prefix}/{i}", *check) for i, check in enumerate(_CHECKS)),
            _compare_clocks(store, components),
            return_exceptions=True,
        )
    finally:
        await store.drop([head.key for head in await store.heads(f"{prefix}/")])
        await store.drop([f"{prefix}/{i}" for i in range(len(_CHECKS))])
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Finding)]


async def _run_check(store: Store, key: str, name: str, check: _Check) -> Finding:
    try:
        ok, detail = await check(store, key)
    except (Conflict, OutcomeUnknown) as error:
        ok, detail = False, str(error)
    return Finding(name, ok, detail, "" if ok else _FIX)


class ProbeVerdict(msgspec.Struct, frozen=True):
    """The record that a store has passed the probe, with the traits that were found."""

    at: float
    passed: list[str]
    traits: dict[str, bool]


async def read_verdict(store: Store) -> ProbeVerdict | None:
    """Read the verdict of an earlier probe; None if there is none.

    Raises:
        Misconfigured: the record is not a verdict.
    """
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

    Raises:
        Misconfigured: it does not keep the contract.
    """
    findings = await probe(store, components)
    failed = [finding.check for finding in findings if not finding.ok]
    if failed:
        raise Misconfigured("url", store.name, f"fails the probe: {', '.join(failed)}", _FIX)
    verdict = ProbeVerdict(
        components.clock.wall().seconds,
        [finding.check for finding in findings],
        {name: bool(trait) for name, trait in store.traits.items()},
    )
    base = await store.get(VERDICT_KEY, tombstones=True)
    # On a conflict another process has written the same verdict first.
    await store.write([Put(VERDICT_KEY, msgspec.to_builtins(verdict), base)])


async def _create_twice(store: Store, key: str) -> _CheckResult:
    first, second = [(await store.write([Put(key, n)]))[0] for n in range(2)]
    ok = isinstance(first, Applied) and isinstance(second, Conflicted)
    return ok, "" if ok else "a second create of one name was not refused"


async def _write_stale(store: Store, key: str) -> _CheckResult:
    old = await store.create(key, 0)
    new = await store.put(old, 1)
    (outcome,) = await store.write([old.replace(2)])
    found = await store.get(key)
    ok = isinstance(outcome, Conflicted) and found is not None and found.version == new.version
    return ok, "" if ok else "a write based on an old version was not refused"


async def _return_to_equal(store: Store, key: str) -> _CheckResult:
    first = await store.create(key, "a")
    again = await store.put(await store.put(first, "b"), "a")
    (outcome,) = await store.write([first.replace("c")])
    ok = isinstance(outcome, Conflicted) and first.version != again.version
    return ok, "" if ok else "equal content was taken for an unchanged record"


async def _create_at_once(store: Store, key: str) -> _CheckResult:
    outcomes = await asyncio.gather(*(store.write([Put(key, n)]) for n in range(_RACERS)))
    kinds = [type(outcome) for (outcome,) in outcomes]
    # A creator with an unknown outcome may have won; then no other may have.
    winners = kinds.count(Applied)
    ok = winners == 1 or (winners == 0 and Unknown in kinds)
    return ok, f"{winners} of {_RACERS} concurrent creators won"


async def _list_after_write(store: Store, key: str) -> _CheckResult:
    prefix = key[: key.rfind("/") + 1]
    created = await store.create(key, 0)
    listed = {head.key: head.version for head in await store.heads(prefix)}
    is_listed = listed.get(key) == created.version
    await store.delete(created)
    is_hidden = key not in {head.key for head in await store.heads(prefix)}
    ok = is_listed and is_hidden
    return ok, "" if ok else "a listing did not show what had been written before it"


async def _stay_deleted(store: Store, key: str) -> _CheckResult:
    tombstone = await store.delete(await store.create(key, 0))
    (outcome,) = await store.write([Put(key, 1)])
    back = await store.put(tombstone, 2)
    ok = isinstance(outcome, Conflicted) and (await store.get(key)) == back
    return ok, "" if ok else "a deleted name was created over its tombstone"


async def _compare_clocks(store: Store, components: Components) -> Finding:
    """Compare clocks. A difference is reported; it affects only the times shown to people."""
    check = "clocks agree"
    store_time = await store.now()
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
