"""What the viewer of the demo sees in a pipe, and what all screens say. See `live_screen`."""

from collections import deque

import click

from jobsync.core.clock import Clock
from jobsync.demo.fleet import DemoFleet
from jobsync.demo.observer import DemoSnapshot
from jobsync.demo.show import DemoScreen
from jobsync.demo.verdict import DemoVerdict
from jobsync.demo.worker import BEAT, TIMEOUT

__all__ = ["LineScreen", "describe_leader", "describe_verdict"]

_LINE_PERIOD = 2.0
"""Seconds between two lines about the whole fleet."""


class LineScreen(DemoScreen):
    """Prints events as they happen, and the state of the fleet from time to time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun = clock.mono()
        self._next = self._begun
        self._rate = _DoneRate(clock)

    def start(self, url: str, workers: int, seconds: float) -> None:
        """Print what is going to happen."""
        for line in _describe_plan(url, workers, seconds):
            click.echo(line)

    def tell(self, text: str) -> None:
        """Print an event."""
        click.echo(self.stamp(text))

    def stamp(self, text: str) -> str:
        """Return an event with the seconds since the start."""
        return f"{self._clock.mono() - self._begun:6.1f} s  {text}"

    def update(self, fleet: DemoFleet, snapshot: DemoSnapshot, progress: float) -> None:
        """Print the state of the fleet, if it is time."""
        rate = self._rate.add(snapshot.done)
        if self._clock.mono() < self._next:
            return
        self._next = self._clock.mono() + _LINE_PERIOD
        running = len(fleet.running)
        self.tell(
            f"{progress:4.0%}  {running} running, {describe_leader(snapshot)};"
            f" {snapshot.waiting} waiting, {snapshot.done} done ({rate:.0f}/s);"
            f" {snapshot.firings} firings; {snapshot.records} records"
        )

    def finish(self, verdict: DemoVerdict) -> None:
        """Print the verdict."""
        click.echo()
        for line in describe_verdict(verdict):
            click.echo(line)


class _DoneRate:
    """How many are done in a second, over the latest seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque(maxlen=20)

    def add(self, done: int) -> float:
        """Add a count; return the rate."""
        self._seen.append((self._clock.mono().seconds, done))
        (first, least), (last, most) = self._seen[0], self._seen[-1]
        return (most - least) / (last - first) if last > first else 0.0


def _describe_plan(url: str, workers: int, seconds: float) -> list[str]:
    """Return what is going to happen."""
    return [
        f"{workers} worker processes on {url}, for {seconds:g} s.",
        f"A heartbeat each {BEAT:g} s, dead after {TIMEOUT:g} s without one (by default 5 and 15).",
        "The leader will be killed, and another worker frozen.",
        "",
    ]


def describe_leader(snapshot: DemoSnapshot) -> str:
    """Return who leads."""
    if snapshot.leader is None:
        return "nobody leads"
    return f"{snapshot.leader} leads with epoch {snapshot.epoch}"


def describe_verdict(verdict: DemoVerdict) -> list[str]:
    """Return the verdict, line by line."""
    lines = [
        f"{'ok ' if is_good else 'BAD'}  {what:<17} {figures}"
        for what, figures, is_good in verdict.describe()
    ]
    lines.append("")
    lines.append(
        "Counted from the store: nothing was lost or doubled."
        if verdict.is_good
        else "SOMETHING IS WRONG: see the lines marked BAD."
    )
    return lines
