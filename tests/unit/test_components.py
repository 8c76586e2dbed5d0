"""Ids are unique, and sort by time."""

import base64
import re
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness

from jobsync.components import NONCE_LENGTH, Ids
from jobsync.core.clock import Clock, SystemClock, SystemRandomness
from jobsync.core.keys import check_key


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_there_is_one_nonce_for_each_write(ids: Ids, count: int) -> None:
    """Every write gets a nonce, and no two are the same."""
    nonces = ids.nonces(count)
    assert len(nonces) == count
    assert len(set(nonces)) == count


def test_a_nonce_has_one_width_and_alphabet(ids: Ids) -> None:
    """A nonce is 12 characters that need no escaping in a key, a URL or SQL."""
    assert NONCE_LENGTH == 12
    for nonce in ids.nonces(1000):
        assert re.fullmatch(r"[A-Za-z0-9_-]{12}", nonce), nonce
        check_key(f"a/{nonce}")


def test_each_nonce_has_random_bits_of_its_own() -> None:
    """Nine bytes: all that was drawn is used, and no part of it twice."""
    randomness = SeededRandomness(7)
    nonces = Ids(FakeClock(), SeededRandomness(7)).nonces(5)
    drawn = b"".join(map(base64.urlsafe_b64decode, nonces))
    assert drawn == randomness.bytes(45)


def test_nonces_of_two_calls_differ(ids: Ids) -> None:
    """Randomness is drawn anew at each call."""
    assert not set(ids.nonces(100)) & set(ids.nonces(100))


def test_generators_share_no_nonce() -> None:
    """Two generators on one machine draw different nonces."""
    one, two = (Ids(SystemClock(), SystemRandomness()) for _ in range(2))
    assert not set(one.nonces(1000)) & set(two.nonces(1000))


def test_a_worker_id_has_one_width(ids: Ids, clock: Clock) -> None:
    """A worker id is a date of 13 digits and 12 random ones."""
    assert re.fullmatch(r"worker-1700000000000-[0-9a-f]{12}", ids.worker())


@pytest.mark.parametrize("step", [0.002, 1.0, 1e3, 1e9])
async def test_worker_ids_sort_by_start(ids: Ids, clock: Clock, step: float) -> None:
    """The first in lexicographic order is the oldest, over milliseconds and over decades."""
    workers = []
    for _ in range(5):
        workers.append(ids.worker())
        await clock.sleep(step)
    assert workers == sorted(workers)


def test_an_early_clock_keeps_the_width(ids: Ids, clock: Any) -> None:
    """A simulated world that starts near zero still sorts its workers by time."""
    clock.wall_seconds = 9.0
    early = ids.worker()
    clock.wall_seconds = 10.0
    assert early < ids.worker()
    assert early.startswith("worker-0000000009000-")


def test_workers_of_one_millisecond_differ(ids: Ids) -> None:
    """Workers that start at the same instant have different ids."""
    assert len({ids.worker() for _ in range(1000)}) == 1000


async def test_batches_sort_by_time(ids: Ids, clock: Clock) -> None:
    """A later batch of history sorts after an earlier one, and is a legal key."""
    first = ids.batch()
    await clock.sleep(0.5)
    second = ids.batch()
    assert first < second
    check_key(first)


async def test_record_ids_are_uuids_that_sort_by_time(ids: Ids, clock: Clock) -> None:
    """Ids of a batch are UUIDs of version 7, in order, and before those of a later batch."""
    first = ids.records(1000)
    await clock.sleep(0.001)
    second = ids.records(1000)
    both = first + second
    assert both == sorted(set(both))
    assert {(uuid.UUID(name).version, uuid.UUID(name).variant) for name in both} == {
        (7, uuid.RFC_4122)
    }
    assert [str(uuid.UUID(name)) for name in both] == both


def test_record_ids_fit_after_the_highest_random_number(clock: Clock) -> None:
    """They count up to it."""

    class Highest(SystemRandomness):
        def bytes(self, count: int) -> bytes:
            return b"\xff" * count

    names = Ids(clock, Highest()).records(3)
    assert [name[-12:] for name in names] == ["fffffffffffd", "fffffffffffe", "ffffffffffff"]
    assert [str(uuid.UUID(name)) for name in names] == names


def test_two_calls_in_the_same_instant_have_different_ids(ids: Ids) -> None:
    """Each draws bits of its own: they differ before the digits that are counted."""
    assert not {name[:-12] for name in ids.records(3)} & {name[:-12] for name in ids.records(3)}


class CountingRandomness(SeededRandomness):
    """Counts the bytes that are drawn."""

    drawn = 0

    def bytes(self, count: int) -> bytes:
        self.drawn += count
        return super().bytes(count)


def test_each_id_has_all_its_random_bits() -> None:
    """As many as are drawn, in their order, none twice; without a write none are drawn."""
    randomness, clock = CountingRandomness(3), FakeClock()
    ids = Ids(clock, randomness)
    calls: list[tuple[Callable[[], str], int, str]] = [
        (ids.worker, 6, r"worker-1700000000000-([0-9a-f]{12})"),
        (lambda: ids.incarnation("worker-1-a"), 4, r"worker-1-a\.([0-9a-f]{8})"),
        (ids.batch, 6, r"1700000000000-([0-9a-f]{12})"),
    ]
    drawn = SeededRandomness(3)
    for call, count, pattern in calls:
        for _ in range(3):
            before = randomness.drawn
            found = re.fullmatch(pattern, call())
            assert found is not None
            assert found[1] == drawn.bytes(count).hex()
            assert randomness.drawn - before == count
    before = randomness.drawn
    assert ids.nonces(0) == []
    assert randomness.drawn == before


def test_the_ids_of_records_have_the_bits_that_were_drawn() -> None:
    """74 random bits: all but those of the version and of the variant."""
    ids = Ids(FakeClock(), SeededRandomness(5))
    drawn = SeededRandomness(5)
    for _ in range(20):
        (name,) = ids.records(1)
        digits = drawn.bytes(10).hex()
        assert name[:14] == "018bcfe5-6800-"
        shown = name[14:].replace("-", "")
        assert (shown[0], shown[1:4], shown[5:]) == ("7", digits[:3], digits[4:19])
        assert int(shown[4], 16) & 3 == int(digits[3], 16) & 3
