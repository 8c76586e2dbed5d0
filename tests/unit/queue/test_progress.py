"""Progress of handlers is stored seldom, in one request for all, and removed at the end."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest

from jobsync import Unavailable
from jobsync.core.clock import Clock
from jobsync.queue.backend import QueueBackend, Receipt
from jobsync.queue.progress import ProgressWriter
from jobsync.queue.results import build_result
from jobsync.queue.single_message import ProgressReport


class Stored:
    """A backend that only stores progress, and a clock whose pauses end when the test says so."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.is_away = False
        self.pauses: list[asyncio.Event] = []

    async def report_progress(self, reports: Sequence[ProgressReport]) -> None:
        """Record a request."""
        self.requests.append({each.receipt.id: (each.progress, each.note) for each in reports})
        if self.is_away:
            raise Unavailable("store", "away")

    async def clear_progress(self, ids: Collection[str]) -> None:
        """Record a request."""
        self.requests.append(sorted(ids))

    async def sleep(self, _: float) -> None:
        """Wait for the test."""
        self.pauses.append(asyncio.Event())
        await self.pauses[-1].wait()


async def settle_down() -> None:
    """Run everything that can."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def stored() -> Stored:
    """An empty store."""
    return Stored()


async def test_reports_collect_while_one_is_stored(stored: Stored) -> None:
    """The latest of each message; nothing runs before the first one, and nothing is sent twice."""
    tasks: list[asyncio.Task[None]] = []
    writer = ProgressWriter(
        lambda: tasks.append(asyncio.create_task(writer.run())),
        lambda: cast("QueueBackend", stored),
        lambda: cast("Clock", stored),
    )
    one, two = Receipt("1", 1, "c"), Receipt("2", 1, "c")
    writer.end("1")
    assert (tasks, writer.is_used) == ([], False)
    writer.report(one, 0.1, "")
    for wrong in (float("nan"), float("inf"), "0.5", None, 10**400):
        writer.report(two, wrong, "")
    await settle_down()
    writer.report(one, 0.2, "")
    writer.report(one, 1, "a\tb\n" + "x" * 300)
    writer.report(two, 0.5, "")
    await settle_down()
    assert stored.requests == [{"1": (0.1, "")}]
    stored.pauses.pop().set()
    await settle_down()
    assert stored.requests.pop() == {"1": (1.0, "a b " + "x" * 196), "2": (0.5, "")}
    writer.report(two, 0.6, "")
    writer.end("2")
    stored.is_away = True
    writer.report(one, 0.9, "")
    stored.pauses.pop().set()
    await settle_down()
    assert stored.requests[-2:] == [["2"], {"1": (0.9, "")}]
    # It was not stored: it is sent again, unless its message has ended.
    writer.report(two, 0.7, "")
    stored.pauses.pop().set()
    await settle_down()
    assert stored.requests.pop() == {"1": (0.9, ""), "2": (0.7, "")}
    stored.is_away = False
    writer.report(one, 0.95, "")
    writer.end("2")
    stored.pauses.pop().set()
    await settle_down()
    assert stored.requests[-2:] == [["2"], {"1": (0.95, "")}]
    stored.pauses.pop().set()
    await settle_down()
    assert stored.pauses == []
    tasks[0].cancel()
    await asyncio.wait(tasks)


@pytest.mark.parametrize(
    ("value", "text", "problem"),
    [
        (0, "0", ""),
        ({"a": [1, None]}, '{"a":[1,null]}', ""),
        ("x" * 98, f'"{"x" * 98}"', ""),
        ("x" * 99, None, "must be at most 100 bytes"),
        (object(), None, "result"),
        ({1, 2}, None, "result"),
        (float("nan"), None, "result"),
    ],
)
def test_a_result_is_json_or_has_a_problem(value: Any, text: str | None, problem: str) -> None:
    """Whatever a handler returns."""
    result = build_result(value, 100)
    assert result.text == text
    assert problem in result.problem
    assert bool(result.problem) == (text is None)


def build_writer(stored: Stored, tasks: "list[asyncio.Task[None]]") -> ProgressWriter:
    """Return a writer whose runs are added to some tasks."""
    writer = ProgressWriter(
        lambda: tasks.append(asyncio.create_task(writer.run())),
        lambda: cast("QueueBackend", stored),
        lambda: cast("Clock", stored),
    )
    return writer


async def go_on(stored: Stored) -> list[Any]:
    """End the pause; return what was requested after it."""
    stored.requests.clear()
    stored.pauses.pop().set()
    await settle_down()
    return stored.requests


async def test_the_next_claim_of_a_message_has_a_progress_of_its_own(stored: Stored) -> None:
    """Its report replaces the former one: it is not removed as that one's."""
    tasks: list[asyncio.Task[None]] = []
    writer = build_writer(stored, tasks)
    writer.report(Receipt("1", 1, "a"), 0.1, "")
    await settle_down()
    writer.end("1")
    writer.report(Receipt("1", 2, "b"), 0.2, "")
    assert await go_on(stored) == [{"1": (0.2, "")}]
    writer.end("1")
    assert await go_on(stored) == [["1"]]
    tasks[0].cancel()


@pytest.mark.parametrize(
    ("meanwhile", "sent"),
    [
        ("nothing", [{"1": (0.1, "")}]),
        ("report", [{"1": (0.2, "")}]),
        ("end", [["1"]]),
        ("end and report", [{"1": (0.2, "")}]),
    ],
)
async def test_what_happens_while_a_request_fails_counts(
    stored: Stored, meanwhile: str, sent: list[Any]
) -> None:
    """The later report is kept, and what has ended is not reported again."""
    tasks: list[asyncio.Task[None]] = []
    writer = build_writer(stored, tasks)
    failing = stored.report_progress

    async def report(reports: Sequence[ProgressReport]) -> None:
        if "end" in meanwhile:
            writer.end("1")
        if "report" in meanwhile:
            writer.report(Receipt("1", 1, "a"), 0.2, "")
        await failing(reports)

    stored.is_away, stored.report_progress = True, report  # type: ignore[method-assign]
    writer.report(Receipt("1", 1, "a"), 0.1, "")
    await settle_down()
    stored.is_away, stored.report_progress = False, failing  # type: ignore[method-assign]
    assert await go_on(stored) == sent
    tasks[0].cancel()


async def test_a_writer_that_was_stopped_starts_again_with_the_next_report(stored: Stored) -> None:
    """A queue may be stopped and started again."""
    tasks: list[asyncio.Task[None]] = []
    writer = build_writer(stored, tasks)
    for number in (1, 2):
        writer.report(Receipt("1", number, "a"), number / 10, "")
        await settle_down()
        assert writer.is_used
        assert stored.requests[-1] == {"1": (number / 10, "")}
        tasks[-1].cancel()
        await asyncio.wait(tasks)
        assert not writer.is_used
    assert len(tasks) == 2


@pytest.mark.parametrize("is_cut_short", [False, True])
def test_a_writer_works_in_the_event_loop_of_each_connection(*, is_cut_short: bool) -> None:
    """A program may connect in one event loop after the other; what was reported is not forgotten.

    Args:
        is_cut_short: whether the former loop ends before it has stored its last report.
    """
    stored, tasks = Stored(), cast("list[asyncio.Task[None]]", [])
    writer = build_writer(stored, tasks)

    async def use(number: int) -> None:
        writer.report(Receipt("1", number, "a"), number / 10, "")
        await settle_down()
        assert stored.requests[-1] == {"1": (number / 10, "")}
        stored.pauses.pop().set()
        # Now it waits, in this loop.
        await settle_down()
        writer.report(Receipt("1", number, "a"), number / 5, "")
        if not is_cut_short:
            await settle_down()
            assert stored.requests[-1] == {"1": (number / 5, "")}
        tasks[-1].cancel()
        await asyncio.wait([tasks[-1]])
        assert tasks[-1].cancelled()

    for number in (1, 2, 3):
        asyncio.run(use(number))
    assert len(tasks) == 3
