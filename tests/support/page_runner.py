"""Run Python blocks of pages, each in a process of its own.

The processes are forked from one that has imported jobsync: a block behaves as `python -W error -c`
does, without the quarter of a second of CPU that the imports take. `examples/` and the tests that
run `python -m jobsync` start from nothing.
"""

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

__all__ = ["PageRunner"]

_SECONDS = 60
"""A block that takes longer has failed."""


class PageRunner:
    """A process that runs blocks; ends with its `with` block."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=_SECONDS)

    def run(self, runs: Sequence[tuple[Path, str]]) -> list[tuple[int, str]]:
        """Run blocks at the same time, each in a folder; return exit codes and what was printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = json.dumps([(str(folder), text) for folder, text in runs])
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        answer: list[Any] = json.loads(self._process.stdout.readline())
        return [(code, printed) for code, printed in answer]


def _serve() -> str:
    """Fork a child for each block of a request; return in the children only, with the block."""
    for request in sys.stdin:
        children = []
        for number, (folder, text) in enumerate(json.loads(request)):
            # Beside the folder: what a block leaves in it is counted.
            output = Path(folder).parent / f"{Path(folder).name}-{number}.txt"
            child = os.fork()
            if not child:
                return _set_up_child(folder, output, text)
            children.append((child, output))
        answer = [
            (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output.read_text())
            for child, output in children
        ]
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()
    return ""


def _set_up_child(folder: str, output: Path, text: str) -> str:
    signal.alarm(_SECONDS)
    os.chdir(folder)
    with output.open("w") as file, Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return text


def _main() -> None:
    import jobsync  # noqa: PLC0415 - here, not in the tests' process
    import jobsync.sync  # noqa: PLC0415

    # It is lazy: what blocks use is loaded once, before the first fork.
    for name in jobsync.__all__:
        getattr(jobsync, name)
    text = _serve()
    if text:
        # As if it were the program: a block's classes and functions are found by their module.
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(text, "<block>", "exec"), main.__dict__)


if __name__ == "__main__":
    _main()
