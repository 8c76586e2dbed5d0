"""Fixtures for all tests: a fake clock, stores and servers, and the record of full runs."""

import asyncio
import gc
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import postgres_schemas
import proofs
import pytest
import servers
from chance import FakeClock, SeededRandomness
from file_order import take_turns
from hypothesis import settings
from left_out import is_left_out

from jobsync import Components
from jobsync.components import Ids
from jobsync.core.urls import ObjectsUrl, parse_url
from jobsync.stores.objects.quirks import Quirks, open_and_detect


@pytest.fixture
def clock() -> FakeClock:
    """Return a clock that moves only when somebody sleeps."""
    return FakeClock()


@pytest.fixture
def ids(clock: FakeClock) -> Ids:
    """Return ids that are the same in every run, dated by `clock`."""
    return Ids(clock, SeededRandomness(1))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --scale for `make prove-…`, and --s3 for `make certify-s3`."""
    parser.addoption("--scale", choices=["small", "full"], default="small")
    parser.addoption("--s3", choices=["seaweed", "ministack", "ceph"], default="seaweed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spread files that compute among those that wait; leave out what only runs at full scale."""
    items[:] = take_turns(items)
    if config.getoption("--scale") == "full":
        return
    for item in items:
        if is_left_out(item.nodeid):
            item.add_marker(pytest.mark.skip(reason="at full scale; see tests/support/left_out.py"))


def pytest_configure() -> None:
    """Prepare this process, and those that tests start.

    Interrupts come through: a shell that starts us in the background has them ignored. The zone is
    far from UTC, by half an hour too, and has summer time: no decision may depend on it.
    """
    os.environ["TZ"] = "Australia/Lord_Howe"
    time.tzset()
    # How long an example takes says more about the machine than about the code.
    settings.register_profile("jobsync", deadline=None)
    settings.load_profile("jobsync")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Spend less on garbage: an eighth of the CPU of simulations was the collector's.

    It does not look at the thousands of collected tests again, and looks at the rest less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="session")
def full_scale(request: pytest.FixtureRequest) -> bool:
    """Return whether this run is at full scale."""
    return bool(request.config.getoption("--scale") == "full")


@pytest.fixture(scope="session")
def rounds(full_scale: bool) -> int:
    """Return how often a race is run."""
    return 200 if full_scale else 20


class Proof:
    """Shows the progress of a run at full scale, and records its figures."""

    def __init__(self, config: pytest.Config, *, is_full: bool) -> None:
        self._writer = config.get_terminal_writer()
        self._is_full = is_full

    def tell(self, text: str) -> None:
        """Show progress."""
        if self._is_full:
            self._writer.line(f"  {text}")

    def record(self, what: str, **figures: Any) -> None:
        """Append figures to proof/runs.jsonl, with the commit that showed them."""
        if self._is_full:
            proofs.record(what, **figures)


@pytest.fixture
def proof(request: pytest.FixtureRequest, full_scale: bool) -> Proof:
    """Return the record for the figures of a full run."""
    return Proof(request.config, is_full=full_scale)


@pytest.fixture(scope="session")
def postgres() -> Iterator[servers.PostgresServer]:
    """Start a PostgreSQL server, or use the one that JOBSYNC_TEST_POSTGRES names."""
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
    """Start a real S3 server with a bucket, or use the one that JOBSYNC_TEST_S3 names."""
    with S3_SERVERS[request.config.getoption("--s3")]() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture
def bucket_url(s3: servers.S3Server) -> str:
    """Return the URL of a bucket prefix that no other test uses."""
    return s3.url(BUCKET, next(_names))


@pytest.fixture
def locate(request: pytest.FixtureRequest, tmp_path: Path) -> servers.Locate:
    """Return a function that returns the URL of an empty store of a kind."""

    def find(kind: str) -> str:
        name = next(_names)
        match kind:
            case "memory":
                return f"memory://{name}"
            case "sqlite":
                return f"sqlite:///{tmp_path / f'{name}.db'}"
            case "postgres":
                url = request.getfixturevalue("postgres").url
                schema = postgres_schemas.take(url, name)
                request.addfinalizer(lambda: postgres_schemas.give_back(url, schema))
                return f"{url}?schema={schema}"
            case _:
                return str(request.getfixturevalue("s3").url(BUCKET, name))

    return find


@pytest.fixture(scope="session")
def quirks(s3: servers.S3Server) -> Quirks:
    """Return the quirks of that server."""
    url = parse_url(s3.url(BUCKET, next(_names)))
    assert isinstance(url, ObjectsUrl)

    async def detect() -> Quirks:
        store = await open_and_detect(url, Components.system())
        await store.close()
        return Quirks.from_traits(store.traits)

    return asyncio.run(detect())
