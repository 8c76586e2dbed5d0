"""Settling, on every bad network: nobody is told a lie about a write.

Two writers change one record through requests that may be applied and not answered, come
to nothing, or land again and again at any later time. A crowd of strangers may write on
top, and a tombstone is buried at a moment when nothing can be under way any more.

Whoever is told *applied* finds its write in the history exactly once. Whoever is told
*conflicted* never does, then or later. *Unknown* is always allowed, but that a record has
forgotten a write only if more writes came since than it remembers.

The records are the library's own, with trails of their real length: `build_records` makes them
and `judge_write` judges them.
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

Deed: TypeAlias = Literal["create", "replace", "delete"]
Told: TypeAlias = Literal["applied", "conflicted", "forgotten", "misjudged", "unknown", "needless"]

KEY = "n"

replace = msgspec.structs.replace


def mark(deed: str) -> str:
    """Make a nonce that people can read."""
    return deed.ljust(NONCE_LENGTH, "-")


@cache
def leave(change: Change) -> Record:
    """Give the record that a change leaves."""
    return build_records([change], Ids(FakeClock(), SeededRandomness(1)))[0][0]


@cache
def trample(record: Record | None, strangers: int) -> Record | None:
    """Give the record that a crowd leaves."""
    for number in range(strangers):
        record = leave(Put(KEY, "crowd", record, nonce=mark(f"X{number}")))
    return record


PRESENT = leave(Put(KEY, "first", nonce=mark("first")))
DELETED = leave(PRESENT.delete())


class Scene(msgspec.Struct, frozen=True):
    """What is there at first, and who means to do what."""

    first: Record | None
    programs: tuple[tuple[Deed, ...], ...]
    strangers: int = 0
    """How many strangers write, all at once, at some moment or never."""
    sends: int = 2
    """How often one request is sent at most."""


class Writer(msgspec.Struct, frozen=True, gc=False):
    """Somebody who does one deed after the other, and hears what became of each."""

    change: Change | None = None
    """What it is about; None between two deeds."""
    sends: int = 0
    waiting: bool = False
    """Whether it listens for an answer; if not, and something was sent, it must settle."""
    told: tuple[Told, ...] = ()


class State(msgspec.Struct, frozen=True, gc=False):
    """The record, the truth about it, and what is under way."""

    record: Record | None
    applied: tuple[str, ...]
    """The nonces of the two writers, in the order in which the store committed them."""
    writers: tuple[Writer, ...]
    strays: frozenset[Change] = frozenset()
    """Requests of which copies may land at any time, any number of times."""
    strangers: int = 0


class SettlingModel(Model[State]):
    """Writers of one record, who settle as `SettlingStore` does."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def starts(self) -> Iterator[State]:
        writers = tuple(Writer() for _ in self._scene.programs)
        yield State(self._scene.first, (), writers, strangers=self._scene.strangers)

    def steps(self, state: State) -> Iterator[Step[State]]:
        for number, name in enumerate("AB"):
            yield from self._act(state, number, name)
        for stray in state.strays:
            yield Step(f"a copy of {_name(stray)} lands", self._land(state, stray))
        if state.strangers:
            trampled = trample(state.record, state.strangers)
            what = f"{state.strangers} strangers write"
            yield Step(what, replace(state, record=trampled, strangers=0))
        if state.record is not None and state.record.deleted and self.may_bury(state):
            buried = replace(state, record=None, strays=frozenset())
            yield Step("the tombstone is buried", buried)

    def wrong(self, state: State) -> str | None:
        for number, name in enumerate("AB"):
            for count, told in enumerate(state.writers[number].told):
                deed = f"{name}{count}"
                times = sum(nonce.startswith(deed) for nonce in state.applied)
                if (told == "applied" and times != 1) or (told == "conflicted" and times):
                    return f"{deed} was told {told}, and was applied {times} times"
                if told == "misjudged":
                    return f"{deed} was called forgotten, though the trail reaches back to its base"
        if len(set(state.applied)) < len(state.applied):
            return f"a write was applied twice: {' '.join(state.applied)}"
        return None

    # What the mutations change.

    def fits(self, change: Change, record: Record | None) -> bool:
        """Say whether the store finds a change's condition true."""
        base = change.base
        if base is None or record is None:
            return base is record
        return (base.seq, base.trail) == (record.seq, record.trail)

    def leave(self, change: Change) -> Record:
        return leave(change)

    def verdict(self, change: Change, record: Record | None) -> WriteFate:
        return judge_write(change.base, change.nonce, record)

    def believes_conflict(self, writer: Writer) -> bool:
        """Say whether the answer that a condition was false is the verdict."""
        return writer.sends == 1

    def overtakes(self, change: Change) -> frozenset[Change]:
        """Give the copies that may land before the request that is answered."""
        return frozenset()

    def may_bury(self, state: State) -> bool:
        """Say whether nothing can land any more: an hour is longer than any request lasts."""
        return all(writer.change is None or writer.sends == 0 for writer in state.writers)

    def retry(self, state: State, number: int) -> State | None:
        """Start a deed again instead of settling it."""
        return None

    # Who does what.

    def _act(self, state: State, number: int, name: str) -> Iterator[Step[State]]:
        writer = state.writers[number]
        change = writer.change
        if change is None:
            if len(writer.told) < len(self._scene.programs[number]):
                yield self._decide(state, number, f"{name}{len(writer.told)}")
        elif writer.sends == 0:
            yield Step(f"{name} sends {_name(change)}", self._send(state, number))
        elif writer.waiting:
            yield self._answer(state, number, f"{_name(change)} arrives and is answered")
            deaf = replace(writer, waiting=False)
            strays = state.strays | {change}
            after = replace(_with(state, number, deaf), strays=strays)
            yield Step(f"{name} hears nothing of {_name(change)}", after)
        else:
            yield from self._settle(state, number, name)

    def _decide(self, state: State, number: int, deed: str) -> Step[State]:
        """Read, and decide what to write in place of what was read."""
        writer, base = state.writers[number], state.record
        kind = self._scene.programs[number][len(writer.told)]
        what = f"{deed[0]} reads the record, to {kind} it"
        if kind == "delete" and (base is None or base.deleted):
            return Step(what, _tell(state, number, "needless"))
        # What B writes equals what was there first: versions must tell the two apart.
        value = "first" if deed[0] == "B" else deed
        change: Change = Put(KEY, value, None if kind == "create" else base, nonce=mark(deed))
        if kind == "delete" and base is not None:
            change = Delete(base, nonce=mark(deed))
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
            return Step(f"{what}: applied", _tell(after, number, "applied"))
        if self.believes_conflict(writer):
            return Step(f"{what}: conflicted", _tell(after, number, "conflicted"))
        deaf = replace(writer, waiting=False)
        return Step(f"{what}: conflicted, which may be its own doing", _with(after, number, deaf))

    def _settle(self, state: State, number: int, name: str) -> Iterator[Step[State]]:
        writer = state.writers[number]
        assert writer.change is not None
        deed = _name(writer.change)
        again = self.retry(state, number)
        if again is not None:
            yield Step(f"{name} starts {deed} again", again)
            return
        yield Step(f"{name} gives {deed} up", _tell(state, number, "unknown"))
        match self.verdict(writer.change, state.record):
            case "pending":
                if writer.sends < self._scene.sends:
                    yield Step(f"{name} looks, and sends {deed} again", self._send(state, number))
            case "applied":
                yield Step(f"{name} looks: {deed} is there", _tell(state, number, "applied"))
            case "conflicted":
                yield Step(f"{name} looks: not {deed}", _tell(state, number, "conflicted"))
            case "unknowable":
                told: Told = "misjudged" if _remembered(writer.change, state) else "forgotten"
                yield Step(f"{name} looks: nobody knows", _tell(state, number, told))

    def _land(self, state: State, change: Change) -> State:
        """Let the store judge_write one copy of a request."""
        if not self.fits(change, state.record):
            return state
        applied = (*state.applied, change.nonce)
        return replace(state, record=self.leave(change), applied=applied)


def _remembered(change: Change, state: State) -> bool:
    """Say whether a record still remembers all writes since a change's base."""
    first = 0 if change.base is None else change.base.seq
    return state.record is not None and 0 < state.record.seq - first <= TRAIL_LENGTH


def _name(change: Change) -> str:
    kind = "delete" if isinstance(change, Delete) else "put"
    return f"{kind} {change.nonce.rstrip('-')}"


def _with(state: State, number: int, writer: Writer) -> State:
    writers = state.writers
    return replace(state, writers=(*writers[:number], writer, *writers[number + 1 :]))


def _tell(state: State, number: int, told: Told) -> State:
    """Let a writer be done with a deed."""
    return _with(state, number, Writer(told=(*state.writers[number].told, told)))


class ReadAndWriteAgain(SettlingModel):
    """What was not answered is done once more, under a new nonce."""

    def retry(self, state: State, number: int) -> State | None:
        writer = state.writers[number]
        assert writer.change is not None
        nonce = writer.change.nonce.replace("-", "again", 1)[:NONCE_LENGTH]
        if "again" in writer.change.nonce:
            return None
        change = Put(KEY, "again", state.record, nonce=nonce)
        return _with(state, number, Writer(change=change, told=writer.told))


class OwnConflictBelieved(SettlingModel):
    """The second copy's conflict is taken for the verdict; the first copy had won."""

    def believes_conflict(self, writer: Writer) -> bool:
        return True


class PendingMeansFailed(SettlingModel):
    """The record has not moved, so the write is taken for lost; it lands later."""

    def verdict(self, change: Change, record: Record | None) -> WriteFate:
        verdict = super().verdict(change, record)
        return "conflicted" if verdict == "pending" else verdict


class PendingMeansApplied(SettlingModel):
    """What may still be under way is taken for done."""

    def verdict(self, change: Change, record: Record | None) -> WriteFate:
        verdict = super().verdict(change, record)
        return "applied" if verdict == "pending" else verdict


class NewestNonceOnly(SettlingModel):
    """The record keeps the mark of its last write alone; another wrote on top."""

    def verdict(self, change: Change, record: Record | None) -> WriteFate:
        newest = replace(record, trail=record.nonce) if record else None
        return super().verdict(change, newest)


class ForgottenMeansConflict(SettlingModel):
    """A trail that no longer reaches back to the base is taken for proof."""

    def verdict(self, change: Change, record: Record | None) -> WriteFate:
        verdict = super().verdict(change, record)
        return "conflicted" if verdict == "unknowable" else verdict


class EqualContentIsEqualVersion(SettlingModel):
    """Versions are made of content without a nonce; what was there before comes back."""

    def fits(self, change: Change, record: Record | None) -> bool:
        base = change.base
        if base is None or record is None:
            return base is record
        return (base.value, base.deleted) == (record.value, record.deleted)


class CreateOverATombstone(SettlingModel):
    """A deleted name counts as free; a late create brings back what was consumed."""

    def fits(self, change: Change, record: Record | None) -> bool:
        gone = record is not None and record.deleted
        return (change.base is None and gone) or super().fits(change, record)


class TombstoneForgets(SettlingModel):
    """A tombstone keeps no nonces but its own."""

    def leave(self, change: Change) -> Record:
        record = leave(change)
        return replace(record, trail=record.nonce) if record.deleted else record


class BuriedAtOnce(SettlingModel):
    """A tombstone goes while requests that it must turn away are still under way."""

    def may_bury(self, state: State) -> bool:
        return True


class LibraryRetries(SettlingModel):
    """A client library sends again by itself; the answer is the second copy's."""

    def overtakes(self, change: Change) -> frozenset[Change]:
        return frozenset([change])


WORLDS = {
    "writes upon writes": Scene(PRESENT, (("replace", "delete"), ("replace", "replace")), sends=3),
    "created and consumed": Scene(None, (("create", "replace"), ("delete", "create")), sends=3),
    "over a tombstone": Scene(DELETED, (("replace", "delete"), ("create", "replace")), sends=3),
    "all remembered": Scene(PRESENT, (("replace",) * 2, ("delete",)), TRAIL_LENGTH - 3),
    "one too many": Scene(PRESENT, (("replace",) * 2, ("delete",)), TRAIL_LENGTH - 2),
}

MUTATIONS: dict[type[SettlingModel], str] = {
    ReadAndWriteAgain: "writes upon writes",
    OwnConflictBelieved: "writes upon writes",
    PendingMeansFailed: "writes upon writes",
    PendingMeansApplied: "writes upon writes",
    NewestNonceOnly: "writes upon writes",
    ForgottenMeansConflict: "one too many",
    EqualContentIsEqualVersion: "writes upon writes",
    CreateOverATombstone: "created and consumed",
    TombstoneForgets: "created and consumed",
    BuriedAtOnce: "created and consumed",
    LibraryRetries: "writes upon writes",
}
