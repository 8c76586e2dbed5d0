"""The course of the demo: what it does to its fleet, what it waits for, and what it leaves."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import msgspec
import pytest
from chance import FakeClock, SeededRandomness
from click.testing import CliRunner

from jobsync.cli.demo import demo
from jobsync.components import Components
from jobsync.demo import show as module
from jobsync.demo import worker
from jobsync.demo.fleet import DemoFleet, DemoWorker
from jobsync.demo.live_screen import LiveScreen, _build_workers
from jobsync.demo.observer import DemoObserver, DemoSnapshot
from jobsync.demo.screens import LineScreen
from jobsync.demo.show import DemoFailed, DemoScreen, DemoShow
from jobsync.demo.verdict import DemoVerdict
from jobsync.demo.worker import TOKENS
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.events import Events
from jobsync.queue.events import MessageCompleted


def look(**changes: Any) -> DemoSnapshot:
    """Return a look at the demo."""
    facts: dict[str, Any] = {
        "leader": "worker-1",
        "epoch": 1,
        "states": {"worker-1": "live"},
        "tokens": {"worker-1": TOKENS},
        **dict.fromkeys(("waiting", "done", "firings", "records"), 0),
    }
    return DemoSnapshot(**facts | changes)


class Process:
    """A process that ends as a test wants."""

    def __init__(self, words: list[str], **_: Any) -> None:
        self.name = words[-1]
        self.pid = int(self.name.rpartition("-")[2])
        self.signals: list[int] = []
        self.code: int | None = None
        self.is_stubborn = False

    def poll(self) -> int | None:
        """Return the exit code, if it has ended."""
        return self.code

    def send_signal(self, number: int) -> None:
        """Note a signal."""
        self.signals.append(number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.signals.append(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.signals.append(signal.SIGKILL)
        self.code, self.is_stubborn = -signal.SIGKILL, False

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, unless it does not stop."""
        if self.is_stubborn:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        if self.code is None:
            self.code = 0
        return self.code


def process_of(worker: DemoWorker) -> Process:
    """Return the process of a worker."""
    return cast("Process", worker._process)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DemoFleet:
    """A fleet without real processes."""
    monkeypatch.setattr("jobsync.demo.fleet.subprocess.Popen", Process)
    return DemoFleet("memory://", tmp_path)


def test_each_worker_is_told_by_what_became_of_it(fleet: DemoFleet) -> None:
    """All are asked to stop before any is waited for; a frozen one is woken for that."""
    workers = [fleet.start() for _ in range(6)]
    running, frozen, killed, stubborn, broken, ended = workers
    frozen.freeze()
    killed.kill()
    process_of(stubborn).is_stubborn = True
    process_of(broken).code = 1
    assert [each.condition for each in workers] == [
        *("running", "frozen", "killed", "running", "failed", "running")
    ]
    assert fleet.running == [running, stubborn, ended]
    assert fleet.frozen == [frozen]
    assert fleet.failed == [broken]
    assert [fleet.find(each.pid) for each in workers] == workers
    assert fleet.find(77) is None
    # It stops by itself, which nobody has asked it to do.
    process_of(ended).code = 0
    fleet.stop()
    assert [each.condition for each in workers] == [
        *("stopped", "stopped", "killed", "failed", "failed", "failed")
    ]
    assert fleet.failed == [stubborn, broken, ended]
    assert process_of(frozen).signals == [signal.SIGSTOP, signal.SIGCONT, signal.SIGTERM]
    assert process_of(stubborn).signals[-2:] == [signal.SIGTERM, signal.SIGKILL]
    assert not process_of(broken).signals


class Observer:
    """A store whose looks a test prepares; the last of them remains."""

    def __init__(self, looks: list[DemoSnapshot]) -> None:
        self.sent: list[str] = []
        self.next_number = self.added = 0
        self.calls: list[str] = []
        self._looks = looks

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.calls.append("close")

    async def read(self) -> DemoSnapshot:
        """Return the next look."""
        return self._looks.pop(0) if self._looks[1:] else self._looks[0]

    async def send(self, numbers: range) -> None:
        """Count mails."""
        self.sent += map(str, numbers)
        self.next_number += len(numbers)

    async def add_record(self, _: float) -> None:
        """Count a record."""
        self.added += 1

    async def stop_clock(self) -> None:
        """Note the end."""
        self.calls.append("stop")


class Listening(DemoScreen):
    """A screen that remembers what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def tell(self, text: str) -> None:
        """Remember an event."""
        self.events.append(text)


def build_show(fleet: DemoFleet, looks: list[DemoSnapshot], count: int = 3) -> DemoShow:
    """Return a demo on a clock that a look moves."""
    components = Components(clock=FakeClock(), randomness=SeededRandomness(1), events=Events())
    show = DemoShow("memory://", count, 20.0, Listening(), Path(), components)
    show._fleet, show._observer = fleet, cast("Any", Observer(looks))
    return show


def told(show: DemoShow) -> list[str]:
    """Return what the viewer was told."""
    return cast("Listening", show._screen).events


FULL = {f"worker-{number}": TOKENS // 3 for number in (1, 2, 3)}


@pytest.mark.parametrize(
    ("now", "is_complete", "is_over"),
    [
        (look(tokens=FULL), True, True),
        (look(tokens=FULL, leader=None), False, True),
        (look(tokens=FULL, leader="worker-9"), False, True),
        (look(tokens={**FULL, "worker-3": 0}), False, False),
        (look(tokens=FULL, waiting=1), True, False),
        (look(tokens=FULL, records=1), True, False),
        (None, False, False),
    ],
)
def test_the_demo_begins_and_ends_when_all_is_in_order(
    fleet: DemoFleet, now: DemoSnapshot | None, is_complete: bool, is_over: bool
) -> None:
    """It begins with a leader and tokens for all; it ends with nothing left to do."""
    show = build_show(fleet, [])
    for _ in range(3):
        fleet.start()
    show._snapshot = now
    assert (show._is_complete(), show._is_over()) == (is_complete, is_over)


async def test_the_longest_time_without_a_leader_counts(fleet: DemoFleet) -> None:
    """From when the last one was seen to lead; the same one again is no change."""
    show = build_show(fleet, [])
    clock = cast("FakeClock", show._clock)
    for _ in range(3):
        fleet.start()
    course = [
        *((1.0, "worker-1"), (1.0, "worker-1"), (5.0, None), (1.0, "worker-2")),
        *((2.0, None), (1.0, "worker-2"), (1.0, "worker-3")),
    ]
    for epoch, (seconds, leader) in enumerate(course):
        clock.mono_seconds += seconds
        show._snapshot = look(leader=leader)
        show._watch_leader(epoch)
    assert show._vacancy == 6.0
    assert told(show) == [
        "worker-1 leads with epoch 0",
        "worker-2 leads with epoch 3, 6.0 s later",
        "worker-3 leads with epoch 6, 1.0 s later",
    ]


async def test_the_leader_is_killed_and_another_worker_is_frozen(fleet: DemoFleet) -> None:
    """In this order, with a new worker in between; whoever is frozen is woken."""
    looks = [look(), look(), look(leader="worker-2")]
    show = build_show(fleet, looks)
    for _ in range(3):
        fleet.start()
    await show._kill_leader()
    assert fleet.workers[0].condition == "killed"
    await show._replace()
    # The store still names the one that was killed.
    show._snapshot = look()
    await show._freeze()
    assert [each.condition for each in fleet.workers] == ["killed", "running", "frozen", "running"]
    await show._thaw()
    assert not fleet.frozen
    assert [event for event in told(show) if "leads with" not in event] == [
        "SIGKILL to worker-1, which leads",
        "worker-4 is started in its place",
        "SIGSTOP to worker-3, for 7 s",
        "SIGCONT to worker-3",
    ]


async def test_mails_and_records_come_at_their_rates(fleet: DemoFleet) -> None:
    """Forty mails and two records a second, and what was not sent again."""
    show = build_show(fleet, [])
    observer = cast("Observer", show._observer)
    for elapsed, mails, records in [(0.0, 0, 0), (0.1, 4, 1), (0.5, 20, 1), (2.0, 80, 4)]:
        await show._produce(elapsed)
        await show._produce(elapsed)
        assert (len(observer.sent), observer.added) == (mails, records)
    assert observer.sent == [str(number) for number in range(80)]


@pytest.mark.parametrize("cause", ["time", "worker"])
async def test_a_demo_that_cannot_go_on_stops_its_workers(
    fleet: DemoFleet, tmp_path: Path, cause: str
) -> None:
    """After a minute, or as soon as one fails, whose log is kept; the store is closed last."""
    show = build_show(fleet, [look(tokens={})])
    clock = cast("FakeClock", show._clock)
    begun = clock.mono_seconds
    start = fleet.start

    def start_broken() -> DemoWorker:
        worker = start()
        if cause == "worker" and worker.pid == 2:
            (tmp_path / f"{worker.name}.log").write_text("no such table")
            process_of(worker).code = 1
        return worker

    fleet.start = start_broken  # type: ignore[method-assign]
    with pytest.raises(DemoFailed, match="the workers did not start") as failed:
        await show.run()
    assert failed.value.logs == (["no such table"] if cause == "worker" else [])
    assert (clock.mono_seconds - begun >= 60) is (cause == "time")
    assert {each.condition for each in fleet.workers} <= {"stopped", "failed"}
    assert cast("Observer", show._observer).calls == ["close"]


@pytest.mark.parametrize(
    ("answer", "sent", "following"),
    [
        (["a", "b"], ["a", "b"], 2),
        (Unavailable("the store", "refused"), [], 0),
        (OutcomeUnknown("queue"), [], 2),
    ],
)
async def test_mails_that_may_have_arrived_are_not_sent_again(
    answer: Any, sent: list[str], following: int
) -> None:
    """Nor counted as sent; those that have not are the next ones."""

    async def enqueue_many(data: list[dict[str, int]], task: str) -> list[str]:
        assert (data, task) == ([{"number": 0}, {"number": 1}], "send")
        if isinstance(answer, Exception):
            raise answer
        return cast("list[str]", answer)

    observer = DemoObserver("memory://", cast("Any", None))
    observer._queue = cast("Any", SimpleNamespace(enqueue_many=enqueue_many))
    await observer.send(range(2))
    assert (observer.sent, observer.next_number) == (sent, following)


async def test_all_pages_of_what_was_done_are_read() -> None:
    """The messages, the completions as they came, and the firings with the oldest first."""
    pages: dict[str, list[Any]] = {"": [1, 2], "2": [3, 4], "4": [5], "5": []}

    def build(**shape: Callable[[int], Any]) -> Callable[..., Any]:
        async def read(*_: str, after: str, limit: int) -> list[Any]:
            assert limit > 0
            return [
                SimpleNamespace(number=number, **{name: of(number) for name, of in shape.items()})
                for number in pages[after]
            ]

        return read

    observer = DemoObserver("memory://", cast("Any", None))
    observer._queue = cast("Any", SimpleNamespace(browse=build(cursor=str)))
    observer._scheduler = cast("Any", SimpleNamespace(job_history=build(cursor=str)))
    store = SimpleNamespace(read=build(id=str, value=int))
    observer._database = cast("Any", SimpleNamespace(store=store))
    finished = cast("list[Any]", await observer.read_finished())
    firings = cast("list[Any]", await observer.read_firings())
    assert [each.number for each in finished] == [1, 2, 3, 4, 5]
    assert [each.number for each in firings] == [5, 4, 3, 2, 1]
    assert await observer.read_completions() == ["1", "2", "3", "4", "5"]


async def test_each_completion_is_written_once() -> None:
    """In the order in which the store has accepted them; nothing is written for none."""
    written: list[tuple[str, list[Any]]] = []

    async def append(prefix: str, values: list[Any]) -> None:
        written.append((prefix, [*values]))

    listeners: dict[str, Callable[[Any], None]] = {}
    log = worker._CompletionLog(cast("Any", SimpleNamespace(on=listeners.__setitem__)))
    database = cast("Any", SimpleNamespace(store=SimpleNamespace(append=append)))
    for ids in (["a", "b"], [], ["c"]):
        for name in ids:
            listeners[MessageCompleted.name](SimpleNamespace(message_id=name))
        await log.write(database)
    assert written == [(worker.COMPLETIONS, ["a", "b"]), (worker.COMPLETIONS, ["c"])]


def test_lines_about_the_fleet_come_every_two_seconds(
    fleet: DemoFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the rate of the latest looks, not of all time."""
    clock = FakeClock()
    screen = LineScreen(clock)
    fleet.start()
    for number in range(41):
        done = 10 * number if number <= 20 else 200
        screen.update(fleet, look(done=done, waiting=3, firings=2, records=1), number / 40)
        clock.mono_seconds += 0.5
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    start = "1 running, worker-1 leads with epoch 1; 3 waiting"
    assert lines[0] == f"   0.0 s    0%  {start}, 0 done (0/s); 2 firings; 1 records"
    assert lines[5] == f"  10.0 s   50%  {start}, 200 done (20/s); 2 firings; 1 records"
    assert lines[10] == f"  20.0 s  100%  {start}, 200 done (0/s); 2 firings; 1 records"
    screen.update(fleet, look(leader=None), 1.0)
    assert "nobody leads" not in capsys.readouterr().out
    clock.mono_seconds += 2
    screen.update(fleet, look(leader=None), 1.0)
    assert "1 running, nobody leads; 0 waiting" in capsys.readouterr().out


def test_a_terminal_shows_the_workers_with_their_shares(fleet: DemoFleet) -> None:
    """The leader has a star, and a bar is as long as the share of all tokens."""
    for _ in range(2):
        fleet.start()
    fleet.workers[1].kill()
    table = _build_workers(fleet, look(tokens={"worker-1": TOKENS // 2}))
    cells = [list(column.cells) for column in table.columns]
    assert cells == [
        ["worker-1 ★", "worker-2"],
        ["[green]running[/]", "[red]killed[/]"],
        ["live", "-"],
        [f"{'█' * 10:<20} 60", f"{'':20} 0"],
    ]


def test_a_terminal_shows_the_latest_events() -> None:
    """Eight of them, each with its time; they are no lines of their own."""
    clock = FakeClock()
    screen = LiveScreen(clock)
    for number in range(10):
        screen.tell(f"event {number}")
        clock.mono_seconds += 1
    assert list(screen._events) == [f"{number:6.1f} s  event {number}" for number in range(2, 10)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demo keeps its files."""
    folder = tmp_path / "files"

    def make(**_: str) -> str:
        folder.mkdir()
        return str(folder)

    monkeypatch.setattr("tempfile.mkdtemp", make)
    return folder


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("end", ["good", "bad", "failed"])
def test_the_command_tells_the_verdict_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, folder: Path, end: str, as_json: bool, keeps: bool
) -> None:
    """Its code is that of the verdict; a failure comes with all logs, and files stay if wanted."""
    counts: dict[str, Any] = dict.fromkeys(DemoVerdict.__struct_fields__, 0)
    counts |= {"tokens": TOKENS, "vacancy": 1.5, "left": 2 if end == "bad" else 0}
    verdict = DemoVerdict(**counts)

    async def run(_: DemoShow) -> DemoVerdict:
        if end == "failed":
            raise DemoFailed("the workers did not start", ["first log", "second log"])
        return verdict

    monkeypatch.setattr(module.DemoShow, "run", run)
    words = [*(["--json"] if as_json else []), *(["--keep"] if keeps else [])]
    done = CliRunner().invoke(demo, words)
    assert done.exit_code == (0 if end == "good" else 1)
    assert folder.exists() is keeps
    # Standard output is JSON alone, if it is that.
    kept = [f"kept: {folder}"] if keeps else []
    assert [line for line in done.stderr.splitlines() if line not in kept] == (
        ["first log", "second log", "Error: the workers did not start"] if end == "failed" else []
    )
    assert not kept or kept[0] in (done.stderr if as_json else done.stdout)
    if as_json:
        facts = {**msgspec.structs.asdict(verdict), "is_good": end == "good"}
        found = [] if end == "failed" else [facts]
        assert [msgspec.json.decode(line) for line in done.stdout.splitlines()] == found
    elif end == "failed":
        assert "Counted from the store" not in done.stdout
    else:
        assert ("nothing was lost or doubled" in done.output) is (end == "good")


@pytest.mark.parametrize("url", ["mysql://a", "sqlite", "s3://"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_wrong_url_leaves_no_folder(folder: Path, url: str, keeps: bool) -> None:
    """It is refused before anything is made: there is nothing to keep, either."""
    done = CliRunner().invoke(demo, ["--url", url, *(["--keep"] if keeps else [])])
    assert done.exit_code != 0
    assert not folder.exists()
    assert "kept" not in done.output
