"""Users' functions that run before and after the verbs of a resource.

A before-hook receives the verb's input. It may return another input, or raise, and then nothing
is done. An after-hook receives the result; an error that it raises becomes the event
`jobsync:handler-failed`, because the verb has already taken effect.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar, get_args, overload

from jobsync.core.arguments import check_choice
from jobsync.errors import Invalid
from jobsync.events import EventEmitter, Events, HandlerFailed
from jobsync.safe_text import format_error, safe_name
from jobsync.user_functions import check_function, is_for_task

__all__ = ["Hook", "HookedVerbs", "ResourceHooks", "Verb", "parse_hooks"]

Verb: TypeAlias = Literal[
    "insert",
    "get",
    "exists",
    "update",
    "replace",
    "upsert",
    "delete",
    "list",
    "list_ids",
    "count",
    "page",
    "query",
]

_HOOK_NAMES = [f"{when}_{verb}" for when in ("before", "after") for verb in get_args(Verb)]

Hook: TypeAlias = Callable[[Any], Any]
"""A plain or a coroutine function."""

T = TypeVar("T")
H = TypeVar("H", bound=Hook)


class ResourceHooks:
    """The hooks of one resource, in the order in which they were added.

    Args:
        events: where failures are reported.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._hooks: dict[str, list[Hook]] = {}

    def add_or_decorate(self, name: str, hook: Any = None) -> Any:
        """Add a hook by a name such as `before_insert`; without a hook, return a decorator.

        Raises:
            Invalid: there is no such hook name, or the hook is not callable.
        """
        _check_name(name)
        return partial(self.add, name) if hook is None else self.add(name, hook)

    def add(self, name: str, hook: Any) -> Any:
        """Add a hook, and return it.

        Raises:
            Invalid: there is no such hook name, or the hook is not callable.
        """
        _check_name(name)
        _check_hook(name, hook)
        hooks = self._hooks.setdefault(name, [])
        # A resource that is defined again gets the same functions again.
        if hook not in hooks:
            hooks.append(hook)
        return hook

    async def before(self, verb: Verb, value: Any) -> Any:
        """Run the hooks before a verb; return the verb's input."""
        for hook in self._hooks.get(f"before_{verb}", ()):
            result = await _call(hook, value)
            value = value if result is None else result
        return value

    async def before_all(self, verb: Verb, values: Sequence[Any]) -> Sequence[Any]:
        """Run the hooks before a verb on each of several inputs."""
        if f"before_{verb}" not in self._hooks:
            return values
        return [await self.before(verb, value) for value in values]

    async def after_all(self, verb: Verb, results: Iterable[Any]) -> None:
        """Run the hooks after a verb on each of several results."""
        if f"after_{verb}" in self._hooks:
            for result in results:
                await self.after(verb, result)

    async def after(self, verb: Verb, result: Any) -> None:
        """Run the hooks after a verb."""
        for hook in self._hooks.get(f"after_{verb}", ()):
            try:
                await _call(hook, result)
            except BaseException as error:
                if is_for_task(error):
                    raise
                self._report(f"after_{verb}", hook, error)

    def _report(self, name: str, hook: Hook, error: BaseException) -> None:
        callback, text = safe_name(hook), format_error(error)
        self._events.emit(HandlerFailed(event=name, callback=callback, error=text))


class HookedVerbs(EventEmitter):
    """Base class of a resource: registers hooks and runs verbs between them.

    Args:
        events: where failures of hooks are reported.
    """

    def __init__(self, events: Events) -> None:
        self.events = events
        self._hooks = ResourceHooks(events)

    @overload
    def before(self, verb: Verb) -> Callable[[H], H]: ...
    @overload
    def before(self, verb: Verb, hook: H) -> H: ...
    def before(self, verb: Verb, hook: Any = None) -> Any:
        """Call a function before a verb; it may change the verb's input, or refuse it.

        Without a function, return a decorator.

        Raises:
            Invalid: there is no such verb.
        """
        return self._hooks.add_or_decorate(f"before_{verb}", hook)

    @overload
    def after(self, verb: Verb) -> Callable[[H], H]: ...
    @overload
    def after(self, verb: Verb, hook: H) -> H: ...
    def after(self, verb: Verb, hook: Any = None) -> Any:
        """Call a function after a verb, with its result. Without one, return a decorator.

        Raises:
            Invalid: there is no such verb.
        """
        return self._hooks.add_or_decorate(f"after_{verb}", hook)

    def add_hooks(self, hooks: Mapping[str, Any]) -> None:
        """Add hooks by names such as `before_insert`: one function or a list for each.

        Raises:
            Invalid: there is no such hook name, or a hook is not callable; none was added.
        """
        for name, hook in parse_hooks(hooks):
            self._hooks.add(name, hook)

    async def _run_verb(self, verb: Verb, value: Any, work: Callable[[Any], Awaitable[T]]) -> T:
        result = await work(await self._hooks.before(verb, value))
        await self._hooks.after(verb, result)
        return result


def parse_hooks(hooks: object) -> list[tuple[str, Hook]]:
    """Return hooks with their names, of a dictionary with one function or a list for each name.

    Raises:
        Invalid: there is no such hook name, or a hook is not callable.
    """
    if not isinstance(hooks, Mapping):
        fix = 'write {"before_insert": function}'
        raise Invalid("hooks", hooks, "must be a dictionary", fix)
    parsed: list[tuple[str, Hook]] = []
    for name, functions in hooks.items():
        _check_name(name)
        for hook in functions if isinstance(functions, list | tuple) else [functions]:
            _check_hook(name, hook)
            parsed.append((name, hook))
    return parsed


def _check_name(name: object) -> None:
    check_choice("hook", name, _HOOK_NAMES)


def _check_hook(name: str, hook: object) -> None:
    check_function(name, hook, "pass a function of one argument")


async def _call(hook: Hook, value: Any) -> Any:
    result = hook(value)
    return await result if inspect.isawaitable(result) else result
