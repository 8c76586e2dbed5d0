"""What a queue knows of its other processes: who coordinates, who works, and the right time."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components
from jobsync.coordination.coordinator import Coordinator
from jobsync.coordination.membership import Membership
from jobsync.events import Event, Events
from jobsync.queue.events import DelaysVetoed, TicketsPublished
from jobsync.queue.fleet import PluginFleet
from jobsync.queue.reporter import QueueReporter
from jobsync.queue.worker_status import WorkerStatus, build_worker_facts

QUEUE = "default/tasks"
AHEAD, BEHIND, UNKNOWN = "it is ahead", "it is behind", "it is not known yet"


class Surroundings:
    """A plugin, its session and its candidacy, around a fleet whose clock a test sets."""

    incarnation = "me"
    worker_id = "worker-1"
    queue = QUEUE
    store = None

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.components = Components(
            clock=self.clock, randomness=SeededRandomness(1), events=Events()
        )
        self.events: list[Event] = []
        self.dead: set[str] = set()
        self.peers: list[Any] = []
        self.role: Any = None
        self.term: Any = None
        self.refreshed: list[float] = []
        self.veto = ""
        self.corrected: list[str] = []
        """What the next refreshes find."""
        self.fleet = PluginFleet(
            self,
            cast("Membership", self),
            cast("Coordinator", self),
            cast("QueueReporter", self),
            2,
        )
        self.fleet._fleet_clock = cast("Any", self)

    @property
    def is_off(self) -> bool:
        return self.veto in {AHEAD, BEHIND}

    @property
    def election(self) -> Any:
        return SimpleNamespace(role=self.role)

    def is_dead(self, session: str) -> bool:
        return session in self.dead

    async def members(self) -> list[Any]:
        return self.peers

    async def refresh(self) -> None:
        self.refreshed.append(self.clock.mono_seconds)
        if self.corrected:
            self.veto = self.corrected.pop(0)

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def around() -> Surroundings:
    """Nobody else, and a clock that is right."""
    return Surroundings()


@pytest.mark.parametrize(
    ("vetoes", "reported"),
    [
        (["", ""], []),
        ([AHEAD, AHEAD], [AHEAD]),
        ([AHEAD, "", AHEAD], [AHEAD, AHEAD]),
        ([AHEAD, BEHIND], [AHEAD, BEHIND]),
        ([UNKNOWN, ""], []),
        ([UNKNOWN, AHEAD, UNKNOWN, AHEAD], [AHEAD]),
    ],
)
async def test_each_time_that_the_clock_is_wrong_is_reported_once(
    around: Surroundings, vetoes: list[str], reported: list[str]
) -> None:
    """Also the second time; a time that is not known is no error."""
    for veto in vetoes:
        around.veto = veto
        assert await around.fleet.find_clock_veto() == veto
    assert around.events == [DelaysVetoed(queue=QUEUE, reason=reason) for reason in reported]


async def test_a_clock_that_is_wrong_is_compared_once_a_second(around: Surroundings) -> None:
    """One that is right is not compared at all, and what a comparison finds counts at once."""
    start = around.clock.mono_seconds
    await around.fleet.find_clock_veto()
    around.veto = UNKNOWN
    for moment in (0.0, 0.5, 1.0, 1.5, 2.0):
        around.clock.mono_seconds = start + moment
        assert await around.fleet.find_clock_veto() == UNKNOWN
    assert around.refreshed == [start, start + 1, start + 2]
    around.clock.mono_seconds = start + 3
    around.corrected = [""]
    assert await around.fleet.find_clock_veto() == ""
    around.clock.mono_seconds = start + 9
    assert await around.fleet.find_clock_veto() == ""
    assert len(around.refreshed) == 4


@pytest.mark.parametrize(
    ("role", "epoch"),
    [
        (None, None),
        (SimpleNamespace(owner=None, epoch=7), None),
        (SimpleNamespace(owner="gone", epoch=7), None),
        (SimpleNamespace(owner="other", epoch=7), 7),
        (SimpleNamespace(owner="me", epoch=8), 8),
    ],
)
def test_nobody_coordinates_whose_session_is_dead(
    around: Surroundings, role: Any, epoch: int | None
) -> None:
    """Tickets of such an epoch are not waited for."""
    around.role, around.dead = role, {"gone"}
    assert around.fleet.epoch == epoch


@pytest.mark.parametrize(("epoch", "is_term"), [(None, False), (0, False), (1, True)])
def test_a_term_without_an_election_is_none(
    around: Surroundings, epoch: int | None, *, is_term: bool
) -> None:
    """A process that is alone publishes no tickets."""
    around.term = None if epoch is None else SimpleNamespace(epoch=epoch)
    assert around.fleet.term is (around.term if is_term else None)


async def test_the_workers_of_a_queue_are_the_others_that_handle_its_messages(
    around: Surroundings,
) -> None:
    """In order: not this process, nor those that only push, have stopped, or have other queues."""
    works = build_worker_facts(QUEUE, WorkerStatus(concurrency=3))
    facts = {
        "first": works,
        "pushes": {},
        "me": works,
        "stopped": build_worker_facts(QUEUE, None),
        "apart": build_worker_facts("emails/tasks", WorkerStatus(concurrency=3)),
        "newer": {**works, f"queue:{QUEUE}": {"concurrency": "many"}},
        "last": works,
    }
    around.peers = [
        SimpleNamespace(incarnation=name, facts=reported) for name, reported in facts.items()
    ]
    assert await around.fleet.list_workers() == ["first", "last"]


def test_a_ticket_is_reported_with_its_pages_and_its_coordinator(around: Surroundings) -> None:
    """The worker's name, which people know, and not its session."""
    around.fleet.on_published(5)
    assert around.events == [
        TicketsPublished(queue=QUEUE, count=5, coordinator_id="worker-1"),
    ]
