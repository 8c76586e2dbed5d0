"""What an error of a result that does not come in time says."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobsync.core.clock import SystemClock
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
