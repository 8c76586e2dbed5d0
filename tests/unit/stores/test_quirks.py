"""What is believed of an object server, by how it behaves: every combination."""

import itertools
from typing import Any, cast

import msgspec
import pytest
from chance import FakeClock, SeededRandomness

from jobsync import (
    Applied,
    Components,
    Conflicted,
    Events,
    Misconfigured,
    Put,
    Record,
    Unavailable,
)
from jobsync.stores.contract import Change, Outcome
from jobsync.stores.memory import MemoryStore
from jobsync.stores.objects.quirks import detect_quirks, open_and_detect, open_with_quirks
from jobsync.stores.objects.store import ObjectsStore
from jobsync.stores.probe import PROBE_KEYS, VERDICT_KEY, ProbeVerdict, Trials


class FakeServer(MemoryStore):
    """A server with manners of its own.

    Args:
        wants_bare: whether it compares ETags without their quotes; None if it refuses both.
        old: what a DELETE with an old version does: refused, and whether the object is gone.
        new: the same with the right version.
    """

    def __init__(
        self, *, wants_bare: bool | None, old: tuple[bool, bool], new: tuple[bool, bool]
    ) -> None:
        super().__init__()
        self._wants_bare = wants_bare
        self._old = old
        self._new = new
        self._bare = False

    def set_quirks(self, *, bare_etags: bool, conditional_delete: bool) -> None:
        """Set how conditions are sent."""
        self._bare = bare_etags
        self.traits = {"bare_etags": bare_etags, "conditional_delete": conditional_delete}

    async def write(self, changes: list[Change]) -> list[Outcome]:  # type: ignore[override]
        if any(change.base for change in changes) and self._bare is not self._wants_bare:
            return [Conflicted() for _ in changes]
        return await super().write(changes)

    async def erase_unchanged(self, record: Record) -> bool:
        """Delete an object with a condition, or not."""
        current = await self.get(record.key)
        if current is None:
            # As on S3: what is not there has been deleted.
            return True
        is_refused, is_gone = self._new if current == record else self._old
        if is_gone:
            await self.drop([record.key])
        return not is_refused


def build_components() -> Components:
    """Return components with a fake clock."""
    return Components(clock=FakeClock(), randomness=SeededRandomness(1), events=Events())


deletes = list(itertools.product([False, True], repeat=2))


@pytest.mark.parametrize("wants_bare", [False, True])
@pytest.mark.parametrize(("old", "new"), [*itertools.product(deletes, deletes)])
async def test_a_condition_on_delete_is_believed_only_if_it_was_honoured(
    wants_bare: bool, old: tuple[bool, bool], new: tuple[bool, bool]
) -> None:
    """Refused with an old version, which stayed; and accepted with the right one."""
    server = FakeServer(wants_bare=wants_bare, old=old, new=new)
    quirks = await detect_quirks(server, build_components())  # type: ignore[arg-type]
    honours = old == (True, False) and not new[0]
    assert (quirks.bare_etags, quirks.conditional_delete) == (wants_bare, honours)
    assert server.traits == {"bare_etags": wants_bare, "conditional_delete": honours}
    assert await server.heads(PROBE_KEYS) == []
    (outcome,) = await server.write([Put("n/a", 1)])
    assert isinstance(outcome, Applied)


async def test_a_server_that_refuses_all_conditions_is_no_store() -> None:
    """Whichever way an ETag is written; nothing is left there."""
    server = FakeServer(wants_bare=None, old=(True, False), new=(False, True))
    with pytest.raises(Misconfigured, match="conditional writes"):
        await detect_quirks(server, build_components())  # type: ignore[arg-type]
    assert server._data.records == {}


@pytest.mark.parametrize("opens", [open_with_quirks, open_and_detect])
@pytest.mark.parametrize("verdict", ["none", "current"])
@pytest.mark.parametrize(
    "error",
    [Unavailable("server", "gone"), Misconfigured("url", "x", "is wrong", "fix"), OSError("oh")],
    ids=["unavailable", "misconfigured", "another error"],
)
async def test_a_bucket_whose_quirks_cannot_be_found_is_closed(
    opens: Any, verdict: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However that fails; one that can be opened stays open, with the quirks of its server."""
    server = FakeServer(wants_bare=True, old=(True, False), new=(False, True))
    closed: list[bool] = []
    components = build_components()

    async def connect(*_: object) -> FakeServer:
        return server

    async def close() -> None:
        closed.append(True)

    monkeypatch.setattr(ObjectsStore, "connect", connect)
    monkeypatch.setattr(server, "close", close)
    if verdict == "current":
        traits = {"bare_etags": True, "conditional_delete": True}
        found = ProbeVerdict(components.clock.wall().seconds, [], traits, revision=99)
        server._bare = True
        await server.create(VERDICT_KEY, msgspec.to_builtins(found))
    reads = server.get_many

    async def fail(*_: object, **__: object) -> list[Record | None]:
        raise error

    for _ in range(2):
        monkeypatch.setattr(server, "get_many", fail)
        monkeypatch.setattr(Trials, "run", fail)
        with pytest.raises(type(error)):
            await opens(cast("Any", None), components)
        assert closed == [True]
        closed.clear()
    monkeypatch.undo()
    monkeypatch.setattr(ObjectsStore, "connect", connect)
    monkeypatch.setattr(server, "close", close)
    assert server.get_many == reads
    assert await opens(cast("Any", None), components) is cast("Any", server)
    assert (closed, server.traits["bare_etags"]) == ([], True)
