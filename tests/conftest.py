"""Time and randomness that tests hold in their hands, and servers that they share."""

import asyncio
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import servers
from chance import FakeClock, SeededRandomness

from jobsync import Components
from jobsync.components import Ids
from jobsync.core.urls import ObjectsUrl, parse_url
from jobsync.stores.objects.quirks import Quirks, detect_quirks


@pytest.fixture
def clock() -> FakeClock:
    """Time that passes only when somebody sleeps."""
    return FakeClock()


@pytest.fixture
def ids(clock: FakeClock) -> Ids:
    """Names that are the same in every run, dated by `clock`."""
    return Ids(clock, SeededRandomness(1))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make prove-…` ask for full figures, and `make certify-s3` for another server."""
    parser.addoption("--scale", choices=["small", "full"], default="small")
    parser.addoption("--s3", choices=["seaweed", "ministack", "ceph"], default="seaweed")


@pytest.fixture(scope="session")
def full_scale(request: pytest.FixtureRequest) -> bool:
    """Whether this run proves the full figures."""
    return bool(request.config.getoption("--scale") == "full")


@pytest.fixture(scope="session")
def rounds(full_scale: bool) -> int:
    """How often a race is run."""
    return 200 if full_scale else 20


class Proof:
    """Tells how a long run gets on, and keeps its figures if it is a full one."""

    def __init__(self, config: pytest.Config, *, kept: bool) -> None:
        self._writer = config.get_terminal_writer()
        self._path = config.rootpath / "proof" / "runs.jsonl"
        self._kept = kept

    def tell(self, text: str) -> None:
        """Show progress."""
        if self._kept:
            self._writer.line(f"  {text}")

    def record(self, what: str, **figures: Any) -> None:
        """Keep what was shown, with the commit that showed it."""
        if not self._kept:
            return
        line = {"at": int(time.time()), "commit": _describe_commit(), "what": what, **figures}
        with self._path.open("a", encoding="utf-8") as runs:
            runs.write(json.dumps(line) + "\n")


def _describe_commit() -> str:
    """Name the commit that is at work; what runs have left in the proof makes it no other."""

    def ask(*question: str) -> str:
        return subprocess.run(["git", *question], capture_output=True, text=True, check=True).stdout

    changed = ask("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)proof")
    return ask("describe", "--always").strip() + ("-dirty" if changed else "")


@pytest.fixture
def proof(request: pytest.FixtureRequest, full_scale: bool) -> Proof:
    """Where a test leaves the figures of a full run."""
    return Proof(request.config, kept=full_scale)


@pytest.fixture(scope="session")
def postgres() -> Iterator[servers.PostgresServer]:
    """A PostgreSQL of our own, or the one that JOBSYNC_TEST_POSTGRES names."""
    with servers.PostgresServer() as server:
        yield server


S3_SERVERS: dict[str, Callable[[], servers.S3Server]] = {
    "seaweed": servers.SeaweedServer,
    "ministack": servers.MinistackServer,
    "ceph": servers.CephServer,
}
BUCKET = "tests"
_names = (f"test_{os.getpid()}_{i}" for i in itertools.count())


@pytest.fixture(scope="session")
def s3(request: pytest.FixtureRequest) -> Iterator[servers.S3Server]:
    """A real S3 server of our own, with a bucket, or the one that JOBSYNC_TEST_S3 names."""
    with S3_SERVERS[request.config.getoption("--s3")]() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture
def bucket_url(s3: servers.S3Server) -> str:
    """A part of a bucket that no other test uses."""
    return s3.url(BUCKET, next(_names))


@pytest.fixture
def locate(request: pytest.FixtureRequest, tmp_path: Path) -> servers.Locate:
    """Gives places that no other test uses."""

    def find(kind: str) -> str:
        name = next(_names)
        match kind:
            case "memory":
                return f"memory://{name}"
            case "sqlite":
                return f"sqlite:///{tmp_path / f'{name}.db'}"
            case "postgres":
                return f"{request.getfixturevalue('postgres').url}?schema={name}"
            case _:
                return str(request.getfixturevalue("s3").url(BUCKET, name))

    return find


@pytest.fixture(scope="session")
def manners(s3: servers.S3Server) -> Quirks:
    """How that server wants to be spoken to."""
    url = parse_url(s3.url(BUCKET, next(_names)))
    assert isinstance(url, ObjectsUrl)
    return asyncio.run(detect_quirks(url, Components.system()))
