"""A mutant is caught by a test that fails because of it, and by no other."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import cast

import pytest
from block_recordings import RecordedTest
from mutant_trials import NOT_EXECUTED, Judge, Trial
from mutant_workspace import PytestRun, Workspace
from source_mutants import SourceMutant

MUTANT = SourceMutant(name="a-name", breaks="A promise.", file="a.py", old="a", new="b")


class ScriptedWorkspace:
    """Runs no tests: a script says which fail.

    Args:
        with_it: whether each test fails with the mutant, run by run; the last is repeated.
        without: the same without the mutant.
    """

    def __init__(
        self,
        with_it: Mapping[str, Sequence[bool]],
        without: Mapping[str, Sequence[bool]] = MappingProxyType({}),
    ) -> None:
        self._scripts = {True: _copy(with_it), False: _copy(without)}
        self._is_mutated = False
        self.runs: list[list[str]] = []

    @contextmanager
    def with_mutant(self, _: SourceMutant) -> Iterator[None]:
        self._is_mutated = True
        yield
        self._is_mutated = False

    def run(self, tests: Sequence[str], _: float) -> PytestRun:
        self.runs.append(list(tests))
        script = self._scripts[self._is_mutated]
        for number, test in enumerate(tests, start=1):
            fails = script.get(test, [False])
            if fails.pop(0) if fails[1:] else fails[0]:
                started = tuple(tests[:number])
                return PytestRun(exit_code=1, seconds=0, failed=(test,), started=started)
        return PytestRun(exit_code=0, seconds=0, started=tuple(tests))


def _copy(script: Mapping[str, Sequence[bool]]) -> dict[str, list[bool]]:
    return {test: list(fails) for test, fails in script.items()}


def _judge(workspace: ScriptedWorkspace, *, before: str = "", **seconds: float) -> Trial:
    tests = [RecordedTest(id=i, seconds=s, ran=1, blocks=1) for i, s in seconds.items()]
    trial = Trial(group="queue", mutant=MUTANT, tests=tests)
    trial.begin_with(before)
    Judge(100).judge(cast("Workspace", workspace), trial)
    return trial


def test_a_test_that_fails_twice_and_passes_without_the_mutant_catches_it() -> None:
    """The tests after it do not run."""
    workspace = ScriptedWorkspace({"b": [True]})
    trial = _judge(workspace, a=1, b=1, c=1, d=50)
    assert (trial.verdict, trial.by) == ("caught", "b")
    assert workspace.runs == [["a", "b", "c"], ["b"], ["b"]]


@pytest.mark.parametrize("before", ["c", "c (did not end)"])
def test_a_test_that_caught_it_before_runs_alone_and_once(before: str) -> None:
    """It has failed twice then; it must pass without the mutant all the same."""
    workspace = ScriptedWorkspace({"c": [True]})
    trial = _judge(workspace, before=before, a=1, b=1, c=1)
    assert (trial.verdict, trial.by) == ("caught", "c")
    assert workspace.runs == [["c"], ["c"]]


@pytest.mark.parametrize(
    ("with_it", "without"), [([], [False]), ([True], [True])], ids=["passes", "always fails"]
)
def test_other_tests_run_if_the_one_that_caught_it_before_does_not(
    with_it: list[bool], without: list[bool]
) -> None:
    """It may have changed since, or have begun to fail by itself."""
    workspace = ScriptedWorkspace({"c": with_it or [False], "b": [True]}, {"c": without})
    trial = _judge(workspace, before="c", a=1, b=1, c=1)
    assert (trial.verdict, trial.by) == ("caught", "b")
    assert ["a", "b"] in workspace.runs


@pytest.mark.parametrize(
    ("with_it", "without"), [([True, False], [False]), ([True], [True])], ids=["once", "always"]
)
def test_a_test_that_fails_by_itself_catches_nothing(
    with_it: list[bool], without: list[bool]
) -> None:
    """The tests after it run as well."""
    workspace = ScriptedWorkspace({"a": with_it, "c": [True]}, {"a": without})
    trial = _judge(workspace, a=1, b=1, c=1)
    assert (trial.verdict, trial.by, trial.unreliable) == ("caught", "c", ["a"])
    assert ["b", "c"] in workspace.runs


def test_a_mutant_that_no_test_notices_has_survived() -> None:
    """Tests beyond the time for one mutant do not run, and are counted."""
    workspace = ScriptedWorkspace({"c": [True]})
    trial = _judge(workspace, a=1, b=50, c=60)
    assert (trial.verdict, trial.by) == ("survived", "2 of 3 tests pass")
    assert workspace.runs == [["a"], ["b"]]


def test_a_mutant_that_no_test_executes_has_survived_at_once() -> None:
    """Nothing runs, and the reason is given."""
    workspace = ScriptedWorkspace({})
    trial = _judge(workspace)
    assert (trial.verdict, trial.by, workspace.runs) == ("survived", NOT_EXECUTED, [])
