"""Several records in one request, of which one that cannot be read spoils no other."""

from collections.abc import Callable, Sequence

from jobsync.errors import Corrupt
from jobsync.stores.contract import Record, Store

__all__ = ["read_each"]


async def read_each(
    store: Store, keys: Sequence[str], report: Callable[[Corrupt], object]
) -> dict[str, Record | None]:
    """Read records, tombstones too; what cannot be read is reported and left out.

    Raises:
        Unavailable: the store does not answer.
    """
    if not keys:
        return {}
    try:
        return dict(zip(keys, await store.get_many(keys, tombstones=True), strict=True))
    except Corrupt as corrupt:
        if len(keys) == 1:
            report(corrupt)
            return {}
    found: dict[str, Record | None] = {}
    for key in keys:
        found |= await read_each(store, [key], report)
    return found
