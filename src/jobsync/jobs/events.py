"""What happens to a node and its tasks, as facts to listen to."""

import logging
from typing import ClassVar

from jobsync.events import Event

__all__ = [
    "AuditRefused",
    "NodeFailed",
    "NodeJoined",
    "PinsExpired",
    "PinsIgnored",
    "Rebalanced",
    "TokensChanged",
]


class _AboutNode(Event, frozen=True, kw_only=True):
    node: str


class NodeJoined(_AboutNode, frozen=True, kw_only=True):
    """This process holds the node's name, in a new session."""

    name: ClassVar[str] = "jobs:node-joined"
    level: ClassVar[int] = logging.INFO

    incarnation: str


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
