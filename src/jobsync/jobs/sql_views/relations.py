"""Whose relations bear a fleet's prefix: ours, of which version, or somebody else's.

The original library keeps tables of the same names. Nothing is ever done to them: who finds
one refuses to go on, and says so.
"""

from collections.abc import Collection, Iterable

import msgspec

from jobsync.errors import Misconfigured
from jobsync.jobs.job_keys import JobKeys

__all__ = ["FACE_VERSION", "MARK", "Relation", "find_version"]

FACE_VERSION = 2
"""The version of the views; grows when any of them changes."""

_OURS = "jobsync "
MARK = f"{_OURS}{FACE_VERSION}"
"""What our views are marked with."""

_ORIGINALS = (
    *("node", "token", "lock", "leader", "leader_lock", "rebalance", "rebalance_lock", "claim"),
    *("audit", "checkpoint", "inst", "session", "message", "unfinished"),
)
"""The names that we and the original give to relations, after the prefix."""


class Relation(msgspec.Struct, frozen=True):
    """A table or a view, and what it is marked with."""

    name: str
    mark: str


def find_version(found: Iterable[Relation], views: Collection[str], places: JobKeys) -> int:
    """Give the version of a fleet's views; 0, if any of them is missing.

    Args:
        found: what bears the fleet's prefix.
        views: which views there ought to be.
        places: the fleet's keys.

    Raises:
        Misconfigured: a relation is somebody else's.
    """
    known = {f"{places.name}{name}" for name in (*_ORIGINALS, *views)}
    versions = dict.fromkeys((f"{places.name}{view}" for view in views), 0)
    for relation in found:
        number = relation.mark.removeprefix(_OURS)
        if relation.mark.startswith(_OURS) and number.isdecimal():
            versions[relation.name] = int(number)
        elif relation.name in known:
            raise Misconfigured(
                "appname",
                places.name,
                f"the relation {relation.name} is there already and is not jobsync-fleet's",
                "set config.sync.sql.appname to another prefix, name another ?schema= in the "
                f"url, or rename {relation.name} if nobody needs it",
            )
    return min(versions.values())
