"""A batch over both files of SQLite: every pair of what may become of the two parts."""

import itertools
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import (
    Applied,
    Components,
    Conflicted,
    Corrupt,
    Events,
    JobsyncError,
    Misconfigured,
    Put,
    Unavailable,
    Unknown,
)
from jobsync.stores.sqlite.file import CommitFailed
from jobsync.stores.sqlite.store import SqliteStore

ERRORS: dict[str, Exception] = {
    "is locked": Unavailable("file", "locked"),
    "is read-only": Misconfigured("url", "file", "is read-only", "fix"),
    "is damaged": Corrupt("file", "damaged"),
}
FATES = ("is written", "conflicts", "fails to commit", *ERRORS)


class FakeFile:
    """A file whose transactions end as the test says."""

    def __init__(self, name: str, fate: str) -> None:
        self.path = Path(name)
        self.commits, self.wakeups = SimpleNamespace(notifier=None), SimpleNamespace()
        self.notified = 0
        self.waited: list[object] = []
        self._fate = fate

    def notify(self) -> None:
        """Count it."""
        self.notified += 1

    async def wait(self, changes: object, topic: str, timeout: float) -> None:
        """Remember what is waited for."""
        del topic, timeout
        self.waited.append(changes)

    def _end(self) -> bool:
        if self._fate == "fails to commit":
            raise CommitFailed("disk I/O error")
        if self._fate in ERRORS:
            raise ERRORS[self._fate]
        return self._fate == "is written"

    async def run(self, statement: str, row: Any) -> int:
        """Run one statement."""
        del statement, row
        return int(self._end())

    async def write(self, work: Callable[[sqlite3.Connection, Any], Any], rows: Any) -> list[str]:
        """Run one transaction."""
        del work
        return [] if self._end() else rows.keys()


def build_store(main: FakeFile, sessions: FakeFile) -> SqliteStore:
    """Return a store on such files."""
    components = Components(clock=FakeClock(), randomness=SeededRandomness(1), events=Events())
    return SqliteStore(cast("Any", main), cast("Any", sessions), components)


def expect(fate: str) -> type:
    """Return the outcome of one part, if the other part may have been written."""
    return {"is written": Applied, "conflicts": Conflicted}.get(fate, Unknown)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("sessions", "main"), [*itertools.product(FATES, FATES)])
async def test_an_error_means_that_nothing_was_written(
    sessions: str, main: str, count: int
) -> None:
    """Sessions come first. Once they may have been written, the rest has outcomes of its own."""
    files = FakeFile("main", main), FakeFile("sessions", sessions)
    store = build_store(*files)
    changes = [
        *(Put(f"n/{n}", 1) for n in range(count)),
        *(Put(f"role/{n}", 1) for n in range(count)),
    ]
    if sessions in ERRORS:
        with pytest.raises(JobsyncError) as caught:
            await store.write(changes)
        assert caught.value is ERRORS[sessions]
        return
    outcomes = await store.write(changes)
    assert [type(outcome) for outcome in outcomes] == [expect(main)] * count + [
        expect(sessions)
    ] * count
    # Whoever waits for a role looks, even if the outcome is unknown.
    assert [file.notified for file in files] == [0, 1]


@pytest.mark.parametrize("fate", FATES)
async def test_a_batch_in_one_file_has_its_outcomes_or_its_error(fate: str) -> None:
    """The other file is not touched, and nobody is woken for a heartbeat."""
    files = FakeFile("main", "is locked"), FakeFile("sessions", fate)
    store = build_store(*files)
    changes = [Put("session/a", 1), Put("session/b", 1)]
    if fate in ERRORS:
        with pytest.raises(JobsyncError) as caught:
            await store.write(changes)
        assert caught.value is ERRORS[fate]
    else:
        assert [type(outcome) for outcome in await store.write(changes)] == [expect(fate)] * 2
    assert [file.notified for file in files] == [0, 0]


@pytest.mark.parametrize("topic", ["n/", "session/ns/", "role/ns/", "request/ns/"])
async def test_a_wait_looks_at_what_its_topic_changes(topic: str) -> None:
    """Heartbeats change the session file all the time: who waits for a role is told of roles."""
    main, sessions = FakeFile("main", "is written"), FakeFile("sessions", "is written")
    store = build_store(main, sessions)
    await store.write([Put(f"{topic}1", 1)])
    await store.wait(topic, 60)
    is_told = topic.startswith(("role/", "request/"))
    assert [main.notified, sessions.notified] == [0, int(is_told)]
    expected = main.commits if topic == "n/" else sessions.wakeups if is_told else sessions.commits
    (found,) = [*main.waited, *sessions.waited]
    assert found is expected
