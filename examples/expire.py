"""Sessions that expire move to an archive; one that is renewed in time stays.

Run it with `python examples/expire.py`.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from jobsync import Database, Resource, TTLPlugin

USERS = 3
SESSIONS = 30
LONGEST = 2.0
"""Seconds that a session lives, unless it is renewed."""
TTL = TTLPlugin(
    resources={"sessions": {"on_expire": "archive", "archive_resource": "old_sessions"}},
    cleanup_interval=0.5,
    enable_coordinator=False,  # one process: nobody else could sweep
)


async def create_sessions(url: str) -> None:
    """Add sessions, each of which expires a moment after the one before."""
    # A connection without the plugin, as in a web server: the rule is in the store.
    async with Database(url) as db:
        sessions = db.resources.sessions
        start = time.time()
        await sessions.insert_many(
            {
                "id": f"s{number}",
                "user": f"user-{number % USERS}",
                "expires_at": start + LONGEST * (number + 1) / SESSIONS,
            }
            for number in range(SESSIONS)
        )
        # Only the sessions of this user are read.
        print(f"user-0 has {await sessions.count({'user': 'user-0'})} of {SESSIONS} sessions")


async def watch(sessions: Resource) -> None:
    """Renew one session until all others are gone."""
    left = SESSIONS
    while left > 1:
        await sessions.update("s7", {"expires_at": time.time() + LONGEST})
        await asyncio.sleep(0.2)
        if (now := await sessions.count()) != left:
            print(f"  {now} left")
            left = now


async def run(url: str) -> bool:
    """Let sessions expire; return whether each is in one place."""
    TTL.on("plg:ttl:cleanup-error", lambda event: print(f"  {event.record_id}: {event.error}"))
    async with Database(url, plugins=[TTL]) as db:
        sessions = await db.create_resource(
            name="sessions",
            attributes={"user": "string|required", "expires_at": "number|required"},
            partitions={"by_user": ["user"]},
        )
        await create_sessions(url)
        await watch(sessions)
        archived = [old.original_id for old in await db.resources.old_sessions.list()]
        left = await sessions.list_ids()
    print(f"{len(archived)} sessions are in the archive, and {', '.join(left)} was renewed")
    is_complete = sorted([*archived, *left]) == sorted(f"s{number}" for number in range(SESSIONS))
    print("each session is in one place" if is_complete else f"NOT IN ONE PLACE: {archived} {left}")
    return is_complete and left == ["s7"]


def main() -> int:
    """Run the example; return 0 if each session is in one place."""
    with tempfile.TemporaryDirectory() as folder:
        print(f"{SESSIONS} sessions expire within {LONGEST:g} s, one of them is renewed")
        return 0 if asyncio.run(run(f"sqlite:///{Path(folder) / 'demo.db'}")) else 1


if __name__ == "__main__":
    sys.exit(main())
