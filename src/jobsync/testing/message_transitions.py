"""The transitions of the messages of a queue, from the rows that a database committed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from jobsync.testing.world import Occurrence

__all__ = [
    "MessageProblem",
    "MessageTransition",
    "RowDetails",
    "list_commits",
    "list_ended_sessions",
    "list_transitions",
]

RowDetails: TypeAlias = Mapping[str, Any]

_PLAIN = 4
"""The length of the description of a message that just goes to the end of the queue."""

MessageProblem: TypeAlias = tuple[str, str]
"""The id of an invariant, and how it is broken."""


class MessageTransition(msgspec.Struct, frozen=True):
    """A message before and after a commit."""

    at: int
    """The position in the history."""
    before: RowDetails | None
    after: RowDetails
    request: RowDetails | None
    """The call of the backend, if it was recorded."""
    is_tampered: bool
    """Whether the message was ever changed without the library."""
    dead_sessions: set[str]
    """The sessions that were dead by then, by a write."""
    place: RowDetails = {}
    """The priority, the group and the key that it was pushed with, if it has any."""

    def increase(self, field: str) -> int:
        """Return by how much a counter has grown."""
        return int(self.after[field] - (self.before or {}).get(field, 0))

    @property
    def is_last_attempt(self) -> bool:
        """Whether no attempt is left, counting the claim before it."""
        before = self.before or {}
        return bool(before["deliveries"] - before["returned"] >= before["max_attempts"])

    @property
    def settlement(self) -> str:
        """The settlement as the message records it, claim:move; empty if it was not settled."""
        trail = self.after.get("trail", "")
        return "" if trail == (self.before or {}).get("trail") else trail.partition(" ")[0]

    def is_by(self, call: str) -> bool:
        """Whether this call made it, as far as is known."""
        return self.request is None or self.request["call"] == call

    @property
    def replacement(self) -> Sequence[Any] | None:
        """The message of the request that replaces this one, if there is one."""
        if self.before is None or self.request is None or "key" not in self.place:
            return None
        key = self.place["key"]
        for message in self.request.get("messages", ()):
            if len(message) > _PLAIN and message[4].get("replace") and message[4]["key"] == key:
                return list(message)
        return None

    @property
    def has_receipt(self) -> bool:
        """Whether the call had the receipt of the claim, as far as is known."""
        if self.request is None:
            return True
        before = self.before or {}
        receipt = [before["id"], before["claim"], before["deliveries"]]
        return any(each[:3] == receipt for each in self.request.get("receipts", ()))

    def __str__(self) -> str:
        by = "" if self.request is None else f" by {self.request['call']}"
        return f"[{_show(self.before or {})}] ──▶ [{_show(self.after)}]{by}"


def _show(row: RowDetails) -> str:
    hidden = ("id", "queue", "now", "request")
    return ", ".join(f"{name} {value}" for name, value in row.items() if name not in hidden)


def list_ended_sessions(done: Occurrence) -> list[str]:
    """Return the sessions that a write has ended."""
    details = done.details
    if done.what == "drop":
        return [key.removeprefix("session/") for key in details["keys"]]
    if done.what != "commit" or not details["key"].startswith("session/"):
        return []
    value = details["value"]
    is_live = isinstance(value, dict) and value.get("state") == "live"
    return [] if is_live and not details["deleted"] else [details["key"].removeprefix("session/")]


def list_transitions(history: Sequence[Occurrence]) -> Iterator[MessageTransition]:
    """Yield the transitions of all messages, in commit order."""
    rows: dict[str, RowDetails] = {}
    tampered: set[str] = set()
    dead: set[str] = set()
    places: dict[str, RowDetails] = {}
    for at, done in enumerate(history):
        details = done.details
        dead.update(list_ended_sessions(done))
        if done.what == "request":
            for message in details.get("messages", ()):
                if len(message) > _PLAIN:
                    places[message[0]] = message[4]
        if done.what == "row":
            name, position = details["id"], details["request"]
            if not done.node:
                tampered.add(name)
            request = None if position is None else history[position].details
            place = places.get(name, {})
            yield MessageTransition(
                at, rows.get(name), details, request, name in tampered, dead, place
            )
            rows[name] = details


def list_commits(history: Sequence[Occurrence]) -> Iterator[list[MessageTransition]]:
    """Yield the transitions of all messages, those of one commit together.

    The rows of a commit are recorded one after the other, and each message is among them once.
    """
    commit: dict[str, MessageTransition] = {}
    last: tuple[object, ...] = ()
    for step in list_transitions(history):
        done, name = history[step.at], step.after["id"]
        facts = (step.at, done.at, done.node, done.details["request"])
        if commit and (facts != last or name in commit):
            yield [*commit.values()]
            commit = {}
        commit[name] = step
        last = (step.at + 1, *facts[1:])
    if commit:
        yield [*commit.values()]
