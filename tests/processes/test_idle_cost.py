"""The requests of idle candidates and leaders.

Counted twice: by a metered store in each worker, and by a proxy that all its requests go through.
Costs are counted per heartbeat, because they grow with heartbeats: by default there are 2 a minute
on objects, and 12 on SQL.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import pytest
from proxy import Proxy
from waiting import until

from jobsync import Components, Store, open_store
from jobsync.coordination.events import WorkerHeartbeat
from jobsync.coordination.membership import Membership
from jobsync.coordination.runner import OwnThread
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.stores.metered import FREE, S3_TARIFF, Meter, MeteredStore
from jobsync.stores.opening import open_bare, read_url

QUICK = CoordinatorSettings(heartbeat_interval=0.25, worker_timeout=10, skip_cold_start=True)
"""Short heartbeats, and a timeout that a busy machine does not reach."""
DEFAULTS = CoordinatorSettings(skip_cold_start=True)
MINUTE = 60.0
BUDGET = {"s3": (6, 8), "postgresql": (30, 30)}
"""Requests a minute of a follower of one leader, and of two."""
LEADERS_BUDGET = {"s3": 10, "postgresql": 42}


class Counted(NamedTuple):
    """A worker whose requests are counted."""

    membership: Membership
    proxy: Proxy
    meter: Meter

    async def lead(self, role: str) -> None:
        """Be the only candidate for a role, until elected."""
        coordinator = await self.membership.coordinate(role)
        await until(lambda: coordinator.is_coordinator)

    async def follow(self, role: str, leader: "Counted") -> None:
        """Be a candidate for a role that another worker leads, until that is known here."""
        coordinator = await self.membership.coordinate(role)
        assert await coordinator.ensure_coordinator() == leader.membership.worker_id

    async def send_heartbeats(self, count: int) -> None:
        """Wait until it has sent so many heartbeats."""
        sent = asyncio.Semaphore(0)
        events = self.membership.components.events

        def on_heartbeat(event: WorkerHeartbeat) -> None:
            if event.worker_id == self.membership.worker_id:
                sent.release()

        events.on(WorkerHeartbeat.name, on_heartbeat)
        for _ in range(count):
            await sent.acquire()
        events.off(WorkerHeartbeat.name, on_heartbeat)

    async def count_requests(self, beats: int) -> tuple[int, int]:
        """Return the requests of so many heartbeats: by the meter, and by the proxy."""
        metered, sent = await self._read_between_beats(1)
        metered_then, sent_then = await self._read_between_beats(beats)
        return metered_then - metered, sent_then - sent

    async def _read_between_beats(self, beats: int) -> tuple[int, int]:
        """Return the counts half a beat after some more heartbeats, when nothing is under way."""
        await self.send_heartbeats(beats)
        await asyncio.sleep(self.membership.timing.heartbeat / 2)
        return self.meter.requests, self.proxy.requests


@asynccontextmanager
async def join(url: str, settings: CoordinatorSettings) -> AsyncIterator[Counted]:
    """Join as `Membership.join` does, with counters in between."""
    components = Components.system()
    meter = Meter(S3_TARIFF if url.startswith("s3") else FREE)
    port = int(url.partition("127.0.0.1:")[2].partition("/")[0])

    with Proxy("127.0.0.1", port) as proxy:
        proxied = url.replace(f":{port}/", f":{proxy.port}/")

        async def open_own() -> Store:
            return MeteredStore(await open_bare(read_url(proxied), components), meter, clock)

        clock = components.clock
        home = MeteredStore(await open_store(proxied, components), meter, clock)
        membership = Membership(home, components, settings, open_own=open_own, host=OwnThread())
        await membership.start()
        yield Counted(membership, proxy, meter)
        await membership.leave()
        await home.close()


@pytest.fixture(params=["postgresql", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    """Return an empty store where each request costs something."""
    if request.param == "postgresql":
        return f"{request.getfixturevalue('postgres').url}?schema={request.node.originalname}"
    return str(request.getfixturevalue("bucket_url"))


async def count_idle(url: str, settings: CoordinatorSettings, beats: int) -> dict[str, Any]:
    """Return the requests a minute of two leaders and their followers, while idle."""
    async with AsyncExitStack() as stack:
        first, second, of_one, of_two = [
            await stack.enter_async_context(join(url, settings)) for _ in range(4)
        ]
        await first.lead("schedule")
        await second.lead("sweep")
        await of_one.follow("schedule", first)
        await of_two.follow("schedule", first)
        await of_two.follow("sweep", second)
        counted = await asyncio.gather(
            *(each.count_requests(beats) for each in (first, of_one, of_two))
        )
        timing = DEFAULTS.timing(first.membership.store)
    a_minute = MINUTE / timing.heartbeat / beats
    names = ("leader", "follower", "follower_of_two")
    return {
        name: {"metered": round(metered * a_minute, 1), "sent": round(sent * a_minute, 1)}
        for name, (metered, sent) in zip(names, counted, strict=True)
    }


def assert_within_budget(kind: str, a_minute: dict[str, Any]) -> None:
    """Check both counts against the budgets."""
    budgets = (LEADERS_BUDGET[kind], *BUDGET[kind])
    for (name, counted), budget in zip(a_minute.items(), budgets, strict=True):
        assert max(counted.values()) <= budget, (name, counted)
        # Each heartbeat is a write.
        assert min(counted.values()) > 0, (name, counted)


async def test_idle_candidates_and_leaders_send_few_requests(
    url: str, full_scale: bool, proof: Any
) -> None:
    """A follower's heartbeat is one write, and one read for each worker that leads it."""
    kind = url.partition(":")[0]
    a_minute = await count_idle(url, QUICK, beats=20)
    assert_within_budget(kind, a_minute)
    proof.record("idle requests a minute, by the beat", url=kind, **a_minute)
    if full_scale:
        proof.tell(f"{kind}: counting a minute with the defaults")
        a_minute = await count_idle(url, DEFAULTS, beats=2 if kind == "s3" else 12)
        assert_within_budget(kind, a_minute)
        proof.record("idle requests in a minute", url=kind, **a_minute)
