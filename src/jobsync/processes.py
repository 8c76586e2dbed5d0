"""Processes: which one this is, and whether another one on this machine has ended.

The number of a process is given to another process later, and means something else in another
container. So a process is told apart by its machine, the namespaces that give its number and its
times their meaning, its number, and the time of its start. The machine is its name and its boot:
machines that were cloned while they ran share the boot, but hardly the name.

What cannot be read is no evidence, and a process that merely stands still has not ended.
"""

import os
import platform
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

__all__ = ["NO_PROCESS", "ProcessIdentity", "Processes", "SystemProcesses", "has_ended"]

NO_PROCESS = -1
"""The start of a process that does not exist."""

_PROC = Path("/proc")


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What tells a process from all others, on all machines and at all times."""

    host: str
    """The name of its machine."""
    boot: str
    """The id of the boot of its machine."""
    namespaces: str
    """Where its number and the time of its start are valid."""
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    started: int
    """When it was started, in ticks since the boot."""

    def shares_machine(self, other: "ProcessIdentity") -> bool:
        """Whether the number of either process means the same to the other one."""
        return (self.host, self.boot, self.namespaces) == (other.host, other.boot, other.namespaces)


class Processes(Protocol):
    """The processes of a machine, as one of them sees them."""

    def identify(self) -> ProcessIdentity | None:
        """Return the identity of this process; None where the system does not tell."""
        ...

    def find_start(self, pid: int) -> int | None:
        """Return when the process with a number was started; None if that cannot be told.

        `NO_PROCESS` if no process has the number, or only the remains of one.
        """
        ...


def has_ended(process: ProcessIdentity, processes: Processes) -> bool:
    """Whether it is certain that a process has ended; never for one of another machine."""
    own = processes.identify()
    if own is None or not own.shares_machine(process):
        return False
    started = processes.find_start(process.pid)
    return started is not None and started != process.started


class SystemProcesses:
    """The processes of this machine. Only Linux tells enough about them."""

    def identify(self) -> ProcessIdentity | None:
        """Return the identity of this process; None on other systems."""
        return _identify(os.getpid())

    def find_start(self, pid: int) -> int | None:
        """Return when the process with a number was started; None if that cannot be told."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return NO_PROCESS
        except OSError:
            # It is another user's, and exists.
            pass
        return _read_start(pid) if _is_proc_ours() else None


@cache
def _identify(pid: int) -> ProcessIdentity | None:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespaces = str((_PROC / "self/ns/pid").readlink())
        with suppress(FileNotFoundError):
            # Where it differs, the same process seems to have started at another time.
            namespaces += f" {(_PROC / 'self/ns/time').readlink()}"
    except OSError:
        return None
    started = _read_start("self")
    if started is None:
        return None
    return ProcessIdentity(
        host=platform.node(), boot=boot, namespaces=namespaces, pid=pid, started=started
    )


def _is_proc_ours() -> bool:
    """Whether `/proc` shows the numbers of this namespace, not those of another one."""
    try:
        status = (_PROC / "self/status").read_text(errors="replace")
    except OSError:
        return False
    # The numbers of this process, from the namespace that is shown down to its own.
    numbers = re.search(r"^NSpid:((?:[ \t]+\d+)+)$", status, re.MULTILINE)
    return numbers is not None and len(numbers[1].split()) == 1


def _read_start(pid: int | str) -> int | None:
    """Return when a process was started; None if that cannot be read."""
    try:
        text = (_PROC / f"{pid}/stat").read_text(errors="replace")
        # After its name, which may hold anything. The start is the 22nd field of all.
        fields = text.rpartition(")")[2].split()
        state, started = fields[0], int(fields[19])
        # The first thread may end before the others, which run on.
        is_last = len(list((_PROC / f"{pid}/task").iterdir())) <= 1
    except (OSError, ValueError, IndexError):
        return None
    return NO_PROCESS if state in {"Z", "X"} and is_last else started
