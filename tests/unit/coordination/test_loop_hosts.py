"""A member that ends, and whoever asks something of it or waits for it, on either kind of loop."""

import asyncio
import gc
import threading

import pytest
from waiting import until

from jobsync.coordination.runner import OwnThread, SameLoop
from jobsync.errors import Unavailable

Host = SameLoop | OwnThread
KINDS = pytest.mark.parametrize("kind", [SameLoop, OwnThread])


class Member:
    """Lives until it is told to end, with an error or without."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_end = threading.Event()
        self._error = error

    async def live(self) -> None:
        """Wait on a thread: the test may run on another one."""
        await asyncio.to_thread(self.may_end.wait)
        if self._error is not None:
            raise self._error


async def finish(host: Host) -> BaseException | None:
    """Wait for the end of a member; return its error."""
    (error,) = await asyncio.gather(host.finish(), return_exceptions=True)
    return error


async def answer() -> str:
    """Return something."""
    return "here"


@KINDS
@pytest.mark.parametrize("error", [None, ValueError("it is broken")])
async def test_nothing_can_be_asked_of_a_member_that_has_ended(
    kind: type[Host], error: Exception | None
) -> None:
    """While it lives it answers; then the call says that it has ended, and why, each time."""
    host, member = kind(), Member(error)
    host.start(member.live)
    assert await host.call(answer) == "here"
    member.may_end.set()
    assert await finish(host) is error
    for _ in range(2):
        with pytest.raises(Unavailable, match="it has ended") as caught:
            await host.call(wait_for_ever)
        assert caught.value.__cause__ is error
    assert await finish(host) is error


async def wait_for_ever() -> None:
    """Wait."""
    await asyncio.Event().wait()


@KINDS
async def test_a_call_ends_with_the_member_and_its_work_is_cancelled(kind: type[Host]) -> None:
    """Nobody is left to use what it would return."""
    error = ValueError("it is broken")
    host, member = kind(), Member(error)
    told: list[str] = []

    async def work() -> None:
        told.append("begun")
        try:
            await wait_for_ever()
        finally:
            told.append("cancelled")

    host.start(member.live)
    call = asyncio.create_task(host.call(work))
    await until(lambda: told == ["begun"], "the work has begun")
    member.may_end.set()
    with pytest.raises(Unavailable, match="it has ended") as caught:
        await call
    assert caught.value.__cause__ is error
    await until(lambda: told == ["begun", "cancelled"], "the work is cancelled")
    assert await finish(host) is error


@KINDS
async def test_who_stops_waiting_for_a_member_does_not_end_it(kind: type[Host]) -> None:
    """Others may still wait for its end, and it may still be asked."""
    host, member = kind(), Member()
    host.start(member.live)
    waits = [asyncio.create_task(host.finish()) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    await asyncio.wait(waits[:1])
    assert waits[0].cancelled()
    assert await host.call(answer) == "here"
    assert not waits[1].done()
    member.may_end.set()
    await waits[1]
    assert await finish(host) is None


async def test_an_error_of_a_member_that_nobody_waits_for_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has reported that itself."""
    host, member = OwnThread(), Member(ValueError("it is broken"))
    host.start(member.live)
    member.may_end.set()
    await until(host._done.done, "it has ended")
    del host
    gc.collect()
    assert caplog.messages == []


async def test_a_program_that_forgets_to_leave_can_still_exit() -> None:
    """The thread of its member does not keep it."""
    host, member = OwnThread(), Member()
    before = set(threading.enumerate())
    host.start(member.live)
    started = set(threading.enumerate()) - before
    assert [each.daemon for each in started if each.name == "jobsync-session"] == [True]
    member.may_end.set()
    assert await finish(host) is None


def test_a_member_whose_home_loop_is_closed_ends() -> None:
    """Nothing is left to do the work that it could be elected for."""
    host, ended = OwnThread(), threading.Event()

    async def live() -> None:
        while True:
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                ended.set()
                raise
            host.post_home(do_nothing)

    async def forget() -> None:
        host.start(live)

    asyncio.run(forget())
    assert ended.wait(60)


def do_nothing() -> None:
    """Do nothing."""
