"""Waiting and waking within one process."""

import asyncio

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
