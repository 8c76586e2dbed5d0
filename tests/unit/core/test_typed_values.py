"""Values of a type: where a wrong one is, and what would be lost of a right one."""

import dataclasses
from typing import Any

import msgspec
import pydantic
import pytest

from jobsync.core.typed_values import build_converter, find_loss, find_mismatch


class Item(pydantic.BaseModel):
    """An item of an order."""

    size: int
    parts: list["Item"] = []


@dataclasses.dataclass
class Order:
    """An order."""

    first: Item
    more: list[Item]
    by_name: dict[str, Item]


@dataclasses.dataclass
class LongOrder(Order):
    """An order with more to it."""

    note: str


@pytest.mark.parametrize(
    ("kind", "value", "path"),
    [
        (Item, {"size": "x"}, "size"),
        (Item, {}, "size"),
        (Item, {"size": 1, "parts": [{"size": 1}, {"size": "x"}]}, "parts.1.size"),
        (list[Item], [{"size": 1}, {"size": "x"}], "[1].size"),
        (Order, {"first": {"size": "x"}, "more": [], "by_name": {}}, "first.size"),
        (
            Order,
            {"first": {"size": 1}, "more": [{"size": 1}, {"size": "x"}], "by_name": {}},
            "more[1].size",
        ),
        (
            Order,
            {"first": {"size": 1}, "more": [], "by_name": {"a": {"size": "x"}}},
            "by_name[...].size",
        ),
    ],
)
def test_the_place_of_a_wrong_value_leads_through_models(kind: Any, value: Any, path: str) -> None:
    """From the value itself to the field of the innermost model."""
    with pytest.raises(msgspec.ValidationError) as caught:
        build_converter(kind)((value,))
    found = find_mismatch(caught.value, {})
    assert found.path == path
    assert found.problem.startswith("is wrong: ")


def test_a_model_that_is_one_already_is_kept() -> None:
    """It is not made anew, so it keeps what only it knows."""
    item = Item(size=1)
    assert build_converter(Item)((item,)).value is item


@pytest.mark.parametrize(
    ("value", "read", "lost"),
    [
        (
            LongOrder(Item(size=1), [], {}, "x"),
            Order(Item(size=1), [], {}),
            f"is {__name__}.LongOrder, and would be read back as {__name__}.Order without note",
        ),
        ({"a": 1}, Order(Item(size=1), [], {}), None),
        (LongOrder(Item(size=1), [], {}, "x"), {"first": 1}, None),
        (LongOrder(Item(size=1), [], {}, "x"), "text", None),
    ],
)
def test_what_a_subclass_adds_is_lost(value: object, read: object, lost: str | None) -> None:
    """If what is read back is an object with fewer fields; what is no object tells nothing."""
    for wrap in (lambda one: one, lambda one: [1, one], lambda one: {"a": (one,)}):
        found = find_loss(wrap(value), wrap(read))
        assert (found and found.problem) == lost
