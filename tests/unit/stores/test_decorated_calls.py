"""Every call of every store has the contract's arguments, and decorators pass all of them on."""

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import (
    Applied,
    Components,
    Conflict,
    Conflicted,
    Events,
    OutcomeUnknown,
    Put,
    Record,
    Store,
    Unavailable,
    Unknown,
)
from jobsync.stores.contract import Delete, find_applied, unwrap
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.stores.metered import FREE, S3_TARIFF, Meter, MeteredStore, Tariff
from jobsync.stores.objects.store import ObjectsStore
from jobsync.stores.postgres.store import PostgresStore
from jobsync.stores.settling import SettlingStore
from jobsync.stores.sqlite.store import SqliteStore

SHORTHANDS = {"get", "create", "put", "delete"}
CALLS = [
    name
    for name, member in vars(Store).items()
    if inspect.iscoroutinefunction(member) and not name.startswith("_") and name not in SHORTHANDS
]
UNCOUNTED = {"wait", "now", "close"}

RECORD = Record("n/a", 1, "A" * 12, 1, 0, 1, "A" * 12)
BATCH = "1794731956371-ca547d85fb8b"
VALUES: dict[str, Any] = {
    "keys": ["n/a", "n/b"],
    "tombstones": True,
    "changes": [Put("n/a", 1, nonce="B" * 12), Put("n/b", 1, nonce="C" * 12)],
    "prefix": "n/",
    "after": "n/b",
    "until": "n/c",
    "limit": 7,
    "where": {"n": 1},
    "stream": "h",
    "entries": [1, 2],
    "batch": BATCH,
    "older_than": 7.5,
    "topic": "n/",
    "timeout": 0.5,
    "record": RECORD,
}
"""A value for each argument; none is a default."""


def list_arguments(call: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a call, as the contract has them."""
    parameters = dict(inspect.signature(getattr(Store, call)).parameters)
    del parameters["self"]
    return parameters


class WitnessStore(MemoryStore):
    """Records the arguments of each call, and returns a fixed answer, or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.answer: Any = object()
        self.failure: BaseException | None = None


def _record_call(call: str) -> Callable[..., Any]:
    signature = inspect.signature(getattr(Store, call))

    async def record(store: WitnessStore, *arguments: Any, **named: Any) -> Any:
        bound = signature.bind(store, *arguments, **named)
        bound.apply_defaults()
        passed = dict(bound.arguments)
        del passed["self"]
        store.calls.append((call, passed))
        if store.failure is not None:
            raise store.failure
        return store.answer

    return record


for _call in CALLS:
    setattr(WitnessStore, _call, _record_call(_call))


def components() -> Components:
    """Return components with a fake clock."""
    return Components(clock=FakeClock(), randomness=SeededRandomness(1), events=Events())


DECORATORS: dict[str, Callable[[Store], Store]] = {
    "plain": StoreDecorator,
    "metered": lambda inner: MeteredStore(inner, Meter(), FakeClock()),
    "settling": lambda inner: SettlingStore(inner, components()),
}


@pytest.mark.parametrize("decorate", DECORATORS.values(), ids=DECORATORS)
@pytest.mark.parametrize("call", CALLS)
async def test_a_decorator_passes_on_all_arguments_and_the_answer(
    call: str, decorate: Callable[[Store], Store]
) -> None:
    """None is dropped, replaced by a default, or confused with another."""
    inner = WitnessStore()
    if call == "write":
        inner.answer = [Applied(RECORD), Applied(RECORD)]
    arguments = {name: VALUES[name] for name in list_arguments(call)}
    answer = await getattr(decorate(inner), call)(**arguments)
    returns_nothing = call in {"append", "drop", "wait", "close"}
    assert returns_nothing or answer is inner.answer
    assert inner.calls == [(call, arguments)]


def list_stores() -> list[type[Store]]:
    """Return all stores of the library that are imported here, and all decorators."""
    found: list[type[Store]] = [MemoryStore, SqliteStore, PostgresStore, ObjectsStore]
    decorators: list[type[Store]] = [StoreDecorator, *StoreDecorator.__subclasses__()]
    return [*found, *(kind for kind in decorators if kind.__module__.startswith("jobsync."))]


@pytest.mark.parametrize("call", [*CALLS, *sorted(SHORTHANDS)])
def test_every_store_has_the_arguments_and_the_defaults_of_the_contract(call: str) -> None:
    """A caller need not know which store it has."""
    wanted = [(p.name, p.kind, p.default) for p in list_arguments(call).values()]
    for kind in list_stores():
        _, *parameters = inspect.signature(getattr(kind, call)).parameters.values()
        assert [(p.name, p.kind, p.default) for p in parameters] == wanted, kind


@pytest.mark.parametrize(
    ("call", "passed"),
    [
        (lambda s: s.get("n/a"), ("get_many", {"keys": ["n/a"], "tombstones": False})),
        (
            lambda s: s.get("n/a", tombstones=True),
            ("get_many", {"keys": ["n/a"], "tombstones": True}),
        ),
        (lambda s: s.create("n/a", 5), ("write", {"changes": [Put("n/a", 5, None, 0, 1)]})),
        (
            lambda s: s.create("n/a", 5, epoch=3, format=2),
            ("write", {"changes": [Put("n/a", 5, None, 3, 2)]}),
        ),
        (lambda s: s.put(RECORD, 5), ("write", {"changes": [Put("n/a", 5, RECORD, None, 1)]})),
        (
            lambda s: s.put(RECORD, 5, epoch=3, format=2),
            ("write", {"changes": [Put("n/a", 5, RECORD, 3, 2)]}),
        ),
        (lambda s: s.delete(RECORD), ("write", {"changes": [Delete(RECORD, None, 1)]})),
        (
            lambda s: s.delete(RECORD, epoch=3, format=2),
            ("write", {"changes": [Delete(RECORD, 3, 2)]}),
        ),
    ],
)
async def test_the_shorthands_make_one_call(
    call: Callable[[Store], Any], passed: tuple[str, dict[str, Any]]
) -> None:
    """With all that was said, and the contract's defaults for the rest."""
    inner = WitnessStore()
    inner.answer = [RECORD] if passed[0] == "get_many" else [Applied(RECORD)]
    assert await call(inner) is RECORD
    assert inner.calls == [passed]


SENT = {"get_many": 2, "write": 2, "append": 2, "drop": 2, "age": 1}
"""How many items a call sends; those that list send none."""


@pytest.mark.parametrize(
    "failure", [Unavailable("store", "gone"), asyncio.CancelledError()], ids=["error", "cancelled"]
)
@pytest.mark.parametrize("call", [call for call in CALLS if call not in UNCOUNTED])
async def test_a_call_that_fails_is_counted_once(call: str, failure: BaseException) -> None:
    """As an error, with what it sent, whether it was refused or its caller left; twice if twice."""
    inner, meter = WitnessStore(), Meter()
    inner.failure = failure
    store = MeteredStore(inner, meter, FakeClock())
    for times in (1, 2):
        with pytest.raises(type(failure)):
            await getattr(store, call)(**{name: VALUES[name] for name in list_arguments(call)})
        (counted,) = meter.stats.values()
        assert (counted.calls, counted.errors) == (times, times)
        assert counted.items == times * SENT.get(call, 0)


@pytest.mark.parametrize("decorate", DECORATORS.values(), ids=DECORATORS)
def test_a_decorated_store_says_the_same_of_itself(decorate: Callable[[Store], Store]) -> None:
    """Its name, its traits, what it costs, and what is atomic."""
    inner = WitnessStore()
    for is_billed, is_atomic in ((False, True), (True, False)):
        inner.name, inner.traits = f"memory://{is_billed}", {"bare_etags": is_billed}
        inner.is_billed, inner.is_atomic = is_billed, is_atomic
        store = decorate(inner)
        assert (store.name, store.traits) == (inner.name, inner.traits)
        assert (store.is_billed, store.is_atomic) == (is_billed, is_atomic)
        assert store.sql is inner.sql


async def test_outcomes_are_counted_by_their_kind() -> None:
    """In each batch, and in all of them together."""
    inner, meter = WitnessStore(), Meter()
    store = MeteredStore(inner, meter, FakeClock())
    for batch in ("acu", "uu", "c", "aaa", ""):
        kinds = {"a": Applied(RECORD), "c": Conflicted(), "u": Unknown("lost")}
        inner.answer = [kinds[kind] for kind in batch]
        await store.write([])
    stats = meter["write"]
    assert (stats.calls, stats.items) == (5, 9)
    assert (stats.conflicts, stats.unknowns, stats.errors) == (2, 3, 0)


PRICED = Tariff(
    {call: (n, 2 * n) for n, call in enumerate(("get", "heads", "bury", "append", "drop"), 2)},
    {call: (3.0 * n, 5.0 * n) for n, call in enumerate(("get", "scan", "bury", "write"), 2)},
)
"""Every call has another price, and another number of requests."""


class SlowStore(StoreDecorator):
    """Takes a second and a half for each call."""

    def __init__(self, inner: Store, clock: FakeClock) -> None:
        super().__init__(inner)
        self._clock = clock

    async def around(self, call: str, sent: int, work: Callable[[], Any]) -> Any:
        self._clock.mono_seconds += 1.5
        return await super().around(call, sent, work)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("call", "answer", "items"),
    [
        ("get_many", [RECORD, None, None], 3),
        ("write", [Conflicted()] * 3, 3),
        ("heads", [1, 2, 3], 3),
        ("heads", [], 0),
        ("scan", [RECORD] * 4, 4),
        ("read", [1, 2, 3, 4, 5], 5),
        ("append", None, 2),
        ("drop", None, 2),
        ("discard", 6, 6),
        ("bury", 7, 7),
        ("bury", 0, 0),
        ("age", 7.5, 1),
        ("age", None, 1),
    ],
)
async def test_a_call_costs_what_it_sent_received_or_removed(
    call: str, answer: object, items: int, *, fails: bool
) -> None:
    """By its own tariff, with its own duration, each time; one that fails costs what it sent."""
    clock, meter = FakeClock(), Meter(PRICED)
    inner = WitnessStore()
    inner.answer, inner.failure = answer, Unavailable("store", "gone") if fails else None

    store = MeteredStore(SlowStore(inner, clock), meter, clock)
    kind = call.removesuffix("_many")
    counted = SENT.get(call, 0) if fails else items
    stats = meter[kind]
    for times in (1, 2):
        with suppress(Unavailable):
            await getattr(store, call)(**{name: VALUES[name] for name in list_arguments(call)})
        clock.mono_seconds += 100
        requests = PRICED.count(kind, counted)
        assert (stats.calls, stats.items, stats.errors) == (
            times,
            times * counted,
            times * fails,
        )
        assert (stats.requests, stats.dollars) == (
            times * requests,
            times * PRICED.price(kind, counted),
        )
        assert stats.seconds == pytest.approx(times * 1.5)
    assert (meter.requests, meter.dollars) == (stats.requests, stats.dollars)


@pytest.mark.parametrize(
    ("call", "requests", "writes", "reads"),
    [
        ("get", 3, 0, 3),
        ("write", 3, 3, 0),
        ("heads", 1, 1, 0),
        ("scan", 4, 1, 3),
        ("append", 1, 1, 0),
        ("read", 4, 1, 3),
        ("discard", 1, 1, 0),
        ("bury", 7, 1, 3),
        ("drop", 1, 0, 0),
        ("age", 1, 0, 0),
    ],
)
def test_the_tariff_of_s3(call: str, requests: int, writes: int, reads: int) -> None:
    """For three items: listings cost what writes cost, reads a twelfth, and deletes nothing."""
    assert S3_TARIFF.count(call, 3) == requests
    assert S3_TARIFF.price(call, 3) == pytest.approx(writes * 5e-6 + reads * 0.4e-6)
    assert (FREE.count(call, 3), FREE.price(call, 3)) == (1, 0)


def test_an_unknown_outcome_is_neither_a_record_nor_a_conflict() -> None:
    """Whoever asks for the record of a change."""
    for ask in (unwrap, find_applied):
        assert ask(Applied(RECORD), "n/a") is RECORD
        with pytest.raises(OutcomeUnknown, match="n/a is unknown \\(lost\\)"):
            ask(Unknown("lost"), "n/a")
    assert find_applied(Conflicted(), "n/a") is None
    with pytest.raises(Conflict, match="n/a was changed"):
        unwrap(Conflicted(), "n/a")
