"""What comes in, is claimed, waits and is replaced: each check of it finds what breaks it.

Each table has a legal transition and others that differ from it in one thing.
"""

from typing import Any

import msgspec
from message_histories import NOW, UPTIME, WALL, Case, Fields, Step, cases, check

UNDELIVERED = {"deliveries": 0, "returned": 0, "errors": 0}
PUSH = Step(
    before=None,
    after={"state": "ready", "payload": "p", "max_attempts": 4, **UNDELIVERED},
    request={"call": "push", "messages": [["m", "p", 0.0, 4]]},
)
DELAYED = {"call": "push", "messages": [["m", "p", 30.0, 4]]}
LATER = {"state": "waiting", "due": WALL + NOW + 30, "wakes": UPTIME + NOW + 30}
GROUP = {"place": {"group": "g"}}


@cases(
    PUSH,
    Case("Q10 begins as claimed", after={"state": "claimed"}),
    Case("Q10 begins as dead", after={"state": "dead"}, request=None),
    Case("Q10 begins as blocked", after={"state": "blocked"}),
    Case("Q10 begins as blocked", after={"state": "blocked"}, more={"place": {"key": "k"}}),
    Case("", after={"state": "blocked"}, more=GROUP),
    *(Case("Q10 has deliveries or errors", after={field: 1}) for field in UNDELIVERED),
    Case("Q10 has deliveries or errors", after={"errors": 1}, request=None),
    Case("", after={"payload": "anything"}, request=None),
    Case("Q2 was not pushed", request={"call": "claim"}),
    Case("Q2 was not pushed", request={"messages": [["n", "p", 0.0, 4, {"key": "k"}]]}),
    Case("Q2 not what was pushed", after={"payload": "other"}),
    Case("Q2 not what was pushed", after={"max_attempts": 3}),
    Case("", after=LATER, request=DELAYED),
    Case("Q8 delay is shorter", after={**LATER, "wakes": UPTIME + NOW + 29.9}, request=DELAYED),
    Case("", after={**LATER, "due": WALL}, request=DELAYED),
    Case("Q8 ready after a push with a delay", after={**LATER, "state": "ready"}, request=DELAYED),
    Case("Q8 waiting after a push", after={"state": "waiting"}),
    Case("Q8 delay is shorter", after={"state": "blocked"}, request=DELAYED, more=GROUP),
)
def test_a_push(step: Step, expected: str) -> None:
    """A new message is what was pushed, and waits for its delay."""
    check(step, expected)


USED_UP = {"deliveries": 3, "returned": 0}
"""All attempts of three."""
CLAIM = Step(
    before={"state": "ready", "due": WALL + 900, "wakes": UPTIME + 900},
    after={"state": "claimed", "deliveries": 3, "claim": "C1", "session": "a.1"},
    request={"call": "claim", "limit": 5, "suspects": False},
)
WAITING = {"state": "waiting", "wakes": UPTIME + NOW}
TASK = {"place": {"task": "y"}}


@cases(
    CLAIM,
    Case("", request=None),
    *(Case("Q6 adds one delivery", after={"deliveries": number}) for number in (2, 4)),
    *(Case("Q6 adds one delivery", after={field: 2}) for field in ("returned", "errors")),
    Case("", before=WAITING),
    Case("Q8 before it was due", before={**WAITING, "wakes": UPTIME + NOW + 1}),
    Case("Q8 before it was due", before={**WAITING, "wakes": UPTIME + NOW + 1}, request=None),
    Case("", before={**WAITING, "due": WALL + NOW}, more={"boot": 2}),
    Case("Q8 before it was due", before=WAITING, more={"boot": 2}),
    Case("", before={**WAITING, "wakes": None, "due": WALL + NOW}),
    Case("Q8 before it was due", before={**WAITING, "wakes": None}),
    Case("Q6 used up", before=USED_UP, after={**USED_UP, "deliveries": 4}),
    Case("", before={**USED_UP, "returned": 1}, after={"deliveries": 4, "returned": 1}),
    Case("Q5 no id of its own", after={"claim": ""}),
    Case("Q5 no id of its own", before={"claim": "C1"}),
    Case("", before={"claim": "C0"}),
    Case("Q5 claimed by another call", request={"call": "extend"}),
    Case("Q10 claimed by another call", request={"call": "settle"}),
    Case("Q11 not claimed together", before={"suspect": 1}, after={"suspect": 1}),
    Case("Q11 not claimed together", request={"suspects": True}),
    Case("", before={"suspect": 1}, after={"suspect": 1}, request={"suspects": True}),
    Case("", request={"tasks": ["x", "y"]}, more=TASK),
    Case("Q31 it is of 'y'", request={"tasks": ["x", ""]}, more=TASK),
    Case("Q31 it is of 'y'", more=TASK),
    Case("Q31 it is of None", request={"tasks": ["x"]}),
    Case("", request={"tasks": ["x", ""]}),
    Case("Q2 became another", after={"queue": "letters"}),
    Case("Q2 became another", after={"max_attempts": 4}),
    Case("Q2 payload has changed", after={"payload": "other"}),
    Case("Q6 decreased; Q6 adds one delivery", after={"deliveries": 1}),
    Case("", after={"deliveries": 7}, request=None, more={"tamperer": ""}),
    Case("", after={"deliveries": 7}, request=None, more={"node": ""}),
    Case("Q6 adds one delivery", after={"deliveries": 7}, more={"tamperer": ""}),
    Case("Q3 ready to both", after={"state": "both"}),
)
def test_a_claim(step: Step, expected: str) -> None:
    """A message that is due is claimed by a claim for its task and kind; one delivery is added."""
    check(step, expected)


ADOPTION = Step(
    before={"state": "waiting", "due": WALL + NOW + 20, "wakes": UPTIME + 1},
    after={"state": "waiting", "due": WALL + NOW + 20, "wakes": UPTIME + NOW + 20, "boot": 2},
    request={"call": "claim", "limit": 5, "suspects": False},
    boot=2,
)


@cases(
    ADOPTION,
    Case("", request=None),
    *(
        Case("Q10 from waiting to waiting", after={field: number})
        for field, number in (("deliveries", 3), ("returned", 2), ("errors", 2), ("suspect", 1))
    ),
    Case("Q10 from waiting to waiting", after={"due": WALL + NOW + 19}),
    Case("Q10 from ready to waiting", before={"state": "ready"}),
    Case("Q10 from waiting to waiting", request={"call": "extend", "receipts": []}),
    Case("Q10 this boot already", before={"boot": 2, "wakes": UPTIME + NOW + 30}),
    Case("", before={"boot": 2, "wakes": None}),
    Case("Q8 became longer", after={"wakes": UPTIME + NOW + 20.1}),
    Case("", after={"wakes": UPTIME + NOW + 19}),
    Case("Q8 became longer", before={"due": WALL}, after={"due": WALL}),
    Case("", before={"due": WALL}, after={"due": WALL, "wakes": UPTIME + NOW}),
)
def test_an_adoption_after_a_reboot(step: Step, expected: str) -> None:
    """A delay counts from the new boot, once, and is not longer than it was."""
    check(step, expected)


HURRY = Step(
    before={"state": "waiting", "due": WALL + 900, "wakes": UPTIME + 900},
    after={"state": "waiting", "due": WALL + NOW, "wakes": UPTIME + NOW},
    request={"call": "run_now", "id": "m"},
)


@cases(
    HURRY,
    *(
        Case("Q10 changes only when", after={field: number})
        for field, number in (("deliveries", 3), ("returned", 2), ("errors", 2), ("suspect", 1))
    ),
    Case("Q10 changes only when", request={"id": "n"}),
    Case("Q8 has not ended", after={"wakes": UPTIME + NOW + 1}),
    Case("", after={"due": WALL + 900}),
    Case("", after={"wakes": None}),
    Case("Q8 has not ended", after={"wakes": None, "due": WALL + NOW + 1}),
)
def test_a_delay_that_is_ended_from_outside(step: Step, expected: str) -> None:
    """Nothing changes but when the message is due, which is now."""
    check(step, expected)


PROMOTION = Step(
    before={"state": "waiting", "due": WALL + 900, "wakes": UPTIME + NOW},
    after={"state": "ready"},
    request={"call": "claim", "order": "lifo", "limit": 5, "suspects": False},
)


@cases(
    PROMOTION,
    Case("", request=None),
    Case("Q10 where its order says so", request={"call": "settle"}),
    *(
        Case("Q10 where its order says so", after={field: number})
        for field, number in (("deliveries", 3), ("returned", 2), ("errors", 2), ("suspect", 1))
    ),
    Case("Q11 among the others", before={"suspect": 1}, after={"suspect": 1}),
    Case("Q8 before its delay", before={"wakes": UPTIME + NOW + 1}),
)
def test_a_message_that_becomes_ready(step: Step, expected: str) -> None:
    """Only a claim of a queue with an order makes a message ready whose delay is over."""
    check(step, expected)


def test_a_queue_without_an_order_makes_nothing_ready() -> None:
    """There a message that waits is claimed when it is due."""
    request = {"call": "claim", "limit": 5, "suspects": False}
    check(msgspec.structs.replace(PROMOTION, request=request), "Q10 where its order says so")


RELEASE = Step(
    before={"state": "blocked", "due": WALL + NOW + 20, "wakes": UPTIME + NOW + 20},
    after={"state": "waiting", "due": WALL + 900, "wakes": UPTIME + NOW + 20},
    request={"call": "settle", "receipts": []},
    place={"group": "g"},
)


@cases(
    RELEASE,
    Case("", request=None),
    *(Case("", request={"call": call}) for call in ("end_claims", "purge", "claim")),
    *(
        Case("Q10 only the end of the head", request={"call": call, "messages": []})
        for call in ("push", "extend", "run_now")
    ),
    *(
        Case("Q10 only the end of the head", after={field: number})
        for field, number in (("deliveries", 3), ("returned", 2), ("errors", 2), ("suspect", 1))
    ),
    Case("Q8 delay changed", after={"wakes": UPTIME + NOW + 21}),
    Case("Q8 delay changed", after={"wakes": UPTIME + NOW + 19}),
    Case("", after={"wakes": UPTIME + NOW + 19, "boot": 2}, more={"boot": 2}),
    Case("Q8 delay changed", after={"wakes": UPTIME + NOW + 21, "boot": 2}, more={"boot": 2}),
    Case("", before={"wakes": UPTIME}, after={"wakes": UPTIME + 1}),
    Case("Q10 from blocked to claimed", after={"state": "claimed"}),
    Case("Q10 from blocked to ready", after={"state": "ready"}),
)
def test_the_next_of_a_group(step: Step, expected: str) -> None:
    """The end of the head lets the next message wait for what is left of its delay."""
    check(step, expected)


def replace(**place: Any) -> Fields:
    """Return a push that replaces the message with a key."""
    return {"messages": [["n", "new", 30.0, 5, {"key": "k", "replace": True, **place}]]}


REPLACEMENT = Step(
    before={"state": "waiting"},
    after={
        "state": "waiting",
        "payload": "new",
        "max_attempts": 5,
        "returned": 2,
        "due": WALL + 900,
        "wakes": UPTIME + NOW + 30,
    },
    request={"call": "push", **replace()},
    place={"key": "k", "group": "g"},
)


@cases(
    REPLACEMENT,
    Case("", before={"state": "ready"}),
    Case("", before={"state": "blocked"}, after={"state": "blocked"}),
    Case("Q9 from blocked to waiting", before={"state": "blocked"}),
    Case("Q9 from waiting to blocked", after={"state": "blocked"}),
    Case("Q6 without all its attempts", after={"returned": 1}),
    Case("Q6 without all its attempts", after={"returned": 3}),
    Case("Q10 changes what was pushed", after={"deliveries": 3, "returned": 3}),
    *(Case("Q10 changes what was pushed", after={field: 2}) for field in ("errors", "suspect")),
    Case("Q10 changes what was pushed", request={"call": "settle"}),
    Case("Q2 not what replaces it", after={"payload": "payload"}),
    Case("Q2 not what replaces it", after={"max_attempts": 3}),
    Case("Q8 shorter than requested", after={"wakes": UPTIME + NOW + 29}),
    Case("Q10 from claimed to waiting", before={"state": "claimed"}),
    Case("Q10 from ready to ready", before={"state": "ready"}, after={"state": "ready"}),
    Case(
        "Q2 became another; Q2 payload; Q10 from waiting to waiting; Q8 became longer",
        request=replace(key="other"),
    ),
    Case(
        "Q2 became another; Q2 payload; Q10 from waiting to waiting; Q8 became longer",
        request=replace(replace=False),
    ),
    Case("Q2 became another", after={"queue": "letters"}),
)
def test_a_replacement(step: Step, expected: str) -> None:
    """A pending message becomes what was pushed with its key, and has all its attempts again."""
    check(step, expected)
