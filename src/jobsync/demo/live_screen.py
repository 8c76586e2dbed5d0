"""What the viewer of the demo sees on a terminal, if `rich` is installed."""

from collections import deque

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jobsync.core.clock import Clock
from jobsync.demo.fleet import DemoFleet
from jobsync.demo.observer import DemoSnapshot
from jobsync.demo.screens import LineScreen, describe_leader
from jobsync.demo.verdict import DemoVerdict
from jobsync.demo.worker import TOKENS

__all__ = ["LiveScreen"]

_EVENTS = 8
"""How many events are shown."""
_BAR = 20


class LiveScreen(LineScreen):
    """A picture of the fleet that changes in place, between the plan and the verdict."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._events: deque[str] = deque(maxlen=_EVENTS)
        self._live = Live(refresh_per_second=8)

    def start(self, url: str, workers: int, seconds: float) -> None:
        """Show what is going to happen."""
        super().start(url, workers, seconds)
        self._live.start()

    def tell(self, text: str) -> None:
        """Show an event."""
        self._events.append(self.stamp(text))

    def update(self, fleet: DemoFleet, snapshot: DemoSnapshot, progress: float) -> None:
        """Show the state of the fleet."""
        rate = self._rate.add(snapshot.done)
        facts = (
            f"{describe_leader(snapshot)}\n"
            f"queue     {snapshot.waiting} waiting, {snapshot.done} done, {rate:.0f}/s\n"
            f"schedule  {snapshot.firings} firings      records  {snapshot.records} not expired"
        )
        events = Text("\n".join(self._events), overflow="ellipsis", no_wrap=True)
        self._live.update(
            Group(
                _build_workers(fleet, snapshot),
                Text(facts),
                Panel(events, title="events", height=_EVENTS + 2),
                ProgressBar(total=1.0, completed=progress),
            )
        )

    def finish(self, verdict: DemoVerdict) -> None:
        """Show the verdict."""
        self._live.stop()
        super().finish(verdict)

    def stop(self) -> None:
        """Restore the terminal."""
        self._live.stop()


def _build_workers(fleet: DemoFleet, snapshot: DemoSnapshot) -> Table:
    """Return a table of the workers."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("worker", "process", "session", "tokens"):
        table.add_column(title)
    colours = {"running": "green", "frozen": "cyan", "killed": "red", "failed": "red"}
    for worker in fleet.workers:
        owned = snapshot.tokens.get(worker.name, 0)
        bar = "█" * round(owned * _BAR / TOKENS)
        colour = colours.get(worker.condition, "default")
        table.add_row(
            f"{worker.name}{' ★' if worker.name == snapshot.leader else ''}",
            f"[{colour}]{worker.condition}[/]",
            snapshot.states.get(worker.name, "-"),
            f"{bar:<{_BAR}} {owned}",
        )
    return table
