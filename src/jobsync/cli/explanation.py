"""What `jobsync why` finds out about a message or a task, and how it is told to people."""

import datetime as dt
import re

from jobsync.cli.render import moment
from jobsync.components import Components
from jobsync.errors import NotFound
from jobsync.queue.backend import Failure
from jobsync.status.jobs import TaskStatus, read_fleet_status
from jobsync.status.queues import MessageStatus, read_queues_status
from jobsync.status.why import UNKNOWN, Reason, explain_message, explain_task
from jobsync.stores.contract import Store

__all__ = ["explain", "look_for"]

_is_messages = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch


async def look_for(
    store: Store, components: Components, name: str, app: str, day: dt.date
) -> MessageStatus | TaskStatus | None:
    """Look at what has this name: a message, or a task of a fleet on a date."""
    message = None
    if store.sql is not None:
        message = await (await read_queues_status(store, components)).message(name)
    return message or await _look_at_task(store, components, app, name, day)


async def _look_at_task(
    store: Store, components: Components, app: str, name: str, day: dt.date
) -> TaskStatus | None:
    """Look at a task; a name as messages have it is one only if somebody has claimed it."""
    try:
        fleet = await read_fleet_status(store, components, app)
    except NotFound:
        return None
    seen = await fleet.task(name, day)
    is_messages = _is_messages(name) and seen.claim is None and not seen.pins
    return None if is_messages else seen


def explain(seen: MessageStatus | TaskStatus | None) -> tuple[Reason, list[tuple[str, str]]]:
    """Give what it waits for, and what else is worth knowing, by name."""
    match seen:
        case MessageStatus():
            return explain_message(seen), _describe_message(seen)
        case TaskStatus():
            return explain_task(seen), _describe_task(seen)
        case None:
            return UNKNOWN, []


def _describe_message(seen: MessageStatus) -> list[tuple[str, str]]:
    message = seen.message
    tries = f"{message.attempts} of {message.max_attempts}"
    if message.deliveries != message.attempts:
        tries += f", in {message.deliveries} deliveries"
    details = [
        ("queue", seen.queue.name),
        ("state", message.state),
        ("pushed", moment(message.enqueued)),
        ("attempts", tries),
        *(("error", _describe_failure(failure)) for failure in message.errors),
    ]
    if seen.holder is not None:
        holder = seen.holder
        details.append(("holder", f"{holder.worker_id} on {holder.host}, process {holder.pid}"))
    return details


def _describe_failure(failure: Failure) -> str:
    return f"{moment(failure.at)} attempt {failure.attempt}: {failure.error}"


def _describe_task(seen: TaskStatus) -> list[tuple[str, str]]:
    details = [("token", str(seen.token)), ("owner", seen.owner or "nobody")]
    if seen.claim is not None:
        claim = seen.claim
        details.append(("claim", f"{claim.state} on {claim.node} since {moment(claim.started)}"))
    for pin in seen.pins:
        match = f"{pin.in_force} is in force" if pin.in_force else "nobody matches"
        details.append(("pin", f"{', '.join(pin.patterns)} by {pin.created_by}: {match}"))
    return details
