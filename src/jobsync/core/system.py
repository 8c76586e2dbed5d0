"""The real clock and the real randomness: the one file that asks the machine."""

import asyncio
import os
import random
import time
from functools import cache
from pathlib import Path

from jobsync.core.clock import Mono, Wall

__all__ = ["SystemClock", "SystemRandomness"]

# Linux stops CLOCK_MONOTONIC while suspended; a lease must not stand still meanwhile.
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SystemClock:
    """This machine's clocks."""

    def wall(self) -> Wall:
        """Tell the time of day."""
        return Wall(time.time())

    def mono(self) -> Mono:
        """Tell the time since boot, including time spent suspended."""
        return Mono(time.clock_gettime(_SINCE_BOOT))

    def boot(self) -> int:
        """Identify this boot, or give 0 where the system does not say."""
        return _read_boot_id()

    async def sleep(self, seconds: float) -> None:
        """Wait on the running loop."""
        await asyncio.sleep(seconds)


@cache
def _read_boot_id() -> int:
    if not _BOOT_ID.exists():
        return 0
    # 60 bits: what every SQL integer holds.
    return int(_BOOT_ID.read_text(encoding="ascii").replace("-", "")[:15], 16)


class SystemRandomness:
    """The operating system's randomness, safe across forks."""

    def __init__(self) -> None:
        self._random = random.SystemRandom()

    def bytes(self, count: int) -> bytes:
        """Draw bytes that nobody can guess or repeat."""
        return os.urandom(count)

    def uniform(self, low: float, high: float) -> float:
        """Draw a number between two bounds."""
        return self._random.uniform(low, high)
