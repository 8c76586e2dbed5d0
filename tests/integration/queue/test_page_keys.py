"""Keys and priorities in pages, beyond what the conformance suite states for every store."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from queue_locations import PagesQueues
from store_locations import MemoryLocation

from jobsync import Invalid, OutcomeUnknown, Record, Unavailable
from jobsync.core.messages import Transition
from jobsync.queue.backend import Message, NewMessage, Settlement
from jobsync.queue.pages import page_reader
from jobsync.queue.pages.backend import PagesBackend
from jobsync.queue.pages.keys import PageKeys
from jobsync.queue.pages.page import KeyHold, PageMark, PageMessage, QueuePage, name_page
from jobsync.queue.pages.page_store import PageStore
from jobsync.stores.contract import Change, Head, Outcome, Put, Store
from jobsync.stores.decorator import StoreDecorator
from jobsync.testing import BilledStore

KEYS = "key/mails/"


@pytest.fixture
async def location() -> AsyncIterator[PagesQueues]:
    """An empty store in memory."""
    location = PagesQueues(MemoryLocation())
    yield location
    await location.close()


@pytest.fixture
async def backend(location: PagesQueues) -> PagesBackend:
    """A queue that is ordered by priority."""
    return await location.open("mails", order="priority")


def new(number: int, **options: Any) -> NewMessage:
    """Return a message."""
    options = {"max_attempts": 4, **options}
    return NewMessage(id=f"id-{number}", value={"n": number}, **options)


async def claim(backend: PagesBackend, limit: int = 10) -> list[Message]:
    """Claim for a minute."""
    return (await backend.claim(limit, session="me.a", visibility=60)).messages


async def settle(backend: PagesBackend, move: Transition = "complete", **how: Any) -> None:
    """Claim and settle all messages."""
    batch = [Settlement(receipt=each.receipt, move=move, **how) for each in await claim(backend)]
    assert await backend.settle(batch) == [True] * len(batch)


@pytest.mark.parametrize(
    ("field", "messages"),
    [
        ("group", [new(1, group="a")]),
        ("priority", [new(1, priority=6)]),
        ("priority", [new(1, priority=-5)]),
        ("priority", [new(1), new(2, priority=1)]),
        ("key", [new(1, key="a"), new(2, key="b")]),
        ("key", [new(1), new(2, key="b")]),
    ],
)
async def test_what_does_not_fit_in_one_page_is_refused(
    backend: PagesBackend, field: str, messages: Sequence[NewMessage]
) -> None:
    """The error names the argument; nothing was added."""
    with pytest.raises(Invalid) as refused:
        await backend.push(messages)
    assert refused.value.field == field
    assert await backend.count() == {}


async def test_only_pages_with_a_priority_or_a_key_are_of_a_newer_format(
    location: PagesQueues, backend: PagesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older code leaves these alone, and handles the others."""
    for message in (new(1), new(2, priority=1), new(3, key="k")):
        await backend.push([message])
    formats = {each.id: each.format for each in await backend.browse("ready")}
    assert formats == {"id-1": 1, "id-2": 2, "id-3": 2}
    monkeypatch.setattr(page_reader, "PAGE_FORMAT", 1)
    older = await location.open("mails")
    assert [each.id for each in await claim(older)] == ["id-1"]
    assert older._pages.count_newer() == {2: 2}


@pytest.mark.parametrize("priority", [-4, 5])
async def test_a_message_keeps_its_priority_wherever_it_goes(
    location: PagesQueues, backend: PagesBackend, priority: int
) -> None:
    """To a later time, to an earlier one, to the dead letters, and back."""

    async def find() -> tuple[str, int]:
        info = await backend.get("id-1")
        assert info is not None
        return info.state, info.priority

    await backend.push([new(1, priority=priority, delay=7200)])
    assert await find() == ("waiting", priority)
    assert await backend.run_now("id-1")
    await settle(backend, "retry", delay=600)
    assert await find() == ("waiting", priority)
    location.advance(700)
    await settle(backend, "bury", error="no")
    assert await find() == ("dead", priority)
    assert await backend.redrive() == 1
    assert await find() == ("waiting", priority)
    for number in (2, 3):
        await backend.push([new(number)])
    found = [each.id for each in await claim(backend)]
    assert found.index("id-1") == (0 if priority > 0 else 2)


async def test_dead_letters_are_redriven_by_age_whatever_their_priority(
    location: PagesQueues, backend: PagesBackend
) -> None:
    """The oldest first."""
    for number, priority in enumerate((-1, 5, 0)):
        await backend.push([new(number, priority=priority)])
        await settle(backend, "bury", error="no")
        location.advance(1)
    assert await backend.redrive(limit=2) == 2
    assert [each.id for each in await backend.browse("dead")] == ["id-2"]


class _Counter(StoreDecorator):
    """Counts the calls of a store."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        self.calls["get"] += len(keys)
        return await super().get_many(keys, tombstones=tombstones)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self.calls["put"] += len(changes)
        return await super().write(changes)

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        self.calls["list"] += prefix.startswith("page/")
        return await super().heads(prefix, after=after, until=until, limit=limit)


async def test_what_a_push_with_a_key_costs(location: PagesQueues) -> None:
    """As documented; a push without one costs one request."""
    components = location.components()
    store = _Counter(await location.location.open(components))
    backend = PagesBackend(store, "mails", components)

    async def count(message: NewMessage) -> dict[str, int]:
        store.calls.clear()
        await backend.push([message])
        return dict(store.calls)

    # The first push of a process finds out about the queue.
    await backend.push([new(0, key="first")])
    assert await count(new(1)) == {"put": 1}
    assert await count(new(2, key="k")) == {"get": 1, "put": 2}
    assert await count(new(3, key="k")) == {"get": 2}
    assert await count(new(4, key="k", replace=True)) == {"get": 2, "put": 1}
    await settle(backend)
    assert await count(new(5, key="k")) == {"get": 2, "put": 2}


async def refuse_page(self: PageStore, place: str, page: QueuePage) -> bool:
    """Do not create a page, and do not know it."""
    del self, place, page
    raise OutcomeUnknown("the store", "the request was lost")


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_push_in_doubt_that_is_repeated_adds_one_message(
    location: PagesQueues,
    backend: PagesBackend,
    monkeypatch: pytest.MonkeyPatch,
    *,
    arrives: bool,
) -> None:
    """If it has arrived unnoticed, also if its message is finished when it is repeated."""

    async def create(self: PageStore, place: str, page: QueuePage) -> bool:
        if arrives:
            await was(self, place, page)
        return await refuse_page(self, place, page)

    was = PageStore.create
    with monkeypatch.context() as patch:
        patch.setattr(PageStore, "create", create)
        with pytest.raises(OutcomeUnknown):
            await backend.push([new(1, key="k")])
    await settle(await location.open("mails"))
    repeated = msgspec.structs.replace(new(1, key="k"), id="id-2")
    again = await backend.push([repeated])
    assert again == ({"id-2": "id-1"} if arrives else {})
    assert await backend.count() == ({"completed": 1} if arrives else {"ready": 1})
    # Once: a third push is a new one.
    await settle(backend)
    assert await backend.push([msgspec.structs.replace(repeated, id="id-3")]) == {}


async def test_each_of_two_pushes_in_doubt_is_recognised(
    location: PagesQueues, backend: PagesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same key, one after the other; whichever is repeated."""

    async def create(self: PageStore, place: str, page: QueuePage) -> bool:
        await was(self, place, page)
        return await refuse_page(self, place, page)

    was = PageStore.create
    for number in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(PageStore, "create", create)
            with pytest.raises(OutcomeUnknown):
                await backend.push([new(number, key="k")])
        await settle(await location.open("mails"))
    repeated = msgspec.structs.replace(new(1, key="k"), id="id-3")
    assert await backend.push([repeated]) == {"id-3": "id-1"}


async def test_the_first_push_with_a_key_ends_no_pause(
    location: PagesQueues, backend: PagesBackend
) -> None:
    """It writes to the record that the pause is in."""
    await backend.pause("a deployment")
    other = await location.open("mails")
    await other.push([new(1, key="k")])
    assert await claim(other) == []
    assert await backend.resume() is True
    assert len(await claim(other)) == 1


@pytest.mark.parametrize("options", [{"value": "other"}, {"replace": True}])
async def test_a_push_with_other_content_does_not_repeat_one_in_doubt(
    location: PagesQueues,
    backend: PagesBackend,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """It must be handled, also if the first message has arrived and is finished."""

    async def create(self: PageStore, place: str, page: QueuePage) -> bool:
        await was(self, place, page)
        return await refuse_page(self, place, page)

    was = PageStore.create
    with monkeypatch.context() as patch:
        patch.setattr(PageStore, "create", create)
        with pytest.raises(OutcomeUnknown):
            await backend.push([new(1, key="k")])
    await settle(await location.open("mails"))
    another = msgspec.structs.replace(new(1, key="k"), id="id-2", **options)
    assert await backend.push([another]) == {}


@pytest.mark.parametrize("is_finished", [False, True])
async def test_a_page_that_another_process_has_created_is_not_that_of_a_push_in_doubt(
    location: PagesQueues,
    backend: PagesBackend,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_finished: bool,
) -> None:
    """The page of the first was lost, and another push with its key has used the same place."""
    with monkeypatch.context() as patch:
        patch.setattr(PageStore, "create", refuse_page)
        with pytest.raises(OutcomeUnknown):
            await backend.push([new(1, key="k")])
    other = await location.open("mails")
    assert await other.push([new(2, key="k")]) == {}
    if is_finished:
        await settle(other)
    again = msgspec.structs.replace(new(1, key="k"), id="id-3")
    assert await backend.push([again]) == ({} if is_finished else {"id-3": "id-2"})
    assert [info.id for info in await backend.browse("ready")] == (
        ["id-3"] if is_finished else ["id-2"]
    )


@pytest.mark.parametrize("options", [{}, {"delay": 600.0}, {"priority": 1}])
async def test_a_push_whose_page_others_have_created_or_barred_adds_nothing(
    location: PagesQueues,
    backend: PagesBackend,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """Another push has used its page, or barred it because its own message does not fit there."""
    other = await location.open("mails")
    stalled: list[str] = []

    async def create(self: PageStore, place: str, page: QueuePage) -> bool:
        if not stalled:
            stalled.append(place)
            assert await other.push([new(2, key="k", **options)]) == {}
        return await was(self, place, page)

    was = PageStore.create
    monkeypatch.setattr(PageStore, "create", create)
    assert await backend.push([new(1, key="k")]) == {"id-1": "id-2"}
    (info,) = await backend.browse("waiting" if "delay" in options else "ready")
    assert (info.id, info.priority) == ("id-2", options.get("priority", 0))


async def list_keys(location: PagesQueues) -> Sequence[Head]:
    """Return what there is of keys."""
    return await location._stores[0].heads(KEYS)


async def test_a_key_record_is_removed_with_its_page_or_after_its_time(
    location: PagesQueues, backend: PagesBackend
) -> None:
    """The key is held until then, and free after it."""
    await backend.push([new(1, key="k")])
    await backend.push([new(2, key="l", key_ttl=10_000.0)])
    await settle(backend)
    location.advance(3700)
    assert await backend.forget("completed", older_than=0) == 2
    assert len(await list_keys(location)) == 1
    assert await backend.push([new(3, key="l")]) == {"id-3": "id-2"}
    location.advance(7000)
    assert (await backend.forget_keys(after="", limit=10)).removed == 1
    assert await list_keys(location) == []
    for number, key in enumerate("kl", 4):
        assert await backend.push([new(number, key=key)]) == {}


async def test_a_key_that_was_released_is_free_after_its_page_was_dropped(
    location: PagesQueues, backend: PagesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push that was to replace a message in work took the key from it, and was killed."""
    await backend.push([new(1, key="k", key_ttl=10_000.0)])
    (message,) = await claim(backend)

    async def take(*_: object) -> bool:
        raise OutcomeUnknown("the store", "the process was killed")

    with monkeypatch.context() as patch:
        patch.setattr(PageKeys, "take", take)
        with pytest.raises(Unavailable):
            await backend.push([new(2, key="k", replace=True)])
    await backend.settle([Settlement(receipt=message.receipt, move="complete")])
    location.advance(3700)
    assert await backend.forget("completed", older_than=0) == 1
    assert await backend.push([new(3, key="k")]) == {}


async def test_a_key_follows_its_message_when_pages_are_dropped(
    location: PagesQueues, backend: PagesBackend
) -> None:
    """After each move, whichever page is dropped first, until it is finished."""
    await backend.push([new(1, key="k")])
    for _ in range(3):
        await settle(backend, "snooze", delay=10_000)
        location.advance(5_000)
        await backend.forget("completed", older_than=0)
        assert await backend.push([new(2, key="k")]) == {"id-2": "id-1"}
        location.advance(5_001)
    assert await backend.run_now("id-1") is False
    await settle(backend)
    assert await backend.push([new(3, key="k")]) == {}


async def test_a_key_of_a_push_that_was_given_up_is_removed(
    location: PagesQueues, backend: PagesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it was seen twice without its page, which cannot be created any more then."""
    places: list[str] = []

    async def refuse(self: PageStore, place: str, page: QueuePage) -> bool:
        places.append(place)
        return await refuse_page(self, place, page)

    with monkeypatch.context() as patch:
        patch.setattr(PageStore, "create", refuse)
        with pytest.raises(OutcomeUnknown):
            await backend.push([new(1, key="k")])
    removed = [(await backend.forget_keys(after="", limit=10)).removed for _ in range(3)]
    assert removed == [0, 1, 0]
    late = QueuePage(birth="l" * 12, key_hold=KeyHold(key="k", token="l" * 12))
    assert not await backend._pages.create(places[0], late)


async def test_a_replaced_message_is_found_at_its_new_time(
    location: PagesQueues, backend: PagesBackend
) -> None:
    """Also if that is earlier than the time in the name of its page, or much later."""
    await backend.push([new(1, key="k", delay=5_000)])
    await backend.push([new(2, key="k", delay=10, replace=True)])
    location.advance(20)
    found = await claim(await location.open("mails"))
    assert [(each.id, each.value) for each in found] == [("id-1", {"n": 2})]
    await backend.push([new(3, key="l")])
    await backend.push([new(4, key="l", delay=9_000, replace=True)])
    assert await backend.push([new(5, key="l")]) == {"id-5": "id-3"}
    assert await claim(backend) == []
    location.advance(9_001)
    assert [each.value for each in await claim(backend)] == [{"n": 4}]


async def test_urgent_pages_are_listed_first_and_what_is_done_or_delayed_is_skipped(
    location: PagesQueues,
) -> None:
    """In each class from its frontier: thousands of pages cost no more requests than one."""
    components = location.components()
    store = _Counter(BilledStore("listed", components))
    worker = PagesBackend(store, "mails", components, order="priority")
    other = PagesBackend(store, "mails", components, order="priority")
    now = location.clock.wall().seconds

    async def fill(lane: str, page: QueuePage, mark: PageMark, due: float, priority: int) -> None:
        names = [name_page(due + n / 100, f"{n:012}", priority) for n in range(3_000)]
        value = msgspec.to_builtins(page)
        puts = [Put(f"page/mails/{lane}/{name}", value, format=2, mark=mark) for name in names]
        await store.write(puts)

    async def push_and_claim(number: int, **options: Any) -> tuple[list[str], int]:
        await other.push([new(number, **options)])
        store.calls.clear()
        worker._finder.plan.notice(number)
        return [each.id for each in await claim(worker, 1)], store.calls["list"]

    done = QueuePage(birth="b" * 12)
    await fill("0", done, PageMark.DONE, now - 600, 0)
    assert (await push_and_claim(1))[0] == ["id-1"]
    assert await push_and_claim(2, priority=2) == (["id-2"], 1)
    # The first listing shows the beginning of what is done, the second one what follows it.
    assert await push_and_claim(3) == (["id-3"], 2)
    waiting = PageMessage(id="later", state="waiting", due=now + 9_000)
    later = QueuePage(birth="b" * 12, messages=(waiting,))
    await fill("0", later, PageMark.WAITING, now + 9_000, 1)
    assert await push_and_claim(4) == (["id-4"], 3)
    assert await push_and_claim(5, priority=-3) == (["id-5"], 3)


@pytest.mark.parametrize("delay", [0.0, 10.0, 9_000.0])
async def test_a_replaced_message_keeps_its_priority(backend: PagesBackend, delay: float) -> None:
    """Also if it moves to another page for its new time."""
    await backend.push([new(1, key="k", priority=3, delay=5_000)])
    renewed = new(2, key="k", priority=-2, delay=delay, replace=True)
    assert await backend.push([renewed]) == {"id-2": "id-1"}
    info = await backend.get("id-1")
    assert info is not None
    assert (info.value, info.priority) == ({"n": 2}, 3)


async def test_a_key_that_was_renewed_after_a_look_is_not_taken(
    location: PagesQueues, backend: PagesBackend
) -> None:
    """A machine whose clock is ahead saw it free; meanwhile its message is claimed."""
    await backend.push([new(1, key="k", key_ttl=10.0)])
    location.advance(20)
    other = await location.open("mails")
    apply, is_renewed = other._pages.apply, False

    async def apply_late(place: str, change: Any) -> Any:
        nonlocal is_renewed
        if not is_renewed:
            is_renewed = True
            location.advance(-15)
            renewed = new(2, key="k", key_ttl=1_000.0, replace=True)
            assert await backend.push([renewed]) == {"id-2": "id-1"}
            assert len(await claim(backend)) == 1
        return await apply(place, change)

    other._pages.apply = apply_late  # type: ignore[method-assign]
    assert await other.push([new(3, key="k")]) == {"id-3": "id-1"}
    assert is_renewed


async def test_a_barred_page_refuses_its_message_for_an_hour(
    location: PagesQueues, backend: PagesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no message that says when it was finished."""
    with monkeypatch.context() as patch:
        patch.setattr(PageStore, "create", refuse_page)
        with pytest.raises(OutcomeUnknown):
            await backend.push([new(1, key="k")])
    found = await backend._keys.find(backend._keys.name("k"))
    assert await backend._keys.bar(found)
    for seconds, is_there in ((100, True), (3_600, False)):
        location.advance(seconds)
        await backend.forget("completed", older_than=0)
        assert bool(await location._stores[0].heads("page/mails/0/")) is is_there
