"""Visit every state that a small protocol can reach, breadth first.

A violation comes with a shortest trace, because states are visited by distance. Nothing is sampled:
a model holds in all its states, and one that is too large for that is an error.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

import msgspec

__all__ = ["Model", "Report", "Step", "TooLarge", "explore"]

State = TypeVar("State", bound=Hashable)


class Step(NamedTuple, Generic[State]):
    """A possible next step."""

    what: str
    """What happens, for people to read."""
    after: State
    is_fault: bool = False
    """Whether this is a fault. Required states must be reachable without further faults."""


class Model(ABC, Generic[State]):
    """A protocol and its environment, as states and steps."""

    @abstractmethod
    def starts(self) -> Iterable[State]:
        """Return the initial states."""

    @abstractmethod
    def steps(self, state: State) -> Iterable[Step[State]]:
        """Return all possible next steps."""

    @abstractmethod
    def find_violation(self, state: State) -> str | None:
        """Return the violation in a state, if there is one."""

    def is_goal(self, state: State) -> bool:
        """Whether a state is one that must stay reachable from all others.

        A model without such states does not override this.
        """
        raise NotImplementedError


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an exploration."""

    states: int
    steps: int
    depth: int
    """The distance of the furthest state from a start."""
    violation: str | None = None
    trace: tuple[str, ...] = ()
    """A shortest trace to the violation."""

    def __str__(self) -> str:
        size = f"{self.states:,} states, {self.steps:,} steps, {self.depth} deep"
        if self.violation is None:
            return size
        trace = "\n".join(f"{n:4}. {what}" for n, what in enumerate(self.trace, 1))
        return f"{size}: {self.violation}\n{trace}"


class TooLarge(Exception):
    """The model has more states than allowed."""


def explore(model: Model[State], *, most: int = 1_000_000) -> Report:
    """Visit all states; stop at the first violation or dead end.

    Raises:
        TooLarge: there are more than `most`; a partial exploration proves nothing.
    """
    return _Exploration(model, most).run()


class _Exploration(Generic[State]):
    """One exploration. States are numbered in the order of their discovery."""

    def __init__(self, model: Model[State], most: int) -> None:
        self._model = model
        self._most = most
        self._has_goals = type(model).is_goal is not Model.is_goal
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._origins: list[tuple[int, str]] = []
        self._depths: list[int] = []
        self._good_steps: list[tuple[int, int]] = []
        self._steps = 0

    def run(self) -> Report:
        for state in self._model.starts():
            self._discover(state, -1, "")
        visited = 0
        while visited < len(self._states):
            violation = self._model.find_violation(self._states[visited])
            if violation is not None:
                return self._report(violation, visited)
            self._visit(visited)
            visited += 1
        dead_end = next(self._find_dead_ends(), None) if self._has_goals else None
        return self._report() if dead_end is None else self._report("dead end", dead_end)

    def _visit(self, here: int) -> None:
        for what, after, is_fault in self._model.steps(self._states[here]):
            self._steps += 1
            there = self._numbers.get(after)
            if there is None:
                there = self._discover(after, here, what)
            if self._has_goals and not is_fault:
                self._good_steps.append((there, here))

    def _discover(self, state: State, origin: int, what: str) -> int:
        number = self._numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            if number == self._most:
                raise TooLarge(f"more than {self._most:,} states")
            self._states.append(state)
            self._origins.append((origin, what))
            self._depths.append(0 if origin < 0 else self._depths[origin] + 1)
        return number

    def _find_dead_ends(self) -> Iterator[int]:
        """Return the states from which no goal is reachable without a fault, nearest first."""
        back: list[list[int]] = [[] for _ in self._states]
        for there, here in self._good_steps:
            back[there].append(here)
        reaches_goal = [self._model.is_goal(state) for state in self._states]
        queue = [number for number, good in enumerate(reaches_goal) if good]
        while queue:
            for origin in back[queue.pop()]:
                if not reaches_goal[origin]:
                    reaches_goal[origin] = True
                    queue.append(origin)
        return (number for number, good in enumerate(reaches_goal) if not good)

    def _report(self, violation: str | None = None, number: int = 0) -> Report:
        trace = []
        while violation is not None and self._origins[number][0] >= 0:
            number, what = self._origins[number]
            trace.append(what)
        return Report(
            states=len(self._states),
            steps=self._steps,
            depth=self._depths[-1],
            violation=violation,
            trace=tuple(reversed(trace)),
        )
