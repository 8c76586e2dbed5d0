"""A process with coordinator plugins of its own, one for each role.

It reports as `election_worker` does, and `election_processes` runs it. Of the three plugins one
works, one raises whenever it is called, one never returns. SIGTERM ends it, in one of several
ways.
"""

import asyncio
import signal
import sys
from typing import ClassVar

import msgspec
from election_worker import REPORT_INTERVAL, CandidateOptions, now, silence_logs
from worker_protocol import FactWriter, read_options, read_orders

from jobsync import Components, CoordinatorPlugin, Database, Event

__all__ = ["ROLES", "SHUTDOWNS"]

ROLES = ("archive", "billing", "cleanup")
SHUTDOWNS = ("loop", "signal", "backwards", "disconnect", "exit")
"""The ways in which SIGTERM may end a process."""


class ReportingPlugin(CoordinatorPlugin):
    """Reports when it is called, and the events that it receives."""

    facts: FactWriter

    async def on_become_coordinator(self) -> None:
        self.facts.report("gained", role=self.slug)

    async def coordinator_work(self) -> None:
        done = await self.storage.increment("done")
        self.facts.report("works", role=self.slug, done=done)

    async def on_stop_being_coordinator(self) -> None:
        self.facts.report("lost", role=self.slug)

    async def on_stop(self) -> None:
        self.facts.report("stops", role=self.slug)

    def report_event(self, event: Event) -> None:
        """Report an event of this plugin."""
        details = msgspec.to_builtins(event)
        self.facts.report("hears", plugin=self.slug, event=event.name, **details)


class ArchivePlugin(ReportingPlugin):
    """Works."""


class BillingPlugin(ReportingPlugin):
    """Raises whenever it works."""

    async def coordinator_work(self) -> None:
        await super().coordinator_work()
        raise ValueError("no money")


class CleanupPlugin(ReportingPlugin):
    """Never returns once it works."""

    async def coordinator_work(self) -> None:
        await super().coordinator_work()
        await asyncio.Event().wait()


class PluginWorker:
    """The database and the plugins of this process."""

    kinds: ClassVar[dict[str, type[ReportingPlugin]]] = {
        kind.slug: kind for kind in (ArchivePlugin, BillingPlugin, CleanupPlugin)
    }

    def __init__(self, options: CandidateOptions) -> None:
        self._options = options
        self._facts = FactWriter(options.facts, options.name)
        components = Components.system()
        components.events.on("*", self._report_event)
        self._database = Database(options.url, components=components)
        self._plugins = [self.kinds[role](**options.settings) for role in options.roles]
        self._leaving = asyncio.Event()
        for plugin in self._plugins:
            plugin.facts = self._facts
            plugin.on("plg:*", plugin.report_event)

    async def run(self) -> None:
        """Work until told to leave."""
        orders = await read_orders()
        self._handle_signals()
        self._facts.report("started")
        await orders.readline()
        async with asyncio.TaskGroup() as group:
            working = group.create_task(self._work())
            await self._leaving.wait()
            self._facts.report("leaves")
            await self._shut_down()
            working.cancel()
        self._facts.report("left")

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        match self._options.shutdown:
            case "signal":
                # As in a program that knows nothing of loops.
                signal.signal(
                    signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(self._leaving.set)
                )
            case "exit":
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            case _:
                loop.add_signal_handler(signal.SIGTERM, self._leaving.set)

    async def _shut_down(self) -> None:
        """Stop everything, some of it twice, in different orders."""
        match self._options.shutdown:
            case "disconnect":
                await asyncio.gather(self._database.disconnect(), self._database.disconnect())
            case "backwards":
                for plugin in (*reversed(self._plugins), *self._plugins):
                    await plugin.stop()
            case _:
                await asyncio.gather(*(plugin.stop() for plugin in self._plugins * 2))
        await self._database.disconnect()

    async def _work(self) -> None:
        for plugin in self._plugins[1:]:
            await self._database.use_plugin(plugin)
        async with self._database:
            for plugin in self._plugins[:1]:
                await self._database.use_plugin(plugin)
            # SIGTERM may have ended it meanwhile.
            if self._is_running:
                self._facts.report("joined", worker=self._plugins[0].worker_id)
            while self._is_running:
                self._report_beliefs()
                await asyncio.sleep(REPORT_INTERVAL)

    @property
    def _is_running(self) -> bool:
        return all(plugin.is_running for plugin in self._plugins)

    def _report_beliefs(self) -> None:
        asked_at = now()
        terms = {plugin.slug: plugin.term for plugin in self._plugins}
        membership = self._plugins[0]._membership
        self._facts.report(
            "believes",
            asked_at=asked_at,
            incarnation=membership and membership.incarnation,
            epochs={role: term and term.epoch for role, term in terms.items()},
            dead_tasks=0,
        )

    def _report_event(self, event: Event) -> None:
        self._facts.report(event.name, **msgspec.to_builtins(event))


if __name__ == "__main__":
    silence_logs()
    asyncio.run(PluginWorker(read_options(CandidateOptions)).run())
