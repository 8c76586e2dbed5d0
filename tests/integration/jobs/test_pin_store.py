"""Where pins are kept: one sheet a node, changed as a whole."""

import asyncio

import msgspec
import pytest

from jobsync import Components, Invalid, Store
from jobsync.core.clock import Wall
from jobsync.core.pins import Pin, merge, read_sheet, write_sheet
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.pins import PinStore
from jobsync.stores.corruption_log import RecordSetAside
from jobsync.stores.metered import Meter, MeteredStore

PLACES = JobKeys("sync_")


def pin(task: str, *patterns: str, by: str = "a", expires_at: float | None = None) -> Pin:
    """Pin a task."""
    return Pin(
        task=task,
        token=len(task),
        patterns=patterns or ("x",),
        created_by=by,
        expires_at=expires_at,
    )


def board_on(store: Store, components: Components | None = None) -> PinStore:
    """Give a fleet's pins."""
    return PinStore(store, components or Components.system(), PLACES, len)


def test_a_sheet_is_read_as_it_was_written() -> None:
    """Pins that say the same of many tasks stand together."""
    pins = [
        pin("t", "a", "b"),
        msgspec.structs.replace(pin("u", "a", "b"), reason="r", created_at=1.5),
        pin("uv", "a", "b"),
        pin("w", "%-gpu", expires_at=7.25),
    ]
    document = write_sheet("a", pins)
    assert len(document["batches"]) == 3
    assert sorted(read_sheet(document, "k", len), key=repr) == sorted(pins, key=repr)


def test_saying_the_same_again_renews() -> None:
    """By task and patterns; in another order they are another pin."""
    old = [pin("t", "a", "b"), pin("t", "b", "a"), pin("u")]
    new = [pin("t", "a", "b", expires_at=5)]
    assert merge(old, new) == [new[0], old[1], old[2]]


async def test_nodes_do_not_touch_each_others_pins(store: Store) -> None:
    """Whatever is added, replaced or removed at the same time."""
    board = board_on(store)
    adding = [board.add("a", [pin(f"t{n}")]) for n in range(8)]
    await asyncio.gather(*adding, board.add("b", [pin("t0", by="b")]))
    assert len(await board.list_active()) == 9
    await board.add("a", [pin("new")], replacing=True)
    assert {found.task for found in await board.list_active()} == {"new", "t0"}
    assert await board.remove_by("b") == 1
    assert await board.remove_by("b") == await board.remove_by("never") == 0
    await board.add("b", [pin("again", by="b")])
    assert await board.remove_all() == 2
    assert await board.list_active() == []


async def test_a_registration_is_one_write(store: Store) -> None:
    """However many pins it has, and together with the removal of earlier ones."""
    components = Components.system()
    meter = Meter()
    board = board_on(MeteredStore(store, meter, components.clock), components)
    await board.add("a", [pin(f"t{n}") for n in range(1000)])
    await board.add("a", [pin(f"u{n}") for n in range(1000)], replacing=True)
    assert meter["write"].items == 2


async def test_what_has_not_changed_is_not_read_again(store: Store) -> None:
    """One listing a look."""
    components = Components.system()
    meter = Meter()
    board = board_on(MeteredStore(store, meter, components.clock), components)
    await board.add("a", [pin("t")])
    await board.add("b", [pin("u", by="b")])
    first = await board.list_active()
    reads = meter["get"].calls
    assert await board.list_active() == first
    assert meter["get"].calls == reads
    await board_on(store).add("b", [pin("v", by="b")])
    assert len(await board.list_active()) == 3
    assert meter["get"].items == 5


async def test_pins_expire_by_the_stores_clock(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by this machine's; what is over is swept, what is not says when it will be."""
    board = board_on(store)
    await board.add("a", [pin("t", expires_at=1000.0), pin("u"), pin("v", expires_at=3000.0)])

    async def now() -> Wall:
        return Wall(999.0)

    monkeypatch.setattr(store, "now", now)
    assert len(await board.list_active()) == 3
    assert 0 < board.valid_for <= 1
    assert await board.remove_expired() == 0

    async def later() -> Wall:
        return Wall(1000.0)

    monkeypatch.setattr(store, "now", later)
    assert {found.task for found in await board.list_active()} == {"u", "v"}
    assert 1990 < board.valid_for <= 2000
    assert await board.remove_expired() == 1
    assert len(await board_on(store).list_active()) == 2


async def test_a_pin_that_was_renewed_is_not_swept(store: Store) -> None:
    """Between the look and the sweep its node said it again."""
    board = board_on(store)
    await board.add("a", [pin("t", expires_at=1.0)])
    assert await board.list_active() == []
    await board.add("a", [pin("t")])
    assert await board.remove_expired() == 0
    assert len(await board.list_active()) == 1


async def test_a_sheet_that_cannot_be_read_hides_no_other(store: Store) -> None:
    """It is reported once and left as it is."""
    components = Components.system()
    told: list[RecordSetAside] = []
    components.events.on("store:record-set-aside", told.append)
    board = board_on(store, components)
    await board.add("a", [pin("t")])
    await store.create(PLACES.pins_of("b"), {"created_by": 5})
    assert [found.task for found in await board.list_active()] == ["t"]
    await board.list_active()
    assert [event.key for event in told] == [PLACES.pins_of("b")]


async def test_more_than_a_document_holds_are_refused(store: Store) -> None:
    """None is dropped in silence."""
    board = board_on(store)
    await board.add("a", [pin("t")])
    with pytest.raises(Invalid, match="larger than"):
        await board.add("a", [pin(f"{n}", f"node-{n}-{'x' * 100}") for n in range(30_000)])
    assert len(await board.list_active()) == 1
