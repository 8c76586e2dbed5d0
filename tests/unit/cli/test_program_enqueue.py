"""`jobsync enqueue --app`: the program checks what is pushed, and its tasks' options apply."""

import sys
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jobsync import Database, Invalid, QueuePlugin
from jobsync.cli.messages import enqueue
from jobsync.cli.program_enqueue import _find_queues, _match
from jobsync.queue.backend import NewMessage
from jobsync.queue.pages.backend import PagesBackend


async def send(to: str, copies: int = 1) -> None:
    """A function that is a task."""


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[NewMessage]:
    """What is pushed to the queues of a program."""
    module = ModuleType("some_app")
    emails, plain = QueuePlugin("emails", order="priority"), QueuePlugin("plain")
    emails.task(name="mail.send", priority=7, timeout=12, max_retries=1)(send)
    for name in ("mail.copy", "other.copy"):
        emails.task(name=name)(send)
    module.db = Database("memory://", plugins=[emails, plain])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_app", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found: list[NewMessage] = []

    async def push(_: object, messages: list[NewMessage]) -> dict[str, str]:
        found.extend(messages)
        return {}

    monkeypatch.setattr(PagesBackend, "push", push)
    return found


def run(*words: str) -> Result:
    """Run the command with the program."""
    environ = {"JOBSYNC_URL": None, "JOBSYNC_APP": None}
    return CliRunner(env=environ).invoke(enqueue, [*words, "--app", "some_app:db"])


@pytest.mark.parametrize("queue", [["emails"], ["default/emails"], []])
@pytest.mark.parametrize("task", ["mail.send", "send"])
def test_a_task_has_its_own_options(pushed: list[NewMessage], queue: list[str], task: str) -> None:
    """Its name is enough, without its module and its queue; what is typed wins."""
    done = run(*queue, '{"to": "a"}', "--task", task, "--timeout", "3")
    assert done.exit_code == 0, done.exception
    (message,) = pushed
    assert (message.task, message.value) == ("mail.send", {"to": "a"})
    assert (message.priority, message.max_attempts, message.timeout) == (7, 2, 3.0)
    assert done.stdout.strip() == message.id


def test_nothing_works_while_messages_are_pushed(
    pushed: list[NewMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is a producer: its queues claim nothing."""
    database = sys.modules["some_app"].db
    seen: list[tuple[bool, bool]] = []
    enqueue_many = QueuePlugin.enqueue_many

    async def watch(queue: QueuePlugin, *arguments: Any, **options: Any) -> list[str]:
        seen.append((database.works, queue.is_running))
        return await enqueue_many(queue, *arguments, **options)

    monkeypatch.setattr(QueuePlugin, "enqueue_many", watch)
    done = run("emails", '{"to": "a"}', "--task", "send")
    assert done.exit_code == 0, done.exception
    assert (seen, len(pushed)) == ([(False, False)], 1)


@pytest.mark.parametrize(
    ("name", "queue"),
    [
        ("emails", "default/emails"),
        ("default/emails", "default/emails"),
        ("bulk/emails", "bulk/emails"),
        ("reports", "bulk/reports"),
        ("twice", None),
        ("mails", None),
    ],
)
def test_a_resource_is_that_of_the_default_namespace_first(name: str, queue: str | None) -> None:
    """Else of the only other one; several are refused."""
    places = [("bulk", "emails"), ("default", "emails"), ("bulk", "reports")]
    places += [("a", "twice"), ("b", "twice")]
    queues = [QueuePlugin(resource, namespace=namespace) for namespace, resource in places]
    if queue is None:
        problem = "names several queues" if name == "twice" else "is not a queue"
        with pytest.raises(Invalid, match=f"RESOURCE {problem} of app:db") as raised:
            _find_queues("app:db", queues, name)
        # One that is among several is no slip of the pen: all are listed.
        known = " or ".join(sorted(each.queue for each in queues))
        fix = f"pass {known}, or pass --url" if name == "twice" else "did you mean default/emails?"
        assert raised.value.fix.startswith(fix)
    else:
        assert [each.queue for each in _find_queues("app:db", queues, name)] == [queue]


@pytest.mark.parametrize(
    ("task", "found"),
    [
        ("mail.send", ["mail.send"]),
        ("send", ["send"]),
        ("resend", ["mail.resend"]),
        ("copy", ["mail.copy", "other.copy"]),
        ("end", []),
        ("", [""]),
    ],
)
def test_a_task_is_named_by_its_last_part_or_as_a_whole(task: str, found: list[str]) -> None:
    """Not by a part of that; a whole name is meant before an ending."""
    names = ["", "mail.send", "send", "mail.resend", "mail.copy", "other.copy"]
    assert _match(task, dict.fromkeys(names, "")) == found


def test_a_queue_without_handlers_takes_messages_without_a_task(pushed: list[NewMessage]) -> None:
    """Its program may be one that only pushes."""
    assert run("plain", "{}").exit_code == 0
    assert len(pushed) == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["emails", '{"too": "a"}', "--task", "send"], "too is not a parameter of mail.send"),
        (["emails", '{"to": 1}', "--task", "send"], "to must be `str` (got 1)"),
        (["emails", "{}", "--task", "send"], "to is missing: mail.send needs it"),
        (["emails", "{}", "--task", "sent"], "not a task of emails in some_app:db (got 'sent')"),
        (["emails", "{}", "--task", "sent"], "Did you mean mail.send?"),
        (["{}", "--task", "zzz"], "Pass mail.copy or mail.send or other.copy, or pass --url"),
        (["emails", "{}", "--task", "copy"], "default/emails --task mail.copy, default/emails"),
        (["emails", "{}"], "--task is missing: emails has no handler in some_app:db"),
        (["emailz", "{}"], "RESOURCE is not a queue of some_app:db (got 'emailz'). Did you mean"),
        (["{}"], "Write its name before DATA, or pass --app and --task"),
    ],
)
def test_what_the_program_would_refuse_is_refused(
    pushed: list[NewMessage], words: list[str], problem: str
) -> None:
    """With the field, the value and the fix; nothing is pushed."""
    error = run(*words).exception
    assert isinstance(error, Invalid), error
    assert problem in str(error)
    assert pushed == []
