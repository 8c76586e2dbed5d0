"""The promises that simulated runs check, and the checks of stores and roles.

Each promise has an id, which every violation names. A test with a mutant requires that the promise
which it breaks was reported, so an id that is not in `INVARIANTS` is rejected.

Checks go by the order in which the store committed, not by the order in which anybody received a
reply. Each check returns the violations that it finds.

Each key must be linearizable. That is hard to decide in general and easy here, because commits are
in the history in the order in which they took effect: every reply only has to fit some moment
between its request and its arrival.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NoReturn

import msgspec

from jobsync.coordination.role import worker_of
from jobsync.core.keys import parent
from jobsync.errors import Invalid

if TYPE_CHECKING:
    from jobsync.testing.world import Occurrence

__all__ = [
    "INVARIANTS",
    "InvariantBroken",
    "Violation",
    "as_violation",
    "check_commits",
    "check_replies",
    "check_roles",
    "check_takes",
    "describe_failure",
    "fail",
    "is_defect",
    "require",
]

INVARIANTS: Mapping[str, str] = {
    # Stores.
    "C1": "The history of each key is linearizable.",
    "C2": "No version of a record occurs twice.",
    "C3": "Of several concurrent creates of one key exactly one succeeds.",
    "C4": "A writer learns the outcome of its write, or that it is unknown.",
    "C5": "Lines are in a history once if their writer was told so, and never if refused.",
    "C6": "What a removal reports as gone is gone, and nothing else is.",
    # Locks.
    "L1": "At most one caller holds a lock.",
    "L2": "The fence of a lock grows with each holder.",
    "L3": "A lock that nobody holds can be taken within a bound.",
    # Elections.
    "E1": "The epochs of a role never decrease, in commit order.",
    "E2": "An epoch of a role has one owner.",
    "E3": "No write of an earlier epoch is accepted after one of a later epoch.",
    "E4": "At most one worker believes that it leads, while clocks keep their rate.",
    "E5": "No session is declared dead that still trusts itself, and none trusts itself later.",
    "E6": "Each term is reported to its worker once: gained, then lost, before the next.",
    "EL1": "Soon after all faults end there is one leader, and every worker has a session.",
    "EL2": "After a clean stop another worker leads within two heartbeats.",
    "EL4": "A role is never taken from an owner whose session is live.",
    "EL5": "A worker that was chosen by name leads next.",
    "EL6": "A dead leader is replaced within its timeout, one heartbeat and a moment.",
    "EL7": "A database that has failed gives up its roles, and another one leads.",
    "EL8": "A leader whose process has ended is replaced at once by one that can see this.",
    # Ownership of tokens and tasks.
    "T1": "A token has at most one owner, which the current assignment names.",
    "T2": "A claim of a former owner can neither run nor finish.",
    "T3": "A token changes owner only after the old owner acknowledged, left or died.",
    "T5": "Only the share of a node that joins or leaves moves.",
    "T6": "A task has one claim at a time; a dead owner's claim is retaken after a delay.",
    "T7": "A task is done once, unless a process died with it in progress.",
    "T8": "A node's name belongs to one process; a second one is refused.",
    "T9": "A node owns tokens only after enough nodes have joined, and an observer never does.",
    "T10": "Nodes that own tokens have the same settings.",
    "T11": "A node claims nothing that it has pinned to other nodes.",
    "TL1": "All tokens are owned within a bound after all faults end.",
    "TL2": "The nodes' shares differ by at most one token.",
    "TL3": "Every task is done within a bound.",
    # Queues.
    "Q1": "A message that was acknowledged is handled or becomes a dead letter.",
    "Q2": "Every message was pushed, and keeps its payload.",
    "Q3": "One push makes one message.",
    "Q4": "A message never has two valid claims, in commit order.",
    "Q5": "A stale receipt can neither settle nor extend a claim.",
    "Q6": "Attempts are counted: a clean return costs none, the last one makes a dead letter.",
    "Q7": "A batch is pushed as a whole or not at all.",
    "Q8": "A delayed message is not claimed before its time.",
    "Q9": "Of a group, only the first pending message can be claimed, and always this one.",
    "Q10": "A message changes state only as its life cycle allows, and only on request.",
    "Q11": "A suspect is claimed apart from other messages.",
    "Q12": "A failed delivery adds one error to its message, and nothing else does.",
    "Q13": "A claim ends only when it is settled, has lapsed, or its session is dead.",
    "Q14": "A handler runs only while its claim is valid.",
    "Q15": "A caller of the queue learns what happened.",
    "Q16": "A message is handled once while nothing fails.",
    "Q17": "A message that cannot be read becomes a dead letter, and fails no worker.",
    "Q18": "A worker that stops in good order returns all its claims.",
    "Q19": "A handler knows that its claim has ended before its message is handled again.",
    "Q20": "A message whose handler has started is returned only by a worker that stops.",
    "Q21": "A process stops within its grace period and two seconds, whatever its handlers do.",
    "Q22": "A process that stops claims nothing more, and leaves only user code behind.",
    "Q23": "A process that has stopped has told its handlers, and reported all its messages.",
    "Q24": "A finished message is kept for its time, and removed soon after it.",
    "Q25": "No message of a paused queue is claimed.",
    "Q26": "A claim on a database, and a worker alone, take messages in the order of the queue.",
    "Q27": "A key is held by one message: while it is pending, or for its time.",
    "Q28": "No claim exceeds the limits of its queue: at a time, of a group, or in a time.",
    "Q29": "What a handler writes in its transaction is committed once, with the completion.",
    "Q30": "A result is what the handler has returned that has completed the message.",
    "Q31": "A worker claims only messages of the tasks that it knows.",
    # Pages of queues on object stores.
    "P1": "A page that was dropped never comes back.",
    "P2": "A message is in one page, or in one that moves it and in the target.",
    "P3": "A page that is done stays done.",
    "P4": "A page is dropped only when all its messages are finished or moved.",
    "P5": "A page is dropped an hour after its last change at the earliest.",
    "PL1": "A move that was begun is finished within a bound.",
    # Queues, within a bound.
    "QL1": "A poisonous message delays others by no more than a bound.",
    "QL2": "A message whose claim ended is claimed again within a bound.",
    "QL3": "A queue is drained within a bound.",
    "QL4": "The claims of a session that has ended are ended within a bound.",
    "QL5": "A delayed message is handled within a bound after its time.",
    # Schedules.
    "K1": "An instant of a job is decided once, and has at most one firing record, ever.",
    "K2": "Every instant that was due is fired, or in the history with the reason.",
    "K3": "No instant is fired before its time, by the server's clock or one close to it.",
    "K4": "Runs overlap only where that is allowed; a run changes hands after its owner's end.",
    "K5": "Two attempts of a run never overlap in one process.",
    "K6": "Late instants are fired only as many as the job allows.",
    "K7": "A changed schedule never fires an instant before the change.",
    "K8": "A run is started by its owner, once, after its firing record; its result stays.",
    "KL1": "Firing resumes within a bound after an outage of any length.",
    "KL2": "A fired instant is executed to its end, again if its process has died.",
    "KL3": "A run that is over has an end in the history within a bound.",
    # Records, their indexes and their expiry.
    "X1": "No record is removed, marked or moved before it has expired, but by its user.",
    "X2": "An archived record has one copy: never none, and never one of a record that lives.",
    "X3": "Expiry changes a record once, as its rule says, and nothing else in it.",
    "X4": "A record has its entry in each index that is ready, at every moment.",
    "X5": "A lookup finds what belongs there, and nothing else.",
    "X6": "A verb says truly whether it has written.",
    "XL1": "Nothing that has expired stays longer than an interval and a bound.",
    "XL2": "An entry that no record names is gone within a bound, where a sweep passes.",
    "XL3": "A new index is ready within a bound.",
    # Everything.
    "A1": "No background task dies of an exception, or of a request of its own that is invalid.",
    "user": "A check that you wrote yourself has returned plain text.",
    "crash": "The code under test or the story has a defect; no promise was checked.",
}
"""The promise of each id, or its meaning."""

_DEFECTS = (AttributeError, ImportError, NameError, TypeError)


class Violation(msgspec.Struct, frozen=True):
    """A promise that was broken.

    Args:
        invariant: the id of the promise, one of `INVARIANTS`.
        detail: what was observed.

    Raises:
        Invalid: the id is unknown.
    """

    invariant: str
    detail: str

    def __post_init__(self) -> None:
        if self.invariant not in INVARIANTS:
            raise Invalid(
                "invariant", self.invariant, "is not a known id", "use one of INVARIANTS, or 'user'"
            )

    def __str__(self) -> str:
        return f"{self.invariant}: {self.detail}"


class InvariantBroken(AssertionError):
    """Raised by a story that finds a broken promise.

    Attributes:
        violation: the broken promise.
    """

    def __init__(self, violation: Violation) -> None:
        super().__init__(str(violation))
        self.violation = violation


def require(condition: object, invariant: str, detail: str) -> None:
    """Check a promise inside a story.

    Raises:
        InvariantBroken: the condition does not hold.
    """
    if not condition:
        fail(invariant, detail)


def fail(invariant: str, detail: str) -> NoReturn:
    """Report from inside a story that a promise is broken.

    Raises:
        InvariantBroken: always.
    """
    raise InvariantBroken(Violation(invariant, detail))


def as_violation(found: Violation | str) -> Violation:
    """Return what a check has found as a violation; plain text gets the id "user"."""
    return found if isinstance(found, Violation) else Violation("user", found)


def describe_failure(error: object, detail: str) -> Violation:
    """Return the violation for an unhandled exception in the background.

    A defect, such as a missing attribute, breaks no promise.
    """
    return Violation("crash" if is_defect(error) else "A1", detail)


def is_defect(error: object, known: frozenset[int] = frozenset()) -> bool:
    """Whether an exception, or one that led to it, is a programming error.

    Args:
        error: the exception.
        known: those that were looked at. Causes may form a circle.
    """
    if not isinstance(error, BaseException) or id(error) in known:
        return False
    known |= {id(error)}
    if isinstance(error, BaseExceptionGroup):
        return any(is_defect(each, known) for each in error.exceptions)
    return isinstance(error, _DEFECTS) or is_defect(error.__cause__ or error.__context__, known)


class _Version(msgspec.Struct, frozen=True):
    """What a key held from some position of the history on."""

    since: int
    nonce: str | None = None
    """Identifies the write; None if there was no record."""
    base: str | None = None
    seq: int = 0
    epoch: int = 0
    deleted: bool = False
    unless: _Version | None = None
    """The tombstone that is still there if the burial has left it alone."""


def check_commits(history: Sequence[Occurrence]) -> list[Violation]:
    """Check what the store promises to writers.

    The versions of a key form one chain: every write is based on the one before it, and of several
    concurrent creates one succeeds. No version occurs twice, and no epoch decreases. A late copy of
    a create may bring back a record that was dropped.
    """
    violations = []
    nonces: set[str] = set()
    for key, versions in _list_versions(history).items():
        for previous, version in pairwise(versions):
            if version.nonce is None:
                continue
            before = previous.unless if previous.unless and version.base else previous
            if (version.base, version.seq) != (before.nonce, before.seq + 1):
                is_create = version.base is None and before.nonce is not None
                detail = f"{key}: a write is not based on the one before it: {version}"
                violations.append(Violation("C3" if is_create else "C1", detail))
            if version.epoch < before.epoch:
                violations.append(Violation("E3", f"{key}: the epoch decreased: {version}"))
            if version.nonce in nonces and not _is_late_copy(version, previous):
                violations.append(Violation("C2", f"{key}: a write was applied twice: {version}"))
            nonces.add(version.nonce)
    return violations


def check_replies(history: Sequence[Occurrence]) -> list[Violation]:
    """Check that the replies of the store are true of some moment between request and reply.

    A version that was read existed at such a moment. A write that was reported as applied was
    applied in that time. One that was reported as conflicted or refused was never applied, and a
    conflict had a cause. An unknown one may be either. Checks what `RecordingStore` records.
    """
    versions = _list_versions(history)
    applied: dict[str, int] = {}
    for at, commit in enumerate(history):
        if commit.what == "commit":
            # A late copy of a create may bring back what was dropped.
            applied.setdefault(commit.details["nonce"], at)
    violations: list[Violation] = []
    for at, reply in enumerate(history):
        if reply.what == "read":
            violations += _check_read(versions, reply, at)
        elif reply.what == "reply":
            problem = _check_write(versions, reply, at, applied.get(reply.details["nonce"]))
            violations += [Violation("C4", f"{problem}: {reply}")] if problem else []
    return violations


def check_roles(history: Sequence[Occurrence]) -> list[Violation]:
    """Check that the epochs of a role never decrease, and that each has one owner."""
    highest: dict[str, int] = {}
    owners: dict[tuple[str, int], str] = {}
    violations = []
    for commit in history:
        if commit.what != "commit" or not commit.details["key"].startswith("role/"):
            continue
        key, role = commit.details["key"], commit.details["value"]
        if role["epoch"] < highest.get(key, 0):
            violations.append(Violation("E1", f"{key}: the epoch decreased: {commit}"))
        owner = role["owner"]
        # A renewal keeps the epoch and the owner, a release keeps the epoch.
        if owner is not None and owners.setdefault((key, role["epoch"]), owner) != owner:
            violations.append(Violation("E2", f"{key}: an epoch has two owners: {commit}"))
        highest[key] = max(highest.get(key, 0), role["epoch"])
    return violations


def check_takes(history: Sequence[Occurrence]) -> list[Violation]:
    """Check that no role is taken from a live owner.

    A role is free if it never had an owner, if the owner has released it, or if the session of the
    owner is dead or gone. A worker may take over from an earlier session of its own.
    """
    owners: dict[str, str] = {}
    ended: set[str] = set()
    violations = []
    for done in history:
        if done.what == "drop":
            ended.update(done.details["keys"])
        if done.what != "commit":
            continue
        key, value = done.details["key"], done.details["value"]
        # A record that somebody has overwritten with something else has no owner.
        record = value if isinstance(value, dict) else {}
        if key.startswith("session/") and record.get("state") != "live":
            ended.add(key)
        elif key.startswith("role/"):
            before, owner = owners.get(key, ""), record.get("owner") or ""
            is_free = not before or f"session/{before}" in ended
            if owner and not is_free and worker_of(owner) != worker_of(before):
                detail = f"{key}: taken from {before}, which is live: {done}"
                violations.append(Violation("EL4", detail))
            owners[key] = owner
    return violations


def _list_versions(history: Sequence[Occurrence]) -> dict[str, list[_Version]]:
    """Return the versions of each key, in order."""
    versions: dict[str, list[_Version]] = defaultdict(lambda: [_Version(-1)])
    for at, done in enumerate(history):
        details = done.details
        if done.what == "commit":
            names = ("nonce", "base", "seq", "epoch", "deleted")
            versions[details["key"]].append(_Version(at, *(details[name] for name in names)))
        elif done.what == "drop":
            for key in details["keys"]:
                versions[key].append(_Version(at))
        elif done.what == "bury":
            for key, chain in versions.items():
                if chain[-1].deleted and parent(key) == details["prefix"]:
                    chain.append(_Version(at, unless=chain[-1]))
    return versions


def _is_late_copy(version: _Version, previous: _Version) -> bool:
    """Whether a version can be the late copy of the create of a record that was dropped."""
    is_dropped = previous.nonce is None and previous.unless is None and previous.since >= 0
    return is_dropped and version.base is None


def _list_visible(chain: Sequence[_Version], start: int, end: int) -> Iterator[_Version]:
    """Yield the versions that a key had between two positions of the history."""
    since = attrgetter("since")
    first = bisect_left(chain, start, key=since) - 1
    for version in chain[first : bisect_left(chain, end, key=since)]:
        yield version
        if version.unless:
            yield version.unless


def _check_read(
    versions: dict[str, list[_Version]], reply: Occurrence, at: int
) -> Iterator[Violation]:
    details = reply.details
    for key, nonce in zip(details["keys"], details["nonces"], strict=True):
        possible = {
            None if version.deleted and not details["tombstones"] else version.nonce
            for version in _list_visible(versions[key], details["since"], at)
        }
        if nonce not in possible:
            yield Violation("C1", f"{key}: read {nonce}, expected one of {possible}: {reply}")


def _is_dropped(versions: Sequence[_Version], after: int, before: int) -> bool:
    """Whether a record was dropped between two moments."""
    return any(
        version.nonce is None and version.unless is None and after < version.since < before
        for version in versions
    )


def _check_write(
    versions: dict[str, list[_Version]], reply: Occurrence, at: int, applied: int | None
) -> str:
    details = reply.details
    match details["outcome"]:
        case "Applied" if applied is None or not details["since"] <= applied < at:
            return "reported as applied, but was not"
        case "Conflicted" if applied is not None and _is_dropped(
            versions[details["key"]], *sorted((applied, at))
        ):
            # What was applied was dropped without a trace, and is there again by another write. Or
            # what was in conflict was dropped, and a late copy was applied.
            return ""
        case "Conflicted" | "Refused" if applied is not None:
            return f"reported as {details['outcome'].lower()}, but was applied"
        case "Conflicted":
            visible = _list_visible(versions[details["key"]], details["since"], at)
            if all(version.nonce == details["base"] for version in visible):
                return "reported as conflicted, but nothing was in conflict"
    return ""
