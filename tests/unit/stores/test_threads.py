"""The thread pool for blocking calls."""

import asyncio
import subprocess
import sys
import threading

import pytest

from jobsync.stores.threads import ThreadPool, _reply_pipe_of, gather_results


async def test_results_and_errors_are_returned_in_order() -> None:
    """The error of a call is raised where it is awaited."""
    threads = ThreadPool("test", 4)
    assert await gather_results([threads.run(pow, 2, n) for n in range(10)]) == [
        2**n for n in range(10)
    ]
    assert await gather_results([threads.run(pow, 2, 3)]) == [8]
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 1, 0)
    threads.shutdown()


def test_an_interrupted_loop_can_go_on() -> None:
    """An interrupt between two callbacks makes the loop call its readers twice for one reply."""
    loop = asyncio.new_event_loop()
    threads = ThreadPool("test-interrupted", 1)

    async def call_twice() -> int:
        called = threads.run(pow, 2, 3)
        result = await called
        _reply_pipe_of(loop)._deliver()
        return result

    assert loop.run_until_complete(call_twice()) == 8
    threads.shutdown()
    loop.close()


async def test_one_call_runs_in_each_thread() -> None:
    """All calls pass a barrier for the full number; no more threads are started."""
    threads = ThreadPool("test-full", 5)
    barrier = threading.Barrier(5)
    async with asyncio.timeout(30):
        for _ in range(3):
            await gather_results([threads.run(barrier.wait) for _ in range(5)])
    assert sum(thread.name == "test-full" for thread in threading.enumerate()) == 5
    threads.shutdown()
    threads.join()


async def test_two_callers_at_once_start_no_thread_too_many() -> None:
    """A call of another thread may start the last one while this one is about to."""
    threads = ThreadPool("test-late", 1)
    lock = threads._lock

    async def call() -> None:
        await threads.run(int)

    others = [threading.Thread(target=lambda: asyncio.run(call()))]

    class LateLock:
        def __enter__(self) -> None:
            if others:
                other = others.pop()
                other.start()
                other.join()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    threads._lock = LateLock()  # type: ignore[assignment]
    assert await threads.run(pow, 2, 3) == 8
    assert not others
    assert sum(thread.name == "test-late" for thread in threading.enumerate()) == 1
    threads.shutdown()
    threads.join()


async def test_a_single_caller_needs_few_threads() -> None:
    """Threads are started when all are busy, not for each call."""
    threads = ThreadPool("test-few", 32)
    for _ in range(100):
        await threads.run(int)
    assert sum(thread.name == "test-few" for thread in threading.enumerate()) < 8
    threads.shutdown()
    threads.join()


def test_a_call_of_a_closed_loop_is_dropped() -> None:
    """The thread runs the calls of other loops."""
    threads = ThreadPool("test", 1)
    release = threading.Event()

    async def call_and_leave() -> None:
        threads.run(release.wait)

    async def ask() -> int:
        return await threads.run(pow, 2, 3)

    asyncio.run(call_and_leave())
    release.set()
    assert asyncio.run(ask()) == 8
    threads.shutdown()


async def test_every_result_arrives() -> None:
    """Results that come while others are being delivered are not lost."""
    threads = ThreadPool("test", 8)
    async with asyncio.timeout(60):
        for _ in range(50):
            calls = [threads.run(pow, n, 2) for n in range(100)]
            assert await gather_results(calls) == [n * n for n in range(100)]
    threads.shutdown()


async def test_a_busy_loop_does_not_block_threads() -> None:
    """More results than fit in a pipe: the threads continue, and all results arrive."""
    threads = ThreadPool("test", 1)
    finished = threading.Event()
    calls = [threads.run(int) for _ in range(70_000)]
    last = threads.run(finished.set)
    assert finished.wait(60)
    assert await gather_results(calls) == [0] * len(calls)
    await last
    threads.shutdown()


COUNTS_DESCRIPTORS = """
import asyncio, gc
from pathlib import Path
from jobsync.stores.threads import ThreadPool

async def ask(threads):
    return await threads.run(pow, 2, 3)

def count_after(loops):
    threads = ThreadPool("test", 1)
    for _ in range(loops):
        asyncio.run(ask(threads))
    # A thread has the pipe of its last reply in hand for a moment longer than its caller waits.
    threads.shutdown()
    threads.join()
    gc.collect()
    return len(list(Path("/dev/fd").iterdir()))

before = count_after(1)
print(count_after(10) - before)
"""


def test_a_closed_loop_leaves_no_descriptors() -> None:
    """Programs that run loop after loop do not run out of files.

    In a process of its own: here, other tests' descriptors are closed meanwhile.
    """
    command = [sys.executable, "-c", COUNTS_DESCRIPTORS]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "0\n"


async def test_a_call_cancelled_before_it_starts_does_not_run() -> None:
    """One that has started runs to its end; both leave the thread free for others."""
    threads = ThreadPool("test", 1)
    started, release, ran = threading.Event(), threading.Event(), list[str]()

    def slow() -> None:
        started.set()
        release.wait()
        ran.append("started")

    first, second = threads.run(slow), threads.run(ran.append, "queued")
    await asyncio.to_thread(started.wait)
    first.cancel()
    second.cancel()
    release.set()
    assert await threads.run(pow, 2, 3) == 8
    assert ran == ["started"]
    assert first.cancelled()
    threads.shutdown()


async def test_a_pool_keeps_nothing_of_calls_that_are_done() -> None:
    """Whether they return, fail or are cancelled: each would seem to occupy a thread."""
    pool = ThreadPool("test-done", 8)
    for _ in range(5):
        assert await pool.run(int, "1") == 1
        with pytest.raises(ValueError, match="invalid literal"):
            await pool.run(int, "x")
        pool.run(int, "1").cancel()
    pool.shutdown()
    pool.join()
    assert pool._pending == set()


_AT_EXIT = """
import asyncio, os, threading, time
from jobsync.stores.threads import ThreadPool

def slow():
    started.set()
    threading.main_thread().join()
    time.sleep(0.1)
    os.write(1, b"started")

async def main():
    threads.run(slow)
    for _ in range(1000):
        threads.run(os.write, 1, b"queued")
    started.wait()

started, threads = threading.Event(), ThreadPool("test", 1)
asyncio.run(main())
"""


def test_at_exit_running_calls_finish_and_queued_ones_are_dropped() -> None:
    """No thread is left in foreign code, and no queue prevents the exit."""
    done = subprocess.run(
        [sys.executable, "-c", _AT_EXIT], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"started", b"")


async def test_a_failed_thread_start_raises_and_can_recover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that cannot start is an error now, not a hang later."""
    pool = ThreadPool("test", 2)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            await pool.run(int, "1")
    assert pool._pending == set()
    assert await pool.run(int, "2") == 2
    # The call that was never made does not count as one that occupies a thread.
    assert await pool.run(int, "3") == 3
    assert len(pool._threads) == 1
    pool.shutdown()


async def test_without_more_threads_the_existing_ones_do_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All calls are made, one after the other; a thread more is started once the system has one."""
    pool = ThreadPool("test-scarce", 3)
    assert await pool.run(int, "1") == 1

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert await gather_results([pool.run(int, str(n)) for n in range(20)]) == [*range(20)]
        assert len(pool._threads) == 1
    barrier = threading.Barrier(3)
    async with asyncio.timeout(30):
        await gather_results([pool.run(barrier.wait) for _ in range(3)])
    assert len(pool._threads) == 3
    pool.shutdown()
    pool.join()
