"""Whether a node may join with its settings, by the stored ones and by who is alive."""

import itertools
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from jobsync.components import Components
from jobsync.core.assignment import token_of
from jobsync.core.pins import Pin, write_sheet
from jobsync.core.trust import Timing
from jobsync.errors import Unavailable
from jobsync.events import Events
from jobsync.jobs.events import SettingsChanged
from jobsync.jobs.fleet_settings import FleetSettings
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.registration import NodeRecord
from jobsync.stores.contract import Change, Outcome, Record, Store
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

KEYS = JobKeys("sync_")
MINE: dict[str, Any] = {"total_tokens": 20, "hash_function": "md5"}
THEIRS: dict[str, Any] = {"total_tokens": 30, "hash_function": "md5"}


def node(session: str, **changes: Any) -> NodeRecord:
    """Return a node with the other settings, whose session has this name."""
    fields = {"name": "other", "stage": "ready", "fleet": THEIRS, **changes}
    return NodeRecord(
        incarnation=session, applied=0, is_observer=False, created=0.0, host="", pid=1, **fields
    )


class Stage:
    """A store, sessions in each condition, and one node that wants to join."""

    def __init__(self, nodes: list[NodeRecord]) -> None:
        self.events: list[SettingsChanged] = []
        emitter = Events()
        emitter.on("jobs:settings-changed", self.events.append)
        components = msgspec.structs.replace(Components.system(), events=emitter)
        self.store = MemoryStore(components=components)
        self.watched: dict[str, set[str]] = {}
        membership = SimpleNamespace(
            store=self.store,
            components=components,
            incarnation="me.2",
            worker_id="me",
            watch=self.watched.__setitem__,
            is_dead={"gone.1"}.__contains__,
        )

        async def list_nodes() -> list[NodeRecord]:
            return nodes

        parts: Any = (membership, KEYS, "mine", MINE, list_nodes)
        self.settings = FleetSettings(*cast("Any", parts))

    async def store_sessions(self) -> None:
        """Store the sessions; of "gone.1" and "unseen.1" there is no record."""
        timing = msgspec.to_builtins(Timing(heartbeat=5.0, timeout=15.0))
        for name, state in (("live.1", "live"), ("dead.1", "dead"), ("me.1", "live")):
            session = {"worker": name[:-2], "state": state, "beat": 1, "timing": timing}
            await self.store.create(f"session/{name}", session)

    async def read(self) -> Any:
        """Return the stored settings."""
        record = await self.store.get(KEYS.settings)
        return None if record is None else record.value


MUST = "must be 30 as on the live node other"
CHANGING = "another node is changing at this moment"


@pytest.mark.parametrize(
    ("stored", "nodes", "problem"),
    [
        (None, [node("live.1")], ""),
        (MINE, [node("live.1")], ""),
        (THEIRS, [], ""),
        (THEIRS, [node("live.1")], MUST),
        (THEIRS, [node("dead.1"), node("live.1")], MUST),
        (THEIRS, [node("dead.1")], ""),
        (THEIRS, [node("gone.1")], ""),
        (THEIRS, [node("unseen.1")], MUST),
        (THEIRS, [node("live.1", stage="joining")], MUST),
        (THEIRS, [node("live.1", stage="leaving")], MUST),
        (THEIRS, [node("live.1", stage="left")], ""),
        (THEIRS, [node("live.1", name="mine")], ""),
        (THEIRS, [node("live.1", fleet=MINE)], ""),
        # It was registered by older code.
        (THEIRS, [node("live.1", fleet={})], MUST),
        ({**THEIRS, "changing": "live.1"}, [], CHANGING),
        ({**MINE, "changing": "live.1"}, [], CHANGING),
        ({**THEIRS, "changing": "unseen.1"}, [], CHANGING),
        ({**THEIRS, "changing": "dead.1"}, [], ""),
        ({**THEIRS, "changing": "dead.1"}, [node("live.1")], MUST),
        ({**MINE, "changing": "dead.1"}, [node("live.1")], ""),
        ({**THEIRS, "changing": "me.1"}, [], ""),
        ({**THEIRS, "changing": "me.1"}, [node("live.1")], MUST),
        ({**MINE, "changing": "me.1"}, [], ""),
        # Newer code shares more settings.
        (
            {**MINE, "more": 7},
            [node("live.1", fleet={**MINE, "more": 7})],
            "must be 7 as on the live node other",
        ),
        ({**THEIRS, "more": 7}, [node("live.1", fleet={**THEIRS, "more": 7})], MUST),
    ],
)
async def test_a_node_joins_if_no_live_one_has_other_settings(
    stored: dict[str, Any] | None, nodes: list[NodeRecord], problem: str
) -> None:
    """Its settings are the fleet's then; otherwise the stored ones stay as they are."""
    stage = Stage(nodes)
    await stage.store_sessions()
    if stored is not None:
        await stage.store.create(KEYS.settings, stored)
    found = await stage.settings._find_problem(await stage.settings._read())
    assert problem in str(found) if problem else found is None
    assert await stage.settings.settle() is not bool(problem)
    assert not any(stage.watched.values())
    assert await stage.read() == (stored if problem else MINE)
    changed = [event.changed for event in stage.events]
    was_other = stored is not None and stored["total_tokens"] == 30
    assert changed == ([{"total_tokens": 20}] if was_other and not problem else [])
    if not problem:
        assert await stage.settings.settle()
        assert len(stage.events) == len(changed)


class RefusingStore(StoreDecorator):
    """Refuses one of the writes, counted from 0."""

    refused = -1

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self.refused -= 1
        if self.refused == -1:
            raise Unavailable(self.name, "silent")
        return await self.inner.write(changes)


@pytest.mark.parametrize("refused", range(4))
async def test_a_change_that_was_cut_off_is_completed_by_the_next(refused: int) -> None:
    """The pins have the tokens of the new settings once those are in force."""
    stage = Stage([])
    await stage.store.create(KEYS.settings, THEIRS)
    for name in "ab":
        pins = [Pin(task="t", token=token_of("t", 30), patterns=("a",))]
        await stage.store.create(KEYS.pins_of(name), write_sheet(name, pins))
    stage.settings._store = store = RefusingStore(stage.store)
    store.refused = refused
    with pytest.raises(Unavailable):
        await stage.settings.settle()
    assert await stage.settings.settle()
    assert await stage.read() == MINE
    sheets = [record.value for record in await store.scan(KEYS.pins)]
    tokens = [batch["tokens"] for sheet in sheets for batch in sheet["batches"]]
    assert tokens == [[token_of("t", 20)]] * 2


class WatchedStore(StoreDecorator):
    """Tells of each request before it is made."""

    def __init__(self, inner: Store, on_request: Callable[[], Awaitable[None]]) -> None:
        super().__init__(inner)
        self._on_request = on_request

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        await self._on_request()
        return await self.inner.get_many(keys, tombstones=tombstones)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        await self._on_request()
        return await self.inner.write(changes)


REQUESTS = 12
"""More than a change of settings takes."""


async def test_never_do_two_nodes_with_different_settings_go_on() -> None:
    """Whichever steps of the one the other takes its two between: it registers, and reads."""
    places = itertools.combinations_with_replacement(range(REQUESTS), 2)
    ends = {await settle_beside(*each) for each in places}
    assert ends == {(True, False), (False, True), (False, False)}


async def settle_beside(registers: int, reads: int) -> tuple[bool, bool]:
    """Settle, while another node takes its steps before these requests; return who goes on."""
    nodes: list[NodeRecord] = []
    stage, seen, requests = Stage(nodes), list[Any](), itertools.count()
    await stage.store_sessions()
    await stage.store.create(KEYS.settings, THEIRS)

    async def take_steps() -> None:
        number = next(requests)
        if number == registers:
            nodes.append(node("live.1"))
        if number == reads:
            seen.append(await stage.read())

    stage.settings._store = WatchedStore(stage.store, take_steps)
    goes_on = await stage.settings.settle()
    while not seen:
        await take_steps()
    return goes_on, seen == [THEIRS]
