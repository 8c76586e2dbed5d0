"""Pins: tasks that only certain nodes may do.

A pin names one task and the nodes that may do it, as patterns: the first pattern that any
member matches is in force, the others are fallbacks. Several pins of one task are
alternatives: a node that satisfies one of them may do it. A task whose pins nobody matches
waits; nothing else does.

Patterns are those of SQL's LIKE, as PostgreSQL reads them: `%` is any text, `_` one
character, a backslash makes the next character plain; upper and lower case differ.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, lru_cache
from itertools import chain

import msgspec

from jobsync.core.clock import Wall
from jobsync.core.codec import Json
from jobsync.errors import Corrupt, Invalid

__all__ = [
    "Pin",
    "Wishes",
    "check_pattern",
    "in_force",
    "like",
    "merge",
    "pattern_in_force",
    "read_sheet",
    "resolve",
    "write_sheet",
]


_has_wildcard = re.compile(r"[%_\\]").search
_parts = re.compile(r"\\.|%|_|[^\\%_]+|\\", re.DOTALL).findall


class Pin(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One registration. Several of one task are alternatives."""

    task: str
    token: int
    """The task's token, found once when the pin is made."""
    patterns: tuple[str, ...]
    """Which nodes; the first that anybody matches counts."""
    reason: str | None = None
    created_by: str = ""
    created_at: float = 0.0
    expires_at: float | None = None
    """When it ends, in seconds since 1970; None is never."""


class Wishes(msgspec.Struct, frozen=True):
    """What the pins ask. Nodes are a set of bits: bit n is the node at place n."""

    tokens: Mapping[int, int]
    """For each token with pinned tasks that somebody matches: who satisfies all of them, or
    one who satisfies the most."""
    tasks: Mapping[str, int]
    """For each pinned task the nodes that may do it."""
    token_of: Mapping[str, int]
    """The token of each pinned task, in the same order."""


def like(pattern: str) -> Callable[[str], bool]:
    """Give the test that a pattern stands for.

    Raises:
        Invalid: it ends in a lone backslash.
    """
    if not _has_wildcard(pattern):
        return pattern.__eq__
    match = _compile(pattern).fullmatch
    return lambda name: match(name) is not None


def check_pattern(pattern: str) -> None:
    """Refuse what matches nothing or means nothing.

    Raises:
        Invalid: says what is wrong with it.
    """
    if not pattern:
        raise Invalid("node_pattern", pattern, "names no node", "give a name, or % for any")
    like(pattern)


@lru_cache(maxsize=1024)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile("".join(map(_translate, _parts(pattern))), re.DOTALL)


def _translate(part: str) -> str:
    match part:
        case "%":
            return ".*"
        case "_":
            return "."
        case "\\":
            raise Invalid(
                "node_pattern", part, "ends in a backslash", r"write \\ for a plain backslash"
            )
        case _:
            return re.escape(part.removeprefix("\\") if part[0] == "\\" else part)


def in_force(pins: Iterable[Pin], now: Wall) -> list[Pin]:
    """Give the pins that have not expired."""
    return [pin for pin in pins if pin.expires_at is None or now.seconds < pin.expires_at]


def pattern_in_force(patterns: Iterable[str], names: Collection[str]) -> str | None:
    """Give the first pattern of a pin that any of the nodes matches."""
    return next((p for p in patterns if any(map(like(p), names))), None)


def resolve(pins: Collection[Pin], names: Mapping[int, str]) -> Wishes:
    """Find out what the pins ask of the members, given by place and name."""
    match = _Matcher(names).match
    token_of = {pin.task: pin.token for pin in pins}
    tasks = {pin.task: match(pin.patterns) for pin in pins}
    if len(tasks) < len(pins):
        # Some have several, which are alternatives.
        for pin in pins:
            tasks[pin.task] |= match(pin.patterns)
    return Wishes(_find_agreed(tasks, token_of), tasks, token_of)


def _find_agreed(tasks: Mapping[str, int], token_of: Mapping[str, int]) -> dict[int, int]:
    """Give, for each token, the nodes that satisfy all of its pinned tasks, or the most."""
    tokens, sets = token_of.values(), tasks.values()
    agreed: dict[int, int] = {}
    for token, nodes in zip(tokens, sets, strict=True):
        if nodes:
            agreed[token] = agreed.get(token, nodes) & nodes
    votes: dict[int, list[int]] = {token: [] for token, nodes in agreed.items() if not nodes}
    if votes:
        for token, nodes in zip(tokens, sets, strict=True):
            if token in votes:
                votes[token].append(nodes)
    places = cache(_places)
    for token, given in votes.items():
        agreed[token] = _elect(token, chain.from_iterable(map(places, given)))
    return agreed


def _elect(token: int, named: Iterable[int]) -> int:
    """Give the bit of one of the places that are named most often, another for every token."""
    counts = Counter(named)
    most = max(counts.values())
    tied = sorted(place for place, count in counts.items() if count == most)
    return 1 << tied[token % len(tied)]


def _places(nodes: int) -> list[int]:
    return [place for place in range(nodes.bit_length()) if nodes >> place & 1]


class _Matcher:
    """Finds the members that patterns mean. Each list of patterns is looked at once."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._by_name: defaultdict[str, int] = defaultdict(int)
        for place, name in names.items():
            self._by_name[name] |= 1 << place
        self.match = cache(self._match_first)

    def _match_first(self, patterns: tuple[str, ...]) -> int:
        """Give who matches the first pattern that anybody matches."""
        return next(filter(None, map(self._match, patterns)), 0)

    def _match(self, pattern: str) -> int:
        if not _has_wildcard(pattern):
            return self._by_name.get(pattern, 0)
        matches = like(pattern)
        return sum(1 << place for place, name in self._names.items() if matches(name))


# A sheet of pins: all that one node has registered, in one document.
#
# One document, because its node replaces all its pins in one write. Compact, because pins
# come by the thousand and most of them say the same of many tasks:
#
#     created_by  the node
#     batches     {patterns, reason, created_at, expires_at, tasks, tokens}: what is said, and
#                 of which tasks; the tokens are those of the tasks, in the same order, for
#                 readers in SQL
#
# 10,000 pins take from 150 KB, where patterns are shared, to 1.5 MB, where each has its own.


class _PinBatch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    patterns: tuple[str, ...]
    reason: str | None = None
    created_at: float
    expires_at: float | None = None
    tasks: tuple[str, ...]


class _StoredSheet(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    created_by: str
    batches: tuple[_PinBatch, ...]


def merge(pins: Iterable[Pin], new: Iterable[Pin]) -> list[Pin]:
    """Add pins of one node to its others; who says the same of a task again renews it."""
    found = {(pin.task, pin.patterns): pin for pin in pins}
    found.update(((pin.task, pin.patterns), pin) for pin in new)
    return list(found.values())


def write_sheet(creator: str, pins: Iterable[Pin]) -> Json:
    """Give the document of one node's pins."""
    batches: dict[tuple[object, ...], tuple[list[str], list[int]]] = {}
    for pin in pins:
        said = (pin.patterns, pin.reason, pin.created_at, pin.expires_at)
        if (batch := batches.get(said)) is None:
            batch = batches[said] = ([], [])
        batch[0].append(pin.task)
        batch[1].append(pin.token)
    return {
        "created_by": creator,
        "batches": [
            {
                "patterns": list(patterns),  # type: ignore[call-overload]
                "reason": reason,
                "created_at": created,
                "expires_at": expires,
                "tasks": tasks,
                "tokens": tokens,
            }
            for (patterns, reason, created, expires), (tasks, tokens) in batches.items()
        ],
    }


def read_sheet(document: Json, key: str, token_of: Callable[[str], int]) -> list[Pin]:
    """Give the pins of a document.

    Tokens are found anew: the fleet may have had another number of them.

    Raises:
        Corrupt: it is not what any version of this library wrote; names the key.
    """
    try:
        sheet = msgspec.convert(document, _StoredSheet)
        return [
            Pin(
                task=task,
                token=token_of(task),
                patterns=batch.patterns,
                reason=batch.reason,
                created_by=sheet.created_by,
                created_at=batch.created_at,
                expires_at=batch.expires_at,
            )
            for batch in sheet.batches
            for task in batch.tasks
        ]
    except msgspec.ValidationError as error:
        raise Corrupt(key, str(error)) from error
