"""Run pytest in a process of its own, report what failed, and leave no process behind.

python guarded_pytest.py REPORT SECONDS ARGUMENTS...

REPORT is a file in a folder with `selection.json`, the tests or files to run, in this order.
With `--record-blocks` among the arguments, the report says which blocks of the source each ran.

Every process that the tests start, at any depth and in any session, ends before this one does:
also if the time is over, if this process gets SIGTERM, or if the one that started it dies.
The report has a line of JSON for each fact. Exits with pytest's code, or 124 if the time is over.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

TIME_IS_OVER = 124
SECONDS_TO_CLEAN_UP = 10.0
RECORD_BLOCKS = "--record-blocks"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Start pytest, wait for it, and end what it has left."""
    report, seconds, *arguments = sys.argv[1:]
    # Orphans become children of this process, so that it finds them.
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _exit)
    _control(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        child = subprocess.Popen([sys.executable, __file__, "--inside", report, *arguments])
        try:
            return child.wait(float(seconds))
        except subprocess.TimeoutExpired:
            # Fixtures stop their servers in order.
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(SECONDS_TO_CLEAN_UP)
            return TIME_IS_OVER
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_descendants()


def _exit(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def _control(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def _kill_descendants() -> None:
    """Kill until there is no child left: the children of a killed one become ours."""
    while True:
        for process in _find_descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _find_descendants() -> set[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # Some end while they are read.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {each for each, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


class Reporter:
    """A pytest plugin that writes which source is tested, which test runs, and which fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        selection = json.loads(path.with_name("selection.json").read_text(encoding="utf-8"))
        self._places = {each: place for place, each in enumerate(selection)}

    def _write(self, **fact: Any) -> None:
        # Written at once: a mutant may end the process.
        with self._path.open("a", encoding="utf-8") as report:
            report.write(json.dumps(fact) + "\n")

    def pytest_configure(self) -> None:
        from hypothesis import HealthCheck, settings  # noqa: PLC0415 - the guard needs none of it

        # A slow machine must not catch a mutant.
        settings.register_profile(
            "mutants", deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        def place(item: Any) -> int | None:
            return self._places.get(item.nodeid, self._places.get(item.nodeid.partition("::")[0]))

        selected = [(found, item) for item in items if (found := place(item)) is not None]
        items[:] = [item for _, item in sorted(selected, key=lambda each: each[0])]

    def pytest_collection_finish(self) -> None:
        import jobsync  # noqa: PLC0415 - as the tests have imported it

        self._write(source=jobsync.__file__)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._write(failed=report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write(not_collected=report.nodeid)


def run_inside() -> int:
    """Run pytest in this process."""
    import pytest  # noqa: PLC0415 - likewise

    _, _, name, *arguments = sys.argv
    report = Path(name)
    plugins: list[Any] = [Reporter(report)]
    if RECORD_BLOCKS in arguments:
        # Beside this file; it needs a copy that records.
        from block_recorder import BlockRecorder  # type: ignore[import-not-found]  # noqa: PLC0415

        arguments.remove(RECORD_BLOCKS)
        plugins.append(BlockRecorder(report))
    sys.path[0] = str(Path.cwd())  # as `python -m pytest` does
    return int(pytest.main(arguments, plugins=plugins))


if __name__ == "__main__":
    sys.exit(run_inside() if sys.argv[1] == "--inside" else main())
