"""A value reads back equal, or is refused with the place of the fault."""

import enum
import math
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync.core.codec import (
    MAX_INTEGER,
    MAX_VALUE,
    check_json,
    decode,
    encode,
    encode_all,
    to_plain,
    to_plain_all,
)
from jobsync.errors import Corrupt, Invalid

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-MAX_INTEGER, MAX_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=20
)


class Colour(enum.StrEnum):
    """Text of a derived type that the encoder knows."""

    RED = "red"


class Money(float):
    """A number of a derived type that it does not know, as numpy's float64 is."""


class Count(int):
    """Another."""


class Name(str):
    """Another; its repr differs from its value."""

    __slots__ = ()

    def __str__(self) -> str:
        return "printed"


class Pair(NamedTuple):
    """A tuple with names."""

    a: int
    b: int


def _typed(value: Any) -> Any:
    """Return a value with its types, so that 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return {name: _typed(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return type(value), value


@given(values)
def test_a_value_comes_back_equal(value: Any) -> None:
    """Reading returns what was written, with the same types."""
    assert _typed(decode(encode(value), "k")) == _typed(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1, (2, 3)), b"[1,[2,3]]"),
        ({"a": ({"b": ()}, [None])}, b'{"a":[{"b":[]},[null]]}'),
        ((Money(1.5), Colour.RED), b'[1.5,"red"]'),
        (Pair(1, 2), b"[1,2]"),
        (Colour.RED, b'"red"'),
        ({Colour.RED: 1}, b'{"red":1}'),
        (Money(1.5), b"1.5"),
        (Count(7), b"7"),
        ({Name("a"): Name("b")}, b'{"a":"b"}'),
        ("é", '"é"'.encode()),
        (MAX_INTEGER, b"9007199254740992"),
        (-MAX_INTEGER, b"-9007199254740992"),
    ],
)
def test_derived_types_are_written_as_their_base_type(value: Any, text: bytes) -> None:
    """Tuples become lists; derived text and numbers become plain ones."""
    assert encode(value) == text


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (math.nan, "must be finite"),
        (math.inf, "must be finite"),
        (-math.inf, "must be finite"),
        (Money(math.nan), "must be finite"),
        (MAX_INTEGER + 1, "must be within ±2⁵³"),
        (-MAX_INTEGER - 1, "must be within ±2⁵³"),
        (Count(MAX_INTEGER + 1), "must be within ±2⁵³"),
        ("a\0b", "NUL"),
        ("\ud800", "lone surrogate"),
        (Name("\ud800"), "lone surrogate"),
        (b"bytes", "must be JSON, and is bytes"),
        ({1, 2}, "must be JSON, and is set"),
        (1j, "must be JSON, and is complex"),
        (object(), "must be JSON, and is object"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_not_json_is_refused_at_any_depth(value: Any, problem: str) -> None:
    """A bad value is refused alone and deep inside, and the error names its place."""
    with pytest.raises(Invalid, match=problem):
        encode(value)
    for rows in ([0, {"cell": value}], (0, {"cell": value})):
        with pytest.raises(Invalid, match=problem) as caught:
            encode({"rows": rows}, "task")
        assert caught.value.field == "task.rows[1].cell"
        assert caught.value.fix


@given(st.lists(values | st.tuples(values), max_size=5))
def test_a_batch_returns_the_texts_of_its_values(batch: list[Any]) -> None:
    """Together or one by one, the texts are the same, and in order."""
    assert encode_all(batch) == [encode(value) for value in batch]


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        Money(math.inf),
        MAX_INTEGER + 1,
        "a\0b",
        "\ud800",
        b"bytes",
        {1, 2},
        {1: 2},
        object(),
        "x" * MAX_VALUE,
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_batch_is_refused_for_one_of_its_values(value: Any) -> None:
    """A value that is refused alone is refused in a batch, for the same reason."""
    with pytest.raises(Invalid) as alone:
        encode([value])
    with pytest.raises(Invalid) as among:
        encode_all([0, [value], {"a": "b"}])
    assert str(among.value) == str(alone.value)


def test_a_batch_may_be_larger_than_a_value() -> None:
    """The limit is on each value."""
    large = "x" * (MAX_VALUE - 2)
    assert encode_all([large, large]) == [encode(large)] * 2


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (1, "must have text as keys"),
        (None, "must have text as keys"),
        ("a\0", "NUL"),
        ("\udfff", "surrogate"),
    ],
)
def test_bad_keys_of_an_object_are_refused(name: Any, problem: str) -> None:
    """A key that is not text on every store is refused; the error names the object."""
    with pytest.raises(Invalid, match=problem) as caught:
        check_json({"outer": {name: 1}})
    assert caught.value.field == "value.outer"


def _nested(depth: int) -> Any:
    value: Any = 0
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def test_nesting_has_a_limit() -> None:
    """64 levels are accepted, one more is refused, and a recursive value too."""
    assert decode(encode(_nested(64)), "k") == _nested(64)
    with pytest.raises(Invalid, match="nested deeper than 64"):
        encode(_nested(65))
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(Invalid, match="nested deeper than 64"):
        encode(loop)


def test_size_has_a_limit() -> None:
    """A value of exactly the limit is accepted; one byte more is refused, with both numbers."""
    assert len(encode("x" * (MAX_VALUE - 2))) == MAX_VALUE
    with pytest.raises(Invalid, match="at most 4,194,304 bytes") as caught:
        encode("x" * (MAX_VALUE - 1), "body")
    assert (caught.value.field, caught.value.value) == ("body", "4,194,305 bytes")


def test_size_counts_encoded_bytes() -> None:
    """The limit is on bytes, not on characters."""
    assert encode("éé", limit=6) == '"éé"'.encode()
    with pytest.raises(Invalid, match="at most 5 bytes"):
        encode("éé", limit=5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"a":1',
        b"1 2",
        b"NaN",
        b"[1e999]",
        b"\xff",
        b'"\xff"',
        b'"\\ud800"',
        b"[" * 100_000,
        "{'a': 1}",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_unreadable_text_names_its_key(data: bytes | str) -> None:
    """Text that is not JSON is reported as corrupt, with its key."""
    with pytest.raises(Corrupt, match="not JSON") as caught:
        decode(data, "queue/1")
    assert caught.value.key == "queue/1"


def test_text_and_bytes_read_alike() -> None:
    """A store may keep text or bytes."""
    assert decode('{"a":"é"}', "k") == decode('{"a":"é"}'.encode(), "k") == {"a": "é"}


def test_a_decimal_is_a_number_or_refused() -> None:
    """A Decimal that equals a float is stored as that number; others and ranges are refused."""
    assert decode(encode([Decimal("1.5"), Decimal(2)]), "n") == [1.5, 2]
    for bad in (Decimal("0.1"), range(3), {"a": [range(3)]}):
        with pytest.raises(Invalid, match="must be JSON"):
            encode(bad)


class Degrees(float):
    """A number of a derived type."""


@pytest.mark.parametrize(
    "value",
    [
        {"a": Decimal("1.5"), "b": [Decimal(2)]},
        {"a": Degrees(2.5)},
        {"a": (1, 2), "b": {"c": ({},)}},
        {"a": Colour.RED, Colour.RED: 1},
        OrderedDict(a=1),
    ],
)
def test_a_plain_value_is_what_is_read_back(value: Any) -> None:
    """With the types that are read back, also deep inside."""
    plain = to_plain(value)
    assert repr(plain) == repr(decode(encode(value), "k"))
    assert to_plain(plain) is plain
    assert to_plain_all([plain, {}]) == [plain, {}]
    assert repr(to_plain_all([{"b": 1}, value])) == repr([{"b": 1}, plain])


def test_what_cannot_be_stored_does_not_become_plain() -> None:
    """It is refused with its place, as by a store; also if it contains itself."""
    endless: list[Any] = []
    endless.append(endless)
    for bad in ({"a": [Decimal("0.1")]}, {"a": b"x"}, endless, {5: 1}):
        with pytest.raises(Invalid, match="of r"):
            to_plain(bad, "of r")


ODD: list[Any] = [
    *(Money(2.5), Count(3), Name("x"), Colour.RED, Decimal("1.5"), (1, 2), Pair(1, 2)),
    *(OrderedDict(a=1), 5, None, True, 1.5, "x", [], {}),
    # What nothing can store.
    *(b"x", {1}, range(2), Decimal("0.1"), object(), 1j),
]


def _list_places(odd: Any) -> list[dict[Any, Any]]:
    """Return objects that have something odd as a value or as a name, at the top or deeper."""
    places: list[dict[Any, Any]] = [{"a": odd}, {"a": [odd]}, {"a": {"b": odd}}, {"a": [[odd]]}]
    try:
        return [*places, {odd: 1}, {"a": {odd: 1}}, {"a": [{odd: 1}]}]
    except TypeError:
        return places


def _find_end(write: Callable[[Any], Any], value: Any) -> str:
    """Return what becomes of a value, with all its types, or that it is refused."""
    try:
        return repr(_typed(write(value)))
    except Invalid:
        return "refused"


WAYS: dict[str, Callable[[Any], Any]] = {
    "written": lambda value: decode(encode(value), "k"),
    "written in a batch": lambda value: decode(encode_all([{"n": 1}, value])[1], "k"),
    "made plain": to_plain,
    "made plain in a batch": lambda value: to_plain_all([{"n": 1}, value])[1],
}


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: type(odd).__name__)
def test_all_ways_of_writing_a_value_agree(odd: Any) -> None:
    """Alone or in a batch, at once or made plain before; wherever in the value it is."""
    for value in (*_list_places(odd), {"a": _nested(63), "b": odd}, {"a": _nested(64), "b": odd}):
        ends = {way: _find_end(write, value) for way, write in WAYS.items()}
        assert len(set(ends.values())) == 1, (value, ends)
