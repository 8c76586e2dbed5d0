"""Requests to one bucket, made in threads.

Each call is one request to the server (a listing is one for each thousand names), by the
object client's blocking interface: its asynchronous interface can abort the interpreter at
exit. A conditional write is sent once and never retried here, so that its answer is the
answer to this one request; reads and deletes are tried a few times.

Sessions and elections have their own threads: a thousand slow reads do not delay a heartbeat.
Credentials are passed by a function, so that settings of the environment do not mix with those
of the URL, and no repr shows them. A forked child cannot use a bucket, not even a new one: the
client's threads stay in the parent, and a call would wait forever.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec
import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, S3Store

from jobsync.core.secrets import Secret
from jobsync.core.urls import ObjectsUrl
from jobsync.errors import JobsyncError, Misconfigured, Unavailable
from jobsync.stores.objects.errors import FailedRequest
from jobsync.stores.threads import ThreadPool, gather_results

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

__all__ = [
    "MAX_OBJECT",
    "Bucket",
    "ListedObject",
    "ObjectListing",
    "StoredObject",
    "ThreadGroup",
]

T = TypeVar("T")

ThreadGroup: TypeAlias = Literal["heartbeats", "work"]
"""The threads of a request: those for sessions and elections, or those for everything else."""

MAX_OBJECT = 64 * 1024 * 1024
"""The largest object that is read into memory, in bytes."""

_THREADS: dict[ThreadGroup, int] = {"heartbeats": 4, "work": 32}
_PAGE = 1000
_TIMEOUT_SECONDS = 30
_CONNECT_TIMEOUT_SECONDS = 5
_SIGNATURE_LIFETIME = timedelta(minutes=5)
_DELETE_CONNECTIONS = 8
_DELETED = (200, 204)
_CLIENT_ERRORS = (BaseError, FileNotFoundError)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_client_pids: set[int] = set()
"""The processes in which the client has been used: this one and its parents."""

_ONCE: "RetryConfig" = {"max_retries": 0}
_A_FEW_TIMES: "RetryConfig" = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=_TIMEOUT_SECONDS),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=2),
        "base": 2,
    },
}


class StoredObject(msgspec.Struct, frozen=True):
    """An object that was read."""

    etag: str
    size: int
    data: bytes | None
    """None if it is larger than `MAX_OBJECT`."""


class ListedObject(msgspec.Struct, frozen=True):
    """An object in a listing."""

    name: str
    """The last segment of its name."""
    etag: str
    size: int
    modified: datetime
    """By the server's clock."""


class Bucket:
    """An existing bucket.

    Args:
        url: the bucket and the credentials.
        bare_etags: whether the server compares ETags without their quotes.

    Raises:
        Misconfigured: this is a forked child of a process that has used a bucket.
    """

    def __init__(self, url: ObjectsUrl, *, bare_etags: bool) -> None:
        self.name = str(url)
        if _client_pids - {os.getpid()}:
            raise _fork_error(self.name)
        _client_pids.add(os.getpid())
        self.latest_seen = _EPOCH
        """The latest time of the server's clock that was seen: never ahead of it."""
        self._write_client = _build_client(url, _ONCE)
        self._read_client = _build_client(url, _A_FEW_TIMES)
        self.bare_etags = bare_etags
        self._renews_credentials = url.key is None
        self._pid = os.getpid()
        self._closed = False
        self._threads = {
            group: ThreadPool(f"jobsync-objects-{group}", count)
            for group, count in _THREADS.items()
        }

    def close(self) -> None:
        """End the threads. Safe to repeat."""
        self._closed = True
        for threads in self._threads.values():
            threads.shutdown()

    def get(self, name: str, group: ThreadGroup) -> "asyncio.Future[StoredObject | None]":
        """Read an object; None if it does not exist."""
        return self._submit(group, self._get, name)

    def put(
        self, name: str, content: bytes, etag: str | None, group: ThreadGroup
    ) -> "asyncio.Future[str | FailedRequest]":
        """Replace the object with this ETag, or create one if `etag` is None.

        Returns the new ETag, or the failure: it is not raised, because its meaning depends on
        the other changes of a batch.
        """
        return self._submit(group, self._put, name, content, etag)

    def list_folder(
        self, folder: str, group: ThreadGroup, *, after: str = "", until: str = ""
    ) -> "ObjectListing":
        """List the objects of a folder in order: those after a name and before another."""
        stream = obstore.list(
            self._read_client,
            folder,
            offset=f"{folder}{after}" if after else None,
            chunk_size=_PAGE,
        )
        return ObjectListing(lambda: self._submit(group, self._next_page, stream, folder), until)

    def delete(self, names: Sequence[str]) -> "asyncio.Future[FailedRequest | None]":
        """Delete objects whose names are never used again, a thousand in a request."""
        return self._submit("work", self._delete, names)

    async def delete_unchanged(
        self, targets: Sequence[tuple[str, str]]
    ) -> "list[FailedRequest | None]":
        """Delete objects, given as name and ETag, if unchanged; return the failure of each."""
        count = min(_DELETE_CONNECTIONS, len(targets))
        parts = [targets[i::_DELETE_CONNECTIONS] for i in range(count)]
        results = await gather_results(
            [self._submit("work", self._delete_unchanged, part) for part in parts]
        )
        return [failure for part in results for failure in part]

    def to_error(self, failure: FailedRequest) -> JobsyncError:
        """Return the error for the caller, with the fix."""
        return failure.to_error(self.name, renews_credentials=self._renews_credentials)

    def _submit(
        self, group: ThreadGroup, call: Callable[..., T], *arguments: object
    ) -> "asyncio.Future[T]":
        if os.getpid() != self._pid:
            raise _fork_error(self.name)
        if self._closed:
            raise Unavailable(self.name, "the store is closed", "connect again")
        return self._threads[group].run(call, *arguments)

    def _get(self, name: str) -> StoredObject | None:
        try:
            found = obstore.get(self._read_client, name)
            meta = found.meta
            self.latest_seen = max(self.latest_seen, meta["last_modified"])
            size = meta["size"]
            data = found.bytes().to_bytes() if size <= MAX_OBJECT else None
            return StoredObject(meta["e_tag"] or "", size, data)
        except _CLIENT_ERRORS as error:
            failure = FailedRequest.from_error(error)
        # Raised outside of `except`, where it would have the client's text as its context.
        if failure.is_absent:
            return None
        raise self.to_error(failure)

    def _put(self, name: str, content: bytes, etag: str | None) -> str | FailedRequest:
        client = self._write_client
        try:
            if etag is None:
                reply = obstore.put(client, name, content, mode="create")
            else:
                reply = obstore.put(client, name, content, mode={"e_tag": self._condition(etag)})
        except _CLIENT_ERRORS as error:
            return FailedRequest.from_error(error)
        # Without an ETag no write can follow: the same as a lost reply.
        return reply["e_tag"] or FailedRequest()

    def _condition(self, etag: str) -> str:
        return etag.strip('"') if self.bare_etags else etag

    def _next_page(
        self, stream: "ListStream[Sequence[ObjectMeta]]", folder: str
    ) -> list[ListedObject]:
        try:
            page = next(stream, ())
        except _CLIENT_ERRORS as error:
            failure = FailedRequest.from_error(error)
        else:
            skip = len(folder)
            listed = [
                ListedObject(m["path"][skip:], m["e_tag"] or "", m["size"], m["last_modified"])
                for m in page
            ]
            self.latest_seen = max([self.latest_seen, *(item.modified for item in listed)])
            return listed
        raise self.to_error(failure)

    def _delete(self, names: Sequence[str]) -> FailedRequest | None:
        try:
            obstore.delete(self._read_client, names)
        except _CLIENT_ERRORS as error:
            return FailedRequest.from_error(error)
        return None

    def _delete_unchanged(self, targets: Sequence[tuple[str, str]]) -> "list[FailedRequest | None]":
        names = [name for name, _ in targets]
        try:
            # The client has no conditional delete, but can sign such a request.
            urls = obstore.sign(self._write_client, "DELETE", names, _SIGNATURE_LIFETIME)
        except _CLIENT_ERRORS as error:
            # It has no credentials now.
            return [FailedRequest.from_error(error)] * len(targets)
        origin = urlsplit(urls[0])
        connect = HTTPSConnection if origin.scheme == "https" else HTTPConnection
        with closing(connect(origin.netloc, timeout=_TIMEOUT_SECONDS)) as connection:
            return [
                _send_delete(connection, url, self._condition(etag))
                for url, (_, etag) in zip(urls, targets, strict=True)
            ]


class ObjectListing:
    """A listing in progress, read one page of the server at a time.

    Args:
        fetch: returns the next page; an empty one at the end.
        until: the listing ends before this name; if empty, with the last page.
    """

    def __init__(
        self, fetch: Callable[[], "asyncio.Future[list[ListedObject]]"], until: str
    ) -> None:
        self._fetch = fetch
        self._until = until
        self._page: list[ListedObject] = []
        self._has_more = True

    async def take(
        self,
        limit: int,
        pick: Callable[[ListedObject], T | None],
        weigh: Callable[[T], int] = lambda _: 1,
    ) -> list[T]:
        """Return what `pick` returns for the next objects, up to a total weight or the end."""
        taken: list[T] = []
        while limit > 0 and await self._fill():
            picked = pick(self._page.pop())
            if picked is not None:
                taken.append(picked)
                limit -= weigh(picked)
        return taken

    async def _fill(self) -> bool:
        if not self._page and self._has_more:
            page = await self._fetch()
            listed = [*takewhile(self._is_in_range, page)]
            self._page = listed[::-1]
            # A name beyond the range shows that the next page has nothing more.
            self._has_more = bool(page) and len(listed) == len(page)
        return bool(self._page)

    def _is_in_range(self, item: ListedObject) -> bool:
        # Foreign objects below the folder tell nothing: some servers list in tree order.
        return not self._until or item.name < self._until or "/" in item.name


def _send_delete(
    connection: HTTPConnection | HTTPSConnection, url: str, etag: str
) -> FailedRequest | None:
    """Send one signed DELETE with a condition."""
    parts = urlsplit(url)
    try:
        connection.request("DELETE", f"{parts.path}?{parts.query}", headers={"If-Match": etag})
        response = connection.getresponse()
        body = response.read().decode(errors="replace")
    except (OSError, HTTPException):
        connection.close()
        return FailedRequest()
    if response.status in _DELETED:
        return None
    return FailedRequest.from_response(response.status, body)


def _fork_error(name: str) -> Misconfigured:
    return Misconfigured(
        "store",
        name,
        "was opened before a fork, and the object client does not survive one",
        "connect after the fork, or start the process by spawn",
    )


def _build_client(url: ObjectsUrl, retries: "RetryConfig") -> S3Store | AzureStore:
    options: ClientConfig = {
        "timeout": timedelta(seconds=_TIMEOUT_SECONDS),
        "connect_timeout": timedelta(seconds=_CONNECT_TIMEOUT_SECONDS),
        "allow_http": url.endpoint.startswith("http://"),
    }
    match url.provider:
        case "s3":
            return _build_s3_client(url, options, retries)
        case "az":
            try:
                return AzureStore(url.bucket, client_options=options, retry_config=retries)
            except BaseError:
                raise Misconfigured(
                    "url",
                    str(url),
                    "has no account",
                    "set AZURE_STORAGE_ACCOUNT_NAME",
                ) from None
        case "gs":
            raise Misconfigured(
                "url",
                str(url),
                "is on Google Cloud Storage, whose listings lack what conditional writes need",
                "use s3:// or az://",
            )


def _build_s3_client(url: ObjectsUrl, options: "ClientConfig", retries: "RetryConfig") -> S3Store:
    # Set explicitly, or the client would read them from the environment.
    config: S3Config = {"conditional_put": "etag", "skip_signature": False}
    if url.endpoint:
        config["endpoint"] = url.endpoint
        config["virtual_hosted_style_request"] = False
    return S3Store(
        url.bucket,
        config=config,
        region=url.region,
        credential_provider=_credential_provider(url.key, url.secret, url.token),
        client_options=options,
        retry_config=retries,
    )


def _credential_provider(
    key: Secret | None, secret: Secret | None, token: Secret | None
) -> "Callable[[], S3Credential] | None":
    """Return a function that returns the URL's credentials; None if the client finds its own."""
    if key is None or secret is None:
        return None

    def provide() -> "S3Credential":
        return {
            "access_key_id": key.reveal(),
            "secret_access_key": secret.reveal(),
            "token": token.reveal() if token else None,
            "expires_at": None,
        }

    return provide
