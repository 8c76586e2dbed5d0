"""Waiting and waking within one process."""

import asyncio

import pytest

from jobsync.stores.memory import LocalNotifier


def test_a_waiter_of_a_closed_loop_is_harmless() -> None:
    """Waking skips a loop that was closed."""
    notifier = LocalNotifier()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(notifier.wait("n/", 60))
    loop.run_until_complete(asyncio.sleep(0))
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    notifier.wake(["n/"])


async def test_only_its_own_topic_wakes_a_waiter() -> None:
    """A change of another topic does not."""
    notifier = LocalNotifier()
    waiting = asyncio.create_task(notifier.wait("n/", 60))
    await asyncio.sleep(0)
    notifier.wake(["m/"])
    await asyncio.sleep(0)
    assert not waiting.done()
    notifier.wake(["n/"])
    await waiting


ENDS = {
    "woken": "True",
    "all woken": "True",
    "changed": "True",
    "timeout": "False",
    "cancelled": "CancelledError",
    "failed": "ZeroDivisionError",
}


@pytest.mark.parametrize("end", ENDS)
async def test_a_wait_leaves_nothing_behind(end: str) -> None:
    """However it ends, and while another one of the same topic goes on; again and again."""
    notifier = LocalNotifier()

    def look() -> bool:
        return bool(1 / 0) if end == "failed" else end == "changed"

    for _ in range(2):
        other = asyncio.create_task(notifier.wait("n/", 60))
        timeout = 0.0 if end == "timeout" else 60.0
        topic = "m/" if end == "woken" else "n/"
        waiting = asyncio.create_task(notifier.wait(topic, timeout, look))
        await asyncio.sleep(0)
        match end:
            case "woken":
                notifier.wake(["m/"])
            case "all woken":
                notifier.wake_all()
            case "cancelled":
                waiting.cancel()
        (result,) = await asyncio.gather(waiting, return_exceptions=True)
        assert ENDS[end] in {repr(result), type(result).__name__}
        assert other.done() is (end == "all woken")
        assert [len(waiters) for waiters in notifier._callbacks.values()] == (
            [] if other.done() else [1]
        )
        notifier.wake(["n/"])
        assert await other is True
        assert notifier._callbacks == {}


async def test_a_change_while_a_waiter_looks_is_not_missed() -> None:
    """It can be woken before it looks, so that what comes in between counts."""
    notifier = LocalNotifier()

    def look() -> bool:
        notifier.wake(["n/"])
        return False

    async with asyncio.timeout(30):
        assert await notifier.wait("n/", 3600, look)
