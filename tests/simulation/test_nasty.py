"""Nasty scenarios: each a story that once broke a coordinator somewhere, or would have ours.

All of them run in the simulated world, and none may lose its workers, its epochs or its calm.
"""

import asyncio
from typing import Any

import pytest
from fleets import TIMING, DearStore, Fleet, Worker

BEATS = 1.06 * TIMING.beat
"""A beat by the slowest clock, and the way to the store and back."""
TIMEOUTS = 1.06 * TIMING.timeout


def one(workers: list[Worker]) -> Worker:
    """Give the one there is."""
    (worker,) = workers
    return worker


def incarnation_of(worker: Worker) -> str:
    """Give the name of a worker's session."""
    assert worker.membership is not None
    return worker.membership.incarnation


def followers(fleet: Fleet) -> list[Worker]:
    """Give the workers that live and do not lead."""
    leaders = fleet.leaders()
    return [worker for worker in fleet.workers if worker.node.is_alive and worker not in leaders]


# What is no session: of the wrong type, without fields, of numbers that nobody counts to, with
# a timing that nobody may have.
NO_SESSIONS: list[Any] = [
    "junk",
    [],
    7,
    {},
    {"state": "live"},
    {"worker": "w", "state": "live", "beat": 2**53, "timing": {"beat": 5, "timeout": 1}},
    {"worker": "w", "state": "asleep", "beat": 1, "timing": {"beat": 5, "timeout": 15}},
    {"worker": 3, "state": "live", "beat": "many", "timing": {"beat": 5, "timeout": 15}},
]


@pytest.mark.parametrize("store", [None, DearStore])
@pytest.mark.parametrize("junk", NO_SESSIONS, ids=str)
def test_a_corrupt_session_is_left_alone(junk: Any, store: Any) -> None:
    """A follower's record is spoilt: it comes back, the others go on, and the junk stays as it is.

    Found: a session known before was rewritten as dead whatever it had become; a record that
    was no object, or whose timing no worker may have, ended every leader in turn.
    """
    fleet = Fleet(11, listens=True, **({"store": store} if store else {}))

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(120)
        leader, victim = one(fleet.leaders()), followers(fleet)[0]
        key = f"session/{incarnation_of(victim)}"
        await fleet.overwrite(key, junk)
        await asyncio.sleep(4 * TIMEOUTS)
        assert one(fleet.leaders()) is leader
        assert incarnation_of(victim) not in key
        record = await fleet.store.get(key)
        assert record is not None
        assert record.value == junk
        aside = [event.key for event in leader.told("store:record-set-aside")]
        assert aside == [key]
        before = leader.link.requests
        await asyncio.sleep(20 * TIMING.beat)
        # Beat, look and list; what the work does; nothing for the junk.
        assert leader.link.requests - before <= 20 * 1.05 * 6 + 6
        fleet.judge_rest()

    fleet.tell(story)
    assert fleet.deaths == 0


def test_a_corrupt_session_of_the_leader_costs_one_term() -> None:
    """The leader's own record is spoilt: it comes back with a new session and a higher epoch."""
    fleet = Fleet(12, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        epoch = leader.held["work"]
        await fleet.overwrite(f"session/{incarnation_of(leader)}", "junk")
        await asyncio.sleep(2 * TIMEOUTS)
        assert one(fleet.leaders()) is leader
        assert leader.held["work"] == epoch + 1
        assert len(leader.told("coord:session-lost")) == 1
        fleet.judge_rest()

    fleet.tell(story)


@pytest.mark.parametrize("mend", ["drop", "bury", "repair"])
def test_a_dead_leader_whose_record_is_spoilt_is_replaced_once_it_is_mended(mend: str) -> None:
    """Nobody calls dead what cannot be read; when a person has mended it, somebody leads.

    Found: a session that was unreadable once was never given up again, mended or gone.
    """
    fleet = Fleet(13, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        key = f"session/{incarnation_of(leader)}"
        whole = await fleet.store.get(key)
        assert whole is not None
        leader.node.kill()
        await fleet.overwrite(key, ["junk"])
        await asyncio.sleep(4 * TIMEOUTS)
        assert fleet.leaders() == []
        match mend:
            case "drop":
                await fleet.store.drop([key])
            case "bury":
                spoilt = await fleet.store.get(key)
                assert spoilt is not None
                await fleet.operator.write([spoilt.delete()])
            case _:
                await fleet.overwrite(key, whole.value)
        await asyncio.sleep(2 * TIMEOUTS + BEATS)
        assert one(fleet.leaders()) is not leader

    fleet.tell(story)


def test_a_session_that_cannot_even_be_read_disturbs_nobody() -> None:
    """Bytes that are no JSON, under a follower's name: told once, read once, left alone."""
    fleet = Fleet(14, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader, victim = one(fleet.leaders()), followers(fleet)[0]
        victim.node.kill()
        fleet.garble(f"session/{incarnation_of(victim)}")
        await asyncio.sleep(4 * TIMEOUTS)
        assert len(leader.told("store:record-set-aside")) == 1
        before = leader.link.requests
        await asyncio.sleep(20 * TIMING.beat)
        assert leader.link.requests - before <= 20 * 1.05 * 6 + 6
        fleet.judge_rest()

    fleet.tell(story)


def test_a_session_of_a_newer_format_is_neither_called_dead_nor_rewritten() -> None:
    """An older worker leaves alone what a newer one wrote, and does not fall over it.

    Found: an observer that tried to write the death of one ended, and each of its successors.
    """
    fleet = Fleet(15, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        victim = followers(fleet)[0]
        key = f"session/{incarnation_of(victim)}"
        record = await fleet.store.get(key)
        assert record is not None
        victim.node.kill()
        await fleet.overwrite(key, record.value, format=2)
        await asyncio.sleep(4 * TIMEOUTS)
        after = await fleet.store.get(key)
        assert after is not None
        assert (after.format, after.value) == (2, record.value)
        fleet.judge_rest()

    fleet.tell(story)
    assert fleet.deaths == 0


def test_who_ended_in_good_order_is_not_called_dead_again() -> None:
    """A clean stop is one write, and no worker tells that another died.

    Found: whoever led watched the ended session for a timeout, and wrote its death once more.
    """
    fleet = Fleet(16, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        followers(fleet)[0].stop()
        await asyncio.sleep(6 * TIMEOUTS)
        assert [each.told("coord:worker-died") for each in fleet.workers] == [[]] * 4
        fleet.judge_rest()

    fleet.tell(story)
    assert fleet.deaths == 1
