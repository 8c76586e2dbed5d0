"""Model of settling on a bad network: every outcome that a writer gets is true.

Two writers change one record through requests that may be applied without a reply, be lost, or be
delivered repeatedly at any later time. Other writers may write on top, and a tombstone is removed
at a moment when nothing can be under way any more.

A write reported as *applied* is in the history exactly once; one reported as *conflicted* never is.
*Unknown* is always allowed, but *forgotten* only if more writes came since than a record remembers.

The records are the library's own, with trails of their real length: `build_records` creates
them and `judge_write` judges them.
"""

from collections.abc import Iterator
from functools import cache
from typing import Literal, TypeAlias

import msgspec
from chance import FakeClock, SeededRandomness
from explorer import Model, Step

from jobsync.components import NONCE_LENGTH, Ids
from jobsync.stores.contract import TRAIL_LENGTH, Change, Delete, Put, Record
from jobsync.stores.record_codec import build_records
from jobsync.stores.settling import WriteFate, judge_write

__all__ = ["MUTATIONS", "WORLDS", "Scene", "SettlingModel"]

TaskKind: TypeAlias = Literal["create", "replace", "delete"]
Result: TypeAlias = Literal[
    "applied", "conflicted", "forgotten", "misjudged", "unknown", "needless"
]

KEY = "n"

replace = msgspec.structs.replace


def readable_nonce(task: str) -> str:
    """Return a nonce that people can read."""
    return task.ljust(NONCE_LENGTH, "-")


@cache
def apply(change: Change) -> Record:
    """Return the record after a change."""
    return build_records([change], Ids(FakeClock(), SeededRandomness(1)))[0][0]


@cache
def write_on_top(record: Record | None, others: int) -> Record | None:
    """Return the record after a number of other writes."""
    for number in range(others):
        record = apply(Put(KEY, "other", record, nonce=readable_nonce(f"X{number}")))
    return record


PRESENT = apply(Put(KEY, "first", nonce=readable_nonce("first")))
DELETED = apply(PRESENT.delete())


class Scene(msgspec.Struct, frozen=True):
    """The first record, and the tasks of the writers."""

    first: Record | None
    programs: tuple[tuple[TaskKind, ...], ...]
    others: int = 0
    """The number of other writes, which come all at once, at some moment or never."""
    sends: int = 2
    """The maximum number of sends of one request."""


class Writer(msgspec.Struct, frozen=True, gc=False):
    """A writer that does one task after another, with the reported result of each."""

    change: Change | None = None
    """The current change; None between two tasks."""
    sends: int = 0
    waiting: bool = False
    """Whether it waits for a reply; if not, and something was sent, it must settle."""
    results: tuple[Result, ...] = ()


class State(msgspec.Struct, frozen=True, gc=False):
    """The record, its true history, and the requests under way."""

    record: Record | None
    applied: tuple[str, ...]
    """The nonces of the two writers, in commit order."""
    writers: tuple[Writer, ...]
    strays: frozenset[Change] = frozenset()
    """Requests whose copies may land at any time, any number of times."""
    others: int = 0


class SettlingModel(Model[State]):
    """Writers of one record that settle as `SettlingStore` does."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def starts(self) -> Iterator[State]:
        writers = tuple(Writer() for _ in self._scene.programs)
        yield State(self._scene.first, (), writers, others=self._scene.others)

    def steps(self, state: State) -> Iterator[Step[State]]:
        for number, name in enumerate("AB"):
            yield from self._act(state, number, name)
        for stray in state.strays:
            yield Step(f"a copy of {_describe(stray)} lands", self._land(state, stray))
        if state.others:
            record = write_on_top(state.record, state.others)
            what = f"{state.others} others write"
            yield Step(what, replace(state, record=record, others=0))
        if state.record is not None and state.record.deleted and self.may_remove(state):
            removed = replace(state, record=None, strays=frozenset())
            yield Step("the tombstone is removed", removed)

    def find_violation(self, state: State) -> str | None:
        for number, name in enumerate("AB"):
            for count, result in enumerate(state.writers[number].results):
                task = f"{name}{count}"
                times = sum(nonce.startswith(task) for nonce in state.applied)
                if (result == "applied" and times != 1) or (result == "conflicted" and times):
                    return f"{task} was reported as {result}, and was applied {times} times"
                if result == "misjudged":
                    return f"{task} was reported as forgotten, though the trail reaches its base"
        if len(set(state.applied)) < len(state.applied):
            return f"a write was applied twice: {' '.join(state.applied)}"
        return None

    # Overridden by mutations.

    def fits(self, change: Change, record: Record | None) -> bool:
        """Whether a change's condition holds for a record."""
        base = change.base
        if base is None or record is None:
            return base is record
        return (base.seq, base.trail) == (record.seq, record.trail)

    def apply(self, change: Change) -> Record:
        return apply(change)

    def verdict(self, change: Change, record: Record | None) -> WriteFate:
        return judge_write(change.base, change.nonce, record)

    def believes_conflict(self, writer: Writer) -> bool:
        """Whether the reply `conflicted` is final."""
        return writer.sends == 1

    def overtakes(self, change: Change) -> frozenset[Change]:
        """Return the copies that may land before the answered request."""
        return frozenset()

    def may_remove(self, state: State) -> bool:
        """Whether nothing can land any more: an hour is longer than any request lasts."""
        return all(writer.change is None or writer.sends == 0 for writer in state.writers)

    def retry(self, state: State, number: int) -> State | None:
        """Repeat a task instead of settling it."""
        return None

    # Steps.

    def _act(self, state: State, number: int, name: str) -> Iterator[Step[State]]:
        writer = state.writers[number]
        change = writer.change
        if change is None:
            if len(writer.results) < len(self._scene.programs[number]):
                yield self._decide(state, number, f"{name}{len(writer.results)}")
        elif writer.sends == 0:
            yield Step(f"{name} sends {_describe(change)}", self._send(state, number))
        elif writer.waiting:
            yield self._answer(state, number, f"{_describe(change)} arrives and is answered")
            settling = replace(writer, waiting=False)
            strays = state.strays | {change}
            after = replace(_with(state, number, settling), strays=strays)
            yield Step(f"{name} gets no reply to {_describe(change)}", after)
        else:
            yield from self._settle(state, number, name)

    def _decide(self, state: State, number: int, task: str) -> Step[State]:
        """Read the record, and decide what to write in its place."""
        writer, base = state.writers[number], state.record
        kind = self._scene.programs[number][len(writer.results)]
        what = f"{task[0]} reads the record, to {kind} it"
        if kind == "delete" and (base is None or base.deleted):
            return Step(what, _finish(state, number, "needless"))
        # B writes the first value again: the versions must still differ.
        value = "first" if task[0] == "B" else task
        change: Change = Put(
            KEY, value, None if kind == "create" else base, nonce=readable_nonce(task)
        )
        if kind == "delete" and base is not None:
            change = Delete(base, nonce=readable_nonce(task))
        return Step(what, _with(state, number, replace(writer, change=change)))

    def _send(self, state: State, number: int) -> State:
        writer = state.writers[number]
        sent = replace(writer, sends=writer.sends + 1, waiting=True)
        strays = state.strays
        if writer.change is not None:
            strays |= self.overtakes(writer.change)
        return replace(_with(state, number, sent), strays=strays)

    def _answer(self, state: State, number: int, what: str) -> Step[State]:
        writer = state.writers[number]
        assert writer.change is not None
        applied = self.fits(writer.change, state.record)
        after = replace(self._land(state, writer.change), strays=state.strays | {writer.change})
        if applied:
            return Step(f"{what}: applied", _finish(after, number, "applied"))
        if self.believes_conflict(writer):
            return Step(f"{what}: conflicted", _finish(after, number, "conflicted"))
        settling = replace(writer, waiting=False)
        return Step(f"{what}: conflicted, perhaps with itself", _with(after, number, settling))

    def _settle(self, state: State, number: int, name: str) -> Iterator[Step[State]]:
        writer = state.writers[number]
        assert writer.change is not None
        task = _describe(writer.change)
        again = self.retry(state, number)
        if again is not None:
            yield Step(f"{name} starts {task} again", again)
            return
        yield Step(f"{name} abandons {task}", _finish(state, number, "unknown"))
        match self.verdict(writer.change, state.record):
            case "pending":
                if writer.sends < self._scene.sends:
                    yield Step(f"{name} reads, and resends {task}", self._send(state, number))
            case "applied":
                yield Step(f"{name} reads: {task} is there", _finish(state, number, "applied"))
            case "conflicted":
                yield Step(
                    f"{name} reads: {task} is not there", _finish(state, number, "conflicted")
                )
            case "unknowable":
                result: Result = "misjudged" if _remembered(writer.change, state) else "forgotten"
                yield Step(f"{name} reads: unknowable", _finish(state, number, result))

    def _land(self, state: State, change: Change) -> State:
        """Apply one copy of a request if its condition holds."""
        if not self.fits(change, state.record):
            return state
        applied = (*state.applied, change.nonce)
        return replace(state, record=self.apply(change), applied=applied)


def _remembered(change: Change, state: State) -> bool:
    """Whether a record still remembers all writes since a change's base."""
    first = 0 if change.base is None else change.base.seq
    return state.record is not None and 0 < state.record.seq - first <= TRAIL_LENGTH


def _describe(change: Change) -> str:
    kind = "delete" if isinstance(change, Delete) else "put"
    return f"{kind} {change.nonce.rstrip('-')}"


def _with(state: State, number: int, writer: Writer) -> State:
    writers = state.writers
    return replace(state, writers=(*writers[:number], writer, *writers[number + 1 :]))


def _finish(state: State, number: int, result: Result) -> State:
    """Record the result of a writer's task."""
    return _with(state, number, Writer(results=(*state.writers[number].results, result)))


class ReadAndWriteAgain(SettlingModel):
    """A write without a reply is repeated with a new nonce."""

    def retry(self, state: State, number: int) -> State | None:
        writer = state.writers[number]
        assert writer.change is not None
        nonce = writer.change.nonce.replace("-", "again", 1)[:NONCE_LENGTH]
        if "again" in writer.change.nonce:
            return None
        change = Put(KEY, "again", state.record, nonce=nonce)
        return _with(state, number, Writer(change=change, results=writer.results))


class OwnConflictBelieved(SettlingModel):
    """The conflict of the second copy is final; the first copy had been applied."""

    def believes_conflict(self, writer: Writer) -> bool:
        return True


class PendingMeansFailed(SettlingModel):
    """The record has not changed, so the write counts as lost; it lands later."""

    def verdict(self, change: Change, record: Record | None) -> WriteFate:
        verdict = super().verdict(change, record)
        return "conflicted" if verdict == "pending" else verdict


class PendingMeansApplied(SettlingModel):
    """A write that may still be under way counts as applied."""

    def verdict(self, change: Change, record: Record | None) -> WriteFate:
        verdict = super().verdict(change, record)
        return "applied" if verdict == "pending" else verdict


class NewestNonceOnly(SettlingModel):
    """The record keeps only the nonce of its last write; another wrote on top."""

    def verdict(self, change: Change, record: Record | None) -> WriteFate:
        newest = replace(record, trail=record.nonce) if record else None
        return super().verdict(change, newest)


class ForgottenMeansConflict(SettlingModel):
    """A trail that no longer reaches back to the base counts as proof."""

    def verdict(self, change: Change, record: Record | None) -> WriteFate:
        verdict = super().verdict(change, record)
        return "conflicted" if verdict == "unknowable" else verdict


class EqualContentIsEqualVersion(SettlingModel):
    """Versions depend on content without a nonce; an earlier value comes back."""

    def fits(self, change: Change, record: Record | None) -> bool:
        base = change.base
        if base is None or record is None:
            return base is record
        return (base.value, base.deleted) == (record.value, record.deleted)


class CreateOverATombstone(SettlingModel):
    """A deleted name counts as free; a late create brings back a consumed record."""

    def fits(self, change: Change, record: Record | None) -> bool:
        gone = record is not None and record.deleted
        return (change.base is None and gone) or super().fits(change, record)


class TombstoneForgets(SettlingModel):
    """A tombstone keeps no nonces but its own."""

    def apply(self, change: Change) -> Record:
        record = apply(change)
        return replace(record, trail=record.nonce) if record.deleted else record


class RemovedAtOnce(SettlingModel):
    """A tombstone is removed while requests that it must refuse are still under way."""

    def may_remove(self, state: State) -> bool:
        return True


class LibraryRetries(SettlingModel):
    """A client library resends by itself; the reply is the second copy's."""

    def overtakes(self, change: Change) -> frozenset[Change]:
        return frozenset([change])


WORLDS = {
    "writes on top of writes": Scene(
        PRESENT, (("replace", "delete"), ("replace", "replace")), sends=3
    ),
    "created and consumed": Scene(None, (("create", "replace"), ("delete", "create")), sends=3),
    "over a tombstone": Scene(DELETED, (("replace", "delete"), ("create", "replace")), sends=3),
    "all remembered": Scene(PRESENT, (("replace",) * 2, ("delete",)), TRAIL_LENGTH - 3),
    "one too many": Scene(PRESENT, (("replace",) * 2, ("delete",)), TRAIL_LENGTH - 2),
}

MUTATIONS: dict[type[SettlingModel], str] = {
    ReadAndWriteAgain: "writes on top of writes",
    OwnConflictBelieved: "writes on top of writes",
    PendingMeansFailed: "writes on top of writes",
    PendingMeansApplied: "writes on top of writes",
    NewestNonceOnly: "writes on top of writes",
    ForgottenMeansConflict: "one too many",
    EqualContentIsEqualVersion: "writes on top of writes",
    CreateOverATombstone: "created and consumed",
    TombstoneForgets: "created and consumed",
    RemovedAtOnce: "created and consumed",
    LibraryRetries: "writes on top of writes",
}
