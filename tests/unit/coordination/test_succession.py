"""Requests to hand over: which of two is stored."""

import itertools

import pytest

from jobsync.coordination.succession import (
    REQUESTS,
    HandoverRequest,
    read_request,
    request_handover,
)
from jobsync.stores.memory import MemoryStore

DESIRED = (None, "worker-1", "worker-2")
KINDS = [*itertools.product((False, True), DESIRED)]


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
async def test_a_forced_request_replaces_any_other_one(
    first: tuple[bool, str | None], second: tuple[bool, str | None]
) -> None:
    """One that is not forced replaces none: the holder hands over in any case."""
    store = MemoryStore()
    for forced, desired in (first, second):
        request = HandoverRequest(epoch=3, by="worker-9", desired=desired, forced=forced)
        assert await request_handover(store, "role", request)
    stored = read_request(await store.get(f"{REQUESTS}role"), 3)
    assert stored is not None
    assert (stored.forced, stored.desired) == (second if second[0] else first)


async def test_a_request_about_another_term_is_void() -> None:
    """It neither counts nor is in the way."""
    store = MemoryStore()
    for epoch in (3, 4):
        assert await request_handover(store, "role", HandoverRequest(epoch=epoch, by="worker-9"))
    record = await store.get(f"{REQUESTS}role")
    assert read_request(record, 3) is None
    assert read_request(record, 4) is not None
