"""When a coordinator sweeps."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock

from jobsync.database.database import Database
from jobsync.errors import Unavailable
from jobsync.ttl.plugin import TTLPlugin

INTERVAL = 60.0


class TimedPlugin(TTLPlugin):
    """Notes when its sweeps begin; each takes so many seconds, and may fail."""

    seconds = 0.0
    is_failing = False

    def __init__(self) -> None:
        super().__init__(resources=["sessions"], default_ttl=5, cleanup_interval=INTERVAL)
        self.machine, self.starts = FakeClock(), list[float]()

    @property
    def database(self) -> Database:
        components = SimpleNamespace(clock=self.machine)
        return cast("Database", SimpleNamespace(components=components))

    async def _sweep(self, names: Sequence[str]) -> Any:
        assert names == ["sessions"]
        self.starts.append(self.machine.mono_seconds)
        self.machine.mono_seconds += self.seconds
        if self.is_failing:
            raise Unavailable("store", "down")


@pytest.mark.parametrize("is_failing", [False, True])
@pytest.mark.parametrize(
    ("seconds", "pause"),
    [(0.0, INTERVAL), (20.0, INTERVAL), (59.0, INTERVAL), (60.0, INTERVAL), (90.0, 90.0)],
)
async def test_sweeps_begin_an_interval_apart_however_long_they_take(
    seconds: float, pause: float, is_failing: bool
) -> None:
    """One that takes longer than the interval is followed by the next at once."""
    plugin = TimedPlugin()
    plugin.seconds, plugin.is_failing = seconds, is_failing
    began = plugin.machine.mono_seconds
    for _ in range(4):
        await plugin.coordinator_work()
    assert plugin.starts == [began + number * pause for number in range(4)]
    # Elected again, it sweeps at once.
    now = plugin.machine.mono_seconds
    await plugin.on_become_coordinator()
    for _ in range(2):
        await plugin.coordinator_work()
    assert plugin.starts[4:] == [now, now + pause]
