"""What tests say about a mutant: caught by a test that fails because of it, or survived."""

import time
from collections.abc import Iterable

import msgspec
from block_recordings import RecordedTest, split_by_time
from mutant_workspace import PytestRun, Verdict, Workspace
from source_mutants import SourceMutant

__all__ = ["NOT_EXECUTED", "Judge", "Trial"]

NOT_EXECUTED = "no test executes it"


class Trial(msgspec.Struct, kw_only=True, eq=False):
    """A mutant, and what the tests say about it.

    Attributes:
        group: its package.
        mutant: the mutant.
        tests: those that run the mutated code, in the order in which they run.
        verdict: what they say.
        by: the test that caught it, or what is broken, or how many tests pass.
        seconds: how long its tests took.
        output: what pytest printed when a test failed.
        unreliable: tests that failed with it once, but not again, or without it too.
        caught_before: the test that caught it in an earlier run, if that is known.
    """

    group: str
    mutant: SourceMutant
    tests: list[RecordedTest] = []
    verdict: Verdict = "survived"
    by: str = ""
    seconds: float = 0.0
    output: str = ""
    unreliable: list[str] = []
    caught_before: str = ""

    def begin_with(self, by: str) -> None:
        """Run the test first that caught the mutant in an earlier run; `by` is what that said."""
        for test in self.tests:
            if by == test.id or by.startswith(f"{test.id} ("):
                self.caught_before = test.id

    def split(self, seconds: float) -> list[list[RecordedTest]]:
        """Return the tests in batches, until the time is used up; one that caught it is alone."""
        known = [test for test in self.tests if test.id == self.caught_before]
        others = [test for test in self.tests if test.id != self.caught_before]
        return [*([known] if known else []), *split_by_time(others, seconds)]

    @property
    def title(self) -> str:
        """Return the package and the name."""
        return f"{self.group}, {self.mutant.name}"


class Judge:
    """Runs the tests of mutants until one fails that passes without the mutant.

    Args:
        seconds: of tests for one mutant, at most.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._passes: dict[str, bool] = {}

    def judge(self, workspace: Workspace, trial: Trial) -> None:
        """Fill in what the tests say about a mutant."""
        started = time.monotonic()
        batches = trial.split(self._seconds)
        count = sum(map(len, batches))
        trial.by = f"{count} of {len(trial.tests)} tests pass" if batches else NOT_EXECUTED
        for batch in batches:
            self._run(workspace, trial, batch)
            if trial.verdict != "survived":
                break
        trial.seconds = time.monotonic() - started

    def _run(self, workspace: Workspace, trial: Trial, batch: list[RecordedTest]) -> None:
        left = [test for test in batch if self._passes.get(test.id, True)]
        while left:
            done = self._run_mutated(workspace, trial, left)
            verdict, by = done.judge()
            if verdict == "survived":
                return
            if verdict == "caught":
                place = [test.id for test in left].index(done.started[-1])
                test, left = left[place], left[place + 1 :]
                if not self._is_reliable(workspace, trial, test):
                    trial.unreliable.append(test.id)
                    continue
            trial.verdict, trial.by, trial.output = verdict, by, done.output
            return

    def _is_reliable(self, workspace: Workspace, trial: Trial, test: RecordedTest) -> bool:
        """Whether a test fails again with a mutant, alone or in another run, and passes without."""
        is_known = test.id == trial.caught_before
        if not is_known and self._run_mutated(workspace, trial, [test]).exit_code == 0:
            return False
        if test.id not in self._passes:
            done = workspace.run([test.id], _find_limit([test]))
            self._passes[test.id] = done.exit_code == 0
        return self._passes[test.id]

    def _run_mutated(
        self, workspace: Workspace, trial: Trial, tests: list[RecordedTest]
    ) -> PytestRun:
        with workspace.with_mutant(trial.mutant):
            return workspace.run([test.id for test in tests], _find_limit(tests))


def _find_limit(tests: Iterable[RecordedTest]) -> float:
    """Return the seconds after which tests count as failed."""
    return 30 + 3 * sum(test.seconds for test in tests)
