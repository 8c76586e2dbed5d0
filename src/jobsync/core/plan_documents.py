"""The stored documents of a plan: its assignment, and the tasks that do not follow their token.

Exceptions that do not fit one document are split into several. What is read is checked: each token
has one holder, and each move takes it from that holder.
"""

from collections.abc import Iterable
from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec.structs import replace

from jobsync.core.assignment import (
    MAX_TOKENS,
    NOBODY,
    Assignment,
    Exceptions,
    Plan,
    TokenMove,
    holders_of,
    tokens_of,
)
from jobsync.core.codec import Json
from jobsync.core.keys import OptionalKeySegment
from jobsync.errors import Corrupt

__all__ = [
    "PlanHeading",
    "count_parts",
    "join_exceptions",
    "name_exceptions",
    "name_parts",
    "read_heading",
    "read_plan",
    "split_exceptions",
    "to_document",
]

_MAX_TASKS = 8000
"""Tasks in one document: with ids of 200 bytes, escaped in any way, and four numbers each, they
stay below 4 MB."""

_MAX_PARTS = 10_000
"""More than any exceptions take."""

_INCONSISTENT = "it does not give each token one holder"

_T = TypeVar("_T")


class PlanHeading(msgspec.Struct, frozen=True):
    """What is read of an assignment before the rest: its number, and what belongs to it."""

    number: int
    exceptions: OptionalKeySegment = ""


class _Part(msgspec.Struct, frozen=True):
    """One of the documents that exceptions take."""

    tasks: list[Any]
    parts: Annotated[int, msgspec.Meta(ge=1, le=_MAX_PARTS)] = 1


def to_document(value: Assignment | Exceptions) -> Json:
    """Return the JSON of either part."""
    # Through text: the result has lists, which a store encodes without a further check.
    return msgspec.json.decode(msgspec.json.encode(value))


def name_exceptions(number: int, exceptions: Exceptions) -> str:
    """Return the unique name of a document of exceptions, from its number and content.

    Two leaders that decide the same write the same document, and two that decide differently at
    one number write different ones.
    """
    if not exceptions.tasks:
        return ""
    return f"{number}-{sha256(msgspec.json.encode(exceptions)).hexdigest()[:16]}"


def name_parts(name: str, exceptions: Exceptions) -> list[str]:
    """Return the names of the documents that exceptions take; the first is `name` itself."""
    count = max(1, -(-len(exceptions.tasks) // _MAX_TASKS))
    return [name, *(f"{name}.{part}" for part in range(1, count))]


def split_exceptions(name: str, exceptions: Exceptions) -> dict[str, Json]:
    """Return the documents that exceptions take, by name; the first holds their number."""
    names = name_parts(name, exceptions)
    tasks = exceptions.tasks
    parts = (
        replace(exceptions, tasks=tasks[i * _MAX_TASKS : (i + 1) * _MAX_TASKS])
        for i in range(len(names))
    )
    documents = dict(zip(names, map(to_document, parts), strict=True))
    if len(names) > 1:
        documents[name]["parts"] = len(names)
    return documents


def count_parts(first: Json, key: str) -> int:
    """Return how many documents the exceptions take of which this is the first.

    Raises:
        Corrupt: no version of this library wrote it; names the key.
    """
    return _convert(first, _Part, key).parts


def join_exceptions(first: Json, others: Iterable[Json], key: str) -> Json:
    """Join the documents that exceptions take into one.

    Raises:
        Corrupt: no version of this library wrote one of the others; names the key.
    """
    rest = [task for other in others for task in _convert(other, _Part, key).tasks]
    return {**first, "tasks": [*first["tasks"], *rest]} if rest else first


def read_heading(document: Json, key: str) -> PlanHeading:
    """Read the number of an assignment, and the name of its exceptions.

    Raises:
        Corrupt: no version of this library wrote it; names the key.
    """
    return _convert(document, PlanHeading, key)


def read_plan(document: Json, exceptions: Json | None, key: str) -> Plan:
    """Read an assignment and the exceptions that it names, if any.

    Raises:
        Corrupt: it does not give each token one holder; names the key.
    """
    assignment = _convert(document, Assignment, key)
    if not _is_consistent(assignment):
        raise Corrupt(key, _INCONSISTENT)
    if not assignment.exceptions:
        return Plan(assignment)
    key = f"{key} {assignment.exceptions}"
    result = _convert(exceptions, Exceptions, key)
    nodes = range(len(result.nodes) + 1)
    if not all(
        e.holder in nodes and e.taker in nodes and 0 <= e.token < assignment.total
        for e in result.tasks
    ):
        raise Corrupt(key, _INCONSISTENT)
    return Plan(assignment, result)


def _convert(document: Json, kind: type[_T], key: str) -> _T:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise Corrupt(key, str(error)) from error


def _is_consistent(assignment: Assignment) -> bool:
    """Whether every token has one holder, and every move takes it from that holder, once."""
    starts, total = assignment.starts, assignment.total
    nodes = range(len(assignment.nodes) + 1)
    if not (
        starts[:1] == (0,)
        and 1 <= total <= MAX_TOKENS
        and len(starts) == len(assignment.holders)
        and all(a < b for a, b in pairwise((*starts, total)))
        and all(holder in nodes for holder in assignment.holders)
    ):
        return False
    holders = holders_of(assignment)
    for move in assignment.moves:
        if not (move.giver in nodes[1:] and move.taker in nodes and _fits(move, total)):
            return False
        for token in tokens_of(move):
            if holders[token] != move.giver:
                return False
            holders[token] = NOBODY
    return True


def _fits(move: TokenMove, total: int) -> bool:
    runs = zip(move.starts, move.counts, strict=False)
    return len(move.starts) == len(move.counts) and all(0 <= s < s + c <= total for s, c in runs)
