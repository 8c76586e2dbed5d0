"""The nodes of a fleet as people read them: who is alive, and when each was last heard."""

import datetime as dt
import math
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from chance import FakeClock

from jobsync.coordination.session import SESSIONS
from jobsync.core.clock import to_datetime
from jobsync.core.trust import Timing
from jobsync.jobs.registration import NodeList, NodeRecord
from jobsync.stores.contract import Record
from jobsync.stores.memory import MemoryStore

TIMING = Timing(heartbeat=5.0, timeout=15.0)
TRUST = TIMING.timeout - TIMING.margin
"""Seconds for which a node is trusted after the heartbeat that it has sent."""
STORE_TIME = 1_900_000_000.0
"""Far from the wall clock of this machine."""


class FleetStore(MemoryStore):
    """Tells the ages that the test has set: of each version, counted from 0."""

    ages: tuple[float | None, ...] = (0.0,)
    is_overtaken = False
    """Whether each session writes again when its age is asked for the first time."""

    async def age(self, record: Record) -> float | None:
        """Return the age of a record."""
        beat = int(record.value["beat"])
        if self.is_overtaken and beat + 1 < len(self.ages):
            await self.put(record, {**record.value, "beat": beat + 1})
        return self.ages[beat]


class Fleet:
    """Nodes in a store, seen by one of them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = FleetStore()
        self.records: list[NodeRecord] = []
        self.membership = SimpleNamespace(
            timing=TIMING,
            trust_left=0.0,
            store=self.store,
            components=SimpleNamespace(clock=self.clock),
        )
        node = SimpleNamespace(
            membership=self.membership,
            nodes=self._list,
            leader="b",
            claims=SimpleNamespace(store_clock=SimpleNamespace(now=STORE_TIME)),
        )
        self.list = NodeList(cast("Any", node))

    async def _list(self) -> list[NodeRecord]:
        return self.records

    async def add(self, name: str, session: str | None = "live", stage: Any = "ready") -> None:
        """Add a node whose session has a state, or none any more."""
        record = NodeRecord(
            name=name,
            incarnation=f"{name}.1",
            stage=stage,
            applied=0,
            is_observer=False,
            created=1.0,
            host="h",
            pid=1,
        )
        self.records.append(record)
        if session is not None:
            timing = msgspec.to_builtins(TIMING)
            value = {"worker": name, "state": session, "beat": 0, "timing": timing}
            await self.store.create(f"{SESSIONS}{name}.1", value)


@pytest.mark.parametrize(
    ("trust_left", "ago"),
    [(TRUST, 0.0), (TRUST - 3.0, 3.0), (0.5, TRUST - 0.5), (0.0, None), (-2.0, None)],
)
def test_a_node_tells_when_it_sent_the_heartbeat_that_it_is_trusted_for(
    trust_left: float, ago: float | None
) -> None:
    """By this machine's clock; nothing once it is trusted no longer."""
    fleet = Fleet()
    fleet.membership.trust_left = trust_left
    sent = fleet.list.last_heartbeat()
    assert sent == (None if ago is None else to_datetime(fleet.clock.wall_seconds - ago))


@pytest.mark.parametrize(
    ("ages", "is_overtaken", "is_billed", "ago"),
    [
        ((0.0,), False, False, 0.0),
        ((7.5,), False, False, 7.5),
        # Written before the machine of the store was started again.
        ((math.inf,), False, False, None),
        # A store without a clock.
        ((None,), False, False, None),
        ((None,), False, True, None),
        # It has just written again, and only the newest version has an age.
        ((None, 0.5), True, False, 0.5),
        ((None, None, 0.5), True, False, 0.5),
        ((None, math.inf), True, False, None),
    ],
)
async def test_a_node_was_last_heard_by_the_clock_of_the_store(
    ages: tuple[float | None, ...], is_overtaken: bool, is_billed: bool, ago: float | None
) -> None:
    """If it knows; nobody reads again where reading costs money."""
    fleet = Fleet()
    fleet.store.ages, fleet.store.is_overtaken = ages, is_overtaken
    fleet.store.is_billed = is_billed
    await fleet.add("a")
    (found,) = await fleet.list.active()
    expected: dt.datetime | None = None if ago is None else to_datetime(STORE_TIME - ago)
    assert found.last_heartbeat == expected


async def test_nodes_are_alive_until_they_leave_or_their_session_ends() -> None:
    """Each is in one of the two lists, the oldest first; the leader is one of the live ones."""
    fleet = Fleet()
    for name, session, stage in (
        ("d", "dead", "ready"),
        ("gone", None, "ready"),
        ("b", "live", "ready"),
        ("a", "live", "joining"),
        ("left", "live", "left"),
        ("bb", "live", "leaving"),
    ):
        await fleet.add(name, session, stage)
    alive, dead = await fleet.list.active(), await fleet.list.dead()
    assert [(node.name, node.is_leader) for node in alive] == [
        ("a", False),
        ("b", True),
        ("bb", False),
    ]
    assert [node.name for node in dead] == ["d", "gone", "left"]
    assert [node.last_heartbeat is None for node in dead] == [False, True, False]


async def test_a_fleet_without_nodes_asks_the_store_nothing() -> None:
    """An empty request would be refused by some stores."""
    fleet = Fleet()
    fleet.store.get_many = None  # type: ignore[assignment, method-assign]
    assert await fleet.list.active() == []
