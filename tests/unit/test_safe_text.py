"""Users' objects become text in one guarded place, whatever their own methods do."""

import logging
import signal
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from hostile import HOSTILE, build_error, build_object, contain

from jobsync import Event, Events
from jobsync.cli.worker_log import start_logging
from jobsync.errors import Incomplete, Invalid, InvalidRecord, Misconfigured, Problem, Unavailable
from jobsync.safe_text import format_error, format_places, safe_name, safe_repr, safe_str

every_kind = pytest.mark.parametrize("kind", HOSTILE)


class Measured(Event, frozen=True, kw_only=True):
    """An event with a field of the user's."""

    name = "test:formatting:measured"
    level = logging.ERROR

    value: Any


def _check(text: str, limit: int) -> None:
    assert type(text) is str
    assert 0 < len(text) <= limit
    assert "\0" not in text
    text.encode()


@every_kind
@pytest.mark.parametrize("convert", [safe_str, safe_repr])
def test_an_object_becomes_a_short_text(kind: str, convert: Callable[..., str]) -> None:
    """It can be encoded, holds no NUL, and is as long as asked at most."""
    for limit in (1, 30, 120, 2000):
        _check(convert(build_object(kind), limit), limit)
        _check(convert(build_error(kind), limit), limit)


@every_kind
def test_an_error_becomes_a_short_text(kind: str) -> None:
    """So does an exception that hides its notes, its cause and its traceback."""
    error = build_error(kind)
    for limit in (30, 2000):
        text = format_error(error, limit)
        _check(text, limit)
        assert text.startswith("hostile.Hostile")
    assert format_places(error, 3) == ""
    _check(safe_name(error), 500)


def _fail(depth: int, source: str) -> None:
    """Raise an error that many lines of another file have passed."""
    names: dict[str, Any] = {}
    exec(compile(source, "hidden.py", "exec"), names)
    names["fail"](depth)


def test_hidden_files_take_no_place_of_those_shown() -> None:
    """The last lines are those of the user, however deep the error lies in other files."""
    source = "def fail(depth):\n    fail(depth - 1) if depth else 1 / 0\n"
    with pytest.raises(ZeroDivisionError) as raised:
        _fail(30, source)
    for most in (1, 2):
        shown = format_places(raised.value, most, {"hidden.py"})
        assert shown.count("File ") == most
        assert "test_safe_text.py" in shown
        assert "hidden.py" not in shown
    assert format_places(raised.value, 3).count("hidden.py") == 3


def test_what_failed_is_named() -> None:
    """A reader learns which class to repair."""
    assert safe_str(build_object("raises")) == "<hostile.Hostile, whose str() raised ValueError>"
    assert safe_repr(build_object("none")) == "<hostile.Hostile, whose repr() raised TypeError>"
    assert format_error(build_error("nul")) == r"hostile.Hostile: a\0b"
    assert format_error(build_error("surrogate")) == r"hostile.Hostile: a\udc80b"
    assert safe_repr("x" * 500, 10) == "'xxxxxxxx…"
    assert safe_repr(b"x" * 500, 10) == "b'xxxxxxx…"


def test_an_error_is_named_as_in_a_traceback() -> None:
    """With its module, unless it is Python's or ours, and with its notes."""
    noted = KeyError("a")
    noted.add_note("first")
    noted.add_note("second")
    assert format_error(noted) == "KeyError: 'a'\nfirst\nsecond"
    assert format_error(ValueError()) == "ValueError"
    assert format_error(sqlite3.OperationalError("x")) == "sqlite3.OperationalError: x"
    unavailable = Unavailable("a", "it is away")
    assert (
        format_error(unavailable) == "Unavailable: a is unavailable: it is away. Try again later."
    )


def test_a_signal_is_not_taken_for_a_broken_method() -> None:
    """An interrupt that arrives while a text is built ends the program."""

    class Slow:
        def __str__(self) -> str:
            signal.raise_signal(signal.SIGINT)
            return "never"

    with pytest.raises(KeyboardInterrupt):
        safe_str(Slow())


@every_kind
def test_errors_show_any_value(kind: str) -> None:
    """The message of an error does not depend on the value that it refuses."""
    value = build_object(kind)
    problem = Problem("age", value, "must be a number", "number")
    for error in (
        Invalid("age", value, "must be a number", "use a number"),
        Misconfigured("age", value, "must be a number", "use a number"),
        InvalidRecord("people", [problem]),
        Incomplete("people", conflicts=[value]),
    ):
        _check(str(error), 500)
        _check(format_error(error), 500)


@every_kind
@pytest.mark.parametrize("format", ["text", "json"])
def test_events_are_logged_with_any_value(
    kind: str, format: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each event is one record with its value; so is the failure of a listener."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    failing = build_object(kind, __call__=_raise_from(kind))
    events = Events()
    events.on("test:formatting:*", failing)
    start_logging(format, "error")
    with contain():
        events.emit(Measured(value=build_object(kind)))
    written = capfd.readouterr().err
    assert "Logging error" not in written
    assert written.count(Measured.name) == 2
    assert written.count("jobsync:handler-failed") == 1
    _check(written, 200_000)


def _raise_from(kind: str) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise build_error(kind)

    return call
