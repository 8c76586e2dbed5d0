"""Plugins that are started, stopped and cancelled at random, for hours of a simulated world."""

import asyncio
import random
from functools import partial
from typing import Any

import pytest

from jobsync import CoordinatorPlugin, Database, Event, JobsyncError, PluginStorage
from jobsync.stores.memory import MemoryStore
from jobsync.testing.world import World

CALLS = 200
TIMEOUT = 600.0


class RandomPlugin(CoordinatorPlugin):
    """Records whether it leads, and at random stops itself, raises, or takes a lock."""

    def __init__(self, dice: random.Random, log: list[str], *, is_rash: bool) -> None:
        super().__init__(heartbeat_interval=5, worker_timeout=15, coordinator_work_interval=1)
        self.dice = dice
        self.is_rash = is_rash
        self.log = log
        self.leads = False

    async def on_become_coordinator(self) -> None:
        self._record(leads=True)
        await self._act_at_random()

    async def coordinator_work(self) -> None:
        await self._act_at_random()

    async def on_stop_being_coordinator(self) -> None:
        self._record(leads=False)
        await self._act_at_random()

    def _record(self, *, leads: bool) -> None:
        if self.leads is leads:
            self.log.append(f"{self.name} gains or loses the lead twice")
        self.leads = leads

    async def _act_at_random(self) -> None:
        draw = self.dice.random()
        if draw < 0.03:
            await self.stop()
        elif draw < 0.05 and self.is_rash:
            # Another call may stop this very work, and with it this disconnect.
            await self.database.disconnect()
        elif draw < 0.1:
            raise ValueError("at random")
        elif draw < 0.2:
            await hold(self.storage, self.dice)


class MailPlugin(RandomPlugin):
    """One kind of work."""


class ReportPlugin(RandomPlugin):
    """Another."""


async def hold(storage: PluginStorage, dice: random.Random) -> None:
    """Hold a lock for a moment."""
    async with storage.lock("door", timeout=60):
        await asyncio.sleep(dice.uniform(0, 1))


class RandomCallers:
    """Makes random calls, several at a time, and cancels some of them.

    Args:
        seed: decides everything.
        cancels_ends: whether calls that stop something are cancelled too. Then final hooks may
            be missing, but nothing else.
    """

    def __init__(self, seed: int, *, cancels_ends: bool) -> None:
        self.world = World(seed)
        self.dice = self.world.dice
        self.log: list[str] = []
        self.store = MemoryStore(components=self.world.components)
        self.database = Database(connection=self.store, components=self.world.components)
        self.plugins = [
            kind(self.dice, self.log, is_rash=cancels_ends) for kind in (MailPlugin, ReportPlugin)
        ]
        self._cancels_ends = cancels_ends
        self.database.on("db:failed", self._log_failure)

    def run(self) -> None:
        """Run the calls, and check that nothing went wrong."""
        self.world.run(self._call_at_random)
        assert [line for line in self.log if not self._cancels_ends or "twice" not in line] == []

    def _log_failure(self, event: Event) -> None:
        self.log.append(str(event))

    async def _call_at_random(self) -> None:
        for plugin in self.plugins:
            await self.database.use_plugin(plugin)
        for _ in range(CALLS // 4):
            calls = [self._draw_call() for _ in range(self.dice.randint(1, 4))]
            tasks = [asyncio.ensure_future(call()) for call, _ in calls]
            await asyncio.sleep(self.dice.choice([0, 0.001, 1, 10]) * self.dice.random())
            for task, (_, is_end) in zip(tasks, calls, strict=True):
                if self.dice.random() < 0.3 and (self._cancels_ends or not is_end):
                    task.cancel()
            _, hanging = await asyncio.wait(tasks, timeout=TIMEOUT)
            assert not hanging, hanging
            self._check_errors(tasks)
        async with asyncio.timeout(TIMEOUT):
            await self.database.disconnect()
        await asyncio.sleep(1)
        assert not any(plugin.is_running for plugin in self.plugins)
        assert await self.store.scan("session/", where={"state": "live"}) == []

    def _check_errors(self, tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, JobsyncError | TimeoutError):
                self.log.append(repr(error))

    def _draw_call(self) -> tuple[Any, bool]:
        """Return a random call, and whether it stops something."""
        plugin = self.dice.choice(self.plugins)
        storage = self.database.open_storage("random")
        return self.dice.choice(
            [
                (plugin.start, False),
                (plugin.stop, True),
                (self.database.connect, False),
                (self.database.disconnect, True),
                (partial(hold, storage, self.dice), False),
                (plugin.ensure_coordinator, False),
            ]
        )


@pytest.mark.parametrize("cancels_ends", [False, True])
@pytest.mark.parametrize("seed", [*range(10), 104, 323])
def test_nothing_hangs_and_nothing_stays(seed: int, cancels_ends: bool) -> None:
    """Every call returns at any moment, and at the end there is no session."""
    RandomCallers(seed, cancels_ends=cancels_ends).run()
