"""The object store: its requests, how it reads the answers, and how it ends."""

import asyncio
import itertools
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import obstore
import pytest
from proxy import Proxy
from servers import READER, Identity, SeaweedServer

from jobsync import (
    Applied,
    Components,
    Conflicted,
    Corrupt,
    JobsyncError,
    Misconfigured,
    OutcomeUnknown,
    Put,
    Unavailable,
    Unknown,
)
from jobsync.core.urls import ObjectsUrl, parse_url
from jobsync.stores.objects.bucket import Bucket
from jobsync.stores.objects.errors import FailedRequest
from jobsync.stores.objects.store import ObjectsStore

_BUCKET = "objects"
_prefixes = (f"t{os.getpid()}-{i}" for i in itertools.count())


def objects_url(text: str) -> ObjectsUrl:
    """Parse a bucket's URL."""
    url = parse_url(text)
    assert isinstance(url, ObjectsUrl)
    return url


def unconnected(url: ObjectsUrl) -> ObjectsStore:
    """Create a store that has made no request yet."""
    bucket = Bucket(url, bare_etags=False)
    return ObjectsStore(url, bucket, Components.system(), conditional_delete=True)


@pytest.fixture(scope="module")
def server(s3: SeaweedServer) -> SeaweedServer:
    """A real S3 server with a bucket."""
    s3.create_bucket(_BUCKET)
    return s3


@pytest.fixture
def prefix() -> str:
    """A part of the bucket that no other test uses."""
    return next(_prefixes)


@pytest.fixture
async def store(server: SeaweedServer, prefix: str) -> AsyncIterator[ObjectsStore]:
    """A store on the server."""
    url = objects_url(server.url(_BUCKET, prefix))
    store = await ObjectsStore.connect(url, conditional_delete=True)
    yield store
    await store.close()


@pytest.fixture
def proxy(server: SeaweedServer) -> Iterator[Proxy]:
    """A proxy in front of the server."""
    with Proxy("127.0.0.1", server.port) as proxy:
        yield proxy


@pytest.fixture
async def behind(proxy: Proxy, server: SeaweedServer, prefix: str) -> AsyncIterator[ObjectsStore]:
    """A store on the same records that connects through the proxy."""
    text = server.url(_BUCKET, prefix).replace(f":{server.port}/", f":{proxy.port}/")
    store = await ObjectsStore.connect(objects_url(text), conditional_delete=True)
    yield store
    await store.close()


async def test_each_call_makes_the_documented_requests(behind: ObjectsStore, proxy: Proxy) -> None:
    """One request for a get, a change, a batch, a listing; one more for each record scanned."""

    async def requests(call: object) -> int:
        before = proxy.requests
        await call  # type: ignore[misc]
        return proxy.requests - before

    assert await requests(behind.create("one/x", 1)) == 1
    assert await requests(behind.get("one/x")) == 1
    assert await requests(behind.get("one/none")) == 1
    assert await requests(behind.append("history/a", list(range(100)))) == 1
    assert await requests(behind.append("history/a", [])) == 0
    assert await requests(behind.read("history/a")) == 2
    assert await requests(behind.write([Put(f"n/{i:03d}", i) for i in range(100)])) == 100
    assert await requests(behind.heads("n/")) == 1
    assert await requests(behind.heads("n/", limit=10)) == 1
    assert await requests(behind.scan("n/")) == 101
    assert await requests(behind.scan("n/", limit=10)) == 11
    assert await requests(behind.discard("history/a", older_than=-60)) == 2
    assert await requests(behind.drop([f"n/{i:03d}" for i in range(100)])) == 1
    assert await requests(behind.wait("n/", 0.001)) == 0


async def test_a_level_of_more_than_a_page_is_listed_completely(
    behind: ObjectsStore, store: ObjectsStore, proxy: Proxy
) -> None:
    """Two pages for 1,100 names; tombstones are neither read nor counted."""
    outcomes = await store.write([Put(f"n/{i:04d}", i) for i in range(1100)])
    made = [done.record for done in outcomes if isinstance(done, Applied)]
    await store.write([record.delete() for record in made[:500:5]])
    alive = [record.key for i, record in enumerate(made) if i >= 500 or i % 5]
    before = proxy.requests
    assert [head.key for head in await behind.heads("n/", limit=2000)] == alive
    assert proxy.requests - before == 2
    before = proxy.requests
    found = await behind.scan("n/", limit=5)
    assert [record.key for record in found] == alive[:5]
    assert proxy.requests - before == 6


async def test_a_range_is_listed_with_the_fewest_requests(
    behind: ObjectsStore, store: ObjectsStore, proxy: Proxy
) -> None:
    """No page is requested after a name at or beyond the end of the range was seen."""
    keys = [f"n/{i:04d}" for i in range(2500)]
    await store.write([Put(key, 0) for key in keys])

    async def requests(first: int, end: int, *, limit: int = 100_000) -> int:
        """List the keys from one number to another, and check them."""
        after = keys[first - 1] if first else ""
        before = proxy.requests
        found = await behind.heads("n/", after=after, until=f"n/{end:04d}", limit=limit)
        assert [head.key for head in found] == keys[first:end][:limit]
        return proxy.requests - before

    assert await requests(0, 3) == 1
    assert await requests(1200, 1210) == 1
    assert await requests(0, 999) == 1
    assert await requests(0, 1000, limit=1000) == 1
    assert await requests(0, 1000) == 2
    assert await requests(0, 1003) == 2
    assert await requests(0, 2500) == 3
    assert await requests(0, 9999) == 3
    assert await requests(1600, 9999) == 1
    assert await requests(1500, 2500) == 1
    # After a key, and before the same key or an earlier one.
    assert await requests(6, 5) == 0
    assert await requests(8, 5) == 0


async def test_a_history_is_read_with_the_fewest_objects(
    behind: ObjectsStore, proxy: Proxy
) -> None:
    """Names have the number of a batch's entries, so only the needed batches are read."""
    for i in range(5):
        await behind.append("history/a", [i] * 10, batch=f"179473195637{i}-ca547d85fb8b")
    before = proxy.requests
    first = await behind.read("history/a", limit=15)
    assert [entry.value for entry in first] == [0] * 10 + [1] * 5
    assert proxy.requests - before == 3
    before = proxy.requests
    rest = await behind.read("history/a", after=first[-1].id, limit=5)
    assert [entry.value for entry in rest] == [1] * 5
    assert proxy.requests - before == 2
    before = proxy.requests
    last = await behind.read("history/a", after=rest[-1].id)
    assert [entry.value for entry in last] == [2] * 10 + [3] * 10 + [4] * 10
    assert proxy.requests - before == 4


async def test_a_damaged_batch_is_reported_and_the_others_are_read(
    store: ObjectsStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The entries after a corrupt batch are read."""
    for i in range(3):
        await store.append("history/a", [i], batch=f"179473195637{i}-ca547d85fb8b")
    folder = store._names.folder_of_stream("history/a")
    obstore.put(store._bucket._write_client, f"{folder}1794731956371-ca547d85fb8b-00001", b"[")
    assert [entry.value for entry in await store.read("history/a")] == [0, 2]
    assert "key=history/a#1794731956371-ca547d85fb8b" in caplog.text


async def test_discarded_entries_are_counted(store: ObjectsStore) -> None:
    """Entries, not batches; newer ones stay."""
    await store.append("history/a", [1, 2, 3], batch="1000000000000-ca547d85fb8b")
    await store.append("history/a", [4, 5], batch="1000000000001-ca547d85fb8b")
    await store.append("history/a", [6])
    assert await store.discard("history/a", older_than=60) == 5
    assert [entry.value for entry in await store.read("history/a")] == [6]


async def test_a_lost_reply_leaves_the_outcome_unknown(
    behind: ObjectsStore, store: ObjectsStore, proxy: Proxy
) -> None:
    """The write is stored, but its writer got neither applied nor conflicted."""
    proxy.drop_reply(when=lambda request: request.startswith(b"PUT"))
    (outcome,) = await behind.write([Put("n/1", 1)])
    assert outcome == Unknown("the connection was lost")
    assert await store.get("n/1") is not None


async def test_a_request_that_arrives_late_is_unknown_too(
    behind: ObjectsStore, store: ObjectsStore, proxy: Proxy
) -> None:
    """It arrives after the writer got its outcome."""
    proxy.hold_request(when=lambda request: request.startswith(b"PUT"))
    (outcome,) = await behind.write([Put("n/1", 1)])
    assert isinstance(outcome, Unknown)
    assert await store.get("n/1") is None
    await asyncio.to_thread(proxy.release)
    assert await store.get("n/1") is not None


async def test_a_failed_change_does_not_affect_the_outcomes_of_others(
    behind: ObjectsStore, proxy: Proxy
) -> None:
    """A batch has an outcome for each change, even if one of them fails."""
    await behind.create("n/2", 0)
    proxy.drop_request(when=lambda request: b"/n/1 " in request)
    outcomes = await behind.write([Put(f"n/{i}", i) for i in range(4)])
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [Applied, Unknown, Conflicted, Applied]


async def test_an_unsent_change_is_unknown_if_another_was_sent(
    store: ObjectsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Unavailable` means that nothing was written, so it is raised only if that is true."""
    send = store._bucket._put

    def put(name: str, body: bytes, etag: str | None) -> str | FailedRequest:
        return FailedRequest(was_sent=False) if name.endswith("/n/1") else send(name, body, etag)

    monkeypatch.setattr(store._bucket, "_put", put)
    kinds = [type(outcome) for outcome in await store.write([Put("n/1", 1), Put("n/2", 2)])]
    assert kinds == [Unknown, Applied]
    with pytest.raises(Unavailable, match="no connection"):
        await store.write([Put("n/1", 1)])


async def test_a_create_is_not_in_conflict_with_a_missing_name(
    store: ObjectsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """404 refuses a replacement, but decides nothing about a create, and stores no entries."""
    record = await store.create("n/1", 1)
    missing = FailedRequest(status=404, code="NoSuchKey")
    monkeypatch.setattr(store._bucket, "_put", lambda *_: missing)
    kinds = [type(outcome) for outcome in await store.write([Put("n/2", 2), record.replace(3)])]
    assert kinds == [Unknown, Conflicted]
    with pytest.raises(OutcomeUnknown, match="404 NoSuchKey"):
        await store.append("history/a", [1])


async def test_an_append_whose_reply_was_lost_can_be_sent_again(
    behind: ObjectsStore, proxy: Proxy
) -> None:
    """It raises, and the second append adds nothing."""
    batch = "1794731956371-ca547d85fb8b"
    proxy.drop_reply(when=lambda request: request.startswith(b"PUT"))
    with pytest.raises(OutcomeUnknown, match="history/a"):
        await behind.append("history/a", ["x"], batch=batch)
    await behind.append("history/a", ["x"], batch=batch)
    assert [entry.value for entry in await behind.read("history/a")] == ["x"]


async def test_a_read_is_retried(behind: ObjectsStore, proxy: Proxy) -> None:
    """Reading is safe to repeat, so the caller does not notice a lost reply."""
    await behind.create("n/1", 1)
    proxy.drop_reply(when=lambda request: request.startswith(b"GET"))
    assert await behind.get("n/1") is not None


def assert_hides_secrets(error: BaseException, identity: Identity) -> None:
    """Check that no visible part of an error has the identity or the client's text."""
    shown = f"{error} {error!r} {error.args} {''.join(traceback.format_exception(error))}"
    assert error.__context__ is None
    for hidden in (*identity, "Debug source", "Signature="):
        assert hidden not in shown


@pytest.mark.parametrize("attempt", ["first", "second"])
async def test_a_missing_bucket_is_refused_and_not_created(
    server: SeaweedServer, attempt: str
) -> None:
    """Not even if the server would create it."""
    with pytest.raises(
        Misconfigured, match=r"bucket that does not exist .*.*\. Create it, or correct its name"
    ):
        await ObjectsStore.connect(objects_url(server.url("never-made")))


async def test_a_removed_bucket_does_not_read_as_empty(server: SeaweedServer) -> None:
    """A record is absent only if its bucket exists."""
    store = unconnected(objects_url(server.url("never-made")))
    with pytest.raises(Misconfigured, match="bucket that does not exist"):
        await store.get("session/x")
    await store.close()


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        (Identity("testkey123", "not-the-secret"), "403 SignatureDoesNotMatch.*Correct the secret"),
        (Identity("unheardof123", "not-the-secret"), "403 InvalidAccessKeyId.*Correct the key"),
    ],
)
async def test_wrong_credentials_are_named_and_not_shown(
    server: SeaweedServer,
    prefix: str,
    identity: Identity,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error states which of the two is wrong, and shows neither."""
    url = objects_url(server.url(_BUCKET, prefix, identity))
    with pytest.raises(Misconfigured, match=words) as caught:
        await ObjectsStore.connect(url)
    assert_hides_secrets(caught.value, identity)
    store = unconnected(url)
    for call in (store.get("n/1"), store.create("n/1", 1), store.append("h", [1])):
        with pytest.raises(Misconfigured, match=words) as caught:
            await call
        assert_hides_secrets(caught.value, identity)
    await store.close()
    assert not any(part in caplog.text for part in identity)


async def test_a_reader_without_write_access_fails_at_the_first_write(
    server: SeaweedServer, store: ObjectsStore, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused write is an error with the fix, and nothing was written."""
    await store.create("n/1", 1)
    reader = await ObjectsStore.connect(objects_url(server.url(_BUCKET, prefix, READER)))
    record = await reader.get("n/1")
    assert record is not None
    for call in (
        reader.create("n/2", 2),
        reader.put(record, 2),
        reader.delete(record),
        reader.append("history/a", [1]),
        reader.drop(["n/1"]),
    ):
        with pytest.raises(Misconfigured, match=r"AccessDenied.*s3:PutObject") as caught:
            await call
        assert_hides_secrets(caught.value, READER)
    assert [found.value for found in await store.scan("n/")] == [1]
    await reader.close()
    assert READER.secret not in caplog.text


async def test_the_environment_does_not_mix_with_the_url(
    server: SeaweedServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token or an option for other credentials has no effect."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-somebody-else")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    store = await ObjectsStore.connect(objects_url(server.url(_BUCKET, prefix)))
    await store.create("n/1", 1)
    assert await store.write([Put("n/1", 2)]) == [Conflicted()]
    await store.close()


async def test_a_missing_server_is_unavailable(proxy: Proxy) -> None:
    """Every call fails after a few tries at most, without a busy loop."""
    proxy.refuse()
    url = objects_url(f"s3://key:not-the-secret@127.0.0.1:{proxy.port}/jobs/x")
    begun = time.process_time()
    with pytest.raises(Unavailable, match=r"no connection to the server.*\. Check that it runs"):
        await ObjectsStore.connect(url)
    store = unconnected(url)
    for call in (
        store.get("n/1"),
        store.write([Put("n/1", 1), Put("n/2", 1)]),
        store.heads("n/"),
        store.append("history/a", [1]),
        store.discard("history/a", older_than=0),
    ):
        with pytest.raises(Unavailable, match="no connection to the server"):
            await call
    assert time.process_time() - begun < 1
    assert proxy.requests == 0
    await store.close()


async def test_a_conditional_delete_removes_only_its_version(
    store: ObjectsStore,
) -> None:
    """A newer version stays; the server decides, not the client."""
    old = await store.create("n/1", 1)
    new = await store.put(old, 2)
    name = store._names.of_record("n/1")
    (refusal,) = await store._bucket.delete_unchanged([(name, old.version)])
    assert refusal is not None
    assert refusal.is_conflict
    assert await store.get("n/1") == new
    assert await store._bucket.delete_unchanged([(name, new.version)]) == [None]
    assert await store.get("n/1") is None


async def test_burial_leaves_a_record_that_was_recreated_meanwhile(
    store: ObjectsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tombstone that is replaced between the listing and the delete is not removed."""
    tombstone = await store.delete(await store.create("n/1", 1))
    other = await store.delete(await store.create("n/2", 1))
    look = store._find_tombstones

    async def replace_then_find(keys: list[str]) -> set[str]:
        found = await look(keys)
        await store.put(tombstone, "back")
        return found

    monkeypatch.setattr(store, "_find_tombstones", replace_then_find)
    assert await store.bury("n/", older_than=-1) == 1
    back = await store.get("n/1")
    assert back is not None
    assert back.value == "back"
    assert await store.get(other.key, tombstones=True) is None


async def test_burial_leaves_small_foreign_objects(
    store: ObjectsStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Size alone is not enough: an object that cannot be decoded is reported and stays."""
    await store.delete(await store.create("n/1", 1))
    name = store._names.of_record("n/odd")
    obstore.put(store._bucket._write_client, name, b"a note")
    assert await store.bury("n/", older_than=-1) == 1
    assert obstore.get(store._bucket._read_client, name).bytes() == b"a note"
    assert "key=n/odd" in caplog.text


async def test_without_conditional_delete_nothing_is_buried(
    behind: ObjectsStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server ignores the condition, tombstones stay, and no request is made."""
    await behind.delete(await behind.create("n/1", 1))
    monkeypatch.setattr(behind, "_conditional_delete", False)
    before = proxy.requests
    assert await behind.bury("n/", older_than=-1) == 0
    assert proxy.requests == before
    assert await behind.get("n/1", tombstones=True) is not None


async def test_a_record_removed_during_a_scan_is_skipped(
    store: ObjectsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is filled with the next records: a short page would mean the end."""
    await store.write([Put(f"n/{i}", i) for i in range(5)])
    read = store._bucket._get
    gone = store._names.of_record("n/1")

    def get(name: str) -> object:
        if name == gone:
            obstore.delete(store._bucket._write_client, gone)
        return read(name)

    monkeypatch.setattr(store._bucket, "_get", get)
    assert [record.value for record in await store.scan("n/", limit=3)] == [0, 2, 3]


async def test_foreign_objects_are_not_listed(store: ObjectsStore) -> None:
    """A name that cannot be a key is skipped, whatever the size of its object."""
    await store.create("n/1", 1)
    for name in ("n/a b", "n/1/deeper"):
        folder = store._names.folder_of_level("n/").removesuffix("n/")
        obstore.put(store._bucket._write_client, f"{folder}{name}", b"x" * 300)
    assert [head.key for head in await store.heads("n/")] == ["n/1"]
    assert [record.key for record in await store.scan("n/")] == ["n/1"]


async def test_a_record_deleted_after_its_listing_is_not_scanned(
    store: ObjectsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next ones fill the page: a short one would mean the end."""
    records = [await store.create(f"n/{i}", {"i": i}) for i in range(4)]
    get_objects = store._get_objects

    async def delete_first(keys: Sequence[str]) -> Any:
        monkeypatch.undo()
        await store.delete(records[1])
        return await get_objects(keys)

    monkeypatch.setattr(store, "_get_objects", delete_first)
    assert [record.key for record in await store.scan("n/", limit=3)] == ["n/0", "n/2", "n/3"]


async def test_foreign_objects_do_not_end_a_range(store: ObjectsStore) -> None:
    """A server that lists in tree order lists `b/x` before `b!x`, although it sorts after it."""
    await store.write([Put(f"n/{name}", 0) for name in ("a", "b", "b!x", "b-", "c")])
    folder = store._names.folder_of_level("n/")
    obstore.put(store._bucket._write_client, f"{folder}b/x", b"x" * 300)
    for until, expected in (("n/b-", ["n/a", "n/b", "n/b!x"]), ("n/b!x", ["n/a", "n/b"])):
        assert [head.key for head in await store.heads("n/", until=until)] == expected


async def test_an_object_of_65_megabytes_is_not_read(
    store: ObjectsStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading it raises; a listing reports and skips it."""
    await store.create("n/1", 1)
    huge = bytes(65 * 1024 * 1024)
    obstore.put(store._bucket._write_client, store._names.of_record("n/huge"), huge)
    with pytest.raises(Corrupt, match=r"n/huge cannot be read.*68,157,440 bytes"):
        await store.get("n/huge")
    assert [record.key for record in await store.scan("n/")] == ["n/1"]
    assert "key=n/huge" in caplog.text


@contextmanager
def occupied(store: ObjectsStore) -> Iterator[list[asyncio.Future[bool]]]:
    """Keep all threads busy except those for sessions and elections."""
    release = threading.Event()
    try:
        yield [store._bucket._threads["work"].run(release.wait) for _ in range(64)]
    finally:
        release.set()


async def test_a_heartbeat_does_not_wait_for_slow_work(store: ObjectsStore) -> None:
    """With all other threads busy, sessions and roles are written and read."""
    with occupied(store) as calls:
        async with asyncio.timeout(20):
            made = await store.create("session/me", 1)
            assert await store.get("session/me") == made
            assert [head.key for head in await store.heads("session/")] == ["session/me"]
            await store.create("role/x", 1)
        assert not any(call.done() for call in calls)


async def test_a_call_cancelled_before_it_starts_is_not_made(
    store: ObjectsStore,
) -> None:
    """A write that waits for a thread is dropped when its caller is cancelled."""
    with occupied(store):
        writing = asyncio.create_task(store.create("n/1", 1))
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
    await store.close()
    await asyncio.to_thread(store._bucket._threads["work"].join)
    with pytest.raises(FileNotFoundError):
        obstore.get(store._bucket._read_client, store._names.of_record("n/1"))


async def test_a_store_is_not_used_after_a_fork(
    store: ObjectsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has no threads, so every call is refused with the fix."""
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(Misconfigured, match="Connect after the fork"):
        await store.get("n/1")


async def test_a_forked_child_cannot_open_its_own_store(server: SeaweedServer, prefix: str) -> None:
    """The client's threads stay in the parent: a child gets an error, and does not hang."""
    url = objects_url(server.url(_BUCKET, prefix))
    await (await ObjectsStore.connect(url)).close()
    if not (child := os.fork()):
        try:
            with pytest.raises(Misconfigured, match="Connect after the fork"):
                asyncio.run(ObjectsStore.connect(url))
        except BaseException:  # noqa: BLE001 - its status tells
            os._exit(1)
        os._exit(0)
    assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0


async def test_a_closed_store_refuses_calls(server: SeaweedServer, prefix: str) -> None:
    """A call after `close` is refused; closing again does nothing."""
    store = await ObjectsStore.connect(objects_url(server.url(_BUCKET, prefix)))
    await store.close()
    await store.close()
    with pytest.raises(Unavailable, match=r"the store is closed.*\. Connect again"):
        await store.get("n/1")


async def test_google_is_refused_with_the_reason() -> None:
    """Its listings lack what conditional writes need."""
    with pytest.raises(JobsyncError, match="Use s3:// or az://"):
        await ObjectsStore.connect(objects_url("gs://bucket/prefix"))


_FORGETFUL = """
import asyncio, sys
from jobsync.core.urls import parse_url
from jobsync.stores.objects.store import ObjectsStore

async def main():
    store = await ObjectsStore.connect(parse_url(sys.argv[1]))
    await store.create("n/1", 1)
    await store.get("n/1")
    # Nothing awaits these, and nothing closes the store.
    return [store._bucket.get("r2/n/1", "work") for _ in range(64)]

asyncio.run(main())
"""


def test_a_program_that_forgets_to_close_exits_cleanly(
    server: SeaweedServer, full_scale: bool, proof: Any
) -> None:
    """Programs that exit with requests in flight: no hang, no abort, no output."""
    command = [sys.executable, "-c", _FORGETFUL]
    wanted = 200 if full_scale else 20
    for _ in range(wanted // 4):
        running = [
            subprocess.Popen(
                [*command, server.url(_BUCKET, next(_prefixes))],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for _ in range(4)
        ]
        for process in running:
            said, _ = process.communicate(timeout=60)
            assert (process.returncode, said) == (0, b"")
    proof.record("clean exits", url="s3", exits=wanted)
