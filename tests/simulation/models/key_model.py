"""Model of a key in pages: one message holds it at a time, and no dropped page comes back.

Two producers push the same key, again and again. A push reads the record of the key and the page
that it names, writes the record, then creates the page; it may stop between any two steps, for
longer than an hour. A request may be applied without a reply, be lost, or land later, within the
hour. A worker completes messages. A page that is done is dropped an hour later, after the record
was changed that names it.

- No message is added while another one with the key is pending.
- A page that was dropped never comes back.
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec
from explorer import Model, Step

__all__ = ["MUTATIONS", "WORLDS", "KeyModel", "Scene"]

Phase: TypeAlias = Literal[
    "idle", "read", "missed", "sure", "free", "taking", "taken", "creating", "barring"
]
Page: TypeAlias = Literal["absent", "pending", "done", "old", "barred", "dropped", "back"]
NOWHERE = -1
_REQUESTS = ("taking", "creating", "barring")

replace = msgspec.structs.replace


class Scene(msgspec.Struct, frozen=True):
    """The limits of a model."""

    pages: int
    """How often the key is taken."""
    hours: int
    misfits: bool = False
    """Whether the messages of one push do not fit in the page of the other."""


class Request(msgspec.Struct, frozen=True, gc=False, order=True):
    """A write that nobody waits for any more."""

    kind: Phase
    place: int
    base: int = 0


class Producer(msgspec.Struct, frozen=True, gc=False):
    """One push, and how far it is."""

    phase: Phase = "idle"
    version: int = 0
    """Of the record that it has read."""
    place: int = NOWHERE
    is_late: bool = False
    """Whether it has slept since it has read or written the record."""


class State(msgspec.Struct, frozen=True, gc=False):
    """The record of the key, the pages, and the producers."""

    pages: tuple[Page, ...]
    producers: tuple[Producer, ...] = (Producer(), Producer())
    version: int = 0
    place: int = NOWHERE
    taken: int = 0
    """How many places were chosen."""
    late: tuple[Request, ...] = ()
    hours: int = 0
    has_two: bool = False
    """Whether a message was added while another one was pending."""


class KeyModel(Model[State]):
    """Two producers, one key, and those who complete and drop."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def starts(self) -> Iterator[State]:
        absent: Page = "absent"
        yield State((absent,) * self._scene.pages)

    def steps(self, state: State) -> Iterator[Step[State]]:
        for number, producer in enumerate(state.producers):
            for what, after in self._push(state, producer):
                yield Step(f"producer {number} {what}", _be(*after, number))
            if producer.phase in _REQUESTS:
                request = Request(producer.phase, producer.place, producer.version)
                given_up = replace(state, late=tuple(sorted({*state.late, request})))
                what = f"producer {number} has no answer"
                yield Step(what, _be(given_up, Producer(), number), is_fault=True)
        for request in state.late:
            rest = tuple(each for each in state.late if each != request)
            yield Step(
                f"{request.kind} lands late", self._apply(replace(state, late=rest), request)
            )
        for place, page in enumerate(state.pages):
            if page == "pending":
                yield Step(f"{place} is completed", _set(state, place, "done"))
            if page == "old" and self.may_drop(state, place):
                yield Step(f"{place} is dropped", _set(state, place, "dropped"))
            if page == "old" and state.place == place:
                changed = replace(state, place=NOWHERE, version=state.version + 1)
                yield Step(f"the record no longer names {place}", changed)
        is_quiet = all(each.phase not in _REQUESTS for each in state.producers)
        if state.hours < self._scene.hours and is_quiet:
            yield Step("an hour passes", self._pass_hour(state))

    def _pass_hour(self, state: State) -> State:
        pages = tuple("old" if page in {"done", "barred"} else page for page in state.pages)
        sleepers = tuple(
            each if each.phase == "idle" else replace(each, is_late=True)
            for each in state.producers
        )
        return replace(state, pages=pages, producers=sleepers, late=(), hours=state.hours + 1)

    def _push(
        self, state: State, producer: Producer
    ) -> Iterator[tuple[str, tuple[State, Producer]]]:
        """Yield what a producer does next, with the state and the producer after it."""
        read = replace(producer, version=state.version, place=state.place, is_late=False)
        match producer.phase:
            case "idle":
                phase: Phase = "free" if state.place == NOWHERE else "read"
                yield "reads the record", (state, replace(read, phase=phase))
            case "read":
                yield "reads the page", (state, self._look(state, producer))
            case "missed":
                is_same = state.version == producer.version
                sure = replace(producer, phase="sure") if is_same else Producer()
                yield "reads the record again", (state, sure)
            case "sure":
                phase = "barring" if self._scene.misfits else "creating"
                yield "goes on", (state, self._begin(producer, phase))
            case "free" if state.taken < self._scene.pages:
                chosen = replace(producer, phase="taking", place=state.taken, is_late=False)
                yield "takes the key", (replace(state, taken=state.taken + 1), chosen)
            case "taken":
                yield "goes on", (state, self._begin(producer, "creating"))
            case "taking" | "creating" | "barring":
                request = Request(producer.phase, producer.place, producer.version)
                after = self._apply(state, request)
                is_done = after != state
                yield "is answered", (after, self._hear(producer, is_done=is_done))

    def _look(self, state: State, producer: Producer) -> Producer:
        match state.pages[producer.place]:
            case "pending" | "back":
                # It is told which message holds the key.
                return Producer()
            case "absent" | "dropped":
                return replace(producer, phase=self.find_phase_without_page())
            case _:
                return replace(producer, phase="free")

    def _begin(self, producer: Producer, phase: Phase) -> Producer:
        """Send a request, or begin again if it is too late."""
        if producer.is_late and self.knows_deadline():
            return Producer()
        return replace(producer, phase=phase)

    def _hear(self, producer: Producer, *, is_done: bool) -> Producer:
        match producer.phase:
            case "taking" if is_done:
                return replace(producer, phase="taken")
            case "barring" if is_done:
                return replace(producer, phase="free")
            case _:
                return Producer()

    def _apply(self, state: State, request: Request) -> State:
        if request.kind == "taking":
            if state.version != request.base:
                return state
            return replace(state, version=state.version + 1, place=request.place)
        page = state.pages[request.place]
        if page == "dropped":
            return _set(state, request.place, "back")
        if page != "absent":
            return state
        if request.kind == "barring":
            return _set(state, request.place, "barred")
        has_two = "pending" in state.pages
        return replace(_set(state, request.place, "pending"), has_two=has_two)

    def find_violation(self, state: State) -> str | None:
        if state.has_two:
            return "a message was added while another one was pending"
        return "a page that was dropped is there again" if "back" in state.pages else None

    # Overridden by mutations.

    def may_drop(self, state: State, place: int) -> bool:
        return state.place != place

    def knows_deadline(self) -> bool:
        return True

    def find_phase_without_page(self) -> Phase:
        return "missed"


def _be(state: State, producer: Producer, number: int) -> State:
    """Return a state with another producer at a number."""
    producers = list(state.producers)
    producers[number] = producer
    return replace(state, producers=tuple(producers))


def _set(state: State, place: int, page: Page) -> State:
    """Return a state with another page at a place."""
    pages = list(state.pages)
    pages[place] = page
    return replace(state, pages=tuple(pages))


class TakesWithoutThePage(KeyModel):
    """A push that finds no page takes the key: the other one may still create its page."""

    def find_phase_without_page(self) -> Phase:
        return "free"


class DropsWhatIsNamed(KeyModel):
    """A page is dropped while the record names it: the next push creates it again."""

    def may_drop(self, state: State, place: int) -> bool:
        return True


class CreatesAtAnyTime(KeyModel):
    """A push that slept for an hour goes on: its page may have been there, and dropped."""

    def knows_deadline(self) -> bool:
        return False


class LooksOnce(KeyModel):
    """A push does not look at the record again: its page may have been dropped meanwhile."""

    def find_phase_without_page(self) -> Phase:
        return "sure"


WORLDS = {
    "a key that is used again": Scene(pages=2, hours=2),
    "messages that do not fit": Scene(pages=2, hours=2, misfits=True),
}

MUTATIONS: dict[type[KeyModel], str] = {
    TakesWithoutThePage: "a key that is used again",
    DropsWhatIsNamed: "a key that is used again",
    CreatesAtAnyTime: "messages that do not fit",
    LooksOnce: "a key that is used again",
}
