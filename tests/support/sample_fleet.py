"""A node of a small fleet, for commands to inspect: `python sample_fleet.py URL NODE`.

Joins as a node, claims tasks, prints "ready" and stays until its standard input ends. The node
worker-01 also creates records and pins, and marks its tasks as done.
"""

import asyncio
import sys

from jobsync import CoordinationConfig, Database, Job

CONFIG = CoordinationConfig(
    total_tokens=100, heartbeat_interval_sec=1, heartbeat_timeout_sec=4, minimum_nodes=2
)
TASKS = range(20)


async def create_records(url: str) -> None:
    """Create a resource with three records."""
    async with Database(url) as database:
        users = await database.create_resource(
            name="users", attributes={"name": "string|required", "age": "number"}
        )
        await users.insert_many(
            [{"id": f"u{n}", "name": f"ann-{n}", "age": 30 + n} for n in (0, 1, 2)]
        )


def main(url: str, node: str) -> None:
    """Run a node until the input ends."""
    if node == "worker-01":
        asyncio.run(create_records(url))
    with Job(node, "production", url=url, coordination_config=CONFIG) as job:
        if node == "worker-01":
            job.register_task_lock("render", "gpu-%", "needs a GPU")
            job.register_task_lock("train", ["tpu-%", "big-%"], "needs a TPU")
        claimed = job.add_tasks([task for task in TASKS if job.can_claim_task(task)])
        if node == "worker-01":
            job.write_audit()
        sys.stdout.write(f"ready {len(claimed)}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
