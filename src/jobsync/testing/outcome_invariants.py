"""What handlers have written in transactions, and what they have returned.

On its own because the other invariants of messages follow their rows alone.
"""

from collections.abc import Sequence
from typing import Any

from jobsync.testing.invariants import Violation
from jobsync.testing.message_transitions import RowDetails
from jobsync.testing.world import Occurrence

__all__ = ["check_effects", "check_results"]


def check_effects(history: Sequence[Occurrence]) -> list[Violation]:
    """Check that the effect of a message is committed once, with its completion.

    Checks what `RowLink` records: an effect right after the rows of its commit.
    """
    violations: list[Violation] = []
    rows: dict[str, tuple[float, RowDetails]] = {}
    done: set[str] = set()
    for each in history:
        name = each.details.get("id", "")
        if each.what == "row":
            rows[name] = (each.at, each.details)
        elif each.what == "effect":
            at, row = rows.get(name, (-1.0, {}))
            delivery = (at, row.get("state"), row.get("deliveries"))
            if delivery != (each.at, "completed", each.details["epoch"]):
                violations.append(Violation("Q29", f"{each}, and its message is {row}"))
            if name in done:
                violations.append(Violation("Q29", f"{each}: not for the first time"))
            done.add(name)
    return violations


def check_results(history: Sequence[Occurrence]) -> list[Violation]:
    """Check that a result is what the handler has returned that has completed the message.

    A handler that returns something notes `returned`, with the message, its epoch and the value; a
    caller that receives a result notes `result`, with the message and the value.
    """
    violations: list[Violation] = []
    returned: dict[tuple[str, int], Any] = {}
    completed: dict[str, int] = {}
    for each in history:
        name = each.details.get("id", "")
        if each.what == "row" and each.details["state"] == "completed":
            completed[name] = each.details["deliveries"]
        elif each.what == "returned":
            returned[name, each.details["epoch"]] = each.details["value"]
        elif each.what == "result":
            epoch = completed.get(name, 0)
            wanted = returned.get((name, epoch), "nothing")
            if each.details["value"] != wanted:
                found = f"{each}, and delivery {epoch} has returned {wanted}"
                violations.append(Violation("Q30", found))
    return violations
