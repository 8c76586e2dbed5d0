"""Whether a file has changed, by what its folder tells of it: no query, nothing opened.

To open one of SQLite's files would be dangerous: whoever closes a file gives up all locks that
its process holds on it.

What counts is not when a file was written but when that can be seen. SQLite writes its log,
syncs it, and only then do others see the commit; and file times are as coarse as the kernel's
tick, so that a second change may leave the first one's. So a change counts when it is found,
and again a few times while a disk may still be at it, each time twice as long after.
"""

import os

from jobsync.core.clock import Clock, Mono

__all__ = ["FileChanges"]

_FIRST = 0.1
"""Seconds after a change before it counts again: longer than a tick, and than most syncs."""
_LAST = 2.0
"""Seconds between two counts of one change at the most; a disk that is slower is waited for by
who polls."""

_NEVER = Mono(float("inf"))


class FileChanges:
    """Changes of one file, counted.

    Args:
        path: which one; it need not be there, nor in reach.
        clock: this machine's.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._count = 0
        self._stamp = self._look()
        self._pause = _FIRST
        self._again = _NEVER

    def count(self) -> int:
        """Give a number that has grown if there may be something new to see."""
        stamp, now = self._look(), self._clock.mono()
        if stamp != self._stamp:
            self._stamp, self._pause = stamp, _FIRST
        elif now >= self._again:
            self._pause *= 2
        else:
            return self._count
        self._again = now + self._pause if self._pause <= _LAST else _NEVER
        self._count += 1
        return self._count

    def _look(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._path)  # noqa: PTH116 - half the cost of Path.stat
        except OSError:
            return (0, 0, 0)
        return (found.st_ino, found.st_size, found.st_mtime_ns)
