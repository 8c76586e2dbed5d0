"""Opens the store at a URL and checks that it meets the contract.

Stores across a network are probed at the first connect, and again when the verdict that is
kept in the store is out of date. Their writes are settled: after a lost reply the outcome is
found out.
"""

import importlib.util
import os
from pathlib import Path

from jobsync.components import Components
from jobsync.core.urls import (
    MemoryUrl,
    ObjectsUrl,
    PostgresUrl,
    SqliteUrl,
    StoreUrl,
    parse_url,
)
from jobsync.errors import MissingExtra
from jobsync.setting_fields import Origin
from jobsync.settings import Sources, StoreSettings, resolve
from jobsync.stores.contract import Store
from jobsync.stores.memory import MemoryStore
from jobsync.stores.probe import probe_and_record, read_verdict
from jobsync.stores.settling import SettlingStore
from jobsync.stores.sqlite.store import SqliteStore

__all__ = [
    "open_another",
    "open_bare",
    "open_store",
    "open_unjudged",
    "read_url",
    "require",
    "resolve_url",
]


async def open_store(url: str | None = None, components: Components | None = None) -> Store:
    """Open the store of a URL.

    Args:
        url: `memory://`, `sqlite:///path`, `postgresql://…`, `s3://…`; by default
            `JOBSYNC_URL`, then the `url` of `jobsync.toml` or `[tool.jobsync]`, then a
            file in the working directory.
        components: time, randomness and events; this machine's by default.

    Raises:
        Invalid: the URL cannot be parsed.
        Misconfigured: its target cannot be used as a store.
        Unavailable: it does not answer.
    """
    components = components or Components.system()
    store = await open_bare(read_url(url), components)
    if isinstance(store, MemoryStore | SqliteStore):
        return store
    try:
        if await read_verdict(store, components) is None:
            await probe_and_record(store, components)
    except BaseException:
        await store.close()
        raise
    return SettlingStore(store, components)


def read_url(url: str | None = None) -> StoreUrl:
    """Parse a URL, or the one in the settings; a relative path becomes absolute.

    Raises:
        Invalid: it cannot be parsed.
    """
    return resolve_url(url)[0]


def resolve_url(url: str | None = None) -> tuple[StoreUrl, Origin]:
    """Return what `read_url` does, and where the URL comes from.

    Raises:
        Invalid: it cannot be parsed.
    """
    directory = Path.cwd()
    sources = Sources.load(os.environ, directory)
    found = resolve(StoreSettings, {"url": url}, sources)
    parsed = parse_url(found.value.url, os.environ)
    if isinstance(parsed, SqliteUrl):
        # A process that changes its directory later must not find another file.
        parsed = SqliteUrl(str(directory / parsed.path))
    return parsed, found.origin("url")


async def open_bare(url: StoreUrl, components: Components) -> Store:
    """Open a store without probing and settling."""
    match url:
        case MemoryUrl(name):
            return MemoryStore(name, components)
        case SqliteUrl(path):
            return await SqliteStore.connect(Path(path), components)
        case PostgresUrl():
            require("postgresql", "psycopg", "postgres")
            from jobsync.stores.postgres.store import PostgresStore  # noqa: PLC0415 - an extra

            return await PostgresStore.connect(url, components)
        case ObjectsUrl():
            require(url.provider, "obstore", "s3")
            from jobsync.stores.objects.quirks import open_with_quirks  # noqa: PLC0415 - an extra

            return await open_with_quirks(url, components)


async def open_unjudged(url: StoreUrl, components: Components) -> Store:
    """Open a store as `open_bare` does, but detect its traits now, whatever its verdict says."""
    if not isinstance(url, ObjectsUrl):
        return await open_bare(url, components)
    require(url.provider, "obstore", "s3")
    from jobsync.stores.objects.quirks import open_and_detect  # noqa: PLC0415 - an extra

    return await open_and_detect(url, components)


async def open_another(store: Store, url: StoreUrl, components: Components) -> Store:
    """Open the same store again, for another thread, without probing and settling."""
    match url:
        case MemoryUrl():
            # A memory store is thread-safe; a second one would have other records.
            return store
        case ObjectsUrl():
            from jobsync.stores.objects.quirks import open_like  # noqa: PLC0415 - an extra

            return await open_like(store, url, components)
        case PostgresUrl():
            from jobsync.stores.postgres.store import PostgresStore  # noqa: PLC0415 - an extra

            return PostgresStore.open_like(store, url, components)
        case _:
            return await open_bare(url, components)


def require(scheme: str, package: str, extra: str) -> None:
    """Check that a package is installed.

    Raises:
        MissingExtra: it is not installed; has the command that installs it.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(scheme, package, extra)
