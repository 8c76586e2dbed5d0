"""One node of a fleet that shares tasks, on an event loop. `Job` is the blocking interface to it.

It registers under a name, owns what the leader assigns to it, claims and finishes tasks, and
hands over before it leaves. If its session is lost it continues in a new one, which owns nothing
at first.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from jobsync.coordination.coordinator import Hooks
from jobsync.coordination.session import SESSIONS, read_session_record
from jobsync.core.assignment import has_incoming, has_nothing
from jobsync.core.plan_documents import read_heading
from jobsync.jobs.foreign_claims import Claim, ClaimState
from jobsync.jobs.node_loop import TRANSIENT, NodeLoop
from jobsync.jobs.registration import find_candidates
from jobsync.jobs.retention import Forgotten, forget

__all__ = ["JobNode"]

_SHORT_WAIT = 0.05
_HEARTBEAT_DELAY = 0.5
"""Seconds that a heartbeat may be late, by a slow store or a busy machine, before it is overdue."""
_WORK = "jobs"


class JobNode(NodeLoop):
    """A node. Call `start`, use it, call `stop`."""

    async def enter(self, wait: float) -> None:
        """Check the fleet's settings and take the name; own nothing before `start`.

        Args:
            wait: seconds to wait for an earlier process with this name to end.

        Raises:
            Misconfigured: other nodes have other settings, or the name is taken.
        """
        await self.claims.store_clock.read()
        await self._join(wait)
        await self._work_date.record(self.claims.store_clock.now)

    async def start(self, wait: float) -> None:
        """Start to own tokens, once `minimum_nodes` have joined; `enter` first if necessary.

        Args:
            wait: seconds to wait for an earlier process with this name to end.

        Raises:
            Misconfigured: other nodes have other settings, or the name is taken.
        """
        if self.settings.minimum_nodes == 1 or self.settings.is_observer:
            self._stage = "ready"
        else:
            self._minimum = self.settings.minimum_nodes
        if not self._incarnation:
            await self.enter(wait)
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._on_task_done)
        self._coordinator = await self.membership.coordinate(
            _WORK,
            Hooks(work=self._rebalancer.run),
            namespace=self.settings.fleet,
            governs=[self._keys.assignment],
        )

    async def wait_until_ready(self, wait: float) -> bool:
        """Wait until enough nodes have joined and this one has its tokens; False at the timeout.

        Args:
            wait: the most seconds to wait for other nodes. What this node does alone, to be
                elected and to assign all tokens to itself, may take a heartbeat longer.
        """
        heartbeat = self.membership.timing.heartbeat
        started = self._clock.mono()
        until = started + wait
        while not self._is_ready:
            left = until - self._clock.mono()
            if left > 0:
                await self._wait_for_change(min(left, heartbeat))
            elif self._waits_for_nobody and self._clock.mono() < started + heartbeat:
                await self._wait_for_change(_SHORT_WAIT)
            else:
                return False
        return True

    async def stop(self, wait: float) -> None:
        """Hand over, then leave. `wait` is how many seconds the handover may take."""
        if self._task is None:
            return
        self.is_retiring = True
        with suppress(*TRANSIENT):
            await self._registration.update(stage="leaving")
            await self._wait_for_handover(wait)
        self._task.cancel()
        await asyncio.wait([self._task])
        self.owned_tokens.reset(None)
        with suppress(*TRANSIENT):
            await self.claims.settle(lambda _, __: False)
            await self._registration.update(stage="left")
        if self._coordinator is not None:
            await self._coordinator.stop()
        self._task = None

    async def withhold_pinned(self, tasks: Mapping[str, int]) -> None:
        """Claim none of these tasks that pins keep from this node, even before the leader acts.

        Args:
            tasks: the tasks that were just pinned, each with its token.
        """
        if self._task is None:
            # It owns nothing before it has started, and the leader reads the pins after that.
            return
        async with self._reviewing_pins:
            record = await self._store.get(self._keys.assignment)
            number = 0
            # Empty if a leader has not assigned tokens yet.
            if record is not None and record.value is not None:
                number = read_heading(record.value, record.key).number
            # A decision may be under way that does not know the pins. The one after it does.
            self.owned_tokens.withhold(await self._find_pinned_away(tasks), number + 2)
        self._wakeup.set()

    def review_soon(self) -> None:
        """Check soon which pins still keep tasks from this node, after some were removed."""
        self._wakeup.set()

    def retire(self) -> None:
        """Claim nothing more, and hand over. Running tasks continue and are finished.

        Call it on the node's event loop.
        """
        self.is_retiring = True
        self._wakeup.set()
        self._plan_changed.set()

    def can_claim(self, task: str) -> bool:
        """Whether this node may do a task now. Does not use the store."""
        if self.is_retiring:
            return False
        return self.owned_tokens.may_claim(task, self.token(task)) and not self.claims.is_refused(
            task
        )

    async def claim(
        self, tasks: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Claim tasks; return those that were not claimed, each with the reason.

        Args:
            tasks: their ids.
            known: only these completions of tasks may be done again; all if None.
        """
        tokens = {task: self.token(task) for task in tasks}
        foreign = {
            task: "it does not belong to this node now"
            for task, token in tokens.items()
            if not self.owned_tokens.owns(task, token)
        }
        ours = {task: token for task, token in tokens.items() if task not in foreign}
        number, may_run = self.owned_tokens.current.number, self._may_run(self._incarnation)
        lost = await self.claims.add(ours, number, may_run, known)
        return foreign | lost

    async def finish(self, tasks: Iterable[str], state: ClaimState = "done") -> dict[str, str]:
        """End tasks; return those whose end was refused, each with the reason."""
        return await self.claims.finish(tasks, state)

    async def list_claims(self) -> list[Claim]:
        """Return all claims of the date."""
        return await self.claims.list_all()

    async def find_done(self, tasks: Collection[str]) -> dict[str, str]:
        """Return which tasks are done, each with the version of its completion."""
        return await self.claims.find_done(tasks)

    async def read_time(self) -> float:
        """Return the time of day, by the store's clock where it has one."""
        return await self.claims.store_clock.read()

    @property
    def poll_interval(self) -> float:
        """The most seconds between polls while waiting for other nodes. Polls may be billed."""
        return self.membership.timing.heartbeat / 2

    @property
    def running(self) -> list[str]:
        """The tasks that this node has claimed and not finished."""
        return self.claims.running

    @property
    def tokens(self) -> frozenset[int]:
        """The tokens that this node owns, even if it may not use them now."""
        return self.owned_tokens.current.tokens

    async def count_joined(self) -> int:
        """Return how many live nodes own tokens or wait for others; this one is among them."""
        found = find_candidates(await self.nodes(), ())
        sessions = await self._store.get_many([f"{SESSIONS}{node.incarnation}" for node in found])
        records = [read_session_record(session) for session in sessions if session is not None]
        return max(1, sum(record.state == "live" for record in records))

    @property
    def owns_nothing(self) -> bool:
        """Whether it owns neither a token nor a pinned task."""
        return not self.owned_tokens.current.tokens and not self.owned_tokens.current.own

    @property
    def number(self) -> int:
        """The number of the assignment that it has applied."""
        return self.owned_tokens.current.number

    @property
    def is_trusted(self) -> bool:
        """Whether it may act now. Reads the clock."""
        return self.failure is None and self.membership.is_trusted

    @property
    def is_connected(self) -> bool:
        """Whether the store answers: no heartbeat is overdue, and one has followed the last error.

        Known long before trust runs out, which lasts for several heartbeats. Reads the clock.
        """
        timing = self.membership.timing
        age = timing.timeout - timing.margin - self.membership.trust_left
        if age > timing.heartbeat + max(_HEARTBEAT_DELAY, timing.heartbeat / 10):
            return False
        # After an error, the next heartbeat that is sent and answered shows that it is over.
        return self._failed_at is None or self._clock.mono() - self._failed_at > age

    async def forget(self, days: float) -> Forgotten:
        """Remove records older than `days` days: claims, nodes that are gone, history.

        Raises:
            Invalid: `days` is less than one.
        """
        return await forget(
            self._store,
            self._keys,
            self._corruption_log,
            now=await self.read_time(),
            days=days,
        )

    @property
    def _is_ready(self) -> bool:
        """Whether this node has its tokens. One that takes none has nothing to wait for."""
        if self.is_retiring or self.settings.is_observer:
            return True
        plan = self._plan
        if plan is None or has_incoming(plan, self._incarnation):
            return False
        return bool(plan.assignment.find(self._incarnation))

    @property
    def _waits_for_nobody(self) -> bool:
        """Whether its own next steps give it tokens: no other node leads or gives any up."""
        if self._minimum:
            return False
        if self.leader is None:
            return True
        plan = self._plan
        return self.is_leader and (plan is None or not has_incoming(plan, self._incarnation))

    async def _wait_for_handover(self, wait: float) -> None:
        """Wait until the leader has assigned all tokens of this node to others, or the timeout."""
        until = self._clock.mono() + wait
        while self._clock.mono() < until:
            plan = self._plan
            if plan is None or has_nothing(plan, self._incarnation):
                return
            await self._wait_for_change(_SHORT_WAIT)

    async def _wait_for_change(self, seconds: float) -> None:
        """Wait until another assignment was applied, up to `seconds`."""
        self._plan_changed.clear()
        with suppress(TimeoutError):
            # Never 0: a clock that is slower than the loop's must not make it spin.
            async with asyncio.timeout(max(seconds, _SHORT_WAIT)):
                await self._plan_changed.wait()

    def _may_run(self, incarnation: str) -> Callable[[str, int], bool]:
        """Return a check whether a claim made in a session may be acted on now.

        It may not in the next session, which owns other things.
        """
        membership = self.membership

        def check(_task: str, _token: int) -> bool:
            return membership.is_trusted and membership.incarnation == incarnation

        return check
