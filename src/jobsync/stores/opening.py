"""From a URL to a store that has been proven to keep the contract.

Stores across a network are probed once, at the first connect ever; the verdict is kept in
the store. Their writes are settled: a lost reply is followed up.
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
from jobsync.settings import Sources, StoreSettings, resolve
from jobsync.stores.contract import Store
from jobsync.stores.memory import MemoryStore
from jobsync.stores.probe import assure, read_verdict
from jobsync.stores.settling import SettlingStore
from jobsync.stores.sqlite.store import SqliteStore

__all__ = ["open_another", "open_bare", "open_store", "read_url", "require"]


async def open_store(url: str | None = None, components: Components | None = None) -> Store:
    """Open the store that a URL names.

    Args:
        url: `memory://`, `sqlite:///path`, `postgresql://…`, `s3://…`; by default
            `JOBSYNC_URL`, then the `url` of `jobsync.toml` or `[tool.jobsync]`, then a
            file in the working directory.
        components: time, randomness and events; this machine's by default.

    Raises:
        Invalid: the URL cannot be understood.
        Misconfigured: what it names cannot serve as a store.
        Unavailable: it does not answer.
    """
    components = components or Components.system()
    store = await open_bare(read_url(url), components)
    if isinstance(store, MemoryStore | SqliteStore):
        return store
    settling = SettlingStore(store, components)
    try:
        if await read_verdict(store) is None:
            await assure(settling, components)
    except BaseException:
        await store.close()
        raise
    return settling


def read_url(url: str | None = None) -> StoreUrl:
    """Understand a URL, or the one that the settings name; it means the same ever after.

    Raises:
        Invalid: it cannot be understood.
    """
    here = Path.cwd()
    sources = Sources.load(os.environ, here)
    settings = resolve(StoreSettings, {"url": url}, sources).value
    found = parse_url(settings.url, os.environ)
    # Processes that change their directory must not find another file then.
    return SqliteUrl(str(here / found.path)) if isinstance(found, SqliteUrl) else found


async def open_bare(url: StoreUrl, components: Components) -> Store:
    """Open a store as it is, neither probed nor settled."""
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


async def open_another(store: Store, url: StoreUrl, components: Components) -> Store:
    """Open a second way to where a store is, for another thread; bare, as `open_bare` does."""
    # What is in memory has no second way, and needs none.
    return store if isinstance(url, MemoryUrl) else await open_bare(url, components)


def require(scheme: str, package: str, extra: str) -> None:
    """Refuse to go on without a package.

    Raises:
        MissingExtra: it is not installed; gives the line that installs it.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(scheme, package, extra)
