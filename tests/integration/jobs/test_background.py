"""A loop on a thread of its own: callers get what came of their calls, or learn that it is over."""

import asyncio
import os
import select
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from jobsync.errors import Unavailable
from jobsync.jobs.background import Background, _PendingCall, _WakeupPipe

LONG = 30.0


@pytest.fixture
def background() -> Iterator[Background]:
    """A loop that runs."""
    loop = Background("test")
    yield loop
    loop.stop()


def test_a_caller_gets_what_it_came_to(background: Background) -> None:
    """The value, on the loop's own thread."""

    async def work() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    assert background.call(work()) == "test"


@pytest.mark.parametrize("error", [KeyError("a"), TimeoutError("late"), SystemExit(3)])
def test_a_caller_gets_what_was_raised(background: Background, error: BaseException) -> None:
    """As it is, also what would end a loop."""

    async def work() -> None:
        raise error

    async def go_on() -> bool:
        return True

    with pytest.raises(type(error)) as raised:
        background.call(work())
    assert raised.value is error
    assert background.call(go_on())


def test_who_waits_when_the_loop_is_stopped_is_told(background: Background) -> None:
    """Nobody waits for what never comes."""
    threading.Timer(0.05, background.stop).start()
    with pytest.raises(Unavailable, match="was left meanwhile"):
        background.call(asyncio.Event().wait())


def test_what_was_never_begun_is_told(background: Background) -> None:
    """A call that came together with the end; nothing warns of what was not awaited."""

    async def work() -> None:
        """Do nothing."""

    errand = _PendingCall(work(), _WakeupPipe())

    def begin_too_late() -> None:
        background._start(errand)
        background._running[errand].cancel()

    background.post(begin_too_late)
    background.stop()
    with pytest.raises(Unavailable, match="was left meanwhile"):
        wait_for(errand)


def test_what_was_handed_over_too_late_is_told(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop has ended since the caller looked."""

    async def work() -> None:
        """Do nothing."""

    background.stop()
    monkeypatch.setattr(background._thread, "is_alive", lambda: True)
    with ThreadPoolExecutor(1) as caller, pytest.raises(Unavailable, match="was left meanwhile"):
        caller.submit(background.call, work()).result(LONG)


def test_every_caller_gets_its_own(background: Background) -> None:
    """Of many at once, again and again, whichever is done first."""

    async def work(number: int) -> int:
        for _ in range(number % 5):
            await asyncio.sleep(0)
        return number

    with ThreadPoolExecutor(8) as callers:
        found = callers.map(lambda number: background.call(work(number)), range(400))
        assert list(found) == list(range(400))
    assert len(background._idle_pipes) <= 8


def test_a_caller_that_is_interrupted_leaves_no_ring_to_others(background: Background) -> None:
    """What it no longer waits for ends later, and rings for nobody."""
    may_end = threading.Event()

    async def end_late() -> str:
        await asyncio.to_thread(may_end.wait)
        return "late"

    async def work() -> str:
        return "mine"

    class Interrupted(_WakeupPipe):
        def wait(self) -> None:
            raise KeyboardInterrupt

    background._idle_pipes.append(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        background.call(end_late())
    may_end.set()
    assert [background.call(work()) for _ in range(20)] == ["mine"] * 20


def wait_for(errand: "_PendingCall[None]") -> None:
    """Wait until an errand is over, but not for ever."""
    ready, _, _ = select.select([errand.pipe.reader], [], [], LONG)
    assert ready
    errand.result()


def test_a_loop_that_was_stopped_takes_no_calls(background: Background) -> None:
    """It says so at once."""

    async def work() -> None:
        """Do nothing."""

    background.stop()
    with pytest.raises(Unavailable, match="Enter again"):
        background.call(work())


def test_several_may_stop_it_at_once(background: Background) -> None:
    """As a signal handler and the end of the block do; what still runs there ends first."""
    ended = threading.Event()

    async def end_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.set()

    background.post(lambda: background._start(_PendingCall(end_slowly(), _WakeupPipe())))
    threads = [threading.Thread(target=background.stop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended.is_set()
    assert background._loop.is_closed()


def test_a_forked_child_is_told_at_once(background: Background) -> None:
    """It has no such thread, and the parent's loop goes on undisturbed."""

    async def work() -> int:
        return 1

    child = os.fork()
    if child == 0:
        try:
            background.call(work())
        except Unavailable:
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert background.call(work()) == 1
