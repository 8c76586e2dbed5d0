"""Types of records and messages: the schema of each, and what is refused, with its name."""

import dataclasses
import datetime as dt
import decimal
import enum
import typing
import uuid
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

from jobsync import Corrupt, Invalid
from jobsync.core.attributes import render
from jobsync.core.schema import conform
from jobsync.database.record_types import RecordType


class Color(enum.Enum):
    """An enum."""

    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    """An enum of numbers."""

    SMALL = 1


class Odd(enum.Enum):
    """An enum that the text of a schema cannot have."""

    COMMA = "a,b"


class Address(msgspec.Struct):
    """A part of a record."""

    street: str
    number: int | None = None


class Wide(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """A struct with a field of each kind."""

    name: Annotated[str, msgspec.Meta(min_length=2, max_length=9)]
    at: dt.datetime
    day: dt.date
    key: uuid.UUID
    home: Address
    color: Color
    homes: list[Address]
    tags: set[str]
    gaps: list[int | None]
    limits: dict[str, int]
    is_on: bool
    share: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.5
    size: Size = Size.SMALL
    odd: Odd = Odd.COMMA
    price: decimal.Decimal | None = None
    choice: Literal["x", "y"] | None = None
    either: int | str = 3
    whatever: Any = None
    child: "Wide | None" = None
    id: str | None = None
    version: str = msgspec.field(name="_version", default="")


WIDE = Wide(
    name="ann",
    at=dt.datetime(2027, 1, 31, 12, 0, 0, 5, tzinfo=dt.UTC),
    day=dt.date(2027, 1, 31),
    key=uuid.UUID(int=7),
    home=Address("here"),
    color=Color.RED,
    homes=[Address("here", 3)],
    tags={"a"},
    gaps=[1, None],
    limits={"a": 1},
    is_on=True,
    price=decimal.Decimal("1.50"),
)


OLD = dt.datetime(1880, 1, 1, tzinfo=dt.timezone(dt.timedelta(minutes=53, seconds=28)))


@dataclasses.dataclass
class Order:
    """A dataclass."""

    number: int
    note: str = ""


@dataclasses.dataclass
class Gift(Order):
    """A dataclass with one field more."""

    card: str = ""


class Flat(Address):
    """A struct with one field more."""

    floor: int = 3


class Visit(typing.TypedDict):
    """A dict with known keys."""

    page: str
    seconds: typing.NotRequired[float]


class Mail(pydantic.BaseModel):
    """A model."""

    to: str
    copies: list[str] = []
    sent_at: dt.datetime | None = pydantic.Field(None, alias="sentAt")
    before: "Mail | None" = None


class Letter(Mail):
    """A model with one field more."""

    stamp: str = ""


class Event(msgspec.Struct, tag_field="kind", tag="event"):
    """A struct with a tag."""

    text: str


class Scores(msgspec.Struct):
    """A struct with keys that are numbers."""

    places: dict[int, str]


class Marked(msgspec.Struct):
    """Choices that the text of a schema cannot have."""

    last: Literal["a ", "b"]
    first: Literal[" a", "b"]
    comma: Literal["a,b", "b"]
    bar: Literal["a|b", "b"]
    empty: Literal["", "b"]


class Bounded(msgspec.Struct):
    """Bounds of each kind; the schema has no exclusive ones."""

    above: Annotated[int, msgspec.Meta(gt=0)]
    below: Annotated[int, msgspec.Meta(lt=9)]
    between: Annotated[float, msgspec.Meta(gt=-1, le=1)]
    from_to: Annotated[int, msgspec.Meta(ge=1, le=2)]
    some: Annotated[list[str], msgspec.Meta(min_length=1, max_length=3)]
    many: Annotated[tuple[int, ...], msgspec.Meta(min_length=2)]
    short: Annotated[str, msgspec.Meta(max_length=5)]


class Loose(msgspec.Struct):
    """Fields that must be passed, and may be null; choices of several kinds."""

    number: int | None
    home: Address | None
    tags: list[str] | None
    choice: Literal["x", None]  # noqa: PYI061 - another way to say it
    size: Literal[1, 2, None]  # noqa: PYI061 - likewise
    mixed: Literal[1, "x"]
    note: str | None


SCHEMAS: list[tuple[type, Any, dict[str, Any]]] = [
    (
        Wide,
        WIDE,
        {
            "name": "string|required|min:2|max:9",
            "at": "datetime|required",
            "day": "date|required",
            "key": "uuid|required",
            "home": {
                "$$type": "object|required",
                "street": "string|required",
                "number": "integer",
            },
            "color": "string|required|enum:red,blue",
            "homes": "array|required|items:object",
            "tags": "array|required|items:string",
            "gaps": "array|required",
            "limits": "object|required",
            "isOn": "boolean|required",
            "share": "number|min:0|max:1",
            "size": "integer|enum:1",
            "odd": "string",
            "price": "string",
            "choice": "string|enum:x,y",
            "either": "json",
            "whatever": "json",
            "child": "object",
            "id": "string",
        },
    ),
    (Order, Order(3), {"number": "integer|required", "note": "string"}),
    (Visit, {"page": "/"}, {"page": "string|required", "seconds": "number"}),
    (
        Mail,
        Mail(to="a", sentAt=dt.datetime(2027, 1, 31, tzinfo=dt.UTC)),
        {
            "to": "string|required",
            "copies": "array|items:string",
            "sentAt": "datetime",
            "before": "object",
        },
    ),
    (Event, Event("a"), {"kind": "json", "text": "string|required"}),
    (Scores, Scores({1: "a", 20: "b"}), {"places": "object|required"}),
    (
        Marked,
        Marked("a ", " a", "a,b", "a|b", ""),
        dict.fromkeys(("last", "first", "comma", "bar", "empty"), "string|required"),
    ),
    (
        Bounded,
        Bounded(1, 8, 1.0, 2, ["a"], (1, 2), "abcde"),
        {
            "above": "integer|required|min:0",
            "below": "integer|required|max:9",
            "between": "number|required|min:-1|max:1",
            "from_to": "integer|required|min:1|max:2",
            "some": "array|required|items:string|min:1|max:3",
            "many": "array|required|items:integer|min:2",
            "short": "string|required|max:5",
        },
    ),
    *(
        (
            Loose,
            value,
            {
                "number": "integer",
                "home": {"street": "string|required", "number": "integer"},
                "tags": "array|items:string",
                "choice": "string|enum:x",
                "size": "integer|enum:1,2",
                "mixed": "json",
                "note": "string",
            },
        )
        for value in (
            Loose(None, None, None, None, None, "x", None),
            Loose(1, Address("here"), ["a"], "x", 2, 1, "b"),
        )
    ),
]


@pytest.mark.parametrize(("kind", "value", "schema"), SCHEMAS, ids=lambda each: str(each)[:20])
def test_a_type_has_a_schema_that_accepts_its_objects(
    kind: type[Any], value: Any, schema: dict[str, Any]
) -> None:
    """What an object is written as passes the schema, and is read as the same object."""
    record_type = RecordType("type", kind)
    assert render(record_type.fields) == schema
    stored = record_type.encode(value)
    written = {name: each for name, each in stored.items() if not name.startswith("_")}
    assert conform(record_type.fields, written)[1] == []
    added = {"id": "x", "_version": "", "_created_at": 1.0, "_updated_at": 2.0}
    read = record_type.decode({**stored, **added})
    expected = msgspec.structs.replace(value, id="x") if isinstance(value, Wide) else value
    assert read == expected
    assert record_type.encode(record_type.encode(value)) == stored


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        (Order, 3, r"data must be Order or a dict \(got 3\). Write Order\(...\)"),
        (Order, Address("here"), "data must be Order or a dict"),
        (Order, {"numbr": 3}, r"numbr is not a field of Order \(got 3\). Did you mean number\?"),
        (Order, {"zzz": 3}, "zzz is not a field of Order .*Use note, number"),
        (Order, {}, "number is missing"),
        (Order, {"number": "x"}, r"number must be `int` \(got 'x'\). Pass what Order has"),
        (Order, Order("x"), r"number must be `int` \(got 'x'\)"),  # type: ignore[arg-type]
        (Order, {"number": object()}, "number cannot be stored"),
        (Order, Order(object()), "Order cannot be stored"),  # type: ignore[arg-type]
        (Visit, {"page": 3}, "page must be `str`"),
        (Mail, {"to": 3}, r"to is wrong: Input should be a valid string \(got 3\)"),
        (Mail, {"to": "a", "before": {"to": 3}}, "before.to is wrong: Input should be"),
        (Mail, {"too": "a"}, "too is not a field of Mail .*Did you mean to"),
        (Wide, {**msgspec.to_builtins(WIDE), "home": {}}, "home.street is missing"),
        (Order, Order(1, b"a"), r"note must be `str` \(got b'a'\)"),  # type: ignore[arg-type]
        (Order, {"note": b"a"}, r"note would be read back as text \(got b'a'\). Convert it"),
        (Wide, msgspec.structs.replace(WIDE, whatever=b"a"), "has a field that would be read back"),
        (Wide, {"whatever": [dt.date(2027, 1, 1)]}, "whatever would be read back as text"),
        (Loose, {"note": dt.date(2027, 1, 1)}, "note would be read back as text"),
        (Wide, msgspec.structs.replace(WIDE, limits={1: 2}), "limits has a key that must be `str`"),
        (Wide, msgspec.structs.replace(WIDE, at=OLD), "Wide has the UTC offset 0:53:28, which"),
        (Wide, {"at": OLD}, "Wide has the UTC offset 0:53:28, which would be stored without"),
        (Mail, Mail(to="a", sentAt=OLD), "Mail has the UTC offset 0:53:28"),
        (Order, Gift(1), "Order is .*Gift, and would be read back as .*Order without card"),
        (Wide, msgspec.structs.replace(WIDE, homes=[Flat("a")]), "is .*Flat, .* without floor"),
        (Mail, Letter(to="a", sentAt=None), "is .*Letter, .* without stamp"),
    ],
)
def test_what_is_not_of_the_type_is_refused(kind: type[Any], value: Any, reason: str) -> None:
    """The error names the field, its value and the fix."""
    with pytest.raises(Invalid, match=reason):
        RecordType("payload", kind).encode_checked(value)


@pytest.mark.parametrize("value", [msgspec.structs.replace(WIDE, id=None), {"id": None}])
def test_an_id_of_none_is_left_out(value: Any) -> None:
    """It gets one when it is stored; in a change, the id stays."""
    assert "id" not in RecordType("type", Wide).encode(value)


def test_a_model_that_allows_more_fields_has_them() -> None:
    """Its own configuration decides."""

    class Open(pydantic.BaseModel, extra="allow"):
        to: str

    record_type = RecordType("type", Open)
    stored = record_type.encode_checked({"to": "a", "more": 3})
    assert stored == {"to": "a", "more": 3}
    assert record_type.decode(stored).model_dump() == stored


def test_what_is_stored_and_is_not_of_the_type_cannot_be_read() -> None:
    """The error has the key and the reason."""
    with pytest.raises(Corrupt, match=r"a/b .*it is not of type Order: number is missing"):
        RecordType("type", Order).read("a/b", {"id": "x"})


class Row(msgspec.Struct, array_like=True):
    """A struct that is written as a list."""

    name: str


class Numbered(msgspec.Struct):
    """A record whose id is not text."""

    id: int


class Hidden(msgspec.Struct):
    """A record with a name that the library reserves."""

    name: str = msgspec.field(name="_name")


class Opaque(msgspec.Struct):
    """A record that cannot be stored."""

    thing: complex


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (int, "is not a type whose objects have named fields"),
        (dict[str, int], "is not a type whose objects have named fields"),
        (Order | int, "is not a type whose objects have named fields"),
        (Row, "is not a type whose objects have named fields"),
        ("Order", "cannot be stored"),
        (Opaque, "cannot be stored"),
        (Numbered, "id must be text"),
        (Hidden, "begin with '_'"),
    ],
)
def test_other_types_are_refused(kind: Any, reason: str) -> None:
    """When the queue or the resource is made, before there is a message or a record."""
    with pytest.raises(Invalid, match=reason):
        RecordType("payload", kind)
