"""One process at work: connects a database, and leaves in good order when it is told to.

The first signal lets everything finish, for the time of grace; the second ends the process
where it stands, which costs what a crash costs: others take over after a timeout. A process
that only another one can replace ends by itself.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from jobsync.cli.health_state import PERIOD, HealthState, write_heartbeat
from jobsync.cli.options import FAILED
from jobsync.database.database import Database
from jobsync.queue.executor import THREADS

__all__ = ["WorkerProcess"]

_log = logging.getLogger("jobsync.work")
_MOMENT = 1.0
"""Seconds in which a thread without work surely ends."""


class WorkerProcess:
    """Runs what is attached to a database until a signal comes, or it fails.

    Args:
        database: what is connected.
        pulse: is told that the loop turns.
        grace: seconds that everything has to finish.
        heartbeat: the file that tells that the loop turns, if there is to be one.
        leave: ends the process at once.
    """

    def __init__(
        self,
        database: Database,
        pulse: HealthState,
        *,
        grace: float,
        heartbeat: Path | None = None,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._database = database
        self._clock = database.components.clock
        self._pulse = pulse
        self._grace = grace
        self._heartbeat = heartbeat
        self._leave = leave
        self._told = asyncio.Event()

    async def work(self) -> int:
        """Work until told to stop; give the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._hear, signal.Signals(number).name)
        self._database.on("db:failed", self._fail)
        beating = asyncio.create_task(self._beat())
        try:
            await self._begin()
            await self._told.wait()
            return await self._finish()
        finally:
            beating.cancel()

    def end(self, status: int) -> None:
        """End the process, without waiting for functions that nobody can stop.

        Raises:
            SystemExit: where there are none.
        """
        left = self._find_stubborn()
        if left:
            _log.warning("left behind, still running: %s", ", ".join(left))
            logging.shutdown()
            sys.stdout.flush()
            self._leave(status)
        raise SystemExit(status)

    def _find_stubborn(self) -> list[str]:
        """Name the threads of handlers that go on; idle ones end in a moment."""
        threads = [each for each in threading.enumerate() if each.name.startswith(THREADS)]
        give_up = self._clock.mono() + _MOMENT
        for thread in threads:
            thread.join(max(0.0, give_up - self._clock.mono()))
        return [thread.name for thread in threads if thread.is_alive()]

    async def _begin(self) -> None:
        """Connect, unless the signal comes first."""
        connecting = asyncio.create_task(self._database.connect())
        told = asyncio.create_task(self._told.wait())
        await asyncio.wait({connecting, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not connecting.done():
            connecting.cancel()
            await asyncio.wait({connecting})
        elif connecting.exception() is None:
            _log.info("at work")
        else:
            connecting.result()

    async def _finish(self) -> int:
        """Let everything end in good order, for as long as grace lasts."""
        try:
            async with asyncio.timeout(self._grace):
                await self._database.disconnect(within=self._grace)
        except TimeoutError:
            _log.error("not everything had ended after %g s of grace", self._grace)
            return FAILED
        if self._pulse.failure:
            return FAILED
        _log.info("stopped")
        return 0

    def _hear(self, name: str) -> None:
        if self._told.is_set():
            _log.warning("%s again: stopping at once", name)
            self._leave(FAILED)
            return
        _log.info("%s: stopping, within %g s", name, self._grace)
        self._told.set()

    def _fail(self, event: object) -> None:
        self._pulse.failure = str(getattr(event, "error", event))
        self._told.set()

    def _give_up(self, reasons: list[str]) -> None:
        """Stop, because only a new process can go on."""
        self._pulse.failure = "; ".join(reasons)
        _log.error("%s: stopping, so that another process may begin", self._pulse.failure)
        self._told.set()

    async def _beat(self) -> None:
        """Tell once a second that the loop turns."""
        while True:
            self._pulse.turn()
            stuck = self._database.stuck()
            if stuck and not self._told.is_set():
                self._give_up(stuck)
            if self._heartbeat is not None:
                write_heartbeat(self._heartbeat, self._pulse.ready(), self._clock.wall())
            await self._clock.sleep(PERIOD)
