"""Requests to a bucket that fail in the client: each becomes an error of jobsync, or an outcome."""

import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import obstore
import pytest
from obstore.exceptions import BaseError, GenericError, PermissionDeniedError, UnauthenticatedError

from jobsync import (
    Applied,
    Components,
    JobsyncError,
    OutcomeUnknown,
    Put,
    Unavailable,
    Unknown,
)
from jobsync.core.urls import ObjectsUrl, parse_url
from jobsync.stores.objects.bucket import Bucket
from jobsync.stores.objects.errors import FailedRequest
from jobsync.stores.objects.store import ObjectsStore

SECRET = "not-the-secret"
ERRORS: list[Exception] = [
    GenericError(f"Generic S3 error: HTTP error: error sending request for {SECRET}"),
    UnauthenticatedError(f"http://169.254.169.254/latest {SECRET} did not answer"),
    PermissionDeniedError(f"status code: 403 <Code>AccessDenied</Code> {SECRET}"),
    BaseError(SECRET),
]


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    """A bucket that nobody listens behind."""
    url = parse_url(f"s3://key:{SECRET}@127.0.0.1:9/bucket/prefix")
    assert isinstance(url, ObjectsUrl)
    bucket = Bucket(url, bare_etags=False)
    yield bucket
    bucket.close()


@pytest.fixture
def store(bucket: Bucket) -> ObjectsStore:
    """A store in it."""
    url = parse_url(f"s3://key:{SECRET}@127.0.0.1:9/bucket/prefix")
    assert isinstance(url, ObjectsUrl)
    return ObjectsStore(url, bucket, Components.system(), conditional_delete=True)


def list_one(*_: Any, **__: Any) -> Iterator[list[dict[str, Any]]]:
    """Return a listing of one tombstone."""
    found = {
        "path": "prefix/r2/n/a",
        "e_tag": '"1"',
        "size": 40,
        "last_modified": datetime.now(UTC),
    }
    return iter([[found]])


CALLS: dict[str, Callable[[ObjectsStore], Awaitable[object]]] = {
    "get": lambda store: store.get("n/a"),
    "write": lambda store: store.write([Put("n/a", 1)]),
    "heads": lambda store: store.heads("n/"),
    "scan": lambda store: store.scan("n/"),
    "append": lambda store: store.append("h", [1]),
    "read": lambda store: store.read("h"),
    "discard": lambda store: store.discard("h", older_than=1.0),
    "bury": lambda store: store.bury("n/"),
    "drop": lambda store: store.drop(["n/a"]),
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", CALLS)
async def test_no_error_of_the_client_escapes(
    call: str, error: Exception, store: ObjectsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor its text, which may show a secret; a write may be unknown instead."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    for name in ("get", "put", "delete", "sign"):
        monkeypatch.setattr(obstore, name, fail)
    monkeypatch.setattr(obstore, "list", lambda *_, **__: map(fail, [1]))
    try:
        outcome = await CALLS[call](store)
    except JobsyncError as raised:
        shown = "".join(traceback.format_exception(raised))
        assert SECRET not in shown
    else:
        assert call == "write"
        assert isinstance(outcome, list)
        assert all(isinstance(each, Unknown) for each in outcome)
        assert SECRET not in repr(outcome)


async def test_a_conditional_delete_without_credentials_is_unavailable(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the objects has that failure, and none was deleted."""

    def fail(*_: object, **__: object) -> Any:
        raise UnauthenticatedError("http://169.254.169.254/latest did not answer in time")

    monkeypatch.setattr(obstore, "sign", fail)
    failures = await bucket.delete_unchanged([(f"n/{n}", '"1"') for n in range(10)])
    assert len(failures) == 10
    for failure in failures:
        assert failure is not None
        assert failure.is_rejected
        assert isinstance(bucket.to_error(failure), Unavailable)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 17, 100])
async def test_every_object_is_deleted_once(
    count: int, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are; each has an answer."""
    deleted: list[tuple[str, str]] = []

    def delete(targets: Sequence[tuple[str, str]]) -> list[FailedRequest | None]:
        deleted.extend(targets)
        return [None] * len(targets)

    monkeypatch.setattr(bucket, "_delete_unchanged", delete)
    targets = [(f"n/{n:03d}", f'"{n}"') for n in range(count)]
    assert await bucket.delete_unchanged(targets) == [None] * count
    assert sorted(deleted) == targets


@pytest.mark.parametrize(
    ("failure", "is_tolerated"),
    [
        (None, True),
        (FailedRequest(status=412, code="PreconditionFailed"), True),
        (FailedRequest(status=404, code="NoSuchKey"), True),
        (FailedRequest(status=404), False),
        (FailedRequest(status=503, code="SlowDown"), False),
        (FailedRequest(status=403, code="AccessDenied"), False),
        (FailedRequest(), False),
        (FailedRequest(was_sent=False), False),
    ],
)
async def test_a_tombstone_that_another_process_removed_or_replaced_is_no_error(
    failure: FailedRequest | None,
    is_tolerated: bool,
    store: ObjectsStore,
    bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes may bury at once. It does not count; any other failure is raised."""

    async def delete_unchanged(targets: Sequence[Any]) -> list[FailedRequest | None]:
        assert len(targets) == 1
        return [failure]

    async def find_tombstones(keys: Sequence[str]) -> set[str]:
        return set(keys)

    monkeypatch.setattr(obstore, "list", list_one)
    monkeypatch.setattr(bucket, "delete_unchanged", delete_unchanged)
    monkeypatch.setattr(store, "_find_tombstones", find_tombstones)
    if is_tolerated:
        assert await store.bury("n/", older_than=-1.0) == (failure is None)
    else:
        with pytest.raises(JobsyncError):
            await store.bury("n/", older_than=-1.0)


@pytest.mark.parametrize("etag", [None, ""])
async def test_a_write_without_an_etag_is_unknown(
    etag: str | None, store: ObjectsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stored, but no write can follow: the same as a lost reply."""
    monkeypatch.setattr(obstore, "put", lambda *_, **__: {"e_tag": etag, "version": None})
    (outcome,) = await store.write([Put("n/a", 1)])
    assert isinstance(outcome, Unknown)
    with pytest.raises(OutcomeUnknown):
        await store.append("h", [1])
    monkeypatch.setattr(obstore, "put", lambda *_, **__: {"e_tag": '"1"', "version": None})
    (outcome,) = await store.write([Put("n/a", 1)])
    assert isinstance(outcome, Applied)
    assert outcome.record.version == '"1"'
    await store.append("h", [1])


@pytest.mark.parametrize(("bare", "sent"), [(False, '"1"'), (True, "1")])
async def test_a_condition_has_the_etag_as_the_server_wants_it(
    bare: bool, sent: str, store: ObjectsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a replacement; a create has another condition, and a tombstone the same."""
    modes: list[Any] = []

    def put(*_: object, mode: Any, **__: object) -> dict[str, str]:
        modes.append(mode)
        return {"e_tag": '"1"'}

    monkeypatch.setattr(obstore, "put", put)
    store.set_quirks(bare_etags=bare, conditional_delete=True)
    record = await store.create("n/a", 1)
    await store.delete(await store.put(record, 2))
    assert modes == ["create", {"e_tag": sent}, {"e_tag": sent}]
