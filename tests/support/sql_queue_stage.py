"""A queue on a database whose statements the test answers."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, cast

from chance import FakeClock, SeededRandomness

from jobsync import Components, Event, Events, OutcomeUnknown, Unavailable
from jobsync.errors import Misconfigured
from jobsync.queue.limits import NO_LIMITS, QueueLimits
from jobsync.queue.sql.common import SqlBackend
from jobsync.stores.corruption_log import RecordSetAside
from jobsync.stores.sql import SqlAccess

__all__ = ["AWAY", "ENDS", "LOST", "TOPIC", "WRONG", "SqlStage", "build_row"]

TOPIC, ENDS = "queue/emails", "queue/emails/ends"
LOST = OutcomeUnknown("emails", "the reply was lost")
AWAY = Unavailable("emails", "it is away")
_MANY = 1_000
WRONG = Misconfigured("url", "x", "is wrong", "change it")


class _Access(SqlAccess):
    """Notes who is woken."""

    def __init__(self) -> None:
        self.woken: list[str] = []
        self.waits: list[tuple[str, float]] = []
        self.is_over = asyncio.Event()

    def wake(self, topic: str) -> None:
        """Note it."""
        self.woken.append(topic)

    async def wait(self, topic: str, timeout: float) -> None:
        """Wait until the test says so."""
        self.waits.append((topic, timeout))
        await self.is_over.wait()


def _build_statement(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def run(self: Any, *arguments: Any) -> Any:
        self.asked.append((name, *arguments))
        assert len(self.asked) < _MANY, "a call asks again and again"
        found = self.answers[name]
        answer = found.pop(0) if len(found) > 1 else found[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer(*arguments) if callable(answer) else answer

    return run


_Scripted: Any = type(
    "_Scripted",
    (SqlBackend,),
    {name: _build_statement(name) for name in SqlBackend.__abstractmethods__},
)


class SqlStage:
    """A queue whose statements the test answers; the last answer of each is given again."""

    def __init__(self, limits: QueueLimits = NO_LIMITS, **answers: Any) -> None:
        self.access = _Access()
        self.clock = FakeClock()
        self.told: list[Event] = []
        events = Events()
        events.on(RecordSetAside.name, self.told.append)
        components = Components(clock=self.clock, randomness=SeededRandomness(1), events=events)
        made = _Scripted(self.access, "emails", components, "fifo", limits)
        self.backend = cast("SqlBackend", made)
        self.asked: list[tuple[Any, ...]] = []
        made.asked = self.asked
        made.answers = defaultdict(lambda: [None])
        made.answers |= {
            f"_{name}": answer if isinstance(answer, list) else [answer]
            for name, answer in answers.items()
        }

    def list_asked(self, name: str) -> list[list[Any]]:
        """Return what a statement was asked, each time."""
        return [arguments for each, *arguments in self.asked if each == f"_{name}"]


def build_row(queue: str = "emails", state: str = "ready", id: str = "a") -> list[Any]:
    """Return the row of a message for display."""
    row = [queue, id, state, "1", 0, 0, 4, "", "", 0, 1.0, None, None, None, 2.0, 1, 0, None, ""]
    return [*row, "1"]
