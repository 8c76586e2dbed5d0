"""The weather of a link: each probability, duration and choice of calls has its effect alone."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from jobsync import Applied, Misconfigured, OutcomeUnknown, Put, Store, Unavailable, Unknown
from jobsync.stores.memory import MemoryStore
from jobsync.testing import CALM, Link, Weather, World, connect
from jobsync.testing.rows import CURRENT_CALL, BackendCall
from jobsync.testing.weather import FAULTS, PASSING, SINGLE, Fault

T = TypeVar("T")
Story = Callable[[World, Link], Awaitable[T]]


def run(story: Story[T], weather: Weather = CALM, seed: int = 1) -> T:
    """Run a story with two nodes, of which one has a link with this weather."""
    world = World(seed)

    async def start() -> T:
        store = MemoryStore(components=world.components)
        Link(world, world.node("b"), store)
        return await story(world, Link(world, world.node("a"), store, weather))

    result = world.run(start)
    assert world.judge() == []
    return result


async def write(link: Store) -> str:
    """Write a record; return what the sender learns."""
    try:
        (outcome,) = await link.write([Put("n", 1)])
    except (Misconfigured, Unavailable) as error:
        return type(error).__name__
    return type(outcome).__name__


FATES: dict[Fault, tuple[str, int, float, float]] = {
    "slow": ("Applied", 1, 0.0, 4.1),
    "slow_reply": ("Applied", 1, 2.3, 4.9),
    "refused": ("Unavailable", 0, 0.0, 0.02),
    "forbidden": ("Misconfigured", 0, 0.0, 0.02),
    "undecided": ("Unknown", 0, 0.0, 0.02),
    "lost": ("Unknown", 1, 0.0, 0.02),
    "unanswered": ("Unknown", 1, 5.0, 5.1),
    "late": ("Unknown", 1, 5.0, 5.1),
    "doubled": ("Applied", 1, 0.0, 0.1),
}
"""What the sender of a write learns, how often it is applied, and how long the sender waits."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_fault_has_its_fate(fault: Fault, seed: int) -> None:
    """As the weather, or ordained for one request; another link and a later request have none."""
    outcome, applied, least, most = FATES[fault]

    async def story(world: World, link: Link) -> None:
        learned = await write(link)
        took = world.loop.time()
        link.mend()
        assert (learned, link.faults, world.faults) == (outcome, 1, 1)
        assert least <= took <= most
        await asyncio.sleep(1000)
        commits = [each for each in world.history if each.what == "commit"]
        assert [each.node for each in commits] == ["a"] * applied
        if fault == "late":
            assert 5.0 <= commits[0].at <= 66.0
        assert await write(world.nodes["b"].links[0]) == "Applied" or applied
        assert world.faults == 1

    async def ordained(world: World, link: Link) -> None:
        link.ordain("write", fault)
        await story(world, link)

    run(story, SINGLE[fault], seed)
    run(ordained, CALM, seed)


def test_ordained_faults_are_those_of_the_next_requests_in_order() -> None:
    """One each, of this call; what is ordained later comes after it."""

    async def story(_: World, link: Link) -> list[str]:
        link.ordain("write", "refused", "lost")
        link.ordain("get", "refused")
        link.ordain("write", "forbidden")
        await link.heads("n/")
        learned = [await write(link) for _ in range(3)]
        with pytest.raises(Unavailable):
            await link.get("n")
        await link.get("n")
        (outcome,) = await link.write([Put("m", 1)])
        return [*learned, type(outcome).__name__]

    assert run(story) == ["Unavailable", "Unknown", "Misconfigured", "Applied"]


@pytest.mark.parametrize(
    ("calls", "backend_call", "is_struck"),
    [
        (None, "", True),
        (frozenset({"write"}), "", True),
        (frozenset({"write", "get"}), "", True),
        (frozenset({"get"}), "", False),
        (frozenset(), "", False),
        (frozenset({"settle"}), "settle", True),
        (frozenset({"settle"}), "claim", False),
        (frozenset({"write"}), "settle", True),
    ],
)
def test_the_weather_may_strike_some_calls_alone(
    calls: frozenset[str] | None, backend_call: str, *, is_struck: bool
) -> None:
    """By the name of the call of the store, or of the queue backend that makes it."""

    async def story(_: World, link: Link) -> str:
        token = CURRENT_CALL.set(BackendCall(0, backend_call)) if backend_call else None
        learned = await write(link)
        if token is not None:
            CURRENT_CALL.reset(token)
        return learned

    learned = run(story, Weather(refused=1.0, calls=calls))
    assert learned == ("Unavailable" if is_struck else "Applied")


@pytest.mark.parametrize("call", ["get", "scan", "read"])
@pytest.mark.parametrize("is_struck", [True, False])
def test_damage_may_strike_some_calls_alone(call: str, *, is_struck: bool) -> None:
    """One record or entry less, or an error, of this call and no other."""

    async def story(_: World, link: Link) -> list[str]:
        for number in range(3):
            await link.inner.create(f"n/{number}", number)
        await link.inner.append("h", [1, 2, 3])
        damaged = []
        try:
            await link.get("n/1")
        except Exception:  # noqa: BLE001 - any will do
            damaged.append("get")
        damaged += ["scan"] * (len(await link.scan("n/")) < 3)
        damaged += ["read"] * (len(await link.read("h")) < 3)
        return damaged

    others = frozenset({"get", "scan", "read"} - {call})
    expected = {call} if is_struck else others
    assert {*run(story, Weather(corrupt=1.0, calls=frozenset(expected)))} == expected


def test_a_sender_waits_as_long_as_it_is_patient() -> None:
    """Whether a link is cut, mute, or withholds a call, and each is a fault."""

    async def story(world: World, link: Link) -> list[tuple[str, float]]:
        waited = []
        for name, value in (
            ("requests_pass", False),
            ("replies_pass", False),
            ("withheld", frozenset({"settle", "extend"})),
        ):
            setattr(link, name, value)
            start, faults = world.loop.time(), link.faults
            token = CURRENT_CALL.set(BackendCall(0, "settle"))
            learned = await write(link)
            CURRENT_CALL.reset(token)
            waited.append((learned, round(world.loop.time() - start, 1)))
            assert link.faults == faults + 1
            link.mend()
            link.weather = Weather(patience=8.0)
        return waited

    assert run(story, Weather(patience=8.0)) == [("Unknown", 8.0)] * 3


def test_a_call_is_withheld_by_its_name() -> None:
    """Requests of others arrive, and so do those that belong to no call."""

    async def story(_: World, link: Link) -> list[str]:
        link.withheld = frozenset({"settle"})
        learned = [await write(link)]
        for number, name in enumerate(("claim", "settle")):
            token = CURRENT_CALL.set(BackendCall(0, name))
            (outcome,) = await link.write([Put(f"n/{number}", 1)])
            learned.append(type(outcome).__name__)
            CURRENT_CALL.reset(token)
        return learned

    assert run(story) == ["Applied", "Applied", "Unknown"]


def test_a_fault_may_follow_another() -> None:
    """The next request has one, of any kind but those that end a process; the one after it too."""
    fates: set[str] = set()

    async def story(world: World, link: Link) -> None:
        link.ordain("write", "refused")
        await write(link)
        for number in range(2, 60):
            assert link.faults == world.faults >= number - 1
            fates.add(await write(link))

    run(story, Weather(again=1.0), seed=-1)
    assert fates <= {"Applied", "Unavailable", "Unknown", "Conflicted"}
    assert {"Unavailable", "Unknown"} < fates
    assert {*PASSING} == {*FAULTS} - {"forbidden"}


def test_no_fault_follows_where_there_was_none() -> None:
    """And the dice of other worlds are not asked."""

    async def story(world: World, link: Link) -> float:
        for _ in range(20):
            await write(link)
        assert world.faults == 0
        return world.surprises.random()

    assert run(story, Weather(again=1.0)) == run(story, CALM)


@pytest.mark.parametrize(
    ("weather", "least", "most"),
    [(Weather(latency=0.0), 0.0, 0.0), (Weather(latency=2.0, patience=9.0), 0.05, 4.0)],
)
def test_latency_is_that_of_each_direction(weather: Weather, least: float, most: float) -> None:
    """A reply takes as long as a request at most."""

    async def story(world: World, link: Link) -> tuple[float, float]:
        await write(link)
        commit = next(each for each in world.history if each.what == "commit")
        return commit.at, world.loop.time() - commit.at

    for seed in range(5):
        there, back = run(story, weather, seed)
        assert least <= there + back <= most
        assert max(there, back) <= weather.latency


def test_each_outcome_is_recorded_with_its_write() -> None:
    """In the order of the changes, with the base and the key of each; a refusal is of all."""
    world = World(1)

    async def story() -> None:
        shared = MemoryStore(components=world.components)
        store = connect(world.node("a"), shared)
        (link,) = world.nodes["a"].links
        first = await store.create("n/1", 1)
        await store.write([first.replace(2), Put("n/2", 4)])
        await store.write([Put("n/4", 5), Put("n/2", 5)])
        link.forbidden = True
        with pytest.raises(Misconfigured):
            await store.write([Put("n/3", 1), first.delete()])
        link.mend()
        assert [each and each.value for each in await store.get_many(["n/2", "n/9"])] == [4, None]

    world.run(story)
    replies = [each.details for each in world.history if each.what == "reply"]
    first = replies[0]["nonce"]
    assert [(each["key"], each["base"], each["outcome"]) for each in replies] == [
        ("n/1", None, "Applied"),
        ("n/1", first, "Applied"),
        ("n/2", None, "Applied"),
        ("n/4", None, "Applied"),
        ("n/2", None, "Conflicted"),
        ("n/3", None, "Refused"),
        ("n/1", first, "Refused"),
    ]
    assert len({each["nonce"] for each in replies}) == 7
    (read,) = (each.details for each in world.history if each.what == "read")
    assert (read["keys"], read["tombstones"]) == (["n/2", "n/9"], False)
    assert read["nonces"] == [replies[2]["nonce"], None]
    commits = [each.details for each in world.history if each.what == "commit"]
    assert [each["nonce"] for each in commits] == [replies[at]["nonce"] for at in (0, 1, 2, 3)]
    assert [(each["seq"], each["base"], each["value"]) for each in commits] == [
        *((1, None, 1), (2, first, 2), (1, None, 4), (1, None, 5)),
    ]


def test_nothing_that_was_sent_is_taken_back_by_mending() -> None:
    """A late request still arrives, as late as it was when it was sent."""

    async def story(world: World, link: Link) -> None:
        (outcome,) = await link.write([Put("n", 1)])
        assert isinstance(outcome, Unknown)
        link.mend()
        assert isinstance((await link.write([Put("m", 1)]))[0], Applied)
        await asyncio.sleep(100)
        assert [each.details["key"] for each in world.history] == ["m", "n"]

    run(story, SINGLE["late"])


def test_an_undecided_call_that_writes_has_an_unknown_outcome() -> None:
    """One that only reads has none; both only if the fault is ordained."""

    async def story(_: World, link: Link) -> None:
        await link.append("h", [1])
        await link.heads("n/")
        for call in ("append", "heads"):
            link.ordain(call, "undecided")
        with pytest.raises(OutcomeUnknown):
            await link.append("h", [2])
        with pytest.raises(Unavailable):
            await link.heads("n/")
        assert len(await link.inner.read("h")) == 1

    run(story, Weather(undecided=1.0))
