"""What to do about a message, a task or a job that waits or has ended, by the code of the reason.

A step names a command or a change that helps, or says that waiting is enough.
"""

from collections.abc import Mapping

from jobsync.status.jobs import TaskStatus
from jobsync.status.queues import MessageStatus
from jobsync.status.schedules import ScheduledJobStatus
from jobsync.status.why import Explained

__all__ = ["JOB_STEPS", "MESSAGE_STEPS", "TASK_STEPS", "suggest_next"]

_SOONER = "wait, or run: jobsync messages run-now {name}"
_START = "start a worker on this store: jobsync work app:db"
_BY_ITSELF = "wait: it continues by itself"

MESSAGE_STEPS: Mapping[str, str] = {
    "blocked": "wait, or see what the head of its group waits for: jobsync why ID",
    "busy": "wait, or start more workers, or raise the concurrency of the queue",
    "cancelled": "nothing, or run: jobsync queues redrive {queue} {name}",
    "claimed": "wait for its handler, or run: jobsync messages cancel {name}",
    "completed": "nothing",
    "corrupt": "repair what wrote it; then run: jobsync messages delete {name}",
    "dead": "mend the cause, deploy it, then run: jobsync queues redrive {queue} {name}",
    "lapsed": _BY_ITSELF,
    "limited": "wait, or raise the limit in the code of the queue or the task",
    "newer": "start a worker with the newer code",
    "next": "wait: seconds are enough",
    "no-worker": _START,
    "not-due": _SOONER,
    "owner-dead": "wait if a worker is live; else " + _START,
    "owner-silent": "wait until it is declared dead, or restart that process",
    "paused": "run: jobsync queues resume {queue}",
    "retrying": _SOONER,
    "suspect": "wait until a worker is idle, or start another one",
    "unknown": "check the id, and that this is the store that the program uses",
    "unknown-task": "start or resume a worker whose code has the task, or has @queue.handler",
    "unreadable": "repair what wrote it; then run: jobsync messages delete {name}",
}
TASK_STEPS: Mapping[str, str] = {
    "abandoned": _BY_ITSELF,
    "done": "nothing",
    "failed": "mend the cause; the owner tries it again",
    "moving": _BY_ITSELF,
    "owner-silent": "wait until it is declared dead, or restart that process",
    "running": "wait for its end",
    "unmatched-pin": "start a node that matches, or remove the pin: jobsync pins lists them",
    "unowned": "start a node, or wait for the leader: jobsync tokens shows both",
    "waiting": "wait, or check that the program on its node asks for tasks",
}
JOB_STEPS: Mapping[str, str] = {
    "disabled": "set enabled=True in its code, or call scheduler.update_job(…, enabled=True)",
    "due": "wait: seconds are enough",
    "failing": "mend what it raises: jobsync cluster shows it",
    "missed": "nothing, or run it now: jobsync schedules run {name}",
    "never": "change its schedule, in its code or by: jobsync schedules update {name}",
    "no-code": "start a worker whose code has the job",
    "no-coordinator": _BY_ITSELF,
    "no-process": _START,
    "overlapping": 'wait for the run, or define it with another overlap, such as overlap="queue"',
    "owner-dead": _BY_ITSELF,
    "owner-silent": "wait until it is declared dead, or restart that process",
    "paused": "run: jobsync schedules resume {name}",
    "removed": "start a worker whose code has it",
    "running": "wait for its end",
    "scheduled": "wait, or run it now: jobsync schedules run {name}",
    "skipped": "nothing, or run it now: jobsync schedules run {name}",
    "vetoed": "correct what the workers report, such as their clocks: jobsync doctor",
    "waiting": "wait, or raise max_concurrent_jobs",
}


def suggest_next(name: str, status: Explained | None, code: str) -> str:
    """Return what to do about something that was explained with this code."""
    steps, queue = MESSAGE_STEPS, ""
    match status:
        case ScheduledJobStatus():
            steps = JOB_STEPS
        case TaskStatus():
            steps = TASK_STEPS
        case MessageStatus():
            queue = status.queue.name
    return steps[code].format(name=name, queue=queue)
