"""Partitions: equal values are together, other values are apart, and bad rules are explained."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobsync.core.filters import Equals, matches, parse
from jobsync.core.keys import MAX_SEGMENT, check_key
from jobsync.core.partitions import (
    Partition,
    PartitionField,
    choose_partition,
    parse_partitions,
)
from jobsync.errors import Invalid

X = Partition("by_x", (PartitionField("x"),))

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=100)
scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
)
values = st.one_of(scalars, st.none(), st.lists(scalars, max_size=2), st.just({"a": 1}))
stored = values.filter(lambda value: "\0" not in repr(value) and "x00" not in repr(value))
"""Without NUL, which filters refuse."""

SAMPLES = [
    *(0, -0.0, 1, 1.0, True, False, "1", "true", "", "é" * 40, " " * 70, '"', "\\", "\0", "x!"),
    *(2**31, 2.0**31, 2**31 + 0.5, 2**53, 2.0**53, -(2**53), -(2.0**53), 10**15, 1e15),
]


@given(a=scalars, b=scalars)
def test_values_share_a_rank_if_and_only_if_filters_call_them_equal(a: Any, b: Any) -> None:
    """So that a lookup finds exactly what a filter finds."""
    is_equal = matches(Equals(("x",), a), {"x": b})
    assert (X.rank({"x": a}) == X.rank({"x": b})) is is_equal
    assert X.rank_of({"x": a}) == X.rank({"x": a})


@pytest.mark.parametrize("a", SAMPLES)
@pytest.mark.parametrize("b", SAMPLES)
def test_odd_values_are_together_if_and_only_if_they_are_equal(a: Any, b: Any) -> None:
    """Numbers are compared by value, and never with text or truth values."""
    assert (X.rank({"x": a}) == X.rank({"x": b})) is matches(Equals(("x",), a), {"x": b})


@given(value=scalars)
@example("é" * 40)
@example(" " * 70)
@example("\x01" * 30)
@example(1e300)
@example("x" * 10_000)
def test_a_rank_is_part_of_a_key_with_room_for_an_id(value: Any) -> None:
    """Whatever the value is: any length, and every character that takes long to escape."""
    rank = X.rank({"x": value})
    assert rank is not None
    assert len(rank) <= 80
    # They begin the parts of a key that follow the rank.
    assert not any(f"!0{digit}" in rank for digit in range(3))
    check_key(f"index/{rank}")
    assert MAX_SEGMENT - len(rank) > 60


@given(a=st.tuples(scalars, scalars), b=st.tuples(scalars, scalars))
def test_no_rank_begins_another(a: tuple[Any, Any], b: tuple[Any, Any]) -> None:
    """A listing of one partition must not reach into another."""
    rule = Partition("by", (PartitionField("x"), PartitionField("y")))
    one, other = (rule.rank({"x": x, "y": y}) for x, y in (a, b))
    assert one is not None
    assert other is not None
    assert one == other or not other.startswith(one)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"x": None},
        {"x": []},
        {"x": {}},
        {"x": [1]},
        {"y": 1},
        None,
        [],
        "x",
        5,
        {"x": float("nan")},
        {"x": float("inf")},
        {"x": "\ud800"},
    ],
)
def test_documents_without_such_a_value_are_in_no_partition(document: Any) -> None:
    """Missing, null, lists and objects; and what no store accepts."""
    assert X.rank(document) is None


def test_nested_fields_are_found_by_their_path() -> None:
    """A step into something other than an object finds nothing."""
    rule = Partition("by", (PartitionField("a.b"),))
    assert rule.rank({"a": {"b": 1}}) == rule.rank_of({"a.b": 1.0})
    assert rule.rank({"a.b": 1}) is None
    assert rule.rank({"a": [{"b": 1}]}) is None


def test_cut_texts_are_together_if_they_begin_alike() -> None:
    """Numbers are not cut."""
    rules = parse_partitions(
        {"day": {"fields": {"x": "date"}}, "two": {"fields": {"x": "string|maxlength:2"}}}, None
    )
    assert [rule.fields[0].max_length for rule in rules] == [10, 2]
    day, two = rules
    assert day.rank({"x": "2026-01-31T05:00Z"}) == day.rank({"x": "2026-01-31"})
    assert day.rank({"x": "2026-01-31"}) != day.rank({"x": "2026-02-01"})
    assert two.rank({"x": "éab"}) == two.rank({"x": "éa"}) != two.rank({"x": "é"})
    assert two.rank({"x": 123}) != two.rank({"x": 12})


def test_rules_that_divide_records_differently_have_different_digests() -> None:
    """The name does not count; fields, their order and their cut do."""
    rules = [
        Partition("a", (PartitionField("x"),)),
        Partition("a", (PartitionField("y"),)),
        Partition("a", (PartitionField("x"), PartitionField("y"))),
        Partition("a", (PartitionField("y"), PartitionField("x"))),
        Partition("a", (PartitionField("x", 2),)),
    ]
    assert len({rule.digest for rule in rules}) == len(rules)
    assert Partition("b", (PartitionField("x"),)).digest == rules[0].digest


def test_ranks_and_digests_are_those_of_every_version() -> None:
    """They are stored: another one would lose the records that older code has written."""
    wide = Partition("a", (PartitionField("x", 2), PartitionField("y.z")))
    assert (X.digest, wide.digest) == ("bdd496c3", "723b6183")
    assert X.rank({"x": 5}) == "_B5_D"
    assert X.rank({"x": "é" * 40}) == "h3f5ea407a29e2c2d2baabab259fd18bc2c75eda6"
    assert wide.rank({"x": "abc", "y": {"z": True}}) == "_B!22ab!22!2Ctrue_D"


@pytest.mark.parametrize("kind", ["date", "string", "string|maxlength:2", "string|maxlength:11"])
def test_the_type_of_a_field_can_be_written_again(kind: str) -> None:
    """What is shown means the same field."""
    (rule,) = parse_partitions({"a": {"fields": {"x": kind}}}, None)
    assert rule.fields[0].type == kind


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        (None, None),
        ({"x": 1}, "x"),
        ({"x": {"$eq": 1}}, "x"),
        ({"x": 1, "y": 2}, "xy"),
        ({"$and": [{"x": 1}, {"y": {"$gt": 0}}, {"y": 2}]}, "xy"),
        ({"y": 2}, None),
        ({"x": {"$gt": 1}}, None),
        ({"x": {"$in": [1]}}, None),
        ({"$or": [{"x": 1}]}, None),
        ({"$not": {"x": 1}}, None),
        ({"x": None}, None),
        ({"x": [1]}, None),
        ({"x": {"a": 1}}, None),
        ({"x": None, "$and": [{"y": 1}]}, None),
        ({"x": 1, "y": None}, "x"),
        ({"x": 1, "y": [2]}, "x"),
        ({"x": 1, "y": {"a": 2}}, "x"),
    ],
)
def test_the_narrowest_partition_with_all_matches_is_chosen(where: Any, chosen: str | None) -> None:
    """Only fields that have one value in every match count."""
    rules = parse_partitions({"x": ["x"], "xy": ["x", "y"]}, None)
    found = choose_partition(parse(where), rules)
    assert (found and found[0].name) == chosen


@given(
    document=st.fixed_dictionaries({}, optional={"x": values, "y": values}),
    where=st.fixed_dictionaries({}, optional={"x": stored, "y": stored}),
    cut=st.none() | st.integers(1, 3),
)
def test_every_match_is_in_the_chosen_partition(document: Any, where: Any, cut: int | None) -> None:
    """Otherwise a query would miss it."""
    rules = [X, Partition("by", (PartitionField("x", cut), PartitionField("y")))]
    chosen = choose_partition(parse(where), rules)
    if chosen is not None and matches(parse(where), document):
        partition, rank = chosen
        assert partition.rank(document) == rank


@pytest.mark.parametrize(
    ("partitions", "message"),
    [
        (5, "partitions must be a dictionary (got 5)"),
        (["x"], "partitions must be a dictionary"),
        ({f"n{i}": ["x"] for i in range(21)}, "partitions must be at most 20"),
        ({"": ["x"]}, "partitions must have valid names (got '')"),
        ({5: ["x"]}, "partitions must have valid names (got 5)"),
        ({"a/b": ["x"]}, "partitions must have valid names (got 'a/b')"),
        ({"n" * 51: ["x"]}, "partitions must have valid names"),
        ({"a": None}, "partitions.a must have 1 to 8 fields (got None)"),
        ({"a": []}, "partitions.a must have 1 to 8 fields (got [])"),
        ({"a": [5]}, "partitions.a must have 1 to 8 fields (got [5])"),
        ({"a": {}}, "partitions.a must have 1 to 8 fields (got {})"),
        ({"a": {"x": "string"}}, "partitions.a must have 1 to 8 fields"),
        ({"a": {"fields": ["x"], "typo": 1}}, "partitions.a must have 1 to 8 fields"),
        ({"a": [f"f{i}" for i in range(9)]}, "partitions.a must have 1 to 8 fields"),
        ({"a": [""]}, "partitions.a must have 1 to 8 fields"),
        ({"a": ["x."]}, "partitions.a must be a field name (got 'x.')"),
        ({"a": {"fields": {5: "string"}}}, "partitions.a must be a field name (got 5)"),
        ({"a": ["regoin"]}, "partitions.a is not a field of the records (got 'regoin'). Did you"),
        (
            {"a": ["regoin.x"]},
            "partitions.a is not a field of the records (got 'regoin.x'). Did",
        ),
        ({"a": ["zzz"]}, "(got 'zzz'). Use one of _created_at, region, x"),
        ({"a": ["\ud800"]}, "partitions.a must not contain a lone surrogate"),
        ({"a": ["x\0"]}, "partitions.a must not contain NUL"),
        ({"a": ["qqq.x"]}, "partitions.a is not a field of the records (got 'qqq.x'). Use one of"),
        ({"a": ["_version"]}, "partitions.a is not stored in the records (got '_version')"),
        ({"a": ["_entries.a"]}, "partitions.a is not stored in the records"),
        ({"a": {"fields": {"x": "nope"}}}, "partitions.a.x is not a type of a partition"),
        ({"a": {"fields": {"x": None}}}, "partitions.a.x is not a type of a partition (got None)"),
        ({"a": {"fields": {"x": "string|maxlength:0"}}}, "is not a type of a partition"),
        ({"a": {"fields": {"x": ["date"]}}}, "is not a type of a partition"),
    ],
)
def test_bad_rules_are_refused_with_field_value_and_fix(partitions: Any, message: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(Invalid) as caught:
        parse_partitions(partitions, ["x", "region", "_created_at"])
    assert message in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


def test_fields_may_be_written_in_several_ways() -> None:
    """One field, a list, or fields with types; unknown ones only if nothing is known."""
    expected = (PartitionField("x"),)
    for rule in ("x", ["x"], ("x",), {"fields": ["x"]}, {"fields": "x"}, {"fields": {"x": "url"}}):
        assert parse_partitions({"a": rule}, None) == (Partition("a", expected),)
    with pytest.raises(Invalid, match="is not a field of the records"):
        parse_partitions({"a": "x"}, [])
    for stamp in ("_created_at", "_updated_at"):
        assert parse_partitions({"a": stamp}, None)[0].fields[0].name == stamp
    assert parse_partitions({}, ["x"]) == ()


def test_rules_up_to_the_limits_are_accepted() -> None:
    """So many partitions, so many fields in each, and names and cuts so long."""
    fields = [f"f{i}" for i in range(8)]
    rules = parse_partitions({f"{'n' * 48}{i:02d}": fields for i in range(20)}, None)
    assert [len(rule.fields) for rule in rules] == [8] * 20
    for kind, length in {
        "date": 10,
        "string|maxlength:1": 1,
        "string|maxlength:9999": 9999,
        **dict.fromkeys(
            ["string", "number", "integer", "boolean", "email", "url", "uuid", "datetime"]
        ),
    }.items():
        (rule,) = parse_partitions({"a": {"fields": {"x": kind}}}, None)
        assert rule.fields == (PartitionField("x", length),)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "must have x"),
        ({"y": 1}, "must have x"),
        ({"x": 1, "y": 1}, "must have x"),
        ("x", "must have x"),
        (["x"], "must have x"),
        (5, "must have x"),
        ({"x": None}, "must be text, numbers, True or False"),
        ({"x": [1]}, "must be text, numbers, True or False"),
        ({"x": float("nan")}, "must be text, numbers, True or False"),
        ({"x": "\ud800"}, "must be text, numbers, True or False"),
        ({"x": object()}, r".x must be JSON"),
    ],
)
def test_values_that_make_no_partition_are_refused(given: Any, problem: str) -> None:
    """With what is expected instead."""
    with pytest.raises(Invalid, match=f"partition_values ?{problem}"):
        X.rank_of(given)
