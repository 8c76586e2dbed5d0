"""Which jobs were changed since a leader has last looked."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from jobsync.components import Components
from jobsync.database.keyspace import Keyspace
from jobsync.scheduler import edits
from jobsync.scheduler.edits import JobEdits
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
