"""The verdict of the demo, and what its viewer is told."""

from typing import Any

import pytest
from chance import FakeClock
from click.testing import CliRunner

from jobsync.cli.demo import demo
from jobsync.demo.observer import DemoSnapshot
from jobsync.demo.screens import LineScreen, _DoneRate, describe_verdict
from jobsync.demo.show import list_changes
from jobsync.demo.verdict import DemoVerdict, judge
from jobsync.demo.worker import TOKENS
from jobsync.queue.backend import MessageInfo
from jobsync.scheduler.history import HistoryEntry

START = 1_800_000_000


def finish(name: str, deliveries: int = 1) -> MessageInfo:
    """Return a completed message."""
    return MessageInfo(
        id=name,
        queue="default/mails",
        state="completed",
        value=None,
        deliveries=deliveries,
        attempts=deliveries,
        max_attempts=4,
        errors=(),
        session="",
        is_suspect=False,
        enqueued=0.0,
        due=None,
        claimed=None,
        finished=1.0,
        seen=1.0,
        cursor="",
    )


def fire(second: int, **details: Any) -> HistoryEntry:
    """Return a firing."""
    return HistoryEntry(status="success", scheduled_time=START + second, **details)


def gap(second: int, count: int, status: Any) -> HistoryEntry:
    """Return instants that were not fired, by the last of them."""
    return HistoryEntry(status=status, scheduled_time=START + second, count=count)


GOOD: dict[str, Any] = {
    "sent": ["a", "b"],
    "finished": [finish("a"), finish("b")],
    "completions": ["a", "b"],
    "firings": [fire(0), fire(2), fire(4)],
    "records": 3,
    "left": 0,
    "tokens": TOKENS,
    "vacancy": 1.5,
    "failures": 0,
}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, {}),
        ({"finished": [finish("a", 2), finish("b")]}, {"again": 1}),
        ({"finished": [finish("a")]}, {"lost": 1}),
        # One whose enqueue was not acknowledged makes up for no other.
        ({"finished": [finish("a"), finish("c")]}, {"lost": 1, "handled": 2}),
        ({"finished": [*map(finish, "abc")]}, {"handled": 3}),
        ({"completions": ["a", "b", "a"]}, {"doubled": 1}),
        ({"completions": ["a", "a", "a"]}, {"doubled": 2}),
        ({"firings": [fire(0), fire(4)]}, {"missed": 1}),
        ({"firings": [fire(0), fire(2), fire(2), fire(4)]}, {"fired_twice": 1}),
        # One that fired twice makes up for no other.
        ({"firings": [fire(0), fire(2), fire(2), fire(6)]}, {"fired_twice": 1, "missed": 1}),
        ({"firings": []}, {"instants": 0, "missed": 0, "firings": 0}),
        # Three instants that nobody fired are one entry.
        (
            {"firings": [fire(0), gap(6, 3, "missed"), fire(8)]},
            {"missed": 5, "firings": 5, "instants": 5},
        ),
        ({"left": 1}, {"left": 1}),
        ({"tokens": TOKENS - 1}, {"tokens": TOKENS - 1}),
        ({"failures": 1}, {"failures": 1}),
    ],
)
def test_the_verdict_counts_what_the_store_holds(
    change: dict[str, Any], found: dict[str, int]
) -> None:
    """All that was asked for is there, once; what was started again is no fault."""
    verdict = judge(**GOOD | change)
    assert {name: getattr(verdict, name) for name in found} == found
    harmless = {"again", "handled", "instants", "firings"}
    assert verdict.is_good == (not any(found[name] for name in found.keys() - harmless))
    lines = describe_verdict(verdict)
    assert any(line.startswith("BAD") for line in lines) != verdict.is_good
    assert lines[-1].startswith("Counted from the store") == verdict.is_good


def look(**changes: Any) -> DemoSnapshot:
    """Return a look at the demo."""
    facts: dict[str, Any] = {
        "leader": "worker-1",
        "epoch": 1,
        "states": {"worker-1": "live"},
        "tokens": {"worker-1": 120},
        "waiting": 0,
        "done": 0,
        "firings": 0,
        "records": 0,
    }
    return DemoSnapshot(**facts | changes)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (None, look(), []),
        (look(), look(done=5), []),
        (look(states={}), look(), ["worker-1 has joined"]),
        (look(), look(states={"worker-1": "dead"}), ["the session of worker-1 is dead"]),
        (
            look(),
            look(tokens={"worker-2": 60, "worker-1": 60}),
            ["tokens: worker-1 60, worker-2 60"],
        ),
    ],
)
def test_the_viewer_is_told_what_has_changed(
    before: DemoSnapshot | None, now: DemoSnapshot, told: list[str]
) -> None:
    """Only changes are told, and each once."""
    assert list(list_changes(before, now)) == told


def test_the_rate_is_that_of_the_latest_looks() -> None:
    """Nothing is known of it before time has passed; what was done long ago does not count."""
    clock = FakeClock()
    rate = _DoneRate(clock)
    assert [rate.add(done) for done in (3, 3, 9)] == [0.0, 0.0, 0.0]
    clock.mono_seconds += 2.0
    assert rate.add(13) == 5.0
    for _ in range(20):
        clock.mono_seconds += 1.0
        assert rate.add(14) < 5.0
    assert rate.add(14) == 0.0


def test_in_a_pipe_events_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with the seconds since the start; the verdict comes last."""
    clock = FakeClock()
    screen = LineScreen(clock)
    screen.start("sqlite:///demo.db", 4, 30)
    screen.tell("worker-1 leads")
    verdict: DemoVerdict = judge(**GOOD)
    screen.finish(verdict)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 worker processes on sqlite:///demo.db, for 30 s."
    assert "   0.0 s  worker-1 leads" in lines
    assert lines[-1] == "Counted from the store: nothing was lost or doubled."


@pytest.mark.parametrize("words", [("--workers", "2"), ("--seconds", "5"), ("--url", "mysql://a")])
def test_wrong_options_are_refused_before_anything_starts(words: tuple[str, str]) -> None:
    """Fewer workers or seconds would show nothing."""
    result = CliRunner().invoke(demo, words)
    assert result.exit_code != 0
    assert "worker processes" not in result.output
