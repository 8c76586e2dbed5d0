"""In random sequences of verbs a partition has what plain Python finds among all records."""

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_locations import StoreLocation

from jobsync import Conflict, Database, Document, Incomplete, NotFound, Resource

EXAMPLES = {"memory": 60, "sqlite": 12, "postgres": 8, "s3": 4}
_numbers = itertools.count()

PARTITIONS: dict[str, Any] = {
    "by_x": "x",
    "by_deep": "more.x",
    "by_two": ["x", "more.x"],
    "by_day": {"fields": {"x": "date"}},
    "by_start": {"fields": {"x": "string|maxlength:2"}},
}
CUTS = {"by_day": 10, "by_start": 2}

SAMPLES: list[Any] = [
    *[0, 1, 1.0, -0.0, True, False, "1", "", None, [], [1], {}, {"x": 1}, 1e300, 0.1, 2**53],
    *["eu", "eu-1", "é" * 40, "x" * 300, "x" * 299 + "y", '"\\', "\x01", "2026-01-31"],
    *["2026-01-31T05:00Z", "[1]", "null"],
]
samples = st.sampled_from(SAMPLES)
names = st.sampled_from(["a", "b", "é/x", "漢", "Z", "x" * 200, "é" * 33, "\x01", "a\x01", "a!"])
bodies = st.fixed_dictionaries(
    {}, optional={"x": samples, "more": st.fixed_dictionaries({}, optional={"x": samples})}
)
records = st.tuples(names, bodies).map(lambda pair: {"id": pair[0], **pair[1]})
steps = st.one_of(
    st.tuples(st.just("insert"), records),
    st.tuples(
        st.just("insert_many"),
        st.lists(records, max_size=4, unique_by=lambda each: str(each["id"])),
    ),
    st.tuples(st.just("update"), names, bodies),
    st.tuples(st.just("replace"), names, bodies),
    st.tuples(st.just("upsert"), records),
    st.tuples(st.just("delete"), names),
    st.tuples(st.just("delete_many"), st.lists(names, max_size=3)),
)

MISSING = object()


def pick(record: Any, path: str) -> Any:
    """Return the value of a field."""
    for part in path.split("."):
        record = record.get(part, MISSING) if isinstance(record, dict) else MISSING
    return record


def is_same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; numbers by value, and never equal to truth values."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def cut(value: Any, partition: str) -> Any:
    """Return the part of a value that counts in a partition."""
    return value[: CUTS.get(partition)] if isinstance(value, str) else value


async def read_pages(resource: Resource, *arguments: Any, **options: Any) -> list[str]:
    """Return the ids on all pages."""
    found: list[str] = []
    after = None
    while True:
        page = await resource.page(*arguments, size=2, after=after, **options)
        found += [document.id for document in page.items]
        if (after := page.next) is None:
            return found


async def check_reads(resource: Resource, expected: list[str], **options: Any) -> None:
    """Check that every verb finds these ids."""
    where = options.pop("filter", None)
    assert list_ids(await resource.query(where, **options)) == expected
    assert await resource.count(where, **options) == len(expected)
    assert await read_pages(resource, where, **options) == expected


def list_ids(documents: list[Document]) -> list[str]:
    """Return the ids of documents."""
    return [document.id for document in documents]


async def compare(resource: Resource) -> None:
    """Compare what partitions have with what a scan of all records finds."""
    everything = [
        {name: value for name, value in document.items() if not name.startswith("_")}
        async for document in resource
    ]
    stored = [pick(each, "x") for each in everything]
    for value in [True, 1.0, *(each for each in stored if each is not MISSING)]:
        await check_reads(
            resource,
            [each["id"] for each in everything if is_same(pick(each, "x"), value)],
            filter={"x": value},
        )
        if value is None or isinstance(value, list | dict):
            continue
        for name in ("by_x", "by_day", "by_start"):
            expected = [
                each["id"]
                for each in everything
                if is_same(cut(pick(each, "x"), name), cut(value, name))
            ]
            chosen: dict[str, Any] = {"partition": name, "partition_values": {"x": value}}
            assert list_ids(await resource.list(**chosen)) == expected
            await check_reads(resource, expected, **chosen)
    for value, other in [(1, 1.0), ("eu", True), ("é" * 40, "1"), (1, None)]:
        expected = [
            each["id"]
            for each in everything
            if is_same(pick(each, "x"), value) and is_same(pick(each, "more.x"), other)
        ]
        await check_reads(resource, expected, filter={"x": value, "more.x": other})


async def run_history(location: StoreLocation, history: list[tuple[Any, ...]]) -> None:
    """Run a history on a new resource."""
    store = await location.open()
    async with Database(connection=store) as database:
        resource = await database.create_resource(f"p{next(_numbers)}", partitions=PARTITIONS)
        for verb, *arguments in history:
            try:
                await getattr(resource, verb)(*arguments)
            except (Conflict, Incomplete, NotFound):
                # As without partitions; see test_resource_model.
                continue
        await compare(resource)
        await resource.delete_all()
        for index in resource.definition.indexes:
            assert await store.heads(f"index/{resource.name}/{index.key}/") == []
    await store.close()


def test_partitions_have_what_a_scan_finds(
    location: StoreLocation, request: pytest.FixtureRequest
) -> None:
    """Values of all types, long and odd values and ids; no entry is left when all are deleted."""

    @settings(max_examples=EXAMPLES[request.node.callspec.params["location"]], deadline=None)
    @given(history=st.lists(steps, max_size=12))
    def check(history: list[tuple[Any, ...]]) -> None:
        asyncio.run(run_history(location, history))

    check()
