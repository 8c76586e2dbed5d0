"""What extends, ends, settles, removes and brings back messages: each check finds what breaks it.

Each table has a legal transition and others that differ from it in one thing.
"""

import pytest
from message_histories import NOW, UPTIME, WALL, Case, QueueHistory, Step, cases, check

from jobsync.testing import check_messages

CLAIMED = {
    "state": "claimed",
    "claim": "C1",
    "session": "a.1",
    "due": UPTIME + NOW + 30,
    "wakes": None,
}
LAPSED = {"due": UPTIME + NOW}
USED_UP = {"deliveries": 3, "returned": 0}
"""All attempts of three."""
ALONE = {"suspect": 1}

EXTENSION = Step(
    before=CLAIMED,
    after={**CLAIMED, "due": UPTIME + NOW + 90},
    request={"call": "extend", "receipts": [["n", "C7", 1], ["m", "C1", 2]]},
)


@cases(
    EXTENSION,
    Case("", request=None),
    Case("Q10 only the deadline", after={"returned": 2}),
    Case("Q10 only the deadline", after={"errors": 2}),
    Case("Q10 only the deadline", after={"session": "a.2"}),
    Case("", after={"due": UPTIME + NOW + 30}),
    Case("Q10 deadline forward", after={"due": UPTIME + NOW + 29}),
    Case("", after={"due": 90.0, "boot": 2}, more={"boot": 2}),
    Case("Q10 by another call", request={"call": "claim"}),
    Case("Q5 a stale receipt", request={"receipts": [["m", "C0", 2]]}),
    Case("Q5 a stale receipt", request={"receipts": [["m", "C1", 1]]}),
    Case("Q5 a stale receipt", request={"receipts": [["n", "C1", 2]]}),
)
def test_an_extension(step: Step, expected: str) -> None:
    """The holder of a claim moves its deadline, and nothing else."""
    check(step, expected)


AGAIN = {"deliveries": 3, "errors": 2, "suspect": 1}
TAKEOVER = Step(
    before={**CLAIMED, **LAPSED},
    after={**CLAIMED, **AGAIN, "claim": "C2", "session": "b.1", "returned": 2},
    request={"call": "claim", "limit": 5, "suspects": True},
)
LAST = {"before": {**ALONE, **USED_UP}, "after": {**USED_UP, "deliveries": 4}}


@cases(
    TAKEOVER,
    Case("", request=None),
    Case("Q4 was valid", before={"due": UPTIME + NOW + 1}),
    Case("", before={"due": UPTIME + NOW + 1}, more={"dead": "a.1"}),
    Case("Q4 was valid", before={"due": UPTIME + NOW + 1}, more={"dead": "b.1"}),
    Case("", before={"due": UPTIME + NOW + 1}, more={"boot": 2}),
    Case("", before=ALONE, after={"returned": 1}),
    Case("Q6 add one delivery", before=ALONE),
    Case("Q6 add one delivery", after={"returned": 1}),
    Case("Q6 add one delivery", after={"deliveries": 4}),
    Case("Q6 used up", **LAST),
    Case(
        "",
        before={**ALONE, "deliveries": 3},
        after={"deliveries": 4, "returned": 1},
    ),
    Case("", before=USED_UP, after={"deliveries": 4, "returned": 1}),
    Case("Q12 adds one error", after={"errors": 1}),
    Case("Q12 adds one error", after={"errors": 3}),
    Case("Q5 no id of its own", after={"claim": ""}),
    Case("Q5 no id of its own", after={"claim": "C1"}),
    Case("Q11 is a suspect", after={"suspect": 0}),
    Case("Q11 is a suspect", request={"suspects": False}),
    Case("", request={"call": "settle", "suspects": False}),
)
def test_a_claim_that_replaces_another(step: Step, expected: str) -> None:
    """Only a claim that is over makes room, and its end counts as such."""
    check(step, expected)


MOVES = {
    "complete": ("completed", 1, 1),
    "cancel": ("cancelled", 1, 1),
    "retry": ("waiting", 1, 2),
    "release": ("waiting", 2, 1),
    "snooze": ("waiting", 2, 1),
    "bury": ("dead", 0, 2),
}
"""The state, the returned attempts and the errors after each settlement."""


def settle(move: str) -> Step:
    """Return a settlement by the holder of the claim, which leaves no attempt if it buries."""
    state, returned, errors = MOVES[move]
    used = USED_UP if move == "bury" else {}
    after = {**used, "state": state, "returned": returned, "errors": errors}
    receipts = [["n", "C7", 1, move, 0.0], ["m", "C1", used.get("deliveries", 2), move, 0.0]]
    return Step(
        before={**CLAIMED, **used, "trail": "C0:retry"},
        after={**after, "trail": f"C1:{move}"},
        request={"call": "settle", "receipts": receipts},
    )


@pytest.mark.parametrize("move", MOVES)
def test_a_settlement(move: str) -> None:
    """It is made by the holder of the claim, and leads where it says, with what it counts."""
    legal = settle(move)
    state, returned, errors = MOVES[move]
    delivered = legal.after.get("deliveries", 2)
    other = "dead" if state == "completed" else "completed"
    stale = {"receipts": [["m", "C0", delivered, move, 0.0]]}
    for case in (
        Case(""),
        Case("", request=None),
        Case("Q5 stale receipt: C7", after={"trail": f"C7:{move}"}),
        Case("Q10 by another call", request={"call": "extend"}),
        Case("Q10 by another call", request={"call": "claim", "suspects": False}),
        Case("Q5 by a stale receipt", request=stale),
        Case(f"Q6 {move} leads to {state}", after={"state": other}),
        Case(f"Q6 {move} leads to {state}", after={"returned": returned + 1}),
        Case(f"Q6 {move} leads to {state}", after={"deliveries": delivered + 1}),
        Case(f"Q12 {move} adds", after={"errors": errors + 2}),
        Case(f"Q12 {move} adds", after={"errors": errors - 1}),
        Case("Q11 not a suspect", after=ALONE),
        Case("Q2 became another", after={"max_attempts": 9}),
        Case("" if move == "complete" else "Q2 payload has changed", after={"payload": None}),
    ):
        check(case.apply(legal), case.found)


@pytest.mark.parametrize("move", MOVES)
def test_the_last_attempt(move: str) -> None:
    """After it a message is not retried, and before it it is not dead; other settlements may be."""
    legal = settle(move)
    receipt = {"receipts": [["m", "C1", 3, move, 0.0]]}
    used = {**USED_UP, "returned": MOVES[move][1] - 1}
    last = {"before": USED_UP, "after": {"deliveries": 3, "returned": used["returned"]}}
    one_left = {"before": {"returned": 1}, "after": {"returned": 1}}
    retried = "Q6 retried although" if move == "retry" else ""
    if move == "bury":
        check(Case("", **one_left).apply(legal), "Q6 dead before")
        check(Case("", **one_left, more={"tamperer": ""}).apply(legal), "")
    else:
        check(Case("", **last, request=receipt).apply(legal), retried)


def test_only_a_message_that_a_person_has_changed_is_buried_by_a_claim() -> None:
    """It cannot be read, and nobody has a receipt."""
    claim = {"call": "claim", "suspects": False, "limit": 5, "receipts": []}
    for move in MOVES:
        expected = "" if move == "bury" else "Q10 by another call"
        case = Case(expected, request=claim, more={"tamperer": ""})
        check(case.apply(settle(move)), expected)
    check(Case("", request=claim).apply(settle("bury")), "Q10 by another call")


@pytest.mark.parametrize(
    ("move", "errors", "expected"),
    [
        ("cancel", 2, ""),
        ("complete", 2, "Q12 complete adds"),
        ("release", 2, "Q12 release adds"),
        ("retry", 1, "Q12 retry adds"),
    ],
)
def test_only_a_cancel_may_have_a_reason(move: str, errors: int, expected: str) -> None:
    """It is stored among the errors."""
    check(Case("", after={"errors": errors}).apply(settle(move)), expected)


END = Step(
    before={**CLAIMED, **LAPSED},
    after={"state": "waiting", "returned": 2, "errors": 2, "suspect": 1},
    request={"call": "end_claims", "dead": ["a.1"], "keep": ["n"]},
)


@cases(
    END,
    Case("", request=None),
    Case("Q13 which is live", before={"due": UPTIME + NOW + 1}),
    Case("", before={"due": UPTIME + NOW + 1}, more={"dead": "a.1"}),
    Case("", before={"due": UPTIME + NOW + 1}, more={"boot": 2}),
    Case("Q10 by another call", request={"call": "claim", "suspects": True}),
    Case("Q13 was to be kept", request={"keep": ["n", "m"]}),
    Case("Q12 adds one error", after={"deliveries": 3}),
    Case("Q12 adds one error", after={"errors": 1}),
    Case("Q12 adds one error", after={"errors": 3}),
    Case("Q6 returns 1 attempts", after={"returned": 1}),
    Case("Q6 leads to waiting", after={"state": "dead"}),
    Case("", before=ALONE, after={"returned": 1}),
    Case("Q6 returns 0 attempts", before=ALONE),
    Case("Q6 leads to waiting", before=ALONE, after={"state": "dead", "returned": 1}),
    Case("", before={**ALONE, **USED_UP}, after={**USED_UP, "state": "dead", "suspect": 0}),
    Case("Q6 leads to dead", before={**ALONE, **USED_UP}, after=USED_UP),
    Case("", before=USED_UP, after={**USED_UP, "returned": 1}),
    Case("Q11 is a suspect", after={"suspect": 0}),
    Case("Q10 from claimed to ready", after={"state": "ready"}),
    Case("Q3 from claimed to both", after={"state": "both"}),
)
def test_the_end_of_a_claim(step: Step, expected: str) -> None:
    """Others end a claim that is over; its message waits, or is dead if it used up its attempts."""
    check(step, expected)


@pytest.mark.parametrize("state", ["ready", "waiting", "claimed"])
def test_a_cancellation_from_outside(state: str) -> None:
    """A pending or claimed message is cancelled by its own request, with one error."""
    legal = Step(
        before={**CLAIMED, "state": state},
        after={"state": "cancelled", "errors": 2},
        request={"call": "cancel", "id": "m"},
    )
    for case in (
        Case(""),
        Case("", request=None),
        Case("", after={"trail": "C1:revoke"}),
        Case("Q10 by another call", request={"call": "delete"}),
        Case("Q10 by another call", request={"id": "n"}),
        Case("Q12 adds one error", after={"deliveries": 3}),
        Case("Q12 adds one error", after={"returned": 2}),
        Case("Q12 adds one error", after={"errors": 1}),
        Case("Q12 adds one error", after={"errors": 3}),
        Case("Q11 not a suspect", after=ALONE),
    ):
        check(case.apply(legal), case.found)


@pytest.mark.parametrize("state", ["completed", "dead", "cancelled"])
def test_a_finished_message_is_not_cancelled(state: str) -> None:
    """Nor claimed: it can only come back by a redrive."""
    step = Step({"state": state}, {"state": "cancelled"}, {"call": "cancel", "id": "m"})
    check(step, f"Q10 from {state} to cancelled")
    check(Case("", after={"state": "claimed"}).apply(step), f"Q10 from {state} to claimed")


REDRIVE = Step(
    before={"state": "dead", "deliveries": 3, "returned": 1},
    after={"state": "waiting", "deliveries": 3, "returned": 3},
    request={"call": "redrive"},
)


@cases(
    REDRIVE,
    Case("", request=None),
    Case("", before={"state": "cancelled"}),
    Case("Q10 from completed to waiting", before={"state": "completed"}),
    Case("Q10 from dead to ready", after={"state": "ready"}),
    Case("", after={"state": "blocked"}, more={"place": {"group": "g"}}),
    Case("Q10 without a group", after={"state": "blocked"}),
    Case("Q10 without a group", after={"state": "blocked"}, more={"place": {"key": "k"}}),
    Case("Q6 without all its attempts", after={"returned": 2}),
    Case("Q6 without all its attempts", after={"deliveries": 4, "returned": 4}),
    Case("Q10 by another call", request={"call": "run_now", "id": "m"}),
)
def test_a_redrive(step: Step, expected: str) -> None:
    """A dead or cancelled message comes back with all its attempts, on request."""
    check(step, expected)


@pytest.mark.parametrize(
    "state", ["ready", "waiting", "blocked", "completed", "cancelled", "dead", "claimed"]
)
def test_a_removal(state: str) -> None:
    """All but claimed messages are purged or deleted, and finished ones forgotten in time."""
    legal = Step({"state": state, "due": WALL + 8}, {"state": "gone"}, {"call": "purge"})
    forget = {"call": "forget", "state": state, "older_than": 12.0}
    younger = {**forget, "older_than": 12.1}
    for case in (
        Case(""),
        Case("", request=None),
        Case("", request={"call": "delete", "id": "m"}),
        Case("Q10 by another call", request={"call": "delete", "id": "n"}),
        Case("Q10 by another call", request={"call": "settle", "receipts": []}),
        Case("", request=forget),
        Case("Q10 by another call", request={**forget, "state": "both"}),
        Case("Q10 too early", request=younger),
        Case("", request=younger, after={"age": 12.1}),
        Case("Q10 too early", request=forget, after={"age": 11.9}),
    ):
        check(
            case.apply(legal), "Q1 lost while it was claimed" if state == "claimed" else case.found
        )


KEY = {"key": "k"}


@pytest.mark.parametrize(
    ("messages", "commits", "torn"),
    [
        ({"x": {}, "y": {}}, [["x", "y"]], 0),
        ({"x": {}, "y": {}}, [["x"]], 1),
        ({"x": {}, "y": {}}, [["x"], ["y"]], 1),
        ({"x": {}, "y": KEY}, [["x"]], 0),
        ({"x": KEY, "y": {}}, [["x"]], 1),
        ({"x": {"group": "g"}, "y": {}}, [["y"]], 1),
        ({"x": {}, "y": {}}, [], 0),
    ],
)
def test_a_batch(messages: dict[str, dict[str, str]], commits: list[list[str]], torn: int) -> None:
    """It arrives at once; what is left out has a key, which another message may hold."""
    world = QueueHistory()
    described = [
        [name, "p", 0.0, 3, *([place] if place else [])] for name, place in messages.items()
    ]
    request = world.request("push", messages=described)
    for names in commits:
        world.at += 1
        for name in names:
            world.row(name, "ready", request, deliveries=0, returned=0, errors=0, payload="p")
    assert [each.invariant for each in check_messages(world.history)] == ["Q7"] * torn
