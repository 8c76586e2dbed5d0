"""What a name means that somebody asks about: a message, a task, or a scheduled job."""

import datetime as dt
import itertools

import msgspec
import pytest

from jobsync.components import Components
from jobsync.core.job_state import JobDefinition, JobState
from jobsync.core.pins import Pin
from jobsync.jobs.foreign_claims import Claim
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.pins import PinStore
from jobsync.queue.backend import NewMessage
from jobsync.queue.opening import open_backend
from jobsync.scheduler.job_store import JobStore
from jobsync.status.jobs import TaskStatus
from jobsync.status.queues import MessageStatus
from jobsync.status.schedules import ScheduledJobStatus
from jobsync.status.why import Explained, find_status
from jobsync.stores.memory import MemoryStore

DAY = dt.date(2026, 1, 5)
KEYS = JobKeys("sync_")
KINDS = ("fleet", "claim", "pin", "job", "message")


class Place:
    """A store on which one name may be that of several things."""

    def __init__(self) -> None:
        self.components = Components.system()
        self.store = MemoryStore()
        self.id = self.components.ids.records(1)[0]

    async def add(self, kind: str, name: str) -> None:
        """Store one of these things, under the name."""
        match kind:
            case "fleet":
                settings = {"total_tokens": 10, "hash_function": "md5"}
                await self.store.create(KEYS.settings, settings)
            case "claim":
                claim = Claim(
                    task=name,
                    token=1,
                    date=DAY.isoformat(),
                    node="a",
                    owner="a.1",
                    number=1,
                    run=1,
                    state="failed",
                    started=0.0,
                )
                key = KEYS.claim(DAY, name)
                await self.store.create(key, msgspec.to_builtins(claim))
            case "pin":
                pins = PinStore(self.store, self.components, KEYS, lambda _: 1)
                pin = Pin(task=name, token=1, patterns=("b%",), reason=None, created_by="a")
                await pins.add("a", [pin])
            case "job":
                definition = JobDefinition(schedule="@hourly")
                jobs = JobStore(lambda: self.store, "default", self.components)
                state = JobState(definition=definition, defined_by="", last=0)
                await jobs.create_many({name: state})
                await self.store.create("schedule/default", {})
            case "message":
                backend = open_backend(self.store, "default/emails", self.components)
                await backend.push([NewMessage(id=name, value={}, max_attempts=1)])

    async def find(self, name: str) -> Explained | None:
        """Return what the name means."""
        return await find_status(self.store, self.components, name, "sync_", DAY)


def choose(kinds: set[str], *, is_id: bool) -> type[Explained] | None:
    """Return what a name means that is the name of these things."""
    if "message" in kinds and is_id:
        return MessageStatus
    if "fleet" in kinds and kinds & {"claim", "pin"}:
        return TaskStatus
    if "job" in kinds:
        return ScheduledJobStatus
    # Any name may be a task's, but one in the form of an id is rather a message that is gone.
    return TaskStatus if "fleet" in kinds and not is_id else None


@pytest.mark.parametrize("is_id", [False, True])
@pytest.mark.parametrize(
    "kinds",
    [kinds for count in range(len(KINDS) + 1) for kinds in itertools.combinations(KINDS, count)],
    ids="-".join,
)
async def test_a_name_means_the_first_thing_that_has_it(
    kinds: tuple[str, ...], *, is_id: bool
) -> None:
    """A message, a task that is claimed or pinned, a scheduled job, or any other task."""
    place = Place()
    name = place.id if is_id else "report"
    for kind in kinds:
        if kind == "message" and not is_id:
            # Its id has another form.
            continue
        await place.add(kind, name)
    found = await place.find(name)
    expected = choose({*kinds}, is_id=is_id)
    assert (None if found is None else type(found)) is expected
