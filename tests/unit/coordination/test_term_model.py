"""Terms whose records others touch in between: refused, or as if it were the first write."""

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeAlias, get_args

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, Events, Fenced, OutcomeUnknown, Put, Term
from jobsync.stores.contract import Change, Outcome, Unknown
from jobsync.stores.memory import MemoryStore

KEY = "single/x"
EPOCH = 5

Touch: TypeAlias = Literal["nothing", "drop", "delete", "earlier", "equal", "later", "restore"]
"""What somebody else does to the record between two calls of a term."""

Call: TypeAlias = Literal["get", "put"]


class CountingStore(MemoryStore):
    """A store that ends a loop of requests without end."""

    writes = 0

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self.writes += 1
        assert self.writes < 50, "it writes again and again"
        return await super().write(changes)


class TermStage:
    """A term, and a record that others touch."""

    def __init__(self, epoch: int) -> None:
        clock = FakeClock()
        self.components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
        self.store = CountingStore(components=self.components)
        self.replaced: list[int] = []
        self.epoch = epoch
        self.term = Term(self.store, epoch, lambda: True, self.components.ids, self.replaced.append)
        self.count = 0

    async def touch(self, how: Touch) -> None:
        """Do something to the record without the term."""
        record = await self.store.get(KEY, tombstones=True)
        match how:
            case "drop":
                await self.store.drop([KEY])
            case "delete" if record is not None and not record.deleted:
                await self.store.delete(record)
            case "earlier" | "equal" | "later":
                epoch = EPOCH + {"earlier": -1, "equal": 0, "later": 1}[how]
                await self.store.drop([KEY])
                await self.store.create(KEY, how, epoch=epoch)
            case "restore" if record is not None and not record.deleted:
                # As it was before the term, without its traces.
                await self.store.drop([KEY])
                await self.store.create(KEY, "old", epoch=1)

    async def call(self, how: Call) -> None:
        """Use the term; check the result by what is stored."""
        before = await self.store.get(KEY, tombstones=True)
        if how == "get":
            value = None if before is None or before.deleted else before.value
            assert await self.term.get(KEY) == value
        else:
            self.count += 1
            await self.term.put(KEY, self.count)
        after = await self.store.get(KEY)
        assert after is not None
        assert after.epoch == (self.epoch or (0 if before is None else before.epoch))
        if how == "put":
            assert after.value == self.count


TOUCHES = list(itertools.product(get_args(Touch), repeat=2))


@pytest.mark.parametrize("calls", [*itertools.product(get_args(Call), repeat=3)], ids="-".join)
@pytest.mark.parametrize("epoch", [0, EPOCH])
async def test_a_term_goes_on_unless_another_one_has_sealed(
    calls: tuple[Call, Call, Call], epoch: int
) -> None:
    """Whatever was removed, restored or written meanwhile; it never writes without end."""
    for touches in TOUCHES:
        stage = TermStage(epoch)
        foreign = False
        for call, touch in zip(calls, ("nothing", *touches), strict=True):
            await stage.touch(touch)
            stays = foreign and touch in {"nothing", "delete"}
            foreign = epoch > 0 and (touch in {"equal", "later"} or stays)
            if not foreign:
                await stage.call(call)
                continue
            with pytest.raises(Fenced):
                await stage.call(call)
            assert stage.replaced[-1] >= epoch


@pytest.mark.parametrize("call", ["get", "put", "seal"])
async def test_a_term_that_was_replaced_says_by_which(call: str) -> None:
    """Once it sees the other's seal, in whichever call, and each time."""
    stage = TermStage(EPOCH)
    await stage.store.create(KEY, "later", epoch=EPOCH + 3)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "get": lambda: stage.term.get(KEY),
        "put": lambda: stage.term.put(KEY, 1),
        "seal": lambda: stage.term.seal(["single/a", KEY]),
    }
    for times in (1, 2):
        with pytest.raises(Fenced) as caught:
            await calls[call]()
        assert str(caught.value) == str(Fenced(KEY, EPOCH, EPOCH + 3))
        assert stage.replaced == [EPOCH + 3] * times
    record = await stage.store.get(KEY)
    assert record is not None
    assert (record.value, record.epoch) == ("later", EPOCH + 3)


async def test_singletons_are_sealed_however_often_it_is_asked() -> None:
    """Each is read anew: it may have been restored from a backup, or sealed by another term."""
    stage = TermStage(EPOCH)
    keys = ["single/a", "single/b"]
    for _ in range(2):
        await stage.term.seal(keys)
        records = [await stage.store.get(key) for key in keys]
        assert [record and record.epoch for record in records] == [EPOCH, EPOCH]
        await stage.store.drop(keys)
        await stage.store.create(keys[1], "old", epoch=EPOCH - 1)
    await stage.store.drop(keys)
    await stage.store.create(keys[1], "later", epoch=EPOCH + 1)
    with pytest.raises(Fenced):
        await stage.term.seal(keys)


async def test_a_term_remembers_seals_only_until_one_is_known() -> None:
    """However often it seals."""
    stage = TermStage(EPOCH)
    for _ in range(3):
        await stage.term.seal([KEY])
        await stage.touch("drop")
        await stage.call("put")
        assert stage.term._open_seals == {}


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_a_term_that_is_over_sends_nothing(*, is_sealed: bool) -> None:
    """Also not to a record that it has sealed; nor is anybody told that it was replaced."""
    stage = TermStage(EPOCH)
    is_lasting = True
    stage.term._lasts = lambda: is_lasting
    await stage.store.create(KEY, "before", epoch=EPOCH - 1)
    if is_sealed:
        await stage.term.seal([KEY])
    before, writes = await stage.store.get(KEY), stage.store.writes
    is_lasting = False
    with pytest.raises(Fenced, match=rf"{KEY}: the term of epoch {EPOCH} is over"):
        await stage.term.put(KEY, "too late")
    if not is_sealed:
        with pytest.raises(Fenced, match="is over"):
            await stage.term.get(KEY)
    assert (await stage.store.get(KEY), stage.store.writes) == (before, writes)
    assert stage.replaced == []


class LosingStore(CountingStore):
    """Loses the reply to the next write, or the write itself."""

    is_applied: bool | None = None

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        is_applied, self.is_applied = self.is_applied, None
        outcomes = [] if is_applied is False else await super().write(changes)
        return outcomes if is_applied is None else [Unknown("lost") for _ in changes]


@pytest.mark.parametrize("call", ["get", "put", "sealed put"])
@pytest.mark.parametrize("is_applied", [True, False])
async def test_an_unknown_outcome_is_told_and_may_be_tried_again(
    call: str, *, is_applied: bool
) -> None:
    """Whether the write has landed or not; the value that was there before is kept by seals."""
    stage = TermStage(EPOCH)
    store = LosingStore(components=stage.components)
    term = Term(store, EPOCH, lambda: True, stage.components.ids, stage.replaced.append)
    await store.create(KEY, "before")
    if call == "sealed put":
        assert await term.get(KEY) == "before"
    store.is_applied = is_applied
    with pytest.raises(OutcomeUnknown):
        await (term.get(KEY) if call == "get" else term.put(KEY, "new"))
    is_written = call == "sealed put" and is_applied
    assert await term.get(KEY) == ("new" if is_written else "before")
    await term.put(KEY, "newer")
    assert await term.get(KEY) == "newer"
    assert stage.replaced == []


Fate: TypeAlias = Literal["answered", "lost", "dropped", "late", "later"]
"""It arrives, without its reply too; never; just before the next write; just after that."""


class LateStore(CountingStore):
    """Delivers writes late, or never, or without their replies."""

    def __init__(self, components: Components, fates: Sequence[Fate]) -> None:
        super().__init__(components=components)
        self._fates = iter(fates)
        self._late: list[Sequence[Change]] = []
        self._later: list[Sequence[Change]] = []

    async def recover(self) -> None:
        """Deliver all that is late, and lose nothing from now on."""
        self._fates = iter(())
        while self._late or self._later:
            await self.deliver()

    async def deliver(self) -> None:
        """Deliver all that is late now, in order."""
        late, self._late = self._late, self._later
        self._later = []
        for changes in late:
            await super().write(changes)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        await self.deliver()
        fate = next(self._fates, "answered")
        if fate == "late":
            self._late.append(changes)
        elif fate == "later":
            self._later.append(changes)
        elif fate != "dropped":
            outcomes = await super().write(changes)
            if fate == "answered":
                return outcomes
        return [Unknown(fate) for _ in changes]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("call", get_args(Call))
async def test_a_term_knows_each_of_its_writes_however_late_it_arrives(
    call: Call, *, exists: bool
) -> None:
    """After several in doubt, whichever of them was applied: it never takes itself for another."""
    for fates in itertools.product(get_args(Fate), repeat=4):
        stage = TermStage(EPOCH)
        store = LateStore(stage.components, fates)
        term = Term(store, EPOCH, lambda: True, stage.components.ids, stage.replaced.append)
        before = "before" if exists else None
        if exists:
            await MemoryStore.write(store, [Put(KEY, before, epoch=EPOCH - 1)])
        # Each fate takes one try at most, and so do late arrivals.
        for _ in range(12):
            try:
                if call == "get":
                    assert await term.get(KEY) == before
                else:
                    await term.put(KEY, "new")
                break
            except OutcomeUnknown:
                continue
        else:
            pytest.fail(f"no try came through: {fates}")
        await store.recover()
        assert await term.get(KEY) == ("new" if call == "put" else before), fates
        await term.put(KEY, "newer")
        assert await term.get(KEY) == "newer"
        assert stage.replaced == []
