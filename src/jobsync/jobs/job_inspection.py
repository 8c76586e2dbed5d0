"""What a `Job` shows of itself and its fleet: tokens, nodes, health, finished tasks, SQL."""

import datetime as dt
from typing import Any

from jobsync.core.clock import to_datetime
from jobsync.errors import Invalid
from jobsync.jobs.foreign_claims import Claim
from jobsync.jobs.job_lifecycle import JobLifecycle
from jobsync.jobs.local_node import describe_local_node
from jobsync.jobs.registration import NodeInfo

__all__ = ["JobInspection"]


class JobInspection(JobLifecycle):
    """The part of a `Job` that reads and changes nothing."""

    def get_audit(self) -> list[dict[str, Any]]:
        """Return the tasks that all nodes have finished on the job's date."""
        return [_describe_claim(claim) for claim in self._list_claims() if claim.state == "done"]

    def incomplete_tasks(self) -> list[dict[str, Any]]:
        """Return the tasks that were claimed on the job's date and are not done, by all nodes.

        They run here or elsewhere, have failed, or were abandoned by a node that is dead.
        """
        return [_describe_claim(claim) for claim in self._list_claims() if claim.state != "done"]

    @property
    def my_tokens(self) -> set[int]:
        """The tokens that this node owns."""
        return set() if self._node is None else set(self._node.tokens)

    @property
    def token_version(self) -> int:
        """The number of the assignment that this node has applied; grows with each change."""
        return 0 if self._node is None else self._node.number

    def am_i_healthy(self) -> bool:
        """Whether this node can claim: its session is trusted. Does not use the store."""
        return self._node is not None and self._node.is_trusted

    def am_i_leader(self) -> bool:
        """Whether this node is the leader, which assigns the tokens. Does not use the store."""
        return self._node is not None and self._node.is_leader

    @property
    def nodes(self) -> list[NodeInfo]:
        """The live nodes, the oldest first."""
        return self.get_active_nodes()

    def get_active_nodes(self) -> list[NodeInfo]:
        """Return the live nodes, the oldest first."""
        if self._node_list is None:
            # Without a fleet, or not entered.
            return [] if self._node is None else [describe_local_node(self.node_name)]
        return self._call(self._node_list.active())

    def get_dead_nodes(self) -> list[NodeInfo]:
        """Return the nodes that have left or died."""
        return [] if self._node_list is None else self._call(self._node_list.dead())

    def get_coordination_status(self) -> dict[str, Any]:
        """Return the state of this node and its fleet.

        `coordination_enabled` and `my_tokens` are the newer release's names for `enabled` and
        `token_count`.
        """
        active = self.get_active_nodes()
        return {
            "node_name": self.node_name,
            "enabled": self.settings.enabled,
            "coordination_enabled": self.settings.enabled,
            "is_healthy": self.am_i_healthy(),
            "is_leader": self.am_i_leader(),
            "token_count": len(self.my_tokens),
            "my_tokens": len(self.my_tokens),
            "token_version": self.token_version,
            "total_tokens": self.settings.total_tokens,
            "last_heartbeat": self.last_heartbeat,
            "active_nodes": [node["name"] for node in active],
            "running_tasks": [] if self._node is None else self._node.running,
        }

    @property
    def last_heartbeat(self) -> dt.datetime | None:
        """When the heartbeat was sent that this node's trust is based on."""
        return None if self._node_list is None else self._node_list.last_heartbeat()

    def health_ready(self) -> tuple[dict[str, Any], int]:
        """Return the body and the HTTP status of a readiness probe.

        Not ready within a heartbeat after the store stops to answer, although this node can go on
        with its tasks until its trust runs out; then `am_i_healthy` returns False too.
        """
        node = self._node
        if node is None or not node.is_trusted or not node.is_connected:
            return {"status": "not_ready"}, 503
        facts = {"node": self.node_name, "token_count": len(self.my_tokens)}
        return {"status": "ready", **facts}, 200

    def health_live(self) -> tuple[dict[str, Any], int]:
        """Return the body and the HTTP status of a liveness probe. Never uses the store."""
        return {"status": "alive"}, 200

    @property
    def connection(self) -> Any:
        """A connection to the store's database for your own SQL, one per thread.

        On PostgreSQL it is psycopg's, on SQLite one that is used in the same way: parameters
        are `%s`, each statement is a transaction or part of `with connection.transaction()`,
        and times are in the process's zone. Closed when the job is left.

        Raises:
            Misconfigured: the store has no SQL.
        """
        if self._views is None:
            raise Invalid("job", self, "is not entered", "use it in a with statement")
        return self._views.connection

    @property
    def tables(self) -> dict[str, str]:
        """The names of the SQL views, by the guide's words: Node, Token, Lock, Claim and so on."""
        return (self._views or self._build_views()).tables

    # Private names that the guide uses.

    @property
    def _cn(self) -> Any:
        return self.connection

    @property
    def _tables(self) -> dict[str, str]:
        return self.tables

    @property
    def _my_tokens(self) -> set[int]:
        return self.my_tokens

    @property
    def _token_version(self) -> int:
        return self.token_version

    @property
    def _last_heartbeat_sent(self) -> dt.datetime | None:
        return self.last_heartbeat

    @property
    def _coordination_enabled(self) -> bool:
        return self.settings.enabled

    def _list_claims(self) -> list[Claim]:
        return self._call(self._entered_node.list_claims())


def _describe_claim(claim: Claim) -> dict[str, Any]:
    """Describe a claim; `item` is the guide's name for `task_id`."""
    return {
        "task_id": claim.task,
        "item": claim.task,
        "node": claim.node,
        "state": claim.state,
        "run": claim.run,
        "created_on": to_datetime(claim.started),
        "date": dt.date.fromisoformat(claim.date),
    }
