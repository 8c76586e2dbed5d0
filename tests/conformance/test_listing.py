"""Listing: byte order, pages, one level, filters."""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from near_numbers import BASES, find_difference

from jobsync import Applied, Invalid, Put, Store
from jobsync.core.filters import Compare, matches, parse
from jobsync.core.keys import escape
from jobsync.stores import scan
from jobsync.stores.sqlite.store import SqliteStore

# The store outlives the examples of one test; each example has its own prefix.
many = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
_numbers = itertools.count()


def fresh_prefix() -> str:
    """Return a prefix that no other example uses."""
    return f"example/{next(_numbers)}/"


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
ids = texts.filter(lambda text: len(text.encode()) <= 60)


async def fill(store: Store, prefix: str, documents: dict[str, Any]) -> None:
    """Write documents under a prefix."""
    await store.write([Put(prefix + escape(name), value) for name, value in documents.items()])


@many
@given(names=st.sets(ids, max_size=30), limit=st.integers(1, 8))
async def test_listing_is_in_byte_order_page_by_page(
    store: Store, names: set[str], limit: int
) -> None:
    """All pages together are all keys, each once, in the order of their UTF-8 bytes."""
    prefix = fresh_prefix()
    await fill(store, prefix, dict.fromkeys(names, 0))
    expected = [prefix + escape(name) for name in sorted(names, key=str.encode)]
    heads, records = [], []
    after = ""
    while page := await store.heads(prefix, after=after, limit=limit):
        heads += page
        after = page[-1].key
    after = ""
    while found := await store.scan(prefix, after=after, limit=limit):
        records += found
        after = found[-1].key
    assert [head.key for head in heads] == expected
    assert [record.key for record in records] == expected
    assert [head.version for head in heads] == [record.version for record in records]


# The end of a range need not be a key that exists: it may be any name, or the beginning of one.
beginnings = (
    st.tuples(ids.map(escape), st.integers(1, 200))
    .map(lambda drawn: drawn[0][: drawn[1]])
    .filter(lambda name: name not in {".", ".."})
)


@many
@given(
    names=st.sets(ids, max_size=30),
    dead=st.sets(st.integers(0, 29)),
    data=st.data(),
    limit=st.integers(1, 8),
)
async def test_a_range_is_listed_page_by_page(
    store: Store, names: set[str], dead: set[int], data: st.DataObject, limit: int
) -> None:
    """Its pages are the live keys between both bounds; every page but the last is full."""
    prefix = fresh_prefix()
    keys = sorted(prefix + escape(name) for name in names)
    outcomes = await store.write([Put(key, 0) for key in keys])
    made = [outcome.record for outcome in outcomes if isinstance(outcome, Applied)]
    await store.write([record.delete() for i, record in enumerate(made) if i in dead])
    bounds = st.one_of(beginnings.map(prefix.__add__), *map(st.just, keys))
    after = data.draw(st.just("") | bounds, label="after")
    until = data.draw(bounds, label="until")
    left = [key for i, key in enumerate(keys) if i not in dead and after < key < until]
    is_full = True
    while is_full:
        page = await store.heads(prefix, after=after, until=until, limit=limit)
        assert [head.key for head in page] == left[:limit]
        left = left[limit:]
        is_full = len(page) == limit
        after = page[-1].key if page else ""


async def test_a_range_ends_before_its_end(store: Store) -> None:
    """The end may be a key, a key's beginning, the beginning of the range or beyond all keys."""
    keys = ["n/a", "n/a!00x", "n/a!00y", "n/a!00y/z", "n/a!01x", "n/b", "o/a!00z"]
    await store.write([Put(key, 0) for key in keys])

    async def found(after: str, until: str, limit: int = 1000) -> list[str]:
        heads = await store.heads("n/", after=after, until=until, limit=limit)
        return [head.key for head in heads]

    assert await found("", "n/a!00y") == ["n/a", "n/a!00x"]
    assert await found("n/a!00", "n/a!01") == ["n/a!00x", "n/a!00y"]
    assert await found("n/a!00", "n/a!01", limit=1) == ["n/a!00x"]
    assert await found("n/a!00x", "n/a!01", limit=1) == ["n/a!00y"]
    assert await found("n/a!00y", "n/a!01", limit=1) == []
    assert await found("n/a!01", "n/~") == ["n/a!01x", "n/b"]
    assert await found("", "n/!") == []
    assert await found("n/a", "n/a") == []
    assert await found("n/b", "n/a") == []


@pytest.mark.parametrize(
    ("until", "message"),
    [
        ("b/c", r"until must be under 'a/' \(got 'b/c'\)\. Leave it out"),
        ("a0", "until must be under 'a/'"),
        ("a", "until must be under 'a/'"),
        ("a/", "until must not have an empty segment"),
        ("a/b c", "until must not contain ' '"),
    ],
)
async def test_a_bad_end_of_a_range_is_refused(store: Store, until: str, message: str) -> None:
    """The error names the argument, its value and the fix."""
    with pytest.raises(Invalid, match=message):
        await store.heads("a/", until=until)


async def test_a_prefix_lists_one_level(store: Store) -> None:
    """Keys above, below and beside a prefix are not listed under it."""
    keys = ["a", "a/b", "a/b/c", "a/b/d", "a/b/c/d", "a/bc", "a/b-c", "a/b.Ec", "b/c"]
    await store.write([Put(key, 0) for key in keys])
    assert [head.key for head in await store.heads("a/b/")] == ["a/b/c", "a/b/d"]
    assert [head.key for head in await store.heads("a/")] == ["a/b", "a/b-c", "a/b.Ec", "a/bc"]
    assert [head.key for head in await store.heads("c/")] == []


async def test_a_listing_tells_the_time_of_the_last_write_where_the_server_does(
    store: Store,
) -> None:
    """It is the time of the current version, by the server's clock; only buckets tell it."""
    before = time.time()
    record = await store.create("n/a", 1)
    (created,) = await store.heads("n/")
    if not store.is_billed:
        assert created.written_at is None
        return
    assert created.written_at is not None
    # The server is on this machine; it may leave the fraction out.
    assert before - 1 <= created.written_at <= time.time()
    replaced = created
    while replaced.written_at == created.written_at:
        # At most for a second: until the server's clock shows the next one.
        record = await store.put(record, 2)
        (replaced,) = await store.heads("n/")
    assert replaced.written_at is not None
    assert created.written_at < replaced.written_at <= time.time()


async def test_a_listing_shows_marks_where_reading_costs_a_request(store: Store) -> None:
    """The mark of the last write, whatever the size of the record; a database need not say."""
    texts = ["", "x" * 255, "y" * 1000, *("z" * length for length in range(300, 316))]
    keys = [f"marked/{n:02}" for n in range(len(texts))]
    marks = [1 + n % 15 for n in range(len(texts))]
    fitted = zip(keys, texts, marks, strict=True)
    outcomes = await store.write([Put(key, text, mark=mark) for key, text, mark in fitted])
    heads = await store.heads("marked/")
    assert [head.mark for head in heads] in (marks, [None] * len(keys))
    assert [record.value for record in await store.scan("marked/")] == texts
    (first, *_) = outcomes
    assert isinstance(first, Applied)
    await store.write([Put(keys[0], "longer", first.record, mark=15)])
    (head, *_) = await store.heads("marked/")
    assert head.mark in {15, None}
    assert store.is_billed is False or head.mark == 15


async def test_fewer_than_asked_means_the_end(store: Store) -> None:
    """A filtered page is full unless nothing more matches."""
    await store.write([Put(f"n/{i:03d}", {"i": i}) for i in range(50)])
    where = {"i": {"$gte": 40}}
    first = await store.scan("n/", limit=6, where=where)
    assert [record.value["i"] for record in first] == [40, 41, 42, 43, 44, 45]
    rest = await store.scan("n/", limit=6, after=first[-1].key, where=where)
    assert [record.value["i"] for record in rest] == [46, 47, 48, 49]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefix": "a"}, "must end in '/'"),
        ({"prefix": ""}, "must end in '/'"),
        ({"prefix": "a//"}, "empty segment"),
        ({"prefix": "a/", "limit": 0}, r"limit .*\(got 0\)"),
        ({"prefix": "a/", "limit": 10**9}, r"limit .*\(got 1000000000\)"),
        ({"prefix": "a/", "limit": 1.5}, r"limit .*\(got 1\.5\)"),
        ({"prefix": "a/", "limit": True}, r"limit .*\(got True\)"),
        ({"prefix": "a/", "after": "b/c"}, "must be under 'a/'"),
    ],
)
async def test_a_bad_listing_is_refused(
    store: Store, arguments: dict[str, Any], message: str
) -> None:
    """The error names the argument, its value and the fix."""
    with pytest.raises(Invalid, match=message):
        await store.heads(**arguments)
    with pytest.raises(Invalid, match=message):
        await store.scan(**arguments)


async def test_a_bad_filter_is_refused(store: Store) -> None:
    """A mistyped operator is an error, not an empty result."""
    with pytest.raises(Invalid, match=r"Did you mean \$gte\?"):
        await store.scan("a/", where={"n": {"$gtee": 1}})
    with pytest.raises(Invalid, match=r"Did you mean \$gte\?"):
        await store.read("a", where={"n": {"$gtee": 1}})


# Few names and values, so that filters match.
fields = st.sampled_from(["a", "b", 'q"', "back\\slash", "dot", "é", "0", "$x", "new\nline"])
numbers = st.one_of(
    st.sampled_from([0, 1, -1, 1.0, 0.1, 0.30000000000000004, 0.3, 1e22, 5e-324, 2**53, -(2**53)]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(2**53), 2**53),
)
words = st.one_of(st.sampled_from(["", "a", "b", "é", "z", "Z", "\uffff", "😀", "1"]), texts)
scalars = st.one_of(st.none(), st.booleans(), numbers, words)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(fields, inner, max_size=3)
    ),
    max_leaves=6,
)
documents = st.one_of(st.dictionaries(fields, values, max_size=4), values)
paths = st.lists(fields.filter(lambda f: f[0] != "$"), min_size=1, max_size=3).map(".".join)
ordered = st.one_of(numbers, words)
operands = st.one_of(
    scalars,
    st.lists(scalars, max_size=2),
    st.fixed_dictionaries({"$eq": values}),
    st.fixed_dictionaries({"$ne": values}),
    st.fixed_dictionaries({"$in": st.lists(values, max_size=3)}),
    st.fixed_dictionaries({"$exists": st.booleans()}),
    *(st.fixed_dictionaries({op: ordered}) for op in ("$lt", "$lte", "$gt", "$gte")),
    st.fixed_dictionaries({"$gte": ordered, "$lt": ordered}),
    st.fixed_dictionaries({"$not": st.fixed_dictionaries({"$gt": ordered})}),
)


def clean(where: Any) -> bool:
    """Whether a generated filter is valid."""
    try:
        parse(where)
    except Invalid:
        return False
    return True


filters = st.recursive(
    st.dictionaries(paths, operands, max_size=2),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"$and": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"$or": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"$not": inner}),
    ),
    max_leaves=4,
).filter(clean)


@settings(many, max_examples=150)
@given(found=st.lists(documents, max_size=12), where=filters)
async def test_filters_match_like_the_reference(
    store: Store, found: list[Any], where: dict[str, Any]
) -> None:
    """For any data and filter, records and history return the reference's result."""
    prefix = fresh_prefix()
    await store.write([Put(f"{prefix}{i:03d}", document) for i, document in enumerate(found)])
    await store.append(prefix[:-1], found)
    wanted = parse(where)
    expected = [document for document in found if matches(wanted, document)]
    assert [record.value for record in await store.scan(prefix, where=where)] == expected
    assert [entry.value for entry in await store.read(prefix[:-1], where=where)] == expected


SAMPLES: list[Any] = [
    *(None, True, False, 0, 1, -1, -2.5, 1e22, 5e-324, "", "1", "a", "é", "\uffff", "😀"),
    *([], [1], ["a"], {}, {"b": 1}, {"b": None}),
]
CHOICES: list[list[Any]] = [[], [None], [1, "a"], [[], {}], [True, 0]]
OPERANDS: list[Any] = [
    *({op: value} for op in ("$eq", "$ne") for value in SAMPLES),
    *({"$in": choices} for choices in CHOICES),
    *({"$exists": value} for value in (True, False)),
    *(
        {op: value}
        for op in ("$lt", "$lte", "$gt", "$gte")
        for value in SAMPLES
        if isinstance(value, int | float | str) and not isinstance(value, bool)
    ),
]


async def test_every_condition_and_its_negation_match_like_the_reference(store: Store) -> None:
    """Of each operator with each type of value, on a field that has each type or is missing."""
    found: list[Any] = [{}, {"b": 1}, *({"a": value} for value in SAMPLES)]
    await store.write([Put(f"every/{i:03d}", document) for i, document in enumerate(found)])
    # A bucket does not filter; each listing costs it a request for each record.
    for operand in OPERANDS[:: 50 if store.is_billed else 1]:
        for where in (
            {"a": operand},
            {"a": {"$not": operand}},
            {"$not": {"$or": [{"a": operand}]}},
        ):
            expected = [document for document in found if matches(parse(where), document)]
            shown = [record.value for record in await store.scan("every/", where=where)]
            assert shown == expected, where


@pytest.mark.parametrize("base", BASES)
async def test_numbers_that_are_almost_equal_are_told_apart(store: Store, base: float) -> None:
    """Whatever their size, in every order, and under negations."""
    # A bucket does not filter; each listing costs it a request for each record.
    assert await find_difference(store, base, every=50 if store.is_billed else 1) == ""


async def test_a_condition_that_drops_rows_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant widens the range of numbers also under a negation, which narrows the result."""
    store = await SqliteStore.connect(tmp_path / "mutant.db")
    compare = scan._compare

    def widen(where: Compare, dialect: scan.Dialect, *, negated: bool) -> scan.SqlCondition:
        condition = compare(where, dialect, negated=False)
        return condition.negated() if negated else condition

    monkeypatch.setattr(scan, "_compare", widen)
    assert await find_difference(store, 2**53)
    await store.close()


async def test_a_long_list_of_choices_works(store: Store) -> None:
    """A thousand values in `$in` do not nest too deep."""
    await store.write([Put(f"n/{i:04d}", {"i": i, "s": str(i)}) for i in range(0, 2000, 100)])
    choices = list(range(1000))
    found = await store.scan("n/", where={"i": {"$in": choices}})
    assert [record.value["i"] for record in found] == list(range(0, 1000, 100))
    texts = [str(i) for i in choices]
    both = {"$and": [{"s": {"$in": texts}}] * 8, "i": {"$not": {"$in": choices[:500]}}}
    found = await store.scan("n/", where=both)
    assert [record.value["i"] for record in found] == list(range(500, 1000, 100))
