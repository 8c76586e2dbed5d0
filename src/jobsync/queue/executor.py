"""Runs the handlers of a queue: coroutine functions on the event loop, plain functions on threads.

A message without a task goes to the queue's handler of messages, others to the function of their
task.

However a handler ends becomes a verdict: a value or an error never passes as an exception from a
thread to the event loop. What a handler returns is awaited if it is awaitable, so a plain function
may return a coroutine. A coroutine that exceeds its timeout is cancelled by the watcher of the
deadlines. A plain function cannot be cancelled and keeps its thread until it returns; one that has
not begun when nobody waits for it any more never begins. Each handler has its own context: context
variables that it sets are invisible to other handlers.
"""

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

from jobsync.coordination.runner import Wakeup
from jobsync.coordination.session import count_forks
from jobsync.core.clock import Clock, Mono
from jobsync.core.messages import Cancel, Completed, Failed, HandlerVerdict, Returned, Snooze
from jobsync.core.retry import Retries
from jobsync.database.document import Document, RecordT
from jobsync.errors import Invalid
from jobsync.queue import task_arguments
from jobsync.queue.context import BlockingContext, Context
from jobsync.queue.in_flight import Delivery
from jobsync.safe_text import safe_name
from jobsync.user_code import (
    SIGNAL_ERRORS,
    await_result,
    call_function,
    check_no_generator,
    describe_error,
    discard,
    end_forked_child,
    is_coroutine_function,
    name_generator,
    run_in_own_context,
)

__all__ = [
    "THREAD_PREFIX",
    "Deadlines",
    "Executor",
    "Handler",
    "HandlerOutcome",
    "MessageFunction",
    "MessageHandler",
    "build_late_verdict",
]

Handler: TypeAlias = Callable[..., Any]
"""Takes a message, and its context if it has a second parameter."""

MessageFunction: TypeAlias = (
    Callable[[RecordT], Any]
    | Callable[[RecordT, Context], Any]
    | Callable[[RecordT, BlockingContext], Any]
)
"""A handler, as type checkers see it."""

THREAD_PREFIX = "jobsync-handler"
"""The start of the names of threads that run plain functions."""

_UNFINISHED = "the handler has returned before its context.transaction() has ended"
_UNSETTLED = "the handler has called neither context.ack() nor context.nack()"
_WITH_CONTEXT = 2
_KIND = "a handler"
_OWN_FILES = {__file__, task_arguments.__file__}
_SHORTEST_WAIT = 0.01
_LONGEST_WAIT = 3600.0
_MANY_THREADS = 1_000_000


class HandlerOutcome(NamedTuple):
    """How a handler ended."""

    verdict: HandlerVerdict
    overrun: "asyncio.Future[_FunctionEnd] | None" = None
    """A plain function that continues after its timeout."""


_COMPLETED = HandlerOutcome(Completed())


class _FunctionEnd(NamedTuple):
    """How a plain function ended."""

    result: Any
    error: BaseException | None
    has_seen_loss: bool
    """Whether it knew before that nothing counts any more."""


class MessageHandler:
    """A function of the user's that handles messages: all without a task, or those of one task.

    Args:
        function: the user's function.
        signature: what it takes, if it is a task's; otherwise it takes the message.
        retries: the pauses after its failures; the queue's by default.
        is_limited: whether its task has limits of its own.

    Attributes:
        call: takes the message, or the arguments as they are stored, and the context if it takes
            one.
        name: of the function, for people.
        is_async: whether it is a coroutine function.
        takes_context: whether it has a parameter for its context.

    Raises:
        Invalid: it cannot be called with a message, or is a generator.
    """

    def __init__(
        self,
        function: Handler,
        signature: task_arguments.TaskSignature | None = None,
        retries: Retries | None = None,
        *,
        is_limited: bool = False,
    ) -> None:
        self.is_limited = is_limited
        self.signature = signature
        self.retries = retries
        self.name = safe_name(function)
        self.is_async = is_coroutine_function(function)
        self.call = function if signature is None else signature.call
        self.takes_context = (
            _takes_context(function) if signature is None else signature.takes_context
        )
        check_no_generator("on_message" if signature is None else "function", function)

    def build_arguments(self, delivery: Delivery, context: object) -> tuple[Any, ...]:
        """Return what `call` takes."""
        data = delivery.data if self.signature is None else delivery.message.value
        return (data, context) if self.takes_context else (data,)


class Executor:
    """Runs the handlers of a queue, for many messages at once.

    Args:
        auto_acknowledge: whether returning acknowledges the message.

    Attributes:
        functions: the plain functions that run, even if nobody waits for them any more. Their
            threads remove them: an event loop may be closed before.
        has_limits: whether a task that is handled here has limits of its own.
    """

    def __init__(self, *, auto_acknowledge: bool) -> None:
        self._handlers: dict[str, MessageHandler] = {}
        """By task; that of messages without a task as the empty one."""
        self._auto_acknowledge = auto_acknowledge
        self.has_limits = False
        self._threads: ThreadPoolExecutor | None = None
        """Starts a thread for each call that finds no idle one: the slots of the workers are the
        limit, and a function that does not end takes no thread from those of another worker."""
        self.functions: dict[Delivery, None] = {}
        self._unwanted: set[Delivery] = set()
        """Those of the functions whose results nobody waits for."""

    @property
    def tasks(self) -> frozenset[str]:
        """The tasks whose messages can be handled; the empty one stands for messages without."""
        return frozenset(self._handlers)

    def list_functions(self) -> dict[str, str]:
        """Return the names of the handlers, by task."""
        return {task: handler.name for task, handler in self._handlers.items()}

    def add(self, task: str, handler: MessageHandler) -> None:
        """Handle the messages of a task, or with an empty name those without one."""
        self._handlers[task] = handler
        self.has_limits |= handler.is_limited

    def find(self, task: str) -> MessageHandler:
        """Return the handler of a task's messages.

        Only the messages of known tasks are claimed. If somebody has changed one since, its handler
        fails.
        """
        return self._handlers.get(task) or MessageHandler(partial(_fail_unknown, task))

    def close(self) -> None:
        """Release idle threads; the next message starts new ones."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    async def run(self, delivery: Delivery) -> HandlerOutcome:
        """Handle a message; return how its handler ended.

        Raises:
            CancelledError: the handler was cancelled, or raised this by itself.
        """
        handler = self.find(delivery.message.task)
        if not handler.is_async:
            return await self._run_function(handler, delivery)
        arguments, forks = handler.build_arguments(delivery, delivery.context), count_forks()
        try:
            result = await run_in_own_context(handler.call, *arguments)
        except SIGNAL_ERRORS:
            raise
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything
            # Not in a variable: the error refers to this frame, which must not refer to it.
            return HandlerOutcome(
                build_late_verdict(delivery) or Failed(describe_error(error, _OWN_FILES), error)
            )
        finally:
            end_forked_child(forks, _KIND)
        if (
            result is None
            and self._auto_acknowledge
            and not delivery.is_late
            and delivery.transaction is None
        ):
            # By far the most frequent end.
            return _COMPLETED
        return await self._finish(handler, result, delivery)

    async def _run_function(self, handler: MessageHandler, delivery: Delivery) -> HandlerOutcome:
        loop = asyncio.get_running_loop()
        context = None if delivery.context is None else BlockingContext(delivery.context, loop)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MANY_THREADS, THREAD_PREFIX)
        # The functions that it calls can find out that a handler calls them.
        within, turn = copy_context().run, Lock()
        self.functions[delivery] = None
        try:
            running = loop.run_in_executor(
                self._threads, within, self._call_function, handler, delivery, context, turn
            )
        except BaseException:
            # No thread could be started.
            self.functions.pop(delivery, None)
            raise
        running.add_done_callback(partial(self._on_end, delivery))
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            self._unwanted.add(delivery)
            if turn.acquire(blocking=False):
                # Its thread has not begun it, and never will.
                self.functions.pop(delivery, None)
                return HandlerOutcome(Returned())
            late = build_late_verdict(delivery)
            if late is None:
                raise
            return HandlerOutcome(late, running)
        result, error, has_seen_loss = running.result()
        if has_seen_loss:
            # It stopped because nothing counts any more.
            discard(result)
            return HandlerOutcome(Returned())
        if error is not None:
            return HandlerOutcome(Failed(describe_error(error, _OWN_FILES), error))
        delivery.is_on_loop = True
        return await self._finish(handler, result, delivery)

    def _call_function(
        self,
        handler: MessageHandler,
        delivery: Delivery,
        context: BlockingContext | None,
        turn: Lock,
    ) -> _FunctionEnd:
        """Call a plain function on a thread, unless its message is lost, or its turn is taken."""
        try:
            if delivery.is_lost or not turn.acquire(blocking=False):
                return _FunctionEnd(None, None, has_seen_loss=True)
            arguments = handler.build_arguments(delivery, context)
            result, error = call_function(handler.call, *arguments, kind=_KIND)
            return _FunctionEnd(result, error, context is not None and context.has_shown_loss)
        finally:
            self.functions.pop(delivery, None)

    def _on_end(self, delivery: Delivery, running: "asyncio.Future[_FunctionEnd]") -> None:
        """Close what a plain function has returned if nobody wants it."""
        if delivery in self._unwanted:
            self._unwanted.discard(delivery)
            if not running.cancelled():
                discard(running.result().result)

    async def _finish(
        self, handler: MessageHandler, result: Any, delivery: Delivery
    ) -> HandlerOutcome:
        """Await what a handler has returned, if necessary, and judge it."""
        try:
            result = await await_result(result)
        except SIGNAL_ERRORS:
            raise
        except BaseException as error:  # noqa: BLE001 - likewise
            return HandlerOutcome(
                build_late_verdict(delivery) or Failed(describe_error(error, _OWN_FILES), error)
            )
        late = build_late_verdict(delivery)
        if late is None and delivery.transaction is not None:
            await delivery.transaction.abandon()
            return HandlerOutcome(Failed(_UNFINISHED))
        return HandlerOutcome(late or self._judge(handler, result, delivery.context))

    def _judge(
        self, handler: MessageHandler, result: Any, context: Context | None
    ) -> HandlerVerdict:
        if isinstance(result, (Snooze, Cancel)):
            return result
        if generator := name_generator(result):
            return Failed(f"the handler returned {generator}, which nobody runs")
        is_settled = context is not None and context.is_settled
        if not (self._auto_acknowledge or is_settled):
            return Failed(_UNSETTLED)
        if result is None or handler.signature is None:
            return Completed(result)
        return Completed(handler.signature.encode_result(result))


def _fail_unknown(task: str, _: Document) -> None:
    raise Invalid("task", task, "is not known to this worker", "deploy the code that has it")


def build_late_verdict(delivery: Delivery) -> Failed | None:
    """Return the verdict of a handler that exceeded its timeout; None for another one."""
    if not delivery.is_late:
        return None
    late = TimeoutError(f"it took longer than {delivery.timeout:g} s")
    return Failed(describe_error(late, _OWN_FILES), late)


def _takes_context(handler: Handler) -> bool:
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError) as error:
        raise Invalid("on_message", handler, "cannot be called", "pass a function") from error
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return True
    positional = [item for item in parameters if item.kind <= item.POSITIONAL_OR_KEYWORD]
    required = [item for item in positional if item.default is item.empty]
    if not positional or len(required) > _WITH_CONTEXT:
        fix = "write async def handle(task) or async def handle(task, context)"
        problem = f"takes {len(required)} arguments: it gets a message, or one and its context"
        raise Invalid("handler", safe_name(handler), problem, fix)
    return len(positional) >= _WITH_CONTEXT


class Deadlines:
    """When running handlers must be done. One watcher serves all handlers.

    A timer per handler would cost more than most handlers do. The watcher wakes at the first
    deadline. A handler that started later usually ends later, and then wakes nobody.

    Args:
        clock: this machine's clock.
        on_late: called once for each delivery that exceeds its deadline.
    """

    def __init__(self, clock: Clock, on_late: Callable[[Delivery], None]) -> None:
        self._clock = clock
        self._on_late = on_late
        self._ends: dict[Delivery, Mono] = {}
        self._wakeup = Wakeup(clock, _SHORTEST_WAIT)
        self._next_check = clock.mono() + _LONGEST_WAIT

    def add(self, delivery: Delivery, end: Mono) -> None:
        """Watch a delivery until it is removed."""
        self._ends[delivery] = end
        if end < self._next_check:
            self._next_check = end
            self._wakeup.set()

    def remove(self, delivery: Delivery) -> None:
        """Stop watching a delivery, if it is watched."""
        self._ends.pop(delivery, None)

    async def watch(self) -> None:
        """Report each delivery that exceeds its deadline, until cancelled."""
        while True:
            await self._wakeup.wait(self._next_check)
            now = self._clock.mono()
            if now >= self._next_check:
                self._report_late(now)

    def _report_late(self, now: Mono) -> None:
        late = [delivery for delivery, end in self._ends.items() if end <= now]
        for delivery in sorted(late, key=lambda each: self._ends[each].seconds):
            self.remove(delivery)
            self._on_late(delivery)
        self._next_check = min(self._ends.values(), default=now + _LONGEST_WAIT)
