"""The records of keys: none names a page that was dropped, and none that is in use is removed."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, Record
from jobsync.events import Event, Events
from jobsync.queue.backend import NewMessage
from jobsync.queue.pages import keyed_push
from jobsync.queue.pages.backend import PagesBackend
from jobsync.queue.pages.keyed_push import _DoubtfulPush
from jobsync.queue.pages.keys import TIME_TO_CREATE, FoundKey, KeyRecord
from jobsync.queue.pages.page import KeyHold, PageMessage, QueuePage, name_page
from jobsync.stores.contract import BURIAL_AGE, Change, Outcome, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.testing import BilledStore

DAY = 86_400.0
NOW = FakeClock().wall_seconds
PLACES = [f"0/{name_page(NOW - 50 + number, f'nonce{number:07}')}" for number in range(5)]
replace = msgspec.structs.replace


class StagedStore(StoreDecorator):
    """A store whose requests are recorded, and among which others happen."""

    def __init__(self, inner: BilledStore) -> None:
        super().__init__(inner)
        self.requests: list[str] = []
        self.before_write: Callable[[], Awaitable[None]] | None = None
        self.after_write: Callable[[], None] | None = None
        self.loses_writes = False

    def _record(self, kind: str, keys: Sequence[str]) -> None:
        self.requests += [f"{kind} {key.partition('/')[0]}" for key in keys]

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        self._record("get", keys)
        return await self.inner.get_many(keys, tombstones=tombstones)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self._record("put", [each.key for each in changes])
        if self.before_write is not None:
            change, self.before_write = self.before_write, None
            await change()
        if self.loses_writes:
            return [Unknown("the request was lost") for _ in changes]
        outcomes = await self.inner.write(changes)
        if self.after_write is not None:
            self.after_write()
        return outcomes


class Town:
    """A queue on a store that bills, and the record of one key."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.events: list[Event] = []
        components = Components(clock=self.clock, randomness=SeededRandomness(1), events=Events())
        components.events.on("store:record-set-aside", self.events.append)
        self.bare = BilledStore(components=components)
        self.store = StagedStore(self.bare)
        self.backend = PagesBackend(self.store, "mails", components)
        self.keys = self.backend._keys
        self.pages = self.backend._pages

    async def write(self, key: str = "k", **fields: Any) -> str:
        """Write the record of a key as it is, and return its name."""
        name = self.keys.name(key)
        entry = KeyRecord(key=key, **{"id": "pushed", "token": "t", **fields})
        base = await self.bare.get(name, tombstones=True)
        await self.bare.put(base, msgspec.to_builtins(entry)) if base else await self.bare.create(
            name, msgspec.to_builtins(entry)
        )
        return name

    async def read(self, key: str = "k") -> KeyRecord | None:
        """Return the record of a key."""
        record = await self.bare.get(self.keys.name(key))
        return None if record is None else msgspec.convert(record.value, KeyRecord)

    def pass_time(self, seconds: float) -> None:
        """Advance the clock."""
        self.clock.mono_seconds += seconds
        self.clock.wall_seconds += seconds


@pytest.fixture
def town() -> Town:
    """A queue that nobody has used."""
    return Town()


def done(**hold: Any) -> QueuePage:
    """Return a page whose message is finished or has moved on."""
    key_hold = KeyHold(**{"key": "k", "token": "t", "id": "held", **hold})
    return QueuePage(birth="b" * 12, key_hold=key_hold)


LEFT, DELETED = object(), None
DROPS: dict[str, tuple[dict[str, Any], int, dict[str, Any], Any]] = {
    "finished": ({"place": PLACES[0]}, 0, {}, DELETED),
    "held for a time": (
        {"place": PLACES[0]},
        0,
        {"until": NOW + 1},
        {"id": "held", "until": NOW + 1},
    ),
    "held until now": ({"place": PLACES[0]}, 0, {"until": NOW}, DELETED),
    "released": ({"place": PLACES[0]}, 0, {"until": NOW + 1, "is_released": True}, DELETED),
    "barred": ({"place": PLACES[0]}, 0, {"token": "another", "id": ""}, DELETED),
    "of another hold": ({"place": PLACES[1]}, 0, {"token": "another"}, LEFT),
    "moved": ({"place": PLACES[0]}, 0, {"next": PLACES[1]}, {"place": PLACES[1], "step": 1}),
    "moved, and the record is behind": (
        {"place": PLACES[0]},
        2,
        {"step": 2, "next": PLACES[3]},
        {"place": PLACES[3], "step": 3},
    ),
    "moved, and the record is at another step before": (
        {"place": PLACES[1], "step": 1},
        3,
        {"step": 3, "next": PLACES[4]},
        {"place": PLACES[4], "step": 4},
    ),
    "moved, and the record is ahead": (
        {"place": PLACES[3], "step": 3},
        1,
        {"step": 1, "next": PLACES[2]},
        LEFT,
    ),
    "moved, and the record has its time": (
        {"until": NOW + 1},
        0,
        {"until": NOW + 1, "next": PLACES[1]},
        LEFT,
    ),
    "finished after a move, and the record is behind": (
        {"place": PLACES[0]},
        1,
        {"step": 1},
        DELETED,
    ),
    "held for a time after a move, and the record is behind": (
        {"place": PLACES[0]},
        1,
        {"step": 1, "until": NOW + 1},
        {"id": "held", "until": NOW + 1},
    ),
}


@pytest.mark.parametrize(("entry", "number", "hold", "expected"), DROPS.values(), ids=DROPS)
async def test_before_a_page_is_dropped_its_record_names_another_or_none(
    town: Town, entry: dict[str, Any], number: int, hold: dict[str, Any], expected: Any
) -> None:
    """Where the message is, or until when the key is held; again it changes nothing."""
    await town.write(**entry)
    before = await town.read()
    for _ in range(2):
        assert await town.keys.prepare_drop(PLACES[number], done(**hold))
        if expected is LEFT:
            assert await town.read() == before
        elif expected is DELETED:
            assert await town.read() is None
        else:
            want = {"id": "pushed", "token": "t", **expected}
            assert await town.read() == KeyRecord(key="k", **want)


async def test_pages_of_a_message_that_moved_are_dropped_in_any_order(town: Town) -> None:
    """The later one first: the record never goes back to a page that is gone."""
    await town.write(place=PLACES[0])
    for number in (2, 1, 0, 3):
        hold = {"step": number, "next": PLACES[number + 1]}
        assert await town.keys.prepare_drop(PLACES[number], done(**hold))
        entry = await town.read()
        assert entry is not None
        assert (entry.place, entry.step) == ((PLACES[4], 4) if number == 3 else (PLACES[3], 3))


@pytest.mark.parametrize("hold", [{}, {"until": NOW + 9}, {"next": PLACES[1]}])
@pytest.mark.parametrize("trouble", ["changed", "lost", "damaged"])
async def test_a_page_stays_while_its_record_cannot_be_changed(
    town: Town, trouble: str, hold: dict[str, Any]
) -> None:
    """Others have changed it meanwhile, or it is not known whether it was changed."""
    name = await town.write(place=PLACES[0])

    async def change() -> None:
        await town.write(place=PLACES[0], id="another")

    match trouble:
        case "changed":
            town.store.before_write = change
        case "lost":
            town.store.loses_writes = True
        case "damaged":
            record = await town.bare.get(name)
            assert record is not None
            await town.bare.put(record, [1, 2, 3])
    assert not await town.keys.prepare_drop(PLACES[0], done(**hold))
    if trouble != "damaged":
        entry = await town.read()
        assert entry is not None
        assert entry.place == PLACES[0]


async def test_a_sweep_goes_through_all_keys_once_a_day(town: Town) -> None:
    """In parts; one record that cannot be read is reported, and keeps none of the others."""
    names = [await town.write(f"free-{n}", until=NOW - 1) for n in range(7)]
    held = await town.write("held", until=NOW + 10 * DAY)
    damaged = sorted(names)[1]
    record = await town.bare.get(damaged)
    assert record is not None
    await town.bare.put(record, [1, 2, 3])
    seen = [await town.keys.forget("", 3)]
    for _ in range(2):
        seen.append(await town.keys.forget(seen[-1].last, 3))
    assert [part.is_end for part in seen] == [False, False, True]
    assert sum(part.removed for part in seen) == 6
    assert {head.key for head in await town.bare.heads("key/mails/")} == {held, damaged}
    assert [event["key"] for event in town.events] == [damaged]
    await town.write("free-8", until=NOW - 1)
    town.pass_time(DAY - 1)
    assert (await town.keys.forget("", 10)).removed == 0
    town.pass_time(1)
    assert (await town.keys.forget("", 10)).removed == 1


async def test_a_sweep_removes_the_tombstones_of_keys(town: Town) -> None:
    """When no late request can bring a record back."""
    name = await town.write(until=NOW - 1)
    assert (await town.keys.forget("", 10)).removed == 1
    assert await town.bare.get(name, tombstones=True) is not None
    town.pass_time(max(DAY, BURIAL_AGE) + 1)
    await town.keys.forget("", 10)
    assert await town.bare.get(name, tombstones=True) is None


async def test_a_push_that_goes_on_keeps_its_key_until_two_sweeps_have_seen_it(
    town: Town,
) -> None:
    """Another push of the same key begins again; so does the count."""
    removed = []
    for sweep in range(5):
        if sweep in (0, 1, 2):
            await town.write(place=PLACES[sweep])
        removed.append((await town.keys.forget("", 10)).removed)
        town.pass_time(DAY)
    assert removed == [0, 0, 0, 1, 0]


async def test_a_key_stays_if_its_page_comes_while_it_is_swept(town: Town) -> None:
    """Its message has arrived after all."""
    await town.write(place=PLACES[0])
    assert (await town.keys.forget("", 10)).removed == 0

    async def arrive() -> None:
        page = replace(done(), messages=(PageMessage(id="held", value=1),))
        value = msgspec.to_builtins(page)
        await town.bare.create(
            f"page/mails/{PLACES[0]}", msgspec.json.decode(msgspec.json.encode(value))
        )

    town.pass_time(DAY)
    town.store.before_write = arrive
    assert (await town.keys.forget("", 10)).removed == 0
    assert await town.backend.push([NewMessage(id="id-2", value=2, max_attempts=4, key="k")]) == {
        "id-2": "held"
    }


@pytest.mark.parametrize(
    ("later", "is_barred"), [(0.0, True), (TIME_TO_CREATE, True), (TIME_TO_CREATE + 0.1, False)]
)
async def test_a_page_is_barred_only_soon_after_its_record_was_read(
    town: Town, *, later: float, is_barred: bool
) -> None:
    """Later it may have been there, and have been dropped."""
    found = await town.keys.find(await town.write(place=PLACES[0]))
    assert found.is_unborn
    town.pass_time(later)
    assert await town.keys.bar(found) is is_barred
    assert bool(await town.bare.heads("page/mails/0/")) is is_barred


@pytest.mark.parametrize("change", ["none", "written", "deleted"])
async def test_a_record_is_current_if_it_is_as_it_was(town: Town, change: str) -> None:
    """One that was written again is another, whatever it says; so is one that is gone."""
    found = await town.keys.find(await town.write(place=PLACES[0]))
    assert found.record is not None
    if change == "written":
        await town.write(place=PLACES[0])
    elif change == "deleted":
        await town.bare.delete(found.record)
    assert await town.keys.is_current(found) is (change == "none")
    assert not await town.keys.is_current(FoundKey(None, found.read))


@pytest.mark.parametrize(("until", "is_held"), [(None, False), (NOW, False), (NOW + 0.1, True)])
async def test_a_key_whose_page_was_dropped_is_held_until_its_time(
    town: Town, until: float | None, *, is_held: bool
) -> None:
    """Not at that moment any more."""
    found = await town.keys.find(await town.write(until=until))
    assert found.is_held(NOW) is is_held


@pytest.mark.parametrize("way_back", [0.0, TIME_TO_CREATE, TIME_TO_CREATE + 1])
async def test_a_page_is_created_soon_after_the_request_for_its_record_was_sent(
    town: Town, way_back: float
) -> None:
    """If the answer took longer, the record is read again first."""
    await town.backend.push([NewMessage(id="id-0", value=0, max_attempts=4, key="first")])
    town.store.requests.clear()

    def answer() -> None:
        town.pass_time(way_back)
        town.store.after_write = None

    town.store.after_write = answer
    assert await town.backend.push([NewMessage(id="id-1", value=1, max_attempts=4, key="k")]) == {}
    assert town.store.requests[:2] == ["get key", "put key"]
    again = ["get key", "get page", "get key"] if way_back > TIME_TO_CREATE else []
    assert [each for each in town.store.requests[2:] if "bell" not in each] == [*again, "put page"]
    assert [each.id for each in await town.backend.browse("ready")] == ["id-0", "id-1"]


def test_the_latest_pushes_in_doubt_are_remembered(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of each key, and of the latest keys."""
    monkeypatch.setattr(keyed_push, "_MAX_KEYS", 2)
    pushes = town.backend._keyed_push
    for key in "abc":
        for number in range(6):
            pushes._remember(key, _DoubtfulPush(f"{key}{number}", 1, PLACES[0], "birth"))
    found = {key: [each.id for each in doubts] for key, doubts in pushes._doubtful.items()}
    assert found == {key: [f"{key}{number}" for number in range(2, 6)] for key in "bc"}
