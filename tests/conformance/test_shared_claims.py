"""Messages of one claim: what happens to one of them leaves the others alone."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from queue_calls import OTHER, claim, settle
from queue_locations import PagesQueues, QueueLocation, find_empty_location

from jobsync.core.messages import MessageState
from jobsync.queue.backend import Message, MessageInfo, NewMessage, QueueBackend, Settlement
from jobsync.queue.single_message import StoredResult

OPEN = ("open-1", "open-2")
"""The messages that stay in work."""
NAMES = ("gone", "done-1", "done-2", *OPEN)

Change = Callable[[QueueBackend, Sequence[Message]], Awaitable[object]]


def _settle_gone(move: str, error: str = "") -> Change:
    def change(backend: QueueBackend, messages: Sequence[Message]) -> Awaitable[object]:
        settlement = Settlement(receipt=messages[0].receipt, move=move, error=error)  # type: ignore[arg-type]
        return backend.settle([settlement])

    return change


CHANGES: dict[str, tuple[Change, dict[MessageState, int]]] = {
    "cancel": (lambda backend, _: backend.cancel("gone"), {"completed": 2, "cancelled": 1}),
    "bury": (_settle_gone("bury", "why"), {"completed": 2, "dead": 1}),
    "complete after a failure": (_settle_gone("complete", "why"), {"completed": 3}),
    "snooze": (_settle_gone("snooze"), {"completed": 2, "ready": 1}),
    "keep one": (
        lambda backend, _: backend.end_claims(["me"], keep=NAMES[1:]),
        {"completed": 2, "ready": 1},
    ),
    "delete a completed one": (
        lambda backend, _: backend.delete("done-1"),
        {"completed": 1, "claimed": 3},
    ),
    "purge the completed ones": (
        lambda backend, _: backend.purge(["completed"]),
        {"claimed": 3},
    ),
    "forget the completed ones": (
        lambda backend, _: backend.forget("completed", older_than=50),
        {"claimed": 3},
    ),
}


@pytest.fixture(params=["sqlite", "postgres", "memory"])
async def location(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[QueueLocation]:
    """An empty database or store of each kind."""
    location = find_empty_location(request, tmp_path)
    yield location
    await location.close()


def _show(info: MessageInfo | None) -> tuple[object, ...]:
    """Return what others see of a message, without the time at which it was read."""
    assert info is not None
    kept = msgspec.structs.replace(info, seen=0.0, due=None, cursor="")
    return tuple(map(str, msgspec.structs.astuple(kept)))


@pytest.mark.parametrize("size", [1, 3_000], ids=["small", "large"])
@pytest.mark.parametrize("what", CHANGES)
async def test_the_others_of_a_claim_keep_what_they_have(
    location: QueueLocation, what: str, size: int
) -> None:
    """Their claim, their content, their errors and their attempts; and the counts are exact."""
    change, expected = CHANGES[what]
    if isinstance(location, PagesQueues) and what.startswith("forget"):
        pytest.skip("finished messages go with their page, after an hour")
    backend = await location.open("emails")
    new = [NewMessage(id=name, value={"n": name * size}, max_attempts=9) for name in NAMES]
    await backend.push(new)
    failed = await claim(backend, session="me")
    await backend.settle(
        [Settlement(receipt=each.receipt, move="retry", error=each.id) for each in failed]
    )
    messages = {each.id: each for each in await claim(backend, session="me", visibility=9_999)}
    claimed = [messages[name] for name in NAMES]
    result = StoredResult('"done"')
    done = [
        Settlement(receipt=each.receipt, move="complete", result=result) for each in claimed[1:3]
    ]
    assert await backend.settle(done) == [True, True]
    location.advance(100)
    before = {name: _show(await backend.get(name)) for name in OPEN}
    assert await change(backend, claimed)
    assert {name: _show(await backend.get(name)) for name in OPEN} == before
    counts = dict(await backend.count())
    counts["ready"] = counts.pop("ready", 0) + counts.pop("waiting", 0)
    assert {state: count for state, count in counts.items() if count} == {"claimed": 2} | expected
    opened = [messages[name] for name in OPEN]
    assert await settle(backend, opened, "release") == [True, True]
    again = {each.id: each for each in await claim(backend, session=OTHER) if each.id in OPEN}
    for each in opened:
        assert again[each.id].value == each.value
        assert again[each.id].attempt == each.attempt


async def test_a_cancelled_message_keeps_the_errors_of_its_attempts(
    location: QueueLocation,
) -> None:
    """All of them, and why it ended; whether it waits or is claimed."""
    backend = await location.open("emails")
    names = ["waiting", "claimed"]
    await backend.push([NewMessage(id=name, value=1, max_attempts=9) for name in names])
    for error in ("first", "second"):
        await backend.settle(
            [
                Settlement(receipt=each.receipt, move="retry", error=error)
                for each in await claim(backend)
            ]
        )
    waiting = [each for each in await claim(backend) if each.id == "waiting"]
    await settle(backend, waiting, "release")
    for name in names:
        assert await backend.cancel(name) is not None
        info = await backend.get(name)
        assert info is not None
        errors = [each.error for each in info.errors]
        assert (errors[:2], len(errors)) == (["first", "second"], 3)


async def test_a_message_that_is_due_has_no_delay_to_end(location: QueueLocation) -> None:
    """Whether it was never delayed, its delay is over, or it was returned without one."""
    backend = await location.open("emails")
    await backend.push([NewMessage(id="returned", value=1, max_attempts=9)])
    await settle(backend, await claim(backend), "release")
    await backend.push([NewMessage(id="new", value=1, max_attempts=9)])
    await backend.push([NewMessage(id="late", value=1, max_attempts=9, delay=100.0)])
    assert await backend.run_now("late")
    for name in ("returned", "new", "late"):
        assert not await backend.run_now(name)
    await backend.push([NewMessage(id="over", value=1, max_attempts=9, delay=100.0)])
    location.advance(200)
    assert not await backend.run_now("over")


@pytest.mark.parametrize("together", [True, False])
async def test_a_purge_counts_what_it_removes(location: QueueLocation, *, together: bool) -> None:
    """Completed messages too, whether or not others of their claims are in work."""
    backend = await location.open("emails")
    await backend.push([NewMessage(id=name, value=1, max_attempts=9) for name in NAMES])
    messages = await claim(backend, 10 if together else 3)
    await settle(backend, messages[:3], "complete")
    assert await backend.purge(["completed"]) == 3
    assert await backend.purge(["completed"]) == 0
    assert await backend.purge(["claimed", "ready"]) == 2
