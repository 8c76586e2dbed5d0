"""Callbacks: called in order, on their own thread, whatever they do."""

import threading
from functools import partial

import pytest

from jobsync.events import Events, HandlerFailed
from jobsync.jobs.events import Callbacks, RebalanceEvent, TokenChange

CHANGE = TokenChange(7, frozenset({1, 2}), frozenset({3}), is_initial=False)


def notify(*changes: TokenChange, **functions: object) -> list[HandlerFailed]:
    """Notify callbacks of changes; return the failures."""
    events = Events()
    failed: list[HandlerFailed] = []
    events.on("jobsync:handler-failed", failed.append)
    known = dict.fromkeys(("on_rebalance", "on_tokens_added", "on_tokens_removed"))
    callbacks = Callbacks(events, **{**known, **functions})  # type: ignore[arg-type]
    for change in changes:
        callbacks.notify(change)
    callbacks.stop(10)
    return failed


def test_each_callback_gets_its_part_in_order() -> None:
    """Removed tokens come first."""
    calls: list[object] = []
    notify(
        CHANGE,
        on_tokens_added=lambda tokens: calls.append(("added", tokens)),
        on_tokens_removed=lambda tokens: calls.append(("removed", tokens)),
        on_rebalance=calls.append,
    )
    event = RebalanceEvent(is_initial=False, token_version=7, tokens_added=2, tokens_removed=1)
    assert calls == [("removed", {3}), ("added", {1, 2}), event]


def test_a_callback_may_take_no_argument() -> None:
    """Like the guide's."""
    calls: list[int] = []
    notify(CHANGE, CHANGE, on_rebalance=lambda: calls.append(1))
    assert calls == [1, 1]


def test_a_callback_without_a_signature_gets_no_argument() -> None:
    """Like some of Python's own functions."""
    assert notify(CHANGE, on_rebalance=partial(max, 1, 2)) == []


def test_callbacks_can_be_stopped_by_one_of_them() -> None:
    """It does not wait for itself; what follows is still called."""
    events, calls = Events(), list[str]()
    failed: list[HandlerFailed] = []
    events.on("jobsync:handler-failed", failed.append)

    def stop(_: object) -> None:
        callbacks.stop(60)
        calls.append("stopped")

    callbacks = Callbacks(events, lambda: calls.append("rebalanced"), None, stop)
    callbacks.notify(CHANGE)
    callbacks.notify(CHANGE)
    callbacks.stop(60)
    assert calls == ["stopped", "rebalanced"] * 2
    assert failed == []


def test_no_callback_is_called_if_no_token_changed() -> None:
    """A new assignment number alone is not a change for the user."""
    calls: list[object] = []
    quiet = TokenChange(8, frozenset(), frozenset(), is_initial=False)
    only_more = TokenChange(9, frozenset({4}), frozenset(), is_initial=False)
    notify(quiet, on_rebalance=calls.append, on_tokens_added=calls.append)
    notify(only_more, on_tokens_removed=calls.append)
    assert calls == []


@pytest.mark.parametrize("is_leaving", [False, True])
@pytest.mark.parametrize("added", [set(), {1, 2}])
@pytest.mark.parametrize("removed", [set(), {3}])
def test_each_callback_is_called_if_its_part_changed(
    *, added: set[int], removed: set[int], is_leaving: bool
) -> None:
    """A node that leaves gives up tokens, which is no rebalance to the program that ends it."""
    calls: list[str] = []
    notify(
        TokenChange(
            7, frozenset(added), frozenset(removed), is_initial=True, is_leaving=is_leaving
        ),
        on_tokens_added=lambda _: calls.append("added"),
        on_tokens_removed=lambda _: calls.append("removed"),
        on_rebalance=lambda: calls.append("rebalanced"),
    )
    is_rebalanced = bool(added or removed) and not is_leaving
    parts = {"removed": bool(removed), "added": bool(added), "rebalanced": is_rebalanced}
    assert calls == [part for part, is_called in parts.items() if is_called]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_is_reported_and_the_next_is_called(
    error: type[BaseException],
) -> None:
    """User code may raise anything."""
    calls: list[object] = []

    def fail(_: object) -> None:
        raise error

    (failed,) = notify(CHANGE, on_tokens_removed=fail, on_tokens_added=calls.append)
    assert error.__name__ in failed.error
    assert "fail" in failed.callback
    assert failed.event == "jobs:tokens-changed"
    assert calls == [frozenset({1, 2})]


def test_a_callback_that_returns_a_coroutine_is_reported() -> None:
    """Nobody would await it."""

    async def later(_: object) -> None:
        pass

    (failed,) = notify(CHANGE, on_tokens_added=later)
    assert failed.error == "TypeError: it returned a coroutine, which nobody awaits"


def test_callbacks_run_on_their_own_thread() -> None:
    """One that blocks delays no heartbeat; one that stops the job from within ends."""
    threads: list[str] = []
    notify(CHANGE, on_rebalance=lambda: threads.append(threading.current_thread().name))
    assert threads == ["jobsync-callbacks"]


@pytest.mark.parametrize("hangs", [False, True])
def test_callbacks_that_were_stopped_can_be_used_again(*, hangs: bool) -> None:
    """By a job that is entered again, also if a function of its first use has not returned."""
    called, release = threading.Event(), threading.Event()
    calls: list[frozenset[int]] = []

    def on_added(tokens: frozenset[int]) -> None:
        calls.append(tokens)
        called.set()
        if hangs and len(calls) == 1:
            release.wait()

    callbacks = Callbacks(Events(), None, on_added, None)
    for number in range(3):
        callbacks.notify(TokenChange(number, frozenset({number}), frozenset(), is_initial=False))
        called.wait()
        callbacks.stop(0.05 if hangs and not number else 10)
    assert calls == [{0}, {1}, {2}]
    release.set()
