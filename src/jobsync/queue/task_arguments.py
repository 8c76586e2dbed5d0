"""The arguments of a task's function: checked when a message is enqueued, decoded by a worker.

A message has the arguments by name, as JSON. Annotations say how a value is written and read:
whatever msgspec knows (dataclasses, `TypedDict`, `Struct`, dates, `UUID`, `Decimal`, enums), and
models of pydantic, which is not imported here. An argument that was not passed is not stored, so
that the default of the code that handles the message counts.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NotRequired, TypedDict

import msgspec

from jobsync.core.codec import Json, check_json
from jobsync.core.messages import Cancel, Snooze
from jobsync.errors import Invalid, closest_name
from jobsync.queue.context import BlockingContext, Context
from jobsync.safe_text import format_error, safe_name, safe_str

__all__ = ["EncodedArguments", "TaskSignature"]

_CONTEXTS = (Context, BlockingContext)
_VERDICTS = (Snooze, Cancel)
"""What a function may return in place of a result."""

_EXPECTED = re.compile(
    r"Expected (?P<wanted>.+?)(?:, got .+?)?(?: - at `(?P<path>.+)`)?", re.DOTALL
)
_PLACE = re.compile(r"(?P<text>.+?)(?: - at `(?P<path>.+)`)?", re.DOTALL)
_LONGEST_SIGNATURE = 200
_KNOWN = "use types such as str, int, datetime, UUID, a dataclass or a pydantic model"


class EncodedArguments(dict[str, Json]):
    """The arguments of a call as they are stored, which were checked."""


class TaskSignature:
    """What a function takes and returns.

    Args:
        name: of the task, for errors.
        function: the user's function.

    Attributes:
        takes_context: whether it has a parameter for its context.

    Raises:
        Invalid: it cannot be called by name, or a type cannot be stored; names the parameter.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._task = name
        self._function = function
        hints = _read_hints(function)
        parameters = _read_parameters(function)
        contexts = [each for each in parameters if hints.get(each) in _CONTEXTS]
        if len(contexts) > 1:
            problem = "is the second parameter for the context"
            raise Invalid(contexts[1], hints[contexts[1]], problem, "keep one of them")
        self._context = contexts[0] if contexts else None
        self.takes_context = bool(contexts)
        self._parameters = {
            name: parameter for name, parameter in parameters.items() if name != self._context
        }
        types = {name: hints.get(name, Any) for name in self._parameters}
        for each, kind in types.items():
            _check_type(each, kind)
        self._untyped = [each for each, kind in types.items() if kind is Any]
        self._positional = [
            name
            for name, parameter in parameters.items()
            if parameter.kind is parameter.POSITIONAL_ONLY
        ]
        self._bind = inspect.Signature(list(self._parameters.values())).bind
        self._convert = _build_converter(self._parameters, types)
        self._result = _find_result_type(hints.get("return", Any))
        _check_type("return", self._result)

    def __str__(self) -> str:
        shown = inspect.Signature(list(self._parameters.values()))
        return safe_str(f"{self._task.rpartition('.')[2]}{shown}", _LONGEST_SIGNATURE)

    def encode(self, *args: Any, **kwargs: Any) -> EncodedArguments:
        """Return the arguments of a call as they are stored.

        Raises:
            Invalid: one is missing, unknown or of another type; names it.
        """
        try:
            arguments = self._bind(*args, **kwargs).arguments
        except TypeError as error:
            raise self._explain_binding(error, kwargs) from None
        for name in self._untyped:
            if name in arguments:
                check_json(arguments[name], name)
        try:
            values = msgspec.to_builtins(arguments, str_keys=True, enc_hook=_encode_model)
            self._convert((values,))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the user's values may raise anything
            raise self._explain_value(error, arguments) from None
        return EncodedArguments(values)

    def encode_some(self, arguments: Mapping[str, Any]) -> dict[str, Json]:
        """Return some arguments as they are stored.

        Raises:
            Invalid: one is unknown or cannot be stored; names it.
        """
        for name in arguments:
            if name not in self._parameters:
                raise self._explain_binding(TypeError(), arguments)
        try:
            return dict(msgspec.to_builtins(arguments, str_keys=True, enc_hook=_encode_model))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the user's values may raise anything
            raise self._explain_value(error, arguments) from None

    def check(self, values: Mapping[str, Json]) -> None:
        """Check arguments as they are stored.

        Raises:
            Invalid: one is missing, unknown or of another type; names it.
        """
        try:
            self._bind(**{name: None for name in values if name not in self._positional})
        except TypeError as error:
            if not self._positional:
                raise self._explain_binding(error, values) from None
        try:
            self._convert((dict(values),))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a user's model may raise anything
            raise self._explain_value(error, values) from None

    def call(self, values: Mapping[str, Json], context: object = None) -> Any:
        """Call the function with arguments as they are stored.

        Raises:
            Invalid: they do not fit this function; other code has enqueued them.
        """
        try:
            arguments = self._convert((values,)).arguments
        except msgspec.ValidationError as error:
            raise self._explain_value(error, values) from None
        if len(arguments) != len(values):
            raise self._explain_binding(TypeError(), values)
        if self._context is not None:
            arguments[self._context] = context
        if not self._positional:
            return self._function(**arguments)
        positional = [arguments.pop(name) for name in self._positional if name in arguments]
        return self._function(*positional, **arguments)

    def encode_result(self, result: Any) -> Json:
        """Return what the function has returned as it is stored; as it is if that is impossible."""
        try:
            return msgspec.to_builtins(result, str_keys=True, enc_hook=_encode_model)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - who stores it reports why it cannot be stored
            return result

    def decode_result(self, result: Json) -> Any:
        """Return a stored result as the function has returned it.

        Raises:
            Invalid: it is not of the type that this code's function returns.
        """
        if self._result is Any:
            return result
        try:
            return msgspec.convert(result, self._result, str_keys=True, dec_hook=_decode_model)
        except msgspec.ValidationError as error:
            problem = f"is not what {self} returns: {error}"
            fix = "use the code that has handled the message, or annotate what it returns"
            raise Invalid("result", result, problem, fix) from None

    def _explain_binding(self, error: TypeError, given: Mapping[str, Any]) -> Invalid:
        """Return the error of a call whose arguments do not fit the parameters."""
        fix = f"call it as {self}"
        for name, value in given.items():
            if name not in self._parameters:
                hint = closest_name(name, self._parameters)
                hint_fix = f"did you mean {hint}?" if hint else fix
                return Invalid(name, value, f"is not a parameter of {self._task}", hint_fix)
        for name, parameter in self._parameters.items():
            if parameter.default is parameter.empty and f"{name!r}" in str(error):
                return Invalid(name, "…", f"is missing: {self._task} needs it", fix)
        return Invalid("arguments", "…", f"do not fit {self._task}: {error}", fix)

    def _explain_value(self, error: BaseException, arguments: Mapping[str, Any]) -> Invalid:
        """Return the error of an argument of another type."""
        fix = f"pass what {self} takes"
        if not isinstance(error, msgspec.ValidationError):
            for name, value in arguments.items():
                if _is_unencodable(value):
                    problem = f"cannot be stored: {format_error(error)}"
                    return Invalid(name, value, problem, fix)
            return Invalid("arguments", "…", f"cannot be stored: {format_error(error)}", fix)
        text = str(error)
        found = _EXPECTED.fullmatch(text)
        problem = f"must be {found['wanted']}" if found else ""
        found = found or _PLACE.fullmatch(text)
        path = ((found and found["path"]) or "").removeprefix("$[0]").removeprefix(".")
        name = re.split(r"[.\[]", path, maxsplit=1)[0]
        value = arguments.get(name, "…")
        return Invalid(path or "arguments", value, problem or f"is wrong: {text}", fix)


def _read_hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(inspect.unwrap(function), include_extras=True)
    except Exception as error:
        problem = f"has annotations that cannot be read: {format_error(error)}"
        fix = "import the names at the top of the module, not under TYPE_CHECKING"
        raise Invalid("function", safe_name(function), problem, fix) from error


def _read_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(function).parameters)
    for name, parameter in parameters.items():
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            fix = "write each parameter by its name"
            raise Invalid(str(parameter), "…", "cannot be checked before a message is stored", fix)
        if name.startswith("__"):
            raise Invalid(name, "…", "must not begin with two underscores", "rename the parameter")
    return parameters


def _build_converter(
    parameters: Mapping[str, inspect.Parameter], types: Mapping[str, Any]
) -> Callable[[tuple[Mapping[str, Json]]], Any]:
    """Return what converts a tuple with a message to an object whose `arguments` are a dict."""
    keys = {
        name: types[name] if parameter.default is parameter.empty else NotRequired[types[name]]
        for name, parameter in parameters.items()
    }
    arguments: Any = TypedDict("Arguments", keys)  # type: ignore[misc]
    # A class, because msgspec analyses a class once and another type at every call.
    call = msgspec.defstruct("Call", [("arguments", arguments)], array_like=True)
    return partial(msgspec.convert, type=call, str_keys=True, dec_hook=_decode_model)


def _find_result_type(kind: Any) -> Any:
    """Return the type of a result, without what is not a result."""
    if kind in {typing.NoReturn, typing.Never} or kind in _VERDICTS:
        return None
    if typing.get_origin(kind) not in {typing.Union, types.UnionType}:
        return kind
    left = tuple(each for each in typing.get_args(kind) if each not in _VERDICTS)
    return typing.Union[left] if left else None  # noqa: UP007 - the members are not known here


def _check_type(name: str, kind: Any) -> None:
    """Check that values of a type can be stored and read back.

    Raises:
        Invalid: they cannot.
    """
    try:
        msgspec.json.Decoder(kind, dec_hook=_decode_model)
        described = msgspec.inspect.type_info(kind)
    except Exception as error:  # noqa: BLE001 - a user's type may raise anything
        problem = f"has an annotation that cannot be stored: {format_error(error)}"
        raise Invalid(name, kind, problem, _KNOWN) from None
    for each in _walk(described, set()):
        if isinstance(each, msgspec.inspect.CustomType) and not _is_model(each.cls):
            problem = f"has an annotation that cannot be stored: {safe_name(each.cls)}"
            raise Invalid(name, kind, problem, _KNOWN)


def _walk(node: object, seen: set[int]) -> Iterator[object]:
    """Yield a described type, and all types within it."""
    if isinstance(node, Sequence) and not isinstance(node, str):
        for each in node:
            yield from _walk(each, seen)
    elif isinstance(node, (msgspec.inspect.Type, msgspec.inspect.Field)) and id(node) not in seen:
        seen.add(id(node))
        yield node
        for name in node.__struct_fields__:
            yield from _walk(getattr(node, name), seen)


def _is_model(kind: object) -> bool:
    """Whether a class is a model of pydantic, by its methods."""
    return callable(getattr(kind, "model_validate", None)) and callable(
        getattr(kind, "model_dump", None)
    )


def _encode_model(value: Any) -> Any:
    """Return a model of pydantic as JSON."""
    if _is_model(type(value)):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"it is of type {safe_name(type(value))}")


def _decode_model(kind: Any, value: Any) -> Any:
    """Return a model of pydantic from JSON."""
    if not _is_model(kind):
        raise NotImplementedError
    # Its error is a ValueError, which msgspec reports with the place of the value.
    return value if isinstance(value, kind) else kind.model_validate(value)


def _is_unencodable(value: object) -> bool:
    try:
        msgspec.to_builtins(value, str_keys=True, enc_hook=_encode_model)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - the user's values may raise anything
        return True
    return False
