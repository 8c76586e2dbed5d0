"""What the commands of queues ask for: each option reaches the queue, and each has a default."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from click.testing import CliRunner

from jobsync.cli import messages as module
from jobsync.cli import queues as queues_module
from jobsync.cli.messages import enqueue, messages
from jobsync.cli.queues import queues
from jobsync.core.messages import LIVE
from jobsync.errors import Invalid
from jobsync.queue.backend import Failure, MessageInfo
from jobsync.queue.directory import Pause
from jobsync.queue.enqueue import enqueue_messages
from jobsync.status.queues import QueueStatus, QueueWorkerStatus

NAME = "default/emails"


class Calls:
    """A queue that notes what it is asked for."""

    def __init__(self, answer: Any) -> None:
        self.made: list[tuple[Any, ...]] = []
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **options: Any) -> Any:
            self.made.append((name, *arguments, options) if options else (name, *arguments))
            return {"ready": 2, "dead": 5} if name == "count" else self._answer

        return call


@pytest.mark.parametrize(
    ("words", "answer", "calls", "row"),
    [
        (
            "browse emails",
            [],
            [("browse", state, {"after": "", "limit": 20}) for state in LIVE],
            None,
        ),
        (
            "browse emails --state dead --limit 3 --after c7",
            [],
            [("browse", "dead", {"after": "c7", "limit": 3})],
            None,
        ),
        ("pause emails", True, [("pause", "")], {"what": "paused"}),
        ("pause emails --reason why", False, [("pause", "why")], {"what": "already paused"}),
        ("resume emails", True, [("resume",)], {"what": "resumed"}),
        ("resume emails", False, [("resume",)], {"what": "not paused"}),
        (
            "purge emails --yes",
            2,
            [("count",), ("purge", ("ready", "waiting", "blocked"))],
            {"what": "purged", "removed": 2},
        ),
        (
            "purge emails --yes --state dead --state completed",
            5,
            [("count",), ("purge", ("dead", "completed"))],
            {"what": "purged", "removed": 5},
        ),
        # There is nothing to confirm.
        (
            "purge emails --state cancelled",
            0,
            [("count",), ("purge", ("cancelled",))],
            {"what": "purged", "removed": 0},
        ),
        ("redrive emails", 4, [("redrive", None)], {"what": "redriven", "messages": 4}),
        ("redrive emails a b", 2, [("redrive", ("a", "b"))], {"what": "redriven", "messages": 2}),
    ],
)
def test_a_command_asks_for_what_its_words_say(
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    answer: Any,
    calls: list[tuple[Any, ...]],
    row: dict[str, Any] | None,
) -> None:
    """And prints what became of it."""
    backend = Calls(answer)
    asked: list[str] = []

    def run(_: str | None, queue: str, work: Any) -> tuple[str, Any]:
        asked.append(queue)
        return NAME, asyncio.run(work(backend))

    monkeypatch.setattr(queues_module, "run_on_queue", run)
    done = CliRunner().invoke(queues, [*words.split(), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert backend.made == calls
    assert {*asked} <= {"emails", NAME}
    assert json.loads(done.stdout) == ([] if row is None else [{"queue": NAME, **row}])


@pytest.mark.parametrize(
    ("words", "question"),
    [
        ([], "Remove 2 messages of default/emails (ready, waiting, blocked) permanently?"),
        (["--state", "dead"], "Remove 5 messages of default/emails (dead) permanently?"),
        (["--state", "completed"], None),
    ],
)
@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_purge_says_how_many_it_would_remove(
    monkeypatch: pytest.MonkeyPatch, words: list[str], question: str | None, answer: str
) -> None:
    """Of the chosen states alone, and removes nothing unless that is confirmed."""
    backend = Calls(7)
    monkeypatch.setattr(
        queues_module, "run_on_queue", lambda _, __, work: (NAME, asyncio.run(work(backend)))
    )
    stream = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(module, "sys", SimpleNamespace(stdin=stream))
    done = CliRunner().invoke(queues, ["purge", "emails", *words], input=f"{answer}\n")
    assert (question or "Remove") not in done.stdout
    assert done.stderr.startswith(question or "")
    is_done = question is None or answer == "y"
    assert [call[0] for call in backend.made] == ["count", *(["purge"] if is_done else [])]
    assert done.exit_code == (0 if is_done else 1)


PUSHED, DUE, CLAIMED, ENDED = "enqueued", "due", "claimed", "finished"


@pytest.mark.parametrize(
    ("states", "names"),
    [
        (["ready"], ["id", "attempts", PUSHED, "value"]),
        (["waiting"], ["id", "attempts", DUE, "value", "error"]),
        (["blocked"], ["id", "attempts", PUSHED, "group", "value"]),
        (["claimed"], ["id", "attempts", CLAIMED, "session", "value", "error"]),
        (["completed"], ["id", "attempts", ENDED, "session"]),
        (["dead"], ["id", "attempts", ENDED, "session", "value", "error"]),
        (["cancelled"], ["id", "attempts", ENDED, "session", "value", "error"]),
        (["dead", "dead"], ["id", "attempts", ENDED, "session", "value", "error"]),
        (["ready", "blocked"], ["id", "state", "attempts", PUSHED, "value"]),
        (["dead", "completed"], ["id", "state", "attempts", PUSHED, "session", "value", "error"]),
        (LIVE, ["id", "state", "attempts", PUSHED, "value", "error"]),
    ],
)
def test_messages_have_the_columns_of_their_states(states: Any, names: list[str]) -> None:
    """Those that have values there, and the time that matters."""
    columns = queues_module._message_columns(states)
    assert [each if isinstance(each, str) else each.name for each in columns] == names


def test_a_queue_is_counted_by_its_states_and_its_live_workers() -> None:
    """Those that handle messages; how long it is paused, and why."""

    def worker(state: Any, concurrency: int | None) -> QueueWorkerStatus:
        return QueueWorkerStatus(
            worker_id="w",
            state=state,
            concurrency=concurrency,
            claims=0,
            is_paused=False,
            heard=1.0,
            timeout=15.0,
            host="here",
            pid=1,
            incarnation="w.1",
        )

    workers = [worker("live", 3), worker("live", None), worker("silent", 3), worker("dead", 3)]
    queue = QueueStatus(
        name=NAME,
        counts={"ready": 1, "waiting": 2, "blocked": 3, "claimed": 4, "dead": 5},
        oldest=10.0,
        pause=Pause(since=20.0, reason="a deploy"),
        workers=workers,
    )
    row: dict[str, object] = {"queue": NAME, "workers": 1, "oldest": 10.0}
    row |= {str(state): count for state, count in queue.counts.items()}
    row |= {"completed": 0, "cancelled": 0}
    assert queues_module._summarise(queue) == {**row, "paused": 20.0, "reason": "a deploy"}
    idle = msgspec.structs.replace(queue, pause=None)
    assert queues_module._summarise(idle) == {**row, "paused": None, "reason": None}


def test_a_message_is_shown_with_its_last_error() -> None:
    """Its first line; and its value without its id, which has a column."""
    errors = (Failure(1, "ValueError: first", 1.0), Failure(2, "KeyError: last\n  File x", 2.0))
    message = MessageInfo(
        queue=NAME,
        id="m",
        state="dead",
        value={"id": "m", "to": "a"},
        attempts=2,
        deliveries=2,
        max_attempts=4,
        errors=errors,
        session="",
        is_suspect=False,
        enqueued=1.0,
        due=None,
        claimed=None,
        finished=3.0,
        seen=9.0,
        cursor="",
    )
    row = queues_module._describe(message)
    assert row["error"] == "KeyError: last"
    assert queues_module._show_value(row["value"]) == '{"to":"a"}'
    assert queues_module._describe(msgspec.structs.replace(message, errors=()))["error"] is None


def test_a_purge_that_nobody_can_confirm_removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input is not a terminal, and messages were found, whatever the environment says."""
    backend = Calls(7)
    monkeypatch.setattr(
        queues_module, "run_on_queue", lambda _, __, work: (NAME, asyncio.run(work(backend)))
    )
    # No variable answers for the user, not even one that click would derive from its prefix.
    environ = {"JOBSYNC_YES": "1", "JOBSYNC_PURGE_YES": "1", "JOBSYNC_QUEUES_PURGE_YES": "1"}
    words = ["purge", "emails", "--state", "dead"]
    done = CliRunner().invoke(queues, words, env=environ, auto_envvar_prefix="JOBSYNC")
    assert "--yes is required" in str(done.exception)
    assert backend.made == [("count",)]


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ([], {}, {}),
        (["--delay", "60"], {}, {"delay": 60.0}),
        (["--delay", "5m"], {}, {"delay": 300.0}),
        (["--timeout", "9.5"], {}, {"timeout": 9.5}),
        (["--timeout", "500ms"], {}, {"timeout": 0.5}),
        (["--max-attempts", "7"], {}, {"max_attempts": 7}),
        (["--priority", "0"], {}, {"priority": 0}),
        (["--group", "a"], {}, {"group": "a"}),
        (["--task", "mail.send"], {}, {"task": "mail.send"}),
        ([], {"JOBSYNC_KEY": "k"}, {"key": "k"}),
        ([], {"JOBSYNC_DELAY": "1.5h"}, {"delay": 5400.0}),
        ([], {"JOBSYNC_TIMEOUT": "4"}, {"timeout": 4.0}),
        ([], {"JOBSYNC_QUEUE_MAX_ATTEMPTS": "5"}, {"max_attempts": 5}),
        (["--delay", "1"], {"JOBSYNC_DELAY": "3"}, {"delay": 1.0}),
    ],
)
def test_messages_are_pushed_with_their_options(
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    environ: dict[str, str],
    expected: dict[str, Any],
) -> None:
    """From the command line or the environment, in this order."""
    pushed: list[tuple[Any, ...]] = []

    async def push(_: Any, queue: str, messages: list[Any], **options: Any) -> list[str]:
        pushed.append((queue, messages, options))
        return [f"id{number}" for number in range(len(messages))]

    monkeypatch.setattr(f"{enqueue_messages.__module__}.enqueue_messages", push)
    monkeypatch.setattr(module, "run_on_database", lambda _, work: asyncio.run(work(None)))
    for given, found in (
        ('{"a": 1}', [{"a": 1}]),
        ('[{"a": 1}, {"b": 2}]', [{"a": 1}, {"b": 2}]),
        (None, [{"a": 1}, {"b": 2}, {"c": 3}]),
    ):
        stdin = '{"a": 1}\n\n[{"b": 2}, {"c": 3}]\n' if given is None else None
        arguments = ["emails", *([] if given is None else [given]), *words, "--json"]
        done = CliRunner().invoke(enqueue, arguments, input=stdin, env=environ)
        assert done.exit_code == 0, done.output
        assert pushed.pop() == ("emails", found, expected)
        assert len(json.loads(done.stdout)) == len(found)


def test_ids_are_bare_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """One per line without a header: `id=$(jobsync enqueue …)` is the id."""
    monkeypatch.setattr(module, "run_on_database", lambda _, __: ["id1", "id2"])
    assert CliRunner().invoke(enqueue, ["emails", "{}"]).stdout == "id1\nid2\n"


@pytest.mark.parametrize("count", [1, 20, 21, 45])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_people_see_the_first_twenty_ids(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, count: int
) -> None:
    """And how many more there are; a script gets all of them."""
    ids = [f"id{number}" for number in range(count)]
    monkeypatch.setattr(module, "run_on_database", lambda _, __: ids)
    stream = SimpleNamespace(isatty=lambda: is_terminal)
    monkeypatch.setattr(module, "sys", SimpleNamespace(stdout=stream))
    lines = CliRunner().invoke(enqueue, ["emails", "{}"]).stdout.splitlines()
    if not is_terminal or count <= 20:
        assert lines == ids
    else:
        assert lines == [*ids[:20], f"… and {count - 20} more"]


@pytest.mark.parametrize(
    ("lines", "number"), [(["x"], 1), (["{}", "", "  ", "x"], 4), (["{}", "[1]", "{}"], 2)]
)
def test_the_line_that_is_no_message_is_named(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], number: int
) -> None:
    """As an editor counts it, empty ones included; nothing is pushed."""
    monkeypatch.setattr(module, "run_on_database", lambda _, __: pytest.fail("was pushed"))
    done = CliRunner().invoke(enqueue, ["emails"], input="\n".join(lines))
    assert isinstance(done.exception, Invalid)
    assert done.exception.field == f"line {number}"


@pytest.mark.parametrize("data", [None, "[]"])
def test_nothing_is_not_enqueued(data: str | None) -> None:
    """Empty input is a mistake of the caller, not a success."""
    done = CliRunner().invoke(enqueue, ["emails", *filter(None, [data])], input="\n")
    assert isinstance(done.exception, Invalid)
    assert "has no message" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "answer", "call", "what", "status"),
    [
        ("cancel id1", True, ("cancel", "id1"), "cancelled", 0),
        ("cancel id1", None, ("cancel", "id1"), "not cancelled: unknown or finished", 1),
        ("delete id1 --yes", "deleted", ("delete", "id1"), "deleted", 0),
        ("delete id1 --yes", "unknown", ("delete", "id1"), "not deleted: unknown", 1),
        ("run-now id1", True, ("run_now", "id1"), "due now", 0),
        ("run-now id1", False, ("run_now", "id1"), "unchanged: it does not wait", 1),
    ],
)
def test_a_message_is_found_in_its_queue(
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    answer: Any,
    call: tuple[Any, ...],
    what: str,
    status: int,
) -> None:
    """Its id is enough; the exit code says whether anything was done."""
    backend = Calls(answer)
    asked: list[str] = []

    def run(_: str | None, queue: str, work: Any) -> tuple[str, Any]:
        asked.append(queue)
        return NAME, asyncio.run(work(backend))

    monkeypatch.setattr(module, "run_on_queue", run)
    monkeypatch.setattr(module, "_find_queue", lambda _, name: f"queue of {name}")
    done = CliRunner().invoke(messages, [*words.split(), "--json"], catch_exceptions=False)
    assert (done.exit_code, asked, backend.made) == (status, ["queue of id1"], [call])
    assert json.loads(done.stdout) == [{"queue": NAME, "id": "id1", "what": what}]


def test_a_claimed_message_is_not_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that comes first."""
    run = lambda _, __, work: (NAME, asyncio.run(work(Calls("claimed"))))  # noqa: E731
    monkeypatch.setattr(module, "run_on_queue", run)
    done = CliRunner().invoke(messages, ["delete", "id1", "--queue", "emails", "--yes"])
    assert "run: jobsync messages cancel id1" in str(done.exception).replace("Run:", "run:")


@pytest.mark.parametrize("limit", [1, 3, 9])
@pytest.mark.parametrize("states", [("ready", "waiting"), ("waiting", "ready")])
def test_messages_of_several_states_are_shown_oldest_first(
    monkeypatch: pytest.MonkeyPatch, states: tuple[str, str], limit: int
) -> None:
    """The limit leaves out the newest of all; messages of one state stay as the store has them."""
    pushed = {"ready": {"a": 5.0, "b": 2.0}, "waiting": {"c": 1.0, "d": 7.0}}

    async def browse(state: str, **_: Any) -> list[MessageInfo]:
        return [
            MessageInfo(
                queue=NAME,
                id=name,
                state=cast("Any", state),
                value={},
                attempts=0,
                deliveries=0,
                max_attempts=4,
                errors=(),
                session="",
                is_suspect=False,
                enqueued=at,
                due=None,
                claimed=None,
                finished=None,
                seen=9.0,
                cursor=name,
            )
            for name, at in pushed[state].items()
        ]

    backend = SimpleNamespace(browse=browse)
    monkeypatch.setattr(
        queues_module, "run_on_queue", lambda _, __, work: (NAME, asyncio.run(work(backend)))
    )

    def show(*chosen: str) -> list[str]:
        words = [word for state in chosen for word in ("--state", state)]
        words = ["browse", "emails", *words, "--limit", str(limit), "--json"]
        done = CliRunner().invoke(queues, words, catch_exceptions=False)
        return [row["id"] for row in json.loads(done.stdout)]

    assert show(*states) == ["c", "b", "a", "d"][:limit]
    assert show("ready") == ["a", "b"][:limit]
