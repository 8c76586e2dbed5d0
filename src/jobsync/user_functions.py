"""Functions of the user's: whether they can be called, and for whom their exceptions are meant.

On its own because listeners of events, hooks, handlers and callbacks all need it, in every layer.
"""

import asyncio
import inspect
import threading
from functools import partial
from types import FunctionType, MethodType

from jobsync.errors import Invalid

__all__ = ["check_function", "is_exit", "is_for_task"]


def check_function(field: str, function: object, fix: str) -> None:
    """Check that a function of the user's runs when it is called.

    Raises:
        Invalid: it cannot be called, or it is a generator, which would never run.
    """
    if not callable(function):
        raise Invalid(field, function, "must be callable", fix)
    # Only of functions: other objects may hide their class.
    is_function = issubclass(type(function), (FunctionType, MethodType, partial))
    if is_function and (
        inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    ):
        problem = "is a generator, which nobody runs"
        raise Invalid(field, function, problem, "write a function without yield")


def is_exit(error: BaseException) -> bool:
    """Whether an exception ends the program: an exit or an interrupt on the main thread.

    A user's function may raise it, and so may a signal that arrives while the function runs. Any
    other exception is the function's own failure. So is an exit on another thread, where it would
    end that thread without a word.
    """
    # By the type: an object may lie about its class.
    is_meant = issubclass(type(error), (KeyboardInterrupt, SystemExit))
    return is_meant and threading.current_thread() is threading.main_thread()


def is_for_task(error: BaseException) -> bool:
    """Whether an exception that came out of a user's coroutine is meant for the calling task.

    That is an exit of the program, a cancellation of the task, or the end of a task that is
    collected. Anything else is the failure of the coroutine, even a `CancelledError` that it
    raised itself.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if issubclass(type(error), asyncio.CancelledError):
        return task is None or task.cancelling() > 0
    if issubclass(type(error), GeneratorExit):
        return task is None
    return is_exit(error)
