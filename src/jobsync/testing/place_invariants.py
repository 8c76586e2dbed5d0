"""Where messages stand in a queue: its keys, and on a database its order and its groups.

Everything is checked commit by commit: within a commit, the end of a head and the release of the
next message are rows that are recorded one after the other.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from jobsync.testing.invariants import Violation
from jobsync.testing.limit_invariants import find_limits
from jobsync.testing.message_transitions import (
    MessageProblem,
    MessageTransition,
    RowDetails,
    list_commits,
)
from jobsync.testing.world import Occurrence

__all__ = ["check_places"]

_UNBLOCKED = ("ready", "waiting", "claimed")
_PENDING = (*_UNBLOCKED, "blocked")
_ROUNDING = 1e-5
_STEP = 10.0
"""Seconds by which clocks are set while a call is under way."""


def check_places(history: Sequence[Occurrence]) -> list[Violation]:
    """Check the groups, the keys and the order of messages after every commit.

    The first pending message of a group is the only one that is not blocked, and there is one; as
    many as may be handled at once, if that are more. A
    dead letter that is put back goes to the end. A message is added only if nobody holds its key,
    and who is told that another message holds it is told the truth. A claim leaves no ready message
    that comes before one of those that it takes. Checks what `RecordingBackend` records.
    """
    if not any(map(_has_place, history)):
        return []
    # A pending message in a page loses its key before another one takes it.
    released = {
        done.details["id"]: at for at, done in enumerate(history) if done.what == "key released"
    }
    limits = find_limits(history)
    most_heads = {queue: each["group_concurrency"] for queue, each in limits.items()}
    places = _Places(released, most_heads)
    violations = []
    for commit in list_commits(history):
        at = history[commit[0].at].at
        violations += [
            Violation(invariant, f"{problem} at {at:.3f} s, by {commit[0].request}")
            for invariant, problem in places.add(commit)
        ]
    return violations + [
        Violation("Q27", f"{problem}: {history[response.details['request']]} got {response}")
        for position, response in enumerate(history)
        if response.what == "response"
        for problem in places.check_response(
            history[response.details["request"]].details, response.details, position
        )
    ]


def _has_place(done: Occurrence) -> bool:
    """Whether a request is about a place: of a message, or in an order."""
    if done.what != "request":
        return False
    messages = done.details.get("messages", ())
    return "order" in done.details or any(message[4:] for message in messages)


class _Hold(NamedTuple):
    """A message that holds a key."""

    id: str
    until: float | None
    """By the clock of the store; None while it is pending."""
    since: int
    """How many commits there were before."""


class _Places:
    """What is known after each commit."""

    def __init__(self, released: Mapping[str, int], most_heads: Mapping[str, int]) -> None:
        self._released = released
        """The positions in the history at which messages have lost their keys."""
        self._most_heads = most_heads
        """How many messages of a group are handled at once, where it is not one."""
        self._rows: dict[str, RowDetails] = {}
        self._places: dict[str, RowDetails] = {}
        self._payloads: dict[str, str | None] = {}
        """What each message was pushed with."""
        self._counter = count()
        self._numbers: dict[str, int] = {}
        """Where each message stands: it increases with each push and each redrive."""
        self._groups: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        """The pending messages of each group, in their order."""
        self._ready: defaultdict[str, set[str]] = defaultdict(set)
        """The ready messages of each queue."""
        self._holds: dict[tuple[str, str], _Hold] = {}
        self._pending: defaultdict[str, list[list[int]]] = defaultdict(list)
        """The positions in the history from which and to which each message was pending."""
        self._held_until: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        """From which position each message holds its key for a time, and for how long."""
        self._times: list[tuple[int, float]] = []
        """The time of the store at each commit."""

    def add(self, commit: Sequence[MessageTransition]) -> Iterator[MessageProblem]:
        """Add a commit; return what it breaks."""
        self._times.append((commit[0].at, commit[0].after["now"]["wall"]))
        groups: dict[tuple[str, str], None] = {}
        if any(step.place.get("key") for step in commit):
            # By the state before this commit.
            yield from self._hold_keys(commit)
        for step in sorted(commit, key=_find_rank):
            self._add_step(step)
            if "group" in step.place:
                groups[_get_queue(step), step.place["group"]] = None
        for group in groups:
            yield from self._check_group(group)
        request = commit[0].request
        if request is not None and request["call"] == "claim" and not request["suspects"]:
            yield from self._check_order(commit, request.get("order", ""))

    def _add_step(self, step: MessageTransition) -> None:
        name, state = step.after["id"], step.after["state"]
        was_pending = step.before is not None and step.before["state"] in _PENDING
        is_pending = state in _PENDING
        queue = _get_queue(step)
        self._rows[name], self._places[name] = step.after, step.place
        self._payloads.setdefault(name, step.after.get("payload"))
        if is_pending and not was_pending:
            self._numbers[name] = next(self._counter)
            self._pending[name].append([step.at, -1])
        elif was_pending and not is_pending:
            self._pending[name][-1][1] = step.at
        (self._ready[queue].add if state == "ready" else self._ready[queue].discard)(name)
        if "group" in step.place:
            members = self._groups[queue, step.place["group"]]
            if is_pending:
                members.setdefault(name)
            else:
                members.pop(name, None)

    def _check_group(self, group: tuple[str, str]) -> Iterator[MessageProblem]:
        members = [*self._groups[group]]
        heads = [name for name in members if self._rows[name]["state"] in _UNBLOCKED]
        most = self._most_heads.get(group[0], 1)
        # With more than one at once, the order of a group is not kept.
        is_right = heads == members[:1] if most == 1 else len(heads) == min(most, len(members))
        if not is_right:
            found = {name: self._rows[name]["state"] for name in members}
            yield "Q9", f"of group {group[1]}, {heads or 'none'} can be claimed, of {found}"

    def _check_order(
        self, commit: Sequence[MessageTransition], order: str
    ) -> Iterator[MessageProblem]:
        taken = [step for step in commit if step.after["state"] == "claimed"]
        if not taken or not order:
            return
        last = max((self._rank(step.after["id"], order), step.after["id"]) for step in taken)
        left = self._ready[_get_queue(taken[0])]
        first = min(((self._rank(name, order), name) for name in left), default=None)
        if first is not None and first < last:
            yield "Q26", f"{last[1]} was claimed before {first[1]} ({last[0]}, {first[0]})"

    def _rank(self, name: str, order: str) -> tuple[int, int]:
        """Return where a message stands; less comes first."""
        number = self._numbers[name]
        if order == "lifo":
            return 0, -number
        return -self._places[name].get("priority", 0), number

    def _hold_keys(self, commit: Sequence[MessageTransition]) -> Iterator[MessageProblem]:
        """Find new messages whose keys others hold, and note who holds the keys now."""
        request, now = commit[0].request, commit[0].after["now"]["wall"]
        if request is None or request["call"] != "push":
            return
        messages = {message[0]: message for message in request["messages"]}
        for step in commit:
            queue, name = _get_queue(step), step.after["id"]
            if step.before is None and "key" in step.place and name in messages:
                key, ttl = (queue, step.place["key"]), step.place.get("key_ttl")
                hold = self._holds.get(key)
                is_released = hold is not None and self._released.get(hold.id, step.at) < step.at
                if hold is not None and not is_released and self._is_held(hold, **step.place):
                    yield "Q27", f"{name} was added, and {hold.id} holds the key {key[1]}"
                self._hold(
                    key, _Hold(name, None if ttl is None else now + ttl, len(self._times)), step.at
                )
            elif step.replacement:
                key, ttl = (queue, step.place["key"]), step.replacement[4].get("key_ttl")
                hold = self._holds.get(key)
                if hold is None or hold.id != name:
                    yield "Q27", f"{name} was replaced, and does not hold the key {key[1]}"
                self._hold(
                    key, _Hold(name, None if ttl is None else now + ttl, len(self._times)), step.at
                )

    def _hold(self, key: tuple[str, str], hold: _Hold, at: int) -> None:
        self._holds[key] = hold
        if hold.until is not None:
            self._held_until[hold.id].append((at, hold.until))

    def _is_held(self, hold: _Hold, *, replace: bool = False, **_: Any) -> bool:
        """Whether nobody else may be added with the key.

        A key that nobody held for a moment may have been removed, although a dead letter was put
        back since, or the clock.
        """
        state = self._rows[hold.id]["state"]
        if replace and state not in ("ready", "waiting", "blocked"):
            return False
        if hold.until is not None:
            latest = max(wall for _, wall in self._times[hold.since - 1 :])
            return latest < hold.until - _ROUNDING
        return state in _PENDING and len(self._pending[hold.id]) == 1

    def check_response(
        self, request: RowDetails, response: RowDetails, position: int
    ) -> Iterator[str]:
        """Find keys that were reported as held by messages that do not hold them."""
        result = response.get("result")
        if request["call"] != "push" or not result:
            return
        for name, payload, _, _, *place in request["messages"]:
            holder = result.get(name)
            # A push whose outcome was unknown is repeated: its message may be finished by now.
            if holder is None or self._payloads.get(holder) == payload:
                continue
            if holder not in self._places or self._places[holder].get("key") != place[0]["key"]:
                yield f"{holder} has another key"
            elif not self._has_held(holder, response["request"], position, request.get("wall")):
                yield f"{holder} does not hold the key {place[0]['key']}"

    def _has_held(self, name: str, start: int, end: int, wall: float | None) -> bool:
        """Whether a message can have held its key between two positions of the history."""
        is_pending = any(
            since < end and (until < 0 or until > start) for since, until in self._pending[name]
        )
        if wall is not None:
            # Where each machine has a clock of its own.
            return is_pending or any(
                at < end and wall - _STEP < until for at, until in self._held_until[name]
            )
        # Its time may have been set meanwhile.
        first = max(0, bisect_left(self._times, (start, 0.0)) - 1)
        last = bisect_right(self._times, (end, 0.0)) + 1
        earliest = min(wall for _, wall in self._times[first:last])
        return is_pending or any(
            at < end and earliest < until + _ROUNDING for at, until in self._held_until[name]
        )


def _get_queue(step: MessageTransition) -> str:
    row = step.after if "queue" in step.after else step.before or {}
    return str(row.get("queue", ""))


def _find_rank(step: MessageTransition) -> tuple[Any, ...]:
    """Return what sorts the messages of a commit: as pushed, or as dead letters are put back."""
    before, request = step.before, step.request
    if before is None and request is not None:
        names = [message[0] for message in request.get("messages", ())]
        name = step.after["id"]
        return (names.index(name) if name in names else len(names), name)
    return (0 if before is None else before.get("due", 0), step.after["id"])
