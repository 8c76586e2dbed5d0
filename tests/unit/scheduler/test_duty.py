"""What a leader reads of the jobs that it takes over, by what its predecessor has noted."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from jobsync.components import Components
from jobsync.coordination.term import Term
from jobsync.core.job_state import ActiveRun, JobDefinition, JobState
from jobsync.scheduler.duty import Duty
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_store import JobStore, Progress
from jobsync.stores.memory import MemoryStore

NOW = 1_800_000_060
"""A minute after a full hour."""
HOURLY = JobDefinition(schedule="@hourly")
DAILY = JobDefinition(schedule="@daily")
RUN = ActiveRun(id="run", instant=1, owner="dead.1", started_at=1.0)


class Succession:
    """A leader that has all jobs of the code "new", and takes over from another one."""

    def __init__(self) -> None:
        components = Components.system()
        self.store = MemoryStore(components=components)
        self.jobs = JobStore(lambda: self.store, "default", components)
        self.definitions: dict[str, JobDefinition] = {}
        self.states: dict[str, JobState] = {}
        self.term = Term(self.store, 2, lambda: True, components.ids)
        self._components = components

    def add(self, name: str, definition: JobDefinition, **fields: Any) -> None:
        """Add a job that is decided until now, unless the fields say otherwise."""
        defaults = {"definition": definition, "defined_by": "", "last": NOW}
        self.definitions[name] = definition
        self.states[name] = JobState(**{**defaults, **fields})

    async def take_over(self, progress: Progress | None, *special: str) -> set[str]:
        """Return the jobs that the successor looks at at once."""
        await self.jobs.create_many(self.states)
        await self.jobs.code.write("new", self.definitions, 0.0)
        await self.jobs.code.write("old", set(self.definitions) - {"added"}, 0.0)
        generation = await self.jobs.code.begin_generation()
        assert generation is not None
        await self.jobs.code.write_defined("new", generation)
        if special:
            await self.jobs.edits.note(dict.fromkeys(special, True))
        if progress is not None:
            await self.term.put(self.jobs.progress_key, msgspec.to_builtins(progress))
        known = {
            name: SimpleNamespace(options=SimpleNamespace(definition=definition))
            for name, definition in self.definitions.items()
        }
        membership = SimpleNamespace(worker_id="w", members=self._list_members)
        clock = SimpleNamespace(now=lambda: float(NOW), estimate=lambda: float(NOW))
        parts: Any = (
            JobCache(self.jobs, lambda *_: None),
            known,
            membership,
            clock,
            self._components,
        )
        duty = Duty(*cast("Any", parts))
        duty.assign(known, self.term, "new")
        unsettled = await duty.take_over()
        assert unsettled is not None
        looks = {
            name: duty.find_first_look(name, is_settled=name not in unsettled) for name in known
        }
        return {name for name, when in looks.items() if when is not None and when <= NOW}

    async def _list_members(self) -> list[Any]:
        return [SimpleNamespace(worker_id="w")]


NOTED = Progress(until=NOW, code="new")


@pytest.mark.parametrize(
    ("progress", "changes", "special", "found"),
    [
        (NOTED, {}, (), set()),
        (NOTED, {"last": NOW - 7200}, (), set()),
        (msgspec.structs.replace(NOTED, until=NOW - 61), {"last": NOW - 61}, (), {"hourly"}),
        (msgspec.structs.replace(NOTED, until=NOW - 60), {}, (), set()),
        (msgspec.structs.replace(NOTED, open=("daily",)), {"running": (RUN,)}, (), {"daily"}),
        (NOTED, {"running": (RUN,)}, ("daily",), {"daily"}),
        (NOTED, {"queued": (1,)}, ("added",), {"added"}),
        (msgspec.structs.replace(NOTED, code="old"), {"running": (RUN,)}, (), {"added"}),
        (None, {"running": (RUN,)}, (), {"daily", "added", "hourly"}),
        (
            msgspec.structs.replace(NOTED, code="gone"),
            {"queued": (1,)},
            (),
            {"daily", "added", "hourly"},
        ),
    ],
    ids=["settled", "noted", "due", "at", "open", "edited", "queued", "lacked", "first", "unknown"],
)
async def test_a_successor_looks_at_what_its_predecessor_left_undecided(
    progress: Progress | None, changes: dict[str, Any], special: tuple[str, ...], found: set[str]
) -> None:
    """Was due since, was open, was changed by operators, or was not in the other's code.

    All jobs are in the same state. Those that the note covers are not read.
    """
    succession = Succession()
    for name, definition in (("hourly", HOURLY), ("daily", DAILY), ("added", DAILY)):
        succession.add(name, definition, **changes)
    assert await succession.take_over(progress, *special) == found
