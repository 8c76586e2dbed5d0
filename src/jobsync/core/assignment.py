"""Which node owns which tokens, in the form that the store keeps. Pure.

Promises: at each number a token has at most one owner, and so has every task. A token that
moves from one node to another is owned by neither until the first has acknowledged the number
that revoked it, or is dead. `handover` keeps that rule; this module is its record.

The assignment is one document, compact enough for one write and plain enough for SQL:

    number      grows with each change; a node never applies a lower one than it has
    total       the number of tokens
    nodes       {incarnation, name}: all members, and every node that still has something to
                give up
    starts      the first token of each run of tokens that one node has …
    holders     … and that node: an index into `nodes` counted from 1, or 0 for nobody
    moves       {giver, taker, revoked, starts, counts}: runs that are moving, still listed
                under their giver above; `revoked` is the number that took them away
    exceptions  the name of the document of tasks that do not follow their token, or ""

50,000 tokens over 50 nodes take from a few hundred bytes to half a megabyte, depending on how
scattered they are. Exceptions are stored apart because pins may be many, and are mostly
unchanged when tokens move. `core.plan_documents` reads and
writes both.

A task's token comes from a hash of `str(id)`, so that `1` and `"1"` are one task. Every node and
every release computes the same token. The hashes are those of the original JobSync, number for
number, so that a fleet can migrate without a task changing its token:

    md5             the full digest as one number; the default
    sha256          the digest's first 8 bytes, big-endian
    double_sha256   the same of the digest's digest
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import md5, sha256
from itertools import chain, compress, count, islice, pairwise, repeat
from operator import ne
from typing import Literal, TypeAlias, get_args

import msgspec
from msgspec.structs import replace

from jobsync.core.keys import KeySegment, OptionalKeySegment
from jobsync.errors import Invalid

__all__ = [
    "HASH_FUNCTIONS",
    "MAX_TOKENS",
    "NOBODY",
    "Assignment",
    "Exceptions",
    "Exempt",
    "HashFunction",
    "NodeRef",
    "Ownership",
    "Plan",
    "TokenMove",
    "check_total",
    "count_moved",
    "has_incoming",
    "has_nothing",
    "holders_of",
    "must_acknowledge",
    "owned_by",
    "pack_holders",
    "pack_move",
    "promised_to",
    "served_by",
    "token_maker",
    "token_of",
    "tokens_of",
]


MAX_TOKENS = 100_000
"""The most tokens: their most scattered assignment stays below 4 MB."""

NOBODY = 0
"""The holder of tokens and tasks that no node has."""


class NodeRef(msgspec.Struct, frozen=True, order=True):
    """One run of one node. Sorts by incarnation, so that the oldest is first."""

    incarnation: KeySegment
    name: str
    """The name that pins match and people read."""


class TokenMove(msgspec.Struct, frozen=True, order=True):
    """Tokens that move from one node to another. Neither may use them."""

    giver: int
    taker: int
    """The node that gets them; nobody, if there was no member left."""
    revoked: int
    """The giver is done with them once it has applied this number."""
    starts: tuple[int, ...]
    counts: tuple[int, ...]


class Assignment(msgspec.Struct, frozen=True):
    """The tokens at one number."""

    number: int
    total: int
    nodes: tuple[NodeRef, ...] = ()
    starts: tuple[int, ...] = (0,)
    holders: tuple[int, ...] = (NOBODY,)
    moves: tuple[TokenMove, ...] = ()
    exceptions: OptionalKeySegment = ""

    def find(self, incarnation: str) -> int:
        """Return a node's index, counted from 1, or `NOBODY` if it is not listed."""
        return _find(self.nodes, incarnation)

    def runs(self) -> Iterator[tuple[range, int]]:
        """Return the runs of tokens with their holders, in order."""
        bounds = pairwise(chain(self.starts, (self.total,)))
        return zip((range(*bound) for bound in bounds), self.holders, strict=True)


class Exempt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A task that does not follow its token, because of a pin, or of one that just ended."""

    task: str
    token: int
    holder: int
    """The node that has it, or has yet to give it up. Nobody: it waits for a matching node."""
    taker: int = NOBODY
    revoked: int = 0
    """The number that took it from its holder; 0 while it does not move."""


class Exceptions(msgspec.Struct, frozen=True):
    """The tasks that do not follow their token, sorted, with their own list of nodes."""

    nodes: tuple[NodeRef, ...] = ()
    tasks: tuple[Exempt, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """An assignment with the exceptions that it names. Applied together or not at all."""

    assignment: Assignment
    exceptions: Exceptions = Exceptions()

    @classmethod
    def empty(cls, total: int, number: int = 0) -> "Plan":
        """Return a plan in which nobody has anything; by default the one before the first.

        Raises:
            Invalid: the number of tokens is out of range.
        """
        check_total(total)
        return cls(Assignment(number, total))

    def fits(self, total: int, token_of: Callable[[str], int]) -> bool:
        """Whether the plan was made with this number of tokens and this hash of tasks."""
        exempt = self.exceptions.tasks
        return self.assignment.total == total and all(e.token == token_of(e.task) for e in exempt)

    def seen_by(self, incarnation: str) -> "Ownership":
        """Return what one node may use at this number."""
        tokens = owned_by(self.assignment, incarnation)
        index = _find(self.exceptions.nodes, incarnation)
        own, others = set(), set()
        for exempt in self.exceptions.tasks:
            if index and exempt.holder == index and not exempt.revoked:
                own.add(exempt.task)
            elif exempt.token in tokens:
                others.add(exempt.task)
        return Ownership(self.assignment.number, tokens, frozenset(own), frozenset(others))


class Ownership(msgspec.Struct, frozen=True):
    """What one node may use at one number."""

    number: int
    tokens: frozenset[int] = frozenset()
    own: frozenset[str] = frozenset()
    """Tasks that it owns regardless of their token."""
    others: frozenset[str] = frozenset()
    """Tasks of its tokens that it does not own."""

    def covers(self, task: str, token: int) -> bool:
        """Whether this node owns a task."""
        if token in self.tokens:
            return task not in self.others
        return task in self.own

    def without(self, tasks: Collection[str]) -> "Ownership":
        """Return the same without some tasks."""
        return replace(self, own=self.own.difference(tasks), others=self.others.union(tasks))


def owned_by(assignment: Assignment, incarnation: str) -> frozenset[int]:
    """Return the tokens that a node may use at this number, without those that move."""
    place = assignment.find(incarnation)
    if place == NOBODY:
        return frozenset()
    tokens: set[int] = set()
    for run, holder in assignment.runs():
        if holder == place:
            tokens.update(run)
    for move in assignment.moves:
        if move.giver == place:
            tokens.difference_update(tokens_of(move))
    return frozenset(tokens)


def promised_to(assignment: Assignment, incarnation: str) -> frozenset[int]:
    """Return the tokens that are moving to a node."""
    place = assignment.find(incarnation)
    mine = (move for move in assignment.moves if place != NOBODY and move.taker == place)
    return frozenset(chain.from_iterable(map(tokens_of, mine)))


def has_incoming(plan: Plan, incarnation: str) -> bool:
    """Whether anything moves to a node: tokens, or tasks that are pinned to it."""
    if promised_to(plan.assignment, incarnation):
        return True
    place = _find(plan.exceptions.nodes, incarnation)
    return place != NOBODY and any(task.taker == place for task in plan.exceptions.tasks)


def has_nothing(plan: Plan, incarnation: str) -> bool:
    """Whether a node has given up everything, so that it may leave."""
    place = plan.assignment.find(incarnation)
    if place != NOBODY and place in plan.assignment.holders:
        return False
    place = _find(plan.exceptions.nodes, incarnation)
    return place == NOBODY or all(task.holder != place for task in plan.exceptions.tasks)


def must_acknowledge(plan: Plan, incarnation: str) -> bool:
    """Whether something was revoked from a node, which it has to acknowledge.

    This includes what it never used: a token given at one number may be revoked at the next.
    """
    place = plan.assignment.find(incarnation)
    if place != NOBODY and any(move.giver == place for move in plan.assignment.moves):
        return True
    place = _find(plan.exceptions.nodes, incarnation)
    return place != NOBODY and any(
        task.holder == place and task.revoked for task in plan.exceptions.tasks
    )


def count_moved(before: Assignment, after: Assignment) -> int:
    """Return how many tokens have another destination than before."""
    pairs = zip(_destinations(before), _destinations(after), strict=True)
    return sum(old != new for old, new in pairs)


def served_by(assignment: Assignment) -> frozenset[str]:
    """Return the nodes that have tokens or are about to, without those that give up all."""
    return frozenset(_destinations(assignment)) - {""}


def _destinations(assignment: Assignment) -> list[str]:
    names = ["", *(node.incarnation for node in assignment.nodes)]
    destinations = [names[holder] for holder in holders_of(assignment)]
    for move in assignment.moves:
        for token in tokens_of(move):
            destinations[token] = names[move.taker]
    return destinations


def holders_of(assignment: Assignment) -> list[int]:
    """Return each token's holder; a token that moves is still with its giver."""
    holders: list[int] = []
    for run, holder in assignment.runs():
        holders.extend(repeat(holder, len(run)))
    return holders


def pack_holders(holders: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the starts and the holders of the runs. The inverse of `holders_of`."""
    starts = [0, *compress(count(1), map(ne, holders, islice(holders, 1, None)))]
    return tuple(starts), tuple(holders[start] for start in starts)


def pack_move(giver: int, taker: int, revoked: int, tokens: Iterable[int]) -> TokenMove:
    """Return the move of sorted tokens. The inverse of `tokens_of`."""
    starts: list[int] = []
    counts: list[int] = []
    for token in tokens:
        if starts and token == starts[-1] + counts[-1]:
            counts[-1] += 1
        else:
            starts.append(token)
            counts.append(1)
    return TokenMove(giver, taker, revoked, tuple(starts), tuple(counts))


def tokens_of(move: TokenMove) -> Iterator[int]:
    """Return the tokens of a move, in order."""
    runs = zip(move.starts, move.counts, strict=True)
    return chain.from_iterable(range(start, start + count) for start, count in runs)


def _find(nodes: Iterable[NodeRef], incarnation: str) -> int:
    indexes = (index for index, node in enumerate(nodes, 1) if node.incarnation == incarnation)
    return next(indexes, NOBODY)


def check_total(total: int) -> None:
    """Check a number of tokens.

    Raises:
        Invalid: it is out of range.
    """
    if not 1 <= total <= MAX_TOKENS:
        problem = f"must be 1 to {MAX_TOKENS:,}"
        raise Invalid("total_tokens", total, problem, "use 10,000, which suits most fleets")


HashFunction: TypeAlias = Literal["md5", "sha256", "double_sha256"]

HASH_FUNCTIONS: tuple[str, ...] = get_args(HashFunction)
"""The values of `hash_function`."""


def _token_by_md5(total: int, text: str) -> int:
    # Not for security: tasks must keep their tokens where FIPS forbids md5.
    return int.from_bytes(md5(text.encode(), usedforsecurity=False).digest()) % total


def _token_by_sha256(total: int, text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8]) % total


def _token_by_double_sha256(total: int, text: str) -> int:
    return int.from_bytes(sha256(sha256(text.encode()).digest()).digest()[:8]) % total


_HASHES: Mapping[str, Callable[[int, str], int]] = {
    "md5": _token_by_md5,
    "sha256": _token_by_sha256,
    "double_sha256": _token_by_double_sha256,
}


def token_of(task_id: object, total_tokens: int, hash_function: str = "md5") -> int:
    """Return the token of a task, from 0 to `total_tokens` - 1.

    Nothing is checked here, because this runs for every task of every list: the settings
    check `hash_function` and `total_tokens`, and `Task` checks the id.
    """
    return _HASHES[hash_function](total_tokens, str(task_id))


def token_maker(total_tokens: int, hash_function: str = "md5") -> Callable[[str], int]:
    """Return the function from a task's text to its token, for repeated use."""
    return partial(_HASHES[hash_function], total_tokens)
