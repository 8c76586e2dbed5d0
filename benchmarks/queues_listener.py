"""The latency from a push to its start in another process with bare drivers: NOTIFY, then a claim.

The same table and the same two commits, one after the other, by the clock that all processes of a
machine share.
"""

import subprocess
import sys
import time

import psycopg

from jobsync import Components

__all__ = ["BareListener"]

_PUSH = """
WITH pushed AS (
  INSERT INTO jobsync_message (queue, id, state, due, payload, max_attempts)
  VALUES ('bare', %s, 'ready', clock_timestamp(), '{}', 4) RETURNING id
) SELECT pg_notify('bare', id) FROM pushed
"""
_CLAIM = """
UPDATE jobsync_message SET state = 'claimed', deliveries = deliveries + 1,
  due = clock_timestamp() + interval '30 s'
WHERE id = ANY (ARRAY (
  SELECT id FROM jobsync_message WHERE queue = 'bare' AND state = 'ready'
  ORDER BY position LIMIT 10 FOR UPDATE SKIP LOCKED
)) RETURNING id, payload
"""
_FINISH = "DELETE FROM jobsync_message WHERE queue = 'bare'"


class BareListener:
    """A process that listens and claims, used by the one that pushes."""

    def __init__(self, url: str) -> None:
        self._ids = Components.system().ids
        self._connection = psycopg.connect(url, autocommit=True)
        self._process = subprocess.Popen(
            [sys.executable, __file__, url], stdout=subprocess.PIPE, text=True
        )
        self._read_time()

    def push(self) -> float:
        """Push; return the seconds until the other process has the message."""
        sent = time.monotonic()
        self._connection.execute(_PUSH, self._ids.records(1))
        return self._read_time() - sent

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._connection.close()

    def _read_time(self) -> float:
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())


def _listen(url: str) -> None:
    """Claim each announced message, and print when that was done."""
    listener, claimer = (psycopg.connect(url, autocommit=True) for _ in range(2))
    listener.execute("LISTEN bare")
    print(time.monotonic(), flush=True)
    for _ in listener.notifies():
        claimer.execute(_CLAIM).fetchall()
        print(time.monotonic(), flush=True)
        claimer.execute(_FINISH)


if __name__ == "__main__":
    _listen(sys.argv[1])
