"""Texts of users' objects, which may do anything: the only place that turns them into text.

The object's own methods may raise anything, return anything, or return too much. The text that
comes back is short, and can be encoded, stored and printed.
"""

import traceback
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "ExcInfo",
    "format_error",
    "format_places",
    "safe_name",
    "safe_repr",
    "safe_str",
    "to_exc_info",
]

ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None]

_MAX_VALUE_WIDTH = 120
_MAX_NAME_WIDTH = 200
_MAX_ERROR_LENGTH = 2000
_MAX_NOTES = 10
_BARE_MODULES = ("builtins.", "__main__.", f"{__name__.partition('.')[0]}.")
"""Types of Python, of the program and of this package are named without their module."""


def safe_str(value: object, limit: int = _MAX_ERROR_LENGTH) -> str:
    """Return `str(value)`, cut to `limit` characters; a substitute if it raises."""
    return _convert(str, value, limit)


def safe_repr(value: object, limit: int = _MAX_VALUE_WIDTH) -> str:
    """Return `repr(value)`, cut to `limit` characters; a substitute if it raises."""
    # Cut before: the text may be very long. It stays too long, so that the result shows the cut.
    if type(value) is str or type(value) is bytes:
        value = value[:limit]
    return _convert(repr, value, limit)


def safe_name(thing: object) -> str:
    """Return the module and name of a function or class, or of its type if it has none."""
    name = _read_text(getattr, thing, "__qualname__")
    if not name:
        return _name_type(type(thing))
    module = _read_text(getattr, thing, "__module__")
    return f"{module}.{name}" if module else name


def format_error(error: BaseException, limit: int = _MAX_ERROR_LENGTH) -> str:
    """Return an exception as "TypeName: text", cut to `limit` characters, and its notes.

    The type has its module, as in a traceback; a type of jobsync has none.
    """
    name, text = _name_type(type(error)), safe_str(error, limit)
    first = f"{name}: {text}" if text else name
    return _clean("\n".join((first, *_read_notes(error, limit))), limit)


def format_places(error: BaseException, most: int, hidden: Collection[str] = ()) -> str:
    """Return the last lines of code that an exception passed, but none of the hidden files."""
    places = _guard(_format_places, error, most, hidden)
    return _clean(places, _MAX_ERROR_LENGTH) if type(places) is str else ""


def _format_places(error: BaseException, most: int, hidden: Collection[str]) -> str:
    frames = traceback.extract_tb(_read_traceback(error))
    shown = [frame for frame in frames if frame.filename not in hidden]
    return "".join(traceback.format_list(shown[-most:])).rstrip()


def to_exc_info(error: BaseException) -> ExcInfo | None:
    """Return an exception as a log record carries it; None if it cannot be printed."""
    frames = _read_traceback(error)
    printed = _guard(traceback.format_exception, type(error), error, frames)
    return (type(error), error, frames) if type(printed) is list else None


def _read_traceback(error: BaseException) -> TracebackType | None:
    """Return an exception's traceback, which a derived class may hide."""
    found: TracebackType | None = vars(BaseException)["__traceback__"].__get__(error)
    return found


def _read_notes(error: BaseException, limit: int) -> Iterator[str]:
    notes = _guard(getattr, error, "__notes__", None)
    if type(notes) is list:
        for note in notes[:_MAX_NOTES]:
            yield safe_str(note, limit)


def _name_type(kind: type) -> str:
    """Return the module and name of a type, which its metaclass cannot change."""
    name = _read_text(vars(type)["__qualname__"].__get__, kind)
    module = _read_text(vars(type)["__module__"].__get__, kind)
    is_bare = f"{module}.".startswith(_BARE_MODULES)
    return name if is_bare or not module else f"{module}.{name}"


def _read_text(read: Callable[..., Any], *arguments: object) -> str:
    """Return a text that is read from a user's object; empty if there is none."""
    text = _guard(read, *arguments)
    return _clean(text, _MAX_NAME_WIDTH) if issubclass(type(text), str) else ""


def _convert(convert: Callable[[object], str], value: object, limit: int) -> str:
    text = _guard(convert, value)
    if issubclass(type(text), str):
        return _clean(text, limit)
    name = _name_type(type(value))
    return _clean(f"<{name}, whose {convert.__name__}() raised {text.name}>", limit)


class _Raised(NamedTuple):
    """The type of the exception that a call has raised."""

    name: str


def _guard(call: Callable[..., Any], *arguments: object) -> Any:
    """Return the result of a call into a user's object, or which error it raised."""
    try:
        return call(*arguments)
    except (KeyboardInterrupt, SystemExit):
        # A signal may have arrived meanwhile: the program shall end.
        raise
    except BaseException as error:  # noqa: BLE001 - the object may raise anything
        return _Raised(_name_type(type(error)))


def _clean(text: str, limit: int) -> str:
    """Return a text cut to a limit, without characters that not everything can carry."""
    # Through the base class: a derived one may do anything.
    text = str.__getitem__(text, slice(limit + 1)).replace("\0", "\\0")
    if not text.isascii():
        text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
