"""Three worker processes share a list of tasks; one is killed half-way. No task is lost.

Run it with `python examples/share_tasks.py`.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from multiprocessing.synchronize import Semaphore
from pathlib import Path

from jobsync import CoordinationConfig, Job, Task

TASKS = 150
FLEET = CoordinationConfig(
    total_tokens=300, heartbeat_interval_sec=0.5, heartbeat_timeout_sec=2, reclaim_after=1
)


def work(name: str, url: str, done: Semaphore) -> None:
    """Do the tasks that this worker owns, until none is left in the fleet."""
    count = 0
    with Job(name, "demo", coordination_config=FLEET, url=url) as job:
        print(f"  {name}: {len(job.my_tokens)} of {FLEET.total_tokens} tokens", flush=True)
        for _ in job.tasks(range(TASKS)):
            sum(range(200_000))
            count += 1
            done.release()
    print(f"  {name}: {count} tasks done", flush=True)


def audit(url: str) -> set[Task]:
    """Read the audit of finished tasks, from all workers."""
    with Job("auditor", "demo", coordination_config=FLEET, url=url, observer=True) as job:
        return {Task(entry["task_id"]) for entry in job.get_audit()}


def main() -> int:
    """Start the workers and kill one; return 0 if the audit has every task."""
    spawn = multiprocessing.get_context("spawn")
    done = spawn.Semaphore(0)
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'fleet.db'}"
        names = [f"worker-{number}" for number in range(3)]
        workers = [spawn.Process(target=work, args=(name, url, done)) for name in names]
        print(f"{len(workers)} processes share {TASKS} tasks in one SQLite file")
        for worker in workers:
            worker.start()
        for _ in range(TASKS // 3):
            done.acquire()
        victim = workers[-1]
        assert victim.pid is not None, "it was started"
        print(f"  {names[-1]} is killed")
        os.kill(victim.pid, signal.SIGKILL)
        for worker in workers:
            worker.join()
        audited = audit(url)
    missing = TASKS - len(audited)
    print(f"{len(audited)} of {TASKS} tasks are audited as done")
    print("no task lost" if not missing else f"LOST {missing} TASKS")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
