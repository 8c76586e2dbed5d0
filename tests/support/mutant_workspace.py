"""A copy of the working tree in which source mutants are tested, with an environment of its own.

The package is installed in place: the environment's site-packages names the `src` folder of the
working tree. A PYTHONPATH would come first, but tests start programs with a PYTHONPATH of their
own. So the copy has an environment that links to the original and differs in that one line;
whatever runs with its interpreter imports the copy.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from source_blocks import SourceIndex
from source_mutants import SourceMutant

__all__ = [
    "TESTS_LEFT_OUT",
    "PytestRun",
    "Verdict",
    "Workspace",
    "WorkspaceStopped",
    "WrongSource",
]

ROOT = Path(__file__).parents[2]
TIME_IS_OVER = 124  # the exit code of tests/mutants/guarded_pytest.py
SECONDS_PER_TEST = 100
RECORDED_HISTORIES = Path("tests", "simulation", "histories.json")
_PYTEST_CODES = {2, 3, 4, 5}
"""Exit codes with which pytest says that it could not run the tests."""

Verdict: TypeAlias = Literal["caught", "survived", "broken"]
"""`broken` means that the tests could not run, which says nothing about them."""

TESTS_LEFT_OUT = (
    # They check that the mutants fit the source, and that nothing has changed in simulated
    # histories: they would catch each mutant.
    "test_source_mutants.py",
    "test_histories.py",
    # It makes copies of its own.
    "test_mutant_workspace.py",
)

_OPENS_MEMORY = """
import mmap

with open({memory!r}, "r+b") as file:
    ran = mmap.mmap(file.fileno(), 0)
"""

_LEFT_OUT = shutil.ignore_patterns(
    ".git",
    ".venv*",
    ".*_cache",
    ".hypothesis",
    "__pycache__",
    "*.db",
    "*.db-*",
    ".cache",
    *TESTS_LEFT_OUT,
)


class WrongSource(Exception):
    """The tests would import another source than the copy's."""


class WorkspaceStopped(Exception):
    """The workspace runs no more tests."""


class PytestRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of pytest in the copy.

    Attributes:
        exit_code: of pytest; negative if a signal ended it.
        seconds: of real time.
        failed: the tests that failed; one at most, because pytest stops at the first.
        not_collected: the modules that could not be imported.
        started: the tests that were started.
        recorded: what `tests/mutants/block_recorder.py` has reported of each test.
        output: what pytest has printed.
    """

    exit_code: int
    seconds: float
    failed: tuple[str, ...] = ()
    not_collected: tuple[str, ...] = ()
    started: tuple[str, ...] = ()
    recorded: tuple[dict[str, Any], ...] = ()
    output: str = ""

    def judge(self) -> tuple[Verdict, str]:
        """Return what this run says about a mutant, and which test says so."""
        if self.failed:
            return "caught", self.failed[0]
        if self.exit_code == 0:
            return "survived", ""
        if self.not_collected:
            return "broken", f"{self.not_collected[0]} cannot be imported"
        if self.exit_code in _PYTEST_CODES or not self.started:
            return "broken", f"pytest ended with {self.exit_code}"
        how = "did not end" if self.exit_code == TIME_IS_OVER else f"exit code {self.exit_code}"
        return "caught", f"{self.started[-1]} ({how})"


class Workspace:
    """A copy of the working tree, which has at most one mutant at a time.

    Args:
        folder: a new folder. Users other than this one must be able to read it, because
            a PostgreSQL server of the tests may run as another user.
        recorded: runs report which blocks of this source each test runs, and do not end with the
            first failure.
    """

    def __init__(self, folder: Path, recorded: SourceIndex | None = None) -> None:
        self.tree = folder / "tree"
        self._records_blocks = recorded is not None
        self._venv = folder / "venv"
        self._report = folder / "report.jsonl"
        self._selection = folder / "selection.json"
        self._temporary = folder / "tmp"
        folder.mkdir(mode=0o755)
        shutil.copytree(ROOT, self.tree, ignore=_LEFT_OUT, symlinks=True)
        # A recorded history differs after any change, also after a right one.
        (self.tree / RECORDED_HISTORIES).write_text("{}", encoding="utf-8")
        self._temporary.mkdir()
        self._temporary.chmod(0o1777)
        self._packages = _link_environment(self._venv, self.tree / "src")
        self._python = self._venv / "bin" / "python"
        self._guard: subprocess.Popen[str] | None = None
        self._starting = threading.Lock()
        self._is_stopped = False
        if recorded is not None:
            self._prepare_recording(recorded, folder / "ran")
        self._check_import()

    def _prepare_recording(self, index: SourceIndex, memory: Path) -> None:
        """Make every process of this copy write the blocks that it runs into one memory."""
        memory.write_bytes(bytes(len(index.blocks)))
        memory.chmod(0o666)
        program = _OPENS_MEMORY.format(memory=str(memory))
        (self._packages / "ran_blocks.py").write_text(program, encoding="utf-8")
        index.write_instrumented(self.tree)

    def _check_import(self) -> None:
        """Check what a program imports that gets no help from its surroundings."""
        program = "import jobsync; print(jobsync.__file__)"
        command = [str(self._python), "-c", program]
        found = subprocess.run(
            command, env={}, cwd="/", capture_output=True, text=True, check=True
        ).stdout.strip()
        self._check_source(found)

    def _check_source(self, found: str) -> None:
        if not Path(found).is_relative_to(self.tree):
            raise WrongSource(f"jobsync must be imported from {self.tree} (got {found})")

    @contextlib.contextmanager
    def with_mutant(self, mutant: SourceMutant) -> Iterator[None]:
        """Put a mutant into the copy for a while."""
        path = self.tree / mutant.file
        original = path.read_text(encoding="utf-8")
        try:
            _replace(path, mutant.mutate(original))
            yield
        finally:
            _replace(path, original)

    def run(self, tests: Sequence[str], limit: float) -> PytestRun:
        """Run tests in this order until one fails, for a number of seconds at most.

        Args:
            tests: their ids, or files. Ids that do not exist are left out.
            limit: the seconds.

        Raises:
            WorkspaceStopped: `stop` was called before.
            WrongSource: the tests have imported another source than the copy's.
        """
        self._report.write_text("", encoding="utf-8")
        self._selection.write_text(json.dumps(tests), encoding="utf-8")
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        started = time.monotonic()
        with self._start(tests, limit) as guard:
            output, _ = guard.communicate()
        seconds = time.monotonic() - started
        facts = [json.loads(line) for line in self._report.read_text(encoding="utf-8").splitlines()]
        for found in _collect(facts, "source"):
            self._check_source(found)
        return PytestRun(
            exit_code=guard.returncode,
            seconds=seconds,
            failed=_collect(facts, "failed"),
            not_collected=_collect(facts, "not_collected"),
            started=_collect(facts, "started"),
            recorded=tuple(fact for fact in facts if "ran" in fact),
            output=output,
        )

    def _start(self, tests: Sequence[str], limit: float) -> subprocess.Popen[str]:
        guard = self.tree / "tests" / "mutants" / "guarded_pytest.py"
        files = map(str, (self._python, guard, self._report))
        command = [*files, str(limit), *self._arguments(tests)]
        with self._starting:
            if self._is_stopped:
                raise WorkspaceStopped
            self._guard = subprocess.Popen(
                command,
                cwd=self.tree,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # an interrupt at the terminal is for the runner
            )
            return self._guard

    def stop(self) -> None:
        """End the current run with its processes, and start no other; for another thread."""
        with self._starting:
            self._is_stopped = True
            if self._guard is not None:
                self._guard.send_signal(signal.SIGTERM)

    def _arguments(self, tests: Sequence[str]) -> Sequence[str]:
        return [
            *dict.fromkeys(test.partition("::")[0] for test in tests),
            "--record-blocks" if self._records_blocks else "-x",
            "-q",
            "--tb=short",
            "--color=no",
            "--hypothesis-seed=0",
            f"--timeout={SECONDS_PER_TEST}",
            f"--basetemp={self._temporary / 'pytest'}",
            "-p",
            "no:cacheprovider",
        ]

    def _environment(self) -> dict[str, str]:
        without = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS"}
        kept = {name: value for name, value in os.environ.items() if name not in without}
        path = f"{self._venv / 'bin'}{os.pathsep}{kept.get('PATH', os.defpath)}"
        venv, temporary = str(self._venv), str(self._temporary)
        return {**kept, "PATH": path, "VIRTUAL_ENV": venv, "TMPDIR": temporary}


def _collect(facts: Sequence[dict[str, Any]], kind: str) -> tuple[str, ...]:
    return tuple(fact[kind] for fact in facts if kind in fact)


def _replace(path: Path, text: str) -> None:
    """Write a source file, and remove its bytecode.

    Bytecode counts as current if size and second of the source agree: two mutants may share both.
    """
    path.write_text(text, encoding="utf-8")
    if path.suffix == ".py":
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def _link_environment(venv: Path, source: Path) -> Path:
    """Create an environment like the current one, whose jobsync is in another folder.

    Returns:
        its site-packages.
    """
    original = Path(sys.prefix)
    if sys.prefix == sys.base_prefix:
        raise WrongSource(f"python must be that of an environment (got {sys.prefix}). Use make.")
    packages = Path(sysconfig.get_path("purelib"))
    ours = venv / packages.relative_to(original)
    ours.mkdir(parents=True)
    (venv / "bin").mkdir()
    shutil.copy(original / "pyvenv.cfg", venv)
    installed = []
    for entry in packages.iterdir():
        if entry.suffix == ".pth" and entry.read_text(encoding="utf-8").strip() == str(
            ROOT / "src"
        ):
            installed.append(entry)
            (ours / entry.name).write_text(str(source), encoding="utf-8")
        else:
            (ours / entry.name).symlink_to(entry)
    if not installed:
        raise WrongSource(f"jobsync must be installed in place from {ROOT}. Run make setup.")
    for entry in (original / "bin").iterdir():
        _link_program(entry, venv / "bin" / entry.name, original, venv)
    for entry in original.iterdir():
        if not (venv / entry.name).exists():
            # On some systems lib64 is a link to lib: then it links to ours.
            (venv / entry.name).symlink_to(entry.readlink() if entry.is_symlink() else entry)
    return ours


def _link_program(entry: Path, ours: Path, original: Path, venv: Path) -> None:
    """Link a program; a script gets the interpreter of the new environment."""
    shebang = b"#!" + os.fsencode(original / "bin" / "python")
    if not entry.is_symlink() and entry.is_file():
        with entry.open("rb") as file:
            if file.read(len(shebang)) == shebang:
                rest = file.read()
                ours.write_bytes(b"#!" + os.fsencode(venv / "bin" / "python") + rest)
                ours.chmod(0o755)
                return
    # The interpreter itself is found where it is installed, and its environment where it is called.
    ours.symlink_to(entry.resolve() if entry.is_symlink() else entry)
