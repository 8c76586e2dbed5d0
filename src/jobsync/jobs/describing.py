"""Claims and nodes as people read them: plain dicts, with the names of the guide."""

import datetime as dt
import os
from typing import Any, TypeAlias

from jobsync.jobs.claims import Claim

__all__ = ["NodeInfo", "describe_alone", "describe_claim"]

NodeInfo: TypeAlias = dict[str, Any]
"""name, created_on, last_heartbeat, host, pid, stage, is_leader"""


def describe_claim(claim: Claim) -> dict[str, Any]:
    """Describe a claim; `item` is the guide's name for `task_id`."""
    return {
        "task_id": claim.task,
        "item": claim.task,
        "node": claim.node,
        "state": claim.state,
        "run": claim.run,
        "created_on": dt.datetime.fromtimestamp(claim.started, dt.UTC),
        "date": dt.date.fromisoformat(claim.date),
    }


def describe_alone(name: str) -> NodeInfo:
    """Describe a node that shares nothing with anybody, and is recorded nowhere."""
    facts = {"host": "", "pid": os.getpid(), "stage": "ready", "is_leader": True}
    return {"name": name, "created_on": None, "last_heartbeat": None, **facts}
