"""The lifecycle of a `Job`: it joins a fleet on a background loop, and leaves within bounds.

With coordination switched off, a `LocalNode` takes the place of the fleet: it owns every task.
"""

import asyncio
import datetime as dt
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from jobsync.components import Components
from jobsync.coordination.membership import Membership, describe_process
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.core.assignment import token_maker
from jobsync.core.urls import ObjectsUrl, SqliteUrl, StoreUrl
from jobsync.errors import Invalid, OutcomeUnknown, Unavailable
from jobsync.jobs.coordination_config import CoordinationConfig
from jobsync.jobs.events import Callbacks, DefaultStoreUsed, NoTokens
from jobsync.jobs.exit_guard import ExitGuard
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.job_node import JobNode
from jobsync.jobs.local_node import LocalNode, LocalRecords, MemoryRecords, StoredRecords
from jobsync.jobs.node_loop import JobNodeSettings
from jobsync.jobs.pins import Pins
from jobsync.jobs.registration import NodeList
from jobsync.jobs.sql_views import SqlViews
from jobsync.loop_calls import Background
from jobsync.stores.opening import open_store, read_url, resolve_url

__all__ = ["JobLifecycle"]

T = TypeVar("T")

_EXIT_GRACE = 4.0
"""The most seconds that leaving takes beyond `wait_on_exit`."""


class JobLifecycle:
    """What a `Job` has while it is entered: a background loop, a session and a node.

    Args:
        node_name: the node's name.
        site: where it runs.
        date: the date whose tasks it does.
        settings: the configuration of the fleet.
        wait_on_enter: the most seconds that entering takes.
        wait_on_exit: the most seconds, beyond a few, that leaving takes.
        is_observer: whether it takes no tokens.
        once_per_date: whether a task that is done is never done again on the same date.
        callbacks: the user's callbacks.
        components: time, randomness and events.
    """

    def __init__(
        self,
        node_name: str,
        site: str,
        date: dt.date,
        settings: CoordinationConfig,
        *,
        wait_on_enter: float,
        wait_on_exit: float,
        is_observer: bool,
        once_per_date: bool,
        callbacks: Callbacks,
        components: Components,
    ) -> None:
        self.node_name = node_name
        self.site = site
        self.components = components
        self.date = date
        self.settings = settings
        self._token = token_maker(settings.total_tokens, settings.hash_function)
        self._wait_on_enter = wait_on_enter
        self._wait_on_exit = wait_on_exit
        self._is_observer = is_observer
        self._once_per_date = once_per_date
        self._callbacks = callbacks
        self._background: Background | None = None
        self._views: SqlViews | None = None
        self._exit_guard: ExitGuard | None = None
        self._membership: Membership | None = None
        self._node: JobNode | LocalNode | None = None
        self._node_list: NodeList | None = None
        self._is_stopping = False
        self._pins = Pins(None, self._call, self._token)
        self._in_blocks: dict[object, str] = {}
        """Tasks that only the end of their own block or loop marks, by that."""
        self._enter_by = components.clock.mono()

    def _open(self, provide_locks: Callable[[], object] | None, *, clear_locks: bool) -> None:
        """Start the background loop, join the fleet and wait for tokens.

        Args:
            provide_locks: registers pins before this node owns anything.
            clear_locks: whether the pins that this node has created are removed.
        """
        self._background = Background(f"jobsync-{self.node_name}", _build_left_error)
        self._enter_by = self.components.clock.mono() + self._wait_on_enter
        try:
            url, origin = resolve_url(self.settings.reveal_url())
            is_named = origin.kind != "default"
            self._views = self._build_views()
            if self.settings.enabled:
                if not is_named:
                    self._warn_of_default(url)
                self._call(self._join())
                self._views.install(self.node_name)
                if provide_locks is not None or clear_locks:
                    self._provide_locks(provide_locks, replacing=clear_locks)
                self._call(self._start())
            else:
                self._call(self._start_alone(is_named=is_named))
                if is_named:
                    self._views.install(self.node_name)
        except BaseException:
            self._close(is_done=False)
            raise

    @property
    def _entered_node(self) -> JobNode | LocalNode:
        """This node. The job must have been entered and not left."""
        if self._node is None:
            raise Invalid("job", self, "is not entered", "use it in a with statement")
        if self._node.failure is not None:
            raise Unavailable("the node", "has failed", "enter again") from self._node.failure
        return self._node

    @property
    def _entered_pins(self) -> Pins:
        """This node's pins. The job must have been entered and not left."""
        if self._background is None:
            raise Invalid("job", self, "is not entered", "use it in a with statement")
        return self._pins

    def _provide_locks(self, provider: Callable[[], object] | None, *, replacing: bool) -> None:
        if isinstance(self._node, JobNode):
            # After taking the name, so that no process registers pins for another live one.
            self._call(self._node.enter(self._wait_left))
            self._pins.provide(provider, replacing=replacing)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the background loop and wait for its result."""
        background = self._background
        if background is None:
            work.close()
            raise Invalid("job", self, "is not entered", "use it in a with statement")
        return background.call(work)

    def _list_added(self, node: JobNode | LocalNode) -> list[str]:
        """Return the running tasks, without those that the end of their own block marks."""
        in_blocks = self._list_in_blocks()
        return [task for task in node.running if task not in in_blocks]

    def _list_in_blocks(self) -> set[str]:
        """Return the tasks in blocks and loops. In one step: other threads enter and leave some."""
        return set(self._in_blocks.values())

    def _build_views(self) -> SqlViews:
        url = read_url(self.settings.reveal_url())
        keys = JobKeys(self.settings.appname)
        return SqlViews(url, keys, self.components, self.settings.timezone)

    def _warn_of_default(self, url: StoreUrl) -> None:
        """Report that no setting names a store: nodes in other directories use other files."""
        self.components.events.emit(
            DefaultStoreUsed(
                node=self.node_name,
                path=url.path if isinstance(url, SqliteUrl) else str(url),
                fix="name one store for all nodes: Job(url=…), SYNC_SQL_URL or config.sync.sql",
            )
        )

    async def _start_alone(self, *, is_named: bool) -> None:
        """Create a node without a fleet, which records its tasks if a store is named."""
        records: LocalRecords = MemoryRecords()
        if is_named:
            records = StoredRecords(
                await open_store(self.settings.reveal_url(), self.components),
                self.components,
                JobKeys(self.settings.appname),
                self.date,
                self.node_name,
                self._token,
            )
        node = LocalNode(
            self.settings.total_tokens,
            self._token,
            self.components.clock,
            records,
            once_per_date=self._once_per_date,
            is_observer=self._is_observer,
        )
        try:
            await node.start()
        except BaseException:
            await records.close()
            raise
        self._node = node
        self._retire_if_stopped(node)

    async def _join(self) -> None:
        """Open a session and create the node."""
        url = self.settings.reveal_url()
        options = self._find_timing_options(url)
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
                reclaim_ended_after=self.settings.reclaim_after or 0.0,
                handover_memory=self.settings.handover_memory,
                once_per_date=self._once_per_date,
                is_observer=self._is_observer,
                rebalance_interval=self.settings.rebalance_check_interval_sec,
                refresh_interval=self.settings.token_refresh_steady_interval_sec,
                locks_enabled=self.settings.locks_enabled,
                minimum_nodes=self.settings.minimum_nodes,
            ),
            on_change=self._callbacks.notify,
            facts=describe_process(self.components),
        )
        self._node_list = NodeList(self._node)
        self._pins = Pins(self._node, self._call, self._token)

    def _find_timing_options(self, url: str | None) -> dict[str, float]:
        """Return the session's heartbeat interval and timeout, if one of them was given."""
        if not self.settings.given & {"heartbeat_interval_sec", "heartbeat_timeout_sec"}:
            return {}
        is_billed = isinstance(read_url(url), ObjectsUrl)
        timing = self.settings.timing(CoordinatorSettings().timing_of(is_billed=is_billed))
        return {"heartbeat_interval": timing.heartbeat, "worker_timeout": timing.timeout}

    async def _start(self) -> None:
        """Take the name, and wait for this node's tokens."""
        node = self._node
        if not isinstance(node, JobNode):
            return
        self._retire_if_stopped(node)
        await node.start(self._wait_left)
        is_ready = await node.wait_until_ready(self._wait_left)
        minimum = self.settings.minimum_nodes
        if not is_ready and minimum > 1 and (joined := await node.count_joined()) < minimum:
            raise TimeoutError(
                f"{joined} of minimum_nodes={minimum} joined within "
                f"wait_on_enter={self._wait_on_enter:g} s; start the others, or wait longer"
            )
        self._report_no_tokens(node, is_ready=is_ready)

    def _retire_if_stopped(self, node: JobNode | LocalNode) -> None:
        """Claim nothing if `stop` was called before there was a node."""
        if self._is_stopping:
            node.is_retiring = True

    def _report_no_tokens(self, node: JobNode, *, is_ready: bool) -> None:
        """Warn if this node has nothing to do although it should."""
        if self._is_observer or node.is_retiring or not node.owns_nothing:
            return
        if is_ready:
            total, nodes = self.settings.total_tokens, len(node.names)
            reason = f"{nodes} nodes share total_tokens={total}"
            fix = "use more tokens or fewer nodes"
        else:
            waited = f"{self._wait_on_enter:g}"
            reason = f"no other node gave it tokens within wait_on_enter={waited} s"
            fix = "raise wait_on_enter, or do the tasks in a loop: the tokens come later"
        self.components.events.emit(NoTokens(node=self.node_name, reason=reason, fix=fix))

    @property
    def _wait_left(self) -> float:
        """The seconds that entering may still take."""
        return max(0.0, self._enter_by - self.components.clock.mono())

    def _close(self, *, is_done: bool) -> None:
        """Leave the fleet and stop the background loop, within bounds.

        Args:
            is_done: whether the tasks that were added are marked as done first.
        """
        background, self._background = self._background, None
        if background is None:
            return
        node, self._node = self._node, None
        membership, self._membership = self._membership, None
        views, self._views = self._views, None
        self._node_list = None
        try:
            if node is not None and is_done:
                background.call(node.finish(self._list_added(node)))
        finally:
            try:
                background.call(self._leave(node, membership))
            finally:
                background.stop()
                self._callbacks.stop(_EXIT_GRACE)
                if views is not None:
                    views.close()

    async def _leave(self, node: JobNode | LocalNode | None, membership: Membership | None) -> None:
        # What is not done in time is left to the end of the session, which silence causes too.
        with suppress(TimeoutError, Unavailable, OutcomeUnknown):
            async with asyncio.timeout(_EXIT_GRACE + self._wait_on_exit):
                if node is not None:
                    await node.stop(_EXIT_GRACE / 2 + self._wait_on_exit)
                if membership is not None:
                    await membership.leave()


def _build_left_error() -> Unavailable:
    return Unavailable("the job", "was left meanwhile", "enter again")
