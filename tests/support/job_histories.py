"""Histories of a scheduled job, built by hand: its states, the records of its runs, and notes."""

from typing import Any

import msgspec

from jobsync.core.job_state import ActiveRun, Gap, JobDefinition, JobState
from jobsync.scheduler.history import HistoryEntry
from jobsync.testing import Occurrence, Violation, check_firing
from jobsync.testing.nodes import WORLD_START

START = int(WORLD_START)
JOB = "schedule/main/job/tick"
RUN = "schedule/main/run/tick/"
ALL: dict[str, Any] = {"overlap": "allow", "misfire": "all", "max_catch_up": 10}


def due(number: float) -> int:
    """Return an instant; there is one every ten seconds of the world."""
    return START + int(10 * number)


def run(number: int, owner: str = "a.1", name: str = "", *, is_manual: bool = False) -> ActiveRun:
    """Return the run of an instant."""
    return ActiveRun(
        id=name or f"r{number}",
        instant=due(number),
        owner=owner,
        started_at=WORLD_START,
        is_manual=is_manual,
    )


def gap(first: int, last: int, count: int = 0, reason: str = "paused", **fields: Any) -> Gap:
    """Return a gap of instants."""
    return Gap(
        first=due(first),
        last=due(last),
        count=count or last - first + 1,
        reason=reason,
        **fields,
    )


def definition(**options: Any) -> JobDefinition:
    """Return a job that may do anything, but for what is given."""
    return JobDefinition(**{"schedule": "*/10 * * * * *", **ALL, **options})


def state(last: int, options: dict[str, Any] | None = None, **fields: Any) -> JobState:
    """Return a state of the job with such a definition."""
    fields = {"definition": definition(**(options or {})), "defined_by": "a", **fields}
    return JobState(last=due(last), **fields)


def entry(status: Any, name: str = "r2", owner: str = "a.1", **fields: Any) -> HistoryEntry:
    """Return a record of a run, or of a gap."""
    return HistoryEntry(status=status, id=name, owner=owner, **{"scheduled_time": 0.0, **fields})


class Jobs:
    """A history of the job, which is recorded from the commit of its first state on."""

    def __init__(self, *states: JobState, at: float = 21.0) -> None:
        self.history: list[Occurrence] = []
        self.at = at
        for each in states:
            self.commit(JOB, each)

    def note(self, what: str, node: str = "a", **details: Any) -> None:
        """Append an occurrence."""
        self.history.append(Occurrence(self.at, node, what, details))

    def commit(self, key: str, value: object, *, deleted: bool = False) -> None:
        """Append a commit."""
        self.note("commit", key=key, value=msgspec.to_builtins(value), deleted=deleted)

    def end_session(self, name: str) -> None:
        """Declare a session dead."""
        self.commit(f"session/{name}", {"state": "dead"})

    def find(self, **options: Any) -> list[str]:
        """Return what is found: the ids and the problems."""
        return show(check_firing(self.history, **options))


def show(found: list[Violation]) -> list[str]:
    """Return violations without the name of the job."""
    return [str(each).replace(": tick: ", " ") for each in found]


def check(found: list[str], expected: str) -> None:
    """Check that exactly this is found; several are separated by "; "."""
    wanted = expected.split("; ") if expected else []
    assert len(found) == len(wanted), found
    for each in wanted:
        invariant, _, text = each.partition(" ")
        assert any(one.startswith(f"{invariant} ") and text in one for one in found), found
