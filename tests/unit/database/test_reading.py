"""The verbs that read: each part of the records, in order, and nothing for a wrong question."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from jobsync import Database, Invalid, Resource

IDS = ["a", "b", "c", "d", "e"]
EVEN = {"is_even": True}
Read = Callable[..., Awaitable[list[Any]]]


@pytest.fixture(params=["ready", "being built"])
async def things(request: pytest.FixtureRequest) -> AsyncIterator[Resource]:
    """Five records, with a partition of two."""
    async with Database("memory://") as database:
        partitions = {"by_evenness": ["is_even"]}
        is_ready = request.param == "ready"
        things = await database.create_resource(
            "things", partitions=partitions if is_ready else None
        )
        numbered = enumerate(IDS)
        await things.insert_many(
            {"id": name, "n": -n, "is_even": n in {1, 3}} for n, name in numbered
        )
        await database.create_resource("things", partitions=partitions)
        assert things.definition.is_settled is is_ready
        yield things


def find_verbs(things: Resource) -> dict[str, tuple[Read, list[str]]]:
    """Return calls that take a limit and an offset, and what they return without them."""
    chosen: dict[str, Any] = {"partition": "by_evenness", "partition_values": EVEN}
    return {
        "list": (things.list, IDS),
        "list_ids": (things.list_ids, IDS),
        "list of a partition": (lambda **options: things.list(**chosen, **options), ["b", "d"]),
        "query": (things.query, IDS),
        "sorted": (lambda **options: things.query(sort="n", **options), IDS[::-1]),
        "filtered": (lambda **options: things.query({"n": {"$lt": 0}}, **options), IDS[1:]),
        "by filter": (lambda **options: things.query(EVEN, **options), ["b", "d"]),
        "of a partition": (
            lambda **options: things.query({"n": {"$lt": -1}}, **chosen, **options),
            ["d"],
        ),
        "sorted of a partition": (
            lambda **options: things.query(sort=("-id",), **chosen, **options),
            ["d", "b"],
        ),
    }


VERBS = ["list", "list_ids", "list of a partition", "query", "sorted", "filtered", "by filter"]
VERBS += ["of a partition", "sorted of a partition"]


@pytest.mark.parametrize("verb", VERBS)
async def test_a_limit_and_an_offset_cut_the_whole(things: Resource, verb: str) -> None:
    """Whatever is read for it; none at all is not the same as all."""
    assert [*find_verbs(things)] == VERBS
    read, whole = find_verbs(things)[verb]
    for limit, offset in itertools.product((None, 0, 1, 2, 4, 5, 6), (0, 1, 3, 5, 9)):
        found = await read(limit=limit, offset=offset)
        ids = [each if isinstance(each, str) else each.id for each in found]
        end = None if limit is None else offset + limit
        assert ids == whole[offset:end], (limit, offset)


@pytest.mark.parametrize("verb", VERBS)
async def test_a_number_of_records_is_a_whole_number(things: Resource, verb: str) -> None:
    """The error names the argument."""
    read, _ = find_verbs(things)[verb]
    wrong: list[Any] = [-1, 1.0, True, False, "1"]
    for name, value in itertools.product(("limit", "offset"), wrong):
        with pytest.raises(Invalid) as caught:
            await read(**{name: value})
        assert (caught.value.field, caught.value.value) == (name, value)


@pytest.mark.parametrize(
    ("where", "chosen", "ids"),
    [
        (None, {}, IDS),
        ({}, {}, IDS),
        ({"n": {"$lte": -1}}, {}, IDS[1:]),
        (EVEN, {}, ["b", "d"]),
        (None, {"partition": "by_evenness", "partition_values": EVEN}, ["b", "d"]),
        ({}, {"partition": "by_evenness", "partition_values": EVEN}, ["b", "d"]),
        ({"n": -3}, {"partition": "by_evenness", "partition_values": EVEN}, ["d"]),
        ({"n": -2}, {"partition": "by_evenness", "partition_values": EVEN}, []),
    ],
)
async def test_all_verbs_find_the_same(
    things: Resource, where: Any, chosen: dict[str, Any], ids: list[str]
) -> None:
    """A count, a query, and pages of every size, of which the last one says so."""
    assert await things.count(where, **chosen) == len(ids)
    assert [each.id for each in await things.query(where, **chosen)] == ids
    for size in (1, 2, 3, 5, 6):
        found: list[str] = []
        after: str | None = None
        for _ in range(len(ids) // size + 1):
            page = await things.page(where, size=size, after=after, **chosen)
            found += [each.id for each in page.items]
            after = page.next
            assert after is None or after == found[-1]
            if after is None:
                break
        assert after is None
        assert found == ids


@pytest.mark.parametrize("size", [True, 1.0, None])
async def test_a_page_has_a_whole_number_of_records(things: Resource, size: Any) -> None:
    """True is none."""
    with pytest.raises(Invalid, match="size must be between 1 and 100,000"):
        await things.page(size=size)
