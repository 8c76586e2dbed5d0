"""In random sequences of verbs every store gives the same results as a dictionary."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resource_model import ATTRIBUTES, FILTERS, Refused, ResourceModel
from store_locations import StoreLocation

from jobsync import Database, Document, JobsyncError, Resource
from jobsync.database import keyspace, resource_records
from jobsync.stores.paging import head_pages, scan_pages, split_pages

EXAMPLES = {"memory": 150, "sqlite": 40, "postgres": 20, "s3": 10}
_numbers = itertools.count()

names = st.sampled_from(["a", "b", "é/x", "漢", "Z"])
values = {
    "n": st.sampled_from([0, 1, 2.5, 3]),
    "tag": st.sampled_from(["x", "é", ""]),
    "ok": st.booleans(),
    "more": st.fixed_dictionaries({}, optional={"x": st.integers(0, 2), "y": st.integers(0, 2)}),
}
changes = st.fixed_dictionaries({}, optional=values)
bodies = st.one_of(
    st.fixed_dictionaries(
        {"n": values["n"]}, optional={k: v for k, v in values.items() if k != "n"}
    ),
    # Some are invalid.
    st.fixed_dictionaries({"n": st.sampled_from([0, "zero", True])}),
)
records = st.tuples(names, bodies).map(lambda pair: {"id": pair[0], **pair[1]})
ranges = st.tuples(st.none() | st.integers(0, 3), st.integers(0, 3))
steps = st.one_of(
    st.tuples(st.just("insert"), records),
    st.tuples(st.just("insert_many"), st.lists(records, max_size=4)),
    st.tuples(st.just("update"), names, changes, st.sampled_from(["", "current", "stale"])),
    st.tuples(st.just("replace"), names, bodies, st.sampled_from(["", "current", "stale"])),
    st.tuples(st.just("upsert"), records),
    st.tuples(st.just("delete"), names, st.sampled_from(["", "current", "stale"])),
    st.tuples(st.just("delete_many"), st.lists(names, max_size=4)),
    st.tuples(st.just("get"), names),
    st.tuples(
        st.just("query"),
        st.none() | st.sampled_from(sorted(FILTERS)),
        st.none() | st.sampled_from(["n", "-n", "tag", "-ok", "id", "-id"]),
        ranges,
    ),
)


class Run:
    """One random history, run on a resource and on the model."""

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self.plain = ResourceModel()
        self.stale = "never-there"

    async def run_step(self, step: tuple[Any, ...]) -> None:
        """Run one step on both, and compare the results."""
        verb, *arguments = step
        real, model = getattr(self, verb)(*arguments)
        result = await _get_result(real)
        try:
            expected: Any = model()
        except Refused as refused:
            expected = f"refused: {refused}"
        assert result == expected

    async def version(self, name: str, which: str) -> str | None:
        """Return no version, the current one, or an outdated one."""
        if not which:
            return None
        found = await self.resource.get(name)
        if found is None:
            return self.stale
        if which == "stale":
            # What was to replace it may have been refused.
            return self.stale if self.stale != found._version else "never-there"
        self.stale = found._version
        return str(found._version)

    def insert(self, record: dict[str, Any]) -> Any:
        return lambda: self.resource.insert(record), lambda: self.plain.insert(record)

    def insert_many(self, batch: list[dict[str, Any]]) -> Any:
        return lambda: self.resource.insert_many(batch), lambda: self.plain.insert_many(batch)

    def update(self, name: str, body: dict[str, Any], which: str) -> Any:
        async def real() -> Document:
            version = await self.version(name, which)
            return await self.resource.update(name, body, if_version=version)

        return real, lambda: self.plain.update(name, body, stale=which == "stale")

    def replace(self, name: str, body: dict[str, Any], which: str) -> Any:
        async def real() -> Document:
            version = await self.version(name, which)
            return await self.resource.replace(name, body, if_version=version)

        return real, lambda: self.plain.replace(name, body, stale=which == "stale")

    def upsert(self, record: dict[str, Any]) -> Any:
        return lambda: self.resource.upsert(record), lambda: self.plain.upsert(record)

    def delete(self, name: str, which: str) -> Any:
        async def real() -> bool:
            version = await self.version(name, which)
            return await self.resource.delete(name, if_version=version)

        return real, lambda: self.plain.delete(name, stale=which == "stale")

    def delete_many(self, ids: list[str]) -> Any:
        return lambda: self.resource.delete_many(ids), lambda: self.plain.delete_many(ids)

    def get(self, name: str) -> Any:
        return lambda: self.resource.get(name), lambda: self.plain.get(name)

    def query(self, kind: str | None, sort: str | None, span: tuple[int | None, int]) -> Any:
        limit, offset = span
        where = FILTERS[kind][0] if kind else None
        cut = slice(offset, None if limit is None else offset + limit)
        return (
            lambda: self.resource.query(where, sort=sort, limit=limit, offset=offset),
            lambda: self.plain.query(kind, sort, cut),
        )

    async def compare_all(self) -> None:
        """Compare the results of every way to read."""
        expected = [self.plain.records[name] for name in self.plain.ids]
        assert await self.resource.list_ids() == self.plain.ids
        assert strip(await self.resource.list()) == expected
        assert strip([document async for document in self.resource]) == expected
        assert await self.resource.count() == len(expected)
        assert strip((await self.resource.page(size=100)).items) == expected
        for where, keep in FILTERS.values():
            assert await self.resource.count(where) == sum(map(keep, expected))
        assert await self.resource.delete_all() == len(expected)
        assert await self.resource.list_ids() == []


def strip(result: Any) -> Any:
    """Return a result without the library's fields."""
    if isinstance(result, Document):
        return {name: value for name, value in result.items() if not name.startswith("_")}
    return [strip(item) for item in result] if isinstance(result, list) else result


async def _get_result(verb: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return strip(await verb())
    except JobsyncError as error:
        return f"refused: {type(error).__name__}"


async def run_history(location: StoreLocation, history: list[tuple[Any, ...]]) -> None:
    """Run a history on a new resource."""
    store = await location.open()
    async with Database(connection=store) as database:
        run = Run(await database.create_resource(f"r{next(_numbers)}", ATTRIBUTES))
        for step in history:
            await run.run_step(step)
        await run.compare_all()
    await store.close()


def shrink_pages(patch: pytest.MonkeyPatch) -> None:
    """Read and write two records at a time, so that a few records are several pages."""
    patch.setattr(resource_records, "_HEAD_PAGE", 2)
    patch.setattr(keyspace, "_MAX_RECORDS", 2)
    for function in (scan_pages, head_pages):
        patch.setattr(function, "__kwdefaults__", {**(function.__kwdefaults__ or {}), "size": 2})
    patch.setattr(split_pages, "__defaults__", (2,))


def test_every_store_behaves_as_the_model(
    location: StoreLocation, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random verbs, valid and invalid, current and stale: the same results and records.

    In memory, where it costs nothing, in pages of two records.
    """
    kind = request.node.callspec.params["location"]
    if kind == "memory":
        shrink_pages(monkeypatch)

    @settings(max_examples=EXAMPLES[kind], deadline=None)
    @given(history=st.lists(steps, max_size=15))
    def check(history: list[tuple[Any, ...]]) -> None:
        asyncio.run(run_history(location, history))

    check()
