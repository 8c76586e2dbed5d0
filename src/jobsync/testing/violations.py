"""The promises that simulated runs check, by id, and what is reported when one is broken.

An id is what a test of the tests asserts: a mutant counts as found only if the promise that it
breaks was reported. So an id that is not in `INVARIANTS` is refused.
"""

from collections.abc import Mapping
from typing import NoReturn

import msgspec

from jobsync.errors import Invalid

__all__ = [
    "INVARIANTS",
    "InvariantBroken",
    "Violation",
    "as_violation",
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
    "C4": "A writer is told what became of its write, or that the outcome is unknown.",
    # Elections.
    "E1": "The epochs of a role never decrease, in commit order.",
    "E2": "An epoch of a role has one owner.",
    "E3": "No write of an earlier epoch is accepted after one of a later epoch.",
    "E4": "At most one worker believes that it leads, while clocks keep their rate.",
    "E5": "No session is declared dead that still trusts itself, and none trusts itself later.",
    "E6": "Each term is reported to its worker once: gained, then lost, before the next.",
    "EL1": "Soon after all faults end there is one leader, and every worker has a session.",
    "EL2": "After a clean stop another worker leads within two heartbeats.",
    "EL4": "A role is never taken from an owner whose session lives.",
    "EL5": "A worker that was asked for by name leads next.",
    # Ownership of tokens and tasks.
    "T1": "A token has at most one owner, which the current assignment names.",
    "T2": "A claim of a former owner can neither run nor finish.",
    "T3": "A token changes owner only after the old owner acknowledged, left or died.",
    "T5": "Only the share of a node that joins or leaves moves.",
    "T6": "A task has one claim at a time; a dead owner's claim is retaken after a delay.",
    "T7": "A task is done once, unless a process died with it in progress.",
    "T8": "A node's name belongs to one process; a second one is refused.",
    "T9": "A node owns tokens only after enough nodes have joined, and an observer never does.",
    "TL1": "All tokens are owned within a bound after all faults end.",
    "TL2": "The nodes' shares differ by at most one token.",
    "TL3": "Every task is done within a bound.",
    # Queues.
    "Q1": "A message that was acknowledged is handled or becomes a dead letter.",
    "Q2": "Every message was pushed by somebody, and keeps its payload.",
    "Q3": "One push makes one message.",
    "Q4": "A message never has two claims that stand, in commit order.",
    "Q5": "A stale receipt can neither settle nor extend a claim.",
    "Q6": "Attempts are counted: a clean return costs none, the last one makes a dead letter.",
    "Q7": "A batch is pushed as a whole or not at all.",
    "Q8": "A delayed message is not claimed before its time.",
    "Q10": "A message changes state only as its life cycle allows, and only on request.",
    "Q11": "A suspect is claimed apart from other messages.",
    "Q12": "A failed delivery adds one error to its message, and nothing else does.",
    "Q13": "A claim ends only when it is settled, has lapsed, or its session is dead.",
    "Q14": "A handler runs only while its claim stands.",
    "Q15": "A caller of the queue is told what happened.",
    "Q16": "A message is handled once while nothing fails.",
    "Q17": "A message that cannot be read becomes a dead letter, and fails no worker.",
    "Q18": "A worker that stops in good order returns all its claims.",
    "QL1": "A poisonous message delays others by no more than a bound.",
    "QL2": "A message whose claim ended is claimed again within a bound.",
    "QL3": "A queue is drained within a bound.",
    # Everything.
    "A1": "No background task dies of an exception, or of a request of its own that is invalid.",
    "user": "A check of the user's own, which gave plain text.",
    "crash": "The code under test or the story has a defect; no promise was judged.",
}
"""What each id promises, or means."""

_DEFECTS = (AttributeError, ImportError, NameError, TypeError)


class Violation(msgspec.Struct, frozen=True):
    """A promise that was broken.

    Args:
        invariant: the id of the promise, one of `INVARIANTS`.
        detail: what was seen.

    Raises:
        Invalid: there is no such id.
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
    """Raised by a story that finds a promise broken.

    Attributes:
        violation: what it found.
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
    """Return what a check found as a violation; plain text is the user's own."""
    return found if isinstance(found, Violation) else Violation("user", found)


def describe_failure(error: object, detail: str) -> Violation:
    """Return the violation that an unhandled exception in the background is.

    A defect, such as an attribute that is not there, says nothing about any promise.
    """
    return Violation("crash" if is_defect(error) else "A1", detail)


def is_defect(error: object) -> bool:
    """Whether an exception, or one that led to it, is a programming error."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_defect, error.exceptions))
    if not isinstance(error, BaseException):
        return False
    return isinstance(error, _DEFECTS) or is_defect(error.__cause__ or error.__context__)
