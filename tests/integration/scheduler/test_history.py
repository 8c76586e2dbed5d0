"""The history of scheduled jobs: pages, filters, retention and statistics."""

import asyncio
import time
from typing import Any

import pytest
from scheduler_stage import EVERY_SECOND, NEVER, SettableClock, run_scheduler
from servers import Locate
from waiting import until

from jobsync import Database, Invalid, JobContext, NotFound

KINDS = ["sqlite", "postgres", "s3"]
DAY = 86_400.0


def act(_: Database, context: JobContext) -> int:
    """Fail where it is told to."""
    if context["n"] % 3 == 0:
        raise ValueError("boom")
    return int(context["n"])


def build(*names: str) -> dict[str, dict[str, Any]]:
    """Return jobs that run by hand only, one after the other or at once."""
    return {name: {"schedule": NEVER, "action": act, "overlap": "allow"} for name in names}


@pytest.mark.parametrize("kind", KINDS)
async def test_history_is_read_in_pages_and_filtered(kind: str, locate: Locate) -> None:
    """The newest first, by status and time, of one job or all."""
    async with run_scheduler(locate(kind), build("a", "b")) as stage:
        scheduler = stage.scheduler
        for n in range(1, 8):
            if n % 3:
                assert await scheduler.run_job("a", {"n": n}) == n
            else:
                with pytest.raises(ValueError, match="boom"):
                    await scheduler.run_job("a", {"n": n})
        everything = await scheduler.job_history("a")
        assert [entry.result for entry in everything] == [7, None, 5, 4, None, 2, 1]
        times = [entry.scheduled_time for entry in everything]
        assert times == sorted(times, reverse=True)
        middle = times[0] + 1
        await until(lambda: time.time() > middle, "the next second")
        await scheduler.run_job("b", {"n": 8})
        pages, after = [], ""
        while page := await scheduler.job_history("a", limit=3, after=after):
            pages.append(page)
            after = page[-1].cursor
        assert [len(page) for page in pages] == [3, 3, 1]
        assert [entry for page in pages for entry in page] == everything
        failed = await scheduler.job_history("a", status="error", limit=2)
        assert failed == [everything[1], everything[4]]
        assert failed[0].error.startswith("ValueError: boom")
        assert await scheduler.job_history("a", status=["error", "success"]) == everything
        assert await scheduler.job_history("a", since=middle) == []
        (newest,) = await scheduler.job_history(since=middle)
        assert (newest.job_name, newest.result) == ("b", 8)
        assert [entry.job_name for entry in await scheduler.job_history(limit=2)] == ["b", "a"]
        for wrong in ({"status": "sucess"}, {"limit": 0}, {"after": "x"}):
            with pytest.raises(Invalid):
                await scheduler.job_history(**wrong)
        with pytest.raises(NotFound, match="a"):
            await scheduler.job_history("c")


@pytest.mark.parametrize("kind", KINDS)
async def test_history_is_kept_by_count(kind: str, locate: Locate) -> None:
    """Old runs are removed after every tenth, if ten are kept; the newest stay."""
    async with run_scheduler(locate(kind), build("a"), history_limit=10) as stage:
        for _ in range(20):
            await stage.scheduler.run_job("a", {"n": 1})
        newest = await stage.scheduler.job_history("a", limit=10)
        assert await removed(stage.scheduler, 10) == newest


async def test_history_is_kept_by_age(locate: Locate) -> None:
    """Runs older than the retention are removed; others stay."""
    clock = SettableClock(-40 * DAY)
    async with run_scheduler(locate("sqlite"), build("a"), clock=clock) as stage:
        for n in range(50):
            if n == 44:
                clock.ahead = 0.0
                await stage.scheduler._get_parts().clock.refresh()
            await stage.scheduler.run_job("a", {"n": 1})
        left = await removed(stage.scheduler, 6)
        assert all(entry.scheduled_time > time.time() - DAY for entry in left)


async def test_the_record_of_a_run_that_goes_on_is_kept(locate: Locate) -> None:
    """However old it is: the run ends as usual, and is not taken for one that never began."""
    began, release = asyncio.Event(), asyncio.Event()
    begun: list[JobContext] = []

    async def wait(_: Database, context: JobContext) -> str:
        if context.is_manual:
            return "quick"
        begun.append(context)
        began.set()
        await release.wait()
        return "slow"

    jobs = {"a": {"schedule": EVERY_SECOND, "action": wait, "overlap": "allow"}}
    async with run_scheduler(locate("sqlite"), jobs, history_limit=3) as stage:
        scheduler = stage.scheduler
        await began.wait()
        await scheduler.disable_job("a")
        instants = {context.scheduled_time for context in begun}
        await until(lambda: time.time() > max(instants) + 1, "the next second")
        for _ in range(50):
            await scheduler.run_job("a")
        try:
            await removed(scheduler, 3 + len(instants))
        finally:
            release.set()
        await until(lambda: not scheduler.list_running(), "it has ended")
        await stage.hears("job-completed", result="slow")
        slow = [e for e in await scheduler.job_history("a") if not e.is_manual]
        assert {(e.scheduled_time, e.result, e.resumed) for e in slow} == {
            (instant, "slow", 0) for instant in instants
        }
        assert stage.heard("job-lost") == []
        assert len(begun) == len(instants)


async def removed(scheduler: Any, count: int) -> Any:
    """Wait until only so many entries are left; return them."""

    async def is_removed() -> bool:
        return len(await scheduler.job_history("a", limit=100)) == count

    await until(is_removed, f"{count} entries are left", 20)
    return await scheduler.job_history("a", limit=100)


async def test_a_status_has_statistics(locate: Locate) -> None:
    """How often it succeeded, how long it took, and when it runs next, in its own zone."""
    jobs = build("a")
    jobs["a"] |= {"schedule": "30 3 * * *", "timezone": "Europe/Berlin", "description": "cleans"}
    async with run_scheduler(locate("sqlite"), jobs) as stage:
        fresh = await stage.scheduler.job_status("a")
        assert (fresh.runs, fresh.success_rate, fresh.p50, fresh.last_run) == (0, None, None, None)
        for n in (1, 2, 4, 3):
            if n % 3:
                await stage.scheduler.run_job("a", {"n": n})
            else:
                with pytest.raises(ValueError, match="boom"):
                    await stage.scheduler.run_job("a", {"n": n})
        status = await stage.scheduler.job_status("a")
    assert (status.runs, status.successes, status.failures) == (4, 3, 1)
    assert status.success_rate == 0.75
    assert (status.last_status, status["description"]) == ("error", "cleans")
    assert status.last_success is not None
    assert status.last_failure is not None
    assert status.last_success <= status.last_failure
    assert status.p50 is not None
    assert status.p95 is not None
    assert 0 <= status.p50 <= status.p95 < 10
    assert len(status.next_runs) == 5
    assert {time.gmtime(instant).tm_min for instant in status.next_runs} == {30}
    assert {time.gmtime(instant).tm_hour for instant in status.next_runs} <= {1, 2}
