"""One change of state at a time, and no hook that waits for itself.

Hooks are called under a turn. One that asks for what is under way already is told so; one
that asks for the opposite is refused. Neither waits for a turn that ends only after it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from jobsync.errors import Invalid

__all__ = ["Turn"]


class Turn:
    """A lock that knows who has it, and what for.

    Args:
        kind: whose turns these are, for errors.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._holder: asyncio.Task[Any] | None = None
        self.doing = ""
        """What is under way."""

    @asynccontextmanager
    async def take(self, what: str) -> AsyncIterator[None]:
        """Do something when it is our turn."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # Whoever had it in a loop that is over has it no more.
            self._loop, self._lock = loop, asyncio.Lock()
        async with self._lock:
            self._holder, self.doing = asyncio.current_task(), what
            try:
                yield
            finally:
                self._holder, self.doing = None, ""

    def is_part_of(self, what: str, name: str, *, is_hook: bool = False) -> bool:
        """Say whether the task that asks does that already, or is waited for by who does.

        Args:
            what: what it asks for.
            name: of whom.
            is_hook: whether whoever has the turn waits for this task.

        Raises:
            Invalid: it is part of something else.
        """
        is_own = self._holder is not None and self._holder is asyncio.current_task()
        if not (is_own or is_hook):
            return False
        if self.doing != what:
            fix = f"{what} it from elsewhere"
            raise Invalid(self._kind, name, f"{what} was asked for by a hook of {self.doing}", fix)
        return True
