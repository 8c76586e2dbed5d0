"""All queues of a store in pages, as a directory shows them."""

from typing import Any

import msgspec
import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, Invalid
from jobsync.core.messages import Transition
from jobsync.events import Events
from jobsync.queue.backend import NewMessage, Settlement
from jobsync.queue.directory import Pause, QueueContent
from jobsync.queue.pages.backend import PagesBackend
from jobsync.queue.pages.directory import PagesDirectory
from jobsync.testing import BilledStore


class Fleet:
    """A store with queues, and its directory."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.components = Components(
            clock=self.clock, randomness=SeededRandomness(1), events=Events()
        )
        self.store = BilledStore(components=self.components)
        self.directory = PagesDirectory(self.store, self.components)

    def open(self, queue: str) -> PagesBackend:
        """Open a queue."""
        return PagesBackend(self.store, queue, self.components)

    async def push(self, queue: PagesBackend, *ids: str, **options: Any) -> None:
        """Push messages, each ten seconds after the one before."""
        for name in ids:
            self.clock.wall_seconds += 10
            await queue.push([NewMessage(id=name, value=name, max_attempts=4, **options)])

    async def end(self, queue: PagesBackend, move: Transition | None, session: str = "s") -> str:
        """Claim a message, and settle it; return its id."""
        (message,) = (await queue.claim(1, session=session, visibility=60)).messages
        if move is not None:
            settlement = Settlement(receipt=message.receipt, move=move)
            assert await queue.settle([settlement]) == [True]
        return message.id


async def fill(fleet: Fleet) -> tuple[PagesBackend, PagesBackend]:
    """Push messages to two queues, so that there is one in each state."""
    first, second = fleet.open("first"), fleet.open("second")
    await fleet.push(first, *"hgfedcba")
    moves: list[Transition | None] = [None, "bury", "cancel", "complete", None, "bury"]
    assert [await fleet.end(first, move) for move in moves] == [*"hgfedc"]
    await fleet.push(first, "w", delay=60.0)
    await fleet.push(second, "x", "y")
    assert await fleet.end(second, "bury") == "x"
    return first, second


async def test_a_directory_shows_each_queue_in_which_there_is_something() -> None:
    """Messages or a pause, by name; a queue that is used up and not paused is left out."""
    fleet = Fleet()
    start = fleet.clock.wall_seconds
    first, _ = await fill(fleet)
    await fleet.end(first, None, session="other")
    paused, used, both = fleet.open("paused"), fleet.open("used"), fleet.open("another")
    since = fleet.clock.wall_seconds
    assert await paused.pause("why")
    fleet.clock.wall_seconds += 100
    await fleet.push(used, "u")
    await used.delete("u")
    await fleet.push(both, "v")
    both_pushed = fleet.clock.wall_seconds
    assert await both.pause()
    found = await fleet.directory.read_contents()
    assert [*found] == ["another", "first", "paused", "second"]
    assert found == {
        "another": QueueContent(
            counts={"ready": 1}, oldest=both_pushed, pause=Pause(both_pushed, "")
        ),
        "first": QueueContent(
            counts={
                "claimed": 3,
                "dead": 2,
                "cancelled": 1,
                "completed": 1,
                "ready": 1,
                "waiting": 1,
            },
            oldest=start + 80,
            claims={"s": 2, "other": 1},
        ),
        "paused": QueueContent(pause=Pause(since, "why")),
        "second": QueueContent(counts={"dead": 1, "ready": 1}, oldest=start + 110),
    }


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([], {}),
        (["nobody"], {}),
        (["a"], {"a": "first"}),
        (["y", "a"], {"a": "first", "y": "second"}),
        (["x", "nobody", "g", "d"], {"x": "second", "g": "first", "d": "first"}),
        (["y", "y", "x"], {"y": "second", "x": "second"}),
    ],
)
async def test_messages_are_found_in_all_queues(ids: list[str], found: dict[str, str]) -> None:
    """Each once, in whatever state; those in the first queue end the search for no other."""
    fleet = Fleet()
    await fill(fleet)
    infos = await fleet.directory.find(ids)
    assert {each.id: each.queue for each in infos} == found
    assert len(infos) == len(found)


@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_a_part_of_a_queue_is_listed_by_id(limit: int) -> None:
    """Whichever message was pushed or died first; cancelled and completed ones are in no part."""
    fleet = Fleet()
    await fill(fleet)
    listed: dict[str, list[str]] = {"queue": [], "dead": []}
    for part in ("queue", "dead"):
        after = ""
        while page := await fleet.directory.list("first", part, after=after, limit=limit):
            assert len(page) <= limit
            assert page[0].id > after
            listed[part] += [each.id for each in page]
            after = page[-1].id
    assert listed == {"queue": ["a", "b", "d", "h", "w"], "dead": ["c", "g"]}
    for options in ({"after": "a\0"}, {"limit": 0}, {"limit": "5"}):
        with pytest.raises(Invalid) as refused:
            await fleet.directory.list(
                "first",
                "queue",
                **{"after": "", "limit": 1, **options},  # type: ignore[arg-type]
            )
        assert refused.value.field in options


async def test_a_message_is_shown_as_its_queue_shows_it() -> None:
    """But for the position among the finished ones, which only that queue knows."""
    fleet = Fleet()
    first, _ = await fill(fleet)
    for name in "adgwf":
        shown = await first.get(name)
        assert shown is not None
        expected = shown
        if shown.finished is not None:
            assert shown.cursor
            expected = msgspec.structs.replace(shown, cursor="")
        assert await fleet.directory.find([name]) == [expected]
        if shown.state not in {"cancelled", "completed"}:
            part: Any = "dead" if shown.state == "dead" else "queue"
            listed = await fleet.directory.list("first", part, after="", limit=100)
            assert expected in listed
