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
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self, TypeVar

from jobsync.components import Components
from jobsync.coordination.membership import Membership, describe_process
from jobsync.core.tokens import token_maker
from jobsync.errors import Invalid, OutcomeUnknown, Unavailable
from jobsync.jobs.alone import Alone
from jobsync.jobs.background import Background
from jobsync.jobs.claims import Claim, ClaimLost
from jobsync.jobs.config import CoordinationConfig
from jobsync.jobs.crew import Crew, CrewSettings
from jobsync.jobs.entrance import Entrance
from jobsync.jobs.health import Health, NodeInfo
from jobsync.jobs.pinning import LockInfo, Pinning
from jobsync.jobs.sources import resolve_coordination
from jobsync.jobs.task import Task
from jobsync.jobs.telling import Teller
from jobsync.jobs.walk import Walk, steps

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
        wait_on_enter: float = 120,
        wait_on_exit: float = 0,
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
            # As the newer release has it: the second argument is the configuration.
            coordination_config, site = site, None
        self.node_name = _check_text("node_name", node_name)
        self.site = "" if site is None else _check_text("site", site)
        self.components = components or Components.system()
        self.date = _day(date, self.components)
        self.settings = resolve_coordination(coordination_config, config, os.environ).value
        self._token = token_maker(self.settings.total_tokens, self.settings.hash_function)
        self._url = url
        self._wait_on_enter = _check_wait("wait_on_enter", wait_on_enter)
        self._wait_on_exit = _check_wait("wait_on_exit", wait_on_exit)
        self._lock_provider = lock_provider
        self._clear_existing_locks = clear_existing_locks
        self._is_observer = observer
        self._once_per_date = once_per_date
        self._teller = Teller(
            self.components.events, on_rebalance, on_tokens_added, on_tokens_removed
        )
        self._background: Background | None = None
        self._entrance: Entrance | None = None
        self._membership: Membership | None = None
        self._node: Crew | Alone | None = None
        self._health: Health | None = None
        self._is_stopping = False
        self._pinning = Pinning(None, self._call, self._token)

    def __repr__(self) -> str:
        return f"Job({self.node_name!r}, date={self.date.isoformat()})"

    def __enter__(self) -> Self:
        """Join, and wait until this node has its share, for `wait_on_enter` seconds at most.

        Raises:
            Misconfigured: the name is taken or the fleet has other settings, with the fix.
            TimeoutError: fewer than `minimum_nodes` came in time.
        """
        self._entrance = Entrance(2)
        self._background = Background(f"jobsync-{self.node_name}")
        self._is_stopping = False
        try:
            if self.settings.enabled:
                self._call(self._join())
                self._provide_locks()
                self._call(self._start())
            else:
                total, once = self.settings.total_tokens, self._once_per_date
                self._node = Alone(total, self._token, once_per_date=once)
        except BaseException:
            self._leave(is_done=False)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave. At a normal end of the block, what was added is marked as done first.

        Called by hand while the block still runs, as from a signal handler, it marks
        nothing: what was added and not audited is done again elsewhere. Safe to repeat.
        """
        entrance, self._entrance = self._entrance, None
        if entrance is not None:
            is_early = entrance.is_left_early(2)
            entrance.forget()
            self._leave(is_done=kind is None and not is_early)

    def can_claim_task(self, task: Task | object) -> bool:
        """Say whether a task is this node's to do now. Touches no store."""
        node = self._node
        text = task.text if isinstance(task, Task) else str(task)
        return node is not None and node.can_claim(text)

    def add_task(self, task: Task | object) -> None:
        """Claim a task, for this node alone, until `write_audit` or the end.

        Raises:
            ClaimLost: it is another node's; do not do it.
        """
        text = _text(task)
        if lost := self._call(self._here.claim([text])):
            raise ClaimLost(text, lost[text])

    def add_tasks(self, tasks: Iterable[Task | object]) -> list[Task]:
        """Claim tasks in one request; give those that are this node's to do."""
        wanted = {_text(task): task if isinstance(task, Task) else Task(task) for task in tasks}
        lost = self._call(self._here.claim(list(wanted)))
        return [task for text, task in wanted.items() if text not in lost]

    set_claim = add_task

    @contextmanager
    def task(self, task: Task | object) -> Iterator[Task]:
        """Claim a task for a block; its end marks it as done, an exception as failed.

        Raises:
            ClaimLost: it is another node's; the block is not entered.
        """
        self.add_task(task)
        try:
            yield task if isinstance(task, Task) else Task(task)
        except BaseException:
            with suppress(Unavailable, OutcomeUnknown):
                self._call(self._here.finish([_text(task)], "failed"))
            raise
        self._call(self._here.finish([_text(task)]))

    def tasks(
        self, source: Callable[[], Iterable[Task | object]] | Iterable[Task | object]
    ) -> Iterator[Task]:
        """Give tasks to do, one by one, until none of them is left undone anywhere.

        Each is claimed before it is given and marked as done when the next is asked for;
        one that the loop is left in the middle of is marked as failed.

        Args:
            source: the tasks, or a function that gives those that are pending; it is
                called again for each round.
        """
        node = self._here
        longest = node.membership.timing.beat if isinstance(node, Crew) else 1.0
        walk = Walk(node, self.components.clock, source, longest_pause=longest)
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
        """Mark everything that was added as done.

        Raises:
            OutcomeUnknown: nobody can say of some of them; call again.
            Unavailable: the store does not answer; call again.
        """
        self._call(self._here.finish(self._here.running))

    def get_audit(self) -> list[dict[str, Any]]:
        """Give what was done on the job's date, by all nodes."""
        return [_describe(claim) for claim in self._claims() if claim.state == "done"]

    def incomplete_tasks(self) -> list[dict[str, Any]]:
        """Give what was claimed on the job's date and is not done, by all nodes.

        Running here or elsewhere, failed, or abandoned by a node that is dead.
        """
        return [_describe(claim) for claim in self._claims() if claim.state != "done"]

    def task_to_token(self, task: Task | object) -> int:
        """Give the token that a task belongs to."""
        return self._token(_text(task))

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
        return [] if self._health is None else self._call(self._health.active())

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
        return self._pins_here.remove_by(_check_text("creator", creator))

    def clear_all_locks(self) -> int:
        """Remove the pins of all nodes; count them."""
        return self._pins_here.remove_all()

    # The guide's own spellings.

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
    def _here(self) -> Crew | Alone:
        """This node, which must have been entered and not left."""
        if self._node is None:
            raise Invalid("job", self, "is not entered", "use it in a with statement")
        if self._node.failure is not None:
            raise Unavailable("the node", "has failed", "enter again") from self._node.failure
        return self._node

    @property
    def _pins_here(self) -> Pinning:
        """This node's pins; it must have been entered and not left."""
        if self._background is None:
            raise Invalid("job", self, "is not entered", "use it in a with statement")
        return self._pinning

    def _provide_locks(self) -> None:
        """Register what `lock_provider` asks for, before this node owns anything."""
        provider, replacing = self._lock_provider, self._clear_existing_locks
        if isinstance(self._node, Crew) and (provider is not None or replacing):
            # Under its name, so that nobody registers in the name of another that lives.
            self._call(self._node.enter(self._wait_on_enter))
            bound = None if provider is None else partial(provider, self)
            self._pinning.provide(bound, replacing=replacing)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the background loop, and wait for it."""
        background = self._background
        if background is None:
            work.close()
            raise Invalid("job", self, "is not entered", "use it in a with statement")
        return background.call(work)

    def _claims(self) -> list[Claim]:
        return self._call(self._here.claims_of_date())

    async def _join(self) -> None:
        """Open a session."""
        url = self._url or self.settings.reveal_url()
        given = self.settings.given
        beat, timeout = "heartbeat_interval_sec", "heartbeat_timeout_sec"
        options = {
            "heartbeat_interval": getattr(self.settings, beat) if beat in given else None,
            "worker_timeout": getattr(self.settings, timeout) if timeout in given else None,
        }
        membership = await Membership.join(url, self.components, skip_cold_start=True, **options)
        self._membership = membership
        timing = membership.timing
        self._node = Crew(
            membership,
            CrewSettings(
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
        self._pinning = Pinning(self._node, self._call, self._token)

    async def _start(self) -> None:
        """Take the name, and wait for this node's share."""
        node = self._node
        if not isinstance(node, Crew):
            return
        # Perhaps somebody said so before there was a node.
        node.is_retiring = self._is_stopping
        await node.start(self._wait_on_enter)
        minimum = self.settings.minimum_nodes
        if not await node.ready(minimum, self._wait_on_enter) and node.count < minimum:
            raise TimeoutError(
                f"{node.count} of minimum_nodes={minimum} came within "
                f"wait_on_enter={self._wait_on_enter:g} s; start the others, or wait longer"
            )

    def _leave(self, *, is_done: bool) -> None:
        """End everything, within bounds."""
        background, self._background = self._background, None
        if background is None:
            return
        node, self._node = self._node, None
        background.call(self._end(node, is_done=is_done))
        background.stop()
        self._teller.stop(_EXIT_GRACE)

    async def _end(self, node: Crew | Alone | None, *, is_done: bool) -> None:
        # What is not done by then is left to the session's end, which silence brings too.
        with suppress(TimeoutError, Unavailable, OutcomeUnknown):
            async with asyncio.timeout(_EXIT_GRACE + self._wait_on_exit):
                if node is not None and is_done:
                    await node.finish(node.running)
                if node is not None:
                    await node.stop(_EXIT_GRACE / 2 + self._wait_on_exit)
                if self._membership is not None:
                    await self._membership.leave()


def _text(task: Task | object) -> str:
    return task.text if isinstance(task, Task) else str(task)


def _describe(claim: Claim) -> dict[str, Any]:
    zone = dt.UTC
    return {
        "task_id": claim.task,
        "item": claim.task,
        "node": claim.node,
        "state": claim.state,
        "run": claim.run,
        "created_on": dt.datetime.fromtimestamp(claim.started, zone),
        "date": dt.date.fromisoformat(claim.date),
    }


def _day(given: dt.date | dt.datetime | None, components: Components) -> dt.date:
    """Give the date; today in the process's own zone, if none was given."""
    if given is None:
        now = dt.datetime.fromtimestamp(components.clock.wall().seconds, dt.UTC)
        return now.astimezone().date()
    if isinstance(given, dt.datetime):
        return given.date()
    if isinstance(given, dt.date):
        return given
    raise Invalid("date", given, "is no date", "give a datetime.date")


def _check_text(field: str, value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise Invalid(field, value, "is no name", "give some text")


def _check_wait(field: str, value: float) -> float:
    if value >= 0:
        return value
    raise Invalid(field, value, "is no duration", "give seconds, 0 or more")
