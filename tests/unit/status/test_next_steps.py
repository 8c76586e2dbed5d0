"""Each answer of `why` ends with what to do."""

import inspect
import re

import pytest

from jobsync.queue.backend import MessageInfo
from jobsync.status import why
from jobsync.status.next_steps import JOB_STEPS, MESSAGE_STEPS, TASK_STEPS, suggest_next
from jobsync.status.queues import MessageStatus, QueueStatus

_find_codes = re.compile(r'Reason\(\s*"([a-z-]+)"|status, "(owner-[a-z]+)"').findall


def _list_codes(*words: str) -> set[str]:
    """Return the codes in the functions that explain something, by a word of their names."""
    functions = [
        inspect.getsource(function)
        for name, function in vars(why).items()
        if inspect.isfunction(function) and any(word in name for word in words)
    ]
    return {code for text in functions for found in _find_codes(text) for code in found if code}


def test_each_code_has_a_step() -> None:
    """Those that the code can answer with, and no others."""
    message = _list_codes("message", "cancelled", "orphan", "delay", "unknown_task", "dead_letter")
    assert message | {"unknown"} == {*MESSAGE_STEPS}
    assert _list_codes("explain_task", "running_task", "owned_task") == {*TASK_STEPS}
    # Their codes have the condition of a worker, or the kind of a gap.
    built = {"owner-dead", "owner-silent", "missed", "skipped"}
    jobs = _list_codes("explain_job", "unable", "running_job", "due_job", "idle_job")
    assert jobs | built == {*JOB_STEPS}


@pytest.mark.parametrize("steps", [MESSAGE_STEPS, TASK_STEPS, JOB_STEPS])
def test_steps_name_what_they_are_about(steps: dict[str, str]) -> None:
    """They have no other placeholders than the name and the queue."""
    for step in steps.values():
        assert "{" not in step.format(name="m", queue="q")


@pytest.mark.parametrize("code", MESSAGE_STEPS)
def test_the_step_of_a_message_names_its_id_and_its_queue(code: str) -> None:
    """Its full name, also if the message is one of a task."""
    message = MessageInfo(
        id="m1",
        queue="billing/mails",
        task="app.send",
        state="ready",
        value={},
        deliveries=0,
        attempts=0,
        max_attempts=4,
        errors=(),
        session="",
        is_suspect=False,
        enqueued=1.0,
        due=None,
        claimed=None,
        finished=None,
        seen=2.0,
        cursor="",
    )
    queue = QueueStatus(name=message.queue, counts={}, oldest=None, pause=None, workers=[])
    status = MessageStatus(message=message, queue=queue, holder=None)
    expected = MESSAGE_STEPS[code].replace("{queue}", "billing/mails").replace("{name}", "m1")
    assert suggest_next("m1", status, code) == expected


def test_an_unknown_message_may_be_in_another_store() -> None:
    """The step says so."""
    assert "this is the store" in suggest_next("m", None, "unknown")
