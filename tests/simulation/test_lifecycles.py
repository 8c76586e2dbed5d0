"""Plugins that anybody starts, stops and cancels at any moment, for hours of a simulated world."""

import asyncio
import random
from functools import partial
from typing import Any

import pytest

from jobsync import CoordinatorPlugin, Database, Event, JobsyncError, PluginStorage
from jobsync.stores.memory import MemoryStore
from jobsync.testing.world import World

ACTS = 200
PATIENCE = 600.0


class Moody(CoordinatorPlugin):
    """Notes whether it leads, and now and then ends itself, raises, or takes a lock."""

    def __init__(self, dice: random.Random, log: list[str], *, is_rash: bool) -> None:
        super().__init__(heartbeat_interval=5, worker_timeout=15, coordinator_work_interval=1)
        self.dice = dice
        self.is_rash = is_rash
        self.log = log
        self.leads = False

    async def on_become_coordinator(self) -> None:
        self._note(leads=True)
        await self._have_a_mood()

    async def coordinator_work(self) -> None:
        await self._have_a_mood()

    async def on_stop_being_coordinator(self) -> None:
        self._note(leads=False)
        await self._have_a_mood()

    def _note(self, *, leads: bool) -> None:
        if self.leads is leads:
            self.log.append(f"{self.name} begins or ends twice")
        self.leads = leads

    async def _have_a_mood(self) -> None:
        mood = self.dice.random()
        if mood < 0.03:
            await self.stop()
        elif mood < 0.05 and self.is_rash:
            # Somebody else may stop this very work, and with it what it has just begun to do.
            await self.database.disconnect()
        elif mood < 0.1:
            raise ValueError("a mood")
        elif mood < 0.2:
            await hold(self.storage, self.dice)


class MailPlugin(Moody):
    """One kind of work."""


class ReportPlugin(Moody):
    """Another."""


async def hold(storage: PluginStorage, dice: random.Random) -> None:
    """Hold a lock for a moment."""
    async with storage.lock("door", timeout=60):
        await asyncio.sleep(dice.uniform(0, 1))


class Meddlers:
    """Call whatever there is to call, several at a time, and lose patience with some of it.

    Args:
        seed: decides everything.
        cancels_ends: whether they also cancel those who stop something. Hooks of the end may
            be missing then; nothing else may.
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
        self.database.on("db:failed", self._hear)

    def run(self) -> None:
        """Let it all happen; end well."""
        self.world.run(self._meddle)
        assert [line for line in self.log if not self._cancels_ends or "twice" not in line] == []

    def _hear(self, event: Event) -> None:
        self.log.append(str(event))

    async def _meddle(self) -> None:
        for plugin in self.plugins:
            await self.database.use_plugin(plugin)
        for _ in range(ACTS // 4):
            acts = [self._draw() for _ in range(self.dice.randint(1, 4))]
            tasks = [asyncio.ensure_future(act()) for act, _ in acts]
            await asyncio.sleep(self.dice.choice([0, 0.001, 1, 10]) * self.dice.random())
            for task, (_, is_end) in zip(tasks, acts, strict=True):
                if self.dice.random() < 0.3 and (self._cancels_ends or not is_end):
                    task.cancel()
            _, hanging = await asyncio.wait(tasks, timeout=PATIENCE)
            assert not hanging, hanging
            self._judge(tasks)
        async with asyncio.timeout(PATIENCE):
            await self.database.disconnect()
        await asyncio.sleep(1)
        assert not any(plugin.is_running for plugin in self.plugins)
        assert await self.store.scan("session/", where={"state": "live"}) == []

    def _judge(self, tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, JobsyncError | TimeoutError):
                self.log.append(repr(error))

    def _draw(self) -> tuple[Any, bool]:
        """Draw something to do, and say whether it ends something."""
        plugin = self.dice.choice(self.plugins)
        storage = self.database.open_storage("meddling")
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
    """Whatever was called at whatever moment: it returns, and at the end there is no session."""
    Meddlers(seed, cancels_ends=cancels_ends).run()
