"""The examples of the two coordinator documents, line by line, with a user's own plugin.

Durations are seconds. Where a document waits for minutes, the example here waits for less.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from jobsync import CoordinatorPlugin, Database, Event, Invalid, Misconfigured, NotFound


class ReportPublished(Event, frozen=True, kw_only=True):
    """The event of the example's coordinator."""

    name = "plg:reports:report-published"

    count: int


class ReportsPlugin(CoordinatorPlugin):
    """Extends CoordinatorPlugin and implements its methods."""

    def __init__(self, *, resource: str, **options: Any) -> None:
        super().__init__(**options)
        self.resource = resource
        self.calls: list[str] = []

    async def on_become_coordinator(self) -> None:
        self.calls.append("become")

    async def on_stop_being_coordinator(self) -> None:
        self.calls.append("stop")

    async def coordinator_work(self) -> None:
        self.calls.append("work")
        self.emit(ReportPublished(count=len(self.calls)))


async def test_configure_appropriate_timeouts() -> None:
    """The good example is accepted; the bad one and milliseconds are refused."""
    # Good: reasonable defaults
    good = ReportsPlugin(
        resource="tasks", heartbeat_interval=30, worker_timeout=90, max_epoch_duration=300
    )
    assert good.coordination.max_epoch_duration == 300

    # Bad: too short (causes flip-flopping)
    with pytest.raises(Invalid, match=r"worker_timeout .*\(got 2.0\)"):
        ReportsPlugin(
            resource="tasks", heartbeat_interval=1, worker_timeout=2, min_epoch_duration=5
        )
    with pytest.raises(
        Invalid, match=r"heartbeat_interval .*seconds.*\(got 30000.0\)\. Did you mean 30\?"
    ):
        ReportsPlugin(resource="tasks", heartbeat_interval=30000)


async def test_basic_usage(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Enable coordinator mode, and check the status."""
    db = Database(connection_string=url)
    await db.connect()

    queue_plugin = ReportsPlugin(
        resource="tasks",
        enable_coordinator=True,
        heartbeat_interval=30,
        worker_timeout=90,
        skip_cold_start=True,
    )

    await db.use_plugin(queue_plugin)
    await queue_plugin.ensure_coordinator()
    await until(lambda: queue_plugin.is_coordinator)

    # Check if this instance is coordinator
    if queue_plugin.is_coordinator:
        print("This instance is the coordinator")

    # Get worker ID
    print(f"Worker ID: {queue_plugin.worker_id}")
    assert capsys.readouterr().out.splitlines() == [
        "This instance is the coordinator",
        f"Worker ID: {queue_plugin.worker_id}",
    ]
    await db.disconnect()


async def test_track_coordinator_changes(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every listener of the documents is called with the fields that it reads."""
    options = {"heartbeat_interval": 0.5, "worker_timeout": 20, "skip_cold_start": True}
    async with Database(connection_string=url) as one, Database(connection_string=url) as other:
        plugin = ReportsPlugin(resource="tasks", **options)
        coordinator_changes = 0

        @plugin.on("coord:coordinator-elected")
        def count(event: Event) -> None:
            nonlocal coordinator_changes
            coordinator_changes += 1
            print(f"New coordinator: {event['worker_id']}")
            print(f"Active workers: {len(event['active_workers'])}")

            if coordinator_changes > 5:
                print("Too many coordinator changes! Check worker health.")

        plugin.on(
            "coord:coordinator-promoted",
            lambda event: print(f"This worker became coordinator: {event.worker_id}"),
        )

        plugin.on(
            "coord:coordinator-demoted",
            lambda event: print(f"This worker lost coordination: {event.reason}"),
        )

        await one.use_plugin(plugin)
        await until(lambda: "work" in plugin.calls)
        first = plugin.worker_id
        successor = await other.use_plugin(ReportsPlugin(resource="tasks", **options))
        assert await successor.ensure_coordinator() == first
        await plugin.stop()
        lines = capsys.readouterr().out.splitlines()
        assert lines[:3] == [
            f"New coordinator: {first}",
            "Active workers: 1",
            f"This worker became coordinator: {first}",
        ]
        # It may have received its successor's election before it was stopped.
        assert "This worker lost coordination: stopped" in lines[3:]
        assert 1 <= coordinator_changes <= 2
        assert plugin.calls[0] == "become"
        assert plugin.calls[-1] == "stop"
        await until(lambda: successor.is_coordinator)


async def test_monitor_cold_start_and_heartbeats(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The phases come in order; heartbeats and renewed epochs are reported."""
    phases: list[str] = []
    renewed = asyncio.Event()
    plugin = ReportsPlugin(
        resource="tasks",
        skip_cold_start=False,  # Default - prevents race conditions
        cold_start_observation_window=0.1,
        cold_start_preparation_delay=0.1,
        heartbeat_interval=0.3,
        worker_timeout=20,
        min_epoch_duration=0,
        max_epoch_duration=0.5,
    )

    @plugin.on("coord:cold-start-phase-changed")
    def record_phase(event: Event) -> None:
        phases.append(event["phase"])
        assert event["duration"] >= 0

    beats: list[tuple[str, float]] = []
    plugin.on(
        "coord:worker-heartbeat", lambda event: beats.append((event.worker_id, event.timestamp))
    )

    @plugin.on("coord:coordinator-epoch-renewed")
    def check_renewal(event: Event) -> None:
        assert event["new_epoch"] == event["until"]
        assert event["worker_id"] == plugin.worker_id
        renewed.set()

    async with asyncio.timeout(60), Database(connection_string=url) as db:
        await db.use_plugin(plugin)
        await renewed.wait()
        assert phases == ["observing", "electing", "preparing", "ready"]
        assert {worker for worker, _ in beats} == {plugin.worker_id}


async def test_force_coordinator_election(url: str) -> None:
    """Forced for tests: any worker, or a given one that is live and a candidate."""
    # For testing, skip cold start
    options: dict[str, Any] = {
        "enable_coordinator": True,
        "skip_cold_start": True,  # Faster tests
        "cold_start_observation_window": 0,
        "heartbeat_interval": 0.3,
        # On S3 a request to hand over is seen within two timeouts.
        "worker_timeout": 3,
        "min_epoch_duration": 0,
    }
    async with Database(connection_string=url) as one, Database(connection_string=url) as two:
        plugin = await one.use_plugin(ReportsPlugin(resource="tasks", **options))
        assert await plugin.ensure_coordinator() == plugin.worker_id
        other = await two.use_plugin(ReportsPlugin(resource="tasks", **options))
        await until_seen(plugin, other)

        # Manually trigger election
        await plugin.ensure_coordinator(force=True)

        # Force specific worker as coordinator (testing only)
        async def force() -> None:
            await plugin.ensure_coordinator(force=True, desired_coordinator=other.worker_id)

        await force()
        async with asyncio.timeout(60):
            while not other.is_coordinator:
                await force()
                await asyncio.sleep(0.1)
        assert not plugin.is_coordinator
        with pytest.raises(NotFound, match="worker-1234567890-abc123"):
            await plugin.ensure_coordinator(
                force=True, desired_coordinator="worker-1234567890-abc123"
            )


async def until_seen(plugin: ReportsPlugin, other: ReportsPlugin) -> None:
    """Wait until a worker's heartbeat has published its candidacy."""

    async def is_seen() -> bool:
        return other.worker_id in [peer.worker_id for peer in await plugin.members()]

    await until(is_seen)


async def test_disable_coordinator_for_a_single_instance(url: str) -> None:
    """Without an election it leads at once, and its work runs."""
    async with Database(connection_string=url) as db:
        plugin = await db.use_plugin(ReportsPlugin(resource="tasks", enable_coordinator=False))
        await until(lambda: "work" in plugin.calls)
        assert plugin.is_coordinator


async def test_what_is_stored_for_coordination(url: str) -> None:
    """Live workers, and the roles and epochs that they hold, can be read."""
    async with Database(connection_string=url) as db:
        plugin = await db.use_plugin(
            ReportsPlugin(
                resource="tasks", skip_cold_start=True, heartbeat_interval=0.3, worker_timeout=20
            )
        )
        async with asyncio.timeout(60):
            while True:
                (peer,) = await plugin.members()
                if peer.holds:
                    break
                await asyncio.sleep(0.05)
        await until(lambda: plugin.term is not None)
        assert peer.worker_id == plugin.worker_id
        assert plugin.term is not None
        assert peer.holds == {"default/reports": plugin.term.epoch}


async def test_only_the_coordinator_does_the_work(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real-world examples: plugins with their own interval and event."""
    options = {"heartbeat_interval": 0.5, "worker_timeout": 20, "skip_cold_start": True}
    async with Database(connection_string=url) as one, Database(connection_string=url) as two:
        plugins = [
            ReportsPlugin(
                resource="tasks", enable_coordinator=True, coordinator_work_interval=0.05, **options
            )
            for _ in range(2)
        ]
        for number, plugin in enumerate(plugins):
            plugin.on(
                "plg:reports:report-published",
                lambda event, number=number: print(f"{number}: published {event.count}"),
            )
        await one.use_plugin(plugins[0])
        await until(lambda: "work" in plugins[0].calls)
        await two.use_plugin(plugins[1])
        assert await plugins[1].ensure_coordinator() == plugins[0].worker_id
        await until(lambda: plugins[0].calls.count("work") > 5)
        assert plugins[1].calls == []
        assert {line.split(":")[0] for line in capsys.readouterr().out.splitlines()} == {"0"}


async def test_environment_based_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read explicitly as in the document, or by the library, in seconds."""
    monkeypatch.setenv("ENABLE_COORDINATOR", "true")
    monkeypatch.setenv("HEARTBEAT_INTERVAL", "30")
    monkeypatch.setenv("WORKER_TIMEOUT", "90")
    plugin = ReportsPlugin(
        resource="tasks",
        enable_coordinator=os.environ["ENABLE_COORDINATOR"] == "true",
        heartbeat_interval=int(os.environ.get("HEARTBEAT_INTERVAL", "30")),
        worker_timeout=int(os.environ.get("WORKER_TIMEOUT", "90")),
    )
    monkeypatch.setenv("JOBSYNC_ENABLE_COORDINATOR", "true")
    monkeypatch.setenv("JOBSYNC_HEARTBEAT_INTERVAL", "30")
    monkeypatch.setenv("JOBSYNC_WORKER_TIMEOUT", "90")
    assert ReportsPlugin(resource="tasks").coordination == plugin.coordination
    monkeypatch.setenv("JOBSYNC_HEARTBEAT_INTERVAL", "30000")
    with pytest.raises(
        Misconfigured, match=r"HEARTBEAT_INTERVAL .*\(got 30000.0\)\. Did you mean 30\?"
    ):
        ReportsPlugin(resource="tasks")


_SHUTDOWN = """
import asyncio, signal, sys
from jobsync import CoordinatorPlugin, Database

class MyPlugin(CoordinatorPlugin):
    async def on_become_coordinator(self): print("leads", flush=True)
    async def on_stop_being_coordinator(self): print("stopped leading", flush=True)
    async def coordinator_work(self): ...

async def main():
    db = Database("sqlite:///jobs.db")
    await db.connect()
    plugin = MyPlugin()
    await db.use_plugin(plugin)
    done = asyncio.Event()

    async def shut_down(name):
        print(f"Received {name}, shutting down...", flush=True)

        # Stop coordinator activities
        await plugin.stop()

        # Disconnect database
        await db.disconnect()

        done.set()

    loop = asyncio.get_running_loop()
    tasks = set()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(
            number, lambda name=number.name: tasks.add(loop.create_task(shut_down(name)))
        )
    await done.wait()
    sys.exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
async def test_proper_shutdown_pattern(name: str, tmp_path: Path) -> None:
    """Both signals stop the plugin, disconnect the database, and end the process with 0."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _SHUTDOWN,
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        assert await process.stdout.readline() == b"leads\n"
        process.send_signal(signal.Signals[name])
        out, errors = await process.communicate()
    assert out.decode().splitlines() == [f"Received {name}, shutting down...", "stopped leading"]
    assert errors == b""
    assert process.returncode == 0
    async with Database(f"sqlite:///{tmp_path / 'jobs.db'}") as db:
        assert await db.store.scan("session/", where={"state": "live"}) == []
