"""Users' functions around the verbs of a resource.

Before a verb, a function is given what the verb was given and may give something else
instead, or raise, and then nothing is done. After it, a function is told the outcome; what
it raises becomes the event `jobsync:handler-failed`, because what is written is written.
"""

import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from jobsync.errors import Invalid, closest_name
from jobsync.events import Events, HandlerFailed

__all__ = ["Hook", "ResourceHooks", "Verb"]

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

_PLACES = [f"{when}_{verb}" for when in ("before", "after") for verb in get_args(Verb)]

Hook: TypeAlias = Callable[[Any], Any]
"""Plain or a coroutine function."""


class ResourceHooks:
    """The functions around one resource's verbs, in the order in which they were added.

    Args:
        events: where failures are told.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._hooks: dict[str, list[Hook]] = {}

    def place(self, name: str, hook: Any = None) -> Any:
        """Add one, by a name such as `before_insert`; without one, decorate one.

        Raises:
            Invalid: there is no such place, or it cannot be called.
        """
        _check_place(name)
        return partial(self.add, name) if hook is None else self.add(name, hook)

    def add(self, name: str, hook: Any) -> Any:
        """Add one, and give it back.

        Raises:
            Invalid: there is no such place, or it cannot be called.
        """
        _check_place(name)
        if not callable(hook):
            raise Invalid(name, hook, "cannot be called", "pass a function of one argument")
        placed = self._hooks.setdefault(name, [])
        # Who defines a resource again brings the same functions again.
        if hook not in placed:
            placed.append(hook)
        return hook

    async def before(self, verb: Verb, given: Any) -> Any:
        """Let those that come before a verb have their say; give what it works with."""
        for hook in self._hooks.get(f"before_{verb}", ()):
            instead = await _call(hook, given)
            given = given if instead is None else instead
        return given

    async def before_all(self, verb: Verb, given: Sequence[Any]) -> Sequence[Any]:
        """Let them have their say about each of several."""
        if f"before_{verb}" not in self._hooks:
            return given
        return [await self.before(verb, one) for one in given]

    async def after_all(self, verb: Verb, outcomes: Iterable[Any]) -> None:
        """Tell them of each of several."""
        if f"after_{verb}" in self._hooks:
            for outcome in outcomes:
                await self.after(verb, outcome)

    async def after(self, verb: Verb, outcome: Any) -> None:
        """Tell those that come after a verb."""
        for hook in self._hooks.get(f"after_{verb}", ()):
            try:
                await _call(hook, outcome)
            except Exception as error:  # noqa: BLE001 - user code may raise anything; it becomes an event
                self._report(f"after_{verb}", hook, error)

    def _report(self, name: str, hook: Hook, error: Exception) -> None:
        called = getattr(hook, "__qualname__", type(hook).__qualname__)
        told = "".join(traceback.format_exception_only(error)).strip()
        self._events.emit(HandlerFailed(event=name, callback=called, error=told))


def _check_place(name: str) -> None:
    if name not in _PLACES:
        hint = closest_name(name, _PLACES)
        fix = f"did you mean {hint}?" if hint else f"use one of {', '.join(_PLACES)}"
        raise Invalid("hook", name, "is no place for a hook", fix)


async def _call(hook: Hook, given: Any) -> Any:
    result = hook(given)
    return await result if inspect.isawaitable(result) else result
