"""The course of the demo: what is done to the fleet, and when."""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jobsync.components import Components
from jobsync.demo import worker
from jobsync.demo.fleet import DemoFleet, DemoWorker
from jobsync.demo.observer import DemoObserver, DemoSnapshot
from jobsync.demo.verdict import DemoVerdict, judge

__all__ = ["DemoFailed", "DemoScreen", "DemoShow", "list_changes"]

_RATE = 40.0
"""Mails a second."""
_RECORD_PERIOD, _RECORD_SECONDS = 0.5, 3.0
"""Seconds between two new records, and that each of them lives."""
_LOOK = 0.25
"""Seconds between two looks at the store."""
_FROZEN = worker.TIMEOUT + 3 * worker.BEAT
_WRITE_TIME = 1.0
"""Seconds after which a write is held up by a process that is frozen."""
_PATIENCE = 60.0
"""Seconds within which all is done once nothing new comes."""


class DemoFailed(Exception):
    """The demo cannot go on.

    Attributes:
        logs: what the workers have printed that ended by themselves.
    """

    def __init__(self, problem: str, logs: Sequence[str]) -> None:
        super().__init__(problem)
        self.logs = logs


class DemoScreen:
    """What the viewer sees. This one shows nothing."""

    def start(self, url: str, workers: int, seconds: float) -> None:
        """Show what is going to happen."""

    def tell(self, text: str) -> None:
        """Show an event."""

    def update(self, fleet: DemoFleet, snapshot: DemoSnapshot, progress: float) -> None:
        """Show the state of the fleet, and which part of the time is over."""

    def finish(self, verdict: DemoVerdict) -> None:
        """Show the verdict."""

    def stop(self) -> None:
        """Restore the terminal. Safe to repeat."""


class DemoShow:
    """One run of the demo.

    Args:
        url: the store.
        count: how many workers.
        seconds: how long mails are enqueued.
        screen: what the viewer sees.
        folder: for the logs of the workers.
        components: time and randomness.
    """

    def __init__(
        self,
        url: str,
        count: int,
        seconds: float,
        screen: DemoScreen,
        folder: Path,
        components: Components,
    ) -> None:
        self._count = count
        self._seconds = seconds
        self._screen = screen
        self._clock = components.clock
        self._fleet = DemoFleet(url, folder)
        self._observer = DemoObserver(url, self._fleet)
        self._begun = self._clock.mono()
        self._snapshot: DemoSnapshot | None = None
        self._leader: DemoWorker | None = None
        self._led = self._begun
        """When it was last seen to lead, and to run."""
        self._vacancy = 0.0

    async def run(self) -> DemoVerdict:
        """Run all of it; return the verdict.

        Raises:
            DemoFailed: the workers do not start, or do not finish.
        """
        async with self._observer:
            try:
                for _ in range(self._count):
                    self._fleet.start()
                await self._wait(self._is_complete, "the workers did not start", 0.0)
                await self._disturb()
                self._screen.tell("nothing new comes; what is left is handled")
                await self._observer.stop_clock()
                await self._wait(self._is_over, "the workers did not finish", 1.0)
            finally:
                await asyncio.to_thread(self._fleet.stop)
            return await self._judge()

    async def _disturb(self) -> None:
        """Enqueue all the time, kill the leader, freeze another worker."""
        self._begun = self._clock.mono()
        acts = [
            (0.2, self._kill_leader),
            (0.4, self._replace),
            (0.5, self._freeze),
            (0.5 + _FROZEN / self._seconds, self._thaw),
        ]
        while (part := (self._clock.mono() - self._begun) / self._seconds) < 1 or acts:
            await self._produce(min(part, 1.0) * self._seconds)
            if acts and part >= acts[0][0]:
                await acts.pop(0)[1]()
            await self._look(min(part, 1.0))

    async def _produce(self, elapsed: float) -> None:
        """Enqueue the mails and add the records of the time until now."""
        first = self._observer.next_number
        numbers = range(first, math.ceil(elapsed * _RATE))
        if numbers:
            await self._observer.send(numbers)
        while self._observer.added < elapsed / _RECORD_PERIOD:
            await self._observer.add_record(_RECORD_SECONDS)

    async def _kill_leader(self) -> None:
        leader = await self._wait_for_leader(0.2)
        self._screen.tell(f"SIGKILL to {leader.name}, which leads")
        leader.kill()

    async def _replace(self) -> None:
        self._screen.tell(f"{self._fleet.start().name} is started in its place")

    async def _freeze(self) -> None:
        leader = await self._wait_for_leader(0.5)
        victim = next(each for each in self._fleet.running if each is not leader)
        self._screen.tell(f"SIGSTOP to {victim.name}, for {_FROZEN:g} s")
        while True:
            victim.freeze()
            try:
                async with asyncio.timeout(_WRITE_TIME):
                    await self._observer.add_record(_RECORD_SECONDS)
            except TimeoutError:
                # In the midst of a write to a file: nobody else could write. Another moment, then.
                victim.thaw()
            else:
                return

    async def _thaw(self) -> None:
        for frozen in self._fleet.frozen:
            self._screen.tell(f"SIGCONT to {frozen.name}")
            frozen.thaw()

    def _find_leader(self) -> DemoWorker | None:
        name = None if self._snapshot is None else self._snapshot.leader
        return next((each for each in self._fleet.running if each.name == name), None)

    async def _wait_for_leader(self, progress: float) -> DemoWorker:
        """Return the worker that leads, as soon as one does."""
        while (leader := self._find_leader()) is None:
            await self._wait(lambda: self._find_leader() is not None, "no worker leads", progress)
        return leader

    async def _look(self, progress: float) -> None:
        """Read the store, and show what has changed."""
        before = self._snapshot
        now = self._snapshot = await self._observer.read()
        self._watch_leader(now.epoch)
        for text in list_changes(before, now):
            self._screen.tell(text)
        self._screen.update(self._fleet, now, progress)
        await self._clock.sleep(_LOOK)

    def _watch_leader(self, epoch: int) -> None:
        """Show who leads now, and count how long nobody did."""
        at, leader = self._clock.mono(), self._find_leader()
        if leader is None:
            return
        if self._leader is None:
            self._screen.tell(f"{leader.name} leads with epoch {epoch}")
        elif self._leader is not leader:
            vacancy = at - self._led
            self._vacancy = max(self._vacancy, vacancy)
            self._screen.tell(f"{leader.name} leads with epoch {epoch}, {vacancy:.1f} s later")
        self._leader, self._led = leader, at

    async def _wait(self, is_so: Callable[[], bool], problem: str, progress: float) -> None:
        """Look until something is so."""
        give_up = self._clock.mono() + _PATIENCE
        while True:
            await self._look(progress)
            if is_so():
                return
            if self._fleet.failed or self._clock.mono() >= give_up:
                raise DemoFailed(problem, [each.log for each in self._fleet.failed])

    def _is_complete(self) -> bool:
        """Whether all workers run and own tokens, and one leads."""
        now = self._snapshot
        owners = [] if now is None else [name for name, count in now.tokens.items() if count]
        return self._find_leader() is not None and len(owners) == self._count

    def _is_over(self) -> bool:
        """Whether nothing is left to handle or to expire, and all tokens have an owner."""
        now = self._snapshot
        if now is None:
            return False
        return not now.waiting and not now.records and sum(now.tokens.values()) == worker.TOKENS

    async def _judge(self) -> DemoVerdict:
        now = self._snapshot
        return judge(
            self._observer.sent,
            await self._observer.read_finished(),
            await self._observer.read_completions(),
            await self._observer.read_firings(),
            records=self._observer.added,
            left=0 if now is None else now.records,
            tokens=0 if now is None else sum(now.tokens.values()),
            vacancy=self._vacancy,
            failures=len(self._fleet.failed),
        )


def list_changes(before: DemoSnapshot | None, now: DemoSnapshot) -> Iterator[str]:
    """Return what has changed between two looks, for the viewer."""
    if before is None:
        return
    for name, state in now.states.items():
        if name not in before.states:
            yield f"{name} has joined"
        elif before.states[name] != state:
            yield f"the session of {name} is {state}"
    if now.tokens and now.tokens != before.tokens:
        shares = (f"{name} {tokens}" for name, tokens in sorted(now.tokens.items()))
        yield f"tokens: {', '.join(shares)}"
