"""Who waits in this process."""

import asyncio

from jobsync.stores.memory import LocalNotifier


def test_a_waiter_whose_loop_is_gone_harms_nobody() -> None:
    """Waking goes on past a loop that was closed under its waiter."""
    topics = LocalNotifier()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(topics.wait("n/", 60))
    loop.run_until_complete(asyncio.sleep(0))
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    topics.wake(["n/"])


async def test_only_its_own_topic_wakes_a_waiter() -> None:
    """Another topic's change ends nobody's wait."""
    topics = LocalNotifier()
    waiting = asyncio.create_task(topics.wait("n/", 60))
    await asyncio.sleep(0)
    topics.wake(["m/"])
    await asyncio.sleep(0)
    assert not waiting.done()
    topics.wake(["n/"])
    await waiting
