"""From a URL to a store."""

import importlib.util
import os
from pathlib import Path

from jobsync.components import Components
from jobsync.core.urls import MemoryUrl, ObjectsUrl, PostgresUrl, SqliteUrl, parse_url
from jobsync.errors import Misconfigured, MissingExtra
from jobsync.settings import Sources, StoreSettings, resolve
from jobsync.stores.contract import Store
from jobsync.stores.memory import MemoryStore
from jobsync.stores.sqlite import SqliteStore

__all__ = ["open_store"]


async def open_store(url: str | None = None, components: Components | None = None) -> Store:
    """Open the store that a URL names.

    Args:
        url: `memory://`, `sqlite:///path`; by default `JOBSYNC_URL`, then the `url` of
            `jobsync.toml` or `[tool.jobsync]`, then a file in the working directory.
        components: time, randomness and events; this machine's by default.

    Raises:
        Invalid: the URL cannot be understood.
        Misconfigured: what it names cannot serve as a store.
    """
    sources = Sources.load(os.environ, Path.cwd())
    settings = resolve(StoreSettings, {"url": url}, sources).value
    match parse_url(settings.url, os.environ):
        case MemoryUrl(name):
            return MemoryStore(name, components)
        case SqliteUrl(path):
            return await SqliteStore.connect(Path(path), components)
        case PostgresUrl() as found:
            raise _missing(found, "psycopg", "postgres")
        case ObjectsUrl() as found:
            raise _missing(found, "obstore", "s3")


def _missing(url: PostgresUrl | ObjectsUrl, package: str, extra: str) -> Misconfigured:
    if importlib.util.find_spec(package) is None:
        return MissingExtra(str(url).partition(":")[0], package, extra)
    return Misconfigured(
        "url", str(url), "this version has no such store yet", "use sqlite:///path"
    )
