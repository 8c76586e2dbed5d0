"""Whether a process has ended, by what the system shows of it."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from waiting import until

from jobsync import processes as module
from jobsync.processes import NO_PROCESS, ProcessIdentity, SystemProcesses, has_ended

PROCESSES = SystemProcesses()

pytestmark = pytest.mark.skipif(
    PROCESSES.identify() is None, reason="only Linux tells enough about processes"
)


def own() -> ProcessIdentity:
    """Return the identity of this process."""
    identity = PROCESSES.identify()
    assert identity is not None
    return identity


def identify(pid: int) -> ProcessIdentity:
    """Return the identity of another process."""
    started = PROCESSES.find_start(pid)
    assert started is not None
    assert started != NO_PROCESS
    return msgspec.structs.replace(own(), pid=pid, started=started)


def read_state(pid: int) -> str:
    """Return the letter of the state of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def wait_for_end(child: "subprocess.Popen[bytes]") -> None:
    """Wait until a process has ended, and leave its entry for its parent to read."""
    descriptor = os.pidfd_open(child.pid)
    select.select([descriptor], [], [])
    os.close(descriptor)


def test_a_process_that_runs_has_not_ended(child: "subprocess.Popen[bytes]") -> None:
    """Neither this one nor another one; each has a start of its own."""
    assert not has_ended(own(), PROCESSES)
    assert not has_ended(identify(child.pid), PROCESSES)
    assert identify(child.pid).started >= own().started


@pytest.mark.parametrize(
    ("error", "ended"), [(PermissionError, False), (OSError, False), (ProcessLookupError, True)]
)
def test_a_process_that_may_not_be_signalled_has_not_ended(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError], ended: bool
) -> None:
    """It is another user's; only one that does not exist has ended."""
    identity = own()

    def refuse(*_: int) -> None:
        raise error

    monkeypatch.setattr(os, "kill", refuse)
    assert has_ended(identity, PROCESSES) is ended


async def test_a_process_that_stands_still_has_not_ended(child: "subprocess.Popen[bytes]") -> None:
    """However long: it may go on at any time."""
    identity = identify(child.pid)
    child.send_signal(signal.SIGSTOP)
    await until(lambda: read_state(child.pid) == "T", "it stands still")
    assert not has_ended(identity, PROCESSES)


def test_a_killed_process_has_ended(child: "subprocess.Popen[bytes]") -> None:
    """As soon as it is dead: before its parent has noticed, and after."""
    identity = identify(child.pid)
    child.kill()
    wait_for_end(child)
    assert PROCESSES.find_start(child.pid) == NO_PROCESS
    assert has_ended(identity, PROCESSES)
    child.wait()
    assert has_ended(identity, PROCESSES)


@pytest.mark.parametrize("error", [None, PermissionError])
def test_a_number_that_was_given_again_is_another_process(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError] | None
) -> None:
    """The one that had it before has ended, also if the new one is another user's."""
    before = msgspec.structs.replace(own(), started=own().started - 1)

    def refuse(*_: int) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(os, "kill", refuse)
    assert has_ended(before, PROCESSES)


@pytest.mark.parametrize("field", ["host", "boot", "namespaces"])
def test_nothing_is_known_about_processes_elsewhere(field: str) -> None:
    """A number says nothing on another machine, after a reboot, or in another container."""
    free = msgspec.structs.replace(own(), pid=2**22 + 1)
    assert has_ended(free, PROCESSES)
    assert not has_ended(msgspec.structs.replace(free, **{field: "another"}), PROCESSES)


@pytest.fixture
def headless_child() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose first thread ends while another one waits."""
    code = (
        "import ctypes, threading\n"
        "threading.Thread(target=input).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


async def test_a_first_thread_that_has_ended_is_not_the_process(
    headless_child: "subprocess.Popen[bytes]",
) -> None:
    """Its other threads run on, and may write."""
    pid = headless_child.pid
    await until(lambda: read_state(pid) == "Z", "its first thread has ended")
    assert not has_ended(identify(pid), PROCESSES)


def test_what_cannot_be_read_is_no_evidence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, child: "subprocess.Popen[bytes]"
) -> None:
    """A process that `/proc` hides, or shows with the numbers of another namespace, may run."""
    identity = msgspec.structs.replace(identify(child.pid), started=1)
    assert has_ended(identity, PROCESSES)
    own()
    monkeypatch.setattr(module, "_PROC", tmp_path)
    assert PROCESSES.find_start(child.pid) is None
    assert not has_ended(identity, PROCESSES)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text(
        f"Name:\tpython\nNSpid:\t77\t{os.getpid()}\nKthread:\t0\n"
    )
    (tmp_path / f"{child.pid}/task").mkdir(parents=True)
    (tmp_path / f"{child.pid}/stat").write_text(f"{child.pid} (a) b) S {' 0' * 18} 77 0")
    assert not has_ended(identity, PROCESSES)
    (tmp_path / "self/status").write_text(f"Name:\tpython\nNSpid:\t{os.getpid()}\nKthread:\t0\n")
    assert PROCESSES.find_start(child.pid) == 77


@pytest.fixture
def proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """What a system tells of this process."""
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("b00t\n")
    for folder in ("ns", "task/1"):
        (tmp_path / "self" / folder).mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[1]")
    (tmp_path / "self/ns/time").symlink_to("time:[2]")
    (tmp_path / "self/stat").write_text(f"7 (python) S {' 0' * 18} 77 0")
    monkeypatch.setattr(module, "_PROC", tmp_path)
    monkeypatch.setattr("platform.node", lambda: "here")
    module._identify.cache_clear()
    yield tmp_path
    module._identify.cache_clear()


@pytest.mark.parametrize(
    ("missing", "namespaces"),
    [
        (None, "pid:[1] time:[2]"),
        # Older systems have one time for all.
        ("self/ns/time", "pid:[1]"),
        ("self/ns/pid", None),
        ("sys/kernel/random/boot_id", None),
        ("self/stat", None),
    ],
)
def test_a_process_is_told_apart_by_all_that_the_system_tells(
    proc: Path, missing: str | None, namespaces: str | None
) -> None:
    """Its machine, the boot, the namespaces of its number and its times, and its start."""
    if missing is not None:
        (proc / missing).unlink()
    expected = None
    if namespaces is not None:
        expected = ProcessIdentity(
            host="here", boot="b00t", namespaces=namespaces, pid=os.getpid(), started=77
        )
    assert PROCESSES.identify() == expected


def test_a_system_that_tells_nothing_has_no_identity(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Then nothing is known about any process."""
    identity = msgspec.structs.replace(own(), started=1)
    monkeypatch.setattr(module, "_PROC", tmp_path)
    module._identify.cache_clear()
    try:
        assert PROCESSES.identify() is None
        assert not has_ended(identity, PROCESSES)
    finally:
        module._identify.cache_clear()
