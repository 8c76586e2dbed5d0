"""Queues in pages, in a simulated world: what each commit of a page does to its messages.

A commit of a page changes several messages at once. `PageLog` reads each one and adds a row to the
history for every message that it has changed, as a database does; so `check_messages` and
`check_answers` apply to pages too. It finds out which call of a queue backend has made each change,
because a write carries the changes of all calls that wait for it.

A message is where its latest copy is: a page that says `move` has given it away as soon as the
target exists. Meanwhile it counts as what the move makes of it.

The log also checks the pages themselves, at each commit:

- A page that was dropped never comes back.
- A message is in one page, or in a page that moves it and in the target of that move.
- A page that is done stays done.
- Only pages that are done are dropped, an hour after their last change at the earliest.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from jobsync.core.codec import encode
from jobsync.stores.contract import BURIAL_AGE
from jobsync.testing.invariants import Violation
from jobsync.testing.rows import digest
from jobsync.testing.world import Occurrence, World

__all__ = ["FASTEST_CLOCK", "PageLog"]

FASTEST_CLOCK = 1.05
"""The highest rate of a machine's clock: by it, claims lapse earliest."""

_PREFIX = "page/"
_FINAL = ("completed", "moved")
_ROUNDING = 1.0
"""Seconds: the server tells times without the fraction."""

_PageValue: TypeAlias = Mapping[str, Any]
_MessageValue: TypeAlias = Mapping[str, Any]


class _Sent(NamedTuple):
    """How a write was sent, first."""

    request: int
    """The position of the call that sent it."""
    wall: float
    """The time of day on the machine that decided it."""
    at: int
    """Its own position in the history."""


class _StoredPage(NamedTuple):
    value: _PageValue
    messages: dict[str, _MessageValue]
    written: float
    """By the server's clock."""


class PageLog:
    """What the commits of pages have left.

    Args:
        world: its occurrences are read, and rows are added to its history.
        read_server_time: returns the time of day on the server.
    """

    def __init__(self, world: World, read_server_time: Callable[[], float]) -> None:
        self._world = world
        self._read_server_time = read_server_time
        self._latest = 0.0
        """The latest time of day that the server has had: its clock may be set back."""
        self._pages: dict[str, _StoredPage] = {}
        self._created: set[str] = set()
        """All pages that ever existed."""
        self._places: defaultdict[str, set[str]] = defaultdict(set)
        """The pages with each message."""
        self._rows: dict[str, tuple[_MessageValue, Mapping[str, Any]]] = {}
        """Each message as it was stored, and its row."""
        self._calls = _CallIndex()
        self._sent: dict[str, _Sent] = {}
        world.watch(self._watch)

    def find(self, name: str) -> str | None:
        """Return the key of the page that has a message."""
        return next(iter(self._find_live(name)), None)

    @property
    def keys(self) -> list[str]:
        """The keys of all pages."""
        return list(self._pages)

    def list_moving(self) -> list[str]:
        """Return the pages with moves that are not finished."""
        return [
            key
            for key, page in self._pages.items()
            if any(each.get("move", "") for each in page.messages.values())
        ]

    def _watch(self, done: Occurrence) -> Iterator[Violation]:
        details = done.details
        match done.what:
            case "request":
                self._calls.add(len(self._world.history) - 1, done)
            case "write":
                sent = _Sent(details["request"], details["wall"], len(self._world.history) - 1)
                for nonce in details["nonces"]:
                    self._sent.setdefault(nonce, sent)
            case "commit":
                # Also of a session: its time says which pages are old.
                self._read_time()
                if details["key"].startswith(_PREFIX):
                    yield from self._commit(done)
            case "drop":
                for key in details["keys"]:
                    if key in self._pages:
                        yield from self._drop(done, key)

    def _commit(self, done: Occurrence) -> Iterator[Violation]:
        key, value = done.details["key"], done.details["value"]
        before = self._pages.get(key)
        if before is None and key in self._created:
            yield Violation("P1", f"{key}: was dropped, and is there again at {done.at:.1f} s")
        messages = {each["id"]: each for each in _list_messages(value)}
        was_done = before is not None and _is_done(before.messages.values())
        if was_done and not _is_done(messages.values()):
            yield Violation("P3", f"{key}: was done, and is not at {done.at:.1f} s")
        self._created.add(key)
        self._pages[key] = _StoredPage(value, messages, self._read_server_time())
        former = {} if before is None else before.messages
        for name in former.keys() - messages.keys():
            self._places[name].discard(key)
        for name in messages:
            self._places[name].add(key)
        if _is_released(self._pages[key]) and not _is_released(before):
            for name in messages:
                self._world.note(done.node, "key released", id=name)
        sent = self._sent.get(done.details["nonce"])
        for name in dict.fromkeys((*former, *messages)):
            yield from self._update(done, name, sent)

    def _drop(self, done: Occurrence, key: str) -> Iterator[Violation]:
        page = self._pages.pop(key)
        if not _is_done(page.messages.values()):
            yield Violation("P4", f"{key}: was dropped before it was done: {page.value}")
        age = self._read_time() - page.written
        if age < BURIAL_AGE - _ROUNDING:
            yield Violation("P5", f"{key}: was dropped {age:.1f} s after its last change")
        for name in page.messages:
            self._places[name].discard(key)
            yield from self._update(done, name, None, age)

    def _read_time(self) -> float:
        self._latest = max(self._latest, self._read_server_time())
        return self._latest

    def _find_live(self, name: str) -> list[str]:
        """Return the pages in which a message is, and out of which no copy was made."""
        found = []
        for key in sorted(self._places[name]):
            message = self._pages[key].messages[name]
            target = message.get("move", "")
            is_copied = bool(target) and _resolve(key, target) in self._created
            if message.get("state", "ready") != "moved" and not is_copied:
                found.append(key)
        return found

    def _update(
        self, done: Occurrence, name: str, sent: _Sent | None, age: float | None = None
    ) -> Iterator[Violation]:
        """Add a row if a message has changed."""
        live = self._find_live(name)
        if len(live) > 1:
            yield Violation("P2", f"{name}: is in {live} at {done.at:.1f} s")
        before = self._rows.get(name)
        if not live:
            if before is not None and before[1]["state"] != "gone":
                self._note(done, name, sent, {}, {"state": "gone", "age": age})
            return
        stored = self._pages[live[0]].messages[name]
        message = {key: value for key, value in stored.items() if key != "move"}
        if before is None or before[0] != message:
            self._note(done, name, sent, message, self._describe(live[0], message))

    def _note(
        self,
        done: Occurrence,
        name: str,
        sent: _Sent | None,
        message: _MessageValue,
        facts: dict[str, Any],
    ) -> None:
        _, before = self._rows.get(name, ({}, {}))
        self._rows[name] = (message, facts)
        clock = self._world.components.clock
        wall = self._read_time() if sent is None else sent.wall
        now = {"wall": wall, "mono": clock.mono().seconds, "boot": clock.boot()}
        if facts["state"] == "gone" and facts["age"] is None:
            # Removed by a write, for which the clock of its machine counts.
            facts["age"] = wall - before["due"]
        request = None
        if done.node:
            until = len(self._world.history) if sent is None else sent.at
            own = None if sent is None else sent.request
            request = self._calls.find(done.node, name, before, facts, own, until)
        self._world.note(done.node, "row", request=request, id=name, now=now, **facts)

    def _describe(self, key: str, message: _MessageValue) -> dict[str, Any]:
        page = self._pages[key]
        state = message.get("state", "ready")
        clock = self._world.components.clock
        is_claimed = state == "claimed"
        claim = message["claim"] if is_claimed else ""
        sessions = {each["id"]: each["session"] for each in page.value.get("claims", ())}
        due = message.get("due", 0.0)
        if is_claimed:
            due = clock.mono().seconds + message["hold"] / FASTEST_CLOCK
        elif state not in {"ready", "waiting"}:
            due = message["finished"]
        value = message.get("value")
        return {
            "queue": key.split("/")[1],
            "state": state,
            "payload": None if state == "completed" else digest(encode(value, "message").decode()),
            "deliveries": message.get("deliveries", 0),
            "returned": message.get("returned", 0),
            "max_attempts": message.get("max_attempts", 4),
            "suspect": int(message.get("is_suspect", False)),
            "claim": claim,
            "session": sessions.get(claim, ""),
            "due": due,
            "boot": clock.boot(),
            "wakes": None,
            "trail": message.get("marks", ""),
            "errors": len(message.get("errors", ())),
        }


class _CallIndex:
    """The calls of queue backends, to find the one that has made a change."""

    def __init__(self) -> None:
        self._by_node: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        """The positions of calls, by node and name."""
        self._by_message: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
        """Those that name a message and its claim, by call."""
        self._names: dict[int, str] = {}

    def add(self, position: int, request: Occurrence) -> None:
        """Add a call."""
        details = request.details
        call = details["call"]
        self._names[position] = call
        self._by_node[request.node, call].append(position)
        if call == "forget":
            self._by_node[request.node, f"forget {details['state']}"].append(position)
        if "id" in details:
            self._by_message[call, details["id"], ""].append(position)
        for name, *_ in details.get("messages", ()):
            self._by_message["push", name, ""].append(position)
        for name, claim, *_ in details.get("receipts", ()):
            self._by_message[call, name, claim].append(position)

    def find(
        self,
        node: str,
        name: str,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        own: int | None,
        until: int,
    ) -> int | None:
        """Return the position of the call that changed a message; None if none is known.

        Args:
            node: the node that has sent the write.
            name: the message.
            before: its row before, if there was one.
            after: its row after.
            own: the call that sent the write, which may have carried the changes of others.
            until: the position of the write.
        """
        claim = before.get("claim", "")
        if call := _find_outside_call(before, after):
            found = self._by_message[call, name, ""]
            if found and (call != "delete" or own is not None):
                return found[max(bisect_left(found, until) - 1, 0)]
        match before.get("state"), after["state"]:
            case None, _:
                found = self._by_message["push", name, ""]
            case "claimed", "claimed":
                found = self._by_message["extend", name, claim]
            case "claimed", state if state != "gone" and after["trail"] != before["trail"]:
                found = self._by_message["settle", name, claim]
            case "claimed", state if state != "gone":
                # Any write ends the claims that have lapsed, too.
                return own if self._names.get(own or -1) == "end_claims" else None
            case _, "claimed":
                found = self._by_node[node, "claim"]
            case "dead" | "cancelled", "waiting":
                found = self._by_node[node, "redrive"]
            case state, "gone" if own is None:
                found = self._by_node[node, f"forget {state}"]
            case _:
                return own
        earlier = bisect_left(found, until)
        return found[earlier - 1] if earlier else own


def _find_outside_call(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the call about one message that may have made a change; empty if none may."""
    match before.get("state"), after["state"]:
        case "ready" | "waiting", "cancelled":
            return "cancel"
        case "claimed", "cancelled" if after["trail"].partition(" ")[0].endswith(":revoke"):
            return "cancel"
        case "waiting", "waiting":
            return "run_now"
        case _, "gone":
            return "delete"
    return ""


def _list_messages(value: Any) -> list[_MessageValue]:
    """Return the messages of a page; none if it was damaged."""
    messages = value.get("messages") if isinstance(value, dict) else None
    return list(messages) if isinstance(messages, list | tuple) else []


def _is_released(page: _StoredPage | None) -> bool:
    """Whether the pending message of a page has lost its key, before another one takes it."""
    hold = page.value.get("key_hold") if page is not None and isinstance(page.value, dict) else None
    return bool((hold or {}).get("is_released", False))


def _is_done(messages: Iterable[_MessageValue]) -> bool:
    return all(
        each.get("state", "ready") in _FINAL and not each.get("move", "") for each in messages
    )


def _resolve(key: str, target: str) -> str:
    """Return the key of a page that another one names as `lane/name`."""
    return f"{key.rsplit('/', 2)[0]}/{target}"
