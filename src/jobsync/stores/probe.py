"""Asks a store whether it keeps the contract, before anything rests on it.

Everything happens under one name that nobody else uses, and is removed again. A store that
ignores conditions fails here, loudly, instead of losing updates in silence.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.errors import Conflict, Corrupt, Misconfigured, OutcomeUnknown
from jobsync.stores.contract import Applied, Conflicted, Put, Store, Unknown

__all__ = ["VERDICT_KEY", "Finding", "ProbeVerdict", "assure", "probe", "read_verdict"]

VERDICT_KEY = "meta/probe"
"""Where the verdict of the first probe is kept, so that later connects need not ask again."""

_RACERS = 8
_SKEW = 30.0
_HEED = "use a store that honours conditional writes; jobsync would lose updates on this one"


class Finding(msgspec.Struct, frozen=True):
    """What one question came to."""

    check: str
    ok: bool
    detail: str = ""
    fix: str = ""


_Answer: TypeAlias = tuple[bool, str]
_Question: TypeAlias = Callable[[Store, str], Awaitable[_Answer]]


async def probe(store: Store, components: Components) -> list[Finding]:
    """Ask all questions at once, each under a name of its own.

    Raises:
        Misconfigured: the store cannot be written at all, with the fix.
        Unavailable: it does not answer.
    """
    (tag,) = components.ids.nonces(1)
    place = f"probe/{tag.strip('-_')}x"
    try:
        found = await asyncio.gather(
            *(_find(store, f"{place}/{i}", *each) for i, each in enumerate(_QUESTIONS)),
            _compare_clocks(store, components),
            return_exceptions=True,
        )
    finally:
        await store.drop([head.key for head in await store.heads(f"{place}/")])
        await store.drop([f"{place}/{i}" for i in range(len(_QUESTIONS))])
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [each for each in found if isinstance(each, Finding)]


async def _find(store: Store, key: str, check: str, ask: _Question) -> Finding:
    try:
        ok, detail = await ask(store, key)
    except (Conflict, OutcomeUnknown) as error:
        ok, detail = False, str(error)
    return Finding(check, ok, detail, "" if ok else _HEED)


class ProbeVerdict(msgspec.Struct, frozen=True):
    """That a store has passed, and what was learned about it."""

    at: float
    passed: list[str]
    traits: dict[str, bool]


async def read_verdict(store: Store) -> ProbeVerdict | None:
    """Read the verdict of an earlier probe.

    Raises:
        Misconfigured: what is there cannot be one.
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


async def assure(store: Store, components: Components) -> None:
    """Probe a store, refuse one that fails, and keep the verdict.

    Raises:
        Misconfigured: it does not keep the contract.
    """
    findings = await probe(store, components)
    failed = [finding.check for finding in findings if not finding.ok]
    if failed:
        raise Misconfigured("url", store.name, f"fails the probe: {', '.join(failed)}", _HEED)
    verdict = ProbeVerdict(
        components.clock.wall().seconds,
        [finding.check for finding in findings],
        {name: bool(trait) for name, trait in store.traits.items()},
    )
    before = await store.get(VERDICT_KEY, tombstones=True)
    # A conflict: another process came to the same verdict first.
    await store.write([Put(VERDICT_KEY, msgspec.to_builtins(verdict), before)])


async def _create_twice(store: Store, key: str) -> _Answer:
    first, second = [(await store.write([Put(key, n)]))[0] for n in range(2)]
    ok = isinstance(first, Applied) and isinstance(second, Conflicted)
    return ok, "" if ok else "a second create of one name was not refused"


async def _write_stale(store: Store, key: str) -> _Answer:
    old = await store.create(key, 0)
    new = await store.put(old, 1)
    (outcome,) = await store.write([old.replace(2)])
    found = await store.get(key)
    ok = isinstance(outcome, Conflicted) and found is not None and found.version == new.version
    return ok, "" if ok else "a write based on an old version was not refused"


async def _return_to_equal(store: Store, key: str) -> _Answer:
    first = await store.create(key, "a")
    again = await store.put(await store.put(first, "b"), "a")
    (outcome,) = await store.write([first.replace("c")])
    ok = isinstance(outcome, Conflicted) and first.version != again.version
    return ok, "" if ok else "equal content was taken for an unchanged record"


async def _create_at_once(store: Store, key: str) -> _Answer:
    outcomes = await asyncio.gather(*(store.write([Put(key, n)]) for n in range(_RACERS)))
    kinds = [type(outcome) for (outcome,) in outcomes]
    # One that does not know may have won; then nobody else may say so.
    winners = kinds.count(Applied)
    ok = winners == 1 or (winners == 0 and Unknown in kinds)
    return ok, f"{winners} of {_RACERS} concurrent creators won"


async def _list_after_write(store: Store, key: str) -> _Answer:
    prefix = key[: key.rfind("/") + 1]
    made = await store.create(key, 0)
    seen = {head.key: head.version for head in await store.heads(prefix)}
    shown = seen.get(key) == made.version
    await store.delete(made)
    hidden = key not in {head.key for head in await store.heads(prefix)}
    ok = shown and hidden
    return ok, "" if ok else "a listing did not show what had been written before it"


async def _stay_deleted(store: Store, key: str) -> _Answer:
    made = await store.create(key, 0)
    tombstone = await store.delete(made)
    (outcome,) = await store.write([Put(key, 1)])
    back = await store.put(tombstone, 2)
    ok = isinstance(outcome, Conflicted) and (await store.get(key)) == back
    return ok, "" if ok else "a deleted name was created over its tombstone"


async def _compare_clocks(store: Store, components: Components) -> Finding:
    """Compare clocks. A difference is told and harms nothing but the times that people see."""
    check = "clocks agree"
    theirs = await store.now()
    if theirs is None:
        return Finding(check, ok=True, detail="the store tells no time of its own")
    skew = components.clock.wall() - theirs
    detail = f"this machine is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
    fix = "" if abs(skew) <= _SKEW else "synchronise this machine's clock (NTP)"
    return Finding(check, ok=True, detail=detail, fix=fix)


_QUESTIONS: tuple[tuple[str, _Question], ...] = (
    ("a name is created once", _create_twice),
    ("a stale version is refused", _write_stale),
    ("equal content is a new version", _return_to_equal),
    ("of many creators one wins", _create_at_once),
    ("a listing shows what was written", _list_after_write),
    ("a deleted name stays deleted", _stay_deleted),
)
