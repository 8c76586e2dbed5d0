"""What happens to a node and its tasks, as facts to listen to."""

import logging
from typing import ClassVar

from jobsync.events import Event

__all__ = [
    "AuditRefused",
    "NodeFailed",
    "NodeJoined",
    "NodeRestored",
    "PinsExpired",
    "PinsIgnored",
    "Rebalanced",
    "TokensChanged",
    "ViewsMissing",
]


class _AboutNode(Event, frozen=True, kw_only=True):
    node: str


class NodeJoined(_AboutNode, frozen=True, kw_only=True):
    """This process holds the node's name, in a new session."""

    name: ClassVar[str] = "jobs:node-joined"
    level: ClassVar[int] = logging.INFO

    incarnation: str


class NodeRestored(_AboutNode, frozen=True, kw_only=True):
    """Somebody had deleted this node's record; it lives, and has written it again."""

    name: ClassVar[str] = "jobs:node-restored"
    level: ClassVar[int] = logging.WARNING


class NodeFailed(_AboutNode, frozen=True, kw_only=True):
    """This node has stopped by an error of this library or of what it read. It owns nothing."""

    name: ClassVar[str] = "jobs:node-failed"
    level: ClassVar[int] = logging.ERROR

    error: str


class TokensChanged(_AboutNode, frozen=True, kw_only=True):
    """This node has applied another assignment."""

    name: ClassVar[str] = "jobs:tokens-changed"
    level: ClassVar[int] = logging.INFO

    number: int
    tokens: int
    """How many it owns now."""
    added: int
    removed: int


class Rebalanced(_AboutNode, frozen=True, kw_only=True):
    """This node leads, and has written another assignment."""

    name: ClassVar[str] = "jobs:rebalanced"
    level: ClassVar[int] = logging.INFO

    number: int
    reason: str
    nodes_before: int
    nodes_after: int
    tokens_moved: int


class AuditRefused(_AboutNode, frozen=True, kw_only=True):
    """A task was finished too late: by then it was another node's."""

    name: ClassVar[str] = "jobs:audit-refused"
    level: ClassVar[int] = logging.WARNING

    task_id: str
    reason: str


class PinsExpired(_AboutNode, frozen=True, kw_only=True):
    """This node leads, and has removed pins whose time was over."""

    name: ClassVar[str] = "jobs:pins-expired"
    level: ClassVar[int] = logging.INFO

    count: int


class PinsIgnored(_AboutNode, frozen=True, kw_only=True):
    """This node leads with `locks_enabled=False`, and there are pins."""

    name: ClassVar[str] = "jobs:pins-ignored"
    level: ClassVar[int] = logging.WARNING

    count: int


class ViewsMissing(_AboutNode, frozen=True, kw_only=True):
    """The SQL views are not there or are old, and this user may make none. All else is well."""

    name: ClassVar[str] = "jobs:views-missing"
    level: ClassVar[int] = logging.WARNING

    appname: str
    reason: str
    fix: str
