"""Processes that run `jobsync work`, seen from outside."""

import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

import shop
from terminal import JOBSYNC

__all__ = ["Shop"]


class Shop:
    """One process at work on a queue.

    Args:
        url: which store.
        queue: which queue.
        log: the file that its standard error goes to.
        words: further options of `jobsync work`.
        ledger: the file in which it notes what it has handled.
        options: what its plugin is told.
    """

    def __init__(
        self,
        url: str,
        queue: str,
        log: Path,
        *words: str,
        ledger: Path | None = None,
        **options: Any,
    ) -> None:
        self._log = log
        environ = {
            **os.environ,
            "JOBSYNC_URL": url,
            "SHOP": queue,
            "SHOP_OPTIONS": json.dumps(options),
            "SHOP_LEDGER": str(ledger or ""),
            "JOBSYNC_HTTP": "0",
        }
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*JOBSYNC, "work", "shop:open_shop", *words],
                cwd=Path(shop.__file__).parent,
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.runs:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()

    @property
    def runs(self) -> bool:
        """Whether it is there."""
        return self.process.poll() is None

    @property
    def told(self) -> str:
        """What it has logged."""
        return self._log.read_text()

    @property
    def is_at_work(self) -> bool:
        """Whether it has begun."""
        assert self.runs, self.told
        return "at work" in self.told

    def ask(self, path: str) -> int:
        """Ask a probe; give the status."""
        (address,) = re.findall(r"http://\S+", self.told)
        try:
            with urllib.request.urlopen(f"{address}{path}", timeout=30) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code
