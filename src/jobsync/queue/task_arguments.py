"""The arguments of a task's function: checked when a message is enqueued, decoded by a worker.

A message has the arguments by name, as JSON. Annotations say how a value is written and read: see
`core.typed_values`. An argument that was not passed is not stored, so that the default of the code
that handles the message counts.
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NotRequired, TypedDict

import msgspec

from jobsync.core.codec import Json, check_json
from jobsync.core.messages import Cancel, Snooze
from jobsync.core.typed_values import (
    Loss,
    build_converter,
    can_lose,
    check_type,
    convert_value,
    count_typed,
    encode_value,
    find_loss,
    find_mismatch,
    has_any,
    keep_types,
)
from jobsync.errors import Invalid, closest_name
from jobsync.queue.context import BlockingContext, Context
from jobsync.safe_text import format_error, safe_name, safe_str

__all__ = ["EncodedArguments", "TaskSignature"]

_CONTEXTS = (Context, BlockingContext)
_VERDICTS = (Snooze, Cancel)
"""What a function may return in place of a result."""

_LONGEST_SIGNATURE = 200
_NOT_JSON = "has a value or a key that is not JSON, where its type takes anything"


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
            check_type(each, kind)
        self._types = types
        self._untyped = [each for each, kind in types.items() if kind is Any]
        self._open = [each for each, kind in types.items() if kind is not Any and has_any(kind)]
        """The parameters that take anything within something."""
        self._losing = [
            each for each, kind in types.items() if can_lose(msgspec.inspect.type_info(kind))
        ]
        """The parameters of whose values something may be lost."""
        self._positional = [
            name
            for name, parameter in parameters.items()
            if parameter.kind is parameter.POSITIONAL_ONLY
        ]
        self._bind = inspect.Signature(list(self._parameters.values())).bind
        self._convert = _build_converter(self._parameters, types)
        self._result = _find_result_type(hints.get("return", Any))
        check_type("return", self._result)

    def __str__(self) -> str:
        shown = inspect.Signature(list(self._parameters.values()))
        return safe_str(f"{self._task.rpartition('.')[2]}{shown}", _LONGEST_SIGNATURE)

    def has(self, name: str) -> bool:
        """Whether a call may have an argument of this name."""
        return name in self._parameters

    def encode(self, /, *args: Any, **kwargs: Any) -> EncodedArguments:
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
            kept, values = keep_types(arguments), encode_value(arguments)
            read = self._convert((kept,)).value
            changed = [] if kept == values else self._find_changed(read, values)
            lost = self._find_lost(arguments, read)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the user's values may raise anything
            raise self._explain_value(error, arguments) from None
        for name in changed:
            fix = "convert it to JSON first, or annotate what is in it"
            raise Invalid(name, arguments[name], _NOT_JSON, fix)
        for name, loss in lost:
            raise Invalid(name, arguments[name], loss.problem, loss.fix)
        return EncodedArguments(values)

    def _find_lost(
        self, arguments: Mapping[str, Any], read: Mapping[str, Any]
    ) -> list[tuple[str, Loss]]:
        """Return the arguments of which a worker would not get everything."""
        losses = [
            (name, find_loss(arguments[name], read[name]))
            for name in self._losing
            if name in arguments
        ]
        return [(name, loss) for name, loss in losses if loss is not None]

    def _find_changed(self, read: Mapping[str, Any], values: Mapping[str, Json]) -> list[str]:
        """Return the arguments that a worker would get with other types, within what is open."""
        stored = self._convert((values,)).value
        return [
            name
            for name in self._open
            if name in values
            and count_typed(keep_types(read[name])) != count_typed(keep_types(stored[name]))
        ]

    def encode_some(self, arguments: Mapping[str, Any]) -> dict[str, Json]:
        """Return some arguments as they are stored.

        Raises:
            Invalid: one is unknown or cannot be stored; names it.
        """
        for name in arguments:
            if name not in self._parameters:
                raise self._explain_binding(TypeError(), arguments)
        try:
            return dict(encode_value(arguments))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the user's values may raise anything
            raise self._explain_value(error, arguments) from None

    def check(self, values: Mapping[str, Json]) -> None:
        """Check arguments as they are stored.

        Raises:
            Invalid: one is missing, unknown or of another type; names it.
        """
        if not values.keys() <= self._parameters.keys():
            raise self._explain_binding(TypeError(), values)
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
            arguments = self._convert((values,)).value
        except msgspec.ValidationError as error:
            raise self._explain_value(error, values) from None
        if len(arguments) != len(values):
            raise self._explain_binding(TypeError(), values)
        if self._context is not None:
            arguments[self._context] = context
        if not self._positional:
            return self._function(**arguments)
        given = [name for name in self._positional if name in arguments]
        # One that was not passed keeps its place, with the default of this code.
        before = self._positional[: self._positional.index(given[-1]) + 1] if given else []
        positional = [
            arguments.pop(name) if name in arguments else self._parameters[name].default
            for name in before
        ]
        return self._function(*positional, **arguments)

    def encode_result(self, result: Any) -> Json:
        """Return what the function has returned as it is stored; as it is if that is impossible."""
        try:
            values: Json = encode_value(result)
            is_whole = bool(values == result) or find_loss(result, result) is None
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - who stores it reports why it cannot be stored
            return result
        return values if is_whole else result

    def decode_result(self, result: Json) -> Any:
        """Return a stored result as the function has returned it.

        Raises:
            Invalid: it is not of the type that this code's function returns.
        """
        if self._result is Any:
            return result
        try:
            return convert_value(result, self._result)
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
                if name in {"context", "ctx"} and self._types[name] is Any:
                    fix = f"annotate it to get the context of the message: {name}: Context"
                return Invalid(name, "…", f"is missing: {self._task} needs it", fix)
        return Invalid("arguments", "…", f"do not fit {self._task}: {error}", fix)

    def _explain_value(self, error: BaseException, arguments: Mapping[str, Any]) -> Invalid:
        """Return the error of an argument of another type."""
        path, value, problem = find_mismatch(error, arguments)
        if not path:
            path, value = next(filter(self._is_wrong, arguments.items()), ("", value))
        return Invalid(path or "arguments", value, problem, f"pass what {self} takes")

    def _is_wrong(self, argument: tuple[str, Any]) -> bool:
        """Whether an argument alone is refused by its type."""
        name, value = argument
        try:
            convert_value(encode_value(value), self._types.get(name, Any))
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - a user's type may raise anything
            return True
        return False


def _read_hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        unwrapped = inspect.unwrap(function)
        inspect.signature(function)
        if not inspect.isroutine(unwrapped) and not inspect.isclass(unwrapped):
            raise TypeError(f"it is of type {safe_name(type(unwrapped))}")  # noqa: TRY301
    except (TypeError, ValueError) as error:
        problem = f"has no parameters that can be read: {format_error(error)}"
        fix = "write a function that calls it: def run(path: str): ..."
        raise Invalid("function", safe_name(function), problem, fix) from error
    try:
        return typing.get_type_hints(unwrapped, include_extras=True)
    except Exception as error:
        problem = f"has annotations that cannot be read: {format_error(error)}"
        fix = "import the names at the top of the module, not under TYPE_CHECKING"
        raise Invalid("function", safe_name(function), problem, fix) from error


def _read_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(function).parameters)
    for name, parameter in parameters.items():
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            problem = f"of {safe_name(function)} cannot be checked before a message is stored"
            raise Invalid(str(parameter), "…", problem, "write each parameter by its name")
        if name.startswith("__"):
            raise Invalid(name, "…", "must not begin with two underscores", "rename the parameter")
    return parameters


def _build_converter(
    parameters: Mapping[str, inspect.Parameter], types: Mapping[str, Any]
) -> Callable[[tuple[Mapping[str, Json]]], Any]:
    """Return what converts a tuple with a message to an object whose `value` has the arguments."""
    keys = {
        name: types[name] if parameter.default is parameter.empty else NotRequired[types[name]]
        for name, parameter in parameters.items()
    }
    arguments: Any = TypedDict("Arguments", keys)  # type: ignore[misc]
    return build_converter(arguments)


def _find_result_type(kind: Any) -> Any:
    """Return the type of a result, without what is not a result."""
    if kind in {typing.NoReturn, typing.Never} or kind in _VERDICTS:
        return None
    if typing.get_origin(kind) not in {typing.Union, types.UnionType}:
        return kind
    left = tuple(each for each in typing.get_args(kind) if each not in _VERDICTS)
    return typing.Union[left] if left else None  # noqa: UP007 - the members are not known here
