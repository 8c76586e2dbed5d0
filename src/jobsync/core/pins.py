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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import msgspec

from jobsync.core.clock import Wall
from jobsync.errors import Invalid

__all__ = [
    "Pin",
    "Pinned",
    "Wishes",
    "check_pattern",
    "in_force",
    "like",
    "pattern_in_force",
    "resolve",
]

_has_wildcard = re.compile(r"[%_\\]").search
_ALL = -1  # every bit
_parts = re.compile(r"\\.|%|_|[^\\%_]+|\\", re.DOTALL).findall


class Pin(msgspec.Struct, frozen=True, kw_only=True):
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


class Pinned(msgspec.Struct, frozen=True):
    """A task and the nodes that may do it, as a set of bits: bit n is the node at place n."""

    token: int
    nodes: int


class Wishes(msgspec.Struct, frozen=True):
    """What the pins ask of the tokens and of the tasks, nodes as bits."""

    tokens: Mapping[int, int]
    """For each token with pinned tasks that somebody matches: who satisfies most of them."""
    tasks: Mapping[str, Pinned]


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


def pattern_in_force(pin: Pin, names: Sequence[str]) -> str | None:
    """Give the first pattern of a pin that any of the nodes matches."""
    return next((p for p in pin.patterns if any(map(like(p), names))), None)


def resolve(pins: Iterable[Pin], names: Mapping[int, str]) -> Wishes:
    """Find out what the pins ask of the members, given by place and name."""
    members = _Members(names)
    tasks: dict[str, Pinned] = {}
    for pin in pins:
        nodes = members.matching(pin.patterns)
        if known := tasks.get(pin.task):
            nodes |= known.nodes
        tasks[pin.task] = Pinned(pin.token, nodes)
    return Wishes(_find_agreed(tasks.values()), tasks)


def _find_agreed(tasks: Collection[Pinned]) -> dict[int, int]:
    """Give, for each token, the nodes that satisfy the most of its pinned tasks."""
    agreed: dict[int, int] = {}
    for task in tasks:
        if task.nodes:
            agreed[task.token] = agreed.get(task.token, _ALL) & task.nodes
    disputed = {token for token, nodes in agreed.items() if not nodes}
    votes: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for task in tasks:
        if task.token in disputed:
            votes[task.token].update(_bits(task.nodes))
    for token, counts in votes.items():
        most = max(counts.values())
        agreed[token] = sum(bit for bit, count in counts.items() if count == most)
    return agreed


def _bits(nodes: int) -> Iterator[int]:
    while nodes:
        lowest = nodes & -nodes
        yield lowest
        nodes ^= lowest


class _Members:
    """The members as patterns see them. Each pattern is matched once."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._by_name: defaultdict[str, int] = defaultdict(int)
        for place, name in names.items():
            self._by_name[name] |= 1 << place
        self._found: dict[tuple[str, ...], int] = {}

    def matching(self, patterns: tuple[str, ...]) -> int:
        """Give who matches the first pattern that anybody matches."""
        found = self._found.get(patterns)
        if found is None:
            found = next(filter(None, map(self._match, patterns)), 0)
            self._found[patterns] = found
        return found

    def _match(self, pattern: str) -> int:
        if not _has_wildcard(pattern):
            return self._by_name.get(pattern, 0)
        matches = like(pattern)
        return sum(1 << place for place, name in self._names.items() if matches(name))
