"""Sorting documents by their fields."""

import itertools
from typing import Any

import pytest

from jobsync.database.document import SortKey, parse_sort, sort_documents
from jobsync.errors import Invalid


def test_values_sort_by_type_and_then_by_value() -> None:
    """Missing, null, false, true, numbers, text; everything else keeps its order."""
    values: list[Any] = [None, False, True, -1, 0.5, 2, "", "Z", "a", "é", [2], {"x": 1}, [1]]
    documents: list[dict[str, Any]] = [{}, *({"v": value} for value in values)]
    shuffled = [*documents[5:11], *documents[:5], *documents[11:]]
    assert sort_documents(shuffled, parse_sort("v")) == documents
    for low, high in itertools.combinations(documents[:12], 2):
        for pair in ([low, high], [high, low]):
            assert sort_documents(pair, parse_sort("v")) == [low, high]
            assert sort_documents(pair, parse_sort("-v")) == [high, low]


def test_later_fields_break_ties() -> None:
    """Ties are broken by the next field; remaining ties keep their order."""
    documents = [{"a": {"b": x}, "n": n} for n, x in enumerate([1, 2, 1, 2])]
    numbers = [d["n"] for d in sort_documents(documents, parse_sort(["-a.b", "-n"]))]
    assert numbers == [3, 1, 2, 0]
    assert [d["n"] for d in sort_documents(documents, parse_sort("-a.b"))] == [1, 3, 0, 2]
    assert sort_documents(documents, ()) == documents


def test_a_leading_minus_reverses_the_order() -> None:
    """Only for the field that it precedes."""
    assert parse_sort(["a.b", "-c"]) == (SortKey(("a", "b")), SortKey(("c",), descending=True))
    assert parse_sort(("a.b", "-c")) == parse_sort(["a.b", "-c"])
    # The second minus belongs to the name.
    assert parse_sort("--a-") == (SortKey(("-a-",), descending=True),)
    assert parse_sort(None) == parse_sort([]) == parse_sort(()) == ()


@pytest.mark.parametrize("sort", ["", "-", "a..b", ["a", 5]])
def test_an_invalid_field_name_is_refused(sort: Any) -> None:
    """The error shows the syntax."""
    with pytest.raises(Invalid, match="must be a field name"):
        parse_sort(sort)
