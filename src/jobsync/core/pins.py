"""Pins: tasks that only certain nodes may do. Pure.

A pin names one task and the nodes that may do it, as patterns: the first pattern that any
member matches is in force, the others are fallbacks. Several pins of one task are
alternatives: a node that satisfies one of them may do it. A task whose pins no node matches
waits; nothing else does.

Patterns are those of SQL's LIKE in PostgreSQL: `%` is any text, `_` one character, a backslash
makes the next character literal; case matters.

A node stores all its pins in one document, the sheet, because it replaces all of them in one
write. The sheet is compact, because pins come by the thousand and most of them share all but
the task:

    created_by  the node
    batches     {patterns, reason, created_at, expires_at, tasks, tokens}: what the pins share,
                and their tasks; the tokens are those of the tasks, in the same order, for
                readers in SQL

10,000 pins take from 150 KB, where patterns are shared, to 1.5 MB, where each has its own.
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
    "PinnedNodes",
    "check_pattern",
    "in_force",
    "like",
    "merge",
    "pattern_in_force",
    "read_sheet",
    "resolve",
    "unpack_nodes",
    "write_sheet",
]


_has_wildcard = re.compile(r"[%_\\]").search
_parts = re.compile(r"\\.|%|_|[^\\%_]+|\\", re.DOTALL).findall


class Pin(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One registration. Several pins of one task are alternatives."""

    task: str
    token: int
    """The task's token, found once when the pin is made."""
    patterns: tuple[str, ...]
    """The nodes that may do it; the first pattern that any node matches is in force."""
    reason: str | None = None
    created_by: str = ""
    created_at: float = 0.0
    expires_at: float | None = None
    """In seconds since 1970; None is never."""


class PinnedNodes(msgspec.Struct, frozen=True):
    """The nodes that the pins allow. Nodes are a bit set: bit n is the node with index n."""

    tokens: Mapping[int, int]
    """For each token with pinned tasks that some node matches: the nodes that satisfy all of
    them, or one node that satisfies the most."""
    tasks: Mapping[str, int]
    """For each pinned task the nodes that may do it."""
    token_of: Mapping[str, int]
    """The token of each pinned task, in the same order."""


def like(pattern: str) -> Callable[[str], bool]:
    """Return the test of a name against a pattern.

    Raises:
        Invalid: it ends in a lone backslash.
    """
    if not _has_wildcard(pattern):
        return pattern.__eq__
    match = _compile(pattern).fullmatch
    return lambda name: match(name) is not None


def check_pattern(pattern: str) -> None:
    """Check a pattern.

    Raises:
        Invalid: it is empty or ends in a lone backslash.
    """
    if not pattern:
        raise Invalid("node_pattern", pattern, "must not be empty", "use a name, or % for any node")
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
                "node_pattern", part, "must not end in a backslash", r"write \\ for a literal one"
            )
        case _:
            return re.escape(part.removeprefix("\\") if part[0] == "\\" else part)


def in_force(pins: Iterable[Pin], now: Wall) -> list[Pin]:
    """Return the pins that have not expired."""
    return [pin for pin in pins if pin.expires_at is None or now.seconds < pin.expires_at]


def pattern_in_force(patterns: Iterable[str], names: Collection[str]) -> str | None:
    """Return the first pattern of a pin that any of the nodes matches."""
    return next((p for p in patterns if any(map(like(p), names))), None)


def resolve(pins: Collection[Pin], names: Mapping[int, str]) -> PinnedNodes:
    """Return the members that the pins allow. `names` has each member's name by its index."""
    match = _Matcher(names).match
    token_of = {pin.task: pin.token for pin in pins}
    tasks = {pin.task: match(pin.patterns) for pin in pins}
    if len(tasks) < len(pins):
        # Several pins of one task are alternatives.
        for pin in pins:
            tasks[pin.task] |= match(pin.patterns)
    return PinnedNodes(_find_agreed(tasks, token_of), tasks, token_of)


def _find_agreed(tasks: Mapping[str, int], token_of: Mapping[str, int]) -> dict[int, int]:
    """Return for each token the nodes that satisfy all of its pinned tasks, or the most."""
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
    unpack = cache(unpack_nodes)
    for token, ballots in votes.items():
        agreed[token] = _elect(token, chain.from_iterable(map(unpack, ballots)))
    return agreed


def _elect(token: int, votes: Iterable[int]) -> int:
    """Return the bit of one of the nodes with most votes; the token breaks a tie."""
    counts = Counter(votes)
    most = max(counts.values())
    tied = sorted(node for node, count in counts.items() if count == most)
    return 1 << tied[token % len(tied)]


def unpack_nodes(nodes: int) -> list[int]:
    """Return the indexes in a bit set, in order."""
    return [index for index in range(nodes.bit_length()) if nodes >> index & 1]


class _Matcher:
    """Finds the members that match patterns. Each list of patterns is evaluated once."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._by_name: defaultdict[str, int] = defaultdict(int)
        for index, name in names.items():
            self._by_name[name] |= 1 << index
        self.match = cache(self._match_first)

    def _match_first(self, patterns: tuple[str, ...]) -> int:
        """Return the members that match the first pattern that any member matches."""
        return next(filter(None, map(self._match, patterns)), 0)

    def _match(self, pattern: str) -> int:
        if not _has_wildcard(pattern):
            return self._by_name.get(pattern, 0)
        matches = like(pattern)
        return sum(1 << index for index, name in self._names.items() if matches(name))


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
    """Add pins to a node's others; a pin with the same task and patterns is replaced."""
    merged = {(pin.task, pin.patterns): pin for pin in pins}
    merged.update(((pin.task, pin.patterns), pin) for pin in new)
    return list(merged.values())


def write_sheet(creator: str, pins: Iterable[Pin]) -> Json:
    """Return the document of one node's pins."""
    batches: dict[tuple[object, ...], tuple[list[str], list[int]]] = {}
    for pin in pins:
        shared = (pin.patterns, pin.reason, pin.created_at, pin.expires_at)
        if (batch := batches.get(shared)) is None:
            batch = batches[shared] = ([], [])
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
    """Return the pins of a document.

    Tokens are computed anew: the fleet may have had another number of them.

    Raises:
        Corrupt: no version of this library wrote it; names the key.
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
