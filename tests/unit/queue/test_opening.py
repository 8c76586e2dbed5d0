"""Which code opens a queue or a directory, and that it gets what the queue was opened with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args
from unittest.mock import Mock

import pytest

from jobsync import Components, Invalid, Store, open_store
from jobsync.queue.limits import NO_LIMITS, QueueLimits
from jobsync.queue.opening import open_backend, open_directory
from jobsync.queue.pages.backend import PagesBackend
from jobsync.queue.pages.directory import PagesDirectory
from jobsync.queue.settings import QueueOrder
from jobsync.queue.sql.common import SqlBackend
from jobsync.queue.sql.postgres import PostgresBackend
from jobsync.queue.sql.postgres_directory import PostgresQueueDirectory
from jobsync.queue.sql.sqlite import SqliteBackend
from jobsync.queue.sql.sqlite_directory import SqliteQueueDirectory
from jobsync.stores.sql import PostgresAccess

COMPONENTS = Components.system()
LIMITS = [
    QueueLimits(max_concurrency=1),
    QueueLimits(rate=0.5),
    QueueLimits(rate=0.5, burst=2),
    QueueLimits(group_concurrency=2),
    QueueLimits(tasks={"send": QueueLimits(max_concurrency=1)}),
]


async def open_place(kind: str, tmp_path: Path) -> Store:
    """Open a store; of a server, what is known without asking it."""
    if kind == "postgres":
        access = Mock(spec=PostgresAccess, schema='"jobs"')
        return cast("Store", SimpleNamespace(sql=access, close=None))
    return await open_store("memory://" if kind == "memory" else f"sqlite:///{tmp_path}/jobs.db")


async def close(store: Any) -> None:
    """Close a store that is one."""
    if store.close is not None:
        await store.close()


@pytest.mark.parametrize("order", get_args(QueueOrder))
@pytest.mark.parametrize(
    ("kind", "backend", "directory"),
    [
        ("sqlite", SqliteBackend, SqliteQueueDirectory),
        ("postgres", PostgresBackend, PostgresQueueDirectory),
        ("memory", PagesBackend, PagesDirectory),
    ],
)
async def test_a_queue_has_the_code_of_its_store(
    tmp_path: Path, kind: str, backend: type, directory: type, order: QueueOrder
) -> None:
    """With the name, the order and the limits that it was opened with."""
    store = await open_place(kind, tmp_path)
    for limits in [NO_LIMITS, *([] if kind == "memory" else LIMITS)]:
        opened = open_backend(store, "emails", COMPONENTS, order=order, limits=limits)
        assert (type(opened), opened.queue) == (backend, "emails")
        if isinstance(opened, SqlBackend):
            assert (opened.order, opened.limits) == (order, limits)
        else:
            finder = cast("Any", opened)._finder
            found = {"lifo": finder._is_lifo, "priority": finder._is_ranked}
            assert found == {name: name == order for name in found}
    assert type(open_directory(store, COMPONENTS)) is directory
    await close(store)


@pytest.mark.parametrize("limits", LIMITS)
async def test_each_limit_needs_a_database(tmp_path: Path, limits: QueueLimits) -> None:
    """Elsewhere it would not hold, so it is refused."""
    store = await open_place("memory", tmp_path)
    with pytest.raises(Invalid, match="only possible on a database") as refused:
        open_backend(store, "emails", COMPONENTS, limits=limits)
    assert refused.value.field == "limits"
    await close(store)
