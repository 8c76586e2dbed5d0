"""Detects an `__exit__` that is called before its `with` block has ended.

On its own because `Job` and its lifecycle both need it.
"""

import sys
import threading
from types import FrameType

__all__ = ["ExitGuard"]


class ExitGuard:
    """Detects an `__exit__` that is called before its `with` block has ended.

    A signal handler that calls `__exit__` by hand passes the same arguments as the end of the
    block, but the block's work is not done. The stack shows the difference: at the end of a
    block the block itself is the caller; a call from within comes from further up the stack or
    from another thread.

    Args:
        depth: how many calls up the stack the block is.
    """

    def __init__(self, depth: int) -> None:
        self._block: FrameType | None = sys._getframe(depth)  # noqa: SLF001 - the only way to know
        self._thread = threading.get_ident()

    def is_left_early(self, depth: int) -> bool:
        """Whether the caller, `depth` calls up, leaves a block that has not ended."""
        if threading.get_ident() != self._thread:
            return True
        caller: FrameType | None = sys._getframe(depth)  # noqa: SLF001 - likewise
        if caller is self._block:
            return False
        while caller is not None and caller is not self._block:
            caller = caller.f_back
        # A block that is not on the stack was entered by an ExitStack, which leaves at its end.
        return caller is not None

    def release(self) -> None:
        """Drop the reference to the block and its variables."""
        self._block = None
