"""A process with plugins of its own: some kinds of work, which it coordinates while elected.

It tells of all that happens as `candidate` does, and `electorate` runs it. Of three kinds of
plugin one gets on, one raises whenever it is called, one never returns. SIGTERM lets it end,
in one of several manners.
"""

import asyncio
import logging
import signal
import sys
from typing import Any, ClassVar

import msgspec
from candidate import Orders, Speaker, listen, now

from jobsync import Components, CoordinatorPlugin, Database, Event

__all__ = ["MANNERS", "WORKS"]

WORKS = ("archive", "billing", "cleanup")
MANNERS = ("loop", "signal", "backwards", "disconnect", "exit")
"""How a process may be told to end."""

_GLANCE = 0.1


class Told(CoordinatorPlugin):
    """Tells what is asked of it, and what it hears."""

    speaker: Speaker

    async def on_become_coordinator(self) -> None:
        self.speaker.say("gained", work=self.slug)

    async def coordinator_work(self) -> None:
        done = await self.storage.increment("done")
        self.speaker.say("works", work=self.slug, done=done)

    async def on_stop_being_coordinator(self) -> None:
        self.speaker.say("lost", work=self.slug)

    async def on_stop(self) -> None:
        self.speaker.say("stops", work=self.slug)

    def hear(self, event: Event) -> None:
        """Tell what this plugin was told."""
        self.speaker.say("hears", work=self.slug, event=event.name, **msgspec.to_builtins(event))


class ArchivePlugin(Told):
    """Puts things away."""


class BillingPlugin(Told):
    """Never gets anything done."""

    async def coordinator_work(self) -> None:
        await super().coordinator_work()
        raise ValueError("no money")


class CleanupPlugin(Told):
    """Is at work for ever, when it is at work."""

    async def coordinator_work(self) -> None:
        await super().coordinator_work()
        await asyncio.Event().wait()


class Plugger:
    """One life of the process."""

    kinds: ClassVar[dict[str, type[Told]]] = {
        kind.slug: kind for kind in (ArchivePlugin, BillingPlugin, CleanupPlugin)
    }

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._speaker = Speaker(orders.words)
        components = Components.system()
        components.events.on("*", self._hear)
        self._database = Database(orders.url, components=components)
        self._plugins = [self.kinds[work](**orders.options) for work in orders.works]
        self._leaving = asyncio.Event()
        for plugin in self._plugins:
            plugin.speaker = self._speaker
            plugin.on("plg:*", plugin.hear)

    async def live(self) -> None:
        """Work until told to leave."""
        orders = await listen()
        self._heed_signals()
        self._speaker.say("ready")
        await orders.readline()
        async with asyncio.TaskGroup() as group:
            lives = group.create_task(self._work())
            await self._leaving.wait()
            self._speaker.say("leaves")
            await self._end()
            lives.cancel()
        self._speaker.say("left")

    def _heed_signals(self) -> None:
        loop = asyncio.get_running_loop()
        match self._orders.manner:
            case "signal":
                # As a program does that knows nothing of loops.
                signal.signal(
                    signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(self._leaving.set)
                )
            case "exit":
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            case _:
                loop.add_signal_handler(signal.SIGTERM, self._leaving.set)

    async def _end(self) -> None:
        """Stop everything, some of it twice, in this order or that."""
        match self._orders.manner:
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
            # Whoever has ended it meanwhile is not in the way.
            if self._is_running:
                self._speaker.say("stands", worker=self._plugins[0].worker_id)
            while self._is_running:
                self._tell_belief()
                await asyncio.sleep(_GLANCE)

    @property
    def _is_running(self) -> bool:
        return all(plugin.is_running for plugin in self._plugins)

    def _tell_belief(self) -> None:
        begun = now()
        terms = {plugin.slug: plugin.term for plugin in self._plugins}
        membership = self._plugins[0]._membership
        self._speaker.say(
            "believes",
            begun=begun,
            incarnation=membership and membership.incarnation,
            epochs={work: term and term.epoch for work, term in terms.items()},
            dead_tasks=0,
        )

    def _hear(self, event: Event) -> None:
        facts: dict[str, Any] = msgspec.to_builtins(event)
        self._speaker.say(event.name, **facts)


if __name__ == "__main__":
    # Events are told as facts; what else is logged is a complaint, and belongs on stderr.
    logging.getLogger("jobsync").addHandler(logging.NullHandler())
    # Work that is cancelled with its term closes its connection, of which the pool would warn.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
    asyncio.run(Plugger(msgspec.json.decode(sys.argv[1], type=Orders)).live())
