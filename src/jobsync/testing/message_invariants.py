"""What must hold of a queue's messages in every history, whatever the weather.

Judged by the rows, in the order in which the database committed them, and not by what anybody
heard. The rules stand here a second time, apart from the code that obeys them: that is what
makes them a check. Each function gives the violations that it found.

A message moves only so:

    nothing ──▶ ready, waiting               by a push, all of a batch at once
    ready, waiting ──▶ claimed               when its time has come; one delivery more
    claimed ──▶ claimed                      extended, by whoever holds that very claim
    claimed ──▶ any other                    settled, by whoever holds that very claim
    claimed ──▶ waiting, dead                ended, when it has lapsed or its session is dead
    dead, cancelled ──▶ waiting              redriven
    completed, cancelled, dead ──▶ gone      forgotten, or purged
    ready, waiting ──▶ gone                  purged
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from jobsync.testing.violations import Violation
from jobsync.testing.world import Occurrence

__all__ = ["check_answers", "check_drained", "check_messages", "check_redelivered"]

_Details: TypeAlias = Mapping[str, Any]

_Problem: TypeAlias = tuple[str, str]
"""The id of a promise, and what breaks it."""

_PENDING = ("ready", "waiting")
_FINISHED = ("completed", "cancelled", "dead")
_SETTLED: Mapping[str, tuple[str, int, int]] = {
    "complete": ("completed", 0, 0),
    "cancel": ("cancelled", 0, 0),
    "retry": ("waiting", 0, 1),
    "bury": ("dead", 0, 1),
    "release": ("waiting", 1, 0),
    "snooze": ("waiting", 1, 0),
}
"""The state that a settlement leads to, how much more is returned, how many errors are added."""

_LOST_IN_FLOATS = 1e-6


class _Step(msgspec.Struct, frozen=True):
    """One message, before and after a commit."""

    at: int
    """Where it stands in the history."""
    before: _Details | None
    after: _Details
    asked: _Details | None
    """What the port was asked, as far as that was noted."""
    is_touched: bool
    """Whether somebody has changed the message behind the library's back."""
    over: frozenset[str] | set[str]
    """The sessions that are dead by then, by a write."""

    def grew(self, field: str) -> int:
        """Give by how much a count is higher than before."""
        return int(self.after[field] - (self.before or {}).get(field, 0))

    @property
    def attempts(self) -> int:
        """How many attempts are spent if the claim of before is counted."""
        before = self.before or {}
        return int(before["deliveries"] - before["returned"])

    @property
    def is_last(self) -> bool:
        """Whether that was the last attempt."""
        return bool(self.attempts >= (self.before or {})["max_attempts"])

    @property
    def mark(self) -> str:
        """How it says itself that its claim was settled; nothing where nobody has."""
        trail = self.after.get("trail", "")
        return "" if trail == (self.before or {}).get("trail") else trail.partition(" ")[0]


def check_messages(history: Sequence[Occurrence]) -> list[Violation]:
    """Check every move of every message.

    Nothing comes from nowhere, and a batch comes whole. A message has one claim at a time, and
    only that claim's receipt extends or settles it. Deliveries only grow; what is given back
    spends no attempt, what fails does, and so does dying alone; the last attempt makes a dead
    letter, with its payload and an error more. Nothing is claimed before its time, and no claim
    is ended that has neither lapsed nor lost its session.
    """
    violations = _find_torn(history)
    for step in _steps_of(history):
        for invariant, problem in _judge(step):
            row = history[step.at]
            found = f"{row.details['id']}: {problem} at {row.at:.3f} s: {_tell(step)}"
            violations.append(Violation(invariant, found))
    return violations


def check_answers(history: Sequence[Occurrence]) -> list[Violation]:
    """Check that what callers of a port were told is what happened.

    What was acknowledged had been added, and what was refused never is. What was claimed for a
    caller is. A settlement is called taken if and only if the claim was ended in that very way,
    by whichever copy of the request; and a receipt is called stale only if it is. Judges what
    `RecordingBackend` notes.
    """
    book = _Book(history)
    return [
        Violation(invariant, f"{problem}: {history[heard.details['request']]} was answered {heard}")
        for at, heard in enumerate(history)
        if heard.what == "response"
        for invariant, problem in _judge_answer(
            book, at, history[heard.details["request"]].details, heard.details
        )
    ]


def check_drained(history: Sequence[Occurrence]) -> list[Violation]:
    """Check that every message that was acknowledged has been handled or is a dead letter.

    For the end of a story, after everything has been handled. What was never acknowledged, and
    has arrived all the same, must be finished too.
    """
    last = {each.details["id"]: each for each in history if each.what == "row"}
    pushed = _find_acknowledged(history)
    lost = [
        Violation("Q1", f"{name}: acknowledged, and nowhere to be found")
        for name in pushed
        if name not in last
    ]
    left = [
        Violation("QL3", f"{name}: still {row.details['state']} since {row.at:.0f} s")
        for name, row in last.items()
        if row.details["state"] not in (*_FINISHED, "gone")
    ]
    return lost + left


def check_redelivered(
    history: Sequence[Occurrence], *, since: float, within: float
) -> list[Violation]:
    """Check that whoever's claim was ended is claimed again, or dead, within so many seconds.

    Args:
        history: what happened.
        since: the world's time from which on that must hold.
        within: seconds, from the end of a claim to the next.
    """
    ended: dict[str, float] = {}
    late = []
    for step in _steps_of(history):
        row = history[step.at]
        name = row.details["id"]
        if step.before is None or step.before["state"] != "claimed":
            begun = ended.pop(name, None)
            if begun is not None and row.at - max(begun, since) > within:
                found = f"{name}: ended at {begun:.1f} s, claimed again at {row.at:.1f} s"
                late.append(Violation("QL2", found))
        elif row.details["state"] == "waiting" and not step.mark:
            ended[name] = row.at
    end = history[-1].at if history else 0.0
    return late + [
        Violation("QL2", f"{name}: ended at {begun:.1f} s, not claimed since")
        for name, begun in ended.items()
        if end - max(begun, since) > within
    ]


def _steps_of(history: Sequence[Occurrence]) -> Iterator[_Step]:
    """Give the moves of all messages, in commit order."""
    rows: dict[str, _Details] = {}
    touched: set[str] = set()
    over: set[str] = set()
    for at, done in enumerate(history):
        facts = done.details
        if done.what == "commit" and facts["key"].startswith("session/"):
            value = facts["value"]
            if facts["deleted"] or not isinstance(value, dict) or value.get("state") != "live":
                over.add(facts["key"].removeprefix("session/"))
        elif done.what == "drop":
            over.update(key.removeprefix("session/") for key in facts["keys"])
        elif done.what == "row":
            name, ask = facts["id"], facts["request"]
            if not done.node:
                touched.add(name)
            asked = None if ask is None else history[ask].details
            yield _Step(at, rows.get(name), facts, asked, name in touched, over)
            rows[name] = facts


def _judge(step: _Step) -> Iterator[_Problem]:
    """Give what is wrong with a move."""
    before, after = step.before, step.after
    if step.is_touched and step.asked is None:
        # A person did it.
        return
    if before is None:
        yield from _judge_push(step)
        return
    if {before["state"], after["state"]}.isdisjoint(("gone", "both")):
        yield from _judge_what_stays(step, before)
    match before["state"], after["state"]:
        case "ready" | "waiting", "claimed":
            yield from _judge_claim(step, before)
        case "claimed", "claimed":
            yield from _judge_extension(step, before)
        case "claimed", "waiting" | "completed" | "cancelled" | "dead":
            yield from (_judge_settlement if step.mark else _judge_end)(step, before)
        case "dead" | "cancelled", "waiting":
            yield from _judge_redrive(step)
        case _, "gone":
            yield from _judge_oblivion(step, before)
        case was, state:
            yield "Q3" if state == "both" else "Q10", f"no message goes from {was} to {state}"


def _judge_what_stays(step: _Step, before: _Details) -> Iterator[_Problem]:
    after = step.after
    if after["max_attempts"] != before["max_attempts"] or after["queue"] != before["queue"]:
        yield "Q2", "it became another message"
    if after["payload"] != before["payload"] and after["state"] != "completed":
        yield "Q2", "its payload has changed"
    if step.grew("deliveries") < 0:
        yield "Q6", "deliveries went back"


def _judge_push(step: _Step) -> Iterator[_Problem]:
    after, asked = step.after, step.asked
    if after["state"] not in _PENDING:
        yield "Q10", f"no message begins as {after['state']}"
        return
    if after["deliveries"] or after["returned"] or after["errors"]:
        yield "Q10", "it came with a past"
    if asked is None:
        return
    letters = {letter[0]: letter[1:] for letter in asked.get("messages", ())}
    if asked["call"] != "push" or after["id"] not in letters:
        yield "Q2", "nobody pushed it"
        return
    payload, delay, most = letters[after["id"]]
    if (payload, most) != (after["payload"], after["max_attempts"]):
        yield "Q2", "it is not what was pushed"
    if delay > 0 and after["due"] < after["now"]["wall"] + delay - _LOST_IN_FLOATS:
        yield "Q8", "its delay is shorter than was asked for"
    if (after["state"] == "waiting") != (delay > 0):
        yield "Q8", f"pushed with a delay of {delay:g} s it is {after['state']}"


def _judge_claim(step: _Step, before: _Details) -> Iterator[_Problem]:
    after, asked = step.after, step.asked
    if step.grew("deliveries") != 1 or step.grew("returned") or step.grew("errors"):
        yield "Q6", "a claim is one delivery more, and nothing else"
    if before["state"] == "waiting" and before["due"] > after["now"]["wall"] + _LOST_IN_FLOATS:
        yield "Q8", "claimed before its time"
    if step.is_last:
        yield "Q6", "claimed although its attempts are spent"
    if not after["claim"] or after["claim"] == before["claim"]:
        yield "Q5", "its claim has no name of its own"
    if not _is_asked(step, "claim"):
        yield "Q5" if _is_asked(step, "extend") else "Q10", "nobody asked for it"
    elif asked is not None and asked["suspects"] != bool(before["suspect"]):
        yield "Q11", "suspects and others are claimed apart"


def _judge_extension(step: _Step, before: _Details) -> Iterator[_Problem]:
    after = step.after
    if after["claim"] != before["claim"] or step.grew("deliveries"):
        yield "Q4", f"claimed while the claim of {before['session']} was alive"
        return
    if step.grew("returned") or step.grew("errors") or after["session"] != before["session"]:
        yield "Q10", "an extension changes nothing but the time"
    if after["boot"] == before["boot"] and after["due"] < before["due"]:
        yield "Q10", "an extension made it shorter"
    if not _is_asked(step, "extend"):
        yield "Q10", "nobody asked to extend it"
    elif not _names_claim(step, before):
        yield "Q5", "a stale receipt extended it"


def _judge_settlement(step: _Step, before: _Details) -> Iterator[_Problem]:
    after = step.after
    claim, _, move = step.mark.partition(":")
    if claim != before["claim"]:
        yield "Q5", f"a stale receipt settled it: {step.mark}"
    is_set_aside = step.is_touched and move == "bury" and _is_asked(step, "claim")
    if not (_is_asked(step, "settle") or is_set_aside):
        yield "Q10", "nobody asked to settle it"
    elif not (_names_claim(step, before) or is_set_aside):
        yield "Q5", "a stale receipt settled it"
    target, returned, errors = _SETTLED[move]
    if (after["state"], step.grew("returned")) != (target, returned) or step.grew("deliveries"):
        yield "Q6", f"{move} leads to {target}, and gives back {returned}"
    if step.grew("errors") != errors:
        yield "Q12", f"{move} adds {errors} errors"
    if move == "retry" and step.is_last:
        yield "Q6", "tried again although its attempts are spent"
    if move == "bury" and not step.is_last and not step.is_touched:
        yield "Q6", "dead before its attempts are spent"


def _judge_end(step: _Step, before: _Details) -> Iterator[_Problem]:
    after, asked = step.after, step.asked
    now = after["now"]
    has_lapsed = before["boot"] != now["boot"] or before["due"] <= now["mono"]
    if not has_lapsed and before["session"] not in step.over:
        yield "Q13", f"the claim of {before['session']}, who lives, was ended before it lapsed"
    if not _is_asked(step, "end_claims"):
        yield "Q10", "nobody asked to end its claim"
    elif asked is not None and after["id"] in asked["keep"]:
        yield "Q13", "the claim of a message to keep was ended"
    if step.grew("deliveries") or step.grew("errors") != 1:
        yield "Q12", "an ended claim is one error more"
    is_spent = bool(before["suspect"])
    expected = ("dead" if is_spent and step.is_last else "waiting", 0 if is_spent else 1)
    if (after["state"], step.grew("returned")) != expected:
        yield "Q6", f"an ended claim leads to {expected[0]}, and gives back {expected[1]}"
    if after["state"] == "waiting" and not after["suspect"]:
        yield "Q11", "whose claim was ended is a suspect"


def _judge_redrive(step: _Step) -> Iterator[_Problem]:
    if step.grew("deliveries") or step.after["returned"] != step.after["deliveries"]:
        yield "Q6", "redriven without all its attempts"
    if not _is_asked(step, "redrive"):
        yield "Q10", "nobody asked to redrive it"


def _judge_oblivion(step: _Step, before: _Details) -> Iterator[_Problem]:
    asked = step.asked
    if before["state"] not in (*_PENDING, *_FINISHED):
        yield "Q1", f"lost while it was {before['state']}"
    elif asked is None or asked["call"] == "purge":
        return
    elif asked["call"] != "forget" or asked["state"] != before["state"]:
        yield "Q10", "nobody asked to forget it"
    elif step.after["now"]["wall"] - before["due"] < asked["older_than"] - _LOST_IN_FLOATS:
        yield "Q10", "forgotten too early"


def _is_asked(step: _Step, call: str) -> bool:
    """Say whether that is what the port was asked to do, as far as is known."""
    return step.asked is None or step.asked["call"] == call


def _names_claim(step: _Step, before: _Details) -> bool:
    """Say whether the question named the very claim, as far as is known."""
    if step.asked is None:
        return True
    wanted = [before["id"], before["claim"], before["deliveries"]]
    return any(receipt[:3] == wanted for receipt in step.asked.get("receipts", ()))


def _tell(step: _Step) -> str:
    hidden = ("id", "queue", "now", "request")

    def show(facts: _Details | None) -> str:
        told = {} if facts is None else {k: v for k, v in facts.items() if k not in hidden}
        return ", ".join(f"{name} {value}" for name, value in told.items())

    asked = "" if step.asked is None else f" by {step.asked['call']}"
    return f"[{show(step.before)}] ──▶ [{show(step.after)}]{asked}"


def _find_torn(history: Sequence[Occurrence]) -> list[Violation]:
    """Give the pushes of which a part has arrived, or has arrived apart."""
    arrived: dict[int, list[int]] = {}
    for step in _steps_of(history):
        if step.before is None and step.asked is not None and step.asked["call"] == "push":
            arrived.setdefault(history[step.at].details["request"], []).append(step.at)
    return [
        Violation("Q7", f"a batch was torn: {len(places)} of {history[ask]}")
        for ask, places in arrived.items()
        if len(places) != len(history[ask].details["messages"])
        or places[-1] - places[0] >= len(places)
    ]


def _find_acknowledged(history: Sequence[Occurrence]) -> list[str]:
    """Name the messages whose push was answered well."""
    return [
        letter[0]
        for heard in history
        if heard.what == "response" and "error" not in heard.details
        for letter in history[heard.details["request"]].details.get("messages", ())
    ]


class _Book:
    """Where in the history each claim began, was extended and ended, and each push arrived."""

    def __init__(self, history: Sequence[Occurrence]) -> None:
        self.pushed: dict[str, int] = {}
        self.claimed: dict[tuple[str, str], int] = {}
        self.extended: set[tuple[int, str, str]] = set()
        self.ended: dict[tuple[str, str], tuple[int, str]] = {}
        """With the move that ended it; none where nobody has settled it."""
        self.gone: dict[str, int] = {}
        for step in _steps_of(history):
            self._enter(step)

    def _enter(self, step: _Step) -> None:
        before, after, name = step.before, step.after, step.after["id"]
        if before is None:
            self.pushed[name] = step.at
        elif after["state"] == "gone":
            self.gone[name] = step.at
        if before is not None and before["state"] == "claimed":
            claim = (name, before["claim"])
            if after.get("claim") == before["claim"]:
                self.extended.add((after["request"], *claim))
            else:
                self.ended[claim] = (step.at, step.mark.partition(":")[2])
        if after["state"] == "claimed":
            self.claimed.setdefault((name, after["claim"]), step.at)


def _judge_answer(book: _Book, at: int, asked: _Details, heard: _Details) -> Iterator[_Problem]:
    """Give what is untrue of an answer."""
    judges: Mapping[str, Callable[[_Book, int, _Details, _Details], Iterator[_Problem]]] = {
        "push": _judge_pushed,
        "claim": _judge_claimed,
        "settle": _judge_settled,
        "extend": _judge_extended,
    }
    judge = judges.get(asked["call"])
    if judge is not None:
        yield from judge(book, at, asked, heard)


def _judge_pushed(book: _Book, at: int, asked: _Details, heard: _Details) -> Iterator[_Problem]:
    names = [letter[0] for letter in asked["messages"]]
    match heard.get("error"):
        case None if any(book.pushed.get(name, at) >= at for name in names):
            yield "Q15", "acknowledged, and was not there"
        case None | "OutcomeUnknown":
            pass
        case _ if any(name in book.pushed for name in names):
            yield "Q15", "refused, and was there"


def _judge_claimed(book: _Book, at: int, _: _Details, heard: _Details) -> Iterator[_Problem]:
    for name, claim, _deliveries in heard.get("result") or ():
        if not heard["request"] < book.claimed.get((name, claim), at) < at:
            yield "Q15", f"told to have claimed {name}, and had not"


def _judge_settled(book: _Book, at: int, asked: _Details, heard: _Details) -> Iterator[_Problem]:
    for receipt, taken in zip(asked["receipts"], heard.get("result") or (), strict=False):
        name, claim, _, move, _ = receipt
        place, how = book.ended.get((name, claim), (at, ""))
        if taken and (place >= at or how != move):
            yield "Q15", f"{name}: told settled, was not"
        elif not taken and place >= at:
            yield "Q15", f"{name}: called stale, and was not"
        elif not taken and how == move and book.gone.get(name, at) >= at:
            yield "Q15", f"{name}: called stale, and was settled so"


def _judge_extended(book: _Book, at: int, asked: _Details, heard: _Details) -> Iterator[_Problem]:
    for receipt, extended in zip(asked["receipts"], heard.get("result") or (), strict=False):
        name, claim, _ = receipt
        if extended and (heard["request"], name, claim) not in book.extended:
            yield "Q15", f"{name}: told extended, was not"
        elif not extended and book.ended.get((name, claim), (at, ""))[0] >= at:
            yield "Q15", f"{name}: called stale, and was not"
