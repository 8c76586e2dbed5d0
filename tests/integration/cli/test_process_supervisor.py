"""The supervisor of `jobsync work --processes`, with small programs for processes.

What happens when one of them is killed is in `processes/test_supervisor.py`.
"""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components
from jobsync.cli import process_supervisor
from jobsync.cli.process_supervisor import ProcessSupervisor
from jobsync.events import Events

LONG = 60.0

PROGRAM = """
import os, signal, socket, sys, time
number, descriptor, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
link = socket.socket(fileno=descriptor)
def stop(*_): sys.exit(3 * number)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in sys.argv else stop)
if number == 1 and "second-fails-first" in sys.argv and not os.path.exists(f"{folder}/1-0"):
    while not os.path.exists(f"{folder}/0-0"): time.sleep(0.01)
    open(f"{folder}/1-0", "w").close()
    sys.exit(1)
link.send(b"r")
starts = len([name for name in os.listdir(folder) if name.startswith(f"{number}-")])
open(f"{folder}/{number}-{starts}", "w").close()
if "fails-once" in sys.argv:
    sys.exit(1 if starts == 0 else 0)
link.recv(1)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill soon what does not stop."""
    monkeypatch.setattr(process_supervisor, "_EXTRA_TIME", 0.2)


def supervise(folder: Path, count: int, *words: str, grace: float = LONG) -> int:
    """Run processes; return the exit code of the supervisor."""

    def build_command(number: int, descriptor: int) -> list[str]:
        return [sys.executable, "-c", PROGRAM, str(number), str(descriptor), str(folder), *words]

    return ProcessSupervisor(build_command, count, grace, Components.system()).run()


def stop_when_started(folder: Path, count: int) -> None:
    """Send SIGTERM to this process once so many processes run."""

    def wait() -> None:
        while len(list(folder.iterdir())) < count:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def test_the_exit_code_is_that_of_the_worst(tmp_path: Path) -> None:
    """All processes are told to stop, and the supervisor waits for the last one."""
    stop_when_started(tmp_path, 3)
    assert supervise(tmp_path, 3) == 6
    assert len(list(tmp_path.iterdir())) == 3


def test_a_process_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    """A moment after the grace period; the exit code says so."""
    stop_when_started(tmp_path, 1)
    assert supervise(tmp_path, 1, "stubborn", grace=0.0) == 128 + signal.SIGKILL


def test_a_process_that_fails_is_started_again_and_one_that_ends_is_not(tmp_path: Path) -> None:
    """Each fails once, and ends by itself the next time."""
    assert supervise(tmp_path, 2, "fails-once") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]


def test_a_process_that_fails_at_its_start_does_not_stop_one_that_works(tmp_path: Path) -> None:
    """Even though the other one has not ended since."""
    stop_when_started(tmp_path, 3)
    assert supervise(tmp_path, 2, "second-fails-first") == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "1-0", "1-1"]


def test_pauses_grow_while_a_process_fails(tmp_path: Path, clock: FakeClock) -> None:
    """And begin anew after it has run for long."""
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    supervisor = ProcessSupervisor(lambda *_: [], 1, 1.0, components)
    (child,) = supervisor._children
    pauses = []
    for _ in range(8):
        supervisor._start_later(child, "has failed")
        assert child.start_at is not None
        child.started_at, pause = child.start_at, child.start_at - supervisor._clock.mono()
        pauses.append(pause)
    assert 0 < pauses[0] <= 0.5
    assert pauses[-1] > 14
    child.started_at = supervisor._clock.mono() + -61.0
    supervisor._start_later(child, "has failed")
    assert child.failures == 1
    assert not list(tmp_path.iterdir())


def test_a_process_ended_by_a_signal_without_a_name_is_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Real-time signals have none; the other processes work on."""
    supervisor = ProcessSupervisor(lambda *_: [], 1, 1.0, Components.system())
    (child,) = supervisor._children
    supervisor._on_end(child, -(signal.SIGRTMIN + 3), has_worked=True)
    assert child.start_at is not None
    assert f"was ended by signal {signal.SIGRTMIN + 3}: starting it again" in caplog.text


def test_a_process_that_cannot_be_started_again_is_tried_later() -> None:
    """If none has ever worked, the command fails."""
    supervisor = ProcessSupervisor(lambda *_: ["/nowhere"], 1, 1.0, Components.system())
    (child,) = supervisor._children
    with pytest.raises(OSError, match="nowhere"):
        supervisor._start(child)
    supervisor._has_worked = True
    supervisor._start(child)
    assert child.start_at is not None
    assert child.process is None


def _wait_after_failure(supervisor: ProcessSupervisor) -> None:
    supervisor._on_end(supervisor._children[0], 1, has_worked=True)


def _wait_after_refused_start(supervisor: ProcessSupervisor) -> None:
    supervisor._start(supervisor._children[1])


@pytest.mark.parametrize("waits", [_wait_after_failure, _wait_after_refused_start])
def test_a_stop_starts_nothing_that_waits_for_its_start(
    waits: Callable[[ProcessSupervisor], None],
) -> None:
    """Neither one that has failed nor one that could not be started; it need not wait for them."""
    supervisor = ProcessSupervisor(lambda *_: ["/nowhere"], 2, LONG, Components.system())
    supervisor._has_worked = True
    waits(supervisor)
    assert supervisor._is_busy()
    supervisor._stop(signal.SIGTERM)
    assert not supervisor._is_busy()


@pytest.mark.parametrize("codes", list(itertools.permutations([0, 6, 3, -signal.SIGKILL])))
def test_the_worst_exit_code_stays_whichever_process_ends_last(codes: tuple[int, ...]) -> None:
    """One that a signal has ended counts as shells count it; our own signal is no failure."""
    supervisor = ProcessSupervisor(lambda *_: [], 1, LONG, Components.system())
    supervisor._stop(signal.SIGTERM)
    (child,) = supervisor._children
    for code in (*codes, -signal.SIGTERM, -signal.SIGINT):
        supervisor._on_end(child, code, True)
    assert supervisor._worst == 128 + signal.SIGKILL
