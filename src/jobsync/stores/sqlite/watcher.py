"""Learns from the operating system that files have changed (inotify, on Linux).

One thread of the process waits for changes of all watched files, and costs nothing while there
are none. Where the system has no such service, or no more of it, a file is not watched, and
whoever waits for its changes has to look now and then.

A change is reported after two milliseconds, because a commit becomes visible a moment after it is
written. Changes of a busy file are reported 20 times a second.
"""

import ctypes
import os
import select
import struct
import threading
from weakref import WeakValueDictionary, finalize

from jobsync.stores.memory import LocalNotifier

__all__ = ["FileWatcher"]

_IN_MODIFY = 0x2
_IN_ATTRIB = 0x4
_EVENT = struct.Struct("iIII")
_BUFFER = 4096

_FIRST_PAUSE = 0.002
_LONGEST_PAUSE = 0.05
"""Seconds between a change and its report, which has all changes until then."""
_QUIET = 0.02
"""Seconds without changes after which a file is not busy any more."""


class FileWatcher:
    """Wakes notifiers when files change. A process has one, see `current`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._inotify: _Inotify | None = None
        self._notifiers: WeakValueDictionary[int, LocalNotifier] = WeakValueDictionary()
        """What to wake, by the number of a watch."""

    @staticmethod
    def current() -> "FileWatcher":
        """Return this process's watcher. A forked child has one of its own."""
        global _current  # noqa: PLW0603 - a process needs one thread, whoever asks for it
        if _current.pid != os.getpid():
            _current = FileWatcher()
        return _current

    def watch(self, path: str, notifier: LocalNotifier) -> bool:
        """Wake all waiters of a notifier whenever a file is written or touched.

        The watch ends with the notifier, or with the file.

        Returns:
            False if that cannot be done, here or with this file.
        """
        with self._lock:
            try:
                inotify = self._inotify or self._start()
                # A file that is watched already keeps its number.
                number = inotify.add(path)
            except (AttributeError, OSError, RuntimeError):
                # There is no such service or file, or no more watches or threads.
                return False
            if self._notifiers.get(number) is not notifier:
                self._notifiers[number] = notifier
                finalize(notifier, inotify.remove, number).atexit = False
        return True

    def _start(self) -> "_Inotify":
        inotify = _Inotify()
        threading.Thread(
            target=self._run, args=(inotify,), name="jobsync-watcher", daemon=True
        ).start()
        self._inotify = inotify
        return inotify

    def _run(self, inotify: "_Inotify") -> None:
        rest = threading.Event()
        pause = _FIRST_PAUSE
        while True:
            if not inotify.has_changes(within=_QUIET):
                pause = _FIRST_PAUSE
            changed = inotify.read()
            rest.wait(pause)
            if inotify.has_changes(within=0):
                changed |= inotify.read()
                pause = min(2 * pause, _LONGEST_PAUSE)
            for number in changed:
                if (notifier := self._notifiers.get(number)) is not None:
                    notifier.wake_all()
                    # The thread must not keep it while it waits.
                    del notifier


class _Inotify:
    """The system's queue of changes.

    Raises:
        AttributeError: this system has none.
        OSError: there are no more of them.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._add, self._remove = libc.inotify_add_watch, libc.inotify_rm_watch
        self._add.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
        self._descriptor = _check(libc.inotify_init1(os.O_CLOEXEC))
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def add(self, path: str) -> int:
        """Watch a file; return the number of the watch. The file is not opened."""
        return _check(self._add(self._descriptor, os.fsencode(path), _IN_MODIFY | _IN_ATTRIB))

    def remove(self, number: int) -> None:
        """End a watch; nothing happens if it has ended with its file. No number is used twice."""
        self._remove(self._descriptor, number)

    def read(self) -> set[int]:
        """Wait for changes; return the numbers of their watches."""
        content = os.read(self._descriptor, _BUFFER)
        changed: set[int] = set()
        position = 0
        while position < len(content):
            number, _, _, length = _EVENT.unpack_from(content, position)
            changed.add(number)
            position += _EVENT.size + length
        return changed

    def has_changes(self, within: float) -> bool:
        """Wait some seconds at most; return whether there are changes to read."""
        return bool(self._poll.poll(1000 * within))


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


_current = FileWatcher()
