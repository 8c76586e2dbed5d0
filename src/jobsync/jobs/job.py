"""A node of a fleet that shares tasks, for callers that block.

    with Job("worker-01", "production", config) as job:
        for task_id in get_tasks():
            if job.can_claim_task(Task(task_id)):
                job.add_task(Task(task_id))
                process(task_id)
        job.write_audit()

Promises: at any moment a task belongs to at most one live node. A node that cannot renew
its session stops claiming before anybody else may. A normal end marks what was added as
done and hands tokens over; after an exception nothing is marked, and others do it again.

Every method may be called from any thread. `__exit__` may be called early, repeatedly, and
from a signal handler that interrupted another call.
"""

import asyncio
import datetime as dt
import os
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.coordination.membership import Membership, describe_process
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.core.assignment import token_maker
from jobsync.core.urls import ObjectsUrl
from jobsync.errors import ClaimLost, Invalid, OutcomeUnknown, Unavailable
from jobsync.jobs.background import Background
from jobsync.jobs.callbacks import Callbacks
from jobsync.jobs.claims import Claim
from jobsync.jobs.config import CoordinationConfig, check_neighbours, resolve_coordination
from jobsync.jobs.exit_guard import ExitGuard
from jobsync.jobs.health import Health
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.job_node import JobNode, JobNodeSettings
from jobsync.jobs.local_node import LocalNode, NodeInfo, describe_alone, describe_claim
from jobsync.jobs.pins import LockInfo, Pins
from jobsync.jobs.sql_views import SqlViews
from jobsync.jobs.task import Task, check_callables, read_date, read_name, read_seconds, to_task
from jobsync.jobs.task_loop import TaskLoop, steps
from jobsync.stores.opening import read_url

__all__ = ["Job"]

T = TypeVar("T")

_EXIT_GRACE = 4.0
"""The most seconds that leaving takes beyond `wait_on_exit`."""


class Job:
    """One node. Use it in a `with` statement.

    Args:
        node_name: the node's name; one live process of a fleet can have it.
        site: where it runs; all nodes of a fleet give the same.
        config: an object or module with `sync.coordination.*` and `sync.sql.*`.
        date: which date's tasks; today by default.
        wait_on_enter: the most seconds that entering waits for others and for tokens.
        wait_on_exit: the most seconds, beyond a few, that leaving waits for others.
        skip_db_init: accepted and unused: tables are made where they are missing.
        lock_provider: called with the job before it owns anything, to pin tasks.
        clear_existing_locks: replaces the pins that this node has made.
        coordination_config: comes before `config`.
        url: which store; comes before everything else.
        observer: takes no tokens.
        once_per_date: what was done is never done again on the same date.
        on_rebalance: called with each change of what this node owns, or without an argument.
        on_tokens_added: called with the set of tokens gained.
        on_tokens_removed: called with the set of tokens given up.
        components: time, randomness and events.

    Raises:
        Invalid, Misconfigured: something cannot be taken, with the fix.
    """

    def __init__(
        self,
        node_name: str,
        site: str | CoordinationConfig | None = None,
        config: object = None,
        date: dt.date | dt.datetime | None = None,
        wait_on_enter: float | dt.timedelta = 120,
        wait_on_exit: float | dt.timedelta = 0,
        skip_db_init: bool = False,  # noqa: FBT001, FBT002 - as the guide has it
        lock_provider: Callable[["Job"], object] | None = None,
        clear_existing_locks: bool = False,  # noqa: FBT001, FBT002 - likewise
        coordination_config: CoordinationConfig | None = None,
        *,
        url: str | None = None,
        observer: bool = False,
        once_per_date: bool = False,
        on_rebalance: Callable[..., object] | None = None,
        on_tokens_added: Callable[[frozenset[int]], object] | None = None,
        on_tokens_removed: Callable[[frozenset[int]], object] | None = None,
        components: Components | None = None,
    ) -> None:
        del skip_db_init
        if isinstance(site, CoordinationConfig):
            # As the newer release has it: the configuration comes second, the date third.
            coordination_config, site = site, None
            if isinstance(config, dt.date):
                date, config = config, None
        self.node_name = read_name("node_name", node_name)
        self.site = "" if site is None else read_name("site", site)
        self.components = components or Components.system()
        self.date = read_date(date, self.components)
        self.settings = resolve_coordination(coordination_config, config, os.environ).value
        self._token = token_maker(self.settings.total_tokens, self.settings.hash_function)
        self._url = url
        self._wait_on_enter = read_seconds("wait_on_enter", wait_on_enter)
        self._wait_on_exit = read_seconds("wait_on_exit", wait_on_exit)
        self._lock_provider = lock_provider
        self._clear_existing_locks = clear_existing_locks
        check_callables(
            lock_provider=lock_provider,
            on_rebalance=on_rebalance,
            on_tokens_added=on_tokens_added,
            on_tokens_removed=on_tokens_removed,
        )
        self._is_observer = observer
        self._once_per_date = once_per_date
        self._teller = Callbacks(
            self.components.events, on_rebalance, on_tokens_added, on_tokens_removed
        )
        self._background: Background | None = None
        self._face: SqlViews | None = None
        self._entrance: ExitGuard | None = None
        self._membership: Membership | None = None
        self._node: JobNode | LocalNode | None = None
        self._health: Health | None = None
        self._is_stopping = False
        self._pinning = Pins(None, self._call, self._token)
        self._in_blocks: set[str] = set()
        self._enter_by = self.components.clock.mono()

    def __repr__(self) -> str:
        return f"Job({self.node_name!r}, date={self.date.isoformat()})"

    def __enter__(self) -> Self:
        """Join, and wait until this node has its share, for `wait_on_enter` seconds at most.

        Raises:
            Misconfigured: the name is taken or the fleet has other settings, with the fix.
            TimeoutError: fewer than `minimum_nodes` came in time.
        """
        if self._background is not None:
            raise Invalid("job", self, "is entered already", "leave it first, or make another")
        check_neighbours()
        self._entrance = ExitGuard(2)
        self._background = Background(f"jobsync-{self.node_name}")
        self._is_stopping = False
        self._enter_by = self.components.clock.mono() + self._wait_on_enter
        try:
            self._face = self._make_face()
            if self.settings.enabled:
                self._call(self._join())
                self._face.install(self.node_name)
                self._provide_locks()
                self._call(self._start())
            else:
                total, once = self.settings.total_tokens, self._once_per_date
                self._node = LocalNode(total, self._token, once_per_date=once)
        except BaseException:
            self._leave(is_done=False)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave. At a normal end of the block, what was added is marked as done first.

        Called by hand while the block still runs, as from a signal handler, it marks
        nothing: what was added and not audited is done again elsewhere. Safe to repeat.

        Raises:
            Unavailable, OutcomeUnknown: the node has left, but not everything is marked.
        """
        entrance, self._entrance = self._entrance, None
        if entrance is not None:
            is_early = entrance.is_left_early(2)
            entrance.forget()
            self._leave(is_done=kind is None and not is_early)

    def can_claim_task(self, task: Task | object) -> bool:
        """Say whether a task is this node's to do now. Touches no store."""
        node = self._node
        # Not by `text`: a property costs a call, and this is asked for each task of every list.
        text = str(task.id) if isinstance(task, Task) else Task(task).text
        return node is not None and node.can_claim(text)

    def add_task(self, task: Task | object) -> None:
        """Claim a task, for this node alone, until `write_audit` or the end.

        Raises:
            ClaimLost: it is another node's; do not do it.
        """
        text = to_task(task).text
        if lost := self._call(self._here.claim([text])):
            raise ClaimLost(text, lost[text])

    def add_tasks(self, tasks: Iterable[Task | object]) -> list[Task]:
        """Claim tasks in one request; give those that are this node's to do."""
        wanted = {task.text: task for task in map(to_task, tasks)}
        lost = self._call(self._here.claim(list(wanted)))
        return [task for text, task in wanted.items() if text not in lost]

    def set_claim(self, task: Task | object) -> None:
        """Claim a task, or each of several, as `add_task` does."""
        several = isinstance(task, Iterable) and not isinstance(task, str | bytes)
        for each in task if several else (task,):  # type: ignore[attr-defined]
            self.add_task(each)

    @contextmanager
    def task(self, task: Task | object) -> Iterator[Task]:
        """Claim a task for a block; its end marks it as done, an exception as failed.

        Raises:
            ClaimLost: it is another node's; the block is not entered.
        """
        claimed = to_task(task)
        if claimed.text in self._in_blocks:
            raise ClaimLost(claimed.text, "this node does it already")
        self._in_blocks.add(claimed.text)
        try:
            self.add_task(claimed)
            try:
                yield claimed
            except BaseException:
                # Invalid: the block was left together with the job, and so was its claim.
                with suppress(Unavailable, OutcomeUnknown, Invalid):
                    self._call(self._here.finish([claimed.text], "failed"))
                raise
            self._call(self._here.finish([claimed.text]))
        finally:
            self._in_blocks.discard(claimed.text)

    def tasks(
        self, source: Callable[[], Iterable[Task | object]] | Iterable[Task | object]
    ) -> Generator[Task, None, None]:
        """Give tasks to do, one by one, until none of them is left undone anywhere.

        Each is claimed before it is given and marked as done when the next is asked for;
        one that the loop is left in the middle of is marked as failed.

        Args:
            source: the tasks, or a function that gives those that are pending; it is
                called again for each round.
        """
        walk = TaskLoop(self._here, self.components.clock, source, self._in_blocks)
        return steps(walk, self._call)

    def stop(self) -> None:
        """Take no more tasks, and hand the rest over; for a signal handler.

        Returns at once. `can_claim_task` says no from now on, and a loop over `tasks` ends
        after the task in hand; so the block comes to its normal end, which marks what was
        done. Safe to repeat, from any thread.
        """
        self._is_stopping = True
        background, node = self._background, self._node
        if background is not None and node is not None:
            node.is_retiring = True
            background.post(node.retire)

    def write_audit(self) -> None:
        """Mark everything that was added as done; what a block or a loop has in hand is not.

        Raises:
            OutcomeUnknown: nobody can say of some of them; call again.
            Unavailable: the store does not answer; call again.
        """
        self._call(self._here.finish(self._added(self._here)))

    def get_audit(self) -> list[dict[str, Any]]:
        """Give what was done on the job's date, by all nodes."""
        return [describe_claim(claim) for claim in self._claims() if claim.state == "done"]

    def incomplete_tasks(self) -> list[dict[str, Any]]:
        """Give what was claimed on the job's date and is not done, by all nodes.

        Running here or elsewhere, failed, or abandoned by a node that is dead.
        """
        return [describe_claim(claim) for claim in self._claims() if claim.state != "done"]

    def forget(self, *, older_than_days: float) -> dict[str, int]:
        """Remove what is older than so many days; give how many records of each kind.

        Claims of dates that nobody has begun to work on since, nodes that have left or died
        before, and the history of rebalances. Nothing that is in use is touched.

        Raises:
            Invalid: that is less than a day.
        """
        return msgspec.to_builtins(self._call(self._here.forget(older_than_days)))  # type: ignore[no-any-return]

    def task_to_token(self, task: Task | object) -> int:
        """Give the token that a task belongs to."""
        return self._token(to_task(task).text)

    @property
    def my_tokens(self) -> set[int]:
        """The tokens that this node owns."""
        return set() if self._node is None else set(self._node.tokens)

    @property
    def token_version(self) -> int:
        """The number of the assignment that this node goes by; grows with each change."""
        return 0 if self._node is None else self._node.number

    def am_i_healthy(self) -> bool:
        """Say whether this node can claim: its session is current. Touches no store."""
        return self._node is not None and self._node.is_trusted

    def am_i_leader(self) -> bool:
        """Say whether this node deals the tokens now. Touches no store."""
        return self._node is not None and self._node.is_leader

    @property
    def nodes(self) -> list[NodeInfo]:
        """The nodes that live, the oldest first."""
        return self.get_active_nodes()

    def get_active_nodes(self) -> list[NodeInfo]:
        """Give the nodes that live, the oldest first."""
        if self._health is None:
            # Alone, or not entered.
            return [] if self._node is None else [describe_alone(self.node_name)]
        return self._call(self._health.active())

    def get_dead_nodes(self) -> list[NodeInfo]:
        """Give the nodes that have left or died."""
        return [] if self._health is None else self._call(self._health.dead())

    def get_coordination_status(self) -> dict[str, Any]:
        """Give what there is to know of this node and its fleet."""
        active = self.get_active_nodes()
        return {
            "node_name": self.node_name,
            "enabled": self.settings.enabled,
            "is_healthy": self.am_i_healthy(),
            "is_leader": self.am_i_leader(),
            "token_count": len(self.my_tokens),
            "token_version": self.token_version,
            "total_tokens": self.settings.total_tokens,
            "last_heartbeat": self.last_heartbeat,
            "active_nodes": [node["name"] for node in active],
            "running_tasks": [] if self._node is None else self._node.running,
        }

    @property
    def last_heartbeat(self) -> dt.datetime | None:
        """When the beat was sent that this node's trust rests on."""
        return None if self._health is None else self._health.last_heartbeat()

    def health_ready(self) -> tuple[dict[str, Any], int]:
        """Give the body and the status of a readiness probe."""
        if not self.am_i_healthy():
            return {"status": "not_ready"}, 503
        facts = {"node": self.node_name, "token_count": len(self.my_tokens)}
        return {"status": "ready", **facts}, 200

    def health_live(self) -> tuple[dict[str, Any], int]:
        """Give the body and the status of a liveness probe. Never touches the store."""
        return {"status": "alive"}, 200

    def register_lock(
        self,
        task_id: Task | object,
        node_patterns: str | Sequence[str],
        reason: str | None = None,
        expires_in_days: float | None = None,
    ) -> None:
        """Pin a task to nodes. Effective at once; outlives this node.

        Args:
            task_id: which task.
            node_patterns: which nodes, as SQL's LIKE reads it; of several patterns the first
                that any node matches.
            reason: for people.
            expires_in_days: when it ends; never, by default.

        Raises:
            Invalid: names what is wrong.
            Misconfigured: `locks_enabled` is False.
        """
        self._pins_here.register([(task_id, node_patterns, reason)], expires_in_days)

    def register_locks_bulk(
        self, locks: Iterable[Sequence[Any]], expires_in_days: float | None = None
    ) -> None:
        """Pin many tasks in one write, each given as (task_id, pattern or patterns, reason).

        Several of one task are alternatives. Raises what `register_lock` raises; then none
        of them was registered.
        """
        self._pins_here.register(locks, expires_in_days)

    def register_task_lock(
        self,
        task_id: Task | object,
        node_pattern: str | Sequence[str],
        reason: str | None = None,
        expires_in_days: float | None = None,
    ) -> None:
        """Pin a task to nodes: `register_lock` as the guide spells it."""
        self.register_lock(task_id, node_pattern, reason, expires_in_days)

    register_task_locks_bulk = register_locks_bulk

    def list_locks(self) -> list[LockInfo]:
        """Give the pins of all nodes that are in force, each with the pattern that counts."""
        return self._pins_here.listed()

    def clear_locks_by_creator(self, creator: str) -> int:
        """Remove the pins that one node has made; count them."""
        return self._pins_here.remove_by(read_name("creator", creator))

    def clear_all_locks(self) -> int:
        """Remove the pins of all nodes; count them."""
        return self._pins_here.remove_all()

    @property
    def connection(self) -> Any:
        """A connection to the store's database for SQL of one's own, one for each thread.

        On PostgreSQL psycopg's own, on SQLite one that is used alike: parameters are `%s`,
        each statement is a transaction or part of `with connection.transaction()`, and times
        are the process's. Closed when the job is left.

        Raises:
            Misconfigured: the store has no SQL.
        """
        if self._face is None:
            raise Invalid("job", self, "is not entered", "use it in a with statement")
        return self._face.connection

    @property
    def tables(self) -> dict[str, str]:
        """The names of the SQL views, by the guide's words: Node, Token, Lock, Claim and so on."""
        face = self._face or self._make_face()
        return face.tables

    # The guide's own spellings.

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

    @property
    def _here(self) -> JobNode | LocalNode:
        """This node, which must have been entered and not left."""
        if self._node is None:
            raise Invalid("job", self, "is not entered", "use it in a with statement")
        if self._node.failure is not None:
            raise Unavailable("the node", "has failed", "enter again") from self._node.failure
        return self._node

    @property
    def _pins_here(self) -> Pins:
        """This node's pins; it must have been entered and not left."""
        if self._background is None:
            raise Invalid("job", self, "is not entered", "use it in a with statement")
        return self._pinning

    def _provide_locks(self) -> None:
        """Register what `lock_provider` asks for, before this node owns anything."""
        provider, replacing = self._lock_provider, self._clear_existing_locks
        if isinstance(self._node, JobNode) and (provider is not None or replacing):
            # Under its name, so that nobody registers in the name of another that lives.
            self._call(self._node.enter(self._wait_left))
            bound = None if provider is None else partial(provider, self)
            self._pinning.provide(bound, replacing=replacing)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the background loop, and wait for it."""
        background = self._background
        if background is None:
            work.close()
            raise Invalid("job", self, "is not entered", "use it in a with statement")
        return background.call(work)

    def _added(self, node: JobNode | LocalNode) -> list[str]:
        """Give what runs here, but for what is marked by the end of its own block."""
        return [task for task in node.running if task not in self._in_blocks]

    def _claims(self) -> list[Claim]:
        return self._call(self._here.claims_of_date())

    def _make_face(self) -> SqlViews:
        url = read_url(self._url or self.settings.reveal_url())
        places = JobKeys(self.settings.appname)
        return SqlViews(url, places, self.components, self.settings.timezone)

    async def _join(self) -> None:
        """Open a session."""
        url = self._url or self.settings.reveal_url()
        options = self._beat_options(url)
        membership = await Membership.join(url, self.components, skip_cold_start=True, **options)
        self._membership = membership
        timing = membership.timing
        self._node = JobNode(
            membership,
            JobNodeSettings(
                fleet=self.settings.appname,
                node=self.node_name,
                site=self.site,
                day=self.date,
                total_tokens=self.settings.total_tokens,
                hash_function=self.settings.hash_function,
                reclaim_after=self.settings.reclaim_delay(timing),
                handover_memory=self.settings.handover_memory,
                once_per_date=self._once_per_date,
                is_observer=self._is_observer,
                rebalance_interval=self.settings.rebalance_check_interval_sec,
                refresh_interval=self.settings.token_refresh_steady_interval_sec,
                locks_enabled=self.settings.locks_enabled,
            ),
            told=self._teller.tell,
            facts=describe_process(self.components),
        )
        self._health = Health(self._node)
        self._pinning = Pins(self._node, self._call, self._token)

    def _beat_options(self, url: str | None) -> dict[str, float]:
        """Give the beat and the timeout of the session, if one of them was given."""
        if not self.settings.given & {"heartbeat_interval_sec", "heartbeat_timeout_sec"}:
            return {}
        is_billed = isinstance(read_url(url), ObjectsUrl)
        timing = self.settings.timing(CoordinatorSettings().timing_of(is_billed=is_billed))
        return {"heartbeat_interval": timing.heartbeat, "worker_timeout": timing.timeout}

    async def _start(self) -> None:
        """Take the name, and wait for this node's share."""
        node = self._node
        if not isinstance(node, JobNode):
            return
        # Perhaps somebody said so before there was a node.
        node.is_retiring = self._is_stopping
        await node.start(self._wait_left)
        minimum = self.settings.minimum_nodes
        is_ready = await node.ready(minimum, self._wait_left)
        # This one is there, whether or not the leader has heard of it.
        came = max(node.count, 1)
        if not is_ready and came < minimum:
            raise TimeoutError(
                f"{came} of minimum_nodes={minimum} came within "
                f"wait_on_enter={self._wait_on_enter:g} s; start the others, or wait longer"
            )

    @property
    def _wait_left(self) -> float:
        """What is left of the time that entering may take."""
        return max(0.0, self._enter_by - self.components.clock.mono())

    def _leave(self, *, is_done: bool) -> None:
        """End everything, within bounds."""
        background, self._background = self._background, None
        if background is None:
            return
        node, self._node = self._node, None
        membership, self._membership = self._membership, None
        face, self._face = self._face, None
        self._health = None
        try:
            if node is not None and is_done:
                background.call(node.finish(self._added(node)))
        finally:
            try:
                background.call(self._end(node, membership))
            finally:
                background.stop()
                self._teller.stop(_EXIT_GRACE)
                if face is not None:
                    face.close()

    async def _end(self, node: JobNode | LocalNode | None, membership: Membership | None) -> None:
        # What is not done by then is left to the session's end, which silence brings too.
        with suppress(TimeoutError, Unavailable, OutcomeUnknown):
            async with asyncio.timeout(_EXIT_GRACE + self._wait_on_exit):
                if node is not None:
                    await node.stop(_EXIT_GRACE / 2 + self._wait_on_exit)
                if membership is not None:
                    await membership.leave()
