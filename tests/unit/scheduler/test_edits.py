"""Which jobs were changed since a leader has last looked."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from chance import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from jobsync.components import Components
from jobsync.database.keyspace import Keyspace
from jobsync.errors import NewerFormat
from jobsync.scheduler import edits
from jobsync.scheduler.edits import Edits, JobEdits
from jobsync.stores.contract import Put
from jobsync.stores.memory import MemoryStore

COUNTS = st.sampled_from([0, 1, 2, 200, 300, 499, 500, 501, 600])
BATCHES = st.builds(
    lambda first, count: {str(number) for number in range(first, first + count)},
    st.integers(0, 50),
    COUNTS,
)
"""Some of them fit into the record together, and some do not."""

NOTES = st.dictionaries(st.sampled_from("abc"), st.sampled_from([True, False, None]))


def open_edits() -> JobEdits:
    """Return the edits of an empty store."""
    components = Components.system()
    store = MemoryStore(components=components)
    records = Keyspace(lambda: store, "schedule/default/edits/", components, "edits")
    return JobEdits(records, components.clock, report=lambda _: None)


@settings(deadline=None)
@given(batches=st.lists(BATCHES, max_size=8))
def test_a_leader_hears_of_every_change_or_that_it_must_look_at_all_jobs(
    batches: list[set[str]],
) -> None:
    """Found: of a change of many jobs that was cut in two, the rest looked like all of it."""

    async def scenario() -> None:
        jobs = open_edits()
        for batch in batches:
            await jobs.note(dict.fromkeys(sorted(batch)))
        found = await jobs.read()
        assert found is not None
        for seen in range(found.revision + 1):
            changed = set[str]().union(*batches[seen:])
            assert found.list_since(seen) in (None, sorted(changed))
        assert len(found.recent) <= edits._MAX_RECENT

    asyncio.run(scenario())


@settings(deadline=None)
@given(notes=st.lists(NOTES, max_size=8))
def test_a_successor_hears_which_jobs_differ_from_their_code(
    notes: list[dict[str, bool | None]],
) -> None:
    """As the latest note of each job says; one that says nothing of it changes nothing."""

    async def scenario() -> None:
        jobs, special = open_edits(), set[str]()
        for revision, note in enumerate(notes, 1):
            await jobs.note(note)
            for name, is_special in note.items():
                if is_special is not None:
                    (special.add if is_special else special.discard)(name)
            found = await jobs.read()
            assert found is not None
            assert (found.revision, found.special) == (revision, tuple(sorted(special)))

    asyncio.run(scenario())


async def test_a_leader_that_is_up_to_date_looks_at_what_was_changed_alone() -> None:
    """However many changes there were before."""
    jobs = open_edits()
    for number in range(edits._MAX_RECENT + 10):
        await jobs.note({f"job-{number % 7}": None})
    before = await jobs.read()
    await jobs.note({"job-a": True})
    after = await jobs.read()
    assert before is not None
    assert after is not None
    assert after.list_since(before.revision) == ["job-a"]
    assert len(after.recent) == edits._MAX_RECENT


@pytest.mark.parametrize(
    ("found", "since"),
    [
        # Nobody has changed anything.
        (Edits(), {0: []}),
        # It was repaired: nobody knows what has changed before.
        (Edits(revision=9), {0: None, 8: None, 9: [], 10: []}),
        (
            Edits(revision=9, recent=((7, "b"), (8, "a"), (8, "c"), (9, "b"))),
            {0: None, 5: None, 6: ["a", "b", "c"], 7: ["a", "b", "c"], 8: ["b"], 9: [], 10: []},
        ),
    ],
)
def test_changes_are_followed_one_by_one_as_far_as_they_are_known(
    found: Edits, since: dict[int, list[str] | None]
) -> None:
    """From the oldest revision that is known; before it, all jobs are looked at."""
    assert {revision: found.list_since(revision) for revision in since} == since


async def test_damaged_edits_are_repaired_so_that_all_leaders_look_at_all_jobs() -> None:
    """Whatever revision they have seen; the next change is followed as usual."""
    reports: list[Exception] = []
    components = msgspec.structs.replace(Components.system(), clock=FakeClock())
    store = MemoryStore(components=components)
    records = Keyspace(lambda: store, "schedule/default/edits/", components, "edits")
    jobs = JobEdits(records, components.clock, report=reports.append)
    for _ in range(5):
        await jobs.note({"a": True})
    before = await jobs.read()
    assert before is not None
    await records.change("latest", lambda _: {"revision": "many"})
    assert await jobs.read() is None
    await jobs.note({"b": True})
    repaired = await jobs.read()
    assert repaired is not None
    revision = int(components.clock.wall().seconds * 1000) + 1
    assert repaired == Edits(revision=revision, special=("b",), recent=((revision, "b"),))
    for seen in (0, 1, before.revision, before.revision + 1):
        assert repaired.list_since(seen) is None
    assert len(reports) == 2
    await jobs.note({"c": None})
    after = await jobs.read()
    assert after is not None
    assert after.list_since(repaired.revision) == ["c"]
    assert after.special == ("b",)


async def test_20_jobs_of_a_process_stay_announced() -> None:
    """The latest ones; those that run do not count. Nothing is written for those that stay."""
    jobs = open_edits()
    names = [f"job{number:02}" for number in range(23)]
    for count, name in enumerate(names[:20], start=1):
        assert await jobs.announce_run("w1", name, running=()) == (*names[:count],)
    assert await jobs.announce_run("w1", "job20", running={"job00"}) == (*names[:21],)
    assert await jobs.announce_run("w1", "job21", running={"job00"}) == ("job00", *names[2:22])
    assert await jobs.announce_run("w1", "job02", running={"job00"}) == (
        *("job00", *names[3:22]),
        "job02",
    )
    assert await jobs.announce_run("w1", "job22", running=()) == (*names[4:22], "job02", "job22")
    found = await jobs.read()
    assert found is not None
    assert found.by_hand == {"w1": (*names[4:22], "job02", "job22")}
    assert (found.revision, found.special, found.recent) == (0, (), ())


FULL = Edits(
    revision=3,
    special=("b",),
    recent=((2, "a"), (3, "b")),
    by_hand={"w1": ("a",), "w2": ("b", "c")},
)
"""A record of which each part has something, and no two the same."""

CHANGES: dict[str, tuple[Callable[[JobEdits], Awaitable[object]], Edits]] = {
    "a note": (
        lambda jobs: jobs.note({"c": True, "b": False}),
        msgspec.structs.replace(FULL, revision=4, special=("c",)),
    ),
    "a run of a process that has run others": (
        lambda jobs: jobs.announce_run("w1", "b", running=()),
        msgspec.structs.replace(FULL, by_hand={**FULL.by_hand, "w1": ("a", "b")}),
    ),
    "a run of another process": (
        lambda jobs: jobs.announce_run("w3", "a", running=()),
        msgspec.structs.replace(FULL, by_hand={**FULL.by_hand, "w3": ("a",)}),
    ),
    "one of a dead process's jobs": (
        lambda jobs: jobs.forget_announced({"w2": ("b",)}),
        msgspec.structs.replace(FULL, by_hand={"w1": ("a",), "w2": ("c",)}),
    ),
    "all of a dead process's jobs": (
        lambda jobs: jobs.forget_announced({"w2": ("c", "b", "a")}),
        msgspec.structs.replace(FULL, by_hand={"w1": ("a",)}),
    ),
    "a run that was announced": (
        lambda jobs: jobs.announce_run("w2", "c", running=()),
        FULL,
    ),
    "jobs that nobody has announced": (
        lambda jobs: jobs.forget_announced({"w1": ("b",), "w3": ("a",)}),
        FULL,
    ),
}
"""What is done, and what the record then says."""


async def open_records(value: Edits) -> tuple[JobEdits, Keyspace, list[Exception]]:
    """Return edits that are stored, the record, and what is reported."""
    components, reports = Components.system(), list[Exception]()
    store = MemoryStore(components=components)
    records = Keyspace(lambda: store, "schedule/default/edits/", components, "edits")
    await records.change("latest", lambda _: msgspec.to_builtins(value))
    return JobEdits(records, components.clock, report=reports.append), records, reports


@pytest.mark.parametrize("what", CHANGES)
async def test_a_change_of_one_part_leaves_the_others(what: str) -> None:
    """What leaders have to look at, and whose runs they watch; what stays costs no write."""
    jobs, records, reports = await open_records(FULL)
    before = await records.get("latest")
    change, expected = CHANGES[what]
    await change(jobs)
    found = await jobs.read()
    assert found is not None
    known = len(FULL.recent)
    assert msgspec.structs.replace(found, recent=found.recent[:known]) == expected
    assert sorted(found.recent[known:]) == ([(4, "b"), (4, "c")] if what == "a note" else [])
    assert (await records.get("latest") == before) is (expected == FULL)
    assert not reports


@pytest.mark.parametrize("what", CHANGES)
async def test_a_record_of_newer_code_is_reported_and_stays(what: str) -> None:
    """Whoever would change it goes on."""
    jobs, records, reports = await open_records(FULL)
    base = await records.get("latest")
    assert base is not None
    await records.store.write([Put(base.key, base.value, base, format=99)])
    newer = await records.get("latest")
    await CHANGES[what][0](jobs)
    assert await records.get("latest") == newer
    assert [type(report) for report in reports] == [NewerFormat] * (CHANGES[what][1] != FULL)
