"""What handlers return: how it is stored, and how others wait for it.

A result is kept with its completed message, for as long as that is remembered. One that is not JSON
or is too large is not kept: its message is completed all the same, because the work is done, and
who asks for the result learns why there is none.
"""

import shlex

from jobsync.core.clock import Clock, Seconds
from jobsync.core.codec import MAX_DEPTH, Json, encode
from jobsync.core.messages import explain_cancel
from jobsync.core.secrets import MASK
from jobsync.core.urls import SqliteUrl
from jobsync.errors import Invalid, NoResult
from jobsync.queue.backend import MessageInfo, QueueBackend
from jobsync.queue.single_message import StoredResult
from jobsync.safe_text import format_error

__all__ = ["build_result", "wait_for_result"]

_FIRST_PAUSE: Seconds = 0.05
_LONGEST_PAUSE: Seconds = 1.0
_LONGEST_BILLED_PAUSE: Seconds = 5.0
"""Between two looks at a message whose end nobody announces."""
_GROWTH = 1.5


def build_result(value: Json, limit: int, max_depth: int = MAX_DEPTH) -> StoredResult:
    """Return what a handler returned, as it is stored; or why it is not."""
    try:
        return StoredResult(encode(value, "result", limit=limit, max_depth=max_depth).decode())
    except KeyboardInterrupt:
        raise
    except Invalid as error:
        return StoredResult(None, str(error))
    except BaseException as error:  # noqa: BLE001 - a value of the user's may raise anything
        return StoredResult(None, f"it is not JSON: {format_error(error)}")


async def wait_for_result(
    backend: QueueBackend, clock: Clock, name: str, timeout: Seconds | None, store: str
) -> Json:
    """Wait until a message is completed; return what its handler returned.

    Args:
        backend: of the message's queue.
        clock: measures the timeout.
        name: the message's id.
        timeout: seconds to wait at most; None for no limit.
        store: the store's URL without secrets, for the error.

    Raises:
        NoResult: there is none, and there will be none.
        TimeoutError: the message was not completed in time.
    """
    end = None if timeout is None else clock.mono() + timeout
    pause, longest = _FIRST_PAUSE, _LONGEST_PAUSE
    if backend.is_billed:
        pause, longest = _LONGEST_PAUSE, _LONGEST_BILLED_PAUSE
    while True:
        info = await backend.get(name)
        if info is not None and info.state == "completed" and not info.result_problem:
            return info.result
        if info is None or info.state in {"completed", "cancelled", "dead"}:
            raise _build_error(name, info)
        left = pause if end is None else end - clock.mono()
        if left <= 0:
            text = f"message {name} is {info.state} after {timeout:g} s"
            raise TimeoutError(f"{text}. {_suggest_why(name, store)}")
        await backend.wait_for_end(min(left, pause))
        pause = min(pause * _GROWTH, longest)


def _suggest_why(name: str, store: str) -> str:
    """Return how to learn why a message waits, as a command for the same store."""
    if store.startswith("memory://"):
        # A command is another process, which has another memory.
        return f"See: await queue.get({name!r})"
    path = store.removeprefix("sqlite:///")
    url = store if path == store else str(SqliteUrl(path))
    text = f"Run: jobsync why {name} --url {shlex.quote(url)}"
    if MASK in store:
        text += f", with what {MASK} stands for; or with --app module:name in place of --url"
    return text


def _build_error(name: str, info: MessageInfo | None) -> NoResult:
    if info is None:
        detail = "it was never pushed, was deleted, or was completed long ago and forgotten"
        return NoResult(name, "unknown", detail)
    if info.state == "completed":
        return NoResult(name, "completed", f"its result was not kept: {info.result_problem}")
    error = info.errors[-1].error.partition("\n")[0] if info.errors else ""
    if info.state == "cancelled":
        error = explain_cancel(error)
    return NoResult(name, info.state, error or "no error was recorded")
