"""Options that commands share: which store they name, durations, and mistyped commands."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.testing import CliRunner
from command_tree import open_context

from jobsync import Database, Invalid, NotFound, Unavailable
from jobsync.cli.main import cli, main
from jobsync.cli.options import (
    DurationType,
    after_option,
    appname_option,
    date_option,
    describe_target,
    limit_option,
    parse_seconds,
    reason_option,
    run_on_store,
    url_argument,
    url_option,
)
from jobsync.cli.render import name_store, show_rows
from jobsync.errors import JobsyncError, Misconfigured
from jobsync.status.sessions import read_cluster_status
from jobsync.stores.memory import MemoryStore


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A program with a database."""
    module = ModuleType("some_app")
    module.db = Database("sqlite:///of-the-app.db")  # type: ignore[attr-defined]
    module.default = Database()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_app", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return module


@click.command()
@url_option
def show(url: str | None) -> None:
    """Print the URL that a command gets."""
    click.echo(str(url))


@click.command()
@url_argument
def show_argument(url: str | None) -> None:
    """Print the URL that a command with an argument gets."""
    click.echo(str(url))


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ("--url memory://", {}, "memory://"),
        ("", {"JOBSYNC_URL": "memory://"}, "memory://"),
        ("", {}, "None"),
        ("--app some_app:db", {}, "sqlite:///of-the-app.db"),
        ("", {"JOBSYNC_APP": "some_app:db"}, "sqlite:///of-the-app.db"),
        ("--app some_app:db", {"JOBSYNC_URL": "memory://"}, "sqlite:///of-the-app.db"),
        ("--url memory://", {"JOBSYNC_APP": "some_app:db"}, "memory://"),
        ("--app some_app:default", {}, "None"),
    ],
)
def test_a_store_is_named_by_its_url_or_by_a_program(
    app: ModuleType, words: str, environ: dict[str, str], expected: str
) -> None:
    """What was typed wins; a program without a URL of its own uses the default store."""
    del app
    runner = CliRunner(env={"JOBSYNC_URL": None, "JOBSYNC_APP": None, **environ})
    done = runner.invoke(show, words.split(), catch_exceptions=False)
    assert done.output.strip() == expected
    for given in (words, words.replace("--url ", "")):
        done = runner.invoke(show_argument, given.split(), catch_exceptions=False)
        assert done.output.strip() == expected


@pytest.mark.parametrize(
    ("words", "environ", "origin"),
    [
        ("--url memory://", {}, "from the command line"),
        ("--url memory://", {"JOBSYNC_APP": "some_app:db"}, "from the command line"),
        ("memory://", {"JOBSYNC_URL": "memory://x"}, "from the command line"),
        ("", {"JOBSYNC_URL": "memory://"}, "from JOBSYNC_URL"),
        ("--app some_app:db", {}, "from the code of some_app:db"),
        ("", {"JOBSYNC_APP": "some_app:db"}, "from the code of some_app:db"),
        ("--app some_app:default", {"JOBSYNC_URL": "memory://"}, "from JOBSYNC_URL"),
        ("", {}, "by default; JOBSYNC_URL names another"),
    ],
)
def test_an_empty_answer_names_the_store(
    app: ModuleType, words: str, environ: dict[str, str], origin: str
) -> None:
    """With where its URL comes from, apart from the answer, which programs may read."""
    del app

    @click.command()
    @url_argument
    @click.option("--json", "as_json", is_flag=True)
    def listed(url: str | None, *, as_json: bool) -> None:
        parsed, found = describe_target(url)
        name_store(f"{parsed} ({found})")
        show_rows(["id"], [], as_json=as_json)

    runner = CliRunner(env={"JOBSYNC_URL": None, "JOBSYNC_APP": None, **environ})
    done = runner.invoke(listed, words.split(), catch_exceptions=False)
    assert done.stdout == "id\n"
    assert done.stderr.startswith("none in ")
    assert done.stderr.endswith(f" ({origin})\n")
    done = runner.invoke(listed, [*words.split(), "--json"], catch_exceptions=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_what_is_not_found_names_the_store() -> None:
    """A note of the error, which the command line prints below it."""

    async def find(*_: object) -> None:
        raise NotFound("queue", "emails")

    with pytest.raises(NotFound) as caught:
        run_on_store("memory://", find)
    assert caught.value.__notes__ == ["Looked in memory:// (from the command line)."]


def test_a_url_is_passed_once() -> None:
    """As an argument or as an option."""
    error = CliRunner().invoke(show_argument, ["memory://", "--url", "memory://x"]).exception
    assert isinstance(error, Invalid)
    assert "URL must not be passed with --url (got 'memory://')" in str(error)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--app some_app:db --url memory://", "must not be passed with a URL"),
        ("--app sync_", "for the name of a fleet, pass --appname"),
        ("--app some_app:dbb", "Did you mean some_app:db?"),
        ("--app some_app:opened", "open store, memory://x, without a URL"),
    ],
)
def test_a_program_without_such_a_database_is_refused(
    app: ModuleType, words: str, problem: str
) -> None:
    """The error says what to pass instead."""
    app.opened = Database(connection=MemoryStore("x"))  # type: ignore[attr-defined]
    error = CliRunner().invoke(show, words.split()).exception
    assert isinstance(error, Invalid)
    assert problem in str(error)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1.5", 1.5),
        ("5m", 300.0),
        ("1.5h", 5400.0),
        ("2d", 172800.0),
        ("30 s", 30.0),
        ("500ms", 0.5),
        (" 5m\n", 300.0),
        ("0", 0.0),
        *((text, None) for text in ("", "m", "5x", "-5", "nan", "inf", "1e3", "5 minutes")),
    ],
)
def test_durations_have_units(text: str, seconds: float | None) -> None:
    """DurationType without one; anything else is not a duration."""
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (DurationType(), "soon", "'soon' is not a duration: write 90, 5m, 1.5h or 2d."),
        (DurationType(1.0), "900ms", "it must be 1 s or more"),
        (DurationType(is_least_allowed=False), "0", "it must be more than 0 s"),
    ],
)
def test_a_wrong_duration_is_refused(kind: DurationType, text: str, problem: str) -> None:
    """With an example, or with the shortest one."""
    with pytest.raises(click.BadParameter, match=problem):
        kind.convert(text, None, None)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["wrok"], "No such command 'wrok'. Did you mean 'work'?"),
        (["queue", "list"], "Did you mean 'queues'?"),
        (["queues", "lits"], "Did you mean 'list'?"),
        (["messages", "hurry"], "Known: cancel, delete, run-now."),
        (["ttl", "nxt"], "Did you mean 'next'?"),
    ],
)
def test_a_mistyped_command_gets_a_suggestion(words: list[str], hint: str) -> None:
    """At every level."""
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert hint in done.output


@pytest.mark.parametrize("words", [["--wrok"], ["queues", "--wrok"], ["-w"]])
def test_a_mistyped_option_is_no_command(words: list[str]) -> None:
    """It is told as what it is."""
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert "No such option" in done.output
    assert words[-1] in done.output.splitlines()[-1]


def test_a_name_that_is_not_complete_yet_is_no_error() -> None:
    """A shell completes it."""
    context = open_context(cli)
    with pytest.raises(click.UsageError, match="Did you mean 'work'"):
        cli.resolve_command(context, ["wor"])
    context.resilient_parsing = True
    assert cli.resolve_command(context, ["wor"])[1] is None


@pytest.mark.parametrize("level", ["info", "INFO", "Warning"])
def test_names_of_levels_are_read_in_any_case(level: str) -> None:
    """As logging writes them, too: the target is what is wrong here."""
    done = CliRunner().invoke(cli, ["work", "tasks", "--log-level", level])
    assert isinstance(done.exception, Invalid)
    assert done.exception.field == "TARGET"


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("work app:db --concurrency many", "'many' is not accepted: pass a whole number of 1 or"),
        ("work app:db --concurrency 0", "'0' is not accepted: pass a whole number of 1 or more."),
        (
            "work app:db --processes 1.5",
            "'1.5' is not accepted: pass a whole number from 1 to 1000",
        ),
    ],
)
def test_a_number_that_is_refused_gets_the_bounds(words: str, fix: str) -> None:
    """Whether it is no number, not whole or beyond them; the exit code is 2."""
    done = CliRunner().invoke(cli, words.split())
    assert done.exit_code == 2
    assert fix in done.output


@pytest.mark.parametrize("words", [[], ["queues"], ["queues", "list"], ["work"], ["why"]])
def test_help_has_a_short_option_at_every_level(words: list[str]) -> None:
    """It says the same as the long one."""
    short, long = (CliRunner().invoke(cli, [*words, option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)
    assert short.stdout.startswith("Usage: ")


def test_an_interrupted_command_has_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: it was 1, that of a failure, if Ctrl-C came while the command was being loaded."""

    def interrupt(_: str) -> ModuleType:
        raise KeyboardInterrupt

    monkeypatch.setattr("jobsync.cli.main.import_module", interrupt)
    done = CliRunner().invoke(cli, ["schedules", "run", "daily"])
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "jobsync: interrupted\n")


@pytest.mark.parametrize(
    ("build_error", "code"),
    [
        (lambda: Invalid("--limit", 0, "is too small", "pass more"), 2),
        (lambda: Misconfigured("url", "x", "is wrong", "correct it"), 1),
        (lambda: NotFound("queue", "emails"), 1),
        (lambda: Unavailable("the store", "refused", "start it"), 1),
    ],
)
@pytest.mark.parametrize("notes", [[], ["Looked in a."], ["Looked in a.", "Looked in b."]])
def test_an_error_has_its_notes_below_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    build_error: Callable[[], JobsyncError],
    code: int,
    notes: list[str],
) -> None:
    """Without a trace; the code tells wrong usage from a failure."""
    error = build_error()
    for note in notes:
        error.add_note(note)

    def fail(**options: str) -> None:
        assert options == {"auto_envvar_prefix": "JOBSYNC"}
        raise error

    monkeypatch.setattr("jobsync.cli.main.cli", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [f"jobsync: {error}", *(f"  {note}" for note in notes)]


def test_the_answer_of_a_missing_file_names_what_was_looked_for(tmp_path: Path) -> None:
    """And where its URL comes from; nothing is created."""
    url = f"sqlite:///{tmp_path / 'none.db'}"
    with pytest.raises(Misconfigured, match="refers to a missing file") as caught:
        run_on_store(url, read_cluster_status)
    assert caught.value.__notes__ == [f"Looked for {url} (from the command line)."]
    assert (caught.value.field, caught.value.value) == ("url", url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_failing", [False, True])
def test_the_store_of_a_command_is_closed(
    monkeypatch: pytest.MonkeyPatch, is_failing: bool
) -> None:
    """Whatever the command does with it."""
    store = MemoryStore()
    closed: list[bool] = []

    async def open_store(*_: object) -> MemoryStore:
        return store

    async def close() -> None:
        closed.append(True)

    async def work(*_: object) -> str:
        if is_failing:
            raise KeyError
        return "answer"

    monkeypatch.setattr("jobsync.stores.opening.open_store", open_store)
    monkeypatch.setattr(store, "close", close)
    if is_failing:
        with pytest.raises(KeyError):
            run_on_store("memory://", work)
    else:
        assert run_on_store("memory://", work) == "answer"
    assert closed == [True]


@click.command()
@appname_option
@date_option
@limit_option
@reason_option
@after_option("after")
def show_shared(**options: object) -> None:
    """Print the options that many commands have."""
    click.echo(" ".join(f"{name}={value}" for name, value in sorted(options.items())))


@pytest.mark.parametrize(
    ("words", "environ", "changes"),
    [
        ("", {}, {}),
        ("", {"SYNC_SQL_APPNAME": "old_"}, {"appname": "old_"}),
        ("", {"SYNC_SQL_APPNAME": "old_", "JOBSYNC_APPNAME": "new_"}, {"appname": "new_"}),
        ("--appname typed_", {"JOBSYNC_APPNAME": "new_"}, {"appname": "typed_"}),
        ("--date 2026-01-31", {}, {"day": "2026-01-31"}),
        ("", {"JOBSYNC_DATE": "2026-01-31"}, {"day": "2026-01-31"}),
        ("--limit 1", {"JOBSYNC_LIMIT": "3"}, {"limit": "1"}),
        ("--limit 10000", {}, {"limit": "10000"}),
        ("--reason r --after c", {}, {"reason": "r", "after": "c"}),
        ("", {"JOBSYNC_REASON": "r", "JOBSYNC_AFTER": "c"}, {"reason": "r", "after": "c"}),
        ("--limit 0", {}, None),
        ("--limit 10001", {}, None),
        ("--date 31.1.2026", {}, None),
    ],
)
def test_shared_options_come_from_the_command_line_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    environ: dict[str, str],
    changes: dict[str, str] | None,
) -> None:
    """In this order, and each has a default; what is wrong is refused."""
    for name in ("JOBSYNC_APPNAME", "SYNC_SQL_APPNAME", "JOBSYNC_DATE", "JOBSYNC_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("jobsync.jobs.task.read_date", lambda day, _: day and day.date())
    done = CliRunner(env=environ).invoke(show_shared, words.split())
    if changes is None:
        assert done.exit_code == 2
        return
    defaults = {"after": "", "appname": "sync_", "day": "None", "limit": "20", "reason": ""}
    expected = {**defaults, **changes}
    assert done.stdout == " ".join(f"{name}={expected[name]}" for name in sorted(expected)) + "\n"
