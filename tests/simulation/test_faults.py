"""One fault after the other: whoever sends again remembers what an earlier copy may still do.

The stories are in `fault_stories`. The mutants forget something between two requests.
"""

from collections.abc import Callable, Sequence
from typing import Any

import fault_stories
import pytest
from fault_stories import STORIES
from mutants import is_caught

from jobsync import Misconfigured, OutcomeUnknown, Record, Store, Unavailable
from jobsync.core.codec import Json
from jobsync.database import locks
from jobsync.queue.backend import Settlement
from jobsync.queue.sql.common import SqlBackend
from jobsync.stores.memory import MemoryStore
from jobsync.stores.settling import SettlingStore
from jobsync.testing import World, check_repeats, check_story, connect
from jobsync.testing.stories import Story
from jobsync.testing.weather import FAULTS, Fault

pytestmark = pytest.mark.usefixtures("without_logs")

Patch = Callable[[pytest.MonkeyPatch], None]

SEEDS = (0, -1)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories(story: Story) -> None:
    """All faults alone, in pairs and in threes are told apart and survived."""
    check_story(story, SEEDS)


def test_a_story_repeats() -> None:
    """Surprises follow from the seed, as everything does."""
    check_repeats(fault_stories.locks, seed=-1)


async def _read_age(store: Store) -> float | None:
    record = await store.get("n/a")
    assert record is not None
    return await store.age(record)


_CALLS: dict[str, Callable[[Store], Any]] = {
    "get": lambda store: store.get("n/a"),
    "write": lambda store: store.create("n/b", 1),
    "heads": lambda store: store.heads("n/"),
    "scan": lambda store: store.scan("n/"),
    "append": lambda store: store.append("h", [1]),
    "read": lambda store: store.read("h"),
    "discard": lambda store: store.discard("h", older_than=3600.0),
    "bury": lambda store: store.bury("n/"),
    "drop": lambda store: store.drop(["n/a"]),
    "wait": lambda store: store.wait("n/", 1.0),
    "now": lambda store: store.now(),
    "age": _read_age,
}
"""Every call of a store."""


@pytest.mark.parametrize("call", _CALLS)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_can_have_every_fault(call: str, fault: Fault) -> None:
    """It is counted, and the caller waits, or gets an error that says what may have happened."""
    world = World(1)

    async def story() -> float:
        shared = MemoryStore(components=world.components)
        await shared.create("n/a", 1)
        node = world.node("a")
        store = connect(node, shared)
        (link,) = node.links
        link.ordain(call, fault)
        try:
            await _CALLS[call](store)
        except (OutcomeUnknown, Unavailable, Misconfigured):
            assert fault not in {"slow", "slow_reply", "doubled"}
        return world.loop.time()

    took = world.run(story)
    assert world.faults >= 1 or call == "wait"
    # A settled write may take a few seconds more, because of other faults than the first.
    is_slow = fault in {"slow", "slow_reply", "unanswered", "late"}
    assert took > 0.05 if is_slow else took < 5.0


def test_no_call_of_a_store_is_left_out() -> None:
    """A new call needs faults too."""
    others = {"get_many", "create", "put", "delete", "close", "sql"}
    calls = {
        name for name in vars(Store) if not name.startswith("_") and callable(vars(Store)[name])
    }
    assert calls - others <= _CALLS.keys()


def forgets_that_a_copy_was_sent(patch: pytest.MonkeyPatch) -> None:
    """Lines whose first copy got no reply are reported as refused, because the second one is."""

    async def append(
        self: SettlingStore, stream: str, entries: Sequence[Json], *, batch: str = ""
    ) -> None:
        batch = batch or self._ids.batch()
        while True:
            try:
                return await self.inner.append(stream, entries, batch=batch)
            except OutcomeUnknown:
                await self._clock.sleep(self._randomness.uniform(0, 1.0))

    patch.setattr(SettlingStore, "append", append)


def names_each_copy(patch: pytest.MonkeyPatch) -> None:
    """Each copy of lines is a batch of its own."""
    append = SettlingStore.append

    async def again(
        self: SettlingStore, stream: str, entries: Sequence[Json], *, batch: str = ""
    ) -> None:
        for _ in range(5):
            try:
                return await self.inner.append(stream, entries, batch=self._ids.batch())
            except (OutcomeUnknown, Unavailable):
                continue
        return await append(self, stream, entries, batch=batch)

    patch.setattr(SettlingStore, "append", again)


def forgets_a_take_that_may_land(patch: pytest.MonkeyPatch) -> None:
    """A lock is free, so its caller is content, and its own write arrives later."""

    def never(_: Record | None, __: Record | None) -> bool:
        return False

    patch.setattr(locks, "_is_same", never)


def forgets_that_a_settlement_was_sent(patch: pytest.MonkeyPatch) -> None:
    """A settlement whose first copy got no reply is reported as refused with the second one."""

    async def settle(self: SqlBackend, batch: Sequence[Settlement]) -> set[str]:
        try:
            return await self._settle(batch)
        except OutcomeUnknown:
            return await self._settle(batch)

    patch.setattr(SqlBackend, "_settle_until_answered", settle)


KILLED: dict[Patch, tuple[Story, str]] = {
    forgets_that_a_copy_was_sent: (fault_stories.appends, "C5"),
    names_each_copy: (fault_stories.appends, "C5"),
    forgets_a_take_that_may_land: (fault_stories.locks, "L3"),
    forgets_that_a_settlement_was_sent: (fault_stories.messages, "Q15"),
}
"""For each mutant a story that catches it, and the invariant that it breaks."""


@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: mutant.__name__)
def test_the_world_notices(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded story reports a violation of the recorded invariant."""
    story, invariant = KILLED[mutant]
    mutant(monkeypatch)
    assert is_caught(story, invariant)
