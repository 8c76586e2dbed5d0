"""Databases of processes that only enqueue, read and write.

On its own because `database.py` is large.
"""

from collections.abc import Sequence

from jobsync.components import Components
from jobsync.database.database import Database
from jobsync.database.plugin import Plugin
from jobsync.setting_fields import refuse_unknown

__all__ = ["producer"]


@refuse_unknown("producer")
def producer(
    url: str | None = None,
    *,
    plugins: Sequence[Plugin] = (),
    components: Components | None = None,
) -> Database:
    """Return a `Database` with `work=False`, for a process that does no work of its plugins.

    It enqueues, reads and writes. It has no session, joins no election and calls no handler, so it
    costs nothing while it is idle, and leaves no dead worker behind.

    Args:
        url: of the store, as of `Database`.
        plugins: whose queues messages are enqueued to; they are declared, and not started.
        components: time, randomness and events; this machine's by default.
    """
    return Database(url, plugins=plugins, components=components, work=False)
