"""The arguments of tasks: what is checked before a message is stored, and what a function gets."""

import dataclasses
import datetime as dt
import decimal
import enum
import typing
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from jobsync import BlockingContext, Cancel, Context, Invalid, Snooze
from jobsync.core.codec import decode, encode
from jobsync.queue.task_arguments import TaskSignature


class Color(enum.Enum):
    """An enum."""

    RED = "red"


@dataclasses.dataclass
class Address:
    """A dataclass in which an enum is."""

    street: str
    color: Color = Color.RED


class Mail(typing.TypedDict):
    """A dict with known keys."""

    to: str
    copies: typing.NotRequired[list[str]]


class Point(msgspec.Struct):
    """A struct."""

    x: int
    y: float = 0.5


class Event(msgspec.Struct):
    """A struct with data of any type."""

    at: dt.datetime
    data: Any = None
    tags: set[str] = set()


@dataclasses.dataclass
class Office(Address):
    """A dataclass with one field more."""

    floor: int = 3


class Point3(Point):
    """A struct with one field more."""

    z: int = 3


class Model:
    """Like a model of pydantic, which is known by these methods."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and other.size == self.size

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def model_validate(cls, value: Any) -> "Model":
        """Return a model from JSON."""
        if value["size"] == "odd":
            raise KeyError("odd")
        if not isinstance(value["size"], int):
            raise ValueError("size must be a number")  # noqa: TRY004 - as pydantic does
        return cls(value["size"])

    def model_dump(self, *, mode: str, by_alias: bool) -> dict[str, Any]:
        """Return it as JSON."""
        assert (mode, by_alias) == ("json", True)
        return {"size": self.size}


NOON = dt.datetime(2027, 1, 31, 12, tzinfo=dt.UTC)
OLD_NOON = dt.datetime(1880, 1, 31, 12, tzinfo=dt.timezone(dt.timedelta(minutes=53, seconds=28)))
VALUES: list[tuple[Any, Any]] = [
    (str, "a"),
    (int | None, None),
    (float, 3),
    (list[int], [1, 2]),
    (tuple[int, str], (1, "b")),
    (dict[int, bool], {1: True}),
    (set[str], {"a"}),
    (bytes, b"\x00\xff"),
    (dt.datetime, NOON),
    (dt.datetime, OLD_NOON.replace(tzinfo=dt.timezone(dt.timedelta(minutes=53)))),
    (dt.date, NOON.date()),
    (dt.timedelta, dt.timedelta(seconds=90)),
    (uuid.UUID, uuid.UUID(int=5)),
    (decimal.Decimal, decimal.Decimal("0.10")),
    (Color, Color.RED),
    (Address, Address("x")),
    (list[Address], [Address("x"), Address("y", Color.RED)]),
    (Mail, {"to": "a", "copies": ["b"]}),
    (Point, Point(1)),
    (Model, Model(4)),
    (dict[str, Model], {"a": Model(4)}),
    (typing.Literal["a", "b"], "b"),
    (Any, {"a": [1, None]}),
    (dict[dt.date, Any], {NOON.date(): {"a": [1]}}),
    (set[bytes], {b"a", b"b"}),
    (Event, Event(NOON, {"a": 1}, {"a", "b"})),
]


def build(kind: Any) -> TaskSignature:
    """Return the signature of a function that returns its argument, of this type."""

    def give(value: Any) -> Any:
        return value

    give.__annotations__ = {"value": kind, "return": kind}
    return TaskSignature("module.give", give)


@pytest.mark.parametrize(("kind", "value"), VALUES, ids=[str(kind) for kind, _ in VALUES])
def test_a_value_arrives_and_returns_as_its_annotation_says(kind: Any, value: Any) -> None:
    """Through JSON, as it is stored."""
    signature = build(kind)
    stored = decode(encode(dict(signature.encode(value))), "message")
    signature.check(stored)
    arrived = signature.call(stored)
    assert (arrived, type(arrived)) == (value, type(value) if kind is not float else float)
    result = decode(encode(signature.encode_result(arrived)), "result")
    assert signature.decode_result(result) == value


async def send(
    to: str, address: Address, context: Context, *, at: dt.datetime | None = None, note: Any = ""
) -> str:
    """A task's function."""
    return f"{to} {address.street} {context} {at} {note}"


SEND = TaskSignature("mail.send", send)
UNTYPED = TaskSignature("mail.ask", lambda context: context)
UNTYPED_SHORT = TaskSignature("mail.ask", lambda to, ctx: (to, ctx))


def _named_alike(context: str, ctx: int) -> None: ...


NAMED_ALIKE = TaskSignature("mail.text", _named_alike)
WRONG: list[tuple[Callable[[], Any], str]] = [
    (UNTYPED.encode, "^context is missing: mail.ask needs it. Annotate it .*: context: Context"),
    (lambda: UNTYPED_SHORT.encode("a"), "^ctx is missing: .* Annotate it .*: ctx: Context"),
    (lambda: UNTYPED_SHORT.encode(ctx="a"), r"^to is missing: .* Call it as ask\(to, ctx\)"),
    (NAMED_ALIKE.encode, r"^context is missing: .* Call it as text\(context: str, "),
    (lambda: NAMED_ALIKE.encode("a"), r"^ctx is missing: .* Call it as text\(context: str, "),
    (lambda: SEND.encode_some({"context": 1}), "^context is not a parameter of mail.send"),
    (lambda: SEND.encode_some({"to": "a", "too": 1}), "^too is not a parameter .* Did you mean to"),
    (lambda: SEND.encode_some({"note": object()}), "^note cannot be stored"),
    (SEND.encode, r"^to is missing: mail.send needs it. Call it as send\(to: str, "),
    (lambda: SEND.encode("a"), "^address is missing: mail.send needs it"),
    (
        lambda: SEND.encode("a", adress=1),
        "adress is not a parameter of mail.send .got 1.. Did you ",
    ),
    (lambda: SEND.encode("a", context=1), "^context is not a parameter of mail.send"),
    (lambda: SEND.encode("a", Address("b"), 3), "^arguments do not fit mail.send: too many"),
    (lambda: SEND.encode(5, Address("b")), "^to must be `str` .got 5.. Pass what send"),
    (lambda: SEND.encode("a", Address(5)), "^address.street must be `str`"),  # type: ignore[arg-type]
    (lambda: SEND.encode("a", Address("b"), at="x"), "^at is wrong: Invalid RFC3339"),
    (lambda: SEND.encode("a", Address("b"), at=object()), "^at cannot be stored: .*object"),
    (lambda: SEND.encode("a", Address("b"), note=NOON), "^note must be JSON, and is datetime"),
    (lambda: SEND.check({"to": "a"}), "^address is missing"),
    (lambda: SEND.check({"to": "a", "address": {}}), "address.street is missing"),
    (lambda: SEND.check({"to": "a", "too": 1}), "^too is not a parameter .* Did you mean to"),
    (lambda: SEND.call({"to": 1, "address": {"street": "b"}}), "^to must be `str` .got 1."),
    (
        lambda: SEND.call({"to": "a", "address": {"street": "b"}, "x": 1}),
        "^x is not a parameter of mail.send .got 1.",
    ),
    (lambda: build(Model).encode(Model("x")), "size must be a number"),  # type: ignore[arg-type]
    (lambda: build(Model).encode({"size": "odd"}), "^value cannot be stored: KeyError: 'odd' .got"),
    (lambda: build(str).encode(b"a"), "^value must be `str` .got b'a'."),
    (lambda: build(str).encode(NOON), "^value must be `str` .got datetime"),
    (lambda: build(dict[str, int]).encode({1: 2, "1": 3}), "^value has a key that must be `str` "),
    (lambda: build(dict).encode({"a": [b"b"]}), "^value has a value or a key that is not JSON"),
    (lambda: build(dict[str, Any]).encode({"a": {1: 2}}), "^value has a value or a key that is"),
    (lambda: build(Event).encode(Event(NOON, NOON)), "^value has a value or a key that is not"),
    (lambda: build(dt.datetime).encode(OLD_NOON), "^value has the UTC offset 0:53:28, which would"),
    (lambda: build(dt.time).encode(OLD_NOON.timetz()), "^value has the UTC offset 0:53:28"),
    (lambda: build(Event).encode(Event(OLD_NOON)), "^value has the UTC offset .* Convert it by"),
    (
        lambda: build(Address).encode(Office("x")),
        "^value is .*Office, and would be read back as .*Address without floor .*Annotate .*Office",
    ),
    (lambda: build(dict[str, list[Point]]).encode({"a": [Point3(1)]}), "as .*Point without z"),
    (lambda: build(int).decode_result("x"), "^result is not what give"),
]


@pytest.mark.parametrize(("call", "problem"), WRONG, ids=[text for _, text in WRONG])
def test_wrong_arguments_are_refused_with_their_name(call: Callable[[], Any], problem: str) -> None:
    """Before anything is stored, and by a worker whose function takes something else."""
    with pytest.raises(Invalid, match=problem):
        call()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (list[dt.datetime], [NOON, OLD_NOON]),
        (tuple[dt.datetime, ...], (NOON, OLD_NOON)),
        (set[dt.datetime], {NOON, OLD_NOON}),
        (frozenset[dt.time], frozenset({OLD_NOON.timetz()})),
        (dict[str, dt.datetime], {"a": NOON, "b": OLD_NOON}),
        (list[Event], [Event(NOON), Event(OLD_NOON)]),
        (dict[str, list[Event]], {"a": [Event(OLD_NOON)]}),
    ],
    ids=repr,
)
def test_a_time_that_would_lose_something_is_found_anywhere(kind: Any, value: Any) -> None:
    """In whatever it is stored."""
    with pytest.raises(Invalid, match=r"^value has the UTC offset 0:53:28"):
        build(kind).encode(value)


@pytest.mark.parametrize(
    "value",
    [
        *(b"a", bytearray(b"a"), NOON, NOON.date(), NOON.time(), dt.timedelta(seconds=1)),
        *(uuid.UUID(int=1), decimal.Decimal(1)),
    ],
    ids=repr,
)
def test_what_is_text_in_json_needs_its_type(value: Any) -> None:
    """Else it would be read back as a text; also within other values, and as a key."""
    for kind, given in ((Any, value), (list, [1, value]), (dict, {"a": {"b": value}})):
        with pytest.raises(Invalid, match=r"^value .*JSON"):
            build(kind).encode(given)
    assert build(type(value)).call(build(type(value)).encode(value)) == value


def test_a_result_that_would_lose_something_is_not_kept() -> None:
    """Who stores it reports why; it is not stored as another time."""
    for kind in (dt.datetime, Any):
        assert build(kind).encode_result(OLD_NOON) is OLD_NOON
    assert build(list[Event]).encode_result([Event(NOON)]) == [
        {"at": "2027-01-31T12:00:00Z", "data": None, "tags": []}
    ]


def test_a_subclass_without_fields_of_its_own_is_stored() -> None:
    """It is read back as the type that is annotated, and nothing is lost."""

    class Home(Address):
        """Another name."""

    stored = build(Address).encode(Home("x"))
    assert build(Address).call(stored) == Address("x")


def test_a_long_value_is_shortened_in_an_error() -> None:
    """And so is a long signature."""
    with pytest.raises(Invalid) as error:
        SEND.encode("a", "secret" * 1000)
    assert len(str(error.value)) < 600


async def test_only_what_was_passed_is_stored() -> None:
    """So that the defaults of the worker's code count; its context is not part of a message."""
    stored = SEND.encode(address=Address("b"), to="a")
    assert stored == {"to": "a", "address": {"street": "b", "color": "red"}}
    assert SEND.takes_context
    assert await SEND.call(stored, "ctx") == "a b ctx None "


def test_parameters_by_position_only_are_passed_by_position() -> None:
    """In their order, also beside a context."""

    def run(a: int, /, context: BlockingContext, b: int = 2) -> Any:
        return a, b, context

    signature = TaskSignature("run", run)
    assert signature.encode(1) == {"a": 1}
    signature.check({"a": 1})
    assert signature.call({"a": 1}, "ctx") == (1, 2, "ctx")
    with pytest.raises(Invalid, match=r"^c is not a parameter of run"):
        signature.check({"a": 1, "c": 3})


def test_a_parameter_by_position_only_that_was_not_passed_keeps_its_place() -> None:
    """Those after it get what was passed for them."""

    def run(a: int = 1, b: int = 2, c: int = 3, /) -> Any:
        return a, b, c

    signature = TaskSignature("run", run)
    assert signature.call({"b": 5}) == (1, 5, 3)
    assert signature.call({}) == (1, 2, 3)


def test_verdicts_are_not_results() -> None:
    """A function may be annotated to return them beside its result, or alone."""

    def run() -> int | Snooze | Cancel:
        return Snooze(1)

    def stop() -> Cancel:
        return Cancel()

    assert TaskSignature("run", run).decode_result(3) == 3
    assert TaskSignature("stop", stop).decode_result(None) is None


def _positional(*values: int) -> None: ...
def _keywords(**values: int) -> None: ...
def _anything(value: object) -> None: ...
def _function(value: Callable[[], int]) -> None: ...
def _nested(value: dict[str, list[Context]]) -> None: ...
def _unions(value: Address | Point | Model) -> None: ...
def _unknown(value: "Unknown") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def _two(a: Context, b: BlockingContext) -> None: ...
def _underscores(a: int, __b: int) -> None: ...
def _gives_back() -> Context: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (_positional, r"\*values: int of .*\._positional cannot be checked"),
        (_keywords, r"\*\*values: int of .*\._keywords cannot be checked"),
        (_anything, "^value has an annotation that cannot be stored: builtins.object"),
        (_function, "^value has an annotation that cannot be stored"),
        (_nested, "^value has an annotation that cannot be stored: .*Context"),
        (_unions, "^value has an annotation that cannot be stored"),
        (_unknown, "annotations that cannot be read: NameError"),
        (_two, "^b is the second parameter for the context"),
        (_underscores, "^__b must not begin with two underscores"),
        (_gives_back, "^return has an annotation that cannot be stored"),
    ],
)
def test_what_cannot_be_stored_is_refused_when_it_is_defined(
    bad: Callable[..., Any], problem: str
) -> None:
    """With the name of the parameter."""
    with pytest.raises(Invalid, match=problem):
        TaskSignature("bad", bad)
