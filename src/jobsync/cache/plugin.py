"""Read-through cache of records, in the memory of this process.

    await db.use_plugin(CachePlugin(ttl=60, max_size=10_000))

Guarantees: reads see every write of this database at once. They see a write of another process,
or of another `Database`, at most `ttl` seconds after it. Nothing else changes: hooks run, errors
are raised, and a failed database answers nothing.

The cache has no part in correctness: writes, `if_version`, storage of plugins, locks, queues and
schedules never read from it. A decision that another process must not have made meanwhile belongs
into a write with `if_version`, with or without a cache.

`get`, `get_many`, `exists`, `list`, `list_ids`, `count`, `query` and `page` read through it;
`async for` does not. That a record does not exist is never kept. How it stays true to this
process's writes is explained in `database/read_cache.py`.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from jobsync.cache.memory import CacheStats, MemoryCache
from jobsync.core.arguments import check_count
from jobsync.core.clock import Seconds
from jobsync.database.document import as_list
from jobsync.database.plugin import Plugin
from jobsync.database.resource_records import DATA
from jobsync.errors import Invalid, closest_name
from jobsync.settings import Settings, Sources, in_section, resolve

__all__ = ["CachePlugin", "CacheSettings"]

_OTHER_DRIVERS = ("filesystem", "redis", "s3", "multi-tier")
_ONE_DRIVER = "pass driver='memory'; processes share the store itself"
_LARGEST = 100_000_000


@in_section("cache")
class CacheSettings(Settings, frozen=True, kw_only=True):
    """The options of a cache.

    Attributes:
        driver: where answers are kept: `memory`, the only one. Other processes could not be
            made to forget what is in a shared one when they write.
        ttl: seconds after which an answer is read again, and so for how long another process's
            write may go unnoticed; 60.
        max_size: how many records are kept, those in listings included; 1,000.
    """

    driver: str = "memory"
    ttl: Seconds = 60.0
    max_size: int = 1000

    def __post_init__(self) -> None:
        _check_driver(self.driver)
        if not 0 < self.ttl < math.inf:
            problem = "must be more than 0, and finite"
            raise Invalid("ttl", self.ttl, problem, "pass a number of seconds")
        check_count("max_size", self.max_size, least=1, most=_LARGEST)


class CachePlugin(Plugin):
    """Answers repeated reads of records from memory.

    Another process's write is seen after at most `ttl` seconds, this process's at once.

    Args:
        resources: names of the resources to cache; all by default.
        options: `driver`, `ttl` and `max_size`, as in `CacheSettings`.

    Raises:
        Invalid, Misconfigured: an option is unknown or wrong, with the fix.
    """

    slug: ClassVar[str] = "cache"
    is_passive: ClassVar[bool] = True

    def __init__(self, *, resources: Iterable[str] | None = None, **options: Any) -> None:
        super().__init__()
        if options.get("drivers") is not None:
            problem = "cannot be used: a second, shared cache would have to be told of each write"
            raise Invalid("drivers", options["drivers"], problem, _ONE_DRIVER)
        sources = Sources.load(os.environ, Path.cwd())
        self.settings = resolve(CacheSettings, options, sources, section="cache").value
        self._cache = MemoryCache(
            ttl=self.settings.ttl,
            max_size=self.settings.max_size,
            resources=None if resources is None else _check_names(resources),
        )

    async def on_start(self) -> None:
        """Answer reads from now on."""
        self.database.read_guard.attach(self._cache)

    async def on_stop(self) -> None:
        """Answer nothing any more, and forget everything."""
        self.database.read_guard.detach()

    def stats(self) -> CacheStats:
        """Return hits, misses and evictions so far, and the size. Makes no request."""
        return self._cache.stats

    def clear(self, resource: str | None = None) -> None:
        """Forget what was read from a resource, or from all of them."""
        if self.is_running:
            self.database.read_guard.clear(None if resource is None else f"{DATA}{resource}/")


def _check_driver(driver: str) -> None:
    if driver == "memory":
        return
    if driver in _OTHER_DRIVERS:
        problem = "cannot be used: a shared cache could not be kept true to every process's writes"
        raise Invalid("driver", driver, problem, _ONE_DRIVER)
    fix = "did you mean memory?" if closest_name(driver, ["memory"]) else _ONE_DRIVER
    raise Invalid("driver", driver, "is unknown", fix)


def _check_names(resources: Iterable[str]) -> frozenset[str]:
    names = as_list("resources", resources)
    for name in names:
        if not isinstance(name, str):
            raise Invalid("resources", name, "must be names", "write ['sessions', 'users']")
    return frozenset(names)
