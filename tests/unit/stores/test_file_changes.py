"""Counting the changes of a file."""

import asyncio
import math
import os
from pathlib import Path

import pytest
from chance import FakeClock

from jobsync.stores.sqlite.file import FileChanges, SqliteFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file."""
    path = tmp_path / "log"
    path.write_bytes(b"1")
    return path


def test_an_unchanged_file_counts_nothing(path: Path, clock: FakeClock) -> None:
    """Not even after an hour."""
    changes = FileChanges(str(path), clock)
    seen = changes.count()
    clock.mono_seconds += 3600
    assert changes.count() == seen


@pytest.mark.parametrize("kind", ["longer", "touched", "replaced", "removed"])
def test_every_change_counts_once_when_it_is_found(path: Path, clock: FakeClock, kind: str) -> None:
    """A change of its length, its time or its inode counts; so does its removal."""
    changes = FileChanges(str(path), clock)
    seen, was = changes.count(), path.stat()
    match kind:
        case "longer":
            path.write_bytes(b"12")
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        case "touched":
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns + 1000))
        case "replaced":
            path.with_name("new").write_bytes(b"1")
            os.utime(path.with_name("new"), ns=(was.st_atime_ns, was.st_mtime_ns))
            path.with_name("new").replace(path)
        case _:
            path.unlink()
    assert changes.count() == seen + 1
    assert changes.count() == seen + 1


def test_a_change_counts_again_until_it_is_surely_visible(path: Path, clock: FakeClock) -> None:
    """After pauses that double, for some seconds; then not again."""
    changes = FileChanges(str(path), clock)
    path.write_bytes(b"12")
    counts = []
    for _ in range(100):
        counts.append(changes.count())
        clock.mono_seconds += 0.1
    grew = [n for n in range(1, 100) if counts[n] > counts[n - 1]]
    assert grew[0] <= 2
    assert grew[-1] >= 25
    assert len(grew) < 8


STEP = 1 / 128
"""Seconds; a number that the clock adds up exactly."""


def count_growth(changes: FileChanges, clock: FakeClock) -> list[int]:
    """Return after how many steps the count grows, for 5 s."""
    grew, seen = [], changes.count()
    for step in range(1, 640):
        clock.mono_seconds += STEP
        if changes.count() != seen:
            seen = changes.count()
            grew.append(step)
    return grew


@pytest.mark.parametrize("is_looked_at", [False, True])
@pytest.mark.parametrize("steps", [1, 12, 40, 100, 200, 640])
def test_a_new_change_is_counted_again_from_the_start(
    path: Path, clock: FakeClock, steps: int, is_looked_at: bool
) -> None:
    """The pauses restart, however far they have grown; as after the first change, again and again.

    Whether somebody looks all the time between two changes, or not at all.
    """
    changes = FileChanges(str(path), clock)
    path.write_bytes(b"12")
    first = count_growth(changes, clock)
    assert first == [13, 39, 91, 194, 399]
    for length in range(4, 10, 2):
        path.write_bytes(b"1" * length)
        changes.count()
        for _ in range(steps):
            clock.mono_seconds += STEP
            if is_looked_at:
                changes.count()
        path.write_bytes(b"1" * (length + 1))
        assert count_growth(changes, clock) == first


async def test_a_wait_ends_when_it_is_woken_even_if_the_file_looks_the_same(
    path: Path, clock: FakeClock
) -> None:
    """Two changes within a tick of the kernel have the same time."""
    file = SqliteFile(path, clock, 5.0)
    waiting = asyncio.create_task(file.wait(file.wakeups, "n/", 3600))
    await asyncio.sleep(0)
    file.wakeups.notifier.wake(["n/"])
    async with asyncio.timeout(30):
        await waiting


@pytest.mark.parametrize("timeout", [0.01, 0.3, 2.5])
async def test_a_wait_is_no_longer_than_it_was_told(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    """However long the pauses between two looks at the file are."""
    file, pauses = SqliteFile(path, clock, 5.0), list[float]()

    async def pass_time(_topic: str, pause: float, _has_changed: object) -> bool:
        pauses.append(pause)
        clock.mono_seconds += pause
        return False

    monkeypatch.setattr(file.commits.notifier, "wait", pass_time)
    monkeypatch.setattr(file.commits, "find_wait", lambda: 1.0)
    await file.wait(file.commits, "n/", timeout)
    assert sum(pauses) == pytest.approx(timeout)
    assert len(pauses) == math.ceil(timeout)
