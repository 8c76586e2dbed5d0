"""Model of the bell: no worker sleeps while it does not know of a page, unless a ring was lost.

A producer creates pages at any time. After each it rings, unless its last ring was sent less than
`RING` ticks before. A ring arrives some time later. A worker reads the bell at any time; if the
number is new it lists the pages, and once more `FOLLOW_UP` ticks later.

- If the worker has heard the last ring, and has listed for the last time, it knows all pages.
"""

from collections.abc import Iterator

import msgspec
from explorer import Model, Step

__all__ = ["MUTATIONS", "WORLDS", "BellModel", "Scene"]

RING = 2
"""Ticks between two rings of a producer."""
FOLLOW_UP = 3
"""Ticks from a reading that shows a ring to the second listing."""

replace = msgspec.structs.replace


class Scene(msgspec.Struct, frozen=True):
    """The limits of a model."""

    pages: int
    ticks: int


class State(msgspec.Struct, frozen=True, gc=False):
    """The pages, the bell, and a worker."""

    now: int = 0
    pages: int = 0
    must_ring: bool = False
    """Whether a page was created whose producer has not decided about the ring yet."""
    rung_at: int = -9
    """When the last ring was sent."""
    sent: int = 0
    """How many rings were sent."""
    number: int = 0
    """The number of the bell: rings that arrived."""
    heard: int = 0
    known: int = 0
    """How many pages the worker has seen."""
    again_at: int = -1
    """When the worker lists once more; -1 for never."""


class BellModel(Model[State]):
    """One producer and one worker."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def starts(self) -> Iterator[State]:
        yield State()

    def steps(self, state: State) -> Iterator[Step[State]]:
        if state.now < self._scene.ticks and state.now != state.again_at:
            yield Step("time passes", replace(state, now=state.now + 1))
        if state.must_ring:
            yield self._ring(state)
        elif state.pages < self._scene.pages:
            created = replace(state, pages=state.pages + 1, must_ring=True)
            yield Step("the producer creates a page", created)
        if state.number < state.sent:
            yield Step("a ring arrives", replace(state, number=state.number + 1))
        if state.heard < state.number:
            yield Step("the worker hears the bell, and lists", self.hear(state))
        if state.now == state.again_at:
            listed = replace(state, known=state.pages, again_at=-1)
            yield Step("the worker lists once more", listed)

    def _ring(self, state: State) -> Step[State]:
        if state.now - state.rung_at < self.find_interval():
            return Step("the producer rang before", replace(state, must_ring=False))
        rung = replace(state, must_ring=False, rung_at=state.now, sent=state.sent + 1)
        return Step("the producer rings", rung)

    def find_violation(self, state: State) -> str | None:
        is_heard = state.heard == state.sent and not state.must_ring
        if is_heard and state.again_at < 0 and state.known < state.pages:
            return "the worker sleeps, and does not know of a page"
        return None

    # Overridden by mutations.

    def hear(self, state: State) -> State:
        return replace(state, heard=state.number, known=state.pages, again_at=state.now + FOLLOW_UP)

    def find_interval(self) -> int:
        return RING


class ListOnce(BellModel):
    """The worker lists when it hears the bell, and not again: a silent push stays unseen."""

    def hear(self, state: State) -> State:
        return replace(state, heard=state.number, known=state.pages)


class HearBeforeListing(BellModel):
    """The worker lists first and takes the number that it reads afterwards for what it has seen."""

    def hear(self, state: State) -> State:
        return replace(state, heard=state.number, again_at=-1)


class RingSeldom(BellModel):
    """The producer is silent for longer than the worker waits for the second listing."""

    def find_interval(self) -> int:
        return FOLLOW_UP + 2


WORLDS = {
    "three pages": Scene(pages=3, ticks=8),
}

MUTATIONS: dict[type[BellModel], str] = {
    ListOnce: "three pages",
    HearBeforeListing: "three pages",
    RingSeldom: "three pages",
}
