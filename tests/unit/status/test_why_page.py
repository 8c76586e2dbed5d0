"""Why a message cannot be found: its page may be damaged."""

import datetime as dt
from typing import Any

import pytest

from jobsync.components import Components
from jobsync.core.keys import escape
from jobsync.errors import Corrupt
from jobsync.queue.message import NewMessage
from jobsync.queue.opening import open_backend
from jobsync.queue.pages.page import LIVE_LANE
from jobsync.status.why import explain, find_status
from jobsync.stores.memory import MemoryStore


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_a_message_in_a_page_that_cannot_be_read(*, is_damaged: bool) -> None:
    """Without SQL: the page is named. Found: the message was said to be never pushed."""
    components, store = Components.system(), MemoryStore()
    backend = open_backend(store, "default/emails", components)
    names = components.ids.records(2)
    await backend.push([NewMessage(id=names[0], value={"to": "ann"}, max_attempts=1)])
    (head,) = await store.heads(f"page/{escape('default/emails', 'queue')}/{LIVE_LANE}/")
    page = await store.get(head.key)
    assert page is not None
    if is_damaged:
        await store.write([page.replace({"birth": "x", "messages": 7})])

    async def find(name: str) -> Any:
        return await find_status(store, components, name, "app", dt.date(2026, 1, 1))

    if not is_damaged:
        assert (await find(names[0])).message.id == names[0]
        assert explain(await find(names[1])).code == "unknown"
        return
    with pytest.raises(Corrupt, match=f"the page is set aside, and no other.*{names[0]}") as error:
        await find(names[0])
    assert error.value.key == head.key
    assert await find("a-task") is None
