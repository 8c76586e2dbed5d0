"""Checks the options that say where a message stands: priority, group and key."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from jobsync.core.arguments import LONGEST_DELAY, check_count, check_seconds
from jobsync.core.codec import to_plain
from jobsync.database.enqueue_calls import EnqueueOptions
from jobsync.errors import Invalid
from jobsync.queue.backend import NewMessage

__all__ = ["PLACING_OPTIONS", "check_order", "check_placing", "check_priority", "place_messages"]

PLACING_OPTIONS = frozenset({"priority", "group", "key", "key_ttl", "replace"})

_MAX_PRIORITY = 100
_LONGEST_NAME = 200
"""The most bytes of a group or a key."""


def check_placing(options: EnqueueOptions) -> None:
    """Check each option by itself, before there is a message.

    What a function returns, and which options go together, is checked with the messages.

    Raises:
        Invalid: an option is wrong.
    """
    check_count("priority", options.get("priority", 0), least=-_MAX_PRIORITY, most=_MAX_PRIORITY)
    _read_ttl(options)
    replace: object = options.get("replace", False)
    if type(replace) is not bool:
        raise Invalid("replace", replace, "must be True or False", "pass True or False")
    for field, option in (("group", options.get("group")), ("key", options.get("key"))):
        if not callable(option):
            _check_name(field, option)


def place_messages(new_messages: Sequence[NewMessage], options: EnqueueOptions) -> list[NewMessage]:
    """Return messages with their priorities, groups and keys.

    Raises:
        Invalid: an option is wrong, or two messages have one key.
    """
    check_placing(options)
    key, key_ttl, replace = options.get("key"), _read_ttl(options), options.get("replace", False)
    if key is None and (key_ttl is not None or replace):
        field = "key_ttl" if key_ttl is not None else "replace"
        raise Invalid(field, options.get(field), "has no effect without a key", "pass key= too")
    placed = [
        msgspec.structs.replace(
            message,
            priority=options.get("priority", 0),
            group=_name("group", options.get("group"), message),
            key=_name("key", key, message),
            key_ttl=key_ttl,
            replace=replace,
        )
        for message in new_messages
    ]
    _check_distinct([message.key for message in placed if message.key is not None])
    return placed


def check_order(new_messages: Sequence[NewMessage], order: str) -> None:
    """Check that the priorities of messages have an effect.

    Raises:
        Invalid: the queue has another order.
    """
    for message in new_messages:
        check_priority(message.priority, order)


def check_priority(priority: object, order: str) -> None:
    """Check that a priority has an effect.

    Raises:
        Invalid: the queue has another order.
    """
    if priority != 0 and order != "priority":
        problem = f"has no effect in a queue whose order is {order!r}"
        fix = 'create the queue with order="priority"'
        raise Invalid("priority", priority, problem, fix)


def _read_ttl(options: EnqueueOptions) -> float | None:
    ttl = options.get("key_ttl")
    seconds = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
    if seconds is None:
        return None
    return check_seconds("key_ttl", seconds, is_zero_allowed=False, most=LONGEST_DELAY)


def _name(field: str, option: str | Callable[[Any], str] | None, message: NewMessage) -> str | None:
    """Return the group or the key of a message."""
    return _check_name(field, option(to_plain(message.value)) if callable(option) else option)


def _check_name(field: str, name: object) -> str | None:
    """Return a group or a key as a plain text."""
    if name is None:
        return None
    if not isinstance(name, str) or not name or not name.isprintable():
        fix = f"pass a text, or a function that returns one: {field}=lambda message: ..."
        raise Invalid(field, name, "must be a text of printable characters", fix)
    if len(name.encode()) > _LONGEST_NAME:
        problem = f"must be {_LONGEST_NAME} bytes or less"
        raise Invalid(field, name, problem, "pass a shorter text, or a hash of it")
    # A member of an enum is formatted as the name of the member.
    return str.__str__(name)


def _check_distinct(keys: Sequence[str]) -> None:
    if len({*keys}) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        fix = "pass a function of the message, such as key=lambda message: message['order']"
        raise Invalid("key", twice, "is that of several messages at once", fix)
