"""A bucket, asked in threads.

Each call is one request to the server (a listing is one for each thousand names), made by
the object client's blocking interface in a thread of ours: its asynchronous interface can
abort the interpreter at exit. A conditional write is sent once and never again by itself,
so that its answer is the answer to this one request; what only reads or deletes is tried
a few times.

Sessions and elections have threads of their own: a thousand slow reads do not delay a
heartbeat. Credentials are handed over behind a function, so that no setting of the
environment mixes with those of the URL and no repr shows them. Not for use in a forked
child, not even anew: the client's threads stay behind in the parent, and whoever asked it
there would wait for ever.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec
import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, S3Store

from jobsync.core.secrets import Secret
from jobsync.core.urls import ObjectsUrl
from jobsync.errors import JobsyncError, Misconfigured, Unavailable
from jobsync.stores.objects.errors import Refusal
from jobsync.stores.threads import WorkThreads, together

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

__all__ = ["MAX_OBJECT", "Body", "Bucket", "Lane", "Listed", "ObjectListing"]

T = TypeVar("T")

Lane: TypeAlias = Literal["beats", "work"]
"""Which threads: those of sessions and elections, or those of everything else."""

MAX_OBJECT = 64 * 1024 * 1024
"""The largest object that is read into memory, in bytes."""

_THREADS: dict[Lane, int] = {"beats": 4, "work": 32}
_PAGE = 1000
_SECONDS = 30
_CONNECT_SECONDS = 5
_SIGNED_FOR = timedelta(minutes=5)
_CONNECTIONS = 8
_DELETED = (200, 204)
_RAISED = (BaseError, FileNotFoundError)
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)

_homes: set[int] = set()
"""The processes, of this one and its parents, in which the client has been used."""

_ONCE: "RetryConfig" = {"max_retries": 0}
_FEW_TIMES: "RetryConfig" = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=_SECONDS),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=2),
        "base": 2,
    },
}


class Body(msgspec.Struct, frozen=True):
    """An object that was read."""

    etag: str
    size: int
    data: bytes | None
    """None if it is larger than anything that is read into memory."""


class Listed(msgspec.Struct, frozen=True):
    """An object as a listing shows it."""

    name: str
    """The last segment."""
    etag: str
    size: int
    modified: datetime
    """By the server's clock."""


class Bucket:
    """A bucket that is there. Make it with `open`.

    Args:
        url: which one, and the credentials.
        bare_etags: whether the server compares ETags without their quotes.

    Raises:
        Misconfigured: this is a forked child of a process that has used a bucket.
    """

    def __init__(self, url: ObjectsUrl, *, bare_etags: bool) -> None:
        self.name = str(url)
        if _homes - {os.getpid()}:
            raise _after_fork(self.name)
        _homes.add(os.getpid())
        self.newest = _LONG_AGO
        """The latest moment of the server's clock that was seen: never ahead of it."""
        self._writes = _client(url, _ONCE)
        self._reads = _client(url, _FEW_TIMES)
        self.bare_etags = bare_etags
        self._renewing = url.key is None
        self._pid = os.getpid()
        self._closed = False
        self._threads = {
            lane: WorkThreads(f"jobsync-objects-{lane}", count) for lane, count in _THREADS.items()
        }

    def close(self) -> None:
        """Let go of the threads. Safe to repeat."""
        self._closed = True
        for threads in self._threads.values():
            threads.end()

    def get(self, name: str, lane: Lane) -> "asyncio.Future[Body | None]":
        """Read an object; None if there is none."""
        return self._hop(lane, self._get, name)

    def put(
        self, name: str, body: bytes, etag: str | None, lane: Lane
    ) -> "asyncio.Future[str | Refusal]":
        """Write an object in place of the one with that ETag, or where there is none.

        Gives the new ETag, or why there is none: a refusal is no error here, because it
        depends on the other changes of a batch what it means.
        """
        return self._hop(lane, self._put, name, body, etag)

    def browse(self, folder: str, lane: Lane, *, after: str = "") -> "ObjectListing":
        """List the objects of a folder in order, from behind a name on."""
        stream = obstore.list(
            self._reads, folder, offset=f"{folder}{after}" if after else None, chunk_size=_PAGE
        )
        return ObjectListing(lambda: self._hop(lane, self._page, stream, folder))

    def delete(self, names: Sequence[str]) -> "asyncio.Future[Refusal | None]":
        """Delete objects whose names are never used again, a thousand in a request."""
        return self._hop("work", self._delete, names)

    async def delete_unchanged(self, doomed: Sequence[tuple[str, str]]) -> "list[Refusal | None]":
        """Delete objects that still have the ETag named with them; tell of each how it went."""
        slices = [doomed[i::_CONNECTIONS] for i in range(min(_CONNECTIONS, len(doomed)))]
        done = await together([self._hop("work", self._delete_unchanged, part) for part in slices])
        return [refusal for part in done for refusal in part]

    def explain(self, refusal: Refusal) -> JobsyncError:
        """Make the error that tells what to do about a refusal."""
        return refusal.explain(self.name, renewing=self._renewing)

    def _hop(self, lane: Lane, call: Callable[..., T], *arguments: object) -> "asyncio.Future[T]":
        if os.getpid() != self._pid:
            raise _after_fork(self.name)
        if self._closed:
            raise Unavailable(self.name, "the store is closed", "connect again")
        return self._threads[lane].run(call, *arguments)

    def _get(self, name: str) -> Body | None:
        try:
            found = obstore.get(self._reads, name)
            meta = found.meta
            self.newest = max(self.newest, meta["last_modified"])
            size = meta["size"]
            data = found.bytes().to_bytes() if size <= MAX_OBJECT else None
            return Body(meta["e_tag"] or "", size, data)
        except _RAISED as error:
            refusal = Refusal.read(error)
        # Raised out here: within `except` it would carry the client's text as its context.
        if refusal.absent:
            return None
        raise self.explain(refusal)

    def _put(self, name: str, body: bytes, etag: str | None) -> str | Refusal:
        try:
            if etag is None:
                done = obstore.put(self._writes, name, body, mode="create")
            else:
                done = obstore.put(self._writes, name, body, mode={"e_tag": self._match(etag)})
        except _RAISED as error:
            return Refusal.read(error)
        # Without an ETag nobody can build on it: as good as a lost reply.
        return done["e_tag"] or Refusal()

    def _match(self, etag: str) -> str:
        return etag.strip('"') if self.bare_etags else etag

    def _page(self, stream: "ListStream[Sequence[ObjectMeta]]", folder: str) -> list[Listed]:
        try:
            page = next(stream, ())
        except _RAISED as error:
            refusal = Refusal.read(error)
        else:
            skip = len(folder)
            listed = [
                Listed(m["path"][skip:], m["e_tag"] or "", m["size"], m["last_modified"])
                for m in page
            ]
            self.newest = max([self.newest, *(one.modified for one in listed)])
            return listed
        raise self.explain(refusal)

    def _delete(self, names: Sequence[str]) -> Refusal | None:
        try:
            obstore.delete(self._reads, names)
        except _RAISED as error:
            return Refusal.read(error)
        return None

    def _delete_unchanged(self, doomed: Sequence[tuple[str, str]]) -> "list[Refusal | None]":
        names = [name for name, _ in doomed]
        # The client knows no conditional delete, but signs a request that is one.
        urls = obstore.sign(self._writes, "DELETE", names, _SIGNED_FOR)
        origin = urlsplit(urls[0])
        connect = HTTPSConnection if origin.scheme == "https" else HTTPConnection
        with closing(connect(origin.netloc, timeout=_SECONDS)) as connection:
            return [
                _ask(connection, url, self._match(etag))
                for url, (_, etag) in zip(urls, doomed, strict=True)
            ]


class ObjectListing:
    """A listing that is under way, one page of the server's at a time.

    Args:
        fetch: gives the next page; an empty one at the end.
    """

    def __init__(self, fetch: Callable[[], "asyncio.Future[list[Listed]]"]) -> None:
        self._fetch = fetch
        self._page: list[Listed] = []
        self._ended = False

    async def take(
        self,
        weight: int,
        pick: Callable[[Listed], T | None],
        weigh: Callable[[T], int] = lambda _: 1,
    ) -> list[T]:
        """Give what is picked from the next ones, until it weighs enough or the end is there."""
        taken: list[T] = []
        while weight > 0 and await self._fill():
            picked = pick(self._page.pop())
            if picked is not None:
                taken.append(picked)
                weight -= weigh(picked)
        return taken

    async def _fill(self) -> bool:
        if not self._page and not self._ended:
            self._page = (await self._fetch())[::-1]
            self._ended = not self._page
        return not self._ended


def _ask(connection: HTTPConnection | HTTPSConnection, url: str, etag: str) -> Refusal | None:
    """Send one signed DELETE with a condition."""
    parts = urlsplit(url)
    try:
        connection.request("DELETE", f"{parts.path}?{parts.query}", headers={"If-Match": etag})
        reply = connection.getresponse()
        body = reply.read().decode(errors="replace")
    except (OSError, HTTPException):
        connection.close()
        return Refusal()
    return None if reply.status in _DELETED else Refusal.answer(reply.status, body)


def _after_fork(name: str) -> Misconfigured:
    return Misconfigured(
        "store",
        name,
        "a bucket was opened before a fork, and its client does not survive one",
        "fork first and connect then, or start the process by spawn",
    )


def _client(url: ObjectsUrl, retries: "RetryConfig") -> S3Store | AzureStore:
    options: ClientConfig = {
        "timeout": timedelta(seconds=_SECONDS),
        "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
        "allow_http": url.endpoint.startswith("http://"),
    }
    match url.provider:
        case "s3":
            return _s3(url, options, retries)
        case "az":
            try:
                return AzureStore(url.bucket, client_options=options, retry_config=retries)
            except BaseError:
                raise Misconfigured(
                    "url",
                    str(url),
                    "names no account",
                    "set AZURE_STORAGE_ACCOUNT_NAME",
                ) from None
        case "gs":
            raise Misconfigured(
                "url",
                str(url),
                "Google's conditional writes need a number that its listings do not show",
                "use s3:// or az://",
            )


def _s3(url: ObjectsUrl, options: "ClientConfig", retries: "RetryConfig") -> S3Store:
    # What the environment says about these would else be taken.
    settled: S3Config = {"conditional_put": "etag", "skip_signature": False}
    if url.endpoint:
        settled["endpoint"] = url.endpoint
        settled["virtual_hosted_style_request"] = False
    return S3Store(
        url.bucket,
        config=settled,
        region=url.region,
        credential_provider=_credentials(url.key, url.secret, url.token),
        client_options=options,
        retry_config=retries,
    )


def _credentials(
    key: Secret | None, secret: Secret | None, token: Secret | None
) -> "Callable[[], S3Credential] | None":
    """Give what hands over the URL's credentials; None lets the client look for its own."""
    if key is None or secret is None:
        return None

    def hand_over() -> "S3Credential":
        return {
            "access_key_id": key.reveal(),
            "secret_access_key": secret.reveal(),
            "token": token.reveal() if token else None,
            "expires_at": None,
        }

    return hand_over
