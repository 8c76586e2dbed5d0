"""A node of a fleet that shares tasks, for callers that block.

    with Job("worker-01", "production", config) as job:
        for task_id in get_tasks():
            if job.can_claim_task(Task(task_id)):
                job.add_task(Task(task_id))
                process(task_id)
        job.write_audit()

Guarantees: at any moment a task belongs to at most one live node. A node that cannot renew its
session stops claiming before any other node may claim its tasks. A normal end marks the added
tasks as done and hands the tokens over; after an exception nothing is marked, and other nodes
do the tasks again.

Every method may be called from any thread. `__exit__` may be called early, repeatedly, and from
a signal handler that interrupted another call.
"""

import datetime as dt
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import metadata
from typing import Any, Self

import msgspec

from jobsync.components import Components
from jobsync.errors import ClaimLost, Invalid, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.jobs.config import resolve_coordination
from jobsync.jobs.coordination_config import CoordinationConfig
from jobsync.jobs.events import Callbacks
from jobsync.jobs.exit_guard import ExitGuard
from jobsync.jobs.job_inspection import JobInspection
from jobsync.jobs.pins import LockInfo
from jobsync.jobs.task import Task, check_callables, read_date, read_name, read_seconds, to_task
from jobsync.jobs.task_loop import TaskLoop, run_blocking
from jobsync.setting_fields import refuse_unknown

__all__ = ["Job"]


class Job(JobInspection):
    """One node. Use it in a `with` statement.

    Args:
        node_name: the node's name; one live process of a fleet can have it.
        site: where it runs; the same for all nodes of a fleet.
        config: an object or module with `sync.coordination.*` and `sync.sql.*`.
        date: the date whose tasks are done; today by default.
        wait_on_enter: the most seconds that entering waits for other nodes and for tokens.
        wait_on_exit: the most seconds, beyond a few, that leaving waits for other nodes.
        skip_db_init: accepted and unused: missing tables are created.
        lock_provider: called with the job before it owns anything, to pin tasks.
        clear_existing_locks: whether the pins that this node has created are replaced.
        coordination_config: has precedence over `config`.
        url: the store; has precedence over all other settings.
        observer: whether it takes no tokens.
        once_per_date: whether a task that is done is never done again on the same date.
        on_rebalance: called after each change of the owned tokens, with a `RebalanceEvent` or
            without an argument.
        on_tokens_added: called with the set of tokens gained.
        on_tokens_removed: called with the set of tokens given up.
        components: time, randomness and events.

    Raises:
        Invalid, Misconfigured: an argument or setting is not valid; says the fix.
    """

    @refuse_unknown("Job")
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
            # The argument order of the newer release: configuration second, date third.
            coordination_config, site = site, None
            if isinstance(config, dt.date):
                if date is not None:
                    raise Invalid(
                        "date", date, "follows a date", "pass wait_on_enter and the rest by name"
                    )
                date, config = config, None
        components = components or Components.system()
        super().__init__(
            read_name("node_name", node_name),
            "" if site is None else read_name("site", site),
            read_date(date, components),
            resolve_coordination(coordination_config, config, os.environ, url).value,
            wait_on_enter=read_seconds("wait_on_enter", wait_on_enter),
            wait_on_exit=read_seconds("wait_on_exit", wait_on_exit),
            is_observer=observer,
            once_per_date=once_per_date,
            callbacks=Callbacks(
                components.events, on_rebalance, on_tokens_added, on_tokens_removed
            ),
            components=components,
        )
        check_callables(
            lock_provider=lock_provider,
            on_rebalance=on_rebalance,
            on_tokens_added=on_tokens_added,
            on_tokens_removed=on_tokens_removed,
        )
        self._lock_provider = lock_provider
        self._clear_existing_locks = clear_existing_locks

    def __repr__(self) -> str:
        return f"Job({self.node_name!r}, date={self.date.isoformat()})"

    def __enter__(self) -> Self:
        """Join, and wait until this node has its tokens, for `wait_on_enter` seconds at most.

        Raises:
            Misconfigured: the name is taken or the fleet has other settings; says the fix.
            TimeoutError: fewer than `minimum_nodes` nodes joined in time.
        """
        if self._background is not None:
            raise Invalid("job", self, "is entered already", "leave it first, or create another")
        _check_no_other_jobsync()
        self._exit_guard = ExitGuard(2)
        provider = self._lock_provider
        self._open(
            None if provider is None else partial(provider, self),
            clear_locks=self._clear_existing_locks,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave. A normal end of the block marks the added tasks as done first.

        Called by hand while the block still runs, for example from a signal handler, it marks
        nothing: tasks that were added and not audited are done again elsewhere. Safe to repeat.

        Raises:
            Unavailable, OutcomeUnknown: the node has left, but not all tasks are marked.
        """
        guard, self._exit_guard = self._exit_guard, None
        if guard is not None:
            is_early = guard.is_left_early(2)
            guard.release()
            # Not when it is entered: a signal may come just before, or while that fails.
            self._is_stopping = False
            self._close(is_done=kind is None and not is_early)

    def can_claim_task(self, task: Task | object) -> bool:
        """Whether this node may do a task now. Does not use the store."""
        node = self._node
        # Not `task.text`: a property costs a call, and this runs for each task of every list.
        text = str(task.id) if isinstance(task, Task) else Task(task).text
        return node is not None and node.can_claim(text)

    def add_task(self, task: Task | object) -> None:
        """Claim a task for this node, until `write_audit` or the end.

        Raises:
            ClaimLost: another node has it; do not do it.
        """
        text = to_task(task).text
        if lost := self._call(self._entered_node.claim([text])):
            raise ClaimLost(text, lost[text])

    def add_tasks(self, tasks: Iterable[Task | object]) -> list[Task]:
        """Claim tasks in one request; return those that were claimed."""
        wanted = {task.text: task for task in map(to_task, tasks)}
        lost = self._call(self._entered_node.claim(list(wanted)))
        return [task for text, task in wanted.items() if text not in lost]

    def set_claim(self, task: Task | object) -> None:
        """Claim a task, or all tasks of an iterable in one request, like `add_task`.

        A task that is listed twice is claimed once.

        Raises:
            ClaimLost: another node has one of them; the others are claimed.
        """
        several = isinstance(task, Iterable) and not isinstance(task, str | bytes)
        items = task if several else (task,)
        # All are checked before one is claimed.
        wanted = dict.fromkeys(to_task(item).text for item in items)  # type: ignore[attr-defined]
        for text, reason in self._call(self._entered_node.claim(list(wanted))).items():
            raise ClaimLost(text, reason)

    @contextmanager
    def task(self, task: Task | object) -> Iterator[Task]:
        """Claim a task for a block. The end marks it as done, an exception as failed.

        Raises:
            ClaimLost: another node has it; the block is not entered.
        """
        claimed, block = to_task(task), object()
        if claimed.text in self._list_in_blocks():
            raise ClaimLost(claimed.text, "this node does it already")
        # Under a key of its own: two threads may come this far with one task, and one loses it.
        self._in_blocks[block] = claimed.text
        try:
            self.add_task(claimed)
            try:
                yield claimed
            except BaseException:
                # Invalid: the job was left with the block, and its claim ended with it.
                with suppress(Unavailable, OutcomeUnknown, Invalid):
                    self._call(self._entered_node.finish([claimed.text], "failed"))
                raise
            self._call(self._entered_node.finish([claimed.text]))
        finally:
            del self._in_blocks[block]

    def tasks(
        self, source: Callable[[], Iterable[Task | object]] | Iterable[Task | object]
    ) -> Generator[Task, None, None]:
        """Yield tasks to do, one by one, until all are done, here or on other nodes.

        Each task is claimed before it is yielded and marked as done when the next one is
        requested. If the loop is left in the middle of a task, the task is marked as failed.

        Args:
            source: the tasks, or a function that returns the pending ones; it is called again
                for each round.
        """
        loop = TaskLoop(self._entered_node, self.components.clock, source, self._in_blocks)
        return run_blocking(loop, self._call)

    def stop(self) -> None:
        """Claim no more tasks, and hand the tokens over. For signal handlers.

        Returns at once. `can_claim_task` returns False from now on, and a loop over `tasks`
        ends after the current task; so the block reaches its normal end, which marks the
        finished tasks. Before the block, it does the same to the next one: that takes nothing.
        Safe to repeat, from any thread.
        """
        self._is_stopping = True
        background, node = self._background, self._node
        if background is not None and node is not None:
            node.is_retiring = True
            background.post(node.retire)

    def write_audit(self) -> None:
        """Mark all added tasks as done, except the current task of a block or a loop.

        Raises:
            OutcomeUnknown: some outcomes are unknown; call again.
            Unavailable: the store does not answer; call again.
        """
        self._call(self._entered_node.finish(self._list_added(self._entered_node)))

    def forget(self, *, older_than_days: float) -> dict[str, int]:
        """Remove records older than so many days; return how many of each kind.

        Claims of dates on which no node has started to work since, nodes that left or died
        before, and the history of rebalances. Nothing in use is removed.

        Raises:
            Invalid: `older_than_days` is less than 1.
        """
        return msgspec.to_builtins(self._call(self._entered_node.forget(older_than_days)))  # type: ignore[no-any-return]

    def task_to_token(self, task: Task | object) -> int:
        """Return the token that a task belongs to."""
        return self._token(to_task(task).text)

    def register_lock(
        self,
        task_id: Task | object,
        node_patterns: str | Sequence[str],
        reason: str | None = None,
        expires_in_days: float | None = None,
    ) -> None:
        """Pin a task to nodes. It is in force at once and outlives this node.

        Args:
            task_id: the task.
            node_patterns: the nodes, as patterns of SQL's LIKE; the first pattern that matches
                any node counts.
            reason: for people.
            expires_in_days: when it ends; never by default.

        Raises:
            Invalid: an argument is not valid.
            Misconfigured: `locks_enabled` is False.
        """
        self._entered_pins.register([(task_id, node_patterns, reason)], expires_in_days)

    def register_locks_bulk(
        self, locks: Iterable[Sequence[Any]], expires_in_days: float | None = None
    ) -> None:
        """Pin many tasks in one write, each given as (task_id, pattern or patterns, reason).

        Several pins of one task are alternatives. Raises the errors of `register_lock`; then
        none was registered.
        """
        self._entered_pins.register(locks, expires_in_days)

    def register_task_lock(
        self,
        task_id: Task | object,
        node_pattern: str | Sequence[str],
        reason: str | None = None,
        expires_in_days: float | None = None,
    ) -> None:
        """Pin a task to nodes: the guide's name for `register_lock`."""
        self.register_lock(task_id, node_pattern, reason, expires_in_days)

    register_task_locks_bulk = register_locks_bulk

    def list_locks(self) -> list[LockInfo]:
        """Return the pins in force of all nodes, each with the pattern that counts."""
        return self._entered_pins.list_active()

    def clear_locks_by_creator(self, creator: str) -> int:
        """Remove the pins that one node has created; return how many."""
        return self._entered_pins.remove_by(read_name("creator", creator))

    def clear_all_locks(self) -> int:
        """Remove the pins of all nodes; return how many."""
        return self._entered_pins.remove_all()


@cache
def _check_no_other_jobsync() -> None:
    """Check that the distribution `jobsync`, whose package has the same name, is not installed.

    Raises:
        Misconfigured: it is installed; gives the command that repairs this.
    """
    try:
        version = metadata.version("jobsync")
    except metadata.PackageNotFoundError:
        return
    raise Misconfigured(
        "installed",
        f"jobsync {version}",
        "is another library, whose files and those of jobsync-fleet overwrite each other",
        "run: pip uninstall -y jobsync && pip install --force-reinstall jobsync-fleet",
    )
