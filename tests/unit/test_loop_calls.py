"""Calls of coroutines on the event loop of another thread."""

import asyncio
import inspect
import opcode
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, cast

import pytest
from waiting import until

from jobsync import loop_calls
from jobsync.errors import Unavailable
from jobsync.loop_calls import Background, LoopCalls

LONG = 60.0


async def test_a_cancelled_task_ends_after_the_call_that_it_awaits() -> None:
    """As on one loop: what the call does at its end is done when the task has ended."""
    has_started, may_end = threading.Event(), threading.Event()

    async def work() -> None:
        has_started.set()
        try:
            await asyncio.sleep(LONG)
        finally:
            await asyncio.to_thread(may_end.wait, LONG)

    background = Background("test", lambda: Unavailable("store", "it has ended", "connect again"))
    task = asyncio.create_task(background._calls.run(work()))
    assert await asyncio.to_thread(has_started.wait, LONG)
    task.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(background.stop)


@pytest.mark.parametrize("error", [None, KeyError("a")])
@pytest.mark.parametrize("is_on_loop", [False, True])
def test_what_came_of_a_call_counts_although_the_loop_was_closed_before_the_caller_looked(
    monkeypatch: pytest.MonkeyPatch, error: KeyError | None, is_on_loop: bool
) -> None:
    """The call has ended; only the news of that was late."""
    loop = asyncio.new_event_loop()
    calls = LoopCalls(loop, lambda: Unavailable("store", "it has ended", "connect again"))
    calls.open()
    submit = calls._submit

    async def work() -> str:
        loop.stop()
        if error is not None:
            raise error
        return "result"

    def submit_and_run(call: Any) -> None:
        submit(call)
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        thread.join()
        calls.end()
        loop.close()

    monkeypatch.setattr(calls, "_submit", submit_and_run)
    with nullcontext() if error is None else pytest.raises(KeyError):
        found = asyncio.run(calls.run(work())) if is_on_loop else calls.call(work())
        assert found == "result"


@pytest.mark.parametrize("caller", ["thread", "task", "cancelled task"])
def test_a_call_ends_with_an_error_when_the_loop_is_closed_while_it_runs(caller: str) -> None:
    """A loop that is stopped and closed cancels nothing, and tells nobody."""
    loop = asyncio.new_event_loop()
    calls = LoopCalls(loop, lambda: Unavailable("store", "it has ended", "connect again"))
    calls.open()
    runs, errors = asyncio.Event(), list[BaseException]()

    async def work() -> None:
        runs.set()
        await asyncio.Event().wait()

    async def call_and_cancel() -> None:
        task = asyncio.create_task(calls.run(work()))
        await until(runs.is_set)
        await asyncio.to_thread(closing.wait)
        if caller == "cancelled task":
            task.cancel()
        await task

    def call() -> None:
        try:
            if caller == "thread":
                calls.call(work())
            else:
                asyncio.run(call_and_cancel())
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    closing = threading.Event()
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    loop.run_until_complete(runs.wait())
    loop.close()
    closing.set()
    thread.join(LONG)
    assert not thread.is_alive()
    (error,) = errors
    assert isinstance(error, Unavailable | asyncio.CancelledError)
    assert isinstance(error, Unavailable) or caller == "cancelled task"


@pytest.mark.parametrize("end", ["end", "fail_unstarted"])
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_call_after_the_end_fails_at_once_whether_or_not_the_loop_is_closed(
    end: str, *, is_closed: bool
) -> None:
    """Each one, also those that had been queued: nobody waits for a loop that starts nothing."""
    loop = asyncio.new_event_loop()
    calls = LoopCalls(loop, lambda: Unavailable("store", "it has ended", "connect again"))
    calls.open()
    begun: list[int] = []

    async def work(number: int) -> None:
        begun.append(number)

    errors: list[BaseException] = []

    def call(number: int) -> None:
        try:
            calls.call(work(number))
        except Unavailable as error:
            errors.append(error)

    def start(number: int) -> threading.Thread:
        thread = threading.Thread(target=call, args=[number], daemon=True)
        thread.start()
        return thread

    early = start(0)
    while not calls._queued:
        early.join(0.001)
    getattr(calls, end)()
    if is_closed:
        loop.close()
    for thread in (early, start(1), start(2)):
        thread.join(LONG)
        assert not thread.is_alive()
    assert (len(errors), begun) == (3, [])
    loop.close()


class BadEndError(Exception):
    """What a coroutine raises when it is closed."""


@pytest.mark.parametrize("is_called_late", [False, True])
def test_a_coroutine_that_fails_at_its_end_keeps_nobody_waiting(*, is_called_late: bool) -> None:
    """Neither its caller nor those after it."""
    loop = asyncio.new_event_loop()
    calls = LoopCalls(loop, lambda: Unavailable("store", "it has ended", "connect again"))
    calls.open()

    class Work:
        """A coroutine that never began, and that cannot be closed."""

        def close(self) -> None:
            raise BadEndError

    errors: list[BaseException] = []

    def call() -> None:
        try:
            calls.call(cast("Any", Work()))
        except BaseException as error:  # noqa: BLE001 - whatever it is
            errors.append(error)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    if is_called_late:
        calls.end()
    for thread in threads:
        thread.start()
    while not is_called_late and len(calls._queued) < 2:
        threads[0].join(0.001)
    calls.end()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert [type(error) for error in errors] == [Unavailable, Unavailable]
    loop.close()


def test_nothing_is_left_of_calls_that_have_ended() -> None:
    """Whatever became of them; blocking calls one after the other share one pipe."""
    background = Background("test", lambda: Unavailable("store", "it has ended", "connect again"))

    async def work(error: BaseException | None) -> int:
        if error is not None:
            raise error
        return 5

    try:
        for _ in range(3):
            assert background.call(work(None)) == 5
            with pytest.raises(ValueError, match="no"):
                background.call(work(ValueError("no")))
            with pytest.raises(Unavailable):
                background.call(work(asyncio.CancelledError()))
        # The last one is forgotten by the loop, a moment after its caller is woken.
        background.call(work(None))
        assert len(background._calls._running) <= 1
        assert len(background._calls._idle_pipes) == 1
        assert not background._calls._queued
    finally:
        background.stop()
    late = work(None)
    with pytest.raises(Unavailable):
        background.call(late)
    # It was closed: it can neither be awaited, nor is it reported as never awaited.
    with pytest.raises(RuntimeError, match=r"already awaited|cannot reuse"):
        late.send(None)


class Interruption:
    """Raises `KeyboardInterrupt` in this thread before an instruction of `loop_calls`.

    Args:
        at: the number of the instruction; the first is 0.
        may_wait: whether the thread may wait; if not, it comes before the wait at the latest.
    """

    def __init__(self, at: int, *, may_wait: bool) -> None:
        self._left = at
        self._may_wait = may_wait
        self.has_come = False
        self.is_before_a_wait = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Count from here."""
        sys.settrace(self._enter)
        try:
            yield
        except KeyboardInterrupt:
            self.has_come = True
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _argument: object) -> Any:
        frame.f_trace_opcodes = frame.f_code.co_filename == loop_calls.__file__
        return self._step if frame.f_trace_opcodes else None

    def _step(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "opcode":
            name = opcode.opname[frame.f_code.co_code[frame.f_lasti]]
            is_wait = frame.f_code.co_name == "wait" and name.startswith("CALL")
            self.is_before_a_wait = is_wait and not self._may_wait
            if not self._left or self.is_before_a_wait:
                sys.settrace(None)
                raise KeyboardInterrupt
            self._left -= 1
        return self._step


@pytest.mark.parametrize("ends", [False, True])
def test_a_call_ends_wherever_its_caller_is_interrupted(*, ends: bool) -> None:
    """Found: between its start and the wait for it, Ctrl-C left a call that ran for ever."""
    background = Background("test", lambda: Unavailable("store", "it has ended", "connect again"))

    async def work() -> None:
        if not ends:
            await asyncio.Event().wait()

    async def do_nothing() -> None:
        pass

    def interrupt(number: int) -> Interruption:
        running, interruption = work(), Interruption(number, may_wait=ends)
        with interruption.armed():
            background.call(running)
        # What was queued before is started now.
        background.call(do_nothing())
        if inspect.getcoroutinestate(running) == inspect.CORO_CREATED:
            running.close()
        background.call(until(lambda: inspect.getcoroutinestate(running) == inspect.CORO_CLOSED))
        assert not background._calls._queued
        return interruption

    try:
        number, interruption = 0, interrupt(0)
        while interruption.has_come and not interruption.is_before_a_wait:
            number += 1
            interruption = interrupt(number)
        assert number > 50
        assert interruption.has_come is not ends
    finally:
        background.stop()
