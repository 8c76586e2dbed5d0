"""The outcome of a batch that is written in parts, whatever becomes of each part."""

import itertools
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import pytest

from jobsync import Components, Unavailable
from jobsync.database import keyspace as keyspace_module
from jobsync.database.keyspace import BatchResult, Keyspace, create_many, remove_many
from jobsync.stores.contract import Change, Outcome, Record, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

Fate: TypeAlias = Literal["applied", "lost request", "lost reply", "refused", "unreadable"]
"""What becomes of a part."""

NAMES = ["a", "b", "c"]

_numbers = itertools.count()


class FatefulStore(StoreDecorator):
    """A store that does with each write what the test says, and with reads likewise."""

    def __init__(self, inner: MemoryStore, fates: Sequence[Fate]) -> None:
        super().__init__(inner)
        self._fates = list(fates)
        self.may_have_written = False

    @property
    def _fate(self) -> Fate:
        return self._fates[0] if self._fates else "applied"

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        if self._fate == "unreadable":
            raise Unavailable("store", "a read was refused")
        return await super().get_many(keys, tombstones=tombstones)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        fate = self._fate
        del self._fates[:1]
        if fate in {"refused", "unreadable"}:
            raise Unavailable("store", "a write was refused")
        self.may_have_written = True
        if fate == "lost request":
            return [Unknown("no reply")] * len(changes)
        outcomes = await super().write(changes)
        return [Unknown("no reply")] * len(changes) if fate == "lost reply" else outcomes


@pytest.fixture(autouse=True)
def one_record_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write each record in a part of its own."""
    monkeypatch.setattr(keyspace_module, "_MAX_RECORDS", 1)


async def check_batch(fates: Sequence[Fate], *, removes: bool) -> None:
    """Write a batch; compare what it says with what was written."""
    inner = MemoryStore(f"batches-{next(_numbers)}", Components.system())
    keyspace = Keyspace(lambda: inner, "data/things/", Components.system(), "things")
    if removes:
        await create_many(keyspace, dict.fromkeys(NAMES, 1))
    store = FatefulStore(inner, fates)
    keyspace = Keyspace(lambda: store, "data/things/", Components.system(), "things")
    try:
        result = await (
            remove_many(keyspace, NAMES)
            if removes
            else create_many(keyspace, dict.fromkeys(NAMES, 1))
        )
    except Unavailable:
        assert not store.may_have_written
        result = BatchResult(unsent=NAMES)
    told = [*result.written, *result.unchanged, *result.unknown, *result.unsent]
    assert sorted(told) == NAMES
    for name in NAMES:
        record = await inner.get(f"data/things/{name}")
        is_done = (record is None) == removes
        assert is_done or name not in result.written
        assert not is_done or name not in result.unsent
    # What may have happened is not called undone.
    unsure = [name for name, fate in zip(NAMES, fates, strict=True) if fate.startswith("lost")]
    assert [*result.unknown] == [name for name in unsure if name not in result.unsent]
    assert (result.cause is not None) == bool(result.unsent and store.may_have_written)


@pytest.mark.parametrize("removes", [False, True], ids=["insert", "delete"])
async def test_a_batch_reports_what_became_of_each_record(*, removes: bool) -> None:
    """Unavailable means that nothing was written. Otherwise each name is in one list."""
    for fates in itertools.product(get_args(Fate), repeat=len(NAMES)):
        try:
            await check_batch(fates, removes=removes)
        except AssertionError as error:
            error.add_note(f"the parts were {', '.join(fates)}")
            raise
