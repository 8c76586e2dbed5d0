"""What must hold for the messages of a queue in every history, whatever the weather.

The checks go by the rows, in the order in which the database committed them, and not by what any
caller was told. They restate the rules apart from the code that follows them, which is what makes
them a check. Each function returns the violations that it finds.

A message makes only these transitions:

    nothing ──▶ ready, waiting               by a push, all messages of a batch at once
    ready, waiting ──▶ claimed               when it is due; adds one delivery
    waiting ──▶ waiting                      after a reboot: its delay counts from the new boot
    claimed ──▶ claimed                      extended, by the holder of that claim
    claimed ──▶ any other                    settled, by the holder of that claim
    claimed ──▶ waiting, dead                ended, if it has lapsed or its session is dead
    dead, cancelled ──▶ waiting              redriven
    completed, cancelled, dead ──▶ gone      forgotten or purged
    ready, waiting ──▶ gone                  purged
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from jobsync.testing.invariants import Violation
from jobsync.testing.world import Occurrence

__all__ = [
    "check_answers",
    "check_drained",
    "check_messages",
    "check_orphans",
    "check_redelivered",
]

_Details: TypeAlias = Mapping[str, Any]

_Problem: TypeAlias = tuple[str, str]
"""The id of an invariant, and how it is broken."""

_PENDING = ("ready", "waiting")
_FINISHED = ("completed", "cancelled", "dead")
_SETTLEMENTS: Mapping[str, tuple[str, int, int]] = {
    "complete": ("completed", 0, 0),
    "cancel": ("cancelled", 0, 0),
    "retry": ("waiting", 0, 1),
    "bury": ("dead", 0, 1),
    "release": ("waiting", 1, 0),
    "snooze": ("waiting", 1, 0),
}
"""The state after each settlement, the attempts that it returns, and the errors that it adds."""

_ROUNDING = 1e-6


class _Transition(msgspec.Struct, frozen=True):
    """A message before and after a commit."""

    at: int
    """The position in the history."""
    before: _Details | None
    after: _Details
    request: _Details | None
    """The call of the backend, if it was recorded."""
    is_tampered: bool
    """Whether the message was ever changed without the library."""
    dead_sessions: set[str]
    """The sessions that were dead by then, by a write."""

    def increase(self, field: str) -> int:
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


def _show(row: _Details) -> str:
    hidden = ("id", "queue", "now", "request")
    return ", ".join(f"{name} {value}" for name, value in row.items() if name not in hidden)


def check_messages(history: Sequence[Occurrence]) -> list[Violation]:
    """Check every transition of every message.

    Every message was pushed, and a batch arrives as a whole. A message has one claim at a time, and
    only the receipt of that claim extends or settles it. Deliveries only increase. A message that
    is returned uses up no attempt; one that fails does, and so does one whose worker dies while it
    runs alone. The last attempt makes a dead letter, with its payload and one more error. Nothing
    is claimed before it is due, and no claim is ended that has neither lapsed nor lost its session.
    """
    violations = _find_torn_batches(history)
    for transition in _list_transitions(history):
        row = history[transition.at]
        violations += [
            Violation(invariant, f"{row.details['id']}: {problem} at {row.at:.3f} s: {transition}")
            for invariant, problem in _check_transition(transition)
        ]
    return violations


def check_answers(history: Sequence[Occurrence]) -> list[Violation]:
    """Check that what the callers of a queue backend were told is what happened.

    A push that was acknowledged had been added, and one that was refused never is. A claim that was
    returned exists, and there are no more than requested. A settlement is accepted if and only if
    the claim was ended in this very way, by whichever copy of the request. A receipt is called
    stale only if it is. Checks what `RecordingBackend` records.
    """
    log = _ClaimLog(history)
    return [
        Violation(invariant, f"{problem}: {history[reply.details['request']]} got {reply}")
        for at, reply in enumerate(history)
        if reply.what == "response"
        for invariant, problem in _check_response(
            log, at, history[reply.details["request"]].details, reply.details
        )
    ]


def check_drained(history: Sequence[Occurrence]) -> list[Violation]:
    """Check that every message that was acknowledged has been handled or is a dead letter.

    For the end of a story, after everything has been handled. A message that has arrived without
    being acknowledged must be finished too.
    """
    last = {each.details["id"]: each for each in history if each.what == "row"}
    acknowledged = [
        message[0]
        for response in history
        if response.what == "response" and "error" not in response.details
        for message in history[response.details["request"]].details.get("messages", ())
    ]
    lost = [
        Violation("Q1", f"{name}: acknowledged, but does not exist")
        for name in acknowledged
        if name not in last
    ]
    unfinished = [
        Violation("QL3", f"{name}: {row.details['state']} since {row.at:.0f} s")
        for name, row in last.items()
        if row.details["state"] not in (*_FINISHED, "gone")
    ]
    return lost + unfinished


def check_redelivered(
    history: Sequence[Occurrence], *, since: float, within: float
) -> list[Violation]:
    """Check that a message whose claim was ended is claimed again, or dead, within a bound.

    Args:
        history: what happened.
        since: the world's time from which the bound applies.
        within: seconds from the end of a claim to the next one.
    """
    ended: dict[str, float] = {}
    late = []
    for transition in _list_transitions(history):
        row = history[transition.at]
        name = row.details["id"]
        if transition.before is None or transition.before["state"] != "claimed":
            end = ended.pop(name, None)
            if end is not None and row.at - max(end, since) > within:
                detail = f"{name}: ended at {end:.1f} s, claimed again at {row.at:.1f} s"
                late.append(Violation("QL2", detail))
        elif row.details["state"] == "waiting" and not transition.settlement:
            ended[name] = row.at
    now = history[-1].at if history else 0.0
    return late + [
        Violation("QL2", f"{name}: ended at {end:.1f} s, not claimed since")
        for name, end in ended.items()
        if now - max(end, since) > within
    ]


def check_orphans(history: Sequence[Occurrence], *, since: float, within: float) -> list[Violation]:
    """Check that the claims of a session that has ended are ended within a bound.

    Args:
        history: what happened.
        since: the world's time from which the bound applies.
        within: seconds from the end of the session, or from its last claim, which may come later.
    """
    ends: dict[str, float] = {}
    claimed: dict[str, tuple[str, float]] = {}
    late = []

    def check(name: str, now: float) -> None:
        session, at = claimed.pop(name, ("", now))
        if session in ends and now - max(ends[session], at, since) > within:
            detail = f"{name}: the session of its claim ended at {ends[session]:.1f} s"
            late.append(Violation("QL4", f"{detail}, and its claim had not at {now:.1f} s"))

    for done in history:
        for session in _list_ended_sessions(done):
            ends.setdefault(session, done.at)
        if done.what == "row":
            name = done.details["id"]
            check(name, done.at)
            if done.details["state"] == "claimed":
                claimed[name] = (done.details["session"], done.at)
    for name in list(claimed):
        check(name, history[-1].at)
    return late


def _list_ended_sessions(done: Occurrence) -> list[str]:
    """Return the sessions that a write has ended."""
    details = done.details
    if done.what == "drop":
        return [key.removeprefix("session/") for key in details["keys"]]
    if done.what != "commit" or not details["key"].startswith("session/"):
        return []
    value = details["value"]
    is_live = isinstance(value, dict) and value.get("state") == "live"
    return [] if is_live and not details["deleted"] else [details["key"].removeprefix("session/")]


def _list_transitions(history: Sequence[Occurrence]) -> Iterator[_Transition]:
    """Yield the transitions of all messages, in commit order."""
    rows: dict[str, _Details] = {}
    tampered: set[str] = set()
    dead: set[str] = set()
    for at, done in enumerate(history):
        details = done.details
        dead.update(_list_ended_sessions(done))
        if done.what == "row":
            name, position = details["id"], details["request"]
            if not done.node:
                tampered.add(name)
            request = None if position is None else history[position].details
            yield _Transition(at, rows.get(name), details, request, name in tampered, dead)
            rows[name] = details


def _check_transition(step: _Transition) -> Iterator[_Problem]:
    before, after = step.before, step.after
    if step.is_tampered and step.request is None:
        # A person did it.
        return
    if before is None:
        yield from _check_push(step)
        return
    if {before["state"], after["state"]}.isdisjoint(("gone", "both")):
        yield from _check_constants(step, before)
    match before["state"], after["state"]:
        case "ready" | "waiting", "claimed" | "waiting" as state:
            check = _check_claim if state == "claimed" else _check_adoption
            yield from check(step, before)
        case "claimed", "claimed":
            yield from _check_extension(step, before)
        case "claimed", "waiting" | "completed" | "cancelled" | "dead":
            yield from (_check_settlement if step.settlement else _check_end)(step, before)
        case "dead" | "cancelled", "waiting":
            yield from _check_redrive(step)
        case _, "gone":
            yield from _check_removal(step, before)
        case old, new:
            yield "Q3" if new == "both" else "Q10", f"no message goes from {old} to {new}"


def _check_constants(step: _Transition, before: _Details) -> Iterator[_Problem]:
    after = step.after
    if after["max_attempts"] != before["max_attempts"] or after["queue"] != before["queue"]:
        yield "Q2", "it became another message"
    if after["payload"] != before["payload"] and after["state"] != "completed":
        yield "Q2", "its payload has changed"
    if step.increase("deliveries") < 0:
        yield "Q6", "deliveries decreased"


def _check_push(step: _Transition) -> Iterator[_Problem]:
    after, request = step.after, step.request
    if after["state"] not in _PENDING:
        yield "Q10", f"no message begins as {after['state']}"
        return
    if after["deliveries"] or after["returned"] or after["errors"]:
        yield "Q10", "a new message has deliveries or errors"
    if request is None:
        return
    messages = {message[0]: message[1:] for message in request.get("messages", ())}
    if request["call"] != "push" or after["id"] not in messages:
        yield "Q2", "it was not pushed"
        return
    payload, delay, max_attempts = messages[after["id"]]
    if (payload, max_attempts) != (after["payload"], after["max_attempts"]):
        yield "Q2", "it is not what was pushed"
    if delay > 0 and _find_delay(after, after["now"]) < delay - _ROUNDING:
        yield "Q8", "its delay is shorter than requested"
    if (after["state"] == "waiting") != (delay > 0):
        yield "Q8", f"it is {after['state']} after a push with a delay of {delay:g} s"


def _check_claim(step: _Transition, before: _Details) -> Iterator[_Problem]:
    after, request = step.after, step.request
    if step.increase("deliveries") != 1 or step.increase("returned") or step.increase("errors"):
        yield "Q6", "a claim adds one delivery and nothing else"
    if before["state"] == "waiting" and _find_delay(before, after["now"]) > _ROUNDING:
        yield "Q8", "claimed before it was due"
    if step.is_last_attempt:
        yield "Q6", "claimed although its attempts are used up"
    if not after["claim"] or after["claim"] == before["claim"]:
        yield "Q5", "its claim has no id of its own"
    if not step.is_by("claim"):
        yield "Q5" if step.is_by("extend") else "Q10", "claimed by another call"
    elif request is not None and request["suspects"] != bool(before["suspect"]):
        yield "Q11", "suspects and others are not claimed together"


def _check_adoption(step: _Transition, before: _Details) -> Iterator[_Problem]:
    after = step.after
    now = after["now"]
    counters = ("deliveries", "returned", "errors", "suspect", "due")
    is_same = all(after[name] == before[name] for name in ("state", *counters))
    if not is_same or not step.is_by("claim"):
        yield "Q10", f"no message goes from {before['state']} to {after['state']}"
    if before["boot"] == now["boot"] and before["wakes"] is not None:
        yield "Q10", "its delay counted from this boot already"
    if _find_delay(after, now) > max(0.0, _find_delay(before, now)) + _ROUNDING:
        yield "Q8", "its delay became longer"


def _find_delay(row: _Details, now: _Details) -> float:
    """Return the seconds until a delay ends: by the time since boot, or by `due` after a reboot."""
    if row["boot"] == now["boot"] and row["wakes"] is not None:
        return float(row["wakes"] - now["mono"])
    return float(row["due"] - now["wall"])


def _check_extension(step: _Transition, before: _Details) -> Iterator[_Problem]:
    after = step.after
    if after["claim"] != before["claim"] or step.increase("deliveries"):
        yield "Q4", f"claimed while the claim of {before['session']} was valid"
        return
    is_changed = step.increase("returned") or step.increase("errors")
    if is_changed or after["session"] != before["session"]:
        yield "Q10", "an extension changes only the deadline"
    if after["boot"] == before["boot"] and after["due"] < before["due"]:
        yield "Q10", "an extension brought the deadline forward"
    if not step.is_by("extend"):
        yield "Q10", "extended by another call"
    elif not step.has_receipt:
        yield "Q5", "extended by a stale receipt"


def _check_settlement(step: _Transition, before: _Details) -> Iterator[_Problem]:
    after = step.after
    claim, _, move = step.settlement.partition(":")
    if claim != before["claim"]:
        yield "Q5", f"settled by a stale receipt: {step.settlement}"
    is_quarantine = step.is_tampered and move == "bury" and step.is_by("claim")
    if not (step.is_by("settle") or is_quarantine):
        yield "Q10", "settled by another call"
    elif not (step.has_receipt or is_quarantine):
        yield "Q5", "settled by a stale receipt"
    state, returned, errors = _SETTLEMENTS[move]
    actual = (after["state"], step.increase("returned"))
    if actual != (state, returned) or step.increase("deliveries"):
        yield "Q6", f"{move} leads to {state} and returns {returned} attempts"
    if step.increase("errors") != errors:
        yield "Q12", f"{move} adds {errors} errors"
    if after["suspect"]:
        yield "Q11", "a message that was settled is not a suspect"
    if move == "retry" and step.is_last_attempt:
        yield "Q6", "retried although its attempts are used up"
    if move == "bury" and not step.is_last_attempt and not step.is_tampered:
        yield "Q6", "dead before its attempts are used up"


def _check_end(step: _Transition, before: _Details) -> Iterator[_Problem]:
    after, request = step.after, step.request
    now = after["now"]
    has_lapsed = before["boot"] != now["boot"] or before["due"] <= now["mono"]
    if not has_lapsed and before["session"] not in step.dead_sessions:
        yield "Q13", f"the claim of {before['session']}, which is live, ended before it lapsed"
    if not step.is_by("end_claims"):
        yield "Q10", "its claim was ended by another call"
    elif request is not None and after["id"] in request["keep"]:
        yield "Q13", "a claim was ended that was to be kept"
    if step.increase("deliveries") or step.increase("errors") != 1:
        yield "Q12", "an ended claim adds one error"
    was_alone = bool(before["suspect"])
    expected = ("dead" if was_alone and step.is_last_attempt else "waiting", 0 if was_alone else 1)
    if (after["state"], step.increase("returned")) != expected:
        yield "Q6", f"an ended claim leads to {expected[0]} and returns {expected[1]} attempts"
    if after["state"] == "waiting" and not after["suspect"]:
        yield "Q11", "a message whose claim was ended is a suspect"


def _check_redrive(step: _Transition) -> Iterator[_Problem]:
    if step.increase("deliveries") or step.after["returned"] != step.after["deliveries"]:
        yield "Q6", "redriven without all its attempts"
    if not step.is_by("redrive"):
        yield "Q10", "redriven by another call"


def _check_removal(step: _Transition, before: _Details) -> Iterator[_Problem]:
    request = step.request
    if before["state"] not in (*_PENDING, *_FINISHED):
        yield "Q1", f"lost while it was {before['state']}"
    elif request is None or request["call"] == "purge":
        return
    elif request["call"] != "forget" or request["state"] != before["state"]:
        yield "Q10", "removed by another call"
    elif step.after["now"]["wall"] - before["due"] < request["older_than"] - _ROUNDING:
        yield "Q10", "forgotten too early"


def _find_torn_batches(history: Sequence[Occurrence]) -> list[Violation]:
    """Find the pushes that have arrived in part, or not at once."""
    arrived: dict[int, list[int]] = {}
    for step in _list_transitions(history):
        if step.before is None and step.request is not None and step.request["call"] == "push":
            arrived.setdefault(history[step.at].details["request"], []).append(step.at)
    return [
        Violation("Q7", f"only {len(positions)} messages of a batch at once: {history[request]}")
        for request, positions in arrived.items()
        if len(positions) != len(history[request].details["messages"])
        or positions[-1] - positions[0] >= len(positions)
    ]


class _ClaimLog:
    """The positions in the history at which messages were pushed, claimed, extended and ended."""

    def __init__(self, history: Sequence[Occurrence]) -> None:
        self.pushed: dict[str, int] = {}
        self.claimed: dict[tuple[str, str], int] = {}
        self.extended: set[tuple[int, str, str]] = set()
        self.ended: dict[tuple[str, str], tuple[int, str]] = {}
        """With the move of the settlement; empty if it was not settled."""
        self.ended_by: dict[tuple[str, str], int | None] = {}
        """The request that has ended each claim."""
        self.gone: dict[str, int] = {}
        for step in _list_transitions(history):
            self._add(step)

    def _add(self, step: _Transition) -> None:
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
                self.ended[claim] = (step.at, step.settlement.partition(":")[2])
                self.ended_by[claim] = after["request"]
        if after["state"] == "claimed":
            self.claimed.setdefault((name, after["claim"]), step.at)


def _check_response(
    log: _ClaimLog, at: int, request: _Details, response: _Details
) -> Iterator[_Problem]:
    result = response.get("result") or ()
    match request["call"]:
        case "push":
            names = [message[0] for message in request["messages"]]
            yield from _check_push_response(log, at, names, response.get("error"))
        case "claim":
            if len(result) > request["limit"]:
                yield "Q10", f"claimed {len(result)} messages, and not {request['limit']} at most"
            yield from _check_claim_response(log, at, response["request"], result)
        case "settle":
            yield from _check_settle_refusal(log, request, response)
            for receipt, accepted in zip(request["receipts"], result, strict=False):
                yield from _check_settle_response(log, at, receipt, is_accepted=accepted)
        case "extend":
            for (name, claim, _), extended in zip(request["receipts"], result, strict=False):
                was_extended = (response["request"], name, claim) in log.extended
                had_ended = log.ended.get((name, claim), (at, ""))[0] < at
                if not (was_extended if extended else had_ended):
                    reported = "extended" if extended else "stale"
                    yield "Q15", f"{name}: reported as {reported}, but was not"


def _check_push_response(
    log: _ClaimLog, at: int, names: Sequence[str], error: str | None
) -> Iterator[_Problem]:
    match error:
        case None if any(log.pushed.get(name, at) >= at for name in names):
            yield "Q15", "acknowledged, but was not there"
        case None | "OutcomeUnknown":
            pass
        case _ if any(name in log.pushed for name in names):
            yield "Q15", "refused, but was there"


def _check_claim_response(
    log: _ClaimLog, at: int, request: int, result: Sequence[Sequence[Any]]
) -> Iterator[_Problem]:
    for name, claim, _ in result:
        if not request < log.claimed.get((name, claim), at) < at:
            yield "Q15", f"{name}: reported as claimed, but was not"


def _check_settle_refusal(
    log: _ClaimLog, request: _Details, response: _Details
) -> Iterator[_Problem]:
    if response.get("error") in {None, "OutcomeUnknown"}:
        return
    for name, claim, *_ in request["receipts"]:
        if log.ended_by.get((name, claim), -1) == response["request"]:
            yield "Q15", f"{name}: refused, but was settled"


def _check_settle_response(
    log: _ClaimLog, at: int, receipt: Sequence[Any], *, is_accepted: bool
) -> Iterator[_Problem]:
    name, claim, _, move, _ = receipt
    ended, ended_by = log.ended.get((name, claim), (at, ""))
    if is_accepted and (ended >= at or ended_by != move):
        yield "Q15", f"{name}: reported as settled, but was not"
    elif not is_accepted and ended >= at:
        yield "Q15", f"{name}: reported as stale, but was not"
    elif not is_accepted and ended_by == move and log.gone.get(name, at) >= at:
        yield "Q15", f"{name}: reported as stale, but was settled in this way"
