"""Reports what happens to the messages of a queue: in counters, events and the user's callbacks."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Protocol

from jobsync.core.messages import (
    REVOKED,
    Cancel,
    Completed,
    Failed,
    HandlerVerdict,
    Returned,
    Snooze,
    has_spent,
)
from jobsync.events import Event, Events, HandlerFailed
from jobsync.queue import events
from jobsync.queue.backend import EndedClaim, Message
from jobsync.queue.executor import Handler
from jobsync.queue.in_flight import Delivery
from jobsync.queue.progress import ProgressWriter
from jobsync.safe_text import format_error, safe_name, safe_str
from jobsync.user_code import (
    FunctionEnd,
    await_result,
    call_function,
    describe_error,
    discard,
    is_coroutine_function,
)
from jobsync.user_functions import is_for_task

__all__ = ["QueueReporter", "ReportingQueue"]

_KIND = "a callback"
_THREAD_PREFIX = "jobsync-callback"
_MOST_FUNCTIONS = 10
"""The most plain callbacks that run at once, without those that have exceeded their timeout."""
_MOST_THREADS = 1000
"""The most threads, with those that nobody waits for any more. What finds none in its time is not
called."""


class ReportingQueue(Protocol):
    """The plugin whose events are emitted."""

    @property
    def queue(self) -> str:
        """The stored name of the queue."""
        ...

    @property
    def events(self) -> Events:
        """Who listens."""
        ...

    def emit(self, event: Event) -> None:
        """Emit an event."""
        ...


class QueueReporter:
    """What the workers of a queue report in this process.

    Args:
        plugin: emits the events.
        on_complete: the user's function, called after each completed message. A coroutine function
            runs on the event loop, a plain one on a thread.
        on_error: the user's function, called after each failure, likewise.
        timeout: seconds that these may take; None for no limit.
        progress: stores how far handlers are.
    """

    def __init__(
        self,
        plugin: ReportingQueue,
        on_complete: Handler | None,
        on_error: Handler | None,
        timeout: float | None,
        progress: ProgressWriter,
    ) -> None:
        self._progress = progress
        self.counters: Counter[str] = Counter()
        self._plugin = plugin
        self._on_complete = on_complete
        self._on_error = on_error
        self._timeout = timeout
        self._threads: ThreadPoolExecutor | None = None
        self._functions: dict[Future[FunctionEnd], None] = {}
        """The calls that run, even if nobody waits for them any more. Their threads remove them: an
        event loop may be closed before."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(_MOST_FUNCTIONS)

    @property
    def runs_functions(self) -> bool:
        """Whether plain callbacks run, even if nobody waits for them any more."""
        return bool(self._functions)

    def close(self) -> None:
        """Release idle threads; the next callback starts new ones."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    @property
    def queue(self) -> str:
        """The stored name of the queue."""
        return self._plugin.queue

    def on_enqueued(self, ids: list[str]) -> None:
        """Report messages that were pushed here."""
        self.counters["enqueued"] += len(ids)
        if self._plugin.events.has_listener(events.MessagesEnqueued):
            self._plugin.emit(events.MessagesEnqueued(queue=self._plugin.queue, ids=tuple(ids)))

    def on_settled(
        self, delivery: Delivery, verdict: HandlerVerdict, delay: float
    ) -> Coroutine[Any, Any, None] | None:
        """Report a message that was settled, with the delay before its next attempt.

        Returns:
            A callback of the user's, which the worker runs in the background.
        """
        message = delivery.message
        if self._progress.is_used:
            self._progress.end(message.id)
        match verdict:
            case Completed(result):
                self.counters["completed"] += 1
                self._report(events.MessageCompleted, message, duration=delivery.duration)
                if self._on_complete is not None:
                    return self._call("on_complete", self._on_complete, delivery.data, result)
            case Cancel(reason):
                self.counters["cancelled"] += 1
                self._report(events.MessageCancelled, message, reason=safe_str(reason))
            case Returned() | Snooze():
                self.counters["returned"] += 1
                self._report(events.MessageReturned, message, delay=delay)
            case Failed(error, cause):
                if has_spent(message.attempt, message.max_attempts):
                    self.counters["dead"] += 1
                    self._report(events.MessageDead, message, error=error)
                else:
                    self.counters["retried"] += 1
                    self._report(events.MessageRetried, message, error=error, delay=delay)
                raised = RuntimeError(error) if cause is None else cause
                self._report_failure(events.AttemptError, raised, message.id)
                if self._on_error is not None:
                    return self._call("on_error", self._on_error, raised, delivery.data)
        return None

    def on_lost(self, message: Message, reason: str) -> None:
        """Report a claim that is lost."""
        if self._progress.is_used:
            self._progress.end(message.id)
        self.counters["lost"] += 1
        self._report(events.MessageLost, message, reason=reason)

    def on_ended(self, ended: list[EndedClaim]) -> None:
        """Report claims of others that were ended."""
        for claim in ended:
            kind = events.MessageBuried if claim.state == "dead" else events.MessageRecovered
            self._report(kind, claim, state=claim.state)

    def on_overrun(self, message: Message, timeout: float) -> None:
        """Report a handler that runs on after its timeout."""
        self._report(events.HandlerOverran, message, timeout=timeout)

    def on_progress(self, message: Message, progress: float, note: str) -> None:
        """Report how far a handler is, and store it."""
        self._report(events.MessageProgressed, message, progress=progress, note=note)
        self._progress.report(message.receipt, progress, note)

    def on_result_dropped(self, message: Message, reason: str) -> None:
        """Report that the result of a handler is not kept."""
        self._report(events.ResultDropped, message, reason=reason)

    def on_cancelled(self, ended: EndedClaim) -> None:
        """Report a message that was cancelled from outside."""
        self.counters["cancelled"] += 1
        self._report(events.MessageCancelled, ended, reason=REVOKED)

    def on_newer(self, count: int, format: int) -> None:
        """Report messages of newer code."""
        self._plugin.emit(
            events.NewerMessages(queue=self._plugin.queue, count=count, format=format)
        )

    def on_failure(self, error: BaseException, message_id: str | None = None) -> None:
        """Report that something went wrong, perhaps with a message."""
        self._report_failure(events.QueueError, error, message_id)

    def _report_failure(
        self, kind: type[events.QueueError], error: BaseException, message_id: str | None
    ) -> None:
        text = format_error(error)
        self._plugin.emit(kind(queue=self._plugin.queue, error=text, message_id=message_id))

    def _report(self, kind: type[Event], about: Message | EndedClaim, **facts: Any) -> None:
        """Emit an event about a message if anybody listens: there may be very many."""
        if self._plugin.events.has_listener(kind):
            self._plugin.emit(
                kind(queue=self._plugin.queue, message_id=about.id, attempt=about.attempt, **facts)
            )

    def _call(
        self, name: str, function: Handler, *arguments: Any
    ) -> Coroutine[Any, Any, None] | None:
        """Call a function of the user's. An error in it becomes an event and stops nothing."""
        if not _is_async(function):
            return self._call_on_thread(name, function, arguments)
        try:
            result = function(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - user code may raise anything; it becomes an event
            self._report_call_error(name, function, error)
            return None
        return self._finish_call(name, function, result)

    async def _finish_call(self, name: str, function: Handler, result: Awaitable[Any]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await result
        except BaseException as error:
            # An exit is an error of the function, as in a handler.
            if is_for_task(error) and not issubclass(type(error), SystemExit):
                raise
            self._report_call_error(name, function, error)

    async def _call_on_thread(
        self, name: str, function: Handler, arguments: tuple[Any, ...]
    ) -> None:
        """Call a plain function, and await what it returns; return when its time is over at most.

        Nobody can stop a function that runs on after that, so nobody waits for it either.
        """
        call: Future[FunctionEnd] = Future()
        async with self._get_slots():
            try:
                async with asyncio.timeout(self._timeout):
                    self._start(call, function, arguments)
                    await asyncio.wait([asyncio.wrap_future(call)])
                    result, problem = call.result()
                    if problem is None:
                        await await_result(result)
            except BaseException as error:
                self._give_up(call)
                if is_for_task(error) and not issubclass(type(error), SystemExit):
                    raise
                problem = error
            if problem is not None:
                self._report_call_error(name, function, problem)

    def _start(
        self, call: Future[FunctionEnd], function: Handler, arguments: tuple[Any, ...]
    ) -> None:
        """Start to call a plain function on a thread.

        Raises:
            RuntimeError: no thread could be started.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MOST_THREADS, _THREAD_PREFIX)
        self._functions[call] = None
        loop, within = asyncio.get_running_loop(), copy_context().run
        try:
            loop.run_in_executor(self._threads, within, self._run, call, function, arguments)
        except Exception:
            # The call may be queued all the same, and a thread that has become idle have begun it.
            if call.cancel():
                raise

    def _run(
        self, call: Future[FunctionEnd], function: Handler, arguments: tuple[Any, ...]
    ) -> None:
        """Call a plain function on this thread, unless it was given up before."""
        if call.set_running_or_notify_cancel():
            end = call_function(function, *arguments, kind=_KIND)
            self._functions.pop(call, None)
            call.set_result(end)

    def _give_up(self, call: Future[FunctionEnd]) -> None:
        """Keep threads from beginning a call; close what it returns if one has begun it."""
        if call.cancel():
            self._functions.pop(call, None)
        else:
            call.add_done_callback(_discard_result)

    def _get_slots(self) -> asyncio.Semaphore:
        """Return what limits the plain functions that run at once, in this event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # The last connection may have been made in another loop.
            self._loop, self._slots = loop, asyncio.Semaphore(_MOST_FUNCTIONS)
        return self._slots

    def _report_call_error(self, name: str, function: Handler, error: BaseException) -> None:
        self._plugin.emit(
            HandlerFailed(event=name, callback=safe_name(function), error=describe_error(error))
        )


def _is_async(function: Handler) -> bool:
    """Whether a callback is a coroutine function; one that does not say so runs on a thread."""
    try:
        return is_coroutine_function(function)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - an object of the user's may raise anything
        return False


def _discard_result(call: Future[FunctionEnd]) -> None:
    discard(call.result().result)
