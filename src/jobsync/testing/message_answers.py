"""What the callers of a queue backend were told, compared with what happened to the messages."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from jobsync.testing.invariants import Violation
from jobsync.testing.message_transitions import (
    MessageProblem,
    MessageTransition,
    RowDetails,
    list_transitions,
)
from jobsync.testing.world import Occurrence

__all__ = ["check_answers"]


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


class _ClaimLog:
    """The positions in the history at which messages were pushed, claimed, extended and ended."""

    def __init__(self, history: Sequence[Occurrence]) -> None:
        self.pushed: dict[str, int] = {}
        self.claimed: dict[tuple[str, str], int] = {}
        self.extended: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        self.settled: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        self.ended: dict[tuple[str, str], tuple[int, str]] = {}
        """With the move of the settlement; empty if it was not settled."""
        self.ended_by: dict[tuple[str, str], int | None] = {}
        """The request that has ended each claim."""
        self.gone: dict[str, int] = {}
        self.replaced: defaultdict[int, set[str]] = defaultdict(set)
        """The payloads that each request has given to messages that were there."""
        for step in list_transitions(history):
            self._add(step)

    def _add(self, step: MessageTransition) -> None:
        before, after, name = step.before, step.after, step.after["id"]
        if before is None:
            self.pushed[name] = step.at
        elif after["state"] == "gone":
            self.gone[name] = step.at
        elif step.replacement:
            self.replaced[after["request"]].add(after["payload"])
        if before is not None and before["state"] == "claimed":
            claim = (name, before["claim"])
            if after.get("claim") == before["claim"]:
                self.extended[claim].append(step.at)
            else:
                self.ended[claim] = (step.at, step.settlement.partition(":")[2])
                self.ended_by[claim] = after["request"]
                if step.settlement:
                    self.settled[claim].append(step.at)
        if after["state"] == "claimed":
            self.claimed.setdefault((name, after["claim"]), step.at)


def _check_response(
    log: _ClaimLog, at: int, request: RowDetails, response: RowDetails
) -> Iterator[MessageProblem]:
    result = response.get("result") or ()
    match request["call"]:
        case "push":
            yield from _check_push_response(log, at, request, response)
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
                # A page may be written for several requests at once: for two that extend the same
                # claim, or for one that extends and one that settles it.
                written = [*log.extended[name, claim], *log.settled[name, claim]]
                was_extended = any(response["request"] < each < at for each in written)
                had_ended = log.ended.get((name, claim), (at, ""))[0] < at
                if not (was_extended if extended else had_ended):
                    reported = "extended" if extended else "stale"
                    yield "Q15", f"{name}: reported as {reported}, but was not"


def _check_push_response(
    log: _ClaimLog, at: int, request: RowDetails, response: RowDetails
) -> Iterator[MessageProblem]:
    holders = response.get("result") or {}
    names = [message[0] for message in request["messages"] if message[0] not in holders]
    match response.get("error"):
        case None if any(log.pushed.get(name, at) >= at for name in names):
            yield "Q15", "acknowledged, but was not there"
        case None if any(name in log.pushed for name in holders):
            yield "Q15", "another message holds its key, but it was there"
        case None | "OutcomeUnknown":
            for name, payload, _, _, *place in request["messages"]:
                is_replacing = name in holders and place[0].get("replace")
                if is_replacing and payload not in log.replaced[response["request"]]:
                    yield "Q15", f"{name}: replaces the message that holds its key, but did not"
        case _ if any(name in log.pushed for name in names):
            yield "Q15", "refused, but was there"


def _check_claim_response(
    log: _ClaimLog, at: int, request: int, result: Sequence[Sequence[Any]]
) -> Iterator[MessageProblem]:
    for name, claim, _ in result:
        if not request < log.claimed.get((name, claim), at) < at:
            yield "Q15", f"{name}: reported as claimed, but was not"


def _check_settle_refusal(
    log: _ClaimLog, request: RowDetails, response: RowDetails
) -> Iterator[MessageProblem]:
    if response.get("error") in {None, "OutcomeUnknown"}:
        return
    for name, claim, *_ in request["receipts"]:
        if log.ended_by.get((name, claim), -1) == response["request"]:
            yield "Q15", f"{name}: refused, but was settled"


def _check_settle_response(
    log: _ClaimLog, at: int, receipt: Sequence[Any], *, is_accepted: bool
) -> Iterator[MessageProblem]:
    name, claim, _, move, _ = receipt
    ended, ended_by = log.ended.get((name, claim), (at, ""))
    if is_accepted and (ended >= at or ended_by != move):
        yield "Q15", f"{name}: reported as settled, but was not"
    elif not is_accepted and ended >= at:
        yield "Q15", f"{name}: reported as stale, but was not"
    elif not is_accepted and ended_by == move and log.gone.get(name, at) >= at:
        yield "Q15", f"{name}: reported as stale, but was settled in this way"
