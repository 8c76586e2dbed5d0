"""A store that cannot be opened leaves nothing open, at whichever step it fails."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, Events, Misconfigured, Store, Unavailable
from jobsync.core.urls import ObjectsUrl, parse_url
from jobsync.stores import opening
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.stores.objects import quirks as quirks_module
from jobsync.stores.objects.bucket import Bucket
from jobsync.stores.objects.store import ObjectsStore
from jobsync.stores.probe import ProbeVerdict
from jobsync.stores.settling import SettlingStore

FAILURES = [
    Unavailable("store", "gone"),
    Misconfigured("url", "store", "is wrong", "fix"),
    asyncio.CancelledError(),
    ZeroDivisionError(),
]
VERDICT = ProbeVerdict(0.0, [], {"bare_etags": True, "conditional_delete": True})
COMPONENTS = Components(clock=FakeClock(), randomness=SeededRandomness(1), events=Events())


class CountingStore(StoreDecorator):
    """Counts how often it is closed."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1

    def set_quirks(self, *, bare_etags: bool, conditional_delete: bool) -> None:
        """Set how conditions are sent."""
        self.traits = {"bare_etags": bare_etags, "conditional_delete": conditional_delete}


def answer(result: object) -> Callable[..., Awaitable[Any]]:
    """Return a call that returns something, or raises it."""

    async def call(*_: object, **__: object) -> object:
        if isinstance(result, BaseException):
            raise result
        return result

    return call


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("step", ["read_verdict", "probe_and_record"])
async def test_a_store_that_fails_the_first_look_is_closed(
    step: str, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; the error is the one that was raised."""
    store = CountingStore()
    monkeypatch.setattr(opening, "open_bare", answer(store))
    monkeypatch.setattr(opening, "read_verdict", answer(None))
    monkeypatch.setattr(opening, step, answer(failure))
    with pytest.raises(type(failure)) as caught:
        await opening.open_store("postgresql://nowhere/x", COMPONENTS)
    assert caught.value is failure
    assert store.closed == 1


@pytest.mark.parametrize(("verdict", "probes"), [(None, 1), (VERDICT, 0)])
async def test_a_store_that_passes_stays_open_and_settles_its_writes(
    verdict: ProbeVerdict | None, probes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is probed unless somebody has done so before."""
    store, probed = CountingStore(), list[Store]()

    async def probe(found: Store, _: Components) -> None:
        probed.append(found)

    monkeypatch.setattr(opening, "open_bare", answer(store))
    monkeypatch.setattr(opening, "read_verdict", answer(verdict))
    monkeypatch.setattr(opening, "probe_and_record", probe)
    opened = await opening.open_store("postgresql://nowhere/x", COMPONENTS)
    assert isinstance(opened, SettlingStore)
    assert opened.inner is store
    assert (probed, store.closed) == ([store] * probes, 0)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize(
    ("open_it", "step"),
    [
        ("open_with_quirks", "read_verdict"),
        ("open_with_quirks", "detect_quirks"),
        ("open_and_detect", "detect_quirks"),
    ],
)
async def test_a_bucket_whose_quirks_are_not_found_is_closed(
    open_it: str, step: str, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; the error is the one that was raised."""
    store = CountingStore()
    monkeypatch.setattr(ObjectsStore, "connect", answer(store))
    monkeypatch.setattr(quirks_module, "read_verdict", answer(None))
    monkeypatch.setattr(quirks_module, step, answer(failure))
    with pytest.raises(type(failure)) as caught:
        await getattr(quirks_module, open_it)(cast("Any", None), COMPONENTS)
    assert caught.value is failure
    assert store.closed == 1


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("deletes", [False, True])
async def test_the_quirks_of_a_verdict_or_of_an_open_store_are_used(
    bare: bool, deletes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is detected again, and neither quirk is taken for the other."""
    traits = {"bare_etags": bare, "conditional_delete": deletes}
    known = CountingStore()
    known.set_quirks(bare_etags=bare, conditional_delete=deletes)
    monkeypatch.setattr(quirks_module, "read_verdict", answer(ProbeVerdict(0.0, [], traits)))
    for open_it, first in (("open_with_quirks", []), ("open_like", [known])):
        store = CountingStore()
        monkeypatch.setattr(ObjectsStore, "connect", answer(store))
        opened = await getattr(quirks_module, open_it)(*first, cast("Any", None), COMPONENTS)
        assert opened is store
        assert (store.traits, store.closed) == (traits, 0)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
async def test_a_bucket_that_cannot_be_listed_is_closed(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads end."""
    closed: list[str] = []
    url = parse_url("s3://key:not-the-secret@127.0.0.1:9/bucket/prefix")
    assert isinstance(url, ObjectsUrl)

    class Listing:
        take = staticmethod(answer(failure))

    monkeypatch.setattr(Bucket, "list_folder", lambda *_, **__: Listing())
    monkeypatch.setattr(Bucket, "close", lambda bucket: closed.append(bucket.name))
    with pytest.raises(type(failure)) as caught:
        await ObjectsStore.connect(url, COMPONENTS)
    assert caught.value is failure
    assert closed == [str(url)]
