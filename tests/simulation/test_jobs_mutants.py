"""Mutants of the jobs protocol: the simulated world must catch each.

A mutant that survives means that the world checks too little, not that the protocol is safe.
That an old assignment is never applied late cannot be shown here, because a node reads and
applies one assignment after the other; `tests/simulation/models/test_handover.py` shows it.
"""

from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import job_stories
import msgspec
import pytest
from job_fleet import DAY
from msgspec.structs import replace
from mutants import is_caught

from jobsync.coordination.membership import Membership
from jobsync.coordination.session import Session
from jobsync.core.assignment import Ownership, Plan, holders_of, pack_holders, tokens_of
from jobsync.core.clock import Clock
from jobsync.core.handover import Transfers
from jobsync.jobs.claims import Claims
from jobsync.jobs.fleet_settings import FleetSettings
from jobsync.jobs.foreign_claims import ClaimState, ForeignClaims
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.job_node import JobNode
from jobsync.jobs.owned_tokens import OwnedTokens
from jobsync.jobs.rebalancer import Rebalancer
from jobsync.jobs.registration import Registration, find_candidates
from jobsync.jobs.unclosed_claims import UnclosedClaims
from jobsync.stores.contract import Applied, Change, Outcome, Put, Record, Store
from jobsync.stores.decorator import StoreDecorator
from jobsync.testing import check_story
from jobsync.testing.stories import Story

Patch = Callable[[pytest.MonkeyPatch], None]


def acknowledges_before_claims_are_closed(patch: pytest.MonkeyPatch) -> None:
    """A node gives up tokens while a claim under one is still in flight."""

    async def settle(self: Claims, is_ours: object) -> None:
        """Return without waiting."""

    patch.setattr(Claims, "settle", settle)


def acknowledges_before_giving_up(patch: pytest.MonkeyPatch) -> None:
    """A node acknowledges first and gives up later."""

    async def give_up(self: OwnedTokens, before: Ownership, after: Ownership, number: int) -> None:
        await self._registration.update(applied=number)
        await self._claims.foreign._clock.sleep(1)

    patch.setattr(OwnedTokens, "_give_up", give_up)


def accepts_any_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    """An acknowledgement of any assignment counts for this one."""
    settle = Transfers.settle

    def wrong(self: Transfers[int], is_done: Any, dead: set[int], members: list[int]) -> None:
        settle(self, lambda place, _: is_done(place, 1), dead, members)

    patch.setattr(Transfers, "settle", wrong)


def does_not_read_claims_of_gained_tokens(patch: pytest.MonkeyPatch) -> None:
    """A node uses gained tokens without reading what others did under them."""

    async def load(self: ForeignClaims, tokens: object, recent: object) -> None:
        """Read nothing."""

    patch.setattr(ForeignClaims, "load", load)


def ignores_its_trust(patch: pytest.MonkeyPatch) -> None:
    """A node owns its tokens even if its session is not trusted."""
    patch.setattr(OwnedTokens, "owns", lambda self, task, token: self.current.covers(task, token))


def keeps_tokens_of_an_earlier_session(patch: pytest.MonkeyPatch) -> None:
    """A node that comes back keeps the tokens of its old session."""

    def reset(self: OwnedTokens, session: Session | None) -> None:
        self._session = session
        self._incarnation = "" if session is None else session.incarnation
        self._joined = self._joined or self._claims.store_clock.now

    patch.setattr(OwnedTokens, "reset", reset)


def takes_silent_nodes_for_dead(patch: pytest.MonkeyPatch) -> None:
    """A leader reassigns the tokens of a node that was silent for a heartbeat or two."""

    def find(self: Rebalancer) -> frozenset[str]:
        now, heartbeat = self._clock.mono(), self._membership.timing.heartbeat
        watches = self._membership._member._observer._watches
        watched = self._membership.watched("rebalancer")
        seen = {owner: watches[owner] for owner in watched if owner in watches}
        silent = {owner for owner, watch in seen.items() if now - watch.since > 1.5 * heartbeat}
        return frozenset(silent | {e for e in watched if self._membership.is_dead(e)})

    patch.setattr(Rebalancer, "_find_dead", find)


def takes_leaving_nodes_for_gone(patch: pytest.MonkeyPatch) -> None:
    """A leader does not wait for a node that is leaving."""
    list_nodes = Rebalancer.list_nodes

    async def hasty(self: Rebalancer) -> Any:
        nodes = await list_nodes(self)
        return [replace(n, stage="left") if n.stage == "leaving" else n for n in nodes]

    patch.setattr(Rebalancer, "list_nodes", hasty)


def ignores_conflicting_claims(patch: pytest.MonkeyPatch) -> None:
    """A claim replaces any other claim."""
    patch.setattr(Claims, "is_refused", lambda *_: False)
    patch.setattr(Claims, "_find_conflict", lambda *_: "")


def acts_on_claims_of_an_earlier_session(patch: pytest.MonkeyPatch) -> None:
    """A claim is acted on in whatever session the reply arrives."""

    def may_run(self: JobNode, _: str) -> Callable[[str, int], bool]:
        return lambda *_: self.is_trusted and self.membership.incarnation == self._incarnation

    patch.setattr(JobNode, "_may_run", may_run)


def reclaims_at_once(patch: pytest.MonkeyPatch) -> None:
    """The running tasks of a dead node are started again without `reclaim_after`."""
    init = ForeignClaims.__init__

    def hasty(self: ForeignClaims, *arguments: Any) -> None:
        init(self, *arguments)
        self._rules = msgspec.structs.replace(self._rules, reclaim_after=0.0)

    patch.setattr(ForeignClaims, "__init__", hasty)


def leaves_unknown_claims_open(patch: pytest.MonkeyPatch) -> None:
    """A claim with an unknown outcome may land, and its node claims the task once more."""

    async def forget(self: UnclosedClaims) -> None:
        self._changes.clear()

    patch.setattr(UnclosedClaims, "close", forget)


def runs_late_claims(patch: pytest.MonkeyPatch) -> None:
    """A claim is acted on although the session was lost before the reply."""
    patch.setattr(JobNode, "_may_run", lambda *_: lambda *_: True)


def ends_claims_of_others(patch: pytest.MonkeyPatch) -> None:
    """A task is ended even if another node has claimed it."""

    async def end(self: Claims, bases: dict[str, Record], state: ClaimState) -> dict[str, str]:
        for task, base in bases.items():
            current = await self._store.get(base.key)
            assert current is not None
            ended = {**base.value, "state": state, "ended": self.store_clock.now}
            (outcome,) = await self._store.write([current.replace(ended)])
            if isinstance(outcome, Applied):
                self._record_end(task, outcome.record)
        return {}

    patch.setattr(Claims, "_end", end)


def ignores_newer_assignments(patch: pytest.MonkeyPatch) -> None:
    """A claim under an older assignment is as good as any."""
    find_conflict = Claims._find_conflict

    def wrong(self: Claims, record: Record, claim: Any, number: int, known: Any) -> str:
        return find_conflict(self, record, claim, 10**9, known)

    patch.setattr(Claims, "_find_conflict", wrong)


def takes_the_name_of_a_live_node(patch: pytest.MonkeyPatch) -> None:
    """A second process takes the name of a live one."""

    async def gone(self: Registration, holder: object) -> bool:
        return True

    patch.setattr(Registration, "_is_gone", gone)


def takes_moves_for_finished(patch: pytest.MonkeyPatch) -> None:
    """A new leader believes that moving tokens have arrived."""
    read = Rebalancer._read_plan

    async def hasty(self: Rebalancer, term: Any) -> Plan:
        plan = await read(self, term)
        holders = holders_of(plan.assignment)
        for move in plan.assignment.moves:
            for token in tokens_of(move):
                holders[token] = move.taker
        starts, packed = pack_holders(holders)
        finished = replace(plan.assignment, starts=starts, holders=packed, moves=())
        return replace(plan, assignment=finished)

    patch.setattr(Rebalancer, "_read_plan", hasty)


def assigns_to_nodes_that_wait(patch: pytest.MonkeyPatch) -> None:
    """A leader gives tokens to nodes that wait for others, and do nothing meanwhile."""

    def hasty(nodes: Any, dead: Any) -> Any:
        return [replace(node, minimum_nodes=1) for node in find_candidates(nodes, dead)]

    patch.setattr("jobsync.jobs.rebalancer.find_candidates", hasty)


class TokenKeys(JobKeys, frozen=True):
    """Keys in which a claim depends on its task's token."""

    token_of: Callable[[str], int]

    def claim(self, day: date, task: str) -> str:
        return f"{self.claims(day)}{self.token_of(task):06d}.{task}"


def finds_claims_by_token(patch: pytest.MonkeyPatch) -> None:
    """With another number of tokens a node finds no earlier claim of a task."""
    init = Claims.__init__

    def keyed(self: Claims, *arguments: Any) -> None:
        init(self, *arguments)
        self._keys = self.foreign._keys = TokenKeys(self._keys.name, self.foreign._token_of)
        self.foreign._token_of = lambda _: -1

    patch.setattr(Claims, "__init__", keyed)


def keeps_the_plan_of_other_settings(patch: pytest.MonkeyPatch) -> None:
    """A leader goes on with the tokens of earlier settings."""
    patch.setattr(Plan, "fits", lambda *_: True)


def reads_the_settings_before_registering_only(patch: pytest.MonkeyPatch) -> None:
    """A node that has read equal settings registers and goes on, whatever they are by then."""
    wait, settle = FleetSettings.wait, FleetSettings.settle
    equal = set[FleetSettings]()

    async def looked(self: FleetSettings, until: Any) -> None:
        await wait(self, until)
        record = await self._read()
        equal.discard(self)
        if record is not None and record.value == self.values:
            equal.add(self)

    async def trusting(self: FleetSettings) -> bool:
        return self in equal or await settle(self)

    patch.setattr(FleetSettings, "wait", looked)
    patch.setattr(FleetSettings, "settle", trusting)


def changes_settings_without_a_second_look(patch: pytest.MonkeyPatch) -> None:
    """A node changes the settings although another has joined with the old ones meanwhile."""
    find = FleetSettings._find_problem

    async def hasty(self: FleetSettings, record: Record | None) -> Any:
        is_stored = record is not None and not record.deleted
        mark = record.value.get("changing") if record and is_stored else None
        return None if mark == self._membership.incarnation else await find(self, record)

    patch.setattr(FleetSettings, "_find_problem", hasty)


def ignores_a_change_under_way(patch: pytest.MonkeyPatch) -> None:
    """A node goes on with the old settings while another one changes them."""
    read = FleetSettings._read

    async def blind(self: FleetSettings) -> Record | None:
        record = await read(self)
        if record is None or record.value is None:
            return record
        settings = {field: v for field, v in record.value.items() if field != "changing"}
        return replace(record, value=settings)

    patch.setattr(FleetSettings, "_read", blind)


def changes_settings_of_live_nodes(patch: pytest.MonkeyPatch) -> None:
    """A node takes all others for dead."""

    async def dead(self: FleetSettings, incarnation: str) -> bool:
        return False

    patch.setattr(FleetSettings, "_is_alive", dead)


def waits_for_the_leader_to_apply_pins(patch: pytest.MonkeyPatch) -> None:
    """A node claims what it has pinned elsewhere until the leader has moved it."""
    patch.setattr(OwnedTokens, "withhold", lambda *_: None)


def trusts_the_next_assignment_to_know_pins(patch: pytest.MonkeyPatch) -> None:
    """A node claims what it has pinned elsewhere as soon as any other assignment arrives."""
    withhold = OwnedTokens.withhold

    def hasty(self: OwnedTokens, tasks: Any, known_from: int) -> None:
        withhold(self, tasks, known_from - 1)

    patch.setattr(OwnedTokens, "withhold", hasty)


def finds_claims_of_any_date(patch: pytest.MonkeyPatch) -> None:
    """What was done on one date is not done on the next."""
    claims = JobKeys.claims
    patch.setattr(JobKeys, "claims", lambda self, _: claims(self, DAY))


def forgets_what_others_did_on_a_date(patch: pytest.MonkeyPatch) -> None:
    """A node knows only what it has done itself on a date."""
    find_conflict, init = Claims._find_conflict, ForeignClaims.__init__

    def forgetful(self: ForeignClaims, *arguments: Any) -> None:
        init(self, *arguments)
        self._rules = msgspec.structs.replace(self._rules, once_per_date=False)

    def find(self: Claims, record: Record, claim: Any, number: int, known: Any) -> str:
        with patch.context() as during:
            during.setattr(self, "_once_per_date", False)
            return find_conflict(self, record, claim, number, known)

    patch.setattr(ForeignClaims, "__init__", forgetful)
    patch.setattr(Claims, "_find_conflict", find)


class MisdatingStore(StoreDecorator):
    """Dates the ends of tasks by the clock of a node."""

    def __init__(self, inner: Store, clock: Clock) -> None:
        super().__init__(inner)
        self._clock = clock

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        now = self._clock.wall().seconds
        return await super().write(
            [
                replace(change, value={**change.value, "ended": now})
                if isinstance(change, Put) and change.value.get("state") in {"done", "failed"}
                else change
                for change in changes
            ]
        )


def dates_ends_by_its_own_clock(patch: pytest.MonkeyPatch) -> None:
    """The end of a task has the time of the node that did it, not the store's."""
    init = Claims.__init__

    def misdate(self: Claims, membership: Membership, *others: Any) -> None:
        init(self, membership, *others)
        clock = membership.components.clock
        self._store = self._unclosed._store = MisdatingStore(self._store, clock)

    patch.setattr(Claims, "__init__", misdate)


KILLED: dict[Patch, tuple[Story, int, str]] = {
    acknowledges_before_claims_are_closed: (job_stories.lost_claims, 61, "T2"),
    acknowledges_before_giving_up: (job_stories.join, 0, "T1"),
    accepts_any_acknowledgement: (job_stories.leaders_die_waiting, 0, "T3"),
    does_not_read_claims_of_gained_tokens: (job_stories.leave_by_the_loop, 0, "T7"),
    ignores_its_trust: (job_stories.pause_in_the_loop, 0, "T1"),
    keeps_tokens_of_an_earlier_session: (job_stories.mute, 0, "T1"),
    takes_silent_nodes_for_dead: (job_stories.short_pauses, 0, "T3"),
    takes_leaving_nodes_for_gone: (job_stories.leave, 0, "T3"),
    ignores_conflicting_claims: (job_stories.suspend_in_the_loop, 0, "T6"),
    acts_on_claims_of_an_earlier_session: (job_stories.cut_while_claiming, 7, "T2"),
    reclaims_at_once: (job_stories.kill, 2, "T6"),
    leaves_unknown_claims_open: (job_stories.unanswered_claims, 3, "T6"),
    runs_late_claims: (job_stories.cut_while_claiming, 4, "T2"),
    ends_claims_of_others: (job_stories.suspend, 0, "T2"),
    ignores_newer_assignments: (job_stories.suspend_in_the_loop, 0, "T2"),
    takes_the_name_of_a_live_node: (job_stories.name_taken, 0, "T8"),
    assigns_to_nodes_that_wait: (job_stories.minimum_nodes_beside_a_worker, 0, "T9"),
    trusts_the_next_assignment_to_know_pins: (job_stories.pinned_elsewhere, 0, "T11"),
    waits_for_the_leader_to_apply_pins: (job_stories.pinned_elsewhere, 0, "T11"),
    finds_claims_of_any_date: (job_stories.a_date_again, 0, "T7"),
    forgets_what_others_did_on_a_date: (job_stories.a_date_again, 0, "T7"),
    dates_ends_by_its_own_clock: (job_stories.leave_by_the_loop, -3, "T7"),
    takes_moves_for_finished: (job_stories.leaders_die_waiting, 0, "T3"),
    finds_claims_by_token: (job_stories.settings_change, 0, "T7"),
    keeps_the_plan_of_other_settings: (job_stories.settings_change, 0, "TL1"),
    reads_the_settings_before_registering_only: (job_stories.settings_duel, 0, "T10"),
    changes_settings_without_a_second_look: (job_stories.settings_duel, 1, "T10"),
    ignores_a_change_under_way: (job_stories.settings_duel, 9, "T10"),
    changes_settings_of_live_nodes: (job_stories.settings_race, 0, "T10"),
}
"""A story and a seed that catch each mutant, and the invariant that it breaks."""


@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: mutant.__name__)
def test_the_world_catches(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded story finds the recorded invariant broken."""
    story, seed, invariant = KILLED[mutant]
    mutant(monkeypatch)
    assert is_caught(story, invariant, first=seed)


@pytest.mark.parametrize(
    ("story", "seed"),
    dict.fromkeys((story, seed) for story, seed, _ in KILLED.values()),
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_the_real_protocol_breaks_nothing_in_these_stories(story: Story, seed: int) -> None:
    """A mutant is caught because of its mutation."""
    check_story(story, [seed])
