"""Plugins that are started, stopped and cancelled at random, for hours of a simulated world."""

import asyncio
import itertools
import random
from collections.abc import Coroutine, Generator
from contextlib import suppress
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


class CutShort:
    """A coroutine that is cancelled at the end of one of its waits, before it goes on.

    Args:
        work: the coroutine.
        wait: the number of the wait.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], wait: int) -> None:
        self._work = work
        self._wait = wait
        self.is_cut_short = False
        """Whether it waited so often."""

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._work.__await__()
        with suppress(StopIteration):
            for number in itertools.count():
                if number == self._wait + 1:
                    self.is_cut_short = True
                    yield steps.throw(asyncio.CancelledError())
                yield next(steps)


async def list_roles(store: MemoryStore) -> set[str]:
    """Return the roles that live sessions are candidates for, or hold."""
    sessions = await store.scan("session/", where={"state": "live"})
    return {role for each in sessions for role in (*each.value["works"], *each.value["holds"])}


@pytest.mark.parametrize("then", ["it starts again", "another starts"])
def test_a_start_that_is_cancelled_at_any_step_leaves_no_candidacy(then: str) -> None:
    """Nobody holds a role without doing its work; who starts next leads."""

    async def story(world: World, steps: int) -> bool:
        store = MemoryStore(components=world.components)
        plugins = [kind(random.Random(1), [], is_rash=False) for kind in (MailPlugin, ReportPlugin)]
        for plugin in plugins:
            # They do nothing at random.
            plugin.dice.random = lambda: 1.0  # type: ignore[method-assign]
        mail, report = plugins
        async with Database(connection=store, components=world.components) as database:
            # The session stays, whatever becomes of the second plugin.
            await database.use_plugin(mail)
            starting = CutShort(database.use_plugin(report), steps)
            with suppress(asyncio.CancelledError):
                await starting
            is_cut_short = starting.is_cut_short
            if is_cut_short:
                await asyncio.sleep(60)
                assert not report.is_running
                assert await list_roles(store) == {mail._role}, f"cancelled at wait {steps}"
                heir, place = report, database
                if then == "another starts":
                    heir = ReportPlugin(mail.dice, [], is_rash=False)
                    place = Database(connection=store, components=world.components)
                    await place.connect()
                await place.use_plugin(heir)
                await asyncio.sleep(120)
                assert heir.leads, f"cancelled at wait {steps}"
                await place.disconnect()
            return is_cut_short

    for steps in range(1_000):
        world = World(1)
        cut: list[bool] = []

        async def run(world: World = world, steps: int = steps, cut: list[bool] = cut) -> None:
            cut.append(await story(world, steps))

        world.run(run)
        if not cut[0]:
            assert steps > 0
            return
    raise AssertionError("the start does not end")
