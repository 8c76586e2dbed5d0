"""What must hold for the messages of a queue in every history, whatever the weather.

The checks go by the rows, in the order in which the database committed them, and not by what any
caller was told. They restate the rules apart from the code that follows them, which is what makes
them a check. Each function returns the violations that it finds.

A message makes only these transitions:

    nothing ──▶ ready, waiting               by a push, all messages of a batch at once
    ready, waiting ──▶ claimed               when it is due; adds one delivery
    waiting ──▶ waiting                      after a reboot: its delay counts from the new boot
    claimed ──▶ claimed                      extended, by the holder of that claim; or ended as
                                             below and claimed again, by one write of a page
    claimed ──▶ any other                    settled, by the holder of that claim
    claimed ──▶ waiting, dead                ended, if it has lapsed or its session is dead
    ready, waiting, claimed ──▶ cancelled    from outside
    waiting ──▶ waiting                      its delay is ended from outside
    dead, cancelled ──▶ waiting              redriven
    completed, cancelled, dead ──▶ gone      forgotten or purged
    ready, waiting ──▶ gone                  purged
    all but claimed ──▶ gone                 deleted from outside
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jobsync.testing.invariants import Violation
from jobsync.testing.message_transitions import (
    MessageProblem,
    MessageTransition,
    RowDetails,
    list_commits,
    list_transitions,
)
from jobsync.testing.world import Occurrence

__all__ = ["check_messages"]

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
"""The state after each settlement, the attempts that it returns, and the errors that it adds. The
reason of a cancel, if it has one, is stored among the errors."""

_COUNTERS = ("deliveries", "returned", "errors")
_ROUNDING = 1e-6


def check_messages(history: Sequence[Occurrence]) -> list[Violation]:
    """Check every transition of every message.

    Every message was pushed, and a batch arrives as a whole. A message has one claim at a time, and
    only the receipt of that claim extends or settles it. Deliveries only increase. A message that
    is returned uses up no attempt; one that fails does, and so does one whose worker dies while it
    runs alone. The last attempt makes a dead letter, with its payload and one more error. Nothing
    is claimed before it is due, and no claim is ended that has neither lapsed nor lost its session.
    """
    violations = _find_torn_batches(history)
    for transition in list_transitions(history):
        row = history[transition.at]
        violations += [
            Violation(invariant, f"{row.details['id']}: {problem} at {row.at:.3f} s: {transition}")
            for invariant, problem in _check_transition(transition)
        ]
    return violations


def _check_transition(step: MessageTransition) -> Iterator[MessageProblem]:
    before = step.before
    if step.is_tampered and step.request is None:
        # A person did it.
        return
    if before is None:
        yield from _check_push(step)
        return
    yield from _check_constants(step, before)
    yield from (_check_revocation if _is_revocation(step, before) else _check_change)(step, before)


def _check_change(step: MessageTransition, before: RowDetails) -> Iterator[MessageProblem]:
    after = step.after
    is_placed = before["state"] == "blocked" or after["state"] == "ready" or step.replacement
    if is_placed and after["state"] not in {"gone", "both"}:
        yield from _check_move(step, before)
        return
    match before["state"], after["state"]:
        case "ready" | "waiting", "claimed" | "waiting" as state:
            check = _check_claim if state == "claimed" else _check_wait
            yield from check(step, before)
        case "claimed", "claimed":
            is_same = after["claim"] == before["claim"] and not step.increase("deliveries")
            yield from (_check_extension if is_same else _check_takeover)(step, before)
        case "claimed", "waiting" | "completed" | "cancelled" | "dead":
            yield from (_check_settlement if step.settlement else _check_end)(step, before)
        case "dead" | "cancelled", "waiting" | "blocked":
            yield from _check_redrive(step)
        case _, "gone":
            yield from _check_removal(step, before)
        case old, new:
            yield "Q3" if new == "both" else "Q10", f"no message goes from {old} to {new}"


def _check_move(step: MessageTransition, before: RowDetails) -> Iterator[MessageProblem]:
    """Check a message that gets another place, or that another one replaces."""
    match before["state"], step.after["state"]:
        case "ready" | "waiting" | "blocked", "waiting" | "blocked" if step.replacement:
            yield from _check_replacement(step, before, step.replacement)
        case "waiting", "ready":
            yield from _check_promotion(step, before)
        case "blocked", "waiting":
            yield from _check_release(step, before)
        case old, new:
            yield "Q10", f"no message goes from {old} to {new}"


def _check_constants(step: MessageTransition, before: RowDetails) -> Iterator[MessageProblem]:
    after, replacement = step.after, step.replacement
    if not {before["state"], after["state"]}.isdisjoint(("gone", "both")):
        return
    if after["queue"] != before["queue"] or (
        after["max_attempts"] != before["max_attempts"] and not replacement
    ):
        yield "Q2", "it became another message"
    if after["payload"] != before["payload"] and after["state"] != "completed" and not replacement:
        yield "Q2", "its payload has changed"
    if step.increase("deliveries") < 0:
        yield "Q6", "deliveries decreased"


def _check_push(step: MessageTransition) -> Iterator[MessageProblem]:
    after, request = step.after, step.request
    if after["state"] not in (*_PENDING, *(("blocked",) if "group" in step.place else ())):
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
    payload, delay, max_attempts = messages[after["id"]][:3]
    if (payload, max_attempts) != (after["payload"], after["max_attempts"]):
        yield "Q2", "it is not what was pushed"
    if delay > 0 and _find_delay(after, after["now"]) < delay - _ROUNDING:
        yield "Q8", "its delay is shorter than requested"
    if after["state"] != "blocked" and (after["state"] == "waiting") != (delay > 0):
        yield "Q8", f"it is {after['state']} after a push with a delay of {delay:g} s"


def _check_claim(step: MessageTransition, before: RowDetails) -> Iterator[MessageProblem]:
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
    elif request is not None and step.place.get("task", "") not in request.get("tasks", [""]):
        yield "Q31", f"claimed for {request.get('tasks')}, and it is of {step.place.get('task')!r}"


def _check_wait(step: MessageTransition, before: RowDetails) -> Iterator[MessageProblem]:
    is_hurried = step.request is not None and step.is_by("run_now")
    yield from (_check_hurry if is_hurried else _check_adoption)(step, before)


def _check_adoption(step: MessageTransition, before: RowDetails) -> Iterator[MessageProblem]:
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


def _check_promotion(step: MessageTransition, before: RowDetails) -> Iterator[MessageProblem]:
    after, request = step.after, step.request
    is_promoting = request is None or (request["call"] == "claim" and "order" in request)
    if not is_promoting or not _has_same(step, *_COUNTERS, "suspect"):
        yield "Q10", "no message goes from waiting to ready, except where its order says so"
    if before["suspect"]:
        yield "Q11", "a suspect waits among the others"
    if _find_delay(before, after["now"]) > _ROUNDING:
        yield "Q8", "ready before its delay was over"


def _check_release(step: MessageTransition, before: RowDetails) -> Iterator[MessageProblem]:
    after = step.after
    is_released = any(step.is_by(call) for call in ("settle", "end_claims", "purge", "claim"))
    if not is_released or not _has_same(step, *_COUNTERS, "suspect"):
        yield "Q10", "only the end of the head makes a message the head of its group"
    was, left = (max(0.0, _find_delay(row, after["now"])) for row in (before, after))
    # After a reboot a delay is no longer than it was requested, whatever the wall clock says.
    is_shorter = left < was - _ROUNDING and before["boot"] == after["boot"]
    if left > was + _ROUNDING or is_shorter:
        yield "Q8", "its delay changed when it became the head of its group"


def _check_replacement(
    step: MessageTransition, before: RowDetails, new: Sequence[Any]
) -> Iterator[MessageProblem]:
    after, (_, payload, delay, max_attempts, *_) = step.after, new
    if (after["state"] == "blocked") != (before["state"] == "blocked"):
        yield "Q9", f"replaced, it goes from {before['state']} to {after['state']}"
    if after["returned"] != after["deliveries"]:
        yield "Q6", "replaced without all its attempts"
    if not step.is_by("push") or not _has_same(step, "deliveries", "errors", "suspect"):
        yield "Q10", "a replacement changes what was pushed, and nothing else"
    if (after["payload"], after["max_attempts"]) != (payload, max_attempts):
        yield "Q2", "it is not what replaces it"
    if delay > 0 and _find_delay(after, after["now"]) < delay - _ROUNDING:
        yield "Q8", "its delay is shorter than requested"


def _has_same(step: MessageTransition, *names: str) -> bool:
    """Whether a transition has left fields alone."""
    return all(step.after[name] == (step.before or {})[name] for name in names)


def _find_delay(row: RowDetails, now: RowDetails) -> float:
    """Return the seconds until a delay ends: by the time since boot, or by `due` after a reboot."""
    if row["boot"] == now["boot"] and row["wakes"] is not None:
        return float(row["wakes"] - now["mono"])
    return float(row["due"] - now["wall"])


def _check_extension(step: MessageTransition, before: RowDetails) -> Iterator[MessageProblem]:
    after = step.after
    is_changed = step.increase("returned") or step.increase("errors")
    if is_changed or after["session"] != before["session"]:
        yield "Q10", "an extension changes only the deadline"
    if after["boot"] == before["boot"] and after["due"] < before["due"]:
        yield "Q10", "an extension brought the deadline forward"
    if not step.is_by("extend"):
        yield "Q10", "extended by another call"
    elif not step.has_receipt:
        yield "Q5", "extended by a stale receipt"


def _check_takeover(step: MessageTransition, before: RowDetails) -> Iterator[MessageProblem]:
    """Check a claim that ends and makes room for another one at once."""
    after, request = step.after, step.request
    if not _is_over(step, before):
        yield "Q4", f"claimed while the claim of {before['session']} was valid"
        return
    was_alone = bool(before["suspect"])
    if was_alone and step.is_last_attempt:
        yield "Q6", "claimed although its attempts are used up"
    if step.increase("deliveries") != 1 or step.increase("returned") != (0 if was_alone else 1):
        yield "Q6", "an ended claim and a new one add one delivery"
    if step.increase("errors") != 1:
        yield "Q12", "an ended claim adds one error"
    if not after["claim"] or after["claim"] == before["claim"]:
        yield "Q5", "its claim has no id of its own"
    is_unaware = step.is_by("claim") and request is not None and not request["suspects"]
    if is_unaware or not after["suspect"]:
        yield "Q11", "a message whose claim was ended is a suspect"


def _is_over(step: MessageTransition, before: RowDetails) -> bool:
    """Whether a claim had lapsed, or its session was dead."""
    now = step.after["now"]
    has_lapsed = before["boot"] != now["boot"] or before["due"] <= now["mono"]
    return has_lapsed or before["session"] in step.dead_sessions


def _check_settlement(step: MessageTransition, before: RowDetails) -> Iterator[MessageProblem]:
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
    has_reason = move == "cancel" and step.increase("errors") == 1
    if step.increase("errors") != errors and not has_reason:
        yield "Q12", f"{move} adds {errors} errors"
    if after["suspect"]:
        yield "Q11", "a message that was settled is not a suspect"
    if move == "retry" and step.is_last_attempt:
        yield "Q6", "retried although its attempts are used up"
    if move == "bury" and not step.is_last_attempt and not step.is_tampered:
        yield "Q6", "dead before its attempts are used up"


def _check_end(step: MessageTransition, before: RowDetails) -> Iterator[MessageProblem]:
    after, request = step.after, step.request
    if not _is_over(step, before):
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


def _is_revocation(step: MessageTransition, before: RowDetails) -> bool:
    """Whether a message was cancelled from outside, and not by the holder of its claim."""
    is_own = bool(step.settlement) and not step.settlement.endswith(":revoke")
    is_cancelled = step.after["state"] == "cancelled" and not is_own
    return is_cancelled and before["state"] in (*_PENDING, "claimed")


def _check_revocation(step: MessageTransition, _: RowDetails) -> Iterator[MessageProblem]:
    after, request = step.after, step.request
    if not step.is_by("cancel") or (request is not None and request["id"] != after["id"]):
        yield "Q10", "cancelled by another call"
    if step.increase("deliveries") or step.increase("returned") or step.increase("errors") != 1:
        yield "Q12", "a cancellation from outside adds one error and nothing else"
    if after["suspect"]:
        yield "Q11", "a message that was cancelled is not a suspect"


def _check_hurry(step: MessageTransition, before: RowDetails) -> Iterator[MessageProblem]:
    after, request = step.after, step.request
    counters = ("deliveries", "returned", "errors", "suspect")
    is_same = all(after[name] == before[name] for name in counters)
    if not is_same or (request is not None and request["id"] != after["id"]):
        yield "Q10", "the end of a delay changes only when it is due"
    if _find_delay(after, after["now"]) > _ROUNDING:
        yield "Q8", "its delay has not ended"


def _check_redrive(step: MessageTransition) -> Iterator[MessageProblem]:
    if step.after["state"] == "blocked" and "group" not in step.place:
        yield "Q10", "blocked without a group"
    if step.increase("deliveries") or step.after["returned"] != step.after["deliveries"]:
        yield "Q6", "redriven without all its attempts"
    if not step.is_by("redrive"):
        yield "Q10", "redriven by another call"


def _check_removal(step: MessageTransition, before: RowDetails) -> Iterator[MessageProblem]:
    request = step.request
    if before["state"] not in (*_PENDING, "blocked", *_FINISHED):
        yield "Q1", f"lost while it was {before['state']}"
    elif (
        request is None
        or request["call"] == "purge"
        or (request["call"] == "delete" and request["id"] == step.after["id"])
    ):
        return
    elif request["call"] != "forget" or request["state"] != before["state"]:
        yield "Q10", "removed by another call"
    elif _find_age(step, before) < request["older_than"] - _ROUNDING:
        yield "Q10", "forgotten too early"


def _find_age(step: MessageTransition, before: RowDetails) -> float:
    """Return for how long a message was finished, by the clock that counts."""
    after = step.after
    return float(after["age"] if "age" in after else after["now"]["wall"] - before["due"])


def _find_torn_batches(history: Sequence[Occurrence]) -> list[Violation]:
    """Find the pushes that have arrived in part, or not at once.

    A message with a key is left out if another one holds the key.
    """
    arrived: dict[int, list[list[str]]] = {}
    for commit in list_commits(history):
        new = [step.after["id"] for step in commit if step.before is None]
        request = commit[0].request
        if new and request is not None and request["call"] == "push":
            arrived.setdefault(history[commit[0].at].details["request"], []).append(new)
    return [
        Violation("Q7", f"only {commits[0]} of a batch at once: {history[request]}")
        for request, commits in arrived.items()
        if len(commits) > 1 or not _list_unkeyed(history[request]) <= {*commits[0]}
    ]


def _list_unkeyed(request: Occurrence) -> set[str]:
    """Return the messages that a push adds whoever holds keys."""
    messages = request.details["messages"]
    return {name for name, _, _, _, *place in messages if not any("key" in it for it in place)}
