"""Texts of users' objects: exact widths, names of every kind of thing, and notes of errors."""

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from jobsync.errors import Unavailable
from jobsync.safe_text import (
    format_error,
    format_places,
    safe_name,
    safe_repr,
    safe_str,
    to_exc_info,
)


def build_type(module: object, name: str = "Odd", base: type = ValueError) -> type[Any]:
    """Return a class of some module."""
    return type(name, (base,), {"__module__": module})


class Named:
    """An object with the names of a function."""

    def __init__(self, name: object, module: object) -> None:
        self.__qualname__ = name
        self.__module__ = module  # type: ignore[assignment]

    def method(self) -> None:
        """Do nothing."""


HERE = __name__


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (build_type, f"{HERE}.build_type"),
        (Named, f"{HERE}.Named"),
        (Named.method, f"{HERE}.Named.method"),
        (Named("f", "m").method, f"{HERE}.Named.method"),
        (len, "builtins.len"),
        (5, "int"),
        (None, "NoneType"),
        ("text", "str"),
        (functools.partial(len, "a"), "functools.partial"),
        (Unavailable, "jobsync.errors.Unavailable"),
        (Unavailable("s", "away"), "Unavailable"),
        (Named("some.name", "some.module"), "some.module.some.name"),
        (Named("some.name", ""), "some.name"),
        (Named("some.name", None), "some.name"),
        (Named("", "some.module"), f"{HERE}.Named"),
        (Named(5, "some.module"), f"{HERE}.Named"),
        (Named("n" * 300, "m" * 300), f"{'m' * 199}….{'n' * 199}…"),
    ],
)
def test_a_thing_is_named_by_itself_or_by_its_type(thing: object, name: str) -> None:
    """With the module where it has one; each part is cut."""
    assert safe_name(thing) == name


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "Odd"),
        ("__main__", "Odd"),
        ("jobsync", "Odd"),
        ("jobsync.stores.other", "Odd"),
        ("jobsync_more", "jobsync_more.Odd"),
        ("builtins_too", "builtins_too.Odd"),
        ("my.jobsync", "my.jobsync.Odd"),
        ("", "Odd"),
        (5, "Odd"),
    ],
)
def test_a_type_is_bare_only_in_modules_that_everybody_knows(module: object, name: str) -> None:
    """Python's, the program's and ours; not in one whose name begins like them."""
    kind = build_type(module)
    assert format_error(kind("why")) == f"{name}: why"
    assert safe_name(kind("why")) == name


@pytest.mark.parametrize("convert", [safe_str, format_error])
@pytest.mark.parametrize("limit", [1, 2, 30, 120])
@pytest.mark.parametrize("character", ["a", "é", "😀"])
def test_a_text_is_cut_only_if_it_is_too_long(
    convert: Callable[..., str], limit: int, character: str
) -> None:
    """One that just fits is whole; one more character is replaced by an ellipsis."""
    kind = build_type("builtins", "E")
    make: Callable[[str], object] = kind if convert is format_error else str
    head = "E: " if convert is format_error else ""
    for more in (0, 1, 2, 5000):
        count = max(limit - len(head), 0) + more
        text = f"{head}{character * count}" if count else "E"
        shown = convert(make(character * count), limit)
        assert shown == (text if len(text) <= limit else f"{text[: limit - 1]}…")


@pytest.mark.parametrize("make", [str, str.encode], ids=["text", "bytes"])
@pytest.mark.parametrize("limit", [5, 30, 120])
def test_the_repr_of_a_long_text_shows_the_cut(make: Callable[[str], object], limit: int) -> None:
    """And it ends with a quote if it fits."""
    quotes = len(repr(make("")))
    for count in (0, limit - quotes, limit - quotes + 1, limit, limit + 1, 100_000):
        whole = repr(make("x" * count))
        shown = safe_repr(make("x" * count), limit)
        assert shown == (whole if len(whole) <= limit else f"{whole[: limit - 1]}…")


def test_the_default_widths() -> None:
    """Of a value, of a text, and of an error."""
    for text, width in (
        (safe_repr("x" * 10_000), 120),
        (safe_repr(["x" * 10_000]), 120),
        (safe_str("x" * 10_000), 2000),
        (format_error(ValueError("x" * 10_000)), 2000),
    ):
        assert (len(text), text[-2:]) == (width, "x…")


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 1000])
def test_an_error_has_its_first_notes(count: int) -> None:
    """Ten of them, in order."""
    error = KeyError("a")
    for number in range(count):
        error.add_note(f"note {number}")
    assert format_error(error).splitlines() == [
        "KeyError: 'a'",
        *(f"note {number}" for number in range(min(count, 10))),
    ]


def test_notes_count_for_the_limit_and_may_be_anything() -> None:
    """A note is as long as the limit allows; what is no list of notes is left out."""
    error = ValueError("a")
    error.add_note("x" * 3000)
    error.add_note("last")
    assert format_error(error, 4000) == f"ValueError: a\n{'x' * 3000}\nlast"
    assert format_error(error, 100) == f"ValueError: a\n{'x' * 85}…"
    for notes, lines in (([5, None, "b\0"], ["5", "None", "b\\0"]), ("text", []), (7, [])):
        odd = ValueError()
        odd.__notes__ = notes  # type: ignore[assignment]
        assert format_error(odd).splitlines() == ["ValueError", *lines]


class Hiding(ValueError):
    """Hides its traceback."""

    @property
    def __traceback__(self) -> TracebackType | None:  # type: ignore[override]
        raise RuntimeError("hidden")


class Lying(ValueError):
    """Has the traceback of nothing."""

    __traceback__ = None


@pytest.mark.parametrize("kind", [ValueError, Hiding, Lying])
def test_an_error_that_hides_its_traceback_is_logged_with_it(kind: type[Exception]) -> None:
    """As Python itself has it, and the same for its last lines."""
    error = kind("why")
    try:
        raise error
    except ValueError:
        frames = sys.exc_info()[2]
    assert frames is not None
    info = to_exc_info(error)
    assert info is not None
    assert info[:2] == (kind, error)
    assert info[2] is not None
    assert info[2].tb_lineno == frames.tb_lineno
    assert "raise error" in format_places(error, 1)
    assert to_exc_info(kind("never raised")) is not None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("convert", [safe_str, safe_repr, safe_name])
def test_an_exit_is_not_taken_for_a_broken_method(
    kind: type[BaseException], convert: Callable[[object], str]
) -> None:
    """A signal may have arrived meanwhile, in whatever method of the object."""

    class Leaving:
        def __str__(self) -> str:
            raise kind

        __repr__ = __str__

        def __getattr__(self, name: str) -> str:
            raise kind

    with pytest.raises(kind):
        convert(Leaving())
