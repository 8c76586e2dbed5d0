"""Whatever the order of verbs: every store answers as a dictionary would."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import Place
from plain import ATTRIBUTES, FILTERS, Plain, Refused

from jobsync import Database, Document, JobsyncError, Resource

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
    # Now and then one that is refused.
    st.fixed_dictionaries({"n": st.sampled_from([0, "zero", True])}),
)
records = st.tuples(names, bodies).map(lambda pair: {"id": pair[0], **pair[1]})
cuts = st.tuples(st.none() | st.integers(0, 3), st.integers(0, 3))
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
        cuts,
    ),
)


class Run:
    """One random history, told to a resource and to the model."""

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self.plain = Plain()
        self.stale = "never-there"

    async def take(self, step: tuple[Any, ...]) -> None:
        """Do one step both ways, and compare."""
        verb, *arguments = step
        real, model = getattr(self, verb)(*arguments)
        answer = await _answer(real)
        try:
            expected: Any = model()
        except Refused as refused:
            expected = f"refused: {refused}"
        assert answer == expected

    async def version(self, name: str, which: str) -> str | None:
        """Give a version: none, the one that is there, or one that was."""
        if not which:
            return None
        found = await self.resource.get(name)
        if which == "stale" or found is None:
            return self.stale
        self.stale = found._version
        return str(found._version)

    def insert(self, record: dict[str, Any]) -> Any:
        return lambda: self.resource.insert(record), lambda: self.plain.insert(record)

    def insert_many(self, given: list[dict[str, Any]]) -> Any:
        return lambda: self.resource.insert_many(given), lambda: self.plain.insert_many(given)

    def update(self, name: str, given: dict[str, Any], which: str) -> Any:
        async def real() -> Document:
            version = await self.version(name, which)
            return await self.resource.update(name, given, if_version=version)

        return real, lambda: self.plain.update(name, given, stale=which == "stale")

    def replace(self, name: str, given: dict[str, Any], which: str) -> Any:
        async def real() -> Document:
            version = await self.version(name, which)
            return await self.resource.replace(name, given, if_version=version)

        return real, lambda: self.plain.replace(name, given, stale=which == "stale")

    def upsert(self, record: dict[str, Any]) -> Any:
        return lambda: self.resource.upsert(record), lambda: self.plain.upsert(record)

    def delete(self, name: str, which: str) -> Any:
        async def real() -> bool:
            version = await self.version(name, which)
            return await self.resource.delete(name, if_version=version)

        return real, lambda: self.plain.delete(name, stale=which == "stale")

    def delete_many(self, given: list[str]) -> Any:
        return lambda: self.resource.delete_many(given), lambda: self.plain.delete_many(given)

    def get(self, name: str) -> Any:
        return lambda: self.resource.get(name), lambda: self.plain.get(name)

    def query(self, kind: str | None, sort: str | None, cut: tuple[int | None, int]) -> Any:
        limit, offset = cut
        where = FILTERS[kind][0] if kind else None
        span = slice(offset, None if limit is None else offset + limit)
        return (
            lambda: self.resource.query(where, sort=sort, limit=limit, offset=offset),
            lambda: self.plain.query(kind, sort, span),
        )

    async def compare_all(self) -> None:
        """Compare every way of looking."""
        expected = [self.plain.records[name] for name in self.plain.ids]
        assert await self.resource.list_ids() == self.plain.ids
        assert plainly(await self.resource.list()) == expected
        assert plainly([document async for document in self.resource]) == expected
        assert await self.resource.count() == len(expected)
        assert plainly((await self.resource.page(size=100)).items) == expected
        for where, keep in FILTERS.values():
            assert await self.resource.count(where) == sum(map(keep, expected))


def plainly(answer: Any) -> Any:
    """Give an answer without what the library adds."""
    if isinstance(answer, Document):
        return {name: value for name, value in answer.items() if not name.startswith("_")}
    return [plainly(one) for one in answer] if isinstance(answer, list) else answer


async def _answer(verb: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return plainly(await verb())
    except JobsyncError as error:
        return f"refused: {type(error).__name__}"


async def play(place: Place, history: list[tuple[Any, ...]]) -> None:
    """Tell a history to a resource that nobody used before."""
    store = await place.open()
    async with Database(connection=store) as database:
        run = Run(await database.create_resource(f"r{next(_numbers)}", ATTRIBUTES))
        for step in history:
            await run.take(step)
        await run.compare_all()
    await store.close()


def test_every_store_answers_as_the_model(place: Place, request: pytest.FixtureRequest) -> None:
    """Random verbs, valid and not, stale and not: the same answers, and the same records."""

    @settings(max_examples=EXAMPLES[request.node.callspec.params["place"]], deadline=None)
    @given(history=st.lists(steps, max_size=15))
    def check(history: list[tuple[Any, ...]]) -> None:
        asyncio.run(play(place, history))

    check()
