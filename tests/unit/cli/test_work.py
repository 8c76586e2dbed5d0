"""What `jobsync work` makes of its options, for one process and for several."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from jobsync import Database, QueuePlugin
from jobsync.cli.work import work
from jobsync.errors import Invalid, Misconfigured

QUEUE = "default/emails → messages without a task → builtins.print"


class Started:
    """What the command has started."""

    def __init__(self) -> None:
        self.links: list[int] = []
        self.files: list[Path] = []
        self.addresses: list[tuple[str, int]] = []
        self.options: dict[str, Any] = {}
        self.logs: list[tuple[object, ...]] = []
        self.supervised: tuple[Any, ...] = ()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The command with nothing that it starts: neither processes nor servers."""
    found = Started()

    async def create(*_: object) -> Database:
        return Database("memory://", plugins=[QueuePlugin("emails", on_message=print)])

    @contextmanager
    def serve(address: tuple[str, int], _: object) -> Iterator[str]:
        found.addresses.append(address)
        yield "http://probes"

    def open_link(number: int) -> str:
        found.links.append(number)
        return "link"

    async def run() -> int:
        return 5

    def build_process(*_: object, **options: Any) -> SimpleNamespace:
        found.options = options
        return SimpleNamespace(run=run, watch_signals=nullcontext)

    def build_supervisor(*arguments: Any) -> SimpleNamespace:
        found.supervised = arguments
        return SimpleNamespace(run=lambda: 7)

    replaced: dict[str, Callable[..., Any]] = {
        # First: its module needs the true classes of others.
        "worker_process.WorkerProcess": build_process,
        "health.write_heartbeat": lambda file, *_: found.files.append(file),
        "probes.serve_probes": serve,
        "process_supervisor.ProcessSupervisor": build_supervisor,
        "process_supervisor.SupervisorLink": open_link,
        "target.create_database": create,
        "target.load_target": lambda _: None,
        "worker_log.start_logging": lambda *words: found.logs.append(words),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(f"jobsync.cli.{name}", value)
    return found


@pytest.mark.parametrize(
    ("words", "number", "address", "file"),
    [
        ("--http 8080 --heartbeat-file beat", None, ("127.0.0.1", 8080), "beat"),
        ("--http 8080 --heartbeat-file beat --supervised 0:9", 0, ("127.0.0.1", 8080), "beat.0"),
        ("--http 8080 --heartbeat-file beat --supervised 2:9", 2, ("127.0.0.1", 8082), "beat.2"),
        # Any port is good for each of them.
        ("--http [::1]:0 --heartbeat-file a/b --supervised 2:9", 2, ("::1", 0), "a/b.2"),
        ("--processes 3 --supervised 1:9", 1, None, None),
        ("", None, None, None),
    ],
)
def test_each_of_several_processes_has_a_port_and_a_file_of_its_own(
    started: Started,
    words: str,
    number: int | None,
    address: tuple[str, int] | None,
    file: str | None,
) -> None:
    """By its number, from 0; a process that is alone has what was asked for."""
    done = CliRunner().invoke(work, ["app:db", *words.split()])
    assert done.exit_code == 5, done.output
    assert started.addresses == ([] if address is None else [address])
    path = None if file is None else Path(file)
    assert started.options["heartbeat_file"] == path
    # Written before the process works, so that it is refused at once if that is impossible.
    assert started.files == ([] if path is None else [path])
    assert started.links == ([] if number is None else [9])
    assert started.options["link"] == (None if number is None else "link")
    assert started.options["grace"] == 30.0
    assert started.logs == [("text", "info", number)]


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("number", [None, 0, 1])
def test_only_the_first_process_tells_what_runs(
    started: Started,
    caplog: pytest.LogCaptureFixture,
    number: int | None,
    log_format: str,
) -> None:
    """On the terminal if it is alone, else in the log; the others would say the same."""
    caplog.set_level("INFO", logger="jobsync.work")
    words = [] if number is None else ["--supervised", f"{number}:9"]
    done = CliRunner().invoke(work, ["app:db", "--log-format", log_format, *words])
    has_banner = (number, log_format) == (None, "text")
    assert (f"  runs     {QUEUE}" in done.stderr.splitlines()) is has_banner
    told = [record.getMessage() for record in caplog.records]
    if number == 1 or has_banner:
        assert told == []
    elif log_format == "json":
        assert told == ["worker starting"]
    else:
        assert told == ["store memory:// (from the code)", f"runs {QUEUE}"]


def test_a_heartbeat_file_that_cannot_be_written_is_refused_before_the_work(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would know of a process that works without one."""

    def refuse(*_: object) -> None:
        raise Misconfigured("--heartbeat-file", "beat", "cannot be written", "choose another")

    monkeypatch.setattr("jobsync.cli.health.write_heartbeat", refuse)
    done = CliRunner().invoke(work, ["app:db", "--heartbeat-file", "beat", "--http", "0"])
    assert isinstance(done.exception, Misconfigured)
    assert (started.options, started.addresses) == ({}, [])


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (["--grace", "2m"], {"--grace": "120.0"}),
        (["--grace", "0"], {"--grace": "0.0"}),
        (["--concurrency", "3"], {"--concurrency": "3"}),
        (["--queues", "a, b"], {"--queues": "a, b"}),
        (["--http", "0.0.0.0:80"], {"--http": "0.0.0.0:80"}),
        (["--http", "0"], {"--http": "0"}),
        (["--heartbeat-file", "x/beat"], {"--heartbeat-file": "x/beat"}),
        (["--log-format", "json"], {"--log-format": "json"}),
        (["--log-level", "DEBUG"], {"--log-level": "debug"}),
    ],
)
def test_processes_get_the_options_of_their_supervisor(
    started: Started, monkeypatch: pytest.MonkeyPatch, words: list[str], options: dict[str, str]
) -> None:
    """All that were passed, and the warnings of Python; each has a number and a link."""
    monkeypatch.setattr(sys, "warnoptions", ["error::UserWarning", "ignore"])
    done = CliRunner().invoke(work, ["app:db", "--processes", "3", *words])
    assert done.exit_code == 7, done.output
    build, count, grace, _ = started.supervised
    assert (count, grace) == (3, float(options.get("--grace", "30")))
    assert started.options == {}
    defaults = {"--grace": "30.0", "--log-format": "text", "--log-level": "info"}
    command: Sequence[str] = build(2, 17)
    head = [sys.executable, "-Werror::UserWarning", "-Wignore", "-m", "jobsync", "work", "app:db"]
    assert [*command[:7]] == head
    rest = iter(command[7:])
    assert dict(zip(rest, rest, strict=True)) == {
        **defaults,
        **options,
        "--supervised": "2:17",
    }
    is_told = "--log-format" not in options
    assert ("  processes 3" in done.stderr) is is_told


@pytest.mark.parametrize("grace", [None, "0", "7", "2m"])
@pytest.mark.parametrize("number", [None, 0, 1])
def test_a_process_has_the_grace_and_the_readiness_of_its_own(
    started: Started, monkeypatch: pytest.MonkeyPatch, number: int | None, grace: str | None
) -> None:
    """As it was told; its probes and its file tell what keeps the database from working."""
    database = Database("memory://", plugins=[QueuePlugin("emails", on_message=print)])
    reports: list[Any] = []

    async def create(*_: object) -> Database:
        return database

    monkeypatch.setattr("jobsync.cli.target.create_database", create)
    monkeypatch.setattr(database, "unready", lambda: ["no session"])
    monkeypatch.setattr("jobsync.cli.health.write_heartbeat", lambda *of: reports.append(of[1]))
    words = ["--heartbeat-file", "a.b/beat.json", *(["--grace", grace] if grace else [])]
    words += [] if number is None else ["--supervised", f"{number}:9"]
    done = CliRunner().invoke(work, ["app:db", *words])
    assert done.exit_code == 5, done.exception
    expected = {None: 30.0, "0": 0.0, "7": 7.0, "2m": 120.0}[grace]
    assert started.options["grace"] == expected
    file = "beat.json" if number is None else f"beat.json.{number}"
    assert started.options["heartbeat_file"] == Path("a.b") / file
    assert [(each.status, each.reasons) for each in reports] == [("not_ready", ["no session"])]


@pytest.mark.parametrize(
    ("words", "plugin", "problem"),
    [
        ([], QueuePlugin("emails"), "TARGET has no handler for default/emails"),
        (["--queues", "images"], QueuePlugin("emails", on_message=print), "--queues is not a"),
        (["--grace", "400d"], QueuePlugin("emails", on_message=print), "--grace must be"),
        (["--http", "no"], QueuePlugin("emails", on_message=print), "--http is not an address"),
    ],
)
def test_a_process_that_cannot_work_as_told_is_refused_before_it_starts(
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    plugin: QueuePlugin,
    problem: str,
) -> None:
    """The error names the option."""

    async def create(*_: object) -> Database:
        return Database("memory://", plugins=[plugin])

    monkeypatch.setattr("jobsync.cli.target.create_database", create)
    done = CliRunner().invoke(work, ["app:db", *words])
    assert isinstance(done.exception, Invalid)
    assert str(done.exception).startswith(problem)
    assert (started.options, started.files, started.addresses) == ({}, [], [])


@pytest.mark.parametrize("concurrency", [None, 7])
def test_the_chosen_queues_work_with_the_chosen_number_of_handlers(
    started: Started, monkeypatch: pytest.MonkeyPatch, concurrency: int | None
) -> None:
    """Others are idle in this process."""
    plugins = [QueuePlugin(name, on_message=print, concurrency=2) for name in ("emails", "images")]
    database = Database("memory://", plugins=plugins)

    async def create(*_: object) -> Database:
        return database

    monkeypatch.setattr("jobsync.cli.target.create_database", create)
    words = [] if concurrency is None else ["--concurrency", str(concurrency)]
    done = CliRunner().invoke(work, ["app:db", "--queues", "images", *words])
    assert (done.exit_code, started.options["link"]) == (5, None)
    assert database.idle_plugins == {plugins[0]}
    assert plugins[1].settings.concurrency == (concurrency or 2)


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("number", [None, 0, 1])
@pytest.mark.parametrize("http", [[], ["--http", "0"]])
def test_a_store_that_is_not_used_and_the_probes_are_told_once(
    started: Started,
    caplog: pytest.LogCaptureFixture,
    number: int | None,
    log_format: str,
    http: list[str],
) -> None:
    """By the first process: the others would say the same of the store."""
    caplog.set_level("INFO", logger="jobsync.work")
    words = ["--log-format", log_format, *http]
    words += [] if number is None else ["--supervised", f"{number}:9"]
    environ = {"JOBSYNC_URL": "memory://another"}
    done = CliRunner(env=environ).invoke(work, ["app:db", *words])
    assert (done.exit_code, len(started.addresses)) == (5, len(http) // 2)
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [text.partition(" and ")[0] for text in warnings] == (
        [] if number == 1 else ["JOBSYNC_URL is memory://another"]
    )
    is_banner = (number, log_format) == (None, "text")
    assert ("  probes   http://probes" in done.stderr.splitlines()) is (is_banner and bool(http))
    facts = [
        vars(each)["jobsync_fields"] for each in caplog.records if "jobsync_fields" in vars(each)
    ]
    if log_format == "json" and number != 1:
        assert facts == [
            {
                "target": "app:db",
                "store": "memory://",
                "origin": "from the code",
                "runs": [QUEUE],
                **({"probes": "http://probes"} if http else {}),
            }
        ]
    else:
        assert facts == []


@pytest.mark.parametrize("queues", [None, "emails,images"])
@pytest.mark.parametrize("level", ["info", "error"])
def test_a_supervisor_tells_how_many_processes_it_runs_and_of_which_queues(
    started: Started, queues: str | None, level: str
) -> None:
    """It logs as they do, and has no number."""
    words = ["--processes", "3", "--log-level", level, *(["--queues", queues] if queues else [])]
    done = CliRunner().invoke(work, ["app:db", *words])
    assert (done.exit_code, started.logs) == (7, [("text", level)])
    title, *lines = done.stderr.splitlines()
    assert title.endswith(": app:db")
    expected = ["  processes 3"] + ([f"  queues   {queues}"] if queues else [])
    assert [*map(str.rstrip, lines)] == expected
