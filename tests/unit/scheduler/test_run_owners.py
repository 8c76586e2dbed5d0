"""Whose runs and requests are orphans, by what this process sees and what the store says."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from jobsync.core.job_state import ActiveRun, JobDefinition, JobState, RunRequest
from jobsync.core.trust import Timing
from jobsync.scheduler.run_owners import RunOwners
from jobsync.stores.memory import MemoryStore

OWNERS = {
    # It performs the run, or has lost it.
    "me": False,
    "me, unknown": True,
    # It is seen alive or dead.
    "living": False,
    "seen-dead": True,
    # It is not seen: the store tells.
    "unseen-live": False,
    "unseen-dead": True,
    "missing": True,
    # It was released.
    "": True,
}
"""Whether a run of such an owner is an orphan."""


async def open_owners() -> RunOwners:
    """Return the owners of runs, for a process that performs one run."""
    store = MemoryStore()
    for name, state in (("unseen-live", "live"), ("unseen-dead", "dead")):
        timing = msgspec.to_builtins(Timing(heartbeat=5.0, timeout=15.0))
        session = {"worker": "w", "state": state, "beat": 1, "timing": timing}
        await store.create(f"session/{name}", session)
    watched: dict[str, set[str]] = {}
    membership = SimpleNamespace(
        incarnation="me",
        living=frozenset({"living"}),
        is_dead={"seen-dead"}.__contains__,
        watch=watched.__setitem__,
        watched=watched,
    )
    jobs = SimpleNamespace(store=store, prefix="schedule/eu/")
    cache = SimpleNamespace(jobs=jobs, known={})
    runs = SimpleNamespace(has={"mine"}.__contains__)
    parts: Any = (cache, runs, membership)
    return RunOwners(*cast("Any", parts))


def build_run(owner: str) -> ActiveRun:
    """Return a run of an owner."""
    run_id = "mine" if owner == "me" else "another"
    session = owner.partition(",")[0]
    return ActiveRun(id=run_id, instant=1, owner=session, started_at=1.0)


def build_state(*runs: ActiveRun, requests: tuple[RunRequest, ...] = ()) -> JobState:
    """Return the state of a job."""
    definition = JobDefinition(schedule="@daily")
    return JobState(definition=definition, defined_by="", last=0, running=runs, requests=requests)


@pytest.mark.parametrize("owner", OWNERS)
async def test_a_run_is_an_orphan_if_its_process_is_gone(owner: str) -> None:
    """One that is not seen is looked up: what a process sees may be incomplete."""
    owners, run = await open_owners(), build_run(owner)
    state = build_state(run)
    gone = await owners.find_gone(state)
    assert owners.is_orphan(run, gone) is OWNERS[owner]
    assert await owners.has_orphans(state) is OWNERS[owner]
    beside = build_state(build_run("living"), run)
    assert await owners.has_orphans(beside) is OWNERS[owner]


@pytest.mark.parametrize("owner", OWNERS)
async def test_those_who_wait_in_line_are_looked_up_too(owner: str) -> None:
    """A request whose process is gone holds up nobody."""
    owners, session = await open_owners(), owner.partition(",")[0]
    request = RunRequest(id="another", at=1.0, owner=session)
    gone = await owners.find_gone(build_state(build_run("living"), requests=(request,)))
    expected = OWNERS[owner] and session not in ("", "me")
    assert gone == ({session} if expected else set())


async def test_all_who_have_ended_are_found_at_once() -> None:
    """Those that are seen dead, and those that the store tells of; this process never."""
    owners = await open_owners()
    sessions = {owner.partition(",")[0] for owner in OWNERS} - {""}
    expected = {owner for owner in sessions if OWNERS[owner] and owner != "me"}
    assert await owners.find_ended(sessions) == expected
    assert await owners.find_ended(["seen-dead", "living"]) == {"seen-dead"}
    assert await owners.find_ended(["unseen-dead", "me"]) == {"unseen-dead"}
    assert await owners.find_ended([]) == set()


@pytest.mark.parametrize("owner", OWNERS)
async def test_a_job_with_an_orphan_is_listed_as_far_as_is_known(owner: str) -> None:
    """Whichever of its runs it is; nobody is asked for processes that are not seen."""
    owners = await open_owners()
    known: dict[str, Any] = owners._cache.known
    runs = {"alone": [owner], "last": ["living", owner], "first": [owner, "living"], "none": []}
    for name, each in runs.items():
        known[name] = SimpleNamespace(state=build_state(*map(build_run, each)))
    is_known = OWNERS[owner] and owner not in {"unseen-dead", "missing"}
    assert sorted(owners.list_orphaned()) == (["alone", "first", "last"] if is_known else [])


@pytest.mark.parametrize(
    ("names", "announced", "watched"),
    [
        ({"a"}, {}, {"living", "seen-dead"}),
        ({"b"}, {}, {"unseen-live"}),
        ({"a", "b"}, {}, {"living", "seen-dead", "unseen-live"}),
        ({"unknown"}, {}, set()),
        (set(), {"w1": ("a",)}, set()),
        ({"b"}, {"w1": ("a",), "w2": ("a", "b"), "w3": ()}, {"unseen-live", "w2"}),
        ({"unknown"}, {"w1": ("unknown",), "me": ("unknown",)}, {"w1"}),
    ],
)
async def test_the_processes_of_jobs_on_duty_are_watched(
    names: set[str], announced: dict[str, tuple[str, ...]], watched: set[str]
) -> None:
    """Those that run one, or may by hand; not this process, nor one that a run was taken from."""
    owners = await open_owners()
    known: dict[str, Any] = owners._cache.known
    for name, each in {"a": ["me", "living", "", "seen-dead"], "b": ["unseen-live"]}.items():
        known[name] = SimpleNamespace(state=build_state(*map(build_run, each)))
    owners.watch(names, announced)
    membership: Any = owners._membership
    assert membership.watched == {"schedule schedule/eu/": watched}
