"""When a verdict of a probe may be relied on, what it says, and how long a check is tried."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import (
    Applied,
    Components,
    Corrupt,
    Events,
    Misconfigured,
    OutcomeUnknown,
    Put,
    Unavailable,
    Unknown,
)
from jobsync.core.clock import Wall
from jobsync.stores.contract import BURIAL_AGE, Change, Head, Outcome
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.stores.probe import (
    PROBE_KEYS,
    VERDICT_KEY,
    Finding,
    ProbeVerdict,
    Trials,
    probe,
    probe_and_record,
    read_verdict,
    renew_verdict,
)

DAY = 86400.0
TRAITS = {"one": True, "two": False, "three": True}
CHECKS = [
    "a name is created once",
    "a stale version is refused",
    "equal content is a new version",
    "of many creators one wins",
    "a listing shows what was written",
    "a deleted name stays deleted",
    "clocks agree",
]


class Server(StoreDecorator):
    """A store that fails as a test says.

    Args:
        inner: keeps the records.
    """

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.traits = TRAITS
        self.write_failure: Exception | None = None
        self.drop_failure: Exception | None = None
        self.heads_failure: Exception | None = None
        self.lost_requests = 0
        self.lost_replies = 0

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if self.write_failure is not None:
            raise self.write_failure
        is_verdict = changes[0].key == VERDICT_KEY
        if is_verdict and self.lost_requests:
            self.lost_requests -= 1
            return [Unknown("lost") for _ in changes]
        outcomes = await self.inner.write(changes)
        if is_verdict and self.lost_replies:
            self.lost_replies -= 1
            return [Unknown("lost") for _ in changes]
        return outcomes

    async def drop(self, keys: Sequence[str]) -> None:
        if self.drop_failure is not None:
            raise self.drop_failure
        await self.inner.drop(keys)

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        if self.heads_failure is not None and limit > 1:
            raise self.heads_failure
        return await self.inner.heads(prefix, after=after, until=until, limit=limit)


@pytest.fixture
def clock() -> FakeClock:
    """A clock whose two times differ."""
    return FakeClock()


@pytest.fixture
def components(clock: FakeClock) -> Components:
    """Components with this clock."""
    return Components(clock=clock, randomness=SeededRandomness(1), events=Events())


@pytest.fixture
def server(components: Components) -> Server:
    """An empty store."""
    return Server(MemoryStore(components=components))


async def keep(server: Server, at: float, revision: int = 1) -> None:
    """Store a verdict of another process."""
    value: Any = {"at": at, "passed": ["x"], "traits": {"four": True}, "revision": revision}
    (outcome,) = await server.inner.write([Put(VERDICT_KEY, value)])
    assert isinstance(outcome, Applied)


@pytest.mark.parametrize(
    ("age", "revision", "is_current"),
    [
        (0.0, 1, True),
        (30 * DAY - 1, 1, True),
        (30 * DAY, 1, False),
        (60 * DAY, 1, False),
        (1 - 30 * DAY, 1, True),
        (-30 * DAY, 1, False),
        (0.0, 0, False),
        (0.0, 2, True),
        (30 * DAY, 2, False),
    ],
)
@pytest.mark.parametrize("may_write", [True, False])
async def test_an_outdated_verdict_counts_only_for_a_reader(
    age: float, revision: int, may_write: bool, is_current: bool, server: Server, clock: FakeClock
) -> None:
    """Old, of a time to come, or of fewer checks; that it was looked at changes nothing."""
    at = clock.wall_seconds - age
    await keep(server, at, revision)
    before = await server.get(VERDICT_KEY)
    if not may_write:
        server.write_failure = Misconfigured("url", "x", "is read-only", "allow it")
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    verdict = ProbeVerdict(at, ["x"], {"four": True}, revision)
    assert verdict.is_current(Wall(clock.wall_seconds)) is is_current
    found = await read_verdict(server, components)
    assert found == (verdict if is_current or not may_write else None)
    assert await server.get(VERDICT_KEY) == before


async def test_a_store_that_does_not_answer_is_no_reader(
    server: Server, components: Components
) -> None:
    """Its outdated verdict is neither relied on nor taken for missing."""
    await keep(server, 0)
    server.write_failure = Unavailable("s", "it is away")
    with pytest.raises(Unavailable, match="it is away"):
        await read_verdict(server, components)


@pytest.mark.parametrize("former", ["none", "verdict", "tombstone"])
@pytest.mark.parametrize(("requests", "replies"), [(0, 0), (0, 1), (1, 0), (2, 1)])
async def test_a_verdict_says_what_was_found_and_when(
    former: str,
    requests: int,
    replies: int,
    server: Server,
    components: Components,
    clock: FakeClock,
) -> None:
    """In the place of an earlier one or of its tombstone; also if requests and replies are lost."""
    if former != "none":
        await keep(server, 5.0, 0)
    if former == "tombstone":
        record = await server.get(VERDICT_KEY)
        assert record is not None
        await server.delete(record)
    server.lost_requests, server.lost_replies = requests, replies
    await probe_and_record(server, components)
    record = await server.get(VERDICT_KEY)
    assert record is not None
    assert record.seq == {"none": 1, "verdict": 2, "tombstone": 3}[former]
    value: Any = record.value
    assert {**value, "at": 0} == {"at": 0, "passed": CHECKS, "traits": TRAITS, "revision": 1}
    assert 0 <= clock.wall_seconds - value["at"] < 60
    read = await read_verdict(server, components)
    assert read == ProbeVerdict(value["at"], CHECKS, TRAITS, 1)


@pytest.mark.parametrize("is_stored", [False, True])
async def test_only_a_verdict_that_is_stored_is_renewed(
    server: Server, components: Components, clock: FakeClock, *, is_stored: bool
) -> None:
    """The one that was replaced is returned."""
    if is_stored:
        await keep(server, 5.0, 0)
    findings = [Finding("a", ok=True), Finding("b", ok=True)]
    replaced = await renew_verdict(server, findings, components)
    assert replaced == (ProbeVerdict(5.0, ["x"], {"four": True}, 0) if is_stored else None)
    read = await read_verdict(server, components)
    renewed = ProbeVerdict(clock.wall_seconds, ["a", "b"], TRAITS, 1)
    assert read == (renewed if is_stored else None)


async def test_a_verdict_that_cannot_be_decoded_is_refused(
    server: Server, components: Components, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each who asks for it, with the key to remove."""

    async def fail(*_: object, **__: object) -> None:
        raise Corrupt(VERDICT_KEY, "no JSON")

    monkeypatch.setattr(server, "get", fail)
    for ask in (read_verdict(server, components), renew_verdict(server, [], components)):
        with pytest.raises(Misconfigured, match=r"no JSON.*remove meta/probe by hand") as caught:
            await ask
        assert (caught.value.field, caught.value.value) == ("url", server.name)


FAILURES: dict[str, Callable[[str], Exception]] = {
    "unavailable": lambda text: Unavailable("the store", text),
    "unknown": lambda text: OutcomeUnknown("k", text),
    "corrupt": lambda text: Corrupt("k", text),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_check_is_tried_again_until_its_deadline(
    failure: str, server: Server, components: Components, clock: FakeClock
) -> None:
    """With another key each time, after longer pauses; then it is unavailable by the last error."""
    begun, keys, times = clock.mono_seconds, list[str](), list[float]()

    async def check(key: str) -> None:
        keys.append(key)
        times.append(clock.mono_seconds - begun)
        await server.inner.write([Put(key, 1)])
        raise FAILURES[failure](f"number {len(keys)}")

    with pytest.raises(Unavailable) as caught:
        async with Trials(server, components, deadline=7.0) as trials:
            await trials.run(check)
    number = f"number {len(keys)}"
    if failure == "unavailable":
        assert (caught.value.store, caught.value.reason) == ("the store", number)
    else:
        reason = f"no definite answer came within 7 s ({number})"
        assert (caught.value.store, caught.value.reason) == (server.name, reason)
    assert times[-2] < 7 <= times[-1] < 8
    assert 12 < len(keys) < 60
    assert times[2] < 0.2
    assert len(set(keys)) == len(keys)
    assert all(key.startswith(PROBE_KEYS) for key in keys)
    assert await server.heads(PROBE_KEYS) == []


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_check_that_is_answered_at_last_has_its_answer(
    failure: str, server: Server, components: Components
) -> None:
    """Also just after the deadline of the others; what the trials left is removed."""
    tried: list[str] = []

    async def check(key: str) -> str:
        tried.append(key)
        await server.inner.write([Put(key, 1)])
        if len(tried) % 3:
            raise FAILURES[failure]("no answer")
        return key

    async with Trials(server, components) as trials:
        for count in (3, 6):
            assert await trials.run(check) == tried[-1]
            assert len(tried) == count
    assert await server.heads(PROBE_KEYS) == []


@pytest.mark.parametrize("what", ["drop_failure", "heads_failure"])
@pytest.mark.parametrize(
    "failure",
    [Unavailable("s", "it is away"), OutcomeUnknown("k", "lost"), TimeoutError()],
    ids=lambda failure: type(failure).__name__,
)
async def test_what_cannot_be_removed_does_not_spoil_the_findings(
    what: str, failure: Exception, server: Server, components: Components, clock: FakeClock
) -> None:
    """Whatever the store says; a probe two days later removes it, records and tombstones."""
    setattr(server, what, failure)
    for name in ("record", "tombstone"):
        record = await server.create(f"{PROBE_KEYS}{components.ids.batch()}", name)
        if name == "tombstone":
            await server.delete(record)
    findings = await probe(server, components)
    assert [finding.check for finding in findings] == CHECKS
    assert all(finding.ok for finding in findings)
    assert await server.inner.heads(PROBE_KEYS)
    setattr(server, what, None)
    clock.wall_seconds += 2 * DAY
    clock.mono_seconds += 2 * DAY
    assert BURIAL_AGE < DAY
    await probe(server, components)
    assert await server.heads(PROBE_KEYS) == []
    assert await server.inner.bury(PROBE_KEYS, older_than=-1) == 0


async def test_the_first_error_of_several_checks_ends_a_probe(
    server: Server, components: Components
) -> None:
    """The one that came first, by itself: neither a group nor the cancellation of the others."""
    server.write_failure = Misconfigured("url", "x", "is read-only", "allow it")
    with pytest.raises(Misconfigured) as caught:
        await probe(server, components)
    assert caught.value is server.write_failure
    assert caught.value.__cause__ is None
    assert asyncio.current_task() is not None
