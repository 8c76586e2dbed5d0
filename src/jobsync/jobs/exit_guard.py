"""Whether a `with` statement is being left at its end, or from somewhere inside.

A signal handler that calls `__exit__` by hand does so with the same arguments as the end
of the block, but the block has not ended: what was begun in it is not done. It can be told
by where the block stands: at its end the block itself calls; in between, the call comes
from further up the stack, or from another thread.
"""

import sys
import threading
from types import FrameType

__all__ = ["ExitGuard"]


class ExitGuard:
    """Remembers who entered.

    Args:
        depth: how many calls up the stack the block is.
    """

    def __init__(self, depth: int) -> None:
        self._block: FrameType | None = sys._getframe(depth)  # noqa: SLF001 - the one way to know
        self._thread = threading.get_ident()

    def is_left_early(self, depth: int) -> bool:
        """Say whether the caller, so many calls up, leaves a block that has not ended."""
        if threading.get_ident() != self._thread:
            return True
        caller: FrameType | None = sys._getframe(depth)  # noqa: SLF001 - as above
        if caller is self._block:
            return False
        while caller is not None and caller is not self._block:
            caller = caller.f_back
        # A block that is not on the stack was entered by an ExitStack, which leaves at its end.
        return caller is not None

    def forget(self) -> None:
        """Let go of the block and its variables."""
        self._block = None
