"""The first connect to a bucket, through a network that loses, cuts and fails.

It ends in the truth or in `Unavailable`: a reply that did not come is neither a reason to refuse
a server, nor one to keep a false trait of it in the store.
"""

import asyncio
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import pytest
from proxy import Proxy
from servers import ADMIN, READER, Locate, PostgresServer, S3Server, SeaweedServer

from jobsync import Components, Misconfigured, Store, Unavailable, open_store
from jobsync.core.urls import ObjectsUrl, parse_url
from jobsync.stores.objects.quirks import Quirks, open_and_detect
from jobsync.stores.objects.store import ObjectsStore
from jobsync.stores.opening import open_another, open_bare
from jobsync.stores.probe import PROBE_KEYS, VERDICT_KEY, ProbeVerdict, read_verdict

SEED = 20261116
FOR_EVER = 10**9
Arm = Callable[..., None]
FAULTS: dict[str, Callable[[Proxy], Arm]] = {
    "lost replies": lambda proxy: proxy.drop_reply,
    "lost requests": lambda proxy: proxy.drop_request,
    "cut replies": lambda proxy: proxy.cut_reply,
    "status 500": lambda proxy: partial(proxy.fail_request, 500),
    "status 503": lambda proxy: partial(proxy.fail_request, 503),
    "status 500 after the write": lambda proxy: partial(proxy.fail_reply, 500),
}
COMPONENTS = Components.system()


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    """A proxy in front of the server."""
    with Proxy("127.0.0.1", s3.port) as proxy:
        yield proxy


def behind(proxy: Proxy, url: str) -> str:
    """Return the URL of the same bucket behind the proxy."""
    return re.sub(r"@127\.0\.0\.1:[0-9]+/", f"@127.0.0.1:{proxy.port}/", url)


def objects_url(text: str) -> ObjectsUrl:
    """Parse a bucket's URL."""
    url = parse_url(text)
    assert isinstance(url, ObjectsUrl)
    return url


async def read_stored(url: str) -> ProbeVerdict | None:
    """Read the verdict that is kept in the store, current or not."""
    store = await ObjectsStore.connect(objects_url(url))
    record = await store.get(VERDICT_KEY)
    await store.close()
    return None if record is None else msgspec.convert(record.value, ProbeVerdict)


async def connect_first(url: str, proxy: Proxy) -> Quirks | None:
    """Connect through the proxy; return the traits that were found, None if unavailable."""
    try:
        store = await open_store(behind(proxy, url))
    except Unavailable:
        return None
    await store.close()
    return Quirks.from_traits(store.traits)


@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_first_connect_ends_in_the_truth(
    fault: str,
    share: float,
    locate: Locate,
    proxy: Proxy,
    quirks: Quirks,
    full_scale: bool,
    proof: Any,
) -> None:
    """Or in `Unavailable`; and no false verdict is kept in the store."""
    dice = random.Random(SEED)
    ends: Counter[str] = Counter()
    for _ in range(25 if full_scale else 2):
        url = locate("s3")
        FAULTS[fault](proxy)(FOR_EVER, when=lambda _: dice.random() < share)
        try:
            found = await connect_first(url, proxy)
        except Misconfigured:
            ends["refused"] += 1
        else:
            right = "unavailable" if found is None else "opened"
            ends[right if found in (None, quirks) else "false traits"] += 1
        proxy.pass_through()
        verdict = await read_stored(url)
        if verdict is not None:
            ends["kept"] += 1
            ends["false kept"] += Quirks.from_traits(verdict.traits) != quirks
    proof.record("first connects", url="s3", fault=fault, share=share, **ends)
    proof.tell(f"{fault} {share:.0%}: {dict(ends)}")
    assert ends["refused"] == ends["false traits"] == ends["false kept"] == 0, ends
    assert ends["opened"] + ends["unavailable"] == (25 if full_scale else 2)


@pytest.mark.parametrize("fault", ["lost replies", "lost requests"])
async def test_a_single_loss_changes_nothing(
    fault: str, locate: Locate, proxy: Proxy, quirks: Quirks
) -> None:
    """Whichever write or delete of the first connect it hits."""

    def is_change(request: bytes) -> bool:
        return request.startswith((b"PUT", b"DELETE"))

    for number in itertools.count():
        changes = itertools.count()
        faults = proxy.faults
        FAULTS[fault](proxy)(
            when=lambda request: is_change(request) and next(changes) == number  # noqa: B023
        )
        url = locate("s3")
        assert await connect_first(url, proxy) == quirks
        proxy.pass_through()
        verdict = await read_stored(url)
        assert verdict is not None
        assert Quirks.from_traits(verdict.traits) == quirks
        if proxy.faults == faults:
            break
    assert number > 20


def ignore_condition(request: bytes) -> bytes:
    """Make a DELETE unconditional; its signature does not cover the header."""
    if not request.startswith(b"DELETE"):
        return request
    return re.sub(rb"(?i)\r\nif-match:[^\r]*", b"", request)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_server_that_ignores_conditions_on_delete_is_not_believed_to_honour_them(
    fault: str, locate: Locate, proxy: Proxy
) -> None:
    """A DELETE that never arrived looks like one that was refused."""
    proxy.rewrite(ignore_condition)
    for number in range(3):
        deletes = itertools.count()
        FAULTS[fault](proxy)(
            when=lambda request: request.startswith(b"DELETE") and next(deletes) == number  # noqa: B023
        )
        store = await open_and_detect(objects_url(behind(proxy, locate("s3"))), COMPONENTS)
        await store.close()
        assert store.traits["conditional_delete"] is False
        proxy.pass_through()


async def test_without_a_definite_answer_it_is_unavailable(
    locate: Locate, proxy: Proxy, clock: Any
) -> None:
    """Not misconfigured; nothing is kept, and a later connect succeeds."""
    url = locate("s3")
    components = Components(clock=clock, randomness=COMPONENTS.randomness, events=COMPONENTS.events)
    proxy.drop_reply(FOR_EVER, when=lambda request: request.startswith(b"PUT"))
    begun = clock.mono()
    with pytest.raises(Unavailable, match=r"no definite answer came within 30 s \(the connection"):
        await open_store(behind(proxy, url), components)
    assert 30 <= clock.mono() - begun < 40
    proxy.pass_through()
    assert await read_stored(url) is None
    await (await open_store(url)).close()


async def test_lost_replies_are_no_verdict_on_postgresql(
    locate: Locate, postgres: PostgresServer
) -> None:
    """The checks on its tables pass, or the server was unavailable."""
    dice = random.Random(SEED)
    opened = 0
    with Proxy("127.0.0.1", postgres.port) as proxy:
        for _ in range(5):
            url = locate("postgres")
            await (await open_bare(parse_url(url), COMPONENTS)).close()
            proxy.drop_reply(FOR_EVER, when=lambda data: b"probe/" in data and dice.random() < 0.2)
            with suppress(Unavailable):
                await (await open_store(behind(proxy, url))).close()
                opened += 1
            proxy.pass_through()
    assert opened > 0
    assert proxy.faults > 0


def negate(quirks: Quirks) -> dict[str, bool]:
    """Return traits that are all false."""
    return {name: not trait for name, trait in msgspec.structs.asdict(quirks).items()}


async def keep(url: str, **verdict: Any) -> None:
    """Store a verdict, as an earlier process did."""
    store = await ObjectsStore.connect(objects_url(url))
    await store.create(VERDICT_KEY, {"passed": ["a name is created once"], **verdict})
    await store.close()


@pytest.mark.parametrize(
    ("age", "revision"), [(60, {}), (31 * 86400, {"revision": 1}), (-31 * 86400, {"revision": 1})]
)
async def test_an_outdated_verdict_is_examined_again(
    age: float, revision: dict[str, int], bucket_url: str, quirks: Quirks
) -> None:
    """One by older code, which may rest on a lost reply, and one by a server of long ago."""
    at = COMPONENTS.clock.wall().seconds - age
    await keep(bucket_url, at=at, traits=negate(quirks), **revision)
    store = await open_store(bucket_url)
    assert Quirks.from_traits(store.traits) == quirks
    verdict = await read_verdict(store, COMPONENTS)
    assert verdict is not None
    assert Quirks.from_traits(verdict.traits) == quirks
    await store.close()


async def test_a_reader_relies_on_an_outdated_verdict(
    s3: S3Server, bucket_url: str, quirks: Quirks
) -> None:
    """It cannot probe the store, and what a probe checks concerns those who write."""
    if not (isinstance(s3, SeaweedServer) and s3.is_ours):
        pytest.skip("needs an identity that may not write")
    readers_url = bucket_url.replace(":".join(ADMIN), ":".join(READER))
    with pytest.raises(Misconfigured, match="AccessDenied"):
        await open_store(readers_url)
    await keep(bucket_url, at=0, traits=negate(quirks))
    store = await open_store(readers_url)
    assert await store.get(VERDICT_KEY) is not None
    with pytest.raises(Misconfigured, match="AccessDenied"):
        await store.create("n/1", 1)
    await store.close()


async def test_a_current_verdict_is_relied_on(bucket_url: str, proxy: Proxy) -> None:
    """A later connect makes three requests, and the heartbeats' own store one more."""
    await (await open_store(bucket_url)).close()
    url = behind(proxy, bucket_url)
    store = await open_store(url)
    assert proxy.requests == 3
    another = await open_another(store, parse_url(url), COMPONENTS)
    assert proxy.requests == 4
    assert another.traits == store.traits
    await another.close()
    await store.close()


async def test_processes_that_connect_first_at_once_agree(
    bucket_url: str, proxy: Proxy, quirks: Quirks
) -> None:
    """Each finds the truth, though each loses replies; one verdict is kept."""
    dice = random.Random(SEED)
    proxy.drop_reply(FOR_EVER, when=lambda _: dice.random() < 0.1)
    found = await asyncio.gather(*(connect_first(bucket_url, proxy) for _ in range(8)))
    assert set(found) <= {quirks, None}
    assert quirks in found
    proxy.pass_through()
    verdict = await read_stored(bucket_url)
    assert verdict is not None
    assert Quirks.from_traits(verdict.traits) == quirks


async def list_probe_keys(store: Store) -> list[str]:
    """Return the keys that checks have left."""
    return [head.key for head in await store.heads(PROBE_KEYS)]


async def test_a_cancelled_first_connect_leaves_no_verdict(
    locate: Locate, proxy: Proxy, quirks: Quirks
) -> None:
    """Whatever it has left, the next connect is not disturbed by it."""
    for requests in range(1, 50, 7):
        url = locate("s3")
        wanted = proxy.requests + requests
        connecting = asyncio.create_task(connect_first(url, proxy))
        await asyncio.to_thread(proxy.wait_for, requests=wanted)
        connecting.cancel()
        with suppress(asyncio.CancelledError):
            await connecting
        verdict = await read_stored(url)
        assert verdict is None or Quirks.from_traits(verdict.traits) == quirks
        assert await connect_first(url, proxy) == quirks


async def test_a_first_connect_leaves_no_records(bucket_url: str) -> None:
    """All keys of the checks are removed, tombstones too; only the verdict stays."""
    store = await open_store(bucket_url)
    assert await list_probe_keys(store) == []
    inner = store.inner  # type: ignore[attr-defined]
    folder = inner._names.folder_of_level(PROBE_KEYS)
    assert await inner._bucket.list_folder(folder, "work").take(1, lambda item: item) == []
    await store.close()
