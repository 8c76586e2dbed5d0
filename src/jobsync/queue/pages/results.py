"""What handlers returned, in the pages of their messages. Pure.

A completed message has no value any more, so there is room for a small result. All values and
results of a page are limited together, because a page is one record.

On its own because `changes` is large, and what reads pages needs it, too.
"""

from collections.abc import Collection

import msgspec

from jobsync.queue.pages.page import MAX_PUSH_BYTES, RESULT_MARK, PageMessage, QueuePage
from jobsync.queue.single_message import StoredResult

__all__ = ["find_result_problem", "keep_result", "limit_results"]

_FULL = f"the values and results of its page have more than {MAX_PUSH_BYTES:,} bytes"
_DROPPED = "a process with older code has dropped it"


def keep_result(message: PageMessage, result: StoredResult) -> PageMessage:
    """Return a completed message with what its handler returned."""
    first, _, rest = message.marks.partition(" ")
    return msgspec.structs.replace(
        message,
        result=None if result.text is None else msgspec.json.decode(result.text),
        result_problem=result.problem,
        marks=f"{first} {RESULT_MARK} {rest}".strip(),
    )


def limit_results(page: QueuePage, ids: Collection[str]) -> QueuePage:
    """Drop the results of these messages, the last ones first, if the page is too large."""
    chosen = [
        place
        for place, each in enumerate(page.messages)
        if each.id in ids and each.result is not None
    ]
    if not chosen:
        return page
    sizes = [_find_size(each) for each in page.messages]
    total, messages = sum(sizes), list(page.messages)
    while chosen and total > MAX_PUSH_BYTES:
        place = chosen.pop()
        total -= sizes[place]
        messages[place] = msgspec.structs.replace(
            messages[place], result=None, result_problem=_FULL
        )
    return msgspec.structs.replace(page, messages=tuple(messages))


def find_result_problem(message: PageMessage) -> str:
    """Return why a message has no result although its handler returned one; empty if it has."""
    is_missing = RESULT_MARK in message.marks.split(" ") and message.result is None
    return message.result_problem or (_DROPPED if is_missing else "")


def _find_size(message: PageMessage) -> int:
    values = (message.value, message.result)
    return sum(len(msgspec.json.encode(each)) for each in values if each is not None)
