"""A copy of the working tree with a mutant: what its tests import, and what they leave behind."""

import asyncio
import base64
import os
import zlib
from pathlib import Path

import pytest
from mutant_workspace import RECORDED_HISTORIES, ROOT, PytestRun, Workspace, WorkspaceStopped
from source_blocks import SourceIndex
from source_mutants import SourceMutant
from waiting import until

MUTANT = SourceMutant(
    name="delays-of-a-second-at-most",
    breaks="A delay of 366 days is accepted.",
    file="src/jobsync/core/arguments.py",
    old="LONGEST_DELAY: Seconds = 366 * _DAY",
    new="LONGEST_DELAY: Seconds = 1.0",
)
LIMIT = 100.0

IMPORTS = """
import subprocess
import sys

from jobsync.core.arguments import LONGEST_DELAY

def test_in_this_process():
    assert LONGEST_DELAY == 1.0

def test_in_a_program_with_a_path_of_its_own():
    program = "from jobsync.core.arguments import LONGEST_DELAY; print(LONGEST_DELAY)"
    command = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": "/nowhere"}
    printed = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
    assert printed.stdout == "1.0\\n"
"""

RECORDS = """
import subprocess
import sys

import pytest
from jobsync.core.arguments import check_choice, check_count, check_seconds

@pytest.fixture(scope="module")
def shared():
    check_choice("a", "b", ["b"])

def test_in_this_process(shared):
    check_count("a", 1, least=0)

def test_in_a_process_that_is_killed(shared):
    program = "from jobsync.core.arguments import *; check_seconds('a', 1); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", f"import os; {program}"], env={}, cwd="/")

def test_that_fails():
    assert False
"""

LEAVES_A_PROCESS = """
import subprocess
import time
from pathlib import Path

def test_that_starts_a_daemon():
    command = "sleep 1000 & echo $! > {file}.new; mv {file}.new {file}"
    subprocess.run(["setsid", "sh", "-c", command], check=True)
    {then}
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Return a copy of the working tree."""
    return Workspace(tmp_path / "copy")


def _run(workspace: Workspace, code: str, limit: float = LIMIT) -> PytestRun:
    # At the root, where no conftest.py takes time to load.
    (workspace.tree / "test_of_the_copy.py").write_text(code, encoding="utf-8")
    return workspace.run(("test_of_the_copy.py",), limit)


def _exists(daemon: Path) -> bool:
    """Whether the process exists whose number is in a file."""
    try:
        os.kill(int(daemon.read_text(encoding="utf-8")), 0)
    except ProcessLookupError:
        return False
    return True


def test_a_mutant_is_imported_by_tests_and_programs_until_it_is_taken_out(
    workspace: Workspace,
) -> None:
    """Every process of the tests has the mutated source, whatever its PYTHONPATH."""
    with workspace.with_mutant(MUTANT):
        mutated = _run(workspace, IMPORTS)
    assert mutated.judge() == ("survived", ""), mutated.output
    unmutated = _run(workspace, IMPORTS)
    caught = "test_of_the_copy.py::test_in_this_process"
    assert unmutated.judge() == ("caught", caught), unmutated.output


def test_no_history_is_recorded_in_the_copy(workspace: Workspace) -> None:
    """Any change of behaviour would differ from it, so that stories would catch every mutant."""
    assert (ROOT / RECORDED_HISTORIES).stat().st_size > 2
    assert (workspace.tree / RECORDED_HISTORIES).read_text(encoding="utf-8") == "{}"


def test_each_test_is_recorded_with_the_functions_that_it_runs(tmp_path: Path) -> None:
    """Also those of a killed process, and of a fixture that another test has set up."""
    index = SourceIndex(ROOT, "src/jobsync/core")
    run = _run(Workspace(tmp_path / "copy", index), RECORDS)
    found = {}
    for fact in run.recorded:
        ran = int.from_bytes(zlib.decompress(base64.b64decode(fact["ran"])), "little")
        scopes = {each.scope for place, each in enumerate(index.blocks) if ran >> place & 1}
        checks = {scope for scope in scopes if scope.startswith("check_")}
        found[fact["test"].rpartition("::")[2]] = (fact["passed"], checks)
    assert found == {
        "test_in_this_process": (True, {"check_choice", "check_count"}),
        "test_in_a_process_that_is_killed": (True, {"check_choice", "check_seconds"}),
        "test_that_fails": (False, set()),
    }, run.output


def test_tests_are_selected_and_ordered(workspace: Workspace) -> None:
    """By their ids; those that do not exist any more are left out."""
    code = "def test_a(): pass\n\ndef test_b(): pass\n\ndef test_c(): pass\n"
    _run(workspace, code)
    ids = [f"test_of_the_copy.py::test_{name}" for name in "cxa"]
    run = workspace.run(ids, LIMIT)
    assert run.started == (ids[0], ids[2]), run.output


def test_no_process_is_left_after_the_tests(workspace: Workspace, tmp_path: Path) -> None:
    """A daemon in a session of its own ends too."""
    daemon = tmp_path / "daemon"
    run = _run(workspace, LEAVES_A_PROCESS.format(file=daemon, then="assert True"))
    assert run.exit_code == 0, run.output
    assert not _exists(daemon)


def test_tests_that_do_not_end_are_ended(workspace: Workspace, tmp_path: Path) -> None:
    """The test that ran is named, and nothing of it is left."""
    daemon = tmp_path / "daemon"
    code = LEAVES_A_PROCESS.format(file=daemon, then="time.sleep(1000)")
    run = _run(workspace, code, limit=4.0)
    caught = "test_of_the_copy.py::test_that_starts_a_daemon (did not end)"
    assert run.judge() == ("caught", caught), run.output
    assert not _exists(daemon)


async def test_a_stop_ends_the_tests(workspace: Workspace, tmp_path: Path) -> None:
    """An interrupted run leaves no process, and no other begins."""
    daemon = tmp_path / "daemon"
    code = LEAVES_A_PROCESS.format(file=daemon, then="time.sleep(1000)")
    running = asyncio.create_task(asyncio.to_thread(_run, workspace, code))
    await until(daemon.exists, "the daemon runs")
    assert _exists(daemon)
    workspace.stop()
    await running
    assert not _exists(daemon)
    with pytest.raises(WorkspaceStopped):
        _run(workspace, code)
