"""What can be pushed to a queue in pages at once: the largest that fits, and what is refused."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from jobsync import Invalid
from jobsync.queue.backend import MAX_MESSAGE, NewMessage
from jobsync.queue.pages.page import MAX_MESSAGES, MAX_PAGE_DEPTH, MAX_PUSH_BYTES
from jobsync.queue.pages.push_checks import check_push, split_push


def build(count: int = 1, **options: Any) -> list[NewMessage]:
    """Return messages that are alike."""
    known: dict[str, Any] = {"value": 1, "max_attempts": 4, **options}
    return [NewMessage(id=f"id-{number}", **known) for number in range(count)]


def nest(depth: int) -> Any:
    """Return lists within lists."""
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


def fill(size: int) -> list[NewMessage]:
    """Return messages that have so many bytes together."""
    most = MAX_MESSAGE - 2
    whole, rest = divmod(size, MAX_MESSAGE)
    messages = build(whole + 1, value="x" * most)
    return [*messages[:-1], msgspec.structs.replace(messages[-1], value="x" * (rest - 2))]


FINE: dict[str, Sequence[NewMessage]] = {
    "nothing": [],
    "as many as a page has": build(MAX_MESSAGES),
    "as many bytes as a page has": [*fill(MAX_PUSH_BYTES - 2), *build(1, value="")],
    "the largest": build(value="x" * (MAX_MESSAGE - 2)),
    "the deepest": build(value=nest(MAX_PAGE_DEPTH)),
    "the lowest priority": build(2, priority=-4),
    "the highest priority": build(2, priority=5),
    "a key": build(key="k"),
}


@pytest.mark.parametrize("name", FINE)
def test_what_fits_in_one_page_is_accepted(name: str) -> None:
    """Up to each of the limits; the values are returned as they are stored."""
    messages = [
        msgspec.structs.replace(message, id=f"id-{number}")
        for number, message in enumerate(FINE[name])
    ]
    assert check_push(messages) == [msgspec.json.encode(each.value) for each in messages]
    # So they are in one page, and can all be claimed at once.
    assert split_push(messages) == ([messages] if messages else [])


WRONG: dict[str, tuple[Sequence[NewMessage], str]] = {
    "too many": (build(MAX_MESSAGES + 1), "messages"),
    "too many bytes": ([*fill(MAX_PUSH_BYTES - 2), *build(1, value="x")], "messages"),
    "too large": (build(value="x" * (MAX_MESSAGE - 1)), "message"),
    "too deep": (build(value=nest(MAX_PAGE_DEPTH + 1)), "message"),
    "too low a priority": (build(priority=-5), "priority"),
    "too high a priority": (build(priority=6), "priority"),
    "a higher priority beside another": ([*build(), *build(priority=1)], "priority"),
    "a lower priority beside another": ([*build(), *build(priority=-1)], "priority"),
    "a key beside others": ([*build(), *build(key="k")], "key"),
    "a key before others": ([*build(key="k"), *build()], "key"),
    "a key with an empty name beside others": ([*build(), *build(key="")], "key"),
    "a group": (build(group="g"), "group"),
    "a group with an empty name": (build(group=""), "group"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_in_one_page_is_refused(name: str) -> None:
    """By the name of what is wrong, before anything is sent."""
    messages, field = WRONG[name]
    unique = [
        msgspec.structs.replace(message, id=f"id-{number}")
        for number, message in enumerate(messages)
    ]
    with pytest.raises(Invalid) as refused:
        check_push(unique)
    assert refused.value.field.partition("[")[0] == field


def test_messages_of_one_push_have_different_ids() -> None:
    """Two of one id could not be settled apart."""
    with pytest.raises(Invalid, match="unique ids"):
        check_push([*build(2), *build(1)])
