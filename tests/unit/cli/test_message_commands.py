"""What commands of one message ask for, and where messages are pushed to."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from jobsync.cli import messages as module
from jobsync.cli.messages import enqueue, messages, run_on_queue
from jobsync.errors import Invalid

ONE = '{"a": 1}'
TWO = '[{"a": 1}, {"b": 2}]'


@pytest.mark.parametrize("queue", [None, "emails"])
@pytest.mark.parametrize("answer", ["--yes", "y", "n"])
def test_a_message_is_removed_only_if_somebody_agrees(
    monkeypatch: pytest.MonkeyPatch, answer: str, queue: str | None
) -> None:
    """Whether its queue was named or looked for; the question is not part of the answer."""
    deleted: list[tuple[str, str]] = []

    class Backend:
        async def delete(self, message_id: str) -> str:
            deleted.append((place, message_id))
            return "deleted"

    def run(_: str | None, name: str, work: Any) -> tuple[str, str]:
        assert name == place
        return f"default/{name}", asyncio.run(work(Backend()))

    place = queue or "found"
    monkeypatch.setattr(module, "run_on_queue", run)
    monkeypatch.setattr(module, "_find_queue", lambda _, __: "found")
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(module, "sys", SimpleNamespace(stdin=terminal))
    words = ["delete", "id1", *(["--queue", queue] if queue else [])]
    is_asked = answer != "--yes"
    given = [] if is_asked else ["--yes"]
    done = CliRunner().invoke(messages, [*words, *given], input=f"{answer}\n")
    is_done = answer != "n"
    assert deleted == ([(place, "id1")] if is_done else [])
    assert (f"Remove message id1 of {place} permanently?" in done.stderr) is is_asked
    shown = [f"default/{place}", "id1", "deleted"]
    assert done.stdout.splitlines()[1:] == (["\t".join(shown)] if is_done else [])
    assert done.exit_code == (0 if is_done else 1)


@pytest.mark.parametrize("words", [["cancel"], ["run-now"], ["delete", "--yes"]])
@pytest.mark.parametrize("queue", [None, "emails"])
def test_a_queue_is_looked_for_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch, words: list[str], queue: str | None
) -> None:
    """In the store that was named, for the message that was."""
    looked: list[tuple[str | None, str]] = []
    used: list[tuple[str | None, str]] = []

    def find(url: str | None, message_id: str) -> str:
        looked.append((url, message_id))
        return "found"

    def run(url: str | None, name: str, _: object) -> tuple[str, object]:
        used.append((url, name))
        return name, "deleted"

    monkeypatch.setattr(module, "run_on_queue", run)
    monkeypatch.setattr(module, "_find_queue", find)
    given = [*words, "id1", "--url", "memory://x", *(["--queue", queue] if queue else [])]
    assert CliRunner().invoke(messages, given).exit_code == 0
    assert looked == ([] if queue else [("memory://x", "id1")])
    assert used == [("memory://x", queue or "found")]


@pytest.mark.parametrize("name", ["emails", "default/emails"])
def test_a_queue_is_told_by_its_full_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """However it was named; its backend is opened by that, too."""

    class Status:
        def queue(self, queue: str) -> Any:
            assert queue == name
            return SimpleNamespace(name="default/emails")

    async def read(*_: object) -> Status:
        return Status()

    async def work(backend: Any) -> object:
        return backend

    monkeypatch.setattr("jobsync.status.queues.read_queues_status", read)
    monkeypatch.setattr("jobsync.queue.opening.open_backend", lambda *of: of)
    monkeypatch.setattr(module, "run_on_store", lambda url, do: asyncio.run(do(url, "components")))
    backend: Any = ("memory://x", "default/emails", "components")
    assert run_on_queue("memory://x", name, work) == ("default/emails", backend)


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is pushed: the queue, the messages and the options."""
    found: list[tuple[Any, ...]] = []

    def push(_: object, *of: Any) -> list[str]:
        found.append(of)
        return ["id"]

    monkeypatch.setattr(module, "_push", push)
    monkeypatch.setattr("jobsync.cli.target.find_url", lambda *_: "memory://")
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["emails", ONE], ("emails", [{"a": 1}])),
        (["emails", TWO], ("emails", [{"a": 1}, {"b": 2}])),
        ([ONE, "--task", "send", "--app", "app:db"], ("", [{"a": 1}])),
        ([TWO, "--task", "send", "--app", "app:db"], ("", [{"a": 1}, {"b": 2}])),
        (["emails", ONE, "--task", "send", "--app", "app:db"], ("emails", [{"a": 1}])),
        ([ONE], None),
        ([TWO], None),
        ([ONE, "--task", "send"], None),
        ([TWO, "--app", "app:db"], None),
    ],
)
def test_a_task_of_a_program_needs_no_queue(
    pushed: list[tuple[Any, ...]], words: list[str], expected: tuple[Any, ...] | None
) -> None:
    """Anything else does, and is refused before anything is pushed."""
    environ = {"JOBSYNC_APP": None, "JOBSYNC_TASK": None, "JOBSYNC_QUEUE": None}
    done = CliRunner(env=environ).invoke(enqueue, words)
    if expected is None:
        assert isinstance(done.exception, Invalid)
        assert (done.exception.field, pushed) == ("RESOURCE", [])
    else:
        assert done.exit_code == 0, done.exception
        options = {"task": "send"} if "--task" in words else {}
        assert pushed == [(*expected, options)]


@pytest.mark.parametrize(("data", "source"), [("[]", "DATA"), (None, "standard input")])
@pytest.mark.parametrize("words", [[], ["--delay", "5"]])
def test_nothing_is_refused_by_where_it_came_from(
    pushed: list[tuple[Any, ...]], words: list[str], data: str | None, source: str
) -> None:
    """Empty input is no success."""
    given = ["emails", *filter(None, [data]), *words]
    error = CliRunner().invoke(enqueue, given, input="\n").exception
    assert isinstance(error, Invalid)
    assert (error.field, error.problem, pushed) == (source, "has no message", [])


NUMBERS = ("delay", "timeout", "max-attempts", "priority")


@pytest.mark.parametrize("name", [*NUMBERS, "group", "key", "task"])
@pytest.mark.parametrize("way", ["typed", "environment"])
def test_an_option_of_a_message_is_passed_as_itself(
    pushed: list[tuple[Any, ...]], name: str, way: str
) -> None:
    """Alone, from either place; what was not chosen is left to the queue."""
    value = "7" if name in NUMBERS else "seven"
    variable = "QUEUE_MAX_ATTEMPTS" if name == "max-attempts" else name.upper()
    environ = {f"JOBSYNC_{variable}": value} if way == "environment" else {}
    words = [f"--{name}", value] if way == "typed" else []
    assert CliRunner(env=environ).invoke(enqueue, ["emails", ONE, *words]).exit_code == 0
    expected = {name.replace("-", "_"): 7 if name in NUMBERS else "seven"}
    assert pushed == [("emails", [{"a": 1}], expected)]
