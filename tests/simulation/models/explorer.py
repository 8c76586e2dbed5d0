"""Visits every state that a small protocol can get into, nearest first.

A violation comes with a shortest way into it, because states are visited in the order of
their distance. Nothing is sampled: a model that holds, holds in all its states, and one
that is too large for that is an error.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

import msgspec

__all__ = ["Model", "Report", "Step", "TooLarge", "explore"]

State = TypeVar("State", bound=Hashable)


class Step(NamedTuple, Generic[State]):
    """One thing that may happen next."""

    what: str
    """For people: who does what."""
    after: State
    misfortune: bool = False
    """Whether this is a fault. What must be reached must be reached without another one."""


class Model(ABC, Generic[State]):
    """A protocol and the world that it lives in, as states and steps."""

    @abstractmethod
    def starts(self) -> Iterable[State]:
        """Give the states in which it may begin."""

    @abstractmethod
    def steps(self, state: State) -> Iterable[Step[State]]:
        """Give everything that may happen next."""

    @abstractmethod
    def wrong(self, state: State) -> str | None:
        """Say what must never be, if this state shows it."""

    def reached(self, state: State) -> bool:
        """Say whether this is one of the states that must remain within reach of all others.

        A model in which nothing must be reached leaves this out.
        """
        raise NotImplementedError


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    states: int
    steps: int
    depth: int
    """How far the furthest state is from a start."""
    violation: str | None = None
    trace: tuple[str, ...] = ()
    """A shortest way into the violation."""

    def __str__(self) -> str:
        size = f"{self.states:,} states, {self.steps:,} steps, {self.depth} deep"
        if self.violation is None:
            return size
        way = "\n".join(f"{n:4}. {what}" for n, what in enumerate(self.trace, 1))
        return f"{size}: {self.violation}\n{way}"


class TooLarge(Exception):
    """The model has more states than were allowed for."""


def explore(model: Model[State], *, most: int = 1_000_000) -> Report:
    """Visit all states; stop at the first that is wrong, or that can get nowhere.

    Raises:
        TooLarge: there are more than `most`; nothing is concluded from a part.
    """
    return _Exploration(model, most).run()


class _Exploration(Generic[State]):
    """One visit to all states. States are numbered in the order of their discovery."""

    def __init__(self, model: Model[State], most: int) -> None:
        self._model = model
        self._most = most
        self._lively = type(model).reached is not Model.reached
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._origins: list[tuple[int, str]] = []
        self._depths: list[int] = []
        self._lucky: list[tuple[int, int]] = []
        self._steps = 0

    def run(self) -> Report:
        for state in self._model.starts():
            self._discover(state, -1, "")
        visited = 0
        while visited < len(self._states):
            wrong = self._model.wrong(self._states[visited])
            if wrong is not None:
                return self._report(wrong, visited)
            self._visit(visited)
            visited += 1
        stuck = next(self._stuck(), None) if self._lively else None
        return self._report() if stuck is None else self._report("there is no way on", stuck)

    def _visit(self, here: int) -> None:
        for what, after, misfortune in self._model.steps(self._states[here]):
            self._steps += 1
            there = self._numbers.get(after)
            if there is None:
                there = self._discover(after, here, what)
            if self._lively and not misfortune:
                self._lucky.append((there, here))

    def _discover(self, state: State, origin: int, what: str) -> int:
        number = self._numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            if number == self._most:
                raise TooLarge(f"more than {self._most:,} states")
            self._states.append(state)
            self._origins.append((origin, what))
            self._depths.append(0 if origin < 0 else self._depths[origin] + 1)
        return number

    def _stuck(self) -> Iterator[int]:
        """Give the states from which no lucky step leads on, nearest first."""
        back: list[list[int]] = [[] for _ in self._states]
        for there, here in self._lucky:
            back[there].append(here)
        saved = [self._model.reached(state) for state in self._states]
        queue = [number for number, good in enumerate(saved) if good]
        while queue:
            for origin in back[queue.pop()]:
                if not saved[origin]:
                    saved[origin] = True
                    queue.append(origin)
        return (number for number, good in enumerate(saved) if not good)

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
