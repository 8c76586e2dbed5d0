"""Detects the quirks of an object server, by trying.

Servers differ in two ways that no header announces: whether an ETag in a condition keeps
its quotes, and whether a condition on DELETE is honoured.

Guarantee: a quirk rests on the server's answers. A reply that was lost proves nothing, so the
trial starts again under another key; without an answer for 30 seconds, the server is unavailable.
To mistake a lost request for a refusal would be dangerous: if a server ignores the condition on
DELETE and is believed to honour it, removing a tombstone could remove a record.
"""

from collections.abc import Mapping
from functools import partial

import msgspec

from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.core.urls import ObjectsUrl
from jobsync.errors import Conflict, Misconfigured
from jobsync.stores.contract import Put, Store
from jobsync.stores.objects.store import ObjectsStore
from jobsync.stores.probe import Trials, apply_change, read_verdict

__all__ = ["Quirks", "detect_quirks", "open_and_detect", "open_like", "open_with_quirks"]


class Quirks(msgspec.Struct, frozen=True):
    """How a server treats conditions."""

    bare_etags: bool
    conditional_delete: bool

    @classmethod
    def from_traits(cls, traits: Mapping[str, Json]) -> "Quirks":
        """Read the traits of a store or of a verdict."""
        return cls(
            bare_etags=bool(traits.get("bare_etags")),
            conditional_delete=bool(traits.get("conditional_delete")),
        )


async def open_with_quirks(url: ObjectsUrl, components: Components) -> ObjectsStore:
    """Open a bucket with its server's quirks, as stored in the probe's verdict or detected now.

    Raises:
        Misconfigured: it cannot be used as a store, with the reason and the fix.
        Unavailable: it does not answer.
    """
    store = await ObjectsStore.connect(url, components)
    try:
        verdict = await read_verdict(store, components)
        if verdict is None:
            await detect_quirks(store, components)
        else:
            _apply(Quirks.from_traits(verdict.traits), store)
    except BaseException:
        await store.close()
        raise
    return store


async def open_and_detect(url: ObjectsUrl, components: Components) -> ObjectsStore:
    """Open a bucket and detect its server's quirks, whatever a stored verdict says.

    Raises:
        Misconfigured: it cannot be used as a store, with the reason and the fix.
        Unavailable: it does not answer.
    """
    store = await ObjectsStore.connect(url, components)
    try:
        await detect_quirks(store, components)
    except BaseException:
        await store.close()
        raise
    return store


async def open_like(store: Store, url: ObjectsUrl, components: Components) -> ObjectsStore:
    """Open a bucket that is open already, with the quirks that were found then.

    Raises:
        Misconfigured, Unavailable: it cannot be used any more.
    """
    another = await ObjectsStore.connect(url, components)
    _apply(Quirks.from_traits(store.traits), another)
    return another


def _apply(quirks: Quirks, store: ObjectsStore) -> None:
    store.set_quirks(bare_etags=quirks.bare_etags, conditional_delete=quirks.conditional_delete)


async def detect_quirks(store: ObjectsStore, components: Components) -> Quirks:
    """Try both ways of writing an ETag, and a DELETE that must be refused.

    The store has the quirks from then on.

    Raises:
        Misconfigured: the server refuses every condition, or does not allow writes.
        Unavailable: it does not answer.
    """
    async with Trials(store, components) as trials:
        for bare in (False, True):
            store.set_quirks(bare_etags=bare, conditional_delete=False)
            if await trials.run(partial(_accepts_conditions, store)):
                deletes = await trials.run(partial(_honours_delete_condition, store))
                quirks = Quirks(bare_etags=bare, conditional_delete=deletes)
                _apply(quirks, store)
                return quirks
    raise Misconfigured(
        "url",
        store.name,
        "has a server that refuses a write with the right version (If-Match)",
        "use a server with conditional writes",
    )


async def _accepts_conditions(store: ObjectsStore, key: str) -> bool:
    """Whether the server accepts a create, and then a write with the right version."""
    try:
        created = await apply_change(store, Put(key, 0))
        await apply_change(store, created.replace(1))
    except Conflict:
        return False
    return True


async def _honours_delete_condition(store: ObjectsStore, key: str) -> bool:
    """Whether a DELETE with an old version is refused, and one with the right version is not."""
    old = await apply_change(store, Put(key, 0))
    new = await apply_change(store, old.replace(1))
    if await store.erase_unchanged(old) or await store.get(key) != new:
        return False
    return await store.erase_unchanged(new)
