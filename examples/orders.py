"""Events of one order are handled in order, other orders meanwhile; repeated clicks count once.

Run it with `python examples/orders.py`.
"""

import asyncio
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from jobsync import Context, Database, QueuePlugin

ORDERS = 5
STEPS = ("placed", "paid", "packed", "shipped")
CLICKS = 4
events = QueuePlugin("events", concurrency=ORDERS)
handled: defaultdict[int, list[str]] = defaultdict(list)
busy: set[int] = set()


@events.task(max_retries=2, backoff=lambda _: 0.01)
async def handle(context: Context, order: int, step: str) -> int:
    """Handle a step of an order; the payment of the first order fails once."""
    if order in busy:
        raise AssertionError(f"order {order} is handled twice at a time")
    busy.add(order)
    try:
        await asyncio.sleep(0.02)
        if (order, step, context.attempt) == (0, "paid", 1):
            raise ConnectionError("the bank does not answer")
        handled[order].append(step)
        return len(busy)
    finally:
        busy.remove(order)


async def run(url: str) -> bool:
    """Enqueue all steps of all orders; return whether each order had its steps in order."""
    async with Database(url, plugins=[events]):
        calls = []
        for step in STEPS:
            for order in range(ORDERS):
                # Several clicks are one order, so they have one key: all are one message.
                call = handle.with_options(
                    group=f"order-{order}", key=f"{order}-{step}", key_ttl=60
                )
                clicks = [await call.enqueue(order, step) for _ in range(CLICKS)]
                assert len({click.id for click in clicks}) == 1
                calls.append(clicks[0])
        at_once = max([await call.result(timeout=30) for call in calls])
    for order, steps in sorted(handled.items()):
        print(f"  order {order}: {', '.join(steps)}")
    print(f"up to {at_once} orders were handled at a time")
    is_right = all(handled[order] == list(STEPS) for order in range(ORDERS))
    print("every order had its steps in order, once" if is_right else "NOT IN ORDER")
    return is_right


def main() -> int:
    """Run the example; return 0 if each order had its steps in order."""
    with tempfile.TemporaryDirectory() as folder:
        print(f"{ORDERS} orders with {len(STEPS)} steps each; each is enqueued {CLICKS} times")
        return 0 if asyncio.run(run(f"sqlite:///{Path(folder) / 'demo.db'}")) else 1


if __name__ == "__main__":
    sys.exit(main())
