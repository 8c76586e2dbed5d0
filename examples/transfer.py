"""Payments that fail half-way are booked once: booking and end of the message are one commit.

Run it with `python examples/transfer.py`.
"""

import asyncio
import sqlite3
import sys
import tempfile
from pathlib import Path

from jobsync import Context, Database, QueuePlugin

PAYMENTS = 30
payments = QueuePlugin("payments", concurrency=4)


@payments.task(max_retries=5, backoff=lambda _: 0.01)
async def book(context: Context, number: int, cents: int) -> None:
    """Book a payment; the first attempt of every third one crashes after it has written."""
    async with context.transaction() as connection:
        connection.execute("INSERT INTO bookings VALUES (?, ?)", (number, cents))
        if number % 3 == 0 and context.attempt == 1:
            raise ConnectionError("the power is gone")


async def run(folder: Path) -> bool:
    """Book all payments; return whether each is there once."""
    file = folder / "demo.db"
    failures = 0

    def count(_: object) -> None:
        nonlocal failures
        failures += 1

    payments.on("plg:queue:message-retry", count)
    async with Database(f"sqlite:///{file}", plugins=[payments]):
        ledger = sqlite3.connect(file)
        ledger.execute("CREATE TABLE bookings (number INTEGER, cents INTEGER)")
        calls = await book.enqueue_many(
            [{"number": number, "cents": 100 + number} for number in range(PAYMENTS)]
        )
        for call in calls:
            await call.result(timeout=30)
    rows = ledger.execute("SELECT number, cents FROM bookings ORDER BY number").fetchall()
    ledger.close()
    print(f"{failures} attempts failed after they had written")
    print(f"{len(rows)} bookings, {sum(cents for _, cents in rows)} cents")
    is_exact = rows == [(number, 100 + number) for number in range(PAYMENTS)]
    print("each payment was booked once" if is_exact else f"NOT ONCE EACH: {rows}")
    return is_exact and failures == len(range(0, PAYMENTS, 3))


def main() -> int:
    """Run the example; return 0 if each payment was booked once."""
    with tempfile.TemporaryDirectory() as folder:
        print(f"{PAYMENTS} payments, some of which fail half-way")
        return 0 if asyncio.run(run(Path(folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
