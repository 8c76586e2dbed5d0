"""Workers that share tasks on one store, each a real process, and what must hold of them."""

import itertools
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, Self

import labourer
import msgspec
from ledger import Fact, Ledger
from waiting import now, until

from jobsync import CoordinationConfig, Job

__all__ = ["Deed", "Report", "Strike", "Worker", "Workshop", "judge"]

DAY = date(2026, 1, 5)


class Deed(Fact, frozen=True):
    """A fact that a worker told."""

    @property
    def task(self) -> str:
        """The task that it is about."""
        return str(self["task"])


class Strike(msgspec.Struct, frozen=True):
    """A worker was killed or frozen."""

    who: str
    at: float


class Worker:
    """A labourer, seen from outside."""

    def __init__(self, orders: labourer.Orders, complaints: Path) -> None:
        self.name = orders.node
        self.is_doomed = False
        self._complaints = complaints
        with complaints.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, labourer.__file__, msgspec.json.encode(orders).decode()],
                stdin=subprocess.PIPE,
                stderr=stderr,
            )

    def __repr__(self) -> str:
        return self.name

    @property
    def complaints(self) -> str:
        """What it wrote to stderr: nothing, as long as nothing dies unheard."""
        return self._complaints.read_text()

    def begin(self) -> None:
        """Let it enter its job."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def strike(self, signal_: signal.Signals) -> Strike:
        """Send a signal."""
        self.is_doomed |= signal_ == signal.SIGKILL
        self.process.send_signal(signal_)
        return Strike(self.name, now())

    async def ended(self) -> int:
        """Wait until it is gone; give its exit status."""
        await until(lambda: self.process.poll() is not None, f"{self} ends")
        return self.process.returncode


class Workshop:
    """Workers on one store, and the ledger that they share.

    Args:
        url: the store.
        folder: where the ledger is kept.
        loop: how they go through the tasks.
        tasks: how many there are.
        seconds: what each takes.
        settings: of all of them.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        loop: labourer.Loop,
        *,
        tasks: int = 0,
        seconds: float = 0.005,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.tasks = [f"task-{number:05d}" for number in range(tasks)]
        self.everybody: list[Worker] = []
        self._url = url
        self._folder = folder
        self._ledger = Ledger(folder / "ledger.jsonl", Deed)
        self._loop = loop
        self._seconds = seconds
        self._settings = dict(settings or {})
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.everybody:
            if worker.process.poll() is None:
                worker.strike(signal.SIGKILL)
            worker.process.wait()
            assert worker.process.stdin is not None
            with suppress(BrokenPipeError):
                worker.process.stdin.close()

    async def prepare(self, count: int) -> list[Worker]:
        """Start processes that enter nothing before they are told to."""
        workers = [self._hire() for _ in range(count)]
        self.everybody += workers
        await self.told("waits", workers)
        return workers

    async def start(self, count: int) -> list[Worker]:
        """Start processes, and let them enter all at once."""
        workers = await self.prepare(count)
        for worker in workers:
            worker.begin()
        return workers

    async def told(self, what: str, workers: Iterable[Worker], since: float = 0.0) -> None:
        """Wait until workers have told a fact."""
        names = {worker.name for worker in workers}
        await until(
            lambda: names <= {deed.who for deed in self.deeds(what) if deed.at >= since},
            f"{names}: {what}",
        )

    def deeds(self, *what: str) -> list[Deed]:
        """Give what was told, of some kinds or of all, in the order of the ledger.

        Raises:
            AssertionError: a worker is gone, though nobody has struck it.
        """
        for worker in self.everybody:
            status = worker.process.poll()
            assert not status or worker.is_doomed, f"{worker}, {status}: {worker.complaints}"
        return self._ledger.told(*what)

    def last(self, what: str, worker: Worker) -> Deed:
        """Give the latest of a worker's facts of a kind."""
        return [deed for deed in self.deeds(what) if deed.who == worker.name][-1]

    async def shared(self, workers: Sequence[Worker], since: float = 0.0) -> None:
        """Wait until each task is one worker's to claim, and no other's, as they all say."""

        def is_shared() -> bool:
            words = [self.last("may claim", worker) for worker in workers]
            claimable = [task for word in words for task in word["tasks"]]
            is_late = all(word["asked"] >= since for word in words)
            return is_late and sorted(claimable) == self.tasks and all(w["tasks"] for w in words)

        await self.told("may claim", workers)
        await until(is_shared, f"{workers} share all tasks")

    def audit(self) -> tuple[dict[str, str], dict[str, str]]:
        """Read the tasks that are audited as done, and the others claimed, with their states."""
        settings = CoordinationConfig(**self._settings)
        with Job(
            "auditor",
            "tests",
            coordination_config=settings,
            url=self._url,
            date=DAY,
            observer=True,
            wait_on_enter=0,
        ) as job:
            done = {line["task_id"]: line["state"] for line in job.get_audit()}
            return done, {line["task_id"]: line["state"] for line in job.incomplete_tasks()}

    def complaints(self) -> list[str]:
        """Give what workers wrote to stderr, and what their nodes failed of."""
        found = [f"{each}: {each.complaints}" for each in self.everybody if each.complaints]
        return found + [f"node failed: {deed}" for deed in self.deeds("jobs:node-failed")]

    def _hire(self) -> Worker:
        name = f"node-{next(self._numbers)}"
        orders = labourer.Orders(
            url=self._url,
            node=name,
            ledger=str(self._ledger.path),
            loop=self._loop,
            tasks=len(self.tasks),
            seconds=self._seconds,
            settings=self._settings,
        )
        return Worker(orders, self._folder / f"{name}.err")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the tasks."""

    twice: list[str]
    """Done twice, beyond what was in hand of a struck worker."""
    never: list[str]
    again: list[str]
    """In hand of a struck worker, and therefore started again."""
    overlapping: list[str]
    """Done by two workers at one time, likewise."""


def judge(
    tasks: Sequence[str], deeds: Sequence[Deed], strikes: Iterable[Strike], loop: labourer.Loop
) -> Report:
    """Say which tasks were done twice or never, by the workers' own records."""
    in_hand = {task for strike in strikes for task in _in_hand(deeds, strike, loop)}
    begun = Counter(deed.task for deed in deeds if deed.what == "begun")
    ended = {deed.task for deed in deeds if deed.what == "ended"}
    repeated = {task for task, count in begun.items() if count > 1}
    return Report(
        twice=sorted(repeated - in_hand),
        never=sorted(set(tasks) - ended),
        again=sorted(repeated & in_hand),
        overlapping=sorted(_overlapping(deeds) - in_hand),
    )


def _in_hand(deeds: Sequence[Deed], strike: Strike, loop: labourer.Loop) -> set[str]:
    """Give the task that a worker had in hand when it was struck, or the two of which one was.

    One that it had claimed without having begun it shows as the first that it began later. And
    by `job.tasks` one is in hand until it is marked, which is when the next is asked for.
    """
    mine = [deed for deed in deeds if deed.who == strike.who]
    before = [deed for deed in mine if deed.at < strike.at]
    last = next((d for d in reversed(before) if d.what in {"claims", "begun", "ended"}), None)
    if last is not None and last.what != "ended":
        return {last.task}
    later = (d for d in mine if d.at >= strike.at and d.what in {"claims", "begun"})
    unmarked = [last] if last is not None and loop == "tasks" else []
    return {deed.task for deed in (*unmarked, *itertools.islice(later, 1))}


def _overlapping(deeds: Sequence[Deed]) -> set[str]:
    """Give the tasks that somebody began while another was doing them."""
    doing: dict[str, set[str]] = {}
    found = set()
    for deed in deeds:
        if deed.what == "begun":
            doing.setdefault(deed.task, set()).add(deed.who)
            if len(doing[deed.task]) > 1:
                found.add(deed.task)
        elif deed.what == "ended":
            doing.get(deed.task, set()).discard(deed.who)
    return found
