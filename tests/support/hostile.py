"""Objects and exceptions whose own methods raise, return nonsense, or return far too much."""

import asyncio
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

__all__ = ["HOSTILE", "HostileText", "build_error", "build_object", "contain"]

_HUGE = 4_000_000


class HostileText(str):
    """A text whose methods raise."""

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise ZeroDivisionError

    __getitem__ = __len__ = __format__ = __add__ = __iter__ = __eq__ = __hash__ = _refuse
    encode = replace = isascii = startswith = strip = _refuse  # type: ignore[assignment]

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return self


def _raise(error: type[BaseException], *arguments: str) -> Callable[[object], str]:
    def method(_: object, *__: object) -> str:
        # A new one each time: an error keeps the frames that it has passed, and what they have.
        raise error(*arguments)

    return method


def _return(result: Any) -> Callable[[object], str]:
    def method(_: object, *__: object) -> Any:
        return result

    return method


def _recurse(self: object, *_: object) -> str:
    return f"{self!s}{self!r}"


HOSTILE: dict[str, Callable[[object], str]] = {
    "raises": _raise(ValueError, "not today"),
    "raises-broken": _raise(type("Broken", (Exception,), {"__str__": _recurse})),
    "raises-stop": _raise(StopIteration),
    "raises-exit": _raise(GeneratorExit),
    "raises-cancelled": _raise(asyncio.CancelledError),
    "raises-base": _raise(BaseException, "everything"),
    "recurses": _recurse,
    "none": _return(None),
    "bytes": _return(b"text"),
    "surrogate": _return("a\udc80b"),
    "nul": _return("a\0b"),
    "huge": _return("x" * _HUGE),
    "huge-surrogates": _return("\udc80\0" * _HUGE),
    "hostile-text": _return(HostileText("text")),
}
"""What `__str__`, `__repr__` and `__format__` do, by name."""


def _raise_always(*_: object) -> NoReturn:
    raise ArithmeticError("a property")


class _HostileType(type):
    """A class whose own name cannot be read."""

    __name__ = property(_raise_always)


_READ = property(_raise_always)


def _build_attributes(method: Callable[[object], str], *, hides_class: bool) -> dict[str, Any]:
    attributes: dict[str, Any] = dict.fromkeys(("__str__", "__repr__", "__format__"), method)
    attributes |= {"__bool__": _raise_always, "__len__": _raise_always, "__qualname__": "Hostile"}
    return attributes | ({"__class__": _READ} if hides_class else {})


def build_object(name: str, *, hides_class: bool = True, **more: Any) -> Any:
    """Return an object with hostile methods, and `more` of them."""
    attributes = _build_attributes(HOSTILE[name], hides_class=hides_class)
    return _HostileType("Hostile", (), attributes | more)()


def build_error(
    name: str, *, base: type[BaseException] = Exception, hides_class: bool = True
) -> Any:
    """Return an exception with hostile methods and attributes."""
    attributes = _build_attributes(HOSTILE[name], hides_class=hides_class)
    hidden = ("__notes__", "__cause__", "__context__", "__traceback__", "__suppress_context__")
    return _HostileType("Hostile", (base,), attributes | dict.fromkeys(hidden, _READ))("argument")


@contextmanager
def contain() -> Iterator[None]:
    """Fail a test if something escapes from its block: pytest cannot print such exceptions."""
    try:
        yield
    except AssertionError:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is
        frames = vars(BaseException)["__traceback__"].__get__(error)
        places = "".join(traceback.format_tb(frames))
        raise AssertionError(f"{type.__repr__(type(error))} escaped:\n{places}") from None
