"""The store of pins: one sheet per node, replaced in one write."""

import asyncio
import math

import msgspec
import pytest

from jobsync import Components, Invalid, Store
from jobsync.core.clock import Wall
from jobsync.core.pins import Pin, merge, read_sheet, write_sheet
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.pins import PinStore
from jobsync.stores.corruption_log import RecordSetAside
from jobsync.stores.metered import Meter, MeteredStore

KEYS = JobKeys("sync_")


def pin(task: str, *patterns: str, by: str = "a", expires_at: float | None = None) -> Pin:
    """Pin a task."""
    return Pin(
        task=task,
        token=len(task),
        patterns=patterns or ("x",),
        created_by=by,
        expires_at=expires_at,
    )


def pin_store_on(store: Store, components: Components | None = None) -> PinStore:
    """Create a fleet's pin store."""
    return PinStore(store, components or Components.system(), KEYS, len)


def test_a_sheet_is_read_as_it_was_written() -> None:
    """Pins of many tasks with the same patterns are stored together."""
    pins = [
        pin("t", "a", "b"),
        msgspec.structs.replace(pin("u", "a", "b"), reason="r", created_at=1.5),
        pin("uv", "a", "b"),
        pin("w", "%-gpu", expires_at=7.25),
    ]
    document = write_sheet("a", pins)
    assert len(document["batches"]) == 3
    assert sorted(read_sheet(document, "k", len), key=repr) == sorted(pins, key=repr)


def test_registering_the_same_pin_again_renews_it() -> None:
    """Compared by task and patterns; another order of patterns is another pin."""
    old = [pin("t", "a", "b"), pin("t", "b", "a"), pin("u")]
    new = [pin("t", "a", "b", expires_at=5)]
    assert merge(old, new) == [new[0], old[1], old[2]]


async def test_nodes_do_not_touch_each_others_pins(store: Store) -> None:
    """Even if pins are added, replaced and removed at the same time."""
    pin_store = pin_store_on(store)
    adding = [pin_store.add("a", [pin(f"t{n}")]) for n in range(8)]
    await asyncio.gather(*adding, pin_store.add("b", [pin("t0", by="b")]))
    assert len(await pin_store.list_active()) == 9
    await pin_store.add("a", [pin("new")], replacing=True)
    assert {found.task for found in await pin_store.list_active()} == {"new", "t0"}
    assert await pin_store.remove_by("b") == 1
    assert await pin_store.remove_by("b") == await pin_store.remove_by("never") == 0
    await pin_store.add("b", [pin("again", by="b")])
    assert await pin_store.remove_all() == 2
    assert await pin_store.list_active() == []


async def test_a_registration_is_one_write(store: Store) -> None:
    """However many pins it has, including the removal of earlier ones."""
    components = Components.system()
    meter = Meter()
    pin_store = pin_store_on(MeteredStore(store, meter, components.clock), components)
    await pin_store.add("a", [pin(f"t{n}") for n in range(1000)])
    await pin_store.add("a", [pin(f"u{n}") for n in range(1000)], replacing=True)
    assert meter["write"].items == 2


async def test_unchanged_sheets_are_not_read_again(store: Store) -> None:
    """One listing per read."""
    components = Components.system()
    meter = Meter()
    pin_store = pin_store_on(MeteredStore(store, meter, components.clock), components)
    await pin_store.add("a", [pin("t")])
    await pin_store.add("b", [pin("u", by="b")])
    first = await pin_store.list_active()
    reads = meter["get"].calls
    assert await pin_store.list_active() == first
    assert meter["get"].calls == reads
    await pin_store_on(store).add("b", [pin("v", by="b")])
    assert len(await pin_store.list_active()) == 3
    assert meter["get"].items == 5


async def test_pins_expire_by_the_stores_clock(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by this machine's; expired pins are removed, and the others know their next expiry."""
    pin_store = pin_store_on(store)
    await pin_store.add("a", [pin("t", expires_at=1000.0), pin("u"), pin("v", expires_at=3000.0)])

    async def now() -> Wall:
        return Wall(999.0)

    monkeypatch.setattr(store, "now", now)
    assert len(await pin_store.list_active()) == 3
    assert 0 < pin_store.valid_for <= 1
    assert await pin_store.remove_expired() == 0

    async def later() -> Wall:
        return Wall(1000.0)

    monkeypatch.setattr(store, "now", later)
    assert {found.task for found in await pin_store.list_active()} == {"u", "v"}
    assert 1990 < pin_store.valid_for <= 2000
    assert await pin_store.remove_expired() == 1
    assert len(await pin_store_on(store).list_active()) == 2


async def test_a_renewed_pin_is_not_removed(store: Store) -> None:
    """Its node registered it again between the read and the removal."""
    pin_store = pin_store_on(store)
    await pin_store.add("a", [pin("t", expires_at=1.0)])
    assert await pin_store.list_active() == []
    await pin_store.add("a", [pin("t")])
    assert await pin_store.remove_expired() == 0
    assert len(await pin_store.list_active()) == 1


async def test_each_of_several_pins_of_a_task_counts(store: Store) -> None:
    """When some of them expire, and when all are removed."""
    pin_store = pin_store_on(store)
    ends = {"x": 1.0, "y": None, "z": 1.0}
    await pin_store.add("a", [pin("t", each, expires_at=end) for each, end in ends.items()])
    await pin_store.add("b", [pin("t", each, by="b") for each in ends])
    assert len(await pin_store.list_active()) == 4
    assert await pin_store.remove_expired() == 2
    assert await pin_store.remove_by("b") == 3
    assert await pin_store.remove_all() == 1


@pytest.mark.parametrize("end", ["removed", "renewed", "expired"])
async def test_pins_that_are_gone_are_not_waited_for(store: Store, end: str) -> None:
    """What is known of an expiry is that of the pins that were read last."""
    pin_store = pin_store_on(store)
    now = (await pin_store.now()).seconds
    soon = pin("t", expires_at=now + 60)
    await pin_store.add("a", [soon])
    await pin_store.list_active()
    assert 0 < pin_store.valid_for <= 60
    if end == "removed":
        await pin_store.remove_by("a")
    elif end == "renewed":
        await pin_store.add("a", [pin("t")])
    else:
        await pin_store.add("a", [msgspec.structs.replace(soon, expires_at=now - 1)])
    await pin_store.list_active()
    assert pin_store.valid_for == math.inf
    assert await pin_store.remove_expired() == (end == "expired")
    assert await pin_store.remove_expired() == 0


async def test_an_unreadable_sheet_hides_no_other(store: Store) -> None:
    """It is reported once and left as it is."""
    components = Components.system()
    reported: list[RecordSetAside] = []
    components.events.on("store:record-set-aside", reported.append)
    pin_store = pin_store_on(store, components)
    await pin_store.add("a", [pin("t")])
    await store.create(KEYS.pins_of("b"), {"created_by": 5})
    assert [found.task for found in await pin_store.list_active()] == ["t"]
    await pin_store.list_active()
    assert [event.key for event in reported] == [KEYS.pins_of("b")]


async def test_too_many_pins_for_one_document_are_refused(store: Store) -> None:
    """None is dropped silently."""
    pin_store = pin_store_on(store)
    await pin_store.add("a", [pin("t")])
    with pytest.raises(Invalid, match="must be at most"):
        await pin_store.add("a", [pin(f"{n}", f"node-{n}-{'x' * 100}") for n in range(30_000)])
    assert len(await pin_store.list_active()) == 1
