"""What an error of a result that does not come in time says."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock

from jobsync import NoResult
from jobsync.core.clock import SystemClock
from jobsync.core.messages import CANCELLED
from jobsync.queue.message import Failure
from jobsync.queue.results import wait_for_result


class PendingBackend:
    """A queue whose only message is never handled."""

    is_billed = False

    async def get(self, _: str) -> Any:
        """Return the message."""
        return SimpleNamespace(state="ready", result_problem="")


@pytest.mark.parametrize(
    ("store", "hint"),
    [
        ("sqlite:////srv/app.db", "Run: jobsync why m1 --url sqlite:////srv/app.db"),
        ("sqlite:////srv/my app.db", "Run: jobsync why m1 --url sqlite:////srv/my%20app.db"),
        (
            "postgresql://***@h/d?schema=a",
            (
                "Run: jobsync why m1 --url 'postgresql://***@h/d?schema=a', with what *** stands "
                "for; or with --app module:name in place of --url"
            ),
        ),
        ("memory://x", "See: await queue.get('m1')"),
    ],
)
async def test_a_timeout_names_a_command_for_the_same_store(store: str, hint: str) -> None:
    """Followed literally it reads the store of the message; a secret is not shown."""
    backend = cast("Any", PendingBackend())
    with pytest.raises(TimeoutError) as caught:
        await wait_for_result(backend, SystemClock(), "m1", 0, store)
    assert str(caught.value) == f"message m1 is ready after 0 s. {hint}"


class ChangingBackend(PendingBackend):
    """A queue whose message ends after some looks; its waits take the time that they are given."""

    def __init__(self, clock: FakeClock, end: Any, looks: int) -> None:
        self.waits: list[float] = []
        self._clock = clock
        self._end = end
        self._looks = looks

    async def get(self, name: str) -> Any:
        """Return the message."""
        self._looks -= 1
        return self._end if self._looks < 0 else await super().get(name)

    async def wait_for_end(self, seconds: float) -> None:
        """Wait."""
        self.waits.append(round(seconds, 3))
        self._clock.mono_seconds += seconds


DONE = SimpleNamespace(state="completed", result={"n": 1}, result_problem="")


@pytest.mark.parametrize(
    ("is_billed", "waits"),
    [(False, [0.05, 0.075, 0.113]), (True, [1.0, 1.5, 2.25, 3.375, 5.0, 5.0])],
)
async def test_a_message_is_looked_at_less_and_less_often(
    *, is_billed: bool, waits: list[float]
) -> None:
    """Where each look costs money, from once a second to once in five."""
    clock = FakeClock()
    backend = ChangingBackend(clock, DONE, len(waits))
    backend.is_billed = is_billed
    assert await wait_for_result(cast("Any", backend), clock, "m1", None, "memory://") == {"n": 1}
    assert backend.waits == waits


async def test_the_pauses_of_a_long_wait_are_limited() -> None:
    """A second is the longest, and the timeout ends the last one."""
    clock = FakeClock()
    backend = ChangingBackend(clock, DONE, 1000)
    start = clock.mono_seconds
    with pytest.raises(TimeoutError):
        await wait_for_result(cast("Any", backend), clock, "m1", 60.5, "memory://")
    assert clock.mono_seconds - start == pytest.approx(60.5)
    assert max(backend.waits) == 1.0


def build_end(state: str, *errors: str, problem: str = "") -> Any:
    """Return a message that has ended, with its errors."""
    failures = tuple(Failure(number, text) for number, text in enumerate(errors, 1))
    return SimpleNamespace(state=state, result=None, result_problem=problem, errors=failures)


@pytest.mark.parametrize(
    ("end", "state", "detail"),
    [
        (None, "unknown", "it was never pushed"),
        (build_end("dead", "ValueError: first", "KeyError: last\n  at"), "dead", "KeyError: last"),
        (build_end("dead"), "dead", "no error was recorded"),
        (build_end("completed", problem="too large"), "completed", "not kept: too large"),
        (
            build_end("cancelled", "ValueError: first", f"{CANCELLED}: stale"),
            "cancelled",
            "it: stale",
        ),
    ],
)
async def test_an_end_without_a_result_is_explained_by_its_last_error(
    end: Any, state: str, detail: str
) -> None:
    """In one line; nobody waits any longer."""
    clock = FakeClock()
    backend = ChangingBackend(clock, end, 0)
    with pytest.raises(NoResult) as caught:
        await wait_for_result(cast("Any", backend), clock, "m1", None, "memory://")
    assert state in str(caught.value)
    assert detail in str(caught.value)
    assert "first" not in str(caught.value)
    assert backend.waits == []
