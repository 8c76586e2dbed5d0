"""Hypothesis strategies for schemas, and for records that often conform to them."""

from datetime import date, datetime
from typing import Any

import msgspec
from hypothesis import strategies as st

from jobsync.core.schema import KINDS, SIZED, TEXTS, Field, FieldKind, Fields, conform

__all__ = ["fields", "records"]

names = st.sampled_from(["id2", "name", "age", "ok", "tags", "more", "ünïcode", "with space"])
words = st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=6)
numbers = st.one_of(st.integers(-1000, 1000), st.floats(-1000, 1000, width=16))
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=5,
)

VALUES: dict[FieldKind, st.SearchStrategy[Any]] = {
    "string": words,
    "number": numbers,
    "integer": st.integers(-1000, 1000),
    "boolean": st.booleans(),
    "json": anything,
    "array": st.lists(anything, max_size=3),
    "object": st.dictionaries(words, anything, max_size=3),
    "email": st.sampled_from(["ann@example.org", "b@c.d"]),
    "url": st.sampled_from(["https://example.org/?q=1", "s3://bucket"]),
    "date": st.dates(date(1000, 1, 1)).map(date.isoformat),
    "datetime": st.datetimes(datetime(1000, 1, 1)).map(datetime.isoformat),  # noqa: DTZ001 - any
    "uuid": st.uuids().map(str),
}


@st.composite
def field(draw: st.DrawFn, depth: int = 2) -> Field:
    """Draw the rules of one field."""
    kind = draw(st.sampled_from(KINDS))
    rules: dict[str, Any] = {"required": draw(st.booleans())}
    if kind in SIZED and draw(st.booleans()):
        low, high = sorted(draw(st.tuples(st.integers(-9, 9), st.integers(-9, 9))))
        rules |= {"least": low} if draw(st.booleans()) else {}
        rules |= {"most": high} if draw(st.booleans()) else {}
    if kind in {*TEXTS, "number", "integer"} and draw(st.integers(0, 3)) == 0:
        choices = draw(st.lists(VALUES[kind].filter(lambda v: v != ""), min_size=1, max_size=3))
        rules["choices"] = tuple(choices)
    if kind == "array":
        rules["items"] = draw(st.none() | st.sampled_from(KINDS))
    if kind == "object" and depth and draw(st.booleans()):
        rules["fields"] = draw(fields(depth - 1))
    made = Field(kind=kind, **rules)
    default = draw(VALUES[kind])
    _, problems = conform({"x": made}, {"x": default})
    # A default that contains the separator of rules cannot be written.
    writable = "|" not in str(default) and default is not None
    if not problems and writable and draw(st.booleans()):
        made = msgspec.structs.replace(made, default=default)
    return made


def fields(depth: int = 2) -> st.SearchStrategy[Fields]:
    """Draw a few fields."""
    return st.dictionaries(names, field(depth), max_size=4)


@st.composite
def records(draw: st.DrawFn, described: Fields) -> dict[str, Any]:
    """Draw a record, which often conforms."""
    record = {}
    for name, one in described.items():
        if not draw(st.booleans()) and not one.required:
            continue
        if one.choices:
            record[name] = draw(st.sampled_from(one.choices))
        elif one.fields is not None:
            record[name] = draw(records(one.fields))
        elif one.items is not None:
            record[name] = draw(st.lists(VALUES[one.items], max_size=4))
        else:
            record[name] = draw(
                st.none() | VALUES[one.kind] if not one.required else VALUES[one.kind]
            )
    return record
