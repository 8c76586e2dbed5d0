"""The queues that are compared, and how each is configured."""

from typing import Literal

import msgspec

__all__ = [
    "BARE",
    "GRAPHILE",
    "OURS",
    "POSTGRES",
    "REASONS",
    "SQLITE",
    "TUNED",
    "Contender",
    "Part",
]

Part = Literal["drain", "bulk", "singles", "starts"]
ALL: tuple[Part, ...] = ("drain", "bulk", "singles", "starts")

OURS = "jobsync"
TUNED = "jobsync, tuned"
BARE = "bare driver"
GRAPHILE = "graphile-worker"


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    """A queue in one configuration."""

    name: str
    program: str
    variant: str = ""
    wheels: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ALL
    share: float = 1.0
    """Of the messages: slower ones get fewer, so that they do not take most of the time."""
    configuration: str

    @property
    def title(self) -> str:
        """The name with the version, for captions."""
        pinned = [each for each in (*self.wheels, *self.packages) if not each.startswith("pg@")]
        return pinned[0].replace("==", " ").replace("@", " ") if pinned else self.name


_BARE_PARTS = (
    "one plain table; a claim is an UPDATE of 100 rows, its end a DELETE, each its own commit"
)

POSTGRES = (
    Contender(
        name=BARE,
        program="bare_postgres.py",
        configuration=f"psycopg: {_BARE_PARTS}; COPY for bulk; 10 connections for 100 callers; "
        "LISTEN for starts",
    ),
    Contender(
        name=OURS,
        program="jobsync_queue.py",
        configuration="the defaults: `concurrency` 3, `prefetch` up to 150 by measured work; "
        "`enqueue_many` for bulk; `enqueue` by 100 tasks",
    ),
    Contender(
        name=TUNED,
        program="jobsync_queue.py",
        variant="10 1000",
        parts=("drain",),
        configuration="`concurrency` 10 and `prefetch` 1,000",
    ),
    Contender(
        name=GRAPHILE,
        program="graphile_worker.cjs",
        packages=("graphile-worker@0.18.0", "pg@8.23.1"),
        configuration="as in its own performance test, 24 concurrent jobs, a pool of 25, and "
        "`localQueue` with a refetch delay of 10 ms (none for starts), but of `size` 1,000 instead "
        "of 500, which was faster here; "
        "`completeJobBatchDelay` 0; `addJobs` for bulk; `addJob` by 100 callers",
    ),
    Contender(
        name="pg-boss",
        program="pg_boss.cjs",
        variant="1000 4",
        packages=("pg-boss@12.35.0",),
        configuration="`localConcurrency` 4 with `batchSize` 1,000 and `burstWhenBatchFull`: a "
        "handler gets 1,000 jobs at once, and they are settled as one; LISTEN/NOTIFY on; a pool "
        "of 10; "
        "`insert` for bulk; `send` by 100 callers",
    ),
    Contender(
        name="pgqueuer",
        program="pgqueuer_queue.py",
        variant="500 1",
        wheels=("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0"),
        share=0.2,
        configuration="asyncpg and uvloop; `batch_size` 500; `enqueue` with lists for bulk; "
        "`enqueue` by 100 tasks on a pool of 10",
    ),
    Contender(
        name="procrastinate",
        program="procrastinate_queue.py",
        variant="10",
        wheels=("procrastinate==3.10.0", "psycopg[binary]==3.3.8"),
        share=0.04,
        configuration="concurrency 10, a pool of 10, `delete_jobs` successful; "
        "`batch_defer_async` for bulk; `defer_async` by 100 tasks",
    ),
)

SQLITE = (
    Contender(
        name=BARE,
        program="bare_sqlite.py",
        parts=("drain",),
        configuration=f"sqlite3: {_BARE_PARTS}; WAL, synchronous=FULL",
    ),
    Contender(
        name=OURS,
        program="jobsync_queue.py",
        parts=("drain", "starts"),
        configuration="the defaults, as on PostgreSQL",
    ),
    Contender(
        name=TUNED,
        program="jobsync_queue.py",
        variant="10 1000",
        parts=("drain",),
        configuration="`concurrency` 10 and `prefetch` 1,000",
    ),
    Contender(
        name="huey",
        program="huey_queue.py",
        variant="4 0.1 1.15",
        wheels=("huey==3.5.4",),
        parts=("drain", "starts"),
        share=0.1,
        configuration="4 worker threads, no results stored, SQLite's own synchronous=FULL; polls "
        "after 0.1 s, as by default",
    ),
    Contender(
        name="huey, polling every 10 ms",
        program="huey_queue.py",
        variant="4 0.01 1",
        wheels=("huey==3.5.4",),
        parts=("starts",),
        configuration="the same with `initial_delay` 0.01 and `backoff` 1",
    ),
)

_NO_CLAIMS = (
    "It calls no handler of its own for a message, renews no claims, counts no attempts and keeps "
    "neither errors nor what was completed."
)
REASONS: dict[tuple[str, Part, str], str] = {
    ("PostgreSQL", "drain", BARE): _NO_CLAIMS,
    ("PostgreSQL", "drain", GRAPHILE): (
        "Its process needs less CPU for a job: V8 compiles it, while ours is interpreted. It keeps "
        "nothing of a completed job, and frees the jobs of a dead worker after four hours; jobsync "
        "remembers the former, and frees the latter after 30 seconds."
    ),
    ("PostgreSQL", "drain", "pg-boss"): (
        "Its handler gets 1,000 jobs in one call, which fail or succeed as one. jobsync calls the "
        "handler for each message, and each has its own outcome."
    ),
    ("PostgreSQL", "bulk", BARE): (
        "COPY of the payload alone. jobsync checks each message, and stores its id, times and "
        "limits too: twice as many bytes of WAL."
    ),
    ("PostgreSQL", "starts", BARE): "Its statements are smaller, and it has nothing else to do.",
    ("PostgreSQL", "starts", "pgqueuer"): (
        "All wait for two commits and a notification; asyncpg and uvloop need less CPU for them "
        "than psycopg and asyncio."
    ),
    ("PostgreSQL", "starts", GRAPHILE): "As pgqueuer: Node needs less CPU for them.",
    ("PostgreSQL", "starts", "pg-boss"): "As pgqueuer: Node needs less CPU for them.",
    ("SQLite", "drain", BARE): _NO_CLAIMS,
}
"""Why a contender wins a row, where it does."""
