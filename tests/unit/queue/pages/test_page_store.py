"""Pages as one process reads and writes them: names, looks, and changes that share a write."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec
import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, JobsyncError, Misconfigured, OutcomeUnknown, Record, Unavailable
from jobsync.events import Events
from jobsync.queue.pages import page_reader
from jobsync.queue.pages.page import (
    KeyHold,
    PageClaim,
    PageMark,
    PageMessage,
    PageState,
    QueuePage,
    name_page,
)
from jobsync.queue.pages.page_store import PageStore
from jobsync.stores.contract import Change, Conflicted, Head, Outcome, Put, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.testing import BilledStore

NOW = FakeClock().wall_seconds
PLACE = f"0/{name_page(NOW, 'n' * 12)}"
KEY = f"page/mails/{PLACE}"


class StagedStore(StoreDecorator):
    """A store whose answers take time, and between whose requests others happen."""

    def __init__(self, inner: BilledStore, clock: FakeClock) -> None:
        super().__init__(inner)
        self.clock = clock
        self.way_back = 0.0
        self.writes: list[Change] = []
        self.outcomes: list[Outcome] = []
        """In place of the next answers to writes."""
        self.read_error: JobsyncError | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        if self.read_error is not None:
            raise self.read_error
        found = await self.inner.get_many(keys, tombstones=tombstones)
        self.clock.mono_seconds += self.way_back
        return found

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        found = await self.inner.heads(prefix, after=after, until=until, limit=limit)
        self.clock.mono_seconds += self.way_back
        return found

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self.writes += changes
        await self.gate.wait()
        if self.outcomes:
            return [self.outcomes.pop(0)]
        return await self.inner.write(changes)


class Process:
    """A process with the pages of a queue."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        components = Components(clock=self.clock, randomness=SeededRandomness(1), events=Events())
        self.bare = BilledStore(components=components)
        self.store = StagedStore(self.bare, self.clock)
        self.pages = PageStore(self.store, "mails", components)

    async def put(self, page: QueuePage, place: str = PLACE, **fields: Any) -> Record:
        """Write a page as another process would."""
        key = f"page/mails/{place}"
        value = msgspec.json.decode(msgspec.json.encode(page))
        base = await self.bare.get(key)
        await self.bare.write([Put(key, value, base, mark=page.find_mark(NOW), **fields)])
        record = await self.bare.get(key)
        assert record is not None
        return record

    def pass_time(self, seconds: float) -> None:
        """Advance the clock."""
        self.clock.mono_seconds += seconds
        self.clock.wall_seconds += seconds


@pytest.fixture
def process() -> Process:
    """A process that has seen nothing."""
    return Process()


def build_page(*states: PageState, **fields: Any) -> QueuePage:
    """Return a page with messages in these states."""
    messages = tuple(
        PageMessage(id=f"id-{number}", state=state, claim="c" * (state == "claimed"), hold=30.0)
        for number, state in enumerate(states)
    )
    claims = (PageClaim(id="c", session="other.b", at=NOW),) if "claimed" in states else ()
    return QueuePage(birth="b" * 12, messages=messages, claims=claims, **fields)


def complete(number: int) -> Callable[[QueuePage], tuple[QueuePage, int]]:
    """Return a change that completes one message."""

    def change(page: QueuePage) -> tuple[QueuePage, int]:
        messages = list(page.messages)
        messages[number] = msgspec.structs.replace(messages[number], state="completed")
        return msgspec.structs.replace(page, messages=tuple(messages)), number

    return change


def test_names_of_new_pages_sort_in_the_order_of_their_birth(process: Process) -> None:
    """In one millisecond, and if the clock steps back a little; others do not change that."""
    names = [process.pages.name_new("0", process.clock.wall_seconds) for _ in range(20)]
    process.clock.wall_seconds -= 9
    names += [process.pages.name_new("0", process.clock.wall_seconds) for _ in range(20)]
    process.pages.name_new("0", process.clock.wall_seconds + 5_000)
    process.pages.name_new("dead", process.clock.wall_seconds)
    names += [process.pages.name_new("0", process.clock.wall_seconds) for _ in range(20)]
    assert names == sorted(names)
    assert names[-1] < f"0/{name_page(NOW + 1, '')}"


@pytest.mark.parametrize("step", [11.0, 5_000.0])
def test_after_a_clock_was_set_back_pages_are_named_by_it(process: Process, step: float) -> None:
    """Nobody looks at a page before the time in its name: the order counts for less."""
    process.pages.name_new("0", NOW)
    process.clock.wall_seconds -= step
    for _ in range(3):
        assert process.pages.name_new("0", NOW - step) < f"0/{name_page(NOW - step + 1, '')}"


@pytest.mark.parametrize(
    "error", [Unavailable("store", "away"), Misconfigured("url", "s3://", "no", "allow it"), None]
)
async def test_a_page_that_may_have_been_created_is_in_doubt_unless_it_is_found(
    process: Process, error: JobsyncError | None
) -> None:
    """Whatever prevents another look at it; a page of another birth is not it."""
    process.store.outcomes = [Unknown("the reply was lost")] * 2
    process.store.read_error = error
    with pytest.raises(OutcomeUnknown):
        await process.pages.create(PLACE, build_page("ready"))
    process.store.read_error = None
    await process.put(build_page("ready"))
    assert await process.pages.create(PLACE, build_page("ready"))
    process.store.outcomes = [Unknown("the reply was lost")]
    with pytest.raises(OutcomeUnknown):
        await process.pages.create(
            PLACE, msgspec.structs.replace(build_page("ready"), birth="d" * 12)
        )


async def start(*changes: Awaitable[Any]) -> list["asyncio.Task[Any]"]:
    """Start changes, and let each go as far as it can."""
    tasks = [asyncio.ensure_future(change) for change in changes]
    for _ in range(10):
        await asyncio.sleep(0)
    return tasks


async def test_a_change_that_is_cancelled_while_it_waits_is_not_applied(process: Process) -> None:
    """Those before it and after it are, with two writes; nothing is left of their writer."""
    await process.put(build_page("ready", "ready", "ready"))
    process.store.gate.clear()
    tasks = await start(*(process.pages.apply(PLACE, complete(number)) for number in range(3)))
    tasks[1].cancel()
    await start()
    process.store.gate.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert (answers[0], answers[2], tasks[1].cancelled()) == (0, 2, True)
    opened = await process.pages.read_current(PLACE)
    assert opened is not None
    assert [each.state for each in opened.page.messages] == ["completed", "ready", "completed"]
    assert len(process.store.writes) == 2
    assert process.pages._writers == {}


async def test_a_change_waits_for_the_writer_whoever_has_gone(process: Process) -> None:
    """One caller ends while another writes: a third one still waits, and nothing conflicts."""
    await process.put(build_page("ready", "ready", "ready"))
    process.store.gate.clear()
    first, second = await start(
        *(process.pages.apply(PLACE, complete(number)) for number in range(2))
    )
    second.cancel()
    await start()
    (third,) = await start(process.pages.apply(PLACE, complete(2)))
    assert len(process.store.writes) == 1
    process.store.gate.set()
    assert (await first, await third) == (0, 2)
    assert len(process.store.writes) == 2
    assert process.pages._writers == {}


async def test_a_claim_that_lapsed_is_reported_once_it_is_written(process: Process) -> None:
    """Not for a write that conflicts, and once although it is tried again."""
    await process.put(build_page("ready", "claimed"))
    await process.pages.read_current(PLACE)
    process.pass_time(31)
    process.pages._sightings[PLACE] = msgspec.structs.replace(
        process.pages._sightings[PLACE], looked=process.clock.mono()
    )
    process.store.outcomes = [Conflicted()]
    assert await process.pages.apply(PLACE, complete(0)) == 0
    assert [each.id for each in process.pages.ended] == ["id-1"]


async def test_the_format_of_a_page_never_goes_down(process: Process) -> None:
    """Older code that left it alone goes on to do so."""
    await process.put(build_page("ready"), format=2)
    await process.pages.apply(PLACE, complete(0))
    record = await process.bare.get(KEY)
    assert record is not None
    assert record.format == 2


@pytest.mark.parametrize("has_key", [False, True])
async def test_a_page_that_was_finished_here_is_remembered_unless_it_has_a_key(
    process: Process, *, has_key: bool
) -> None:
    """One with a key is read before it is dropped."""
    hold = KeyHold(key="k", token="t") if has_key else None
    await process.put(build_page("ready", key_hold=hold))
    await process.pages.apply(PLACE, complete(0))
    record = await process.bare.get(KEY)
    assert record is not None
    assert process.pages.count_done(PLACE, record.version) == (None if has_key else 1)
    assert process.pages.count_done(PLACE, "another") is None


async def test_a_look_counts_from_its_answer_and_a_page_from_its_request(
    process: Process,
) -> None:
    """A claim may have been renewed on the way; and the page may have been changed on the way."""
    await process.put(build_page("claimed"))
    process.store.way_back = 7.0
    sent = process.clock.mono()
    opened = await process.pages.read_current(PLACE)
    assert opened is not None
    assert opened.read == sent
    assert process.pages._sightings[PLACE].first == process.clock.mono()
    assert process.pages.find_lapse(PLACE, opened.page) == 30.0
    await process.put(build_page("claimed", "ready"))
    await process.pages.list_some("0")
    assert process.pages._sightings[PLACE].first == process.clock.mono()
    assert process.pages.find_still(PLACE) == 0.0


async def test_a_page_that_could_not_be_understood_counts_until_it_is(process: Process) -> None:
    """Of newer code, or not a page: it is counted as it was when it was read last."""
    newer = await process.put(build_page("ready", "ready"), format=99)
    assert await process.pages.read({PLACE: newer.version}) == {}
    assert process.pages.count_newer() == {99: 2}
    await process.bare.drop([KEY])
    assert await process.pages.read({PLACE: None}) == {}
    assert process.pages.count_newer() == {}


async def test_the_pages_that_were_used_last_are_in_hand(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many were read."""
    monkeypatch.setattr(page_reader, "_MAX_OPEN", 3)
    places = [f"0/{name_page(NOW, f'{number:012}')}" for number in range(5)]
    for place in places:
        await process.put(build_page("ready"), place)
        await process.pages.read({place: None})
        await process.pages.read({places[0]: None})
    held = [place for place in places if process.pages.find_open(place) is not None]
    assert held == [places[0], *places[3:]]


async def test_a_listing_goes_on_after_names_of_others(process: Process) -> None:
    """What follows them is listed, also if a part of the listing has nothing else."""
    await process.bare.create("page/mails/0/0-odd", {})
    await process.bare.create("page/mails/0/0-strange", {})
    await process.put(build_page("ready"))
    found, after = [], ""
    for _ in range(4):
        part, after = await process.pages.list_some("0", after=after, limit=1)
        found += part
    assert [(page.place, page.mark) for page in found] == [(PLACE, PageMark.READY)]
    assert after == ""


@pytest.mark.parametrize("part", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5])
async def test_a_lane_is_listed_to_its_end(process: Process, count: int, part: int) -> None:
    """Each page once, however many a part of the listing has; or up to a time."""
    places = [f"0/{name_page(NOW + number, 'n' * 12)}" for number in range(count)]
    for place in places:
        await process.put(build_page("ready"), place)
    list_some, parts = process.pages.list_some, []

    async def list_part(lane: str, *, after: str = "") -> Any:
        parts.append(after)
        assert parts.count(after) == 1
        return await list_some(lane, after=after, limit=part)

    cast("Any", process.pages).list_some = list_part
    assert [page.place for page in await process.pages.list_all("0")] == places
    for last in range(count):
        parts.clear()
        between = await process.pages.list_between(NOW, NOW + last)
        assert [page.place for page in between] == places[: last + 1]
