"""What has become of messages in tables that were upgraded, on SQLite and on PostgreSQL.

The tests create the tables of an old version, with a message in each state that it had.
"""

from collections.abc import Iterable

from jobsync import Components, Store
from jobsync.core.messages import FINISHED, LIVE
from jobsync.queue.backend import MessageInfo, QueueBackend, Settlement
from jobsync.queue.opening import open_backend

__all__ = [
    "TASK_STATES",
    "browse",
    "check_messages_are_handled",
    "check_messages_are_there",
    "check_tasks_are_claimed",
]

STATES = {
    "ready": "ready",
    "delayed": "waiting",
    "suspect": "waiting",
    "retried": "waiting",
    "claimed-1": "claimed",
    "claimed-2": "claimed",
    "lapsed": "claimed",
    "newer": "claimed",
    "unreadable": "claimed",
    "completed": "completed",
    "cancelled": "cancelled",
    "dead": "dead",
}
"""Messages of the version in which a claimed message was a row of `jobsync_message`."""

TASK_STATES = {
    "ready": ("task_ready", 3),
    "ranked": ("task_ranked", 3),
    "waiting": ("task_waiting", 3),
    "head": ("task_ready", 3),
    "blocked": ("blocked", 2),
    "newer": ("task_ready", 99),
    "plain": ("ready", 1),
    "plain-ranked": ("ranked", 2),
    "plain-waiting": ("waiting", 1),
}
"""State and format of messages of the version in which those of tasks had the states of others."""


async def browse(backend: QueueBackend) -> dict[str, MessageInfo]:
    """Return all messages by id."""
    return {info.id: info for state in (*LIVE, *FINISHED) for info in await backend.browse(state)}


async def check_messages_are_there(backend: QueueBackend) -> MessageInfo:
    """Check that each is in its state, with what was known of it; return a claimed one."""
    infos = await browse(backend)
    assert {name: info.state for name, info in infos.items()} == STATES
    claimed = infos["claimed-1"]
    assert (claimed.deliveries, claimed.attempts, claimed.max_attempts) == (3, 2, 9)
    assert ([each.error for each in claimed.errors], claimed.session) == (["boom"], "live")
    assert infos["lapsed"].is_suspect
    assert infos["newer"].format == 99
    assert not infos["unreadable"].is_readable
    assert await backend.count() == {
        "ready": 1,
        "waiting": 3,
        "claimed": 5,
        "completed": 1,
        "cancelled": 1,
        "dead": 1,
    }
    assert await backend.find_newer() == {99: 1}
    assert await backend.list_holders() == ["gone", "live"]
    return claimed


async def check_messages_are_handled(backend: QueueBackend, tasks: Iterable[str]) -> None:
    """Check that claims of dead workers end, messages are claimed and settled, and forgotten."""
    ended = await backend.end_claims({"live"})
    assert {each.id: each.state for each in ended} == {
        "claimed-1": "waiting",
        "claimed-2": "waiting",
        "lapsed": "dead",
        "unreadable": "waiting",
    }
    names = [*tasks]
    first = await backend.claim(10, session="me", visibility=60, tasks=names)
    suspects = await backend.claim(10, session="me", visibility=60, suspects=True, tasks=names)
    assert sorted(each.id for each in first.messages) == ["ready", "retried"]
    assert sorted(each.id for each in suspects.messages) == ["claimed-1", "claimed-2", "suspect"]
    assert {each.id: each.timeout for each in suspects.messages}["claimed-1"] == 7.5
    batch = [
        Settlement(receipt=each.receipt, move="complete")
        for each in (*first.messages, *suspects.messages)
    ]
    assert all(await backend.settle(batch))
    assert await backend.redrive(["cancelled", "dead"]) == 2
    assert await backend.forget("completed", older_than=-60) == 6
    assert await backend.count() == {"claimed": 1, "waiting": 3, "dead": 2}


async def check_tasks_are_claimed(store: Store) -> None:
    """Check that the messages of `TASK_STATES` are claimed by their tasks."""
    backend = open_backend(store, "q", Components.system(), order="priority")
    for task, names in {
        "send": ["head", "ranked", "ready", "waiting"],
        "": ["plain", "plain-ranked", "plain-waiting"],
    }.items():
        claimed = await backend.claim(10, session="me", visibility=60, tasks=(task,))
        assert sorted(each.id for each in claimed.messages) == names
