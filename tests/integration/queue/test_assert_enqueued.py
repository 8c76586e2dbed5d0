"""`assert_enqueued` finds what a program has enqueued, in whatever state it is."""

from typing import get_args

import pytest
from servers import Locate

from jobsync import Database, QueuePlugin
from jobsync.core.messages import MessageState
from jobsync.testing import assert_enqueued

FOUND = {*get_args(MessageState)} - {"completed", "cancelled"}
"""A finished message has no arguments any more."""


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """A fresh store of each kind that has groups."""
    return locate(request.param)


@pytest.mark.parametrize("state", get_args(MessageState))
async def test_a_call_is_found_in_each_state_in_which_it_has_arguments(
    url: str, state: MessageState
) -> None:
    """It is not found once it is completed or cancelled."""
    queue = QueuePlugin("tasks")
    found: list[MessageState] = []

    @queue.task(max_retries=0)
    async def send(to: str, *, state: str) -> None:
        if state == "claimed":
            found.append((await assert_enqueued(send, to=to, state=state)).state)
        if state == "dead":
            raise ZeroDivisionError

    async with Database(url, plugins=[queue]):
        queue.pause()
        await send.with_options(delay=3600).enqueue("other", state="")
        match state:
            case "waiting":
                await send.with_options(delay=60).enqueue("a", state=state)
            case "blocked":
                for to in ("head", "a"):
                    await send.with_options(group="g").enqueue(to, state=state)
            case "cancelled":
                await queue.cancel((await send.enqueue("a", state=state)).id)
            case _:
                await send.enqueue("a", state=state)
        if state in {"claimed", "completed", "dead"}:
            await queue.drain()
        if state in FOUND - {"claimed"}:
            found.append((await assert_enqueued(send, to="a")).state)
        else:
            with pytest.raises(AssertionError, match="is enqueued; there are 1: "):
                await assert_enqueued(send, to="a")
    assert found == [state] * (state in FOUND)
