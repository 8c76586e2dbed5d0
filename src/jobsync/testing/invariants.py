"""What must hold in every history, whatever the weather.

Checked in the order in which the store committed, not in the order in which anybody heard
of it. Each function gives the violations that it found; none is what a run must show.

Each key must be linearizable. That is hard to decide in general, and easy here, where the
commits stand in the history in the order in which they took effect: every answer only has
to fit some moment between its question and its arrival.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import attrgetter

import msgspec

from jobsync.coordination.role import worker_of
from jobsync.core.keys import parent
from jobsync.testing.violations import Violation
from jobsync.testing.world import Occurrence

__all__ = ["check_commits", "check_replies", "check_roles", "check_takes"]


class _State(msgspec.Struct, frozen=True):
    """What stood under a key from some place of the history on."""

    since: int
    nonce: str | None = None
    """Marks the write that left it; None where nothing was there."""
    base: str | None = None
    seq: int = 0
    epoch: int = 0
    deleted: bool = False
    unless: "_State | None" = None
    """The tombstone that still stands there, if the burial left it alone."""


def check_commits(history: Sequence[Occurrence]) -> list[Violation]:
    """Check what the store promises to writers.

    Each key is one chain, in which every write stands on the one before it; so a name is
    created once in its life, however many try. No version comes twice. No epoch goes back.
    """
    violations = []
    nonces: set[str] = set()
    for key, line in _lines_of(history).items():
        for there, state in pairwise(line):
            if state.nonce is None:
                continue
            before = there.unless if there.unless and state.base else there
            if (state.base, state.seq) != (before.nonce, before.seq + 1):
                is_create = state.base is None and before.nonce is not None
                found = f"{key}: a write is not based on the one before it: {state}"
                violations.append(Violation("C3" if is_create else "C1", found))
            if state.epoch < before.epoch:
                violations.append(Violation("E3", f"{key}: the epoch went back: {state}"))
            if state.nonce in nonces:
                violations.append(Violation("C2", f"{key}: a write was applied twice: {state}"))
            nonces.add(state.nonce)
    return violations


def check_replies(history: Sequence[Occurrence]) -> list[Violation]:
    """Check what the store promises to whoever asks: the truth, of some moment in between.

    What was read was there at a moment between the question and the answer. What is called
    applied was applied in that time. What is called conflicted or refused never was, and a
    conflict had a reason. What is called unknown may be either. Judges the notes that
    `RecordingStore` makes.
    """
    lines = _lines_of(history)
    applied = {
        done.details["nonce"]: at for at, done in enumerate(history) if done.what == "commit"
    }
    violations: list[Violation] = []
    for at, heard in enumerate(history):
        if heard.what == "read":
            violations += _judge_read(lines, heard, at)
        elif heard.what == "reply":
            problem = _judge_write(lines, heard, at, applied.get(heard.details["nonce"]))
            violations += [Violation("C4", f"{problem}: {heard}")] if problem else []
    return violations


def check_roles(history: Sequence[Occurrence]) -> list[Violation]:
    """Check that each take of a role has an epoch of its own, higher than all before it."""
    highest: dict[str, int] = {}
    owners: dict[tuple[str, int], str] = {}
    violations = []
    for done in history:
        if done.what != "commit" or not done.details["key"].startswith("role/"):
            continue
        key, role = done.details["key"], done.details["value"]
        if role["epoch"] < highest.get(key, 0):
            violations.append(Violation("E1", f"{key}: the epoch went back: {done}"))
        owner = role["owner"]
        # A renewal keeps epoch and owner, a release the epoch.
        if owner is not None and owners.setdefault((key, role["epoch"]), owner) != owner:
            violations.append(Violation("E2", f"{key}: an epoch has two owners: {done}"))
        highest[key] = max(highest.get(key, 0), role["epoch"])
    return violations


def check_takes(history: Sequence[Occurrence]) -> list[Violation]:
    """Check that a role is taken only where it is free: nobody who lives is usurped.

    It never had an owner, or that one gave it up, or the owner's death is written, or the
    owner's session is gone. What a session of one's own held may be taken anew.
    """
    owners: dict[str, str] = {}
    over: set[str] = set()
    violations = []
    for done in history:
        if done.what == "drop":
            over.update(done.details["keys"])
        if done.what != "commit":
            continue
        key, value = done.details["key"], done.details["value"]
        # What a person has spoilt is nobody's.
        facts = value if isinstance(value, dict) else {}
        if key.startswith("session/") and facts.get("state") != "live":
            over.add(key)
        elif key.startswith("role/"):
            before, owner = owners.get(key, ""), facts.get("owner") or ""
            is_free = not before or f"session/{before}" in over
            if owner and not is_free and worker_of(owner) != worker_of(before):
                found = f"{key}: taken from {before}, who lives: {done}"
                violations.append(Violation("EL4", found))
            owners[key] = owner
    return violations


def _lines_of(history: Sequence[Occurrence]) -> dict[str, list[_State]]:
    """Give for each key what stood there, one after the other."""
    lines: dict[str, list[_State]] = defaultdict(lambda: [_State(-1)])
    for at, done in enumerate(history):
        facts = done.details
        if done.what == "commit":
            names = ("nonce", "base", "seq", "epoch", "deleted")
            lines[facts["key"]].append(_State(at, *(facts[name] for name in names)))
        elif done.what == "drop":
            for key in facts["keys"]:
                lines[key].append(_State(at))
        elif done.what == "bury":
            for key, line in lines.items():
                if line[-1].deleted and parent(key) == facts["prefix"]:
                    line.append(_State(at, unless=line[-1]))
    return lines


def _seen(line: Sequence[_State], asked: int, answered: int) -> Iterator[_State]:
    """Give what stood under a key at some moment between two places of the history."""
    since = attrgetter("since")
    first = bisect_left(line, asked, key=since) - 1
    for state in line[first : bisect_left(line, answered, key=since)]:
        yield state
        if state.unless:
            yield state.unless


def _judge_read(lines: dict[str, list[_State]], heard: Occurrence, at: int) -> Iterator[Violation]:
    facts = heard.details
    for key, nonce in zip(facts["keys"], facts["nonces"], strict=True):
        shown = {
            None if state.deleted and not facts["tombstones"] else state.nonce
            for state in _seen(lines[key], facts["since"], at)
        }
        if nonce not in shown:
            yield Violation("C1", f"{key}: read as {nonce}, was {shown}: {heard}")


def _judge_write(
    lines: dict[str, list[_State]], heard: Occurrence, at: int, applied: int | None
) -> str:
    facts = heard.details
    match facts["outcome"]:
        case "Applied" if applied is None or not facts["since"] <= applied < at:
            return "told applied, was not"
        case "Conflicted" | "Refused" if applied is not None:
            return f"told {facts['outcome'].lower()}, was applied"
        case "Conflicted":
            seen = _seen(lines[facts["key"]], facts["since"], at)
            if all(state.nonce == facts["base"] for state in seen):
                return "told conflicted, nothing stood in the way"
    return ""
