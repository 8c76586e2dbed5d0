"""Requests to a bucket: by which client, in which threads, and with which condition."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from http.client import HTTPException
from typing import Any

import obstore
import pytest

from jobsync import Components, Misconfigured, Put, Record, Unavailable
from jobsync.core.secrets import Secret
from jobsync.core.urls import ObjectsUrl, parse_url
from jobsync.errors import JobsyncError
from jobsync.stores.contract import Applied, Conflicted, Delete, Outcome, Unknown
from jobsync.stores.objects import bucket as bucket_module
from jobsync.stores.objects.bucket import (
    Bucket,
    ListedObject,
    ObjectListing,
    StoredObject,
    _credential_provider,
)
from jobsync.stores.objects.errors import FailedRequest
from jobsync.stores.objects.layout import BatchName
from jobsync.stores.objects.store import ObjectsStore
from jobsync.stores.record_codec import first_id_at

URL = "s3://key:secret@127.0.0.1:9/bucket/prefix"
TIME = datetime(2026, 1, 1, tzinfo=UTC)


def build_url(text: str = URL) -> ObjectsUrl:
    """Return the URL of a bucket that nobody listens behind."""
    url = parse_url(text, {})
    assert isinstance(url, ObjectsUrl)
    return url


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    """Such a bucket."""
    bucket = Bucket(build_url(), bare_etags=False)
    yield bucket
    bucket.close()


@pytest.fixture
def store(bucket: Bucket) -> ObjectsStore:
    """A store in it."""
    return ObjectsStore(build_url(), bucket, Components.system(), conditional_delete=True)


def answer(value: Any) -> "asyncio.Future[Any]":
    """Return an answer that is there."""
    future = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


def listed(name: str, size: int = 40, age: float = 0.0) -> ListedObject:
    """Return an object of a listing."""
    return ListedObject(name, '"1"', size, TIME - timedelta(seconds=age))


async def test_only_conditional_writes_are_never_repeated(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a write is that to its one request; what is read or deleted may be tried."""
    retries: dict[str, list[int]] = {}

    def note(name: str, result: Any) -> Callable[..., Any]:
        def call(client: Any, *_: object, **__: object) -> Any:
            retries.setdefault(name, []).append(client.retry_config["max_retries"])
            if isinstance(result, Exception):
                raise result
            return result

        return call

    monkeypatch.setattr(obstore, "put", note("put", {"e_tag": '"1"'}))
    monkeypatch.setattr(obstore, "get", note("get", FileNotFoundError("status code: 500")))
    monkeypatch.setattr(obstore, "list", note("list", iter([])))
    monkeypatch.setattr(obstore, "delete", note("delete", None))
    await bucket.put("a", b"1", None, "work")
    await bucket.put("a", b"1", '"1"', "work")
    with pytest.raises(JobsyncError):
        await bucket.get("a", "work")
    assert await bucket.list_folder("f/", "work").take(1, lambda item: item) == []
    await bucket.delete(["a"])
    assert retries == {"put": [0, 0], "get": [2], "list": [2], "delete": [2]}


class FakeConnection:
    """A connection that must be closed after a request that failed."""

    failing: frozenset[str] = frozenset()
    sent: list[tuple[str, str]]

    def __init__(self, *_: object, **__: object) -> None:
        self._is_broken = False
        self.status = 204

    def request(self, method: str, target: str, headers: dict[str, str]) -> None:
        """Send a request."""
        if self._is_broken:
            raise HTTPException("the request before has no answer")
        name = target.partition("?")[0].rpartition("/")[2]
        self.sent.append((name, headers["If-Match"]))
        if name in self.failing:
            self._is_broken = True
            raise OSError(f"the connection was lost: {method}")

    def getresponse(self) -> "FakeConnection":
        """Return the answer."""
        return self

    def read(self) -> bytes:
        """Return its body."""
        return b""

    def close(self) -> None:
        """Forget what was sent."""
        self._is_broken = False


@pytest.mark.parametrize(("bare", "quote"), [(False, '"'), (True, "")])
async def test_each_conditional_delete_has_its_condition_and_its_own_answer(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, *, bare: bool, quote: str
) -> None:
    """A connection that is lost fails one of those that share it, and none that follow."""
    monkeypatch.setattr(bucket_module, "HTTPConnection", FakeConnection)
    monkeypatch.setattr(FakeConnection, "sent", [], raising=False)
    monkeypatch.setattr(FakeConnection, "failing", frozenset({"n0", "n8"}))
    bucket.bare_etags = bare
    targets = [(f"folder/n{number}", f'"{number}"') for number in range(30)]
    failures = await bucket.delete_unchanged(targets)
    assert sorted(FakeConnection.sent) == sorted(
        (f"n{number}", f"{quote}{number}{quote}") for number in range(30)
    )
    assert failures.count(None) == 28
    assert [failure for failure in failures if failure is not None] == [FailedRequest()] * 2


@pytest.mark.parametrize(
    ("key", "secret", "token", "expected"),
    [
        ("k", "s", "t", ("k", "s", "t")),
        ("k", "s", None, ("k", "s", None)),
        (None, None, None, None),
        (None, None, "t", None),
    ],
)
def test_the_credentials_of_a_url_are_passed_with_their_token(
    key: str | None, secret: str | None, token: str | None, expected: Any
) -> None:
    """All of them, or the client finds its own."""
    provide = _credential_provider(
        *(None if each is None else Secret(each) for each in (key, secret, token))
    )
    found = None if provide is None else provide()
    assert (
        None
        if found is None
        else (found["access_key_id"], found["secret_access_key"], found["token"])
    ) == expected


@pytest.mark.parametrize(
    ("url", "kind"),
    [(URL, Misconfigured), ("s3://bucket/prefix?region=us-east-1", Unavailable)],
)
def test_an_expired_token_is_an_error_of_who_has_written_it(
    url: str, kind: type[JobsyncError]
) -> None:
    """One that the client finds by itself is renewed."""
    bucket = Bucket(build_url(url), bare_etags=False)
    failure = FailedRequest(status=400, code="ExpiredToken")
    assert isinstance(bucket.to_error(failure), kind)
    bucket.close()


@pytest.mark.parametrize(
    ("prefix", "group"),
    [
        ("session/", "heartbeats"),
        ("role/", "heartbeats"),
        ("request/", "heartbeats"),
        ("page/mails/0/", "work"),
        ("sessions/", "work"),
        ("bell/", "work"),
    ],
)
async def test_sessions_and_elections_have_threads_of_their_own(
    store: ObjectsStore, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, prefix: str, group: str
) -> None:
    """To be read, written and listed; a thousand slow reads do not delay them."""
    groups: list[str] = []

    def submit(where: str, call: Callable[..., Any], *_: object) -> "asyncio.Future[Any]":
        groups.append(where)
        return answer({"_get": None, "_put": '"1"', "_next_page": []}[call.__name__])

    monkeypatch.setattr(bucket, "_submit", submit)
    await store.get(f"{prefix}a")
    await store.write([Put(f"{prefix}a", 1)])
    await store.heads(prefix)
    assert groups == [group] * 3


NO_SUCH_KEY = FailedRequest(status=404, code="NoSuchKey")
REPLIES: list[tuple[str | FailedRequest, type[Outcome], type[Outcome]]] = [
    ('"2"', Applied, Applied),
    (FailedRequest(status=412), Conflicted, Conflicted),
    (NO_SUCH_KEY, Unknown, Conflicted),
    (FailedRequest(status=404), Unknown, Unknown),
    (FailedRequest(status=409), Unknown, Unknown),
    (FailedRequest(), Unknown, Unknown),
]


@pytest.mark.parametrize(("reply", "of_create", "of_replace"), REPLIES)
async def test_what_an_answer_means_depends_on_the_write(
    store: ObjectsStore,
    bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    reply: str | FailedRequest,
    of_create: type,
    of_replace: type,
) -> None:
    """A missing name refuses a replacement; a create needs none."""
    monkeypatch.setattr(bucket, "put", lambda *_: answer(reply))
    old, gone = (
        Record(f"n/{name}", 1, '"1"', seq=1, epoch=0, format=1, trail="n" * 12) for name in "bc"
    )
    outcomes = await store.write([Put("n/a", 1), Put("n/b", 2, old), Delete(gone)])
    assert [type(each) for each in outcomes] == [of_create, of_replace, of_replace]


async def test_who_waits_is_woken_by_each_write_that_was_applied(
    store: ObjectsStore, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By no other one; an append that was stored before wakes, too."""
    woken: list[str] = []
    replies = [FailedRequest(status=412), '"1"', '"2"', FailedRequest()]
    monkeypatch.setattr(store._notifier, "wake", lambda topics: woken.extend(sorted(topics)))
    monkeypatch.setattr(bucket, "put", lambda *_: answer(replies.pop(0)))
    await store.write([Put(f"{name}/a", 1) for name in "abcd"])
    assert woken == ["b/", "c/"]
    replies += ['"1"', FailedRequest(status=412)]
    for _ in range(2):
        await store.append("h", [1])
    assert woken == ["b/", "c/", "h", "h"]


def list_pages(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, pages: list[Any]) -> None:
    """Set the pages of the next listing of a bucket."""
    monkeypatch.setattr(
        bucket,
        "list_folder",
        lambda *_, until="", **__: ObjectListing(
            lambda: answer(pages.pop(0) if pages else []), until
        ),
    )


@pytest.mark.parametrize("old", [0, 1, 999, 1000, 1001, 2500])
async def test_all_old_entries_are_discarded_however_many_pages_they_fill(
    store: ObjectsStore, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, old: int
) -> None:
    """And none that is younger."""
    deleted: list[str] = []

    def delete(names: Sequence[str]) -> "asyncio.Future[Any]":
        deleted.extend(names)
        return answer(None)

    end = first_id_at(store._clock.wall() + -60.0)
    past, future = f"{int(end[:13]) - 10_000:013d}", f"{int(end[:13]) + 10_000:013d}"
    names = [
        str(BatchName(f"{past if number < old else future}-{number:012x}", 2))
        for number in range(2700)
    ]
    pages = [
        [listed(name) for name in names[start : start + 1000]] for start in range(0, 2700, 1000)
    ]
    list_pages(bucket, monkeypatch, pages)
    monkeypatch.setattr(bucket, "delete", delete)
    assert await store.discard("h", older_than=60.0) == 2 * old
    assert [name.rpartition("/")[2] for name in deleted] == names[:old]


@pytest.mark.parametrize("foreign", ["a/b", "sub/dir/c", "x y", ""])
async def test_small_objects_of_others_do_not_hide_a_tombstone(
    store: ObjectsStore, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, foreign: str
) -> None:
    """They count for nothing, and are not looked at."""
    read: list[str] = []

    def get(name: str, _: str) -> "asyncio.Future[Any]":
        read.append(name)
        data = b'["nnnnnnnnnnnn",1,0,1]'
        return answer(StoredObject('"1"', len(data), data))

    async def delete_unchanged(targets: Sequence[Any]) -> list[None]:
        return [None for _ in targets]

    pages = [[listed(foreign, age=9_000), listed("z", age=9_000)], [listed("zz")]]
    list_pages(bucket, monkeypatch, pages)
    bucket.latest_seen = TIME
    monkeypatch.setattr(bucket, "get", get)
    monkeypatch.setattr(bucket, "delete_unchanged", delete_unchanged)
    assert await store.bury("n/", limit=1) == 1
    assert read == ["prefix/r2/n/z"]


@pytest.mark.parametrize("damaged", ["", "a", "b", "c", "ac", "abc"])
async def test_damaged_objects_do_not_keep_tombstones_from_being_removed(
    store: ObjectsStore, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    """Wherever they are in the listing; they are left as they are."""
    removed: list[str] = []

    def get(name: str, _: str) -> "asyncio.Future[Any]":
        data = b"damaged" if name[-1] in damaged else b'["nnnnnnnnnnnn",1,0,1]'
        return answer(StoredObject('"1"', len(data), data))

    async def delete_unchanged(targets: Sequence[Any]) -> list[None]:
        removed.extend(name[-1] for name, _ in targets)
        return [None for _ in targets]

    list_pages(bucket, monkeypatch, [[listed(name, age=9_000) for name in "abc"], []])
    bucket.latest_seen = TIME
    monkeypatch.setattr(bucket, "get", get)
    monkeypatch.setattr(bucket, "delete_unchanged", delete_unchanged)
    expected = sorted(set("abc") - set(damaged))
    assert await store.bury("n/") == len(expected)
    assert removed == expected


LISTED_PAGES = [["a", "b/x", "b"], ["c", "z/y"], ["d"], ["e", "f"]]


@pytest.mark.parametrize(
    ("until", "expected", "requests"),
    [
        ("", ["a", "b/x", "b", "c", "z/y", "d", "e", "f"], 5),
        ("c", ["a", "b/x", "b"], 2),
        ("b", ["a", "b/x"], 1),
        ("d", ["a", "b/x", "b", "c", "z/y"], 3),
        ("ee", ["a", "b/x", "b", "c", "z/y", "d", "e"], 4),
    ],
)
async def test_a_listing_ends_with_the_first_name_beyond_its_range(
    until: str, expected: list[str], requests: int
) -> None:
    """Not with an object of others below the folder; and no more is requested."""
    pages = [[listed(name) for name in names] for names in LISTED_PAGES]
    made = []

    def fetch() -> "asyncio.Future[list[ListedObject]]":
        made.append(1)
        return answer(pages.pop(0) if pages else [])

    listing = ObjectListing(fetch, until)
    found = []
    while part := await listing.take(2, lambda item: item.name):
        found += part
    assert found == expected
    assert len(made) == requests
