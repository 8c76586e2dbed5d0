"""Detects the quirks of an object server, by trying.

Servers differ in two ways that no header announces: whether an ETag in a condition keeps
its quotes, and whether a condition on DELETE is honoured.
"""

import msgspec

from jobsync.components import Components
from jobsync.core.urls import ObjectsUrl
from jobsync.errors import Misconfigured
from jobsync.stores.contract import Applied, Put, Record
from jobsync.stores.objects.store import ObjectsStore
from jobsync.stores.probe import read_verdict

__all__ = ["Quirks", "detect_quirks", "open_with_quirks"]


class Quirks(msgspec.Struct, frozen=True):
    """How a server treats conditions."""

    bare_etags: bool
    conditional_delete: bool


async def open_with_quirks(url: ObjectsUrl, components: Components) -> ObjectsStore:
    """Open a bucket with its server's quirks, as stored in the probe's verdict or detected now.

    Raises:
        Misconfigured: it cannot be used as a store, with the reason and the fix.
        Unavailable: it does not answer.
    """
    store = await ObjectsStore.connect(url, components)
    try:
        verdict = await read_verdict(store)
    finally:
        await store.close()
    if verdict is None:
        quirks = await detect_quirks(url, components)
    else:
        quirks = Quirks(
            bare_etags=verdict.traits.get("bare_etags", False),
            conditional_delete=verdict.traits.get("conditional_delete", False),
        )
    return await ObjectsStore.connect(
        url,
        components,
        bare_etags=quirks.bare_etags,
        conditional_delete=quirks.conditional_delete,
    )


async def detect_quirks(url: ObjectsUrl, components: Components) -> Quirks:
    """Try both ways of writing an ETag, and a DELETE that must be refused.

    Raises:
        Misconfigured: the server refuses every condition, or does not allow writes.
    """
    for bare in (False, True):
        store = await ObjectsStore.connect(url, components, bare_etags=bare)
        try:
            conditional_delete = await _try_conditions(store, components)
        finally:
            await store.close()
        if conditional_delete is not None:
            return Quirks(bare_etags=bare, conditional_delete=conditional_delete)
    raise Misconfigured(
        "url",
        str(url),
        "has a server that refuses a write with the right version (If-Match)",
        "use a server with conditional writes",
    )


async def _try_conditions(store: ObjectsStore, components: Components) -> bool | None:
    """Return whether a conditional DELETE is honoured; None if a correct PUT is refused."""
    (tag,) = components.ids.nonces(1)
    key = f"probe/{tag.strip('-_')}x"
    (first,) = await store.write([Put(key, 0)])
    if not isinstance(first, Applied):
        return None
    old = first.record
    try:
        (outcome,) = await store.write([old.replace(1)])
        if not isinstance(outcome, Applied):
            return None
        return await _honours_delete_condition(store, old, outcome.record)
    finally:
        await store.drop([key])


async def _honours_delete_condition(store: ObjectsStore, old: Record, new: Record) -> bool:
    is_refused = not await store.erase_unchanged(old)
    is_still_there = await store.get(new.key) is not None
    return is_refused and is_still_there and await store.erase_unchanged(new)
