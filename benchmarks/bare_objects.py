"""The measured work with obstore alone.

Single requests run on the caller's thread, batches in a pool of threads.
"""

from concurrent.futures import ThreadPoolExecutor

import msgspec
import obstore
from benchmarks.work import BATCH, VALUE
from obstore.store import S3Store

from jobsync import Components
from jobsync.core.urls import ObjectsUrl
from jobsync.stores.objects.bucket import _THREADS
from jobsync.stores.objects.layout import LIVE_SIZE

__all__ = ["BareObjects", "open_bucket"]


def open_bucket(url: ObjectsUrl) -> S3Store:
    """Open a bucket with obstore alone."""
    assert url.key is not None
    assert url.secret is not None
    return S3Store(
        url.bucket,
        endpoint=url.endpoint,
        region=url.region,
        access_key_id=url.key.reveal(),
        secret_access_key=url.secret.reveal(),
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )


class BareObjects:
    """The same requests with bodies of the same content and size.

    Args:
        url: the bucket, with credentials.
        bare_etags: whether the server compares ETags without their quotes.
    """

    def __init__(self, url: ObjectsUrl, *, bare_etags: bool) -> None:
        self._bucket = open_bucket(url)
        self._folder = f"{url.prefix}/bare".lstrip("/")
        self._bare_etags = bare_etags
        self._ids = Components.system().ids
        self._threads = ThreadPoolExecutor(_THREADS["work"])
        self._number = 0

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _names(self, count: int) -> list[str]:
        self._number += 1
        return [f"{self._folder}/{self._number:06d}/{i:06d}" for i in range(count)]

    def _put(self, name: str, body: bytes, etag: str | None) -> str:
        if etag is None:
            done = obstore.put(self._bucket, name, body, mode="create")
        else:
            condition = etag.strip('"') if self._bare_etags else etag
            done = obstore.put(self._bucket, name, body, mode={"e_tag": condition})
        assert done["e_tag"]
        return done["e_tag"]

    async def put(self, count: int) -> None:
        """Create an object, then replace it again and again."""
        (name,) = self._names(1)
        etag, trail = None, ""
        for seq in range(1, count + 1):
            (nonce,) = self._ids.nonces(1)
            trail = _lengthen(trail, nonce)
            etag = self._put(name, _body(trail, seq), etag)

    async def get(self, count: int) -> None:
        """Read one object again and again."""
        for _ in range(count):
            found = obstore.get(self._bucket, f"{self._folder}/000001/000000")
            assert found.meta["e_tag"]
            msgspec.json.decode(found.bytes().to_bytes())

    async def create(self, count: int) -> None:
        """Create objects, a batch at once."""
        for _ in range(count):
            self._write(self._names(BATCH), 1)

    async def replace(self, count: int) -> None:
        """Create objects, then replace them again and again, a batch at once."""
        self._write(self._names(BATCH), count)

    def _write(self, names: list[str], times: int) -> None:
        etags: list[str | None] = [None] * len(names)
        trails = [""] * len(names)
        for seq in range(1, times + 1):
            nonces = self._ids.nonces(len(names))
            trails = [_lengthen(*pair) for pair in zip(trails, nonces, strict=True)]
            bodies = [_body(trail, seq) for trail in trails]
            etags = list(self._threads.map(self._put, names, bodies, etags))


def _lengthen(trail: str, nonce: str) -> str:
    return f"{nonce} {trail}"[:207] if trail else nonce


def _body(trail: str, seq: int) -> bytes:
    return msgspec.json.encode((trail, seq, 0, 1, VALUE)).ljust(LIVE_SIZE)
