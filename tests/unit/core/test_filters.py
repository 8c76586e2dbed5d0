"""The filter language means one thing, and a bad filter says what is wrong with it."""

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobsync.core.filters import All, matches, parse
from jobsync.errors import Invalid


def _passes(where: Any, document: Any) -> bool:
    return matches(parse(where), document)


names = st.sampled_from(["a", "b", "a.b", "b.a"])
scalars = st.sampled_from([None, True, False, 0, 1, 1.0, 2, -1.5, "", "0", "1", "a", "é", "\uffff"])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=6,
)
documents = st.dictionaries(st.sampled_from("ab"), values, max_size=2)
orders = st.sampled_from(["$lt", "$lte", "$gt", "$gte"])
operands = (
    st.builds(lambda value: {"$eq": value}, values)
    | st.builds(lambda value: {"$in": value}, st.lists(values, max_size=3))
    | st.builds(lambda value: {"$exists": value}, st.booleans())
    | st.builds(lambda order, value: {order: value}, orders, st.sampled_from([0, 1, 1.5, "", "a"]))
)
filters = st.recursive(
    st.dictionaries(names, operands, max_size=2),
    lambda inner: st.builds(
        lambda operator, parts: {operator: parts},
        st.sampled_from(["$and", "$or"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("where", "document"),
    [
        ({}, {}),
        ({}, {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": "x", "b": 2}, {"a": "x", "b": 2}),
        ({"a": None}, {"a": None}),
        ({"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {}}, {"a": {}}),
        ({"a": (1, (2,))}, {"a": [1, [2]]}),
        ({"a": {"$eq": ({"b": (1,)},)}}, {"a": [{"b": [1]}]}),
        ({"a": {"$in": ("x", "y")}}, {"a": "y"}),
        ({"a": {"$in": [None]}}, {"a": None}),
        ({"a": {"$in": [[1]]}}, {"a": [1]}),
        ({"a.b": 1}, {"a": {"b": 1}}),
        ({"a": {"$gt": 1, "$lt": 3}}, {"a": 2}),
        ({"a": {"$gte": 2, "$lte": 2}}, {"a": 2}),
        ({"a": {"$gte": 1}}, {"a": 1.5}),
        ({"a": {"$lt": "b"}}, {"a": "a"}),
        ({"a": {"$lt": "\U00010000"}}, {"a": "\uffff"}),
        ({"a": {"$exists": True}}, {"a": None}),
        ({"a": {"$exists": False}}, {}),
        ({"a": {"$ne": 1}}, {"a": 2}),
        ({"a": {"$ne": 1}}, {"a": True}),
        ({"a": {"$ne": 1}}, {}),
        ({"a": {"$ne": None}}, {}),
        ({"a": {"$not": {"$gt": 5}}}, {"a": 5}),
        ({"a": {"$not": {"$gt": 5}}}, {"a": "9"}),
        ({"a": {"$not": {"$gt": 5}}}, {}),
        ({"a": {"$not": {"$not": {"$gt": 5}}}}, {"a": 6}),
        ({"$or": [{"a": 1}, {"b": 1}]}, {"b": 1}),
        ({"$and": [{"a": 1}, {"b": 1}]}, {"a": 1, "b": 1}),
        ({"$not": {"a": 1}}, {"a": 2}),
        ({"$or": ({"a": 1}, {})}, {}),
        ({"a": {"b": {"$gt": 1}}}, {"a": {"b": {"$gt": 1}}}),
    ],
    ids=repr,
)
def test_it_matches(where: Any, document: Any) -> None:
    """The document passes."""
    assert _passes(where, document)


@pytest.mark.parametrize(
    ("where", "document"),
    [
        ({"a": 1}, {}),
        ({"a": 1}, {"a": True}),
        ({"a": True}, {"a": 1}),
        ({"a": 0}, {"a": False}),
        ({"a": "1"}, {"a": 1}),
        ({"a": 1}, {"a": "1"}),
        ({"a": [1]}, {"a": [True]}),
        ({"a": [[True]]}, {"a": [[1]]}),
        ({"a": {"b": [1]}}, {"a": {"b": [True]}}),
        ({"a": {"b": {"c": 0}}}, {"a": {"b": {"c": False}}}),
        ({"a": {"$in": [1, 0]}}, {"a": True}),
        ({"a": {"$in": [[1]]}}, {"a": [True]}),
        ({"a": {"$in": []}}, {"a": 1}),
        ({"a": {"$in": [None]}}, {}),
        ({"a": None}, {}),
        ({"a": None}, {"a": 0}),
        ({"a": None}, {"a": ""}),
        ({"a.b": None}, {"a": {}}),
        ({"a.b": None}, {"a": None}),
        ({"a": {}}, {"a": []}),
        ({"a": {"b": None}}, {"a": {}}),
        ({"a": {}}, {"a": {"b": 1}}),
        ({"a": [1]}, {"a": [1, 2]}),
        ({"a": [1, 2]}, {"a": [1]}),
        ({"a": [1]}, {"a": []}),
        ({"a": []}, {"a": [1]}),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1]}}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": 1}, {"a": [1]}),
        ({"a.b": 1}, {"a": [{"b": 1}]}),
        ({"a.0": 1}, {"a": [1]}),
        ({"a.b": 1}, {"a.b": 1}),
        ({"a.b": 1}, {"a": "b"}),
        ({"a": {"$gt": 1}}, {"a": 1}),
        ({"a": {"$gt": 1, "$lt": 3}}, {"a": 3}),
        ({"a": {"$gt": 0}}, {"a": True}),
        ({"a": {"$gt": 0}}, {"a": "1"}),
        ({"a": {"$gte": ""}}, {"a": 1}),
        ({"a": {"$lte": 0}}, {"a": None}),
        ({"a": {"$lte": 0}}, {}),
        ({"a": {"$gte": ""}}, {"a": ["x"]}),
        ({"a": {"$lt": "a"}}, {"a": "a"}),
        ({"a": {"$exists": True}}, {}),
        ({"a.b": {"$exists": True}}, {"a": "b"}),
        ({"a": {"$exists": False}}, {"a": None}),
        ({"a": {"$ne": None}}, {"a": None}),
        ({"a": {"$ne": [1]}}, {"a": [1.0]}),
        ({"a": {"$not": {"$gt": 5, "$lt": 9}}}, {"a": 6}),
        ({"$or": [{"a": 1}, {"b": 1}]}, {"a": 2}),
        ({"$and": [{"a": 1}, {"b": 1}]}, {"a": 1}),
        ({"$not": {}}, {}),
        ({"a": 1}, [1]),
        ({"a": 1}, None),
    ],
    ids=repr,
)
def test_it_does_not_match(where: Any, document: Any) -> None:
    """The document does not pass."""
    assert not _passes(where, document)


def test_no_filter_lets_everything_pass() -> None:
    """None means all."""
    assert parse(None) == All(())
    assert _passes(None, {"a": 1})


@pytest.mark.parametrize(
    ("where", "field", "value", "words"),
    [
        ([1], "where", [1], "must be a filter; write {"),
        ({1: 2}, "where", 1, "must have text as field names; use str"),
        ({"a..b": 1}, "where", "a..b", "must not have an empty step in a path; write a.b"),
        ({"": 1}, "where", "", "must not have an empty step in a path; write a.b"),
        ({"a\0": 1}, "where", "a\0", "must not contain NUL"),
        ({"a": b"x"}, "where.a", b"x", "must be JSON, and is bytes; convert it"),
        ({"a": {"b": [b"x"]}}, "where.a.b[0]", b"x", "must be JSON, and is bytes; convert it"),
        ({"a": 2**53 + 1}, "where.a", 2**53 + 1, "must be within ±2⁵³; store it as text"),
        (
            {"a": {"$gt": -(2**60)}},
            "where.a.$gt",
            -(2**60),
            "must be within ±2⁵³; store it as text",
        ),
        ({"a": {"$lt": math.inf}}, "where.a.$lt", math.inf, "must be finite; store"),
        ({"a": {"$eq": "\ud800"}}, "where.a.$eq", "\ud800", "must not contain a lone surrogate"),
        ({"a": {"$gt": None}}, "where.a.$gt", None, "must be a number or text; use $eq"),
        ({"a": {"$gt": True}}, "where.a.$gt", True, "must be a number or text; use $eq"),
        ({"a": {"$lte": [1]}}, "where.a.$lte", [1], "must be a number or text; use $eq"),
        ({"a": {"$in": "ab"}}, "where.a.$in", "ab", "must be a list; write [a, b]"),
        ({"a": {"$in": [0, b"x"]}}, "where.a.$in[1]", b"x", "must be JSON, and is bytes"),
        (
            {"a": {"$in": [0] * 1001}},
            "where.a.$in",
            "1001 values",
            "must have at most 1000 values; split",
        ),
        ({"a": {"$exists": 1}}, "where.a.$exists", 1, "must be True or False; write True"),
        ({"a": {"$not": 5}}, "where.a.$not", 5, "must hold an operator; write {"),
        ({"a": {"$not": {"b": 5}}}, "where.a.$not", {"b": 5}, "must hold an operator; write {"),
        ({"a": {"$gtt": 1}}, "where.a.$gtt", 1, "is not an operator here; did you mean $gt?"),
        (
            {"a": {"$regex": "x"}},
            "where.a.$regex",
            "x",
            "is not an operator here; use one of $eq, $ne",
        ),
        (
            {"a": {"$gt": 1, "b": 2}},
            "where.a",
            "b",
            "must not mix operators and field names; use either",
        ),
        ({"$orr": [{}]}, "where.$orr", [{}], "is not an operator here; did you mean $or?"),
        ({"$gt": 1}, "where.$gt", 1, "is not an operator here; use one of $and, $or, $not"),
        ({"$and": []}, "where.$and", [], "must be a list of filters; write ["),
        ({"$or": {"a": 1}}, "where.$or", {"a": 1}, "must be a list of filters; write ["),
        ({"$or": [{}, 7]}, "where.$or[1]", 7, "must be a filter; write {"),
        ({"$not": [{"a": 1}]}, "where.$not", [{"a": 1}], "must be a filter; write {"),
        ({"$and": [{"a": {"$gt": {}}}]}, "where.$and[0].a.$gt", {}, "must be a number or text"),
    ],
    ids=repr,
)
def test_a_bad_filter_names_place_value_and_fix(
    where: Any, field: str, value: Any, words: str
) -> None:
    """Each mistake is reported with its place, its value and the fix."""
    with pytest.raises(Invalid) as caught:
        parse(where)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert words in f"{caught.value.problem}; {caught.value.fix}"


def test_nan_is_refused() -> None:
    """NaN equals nothing, itself included, so no filter may hold it."""
    for operand in (
        math.nan,
        {"$gt": math.nan},
        {"$in": [math.nan]},
        [math.nan],
        {"$ne": math.nan},
    ):
        with pytest.raises(Invalid, match="must be finite"):
            parse({"a": operand})


@pytest.mark.parametrize("wrap", [lambda f: {"$and": [f]}, lambda f: {"$not": f}])
def test_nesting_has_a_limit(wrap: Any) -> None:
    """A filter of sixteen levels is taken, one more is refused."""
    where: Any = {"a": 1}
    for _ in range(15):
        where = wrap(where)
    parse(where)
    with pytest.raises(Invalid, match="nested deeper than 16"):
        parse(wrap(where))


def test_nesting_on_one_field_has_a_limit() -> None:
    """Negations of one field count as levels too."""
    operand: Any = {"$gt": 1}
    for _ in range(15):
        operand = {"$not": operand}
    parse({"a": operand})
    with pytest.raises(Invalid, match="nested deeper than 16"):
        parse({"a": {"$not": operand}})


@given(st.lists(filters, min_size=1, max_size=3), documents)
def test_de_morgan(parts: list[Any], document: Any) -> None:
    """The negation of `$or` equals `$and` of the negations."""
    none_of = {"$not": {"$or": parts}}
    each_not = {"$and": [{"$not": part} for part in parts]}
    assert _passes(none_of, document) == _passes(each_not, document)
    assert _passes(none_of, document) == (not any(_passes(part, document) for part in parts))


@given(names, values, documents)
@example("a", None, {})
@example("a", 1, {"a": True})
def test_ne_is_not_eq(name: str, value: Any, document: Any) -> None:
    """`$ne` matches exactly what `$eq` does not, including missing fields."""
    equal = _passes({name: {"$eq": value}}, document)
    assert _passes({name: {"$ne": value}}, document) is not equal
    assert _passes({name: {"$not": {"$eq": value}}}, document) is not equal


@given(names, operands, documents)
def test_not_is_an_exact_negation(name: str, operand: Any, document: Any) -> None:
    """On a field and on a document, `$not` inverts the result, also for missing fields."""
    answer = _passes({name: operand}, document)
    assert _passes({name: {"$not": operand}}, document) is not answer
    assert _passes({"$not": {name: operand}}, document) is not answer


@given(values)
def test_a_value_equals_itself(value: Any) -> None:
    """Every stored value can be found by equality."""
    assert _passes({"a": {"$eq": value}}, {"a": value})


@given(names, st.lists(values, max_size=3), documents)
def test_in_is_any_eq(name: str, choices: list[Any], document: Any) -> None:
    """`$in` matches if one of its values is equal."""
    one_by_one = [_passes({name: {"$eq": choice}}, document) for choice in choices]
    assert _passes({name: {"$in": choices}}, document) is any(one_by_one)


@given(st.sampled_from([0, 1, 1.5, -1]) | st.sampled_from(["", "a", "é", "\U00010000"]), documents)
def test_order_is_total_within_a_type_and_empty_across(value: Any, document: Any) -> None:
    """Exactly one of less, equal and greater holds within a type, and none across types."""
    answers = [
        _passes({"a": {"$lt": value}}, document),
        _passes({"a": value}, document),
        _passes({"a": {"$gt": value}}, document),
    ]
    actual = document.get("a")
    is_number = isinstance(actual, int | float) and not isinstance(actual, bool)
    same_type = isinstance(actual, str) if isinstance(value, str) else is_number
    assert sum(answers) == same_type
    assert _passes({"a": {"$lte": value}}, document) is (answers[0] or answers[1])
    assert _passes({"a": {"$gte": value}}, document) is (answers[2] or answers[1])


def test_a_filter_has_a_bounded_number_of_conditions() -> None:
    """A filter that would block the event loop for every document is refused."""
    choices = {"a": {"$in": list(range(1000))}}
    parse({"$or": [choices] * 10})
    with pytest.raises(
        Invalid, match=r"at most 10,000 conditions.*11,000 conditions.*Query in parts"
    ):
        parse({"$or": [choices] * 11})
