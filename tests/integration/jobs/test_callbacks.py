"""Telling the user's functions: in order, on a thread of their own, whatever they do."""

import threading

from jobsync.events import Events, HandlerFailed
from jobsync.jobs.events import Callbacks, RebalanceEvent, TokenChange

CHANGE = TokenChange(7, frozenset({1, 2}), frozenset({3}), is_initial=False)


def tell(*changes: TokenChange, **functions: object) -> list[HandlerFailed]:
    """Tell of changes, and give what went wrong."""
    events = Events()
    failed: list[HandlerFailed] = []
    events.on("jobsync:handler-failed", failed.append)
    known = dict.fromkeys(("on_rebalance", "on_tokens_added", "on_tokens_removed"))
    callbacks = Callbacks(events, **{**known, **functions})  # type: ignore[arg-type]
    for change in changes:
        callbacks.notify(change)
    callbacks.stop(10)
    return failed


def test_each_function_is_told_its_part_in_order() -> None:
    """What is given up comes first."""
    told: list[object] = []
    tell(
        CHANGE,
        on_tokens_added=lambda tokens: told.append(("added", tokens)),
        on_tokens_removed=lambda tokens: told.append(("removed", tokens)),
        on_rebalance=told.append,
    )
    event = RebalanceEvent(is_initial=False, token_version=7, tokens_added=2, tokens_removed=1)
    assert told == [("removed", {3}), ("added", {1, 2}), event]


def test_a_function_may_take_nothing() -> None:
    """As the guide's do."""
    calls: list[int] = []
    tell(CHANGE, CHANGE, on_rebalance=lambda: calls.append(1))
    assert calls == [1, 1]


def test_nothing_is_told_where_nothing_changed() -> None:
    """Another number alone is no news to a user."""
    calls: list[object] = []
    quiet = TokenChange(8, frozenset(), frozenset(), is_initial=False)
    only_more = TokenChange(9, frozenset({4}), frozenset(), is_initial=False)
    tell(quiet, on_rebalance=calls.append, on_tokens_added=calls.append)
    tell(only_more, on_tokens_removed=calls.append)
    assert calls == []


def test_a_function_that_raises_is_told_of_and_the_next_is_called() -> None:
    """User code may raise anything."""
    told: list[object] = []

    def fail(_: object) -> None:
        raise ZeroDivisionError

    (failed,) = tell(CHANGE, on_tokens_removed=fail, on_tokens_added=told.append)
    assert "ZeroDivisionError" in failed.error
    assert "fail" in failed.callback
    assert told == [frozenset({1, 2})]


def test_functions_run_on_a_thread_of_their_own() -> None:
    """One that blocks holds up no heartbeat; one that stops the job from within ends."""
    threads: list[str] = []
    tell(CHANGE, on_rebalance=lambda: threads.append(threading.current_thread().name))
    assert threads == ["jobsync-callbacks"]
