"""When a job that was decided is looked at again, and why its instants were late."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from jobsync.core.job_state import ActiveRun, JobDefinition, JobPause, JobState, RunRequest
from jobsync.errors import Unavailable
from jobsync.scheduler.decider import JobDecider

NOW = 1_800_000_060
"""A minute after a full hour."""
NEXT = NOW + 3540
HEARTBEAT = 5.0
MINE = ActiveRun(id="mine", instant=1, owner="me", started_at=1.0)
OTHERS = ActiveRun(id="others", instant=1, owner="other", started_at=1.0)
ORPHAN = ActiveRun(id="orphan", instant=1, owner="dead", started_at=1.0)
ASKED = RunRequest(id="asked", at=1.0)
BY_HAND = RunRequest(id="by-hand", at=1.0, owner="other")


def build_decider(known: dict[str, Any], since: float = 0.0) -> JobDecider:
    """Return a decider whose process knows these states."""
    cache = SimpleNamespace(known=known)
    membership = SimpleNamespace(
        incarnation="me", timing=SimpleNamespace(heartbeat=HEARTBEAT, timeout=15.0)
    )
    clock, duty = SimpleNamespace(now=lambda: float(NOW)), SimpleNamespace(since=since)
    owners = SimpleNamespace(is_orphan=lambda run, _: run.owner == "dead")
    parts: Any = (cache, None, membership, clock, duty, owners, None)
    return JobDecider(*cast("Any", parts))


def build_state(overlap: str, **fields: Any) -> JobState:
    """Return the state of an hourly job that is up to date."""
    definition = JobDefinition(schedule="@hourly", overlap=cast("Any", overlap))
    return JobState(**{"definition": definition, "defined_by": "", "last": NOW, **fields})


@pytest.mark.parametrize(
    ("overlaps", "fields", "look"),
    [
        ("skip queue allow", {}, NEXT),
        ("skip queue allow", {"pause": JobPause(at=1.0)}, None),
        ("skip queue allow", {"is_removed": True}, None),
        # Its end makes us look.
        ("skip", {"running": (MINE,)}, None),
        ("queue allow", {"running": (MINE,)}, NEXT),
        # Nobody tells us of the end: what is due meanwhile is decided at the next instant.
        ("skip queue allow", {"running": (OTHERS,)}, NEXT),
        ("skip", {"running": (OTHERS,), "last": NOW - 7200}, NEXT),
        ("skip queue allow", {"running": (MINE, ORPHAN)}, 0.0),
        ("skip queue allow", {"running": (ORPHAN,)}, 0.0),
        ("skip queue allow", {"requests": (ASKED,)}, 0.0),
        ("skip queue allow", {"requests": (BY_HAND,)}, NOW + 1.0),
        ("skip queue allow", {"requests": (BY_HAND, ASKED)}, NOW + 1.0),
        ("queue allow", {"queued": (1,)}, 0.0),
        ("queue allow", {"queued": (1,), "pause": JobPause(at=1.0)}, None),
        ("queue", {"queued": (1,), "running": (MINE,)}, NEXT),
        ("allow", {"queued": (1,), "running": (MINE,)}, 0.0),
        ("allow", {"queued": (1,), "running": (OTHERS,)}, 0.0),
        ("queue", {"queued": (1,), "running": (OTHERS,)}, NOW + HEARTBEAT),
        ("skip queue", {"requests": (ASKED,), "running": (OTHERS,)}, NOW + HEARTBEAT),
        (
            "queue",
            {"requests": (ASKED,), "running": (OTHERS,), "pause": JobPause(at=1.0)},
            NOW + HEARTBEAT,
        ),
        ("queue", {"queued": (1,), "running": (OTHERS,), "last": NOW - 7200}, NOW - 3660),
    ],
)
def test_a_job_is_looked_at_when_something_may_have_come(
    overlaps: str, fields: dict[str, Any], look: float | None
) -> None:
    """At its next instant, at once if something can start, or when nobody would tell us."""
    for overlap in overlaps.split():
        state = build_state(overlap, **fields)
        found = build_decider({"job": SimpleNamespace(state=state)}).next_look("job")
        assert found == look, overlap


def test_a_job_that_was_found_outdated_is_looked_at_at_once() -> None:
    """Nothing is known of it."""
    assert build_decider({}).next_look("job") == 0.0


@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize("since", [NOW - 1.0, float(NOW), NOW + 1.0])
def test_the_reason_of_lateness_is_the_first_that_applies(since: float, is_delayed: bool) -> None:
    """Nobody was there, there was no room, or it took too long."""
    decider = build_decider({}, since)
    reason = decider._explain_lateness(build_state("skip"), is_delayed=is_delayed)
    if since > NOW:
        assert reason == "no process fired it until 2027-01-15 08:01:01 UTC"
    elif is_delayed:
        assert reason == "as many jobs as max_concurrent_jobs allows were running"
    else:
        assert reason == "this process or the store was too slow"


class ReadStates:
    """The states of jobs: what is known, and what is stored by now."""

    def __init__(self, known: JobState | None, stored: JobState | None) -> None:
        self.known = {} if known is None else {"job": SimpleNamespace(state=known)}
        self.stored, self.reads, self.updates = stored, 0, 0

    async def read(self, name: str) -> Any:
        """Return what is stored."""
        self.reads += 1
        if self.stored is not None:
            self.known[name] = SimpleNamespace(state=self.stored)
        return self.known.get(name)

    async def update(self, name: str, _: Any) -> Any:
        """Note a change."""
        self.updates += 1
        return self.known.get(name)


@pytest.mark.parametrize(
    ("running", "is_read"),
    [
        ((), False),
        ((MINE,), False),
        ((MINE, MINE), False),
        ((OTHERS,), True),
        ((MINE, OTHERS), True),
        ((OTHERS, MINE), True),
        ((MINE, ORPHAN), True),
        (None, True),
    ],
)
async def test_a_state_is_read_again_if_any_run_is_another_processs(
    running: tuple[ActiveRun, ...] | None, is_read: bool
) -> None:
    """That process may have ended its run without our knowing."""
    known = None if running is None else build_state("allow", running=running)
    states, stored = ReadStates(known, build_state("allow", last=NOW + 1)), NOW + 1
    decider = build_decider({})
    decider._cache = cast("Any", states)
    found = await decider._read_current("job", "me")
    assert found is not None
    assert states.reads == is_read
    assert found.state.last == (stored if is_read else NOW)


@pytest.mark.parametrize("is_on_duty", [False, True])
async def test_a_state_that_is_gone_is_stored_again_by_the_process_that_fires_it(
    is_on_duty: bool,
) -> None:
    """Somebody has removed the record by hand."""
    states, restored = ReadStates(None, None), list[str]()

    async def restore(name: str) -> None:
        restored.append(name)
        states.stored = build_state("skip")

    decider = build_decider({})
    decider._cache, decider._restore = cast("Any", states), restore
    decider._duty.names = frozenset({"job"} if is_on_duty else ())
    assert (await decider._read_current("job", "me") is not None) is is_on_duty
    assert restored == (["job"] if is_on_duty else [])


@pytest.mark.parametrize("lost_by", ["the start", "the state", "the sessions", "nothing"])
async def test_a_process_that_stood_still_decides_nothing(lost_by: str) -> None:
    """Whichever request took so long: others would resume at once what it starts."""
    states = ReadStates(build_state("skip", running=(OTHERS,)), build_state("skip"))
    decider = build_decider({})
    membership: Any = decider._membership
    membership.is_trusted = lost_by != "the start"

    async def read(name: str) -> Any:
        membership.is_trusted &= lost_by != "the state"
        return await ReadStates.read(states, name)

    async def find_gone(_: JobState) -> set[str]:
        membership.is_trusted &= lost_by != "the sessions"
        return set()

    class Written(Exception):
        """It came to the write."""

    async def update(*_: Any) -> None:
        raise Written

    parts: Any = decider
    parts._cache = SimpleNamespace(known=states.known, read=read, update=update)
    parts._owners.find_gone = find_gone
    parts._duty.names = frozenset({"job"})
    with pytest.raises(Written if lost_by == "nothing" else Unavailable):
        await decider.decide(cast("Any", SimpleNamespace(name="job")), "me", "new", ())


NEW = msgspec.structs.replace(MINE, id="new", instant=NOW - 60)
LOST = msgspec.structs.replace(ORPHAN, is_manual=True)
DUE = {"last": NOW - 3000}


@pytest.mark.parametrize(
    ("fields", "is_on_duty", "started", "lost", "is_changed"),
    [
        (DUE, True, ["new"], [], True),
        # Another process fires it since the state was read.
        (DUE, False, [], [], False),
        # An earlier call has written it, and its reply was lost.
        ({"running": (NEW,)}, True, ["new"], [], False),
        ({"running": (NEW,)}, False, ["new"], [], False),
        ({}, True, [], [], False),
        ({"running": (LOST,)}, True, [], ["orphan"], True),
        ({"running": (LOST,), **DUE}, True, ["new"], ["orphan"], True),
        ({"running": (LOST,)}, False, [], [], False),
    ],
)
async def test_what_is_decided_is_started_told_and_noted(
    fields: dict[str, Any], is_on_duty: bool, started: list[str], lost: list[str], is_changed: bool
) -> None:
    """By the state and the duty at the moment of the write; a successor hears how far it got."""
    before = build_state("skip", **fields)
    told: dict[str, list[str]] = {"started": [], "lost": [], "history": []}
    written: list[JobState] = []
    parts: Any = build_decider({"job": SimpleNamespace(state=before)})

    async def find_gone(_: JobState) -> set[str]:
        if not is_on_duty:
            parts._duty.names = frozenset()
        return {"dead"}

    async def update(_: str, decide: Any) -> Any:
        after = decide(before)
        if after not in (None, before):
            written.append(after)
        return SimpleNamespace(state=before if after is None else after)

    async def write_history(name: str, now: float) -> None:
        assert now == NOW
        told["history"].append(name)

    async def read(_: str) -> Any:
        return parts._cache.known["job"]

    parts._cache.read, parts._cache.update = read, update
    parts._cache.write_history = write_history
    parts._membership.is_trusted = True
    parts._owners.find_gone = find_gone
    parts._duty.names, parts._duty.is_dirty = frozenset({"job"}), False
    parts._runs = SimpleNamespace(
        start=lambda _, __, run: told["started"].append(run.id),
        report_loss=lambda _, run: told["lost"].append(run.id),
    )
    assert await parts.decide(cast("Any", SimpleNamespace(name="job")), "me", "new", ())
    assert told == {"started": started, "lost": lost, "history": ["job"]}
    assert bool(written) is is_changed
    assert parts._duty.is_dirty
