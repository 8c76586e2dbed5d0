"""What an action gets when it is called, and what cannot be an action."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from action_stage import DATABASE, SCHEDULER, ActionStage, play

from jobsync import Components, Invalid
from jobsync.scheduler.context import JobContext
from jobsync.scheduler.executor import ActionExecutor
from jobsync.user_code import UserThreads


def take_nothing() -> tuple[Any, ...]:
    """Take nothing."""
    return ()


def take_one(db: Any) -> tuple[Any, ...]:
    """Take the database."""
    return (db,)


def take_two(db: Any, context: JobContext) -> tuple[Any, ...]:
    """Take the context too."""
    return (db, context.job_name)


def take_three(db: Any, context: JobContext, scheduler: Any) -> tuple[Any, ...]:
    """Take the scheduler too."""
    return (db, context.job_name, scheduler)


def take_all(*arguments: Any, **_: Any) -> tuple[Any, ...]:
    """Take whatever comes."""
    return (arguments[0], arguments[1].job_name, *arguments[2:])


def take_optional(db: Any = None, context: JobContext | None = None) -> tuple[Any, ...]:
    """Take what is there."""
    return (db, context and context.job_name)


def take_all_optional(
    db: Any,
    context: JobContext | None = None,
    scheduler: Any = None,
    more: Any = None,
    last: int = 3,
) -> tuple[Any, ...]:
    """Take what is there, and keep what is not."""
    return (db, context and context.job_name, scheduler, more, last)


def take_rest(db: Any, *rest: Any) -> tuple[Any, ...]:
    """Take the database, and whatever comes."""
    return (db, *(each.job_name for each in rest))


def take_rest_after_default(db: Any, limit: int = 3, *rest: Any) -> tuple[Any, ...]:
    """Keep a value of its own, before whatever comes."""
    return (db, limit, *rest)


def take_rest_after_three(
    db: Any, context: JobContext, scheduler: Any, *rest: Any
) -> tuple[Any, ...]:
    """Take all that there is, and whatever comes."""
    return (db, context.job_name, scheduler, *rest)


def take_rest_after_two(db: Any, context: JobContext, *rest: Any) -> tuple[Any, ...]:
    """Take the context, and whatever comes."""
    return (db, context.job_name, *rest)


def take_by_name(db: Any, *, context: JobContext | None = None) -> tuple[Any, ...]:
    """Take the context by its name, by which nobody passes it."""
    return (db, context)


def take_captured(db: Any, name: str = "captured") -> tuple[Any, ...]:
    """Keep a value of its own."""
    return (db, name)


class Called:
    """An object that is called."""

    def __call__(self, db: Any) -> tuple[Any, ...]:
        return (db,)

    def method(self, db: Any, context: JobContext) -> tuple[Any, ...]:
        return (db, context.job_name)


@pytest.mark.parametrize(
    ("action", "arguments"),
    [
        (take_nothing, ()),
        (take_one, (DATABASE,)),
        (take_two, (DATABASE, "report")),
        (take_three, (DATABASE, "report", SCHEDULER)),
        (take_all, (DATABASE, "report")),
        (take_optional, (DATABASE, "report")),
        (take_all_optional, (DATABASE, "report", SCHEDULER, None, 3)),
        (take_rest, (DATABASE, "report")),
        (take_rest_after_default, (DATABASE, 3)),
        (take_rest_after_two, (DATABASE, "report")),
        (take_rest_after_three, (DATABASE, "report", SCHEDULER)),
        (take_by_name, (DATABASE, None)),
        (take_captured, (DATABASE, "captured")),
        (partial(take_captured, "own"), ("own", "captured")),
        (partial(take_captured, name="bound"), (DATABASE, "bound")),
        (Called(), (DATABASE,)),
        (Called().method, (DATABASE, "report")),
    ],
)
def test_an_action_gets_as_many_arguments_as_it_takes(
    action: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """The database, the context, the scheduler; a default that is not None is kept."""

    async def story(stage: ActionStage) -> None:
        assert (await stage.run(action)).result == arguments

    play(story)


async def yields_in_coroutine(db: Any) -> Any:
    """Yield."""
    yield db


def yields(db: Any) -> Any:
    """Yield."""
    yield db


def takes_context_alone(context: Any) -> None:
    """Take the context where the database comes."""


def takes_short_context(ctx: Any = None) -> None:
    """Likewise, by its short name."""


def takes_typed_context(run: JobContext) -> None:
    """Take the context under another name."""


def takes_quoted_context(run: "JobContext") -> None:
    """Take the context under another name, with its type as a text."""


def needs_four(a: Any, b: Any, c: Any, d: Any) -> None:
    """Take too many arguments."""


def needs_a_name(db: Any, limit: int = 1, *, name: str) -> None:
    """Take an argument that nobody passes."""


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (None, r"action must be callable \(got None\)\. Write async def action\(db\)"),
        ("report", r"action must be callable \(got 'report'\)"),
        (yields, r"action is a generator, which nobody runs .* Write a function without yield"),
        (yields_in_coroutine, "action is a generator, which nobody runs"),
        (takes_context_alone, r"has 'context' first, which would get the database .*\(db, context"),
        (takes_short_context, "has 'ctx' first, which would get the database"),
        (takes_typed_context, "has 'run' first, which would get the database"),
        (takes_quoted_context, "has 'run' first, which would get the database"),
        (needs_four, r"action must take at most 3 arguments .* Write async def action\(db\)"),
        (needs_a_name, "action must not need the argument 'name' by name"),
    ],
)
def test_what_cannot_be_an_action_is_refused(action: Any, message: str) -> None:
    """At once, with the fix."""
    with pytest.raises(Invalid, match=message) as refused:
        ActionExecutor(action, components=Components.system(), threads=UserThreads())
    assert refused.value.field == "action"


def test_a_coroutine_is_no_action() -> None:
    """The error explains the usual mistake."""

    async def act() -> None:
        pass

    called = act()
    with pytest.raises(Invalid, match="Pass the function itself, without calling it"):
        ActionExecutor(called, components=Components.system(), threads=UserThreads())  # type: ignore[arg-type]
    called.close()
