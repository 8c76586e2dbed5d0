"""Who owns which tokens, as the store has it.

Promises: at each number a token has one owner at most, and so has every task. A token on
its way from one node to another is owned by neither until the first has acknowledged the
number that took it away, or is dead; `handover` keeps that rule, and this is its record.

One document, compact enough for one write and plain enough for SQL:

    number      grows with each change; a node never applies a lower one than it has
    total       how many tokens there are
    nodes       {incarnation, name}: all members, and whoever still has something to give up
    starts      the first token of each run of tokens that one node has …
    holders     … and which node: a place in `nodes` counted from 1, or 0 for nobody
    moves       {giver, taker, revoked, starts, counts}: runs on their way, still listed
                under their giver above; `revoked` is the number that took them away
    exceptions  the name of the document about tasks that do not follow their token, or ""

50,000 tokens over 50 nodes take from a few hundred bytes to half a megabyte, by how
scattered they are. `exceptions` is content of its own because pins may be many, and are
mostly unchanged when tokens move. Where they do not fit one document they are several.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import md5, sha256
from itertools import chain, compress, count, islice, pairwise, repeat
from operator import ne
from typing import Any, Literal, TypeAlias, get_args

import msgspec
from msgspec.structs import replace

from jobsync.core.codec import Json
from jobsync.errors import Corrupt, Invalid

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
    "awaits",
    "check_total",
    "count_moved",
    "has_nothing",
    "holders_of",
    "join_exceptions",
    "name_exceptions",
    "name_parts",
    "owes",
    "owned_by",
    "pack_holders",
    "pack_move",
    "promised_to",
    "read_plan",
    "served_by",
    "split_exceptions",
    "to_document",
    "token_maker",
    "token_of",
    "tokens_of",
]


MAX_TOKENS = 100_000
"""How many tokens there may be: the most scattered assignment of them stays below 4 MB."""

NOBODY = 0
"""The holder of what nobody has."""

_MOST_TASKS = 8000
"""How many tasks stand in one document: with ids of 200 bytes, however they are escaped, and
four numbers each, that is below 4 MB."""


class NodeRef(msgspec.Struct, frozen=True, order=True):
    """One life of one node. Sorted by incarnation, which is: the oldest first."""

    incarnation: str
    name: str
    """What pins match, and people read."""


class TokenMove(msgspec.Struct, frozen=True, order=True):
    """Tokens on their way from one node to another. Neither may use them."""

    giver: int
    taker: int
    """Who is meant to have them; nobody, if there was no member left."""
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
    exceptions: str = ""

    def find(self, incarnation: str) -> int:
        """Give a node's place, counted from 1, or `NOBODY` if it has none."""
        return _find(self.nodes, incarnation)

    def runs(self) -> Iterator[tuple[range, int]]:
        """Give the runs of tokens with their holders, in order."""
        bounds = pairwise(chain(self.starts, (self.total,)))
        return zip((range(*bound) for bound in bounds), self.holders, strict=True)


class Exempt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A task that does not follow its token, because a pin says so or said so until now."""

    task: str
    token: int
    holder: int
    """Who has it, or has yet to give it up. Nobody: it waits for a node that matches."""
    taker: int = NOBODY
    revoked: int = 0
    """The number that took it from its holder; 0 while it is not on its way."""


class Exceptions(msgspec.Struct, frozen=True):
    """The tasks that do not follow their token, sorted, with nodes of their own."""

    nodes: tuple[NodeRef, ...] = ()
    tasks: tuple[Exempt, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """An assignment with the exceptions that it names. Applied together or not at all."""

    assignment: Assignment
    exceptions: Exceptions = Exceptions()

    @classmethod
    def empty(cls, total: int) -> "Plan":
        """Give the plan before the first: nobody has anything.

        Raises:
            Invalid: there cannot be that many tokens.
        """
        check_total(total)
        return cls(Assignment(0, total))

    def seen_by(self, incarnation: str) -> "Ownership":
        """Give one node's part: what it may use at this number."""
        tokens = owned_by(self.assignment, incarnation)
        mine = _find(self.exceptions.nodes, incarnation)
        own, others = set(), set()
        for exempt in self.exceptions.tasks:
            if mine and exempt.holder == mine and not exempt.revoked:
                own.add(exempt.task)
            elif exempt.token in tokens:
                others.add(exempt.task)
        return Ownership(self.assignment.number, tokens, frozenset(own), frozenset(others))


class Ownership(msgspec.Struct, frozen=True):
    """What one node may use at one number."""

    number: int
    tokens: frozenset[int] = frozenset()
    own: frozenset[str] = frozenset()
    """Tasks that are its own whoever has their token."""
    others: frozenset[str] = frozenset()
    """Tasks of its tokens that are not its own."""

    def covers(self, task: str, token: int) -> bool:
        """Say whether a task is its own."""
        if token in self.tokens:
            return task not in self.others
        return task in self.own


def owned_by(assignment: Assignment, incarnation: str) -> frozenset[int]:
    """Give the tokens that a node may use at this number; those on their way are not."""
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
    """Give the tokens that are on their way to a node."""
    place = assignment.find(incarnation)
    mine = (move for move in assignment.moves if place != NOBODY and move.taker == place)
    return frozenset(chain.from_iterable(map(tokens_of, mine)))


def awaits(plan: Plan, incarnation: str) -> bool:
    """Say whether anything is on its way to a node: tokens, or tasks that are pinned to it."""
    if promised_to(plan.assignment, incarnation):
        return True
    place = _find(plan.exceptions.nodes, incarnation)
    return place != NOBODY and any(task.taker == place for task in plan.exceptions.tasks)


def has_nothing(plan: Plan, incarnation: str) -> bool:
    """Say whether a node has given up everything, so that it may leave."""
    place = plan.assignment.find(incarnation)
    if place != NOBODY and place in plan.assignment.holders:
        return False
    place = _find(plan.exceptions.nodes, incarnation)
    return place == NOBODY or all(task.holder != place for task in plan.exceptions.tasks)


def owes(plan: Plan, incarnation: str) -> bool:
    """Say whether something was revoked from a node, which it has to acknowledge.

    Even if it never used it: what it was given at one number may be revoked at the next.
    """
    place = plan.assignment.find(incarnation)
    if place != NOBODY and any(move.giver == place for move in plan.assignment.moves):
        return True
    place = _find(plan.exceptions.nodes, incarnation)
    return place != NOBODY and any(
        task.holder == place and task.revoked for task in plan.exceptions.tasks
    )


def count_moved(before: Assignment, after: Assignment) -> int:
    """Give how many tokens are meant for another node than before."""
    pairs = zip(_destinations(before), _destinations(after), strict=True)
    return sum(was != will for was, will in pairs)


def served_by(assignment: Assignment) -> frozenset[str]:
    """Give the nodes that have tokens or are about to; one that gives up all it has is none."""
    return frozenset(_destinations(assignment)) - {""}


def _destinations(assignment: Assignment) -> list[str]:
    names = ["", *(node.incarnation for node in assignment.nodes)]
    found = [names[holder] for holder in holders_of(assignment)]
    for move in assignment.moves:
        for token in tokens_of(move):
            found[token] = names[move.taker]
    return found


def holders_of(assignment: Assignment) -> list[int]:
    """Give each token's holder; a token on its way is still with its giver."""
    found: list[int] = []
    for run, holder in assignment.runs():
        found.extend(repeat(holder, len(run)))
    return found


def pack_holders(holders: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Give the starts and the holders of the runs; `holders_of` undoes it."""
    starts = [0, *compress(count(1), map(ne, holders, islice(holders, 1, None)))]
    return tuple(starts), tuple(holders[start] for start in starts)


def pack_move(giver: int, taker: int, revoked: int, tokens: Iterable[int]) -> TokenMove:
    """Give the move of tokens that are in order; `tokens_of` undoes it."""
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
    """Give the tokens of a move, in order."""
    runs = zip(move.starts, move.counts, strict=True)
    return chain.from_iterable(range(start, start + count) for start, count in runs)


def _find(nodes: Iterable[NodeRef], incarnation: str) -> int:
    places = (place for place, node in enumerate(nodes, 1) if node.incarnation == incarnation)
    return next(places, NOBODY)


def check_total(total: int) -> None:
    """Refuse a number of tokens that cannot be assigned.

    Raises:
        Invalid: says which numbers can.
    """
    if not 1 <= total <= MAX_TOKENS:
        fix = f"give 1 to {MAX_TOKENS:,}; 10,000 suit most fleets"
        raise Invalid("total_tokens", total, "is not a possible number of tokens", fix)


# As documents


def to_document(value: Assignment | Exceptions) -> Json:
    """Give the JSON of either part."""
    # Through text: what comes out is lists, which a store encodes without a second look.
    return msgspec.json.decode(msgspec.json.encode(value))


def name_exceptions(number: int, exceptions: Exceptions) -> str:
    """Name a document of exceptions: unlike any other's name, and the same for all leaders.

    By number and content: two leaders that decide the same make one document, and two that
    decide differently at one number do not meet in it.
    """
    if not exceptions.tasks:
        return ""
    return f"{number}-{sha256(msgspec.json.encode(exceptions)).hexdigest()[:16]}"


def name_parts(name: str, exceptions: Exceptions) -> list[str]:
    """Name the documents that exceptions take; their own name is the first of them."""
    count = max(1, -(-len(exceptions.tasks) // _MOST_TASKS))
    return [name, *(f"{name}.{part}" for part in range(1, count))]


def split_exceptions(name: str, exceptions: Exceptions) -> dict[str, Json]:
    """Give the documents that exceptions take, by name; the first says how many there are."""
    names = name_parts(name, exceptions)
    tasks = exceptions.tasks
    parts = (
        replace(exceptions, tasks=tasks[at * _MOST_TASKS : (at + 1) * _MOST_TASKS])
        for at in range(len(names))
    )
    documents = dict(zip(names, map(to_document, parts), strict=True))
    if len(names) > 1:
        documents[name]["parts"] = len(names)
    return documents


def join_exceptions(first: Json, others: Iterable[Json]) -> Json:
    """Make one of the documents that exceptions took."""
    rest = [task for other in others for task in other["tasks"]]
    return {**first, "tasks": [*first["tasks"], *rest]} if rest else first


def read_plan(document: Json, exceptions: Json | None, key: str) -> Plan:
    """Read an assignment and the exceptions that it names, if any.

    Raises:
        Corrupt: it is not what was written; names the key.
    """
    assignment = _convert(document, Assignment, key)
    _check(_whole(assignment), key)
    if not assignment.exceptions:
        return Plan(assignment)
    found = _convert(exceptions, Exceptions, f"{key} {assignment.exceptions}")
    places = range(len(found.nodes) + 1)
    sound = all(
        e.holder in places and e.taker in places and 0 <= e.token < assignment.total
        for e in found.tasks
    )
    _check(sound, f"{key} {assignment.exceptions}")
    return Plan(assignment, found)


def _convert(document: Json, kind: Any, key: str) -> Any:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise Corrupt(key, str(error)) from error


def _check(sound: bool, key: str) -> None:  # noqa: FBT001  # a verdict, not a flag
    if not sound:
        raise Corrupt(key, "it does not give each token one holder")


def _whole(assignment: Assignment) -> bool:
    """Say whether every token has one holder, and every move takes from it, once."""
    starts, total = assignment.starts, assignment.total
    places = range(len(assignment.nodes) + 1)
    if not (
        starts[:1] == (0,)
        and 1 <= total <= MAX_TOKENS
        and len(starts) == len(assignment.holders)
        and all(a < b for a, b in pairwise((*starts, total)))
        and all(holder in places for holder in assignment.holders)
    ):
        return False
    holders = holders_of(assignment)
    for move in assignment.moves:
        if not (move.giver in places[1:] and move.taker in places and _fits(move, total)):
            return False
        for token in tokens_of(move):
            if holders[token] != move.giver:
                return False
            holders[token] = NOBODY
    return True


def _fits(move: TokenMove, total: int) -> bool:
    runs = zip(move.starts, move.counts, strict=False)
    return len(move.starts) == len(move.counts) and all(0 <= s < s + c <= total for s, c in runs)


# Which token a task belongs to. Every node gives the same answer, in every release.
#
# A task is known by `str(id)`, so that `1` and `"1"` are one task. The three hashes are
# those of the original JobSync, number for number: a fleet can change over without a task
# changing its token.
#
#     md5             the whole digest as one number; what the guide documents, and the default
#     sha256          the digest's first 8 bytes, big-endian
#     double_sha256   the same of the digest's digest


HashFunction: TypeAlias = Literal["md5", "sha256", "double_sha256"]

HASH_FUNCTIONS: tuple[str, ...] = get_args(HashFunction)
"""The names that `hash_function` takes."""

_number = int.from_bytes


def _token_by_md5(total: int, text: str) -> int:
    # Not for security: where FIPS forbids md5 otherwise, tasks must keep their tokens.
    return _number(md5(text.encode(), usedforsecurity=False).digest()) % total


def _token_by_sha256(total: int, text: str) -> int:
    return _number(sha256(text.encode()).digest()[:8]) % total


def _token_by_double_sha256(total: int, text: str) -> int:
    return _number(sha256(sha256(text.encode()).digest()).digest()[:8]) % total


_MAKERS: Mapping[str, Callable[[int, str], int]] = {
    "md5": _token_by_md5,
    "sha256": _token_by_sha256,
    "double_sha256": _token_by_double_sha256,
}


def token_of(task_id: object, total_tokens: int, hash_function: str = "md5") -> int:
    """Give the token of a task, from 0 to `total_tokens` - 1.

    Nothing is checked here, because this runs for every task of every list: the settings
    check `hash_function` and `total_tokens`, and `Task` checks the id.
    """
    return _MAKERS[hash_function](total_tokens, str(task_id))


def token_maker(total_tokens: int, hash_function: str = "md5") -> Callable[[str], int]:
    """Give the function that gives the token of a task's text, for those who ask often."""
    return partial(_MAKERS[hash_function], total_tokens)
