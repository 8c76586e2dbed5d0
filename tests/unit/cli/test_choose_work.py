"""What a process of `jobsync work` works on: all plugins, or some queues."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from jobsync import Database, Invalid, Misconfigured, QueuePlugin, sync
from jobsync.cli.target import create_database, find_url, load_target
from jobsync.cli.worker_plan import choose_work
from jobsync.events import Event


def handle(_: object) -> None:
    """Handle a message."""


def build_queue(resource: str) -> QueuePlugin:
    """Return a queue with a handler."""
    return QueuePlugin(resource=resource, on_message=handle, concurrency=2)


async def test_other_queues_are_declared_and_do_not_work() -> None:
    """A database for producers works too; the option wins over the code."""
    emails, images = build_queue("emails"), build_queue("images")
    database = Database("memory://", plugins=[emails, images], work=False)
    started: list[Event] = []
    database.on("plg:queue:workers-started", started.append)
    choose_work(database, " images", 7)
    async with database:
        assert (emails.is_running, images.is_running) == (False, True)
        assert [(event["queue"], event["concurrency"]) for event in started] == [
            ("default/images", 7)
        ]
        assert images.settings.concurrency == 7
        await database.resources.emails.enqueue({})
        assert await emails.count() == 1
        assert database.unready() == []
        await emails.start()
        assert emails.is_running


@pytest.mark.parametrize(
    ("queues", "idle"),
    [
        (None, []),
        ("emails", ["images"]),
        ("default/emails", ["images"]),
        (" images ,emails", []),
        ("default/images,images", ["emails"]),
    ],
)
@pytest.mark.parametrize("concurrency", [None, 7])
def test_queues_are_chosen_by_either_name(
    queues: str | None, idle: list[str], concurrency: int | None
) -> None:
    """The others are idle here; the number of handlers is for each."""
    plugins = [build_queue("emails"), build_queue("images")]
    own = [plugin.settings.concurrency for plugin in plugins]
    database = Database("memory://", plugins=plugins)
    choose_work(database, queues, concurrency)
    assert [each.resource for each in plugins if each in database.idle_plugins] == idle
    assert [each.settings.concurrency for each in plugins] == (
        own if concurrency is None else [concurrency] * 2
    )


@pytest.mark.parametrize(("name", "fix"), [("imges", "mean images"), ("xyz", "mean emails, im")])
def test_an_unknown_queue_is_refused(name: str, fix: str) -> None:
    """The error suggests one."""
    database = Database("memory://", plugins=[build_queue("emails"), build_queue("images")])
    with pytest.raises(Invalid, match=fix):
        choose_work(database, f"emails,{name}", None)


async def test_a_database_for_blocking_callers_is_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Itself, or what a function returns."""
    module = ModuleType("some_app")
    module.db = sync.Database("memory://")  # type: ignore[attr-defined]
    module.make = lambda: module.db  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_app", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for target in ("some_app:db", "some_app:make"):
        found = await create_database(target, load_target(target))
        assert found is module.db.wrapped
    with pytest.raises(Invalid, match="Did you mean some_app:db"):
        load_target("some_app:bd")


def test_a_module_of_the_working_directory_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with `python -m`, before one of the same name that is installed."""
    for folder in ("here", "installed"):
        (tmp_path / folder).mkdir()
        text = f"from jobsync import Database\ndb = Database('memory://{folder}')\n"
        (tmp_path / folder / "twofold_app.py").write_text(text)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), *sys.path])
    try:
        assert find_url("twofold_app:db", "--app") == "memory://here"
    finally:
        sys.modules.pop("twofold_app", None)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("send", "is a task of a queue, not a Database"),
        ("emails", "is not a Database"),
        ("handle", "is a function with arguments, not a Database"),
        ("missing", "is not a Database"),
    ],
)
def test_something_else_is_not_a_target(
    monkeypatch: pytest.MonkeyPatch, name: str, problem: str
) -> None:
    """The error says what it is, and which name has the database."""
    module = ModuleType("some_app")
    emails = build_queue("emails")
    vars(module).update(emails=emails, handle=handle, send=emails.task(name="send")(lambda: None))
    module.db = Database("memory://", plugins=[emails])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_app", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(Invalid, match=f"TARGET {problem}.*Did you mean some_app:db?"):
        load_target(f"some_app:{name}")


@pytest.mark.parametrize(
    ("target", "fix"),
    [
        ("shop.py:db", "Write shop:db."),
        ("some_app.py:db", "Write some_app:db."),
        ("p/shop:db", "Write p.shop:db."),
        ("./p/shop.py:db", "Write p.shop:db."),
        (".\\p\\shop.py:db", "Write p.shop:db."),
        (".shop:db", "Write shop:db."),
        ("../shop.py:db", "Start it in .. and write shop:db."),
        ("/nowhere/shop.py:db", "Start it in /nowhere and write shop:db."),
        ("{here}/p/shop.py:db", "Write p.shop:db."),
        ("./p/shop.py", "Write p.shop:db, if its Database is called db."),
        (":db", "Write tasks:db, if its Database is called db."),
        ("shop:db", "start it where shop.py is: it was searched in {here}."),
        ("shop.jobs:db", "start it where shop is: it was searched in {here}."),
        ("some_app.jobs:db", "start it where some_app/jobs.py is: it was searched in {here}."),
    ],
)
def test_a_target_that_is_a_file_or_missing_gets_the_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, fix: str
) -> None:
    """What to write for the path of a file, and where a module was searched; also for --app."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "some_app", ModuleType("some_app"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(Invalid) as refused:
        load_target(target.format(here=tmp_path), "--app")
    assert str(refused.value).startswith("--app ")
    assert str(refused.value).endswith(fix.format(here=tmp_path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import no_such_module\n", "cannot be imported: ModuleNotFoundError"),
        # Its name is how that of the module itself begins.
        ("import broken\n", "cannot be imported: ModuleNotFoundError"),
        ("import sys\nsys.exit(2)\n", "cannot be imported: SystemExit"),
        ("def fail():\n    raise ValueError('no')\nfail()\n", "cannot be imported: ValueError: no"),
        ("db = (\n", "cannot be imported: SyntaxError"),
        ("def db():\n    raise ValueError('no')\n", "raised an error: ValueError: no"),
    ],
)
async def test_an_error_of_the_users_code_has_no_lines_of_ours(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    problem: str,
) -> None:
    """The message has the error and the line to correct; the trace has the user's lines."""
    (tmp_path / "broken_app.py").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "broken_app", raising=False)
    with pytest.raises(Misconfigured, match=f"TARGET {problem}.*Correct "):
        await create_database("broken_app:db", load_target("broken_app:db"))
    trace = capsys.readouterr().err
    assert "jobsync" not in trace.replace(str(tmp_path), "")
    assert "importlib" not in trace
    assert ("broken_app.py" in trace) is ("SyntaxError" not in problem)
