"""The jobs protocol broken on purpose: the simulated world must notice each.

A mutant that survives means that the world has gone blind, not that the protocol is safe.
That an old assignment is never applied late cannot be shown here, where a node reads and
applies one after the other; `tests/simulation/models/test_handover.py` shows it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import shifts
from msgspec.structs import replace
from mutants import catches

from jobsync.coordination.session import Session
from jobsync.core.assignment import Ownership, Plan, holders_of, pack_holders, tokens_of
from jobsync.core.handover import Transfers
from jobsync.jobs.claims import Claims
from jobsync.jobs.foreign_claims import ClaimState, ForeignClaims
from jobsync.jobs.job_node import JobNode
from jobsync.jobs.owned_tokens import OwnedTokens
from jobsync.jobs.rebalancer import Rebalancer
from jobsync.jobs.registration import Registration
from jobsync.stores.contract import Applied, Record
from jobsync.testing import check_story, run_story

Patch = Callable[[pytest.MonkeyPatch], None]


def acknowledges_before_claims_are_closed(patch: pytest.MonkeyPatch) -> None:
    """A node gives up tokens while a claim of one is still on its way to the store."""

    async def go_on(self: Claims, is_ours: object) -> None:
        """Wait for nothing."""

    patch.setattr(Claims, "settle", go_on)


def acknowledges_and_goes_on(patch: pytest.MonkeyPatch) -> None:
    """A node acknowledges first, and gives up later."""

    async def give_up(self: OwnedTokens, before: Ownership, after: Ownership, number: int) -> None:
        await self._registration.update(applied=number)
        await self._claims._clock.sleep(1)

    patch.setattr(OwnedTokens, "_give_up", give_up)


def takes_any_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    """An acknowledgement of any number is taken for one of this number."""
    settle = Transfers.settle

    def wrong(self: Transfers[int], is_done: Any, dead: set[int], members: list[int]) -> None:
        settle(self, lambda place, _: is_done(place, 1), dead, members)

    patch.setattr(Transfers, "settle", wrong)


def learns_nothing_of_what_it_gains(patch: pytest.MonkeyPatch) -> None:
    """A node uses what it gains without knowing what others did there."""

    async def load(self: ForeignClaims, tokens: object, recent: object) -> None:
        """Read nothing."""

    patch.setattr(ForeignClaims, "load", load)


def ignores_its_trust(patch: pytest.MonkeyPatch) -> None:
    """A node owns what it was given, whether or not its session trusts itself."""
    patch.setattr(OwnedTokens, "owns", lambda self, task, token: self.current.covers(task, token))


def keeps_what_an_earlier_session_had(patch: pytest.MonkeyPatch) -> None:
    """A node that comes back goes on with what it had."""

    def reset(self: OwnedTokens, session: Session | None) -> None:
        self._session = session
        self._incarnation = "" if session is None else session.incarnation
        self._joined = self._joined or self._claims.now

    patch.setattr(OwnedTokens, "reset", reset)


def takes_the_silent_for_dead(patch: pytest.MonkeyPatch) -> None:
    """A leader deals anew what a node has that it did not hear of for a beat or two."""

    def find(self: Rebalancer) -> frozenset[str]:
        now, beat = self._clock.mono(), self._membership.timing.heartbeat
        watches = self._membership._member._observer._watches
        watched = self._membership.watched("rebalancer")
        seen = {each: watches[each] for each in watched if each in watches}
        silent = {each for each, watch in seen.items() if now - watch.since > 1.5 * beat}
        return frozenset(silent | {e for e in watched if self._membership.is_dead(e)})

    patch.setattr(Rebalancer, "_find_dead", find)


def takes_the_leaving_for_gone(patch: pytest.MonkeyPatch) -> None:
    """A leader does not wait for one who is about to leave."""
    list_nodes = Rebalancer.list_nodes

    async def hasty(self: Rebalancer) -> Any:
        nodes = await list_nodes(self)
        return [replace(n, stage="left") if n.stage == "leaving" else n for n in nodes]

    patch.setattr(Rebalancer, "list_nodes", hasty)


def claims_what_others_have(patch: pytest.MonkeyPatch) -> None:
    """A claim takes the place of whatever stands there."""
    patch.setattr(Claims, "is_refused", lambda *_: False)
    patch.setattr(Claims, "_find_conflict", lambda *_: "")


def acts_on_claims_of_an_earlier_session(patch: pytest.MonkeyPatch) -> None:
    """A claim is acted on by whatever session there is when the answer comes."""

    def may_run(self: JobNode, _: str) -> Callable[[str, int], bool]:
        return lambda *_: self.is_trusted and self.membership.incarnation == self._incarnation

    patch.setattr(JobNode, "_may_run", may_run)


def reopens_at_once(patch: pytest.MonkeyPatch) -> None:
    """What a dead node had in hand is done again without waiting for late news of it."""
    init = Claims.__init__

    def hasty(self: Claims, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **{**options, "reclaim_after": 0.0})

    patch.setattr(Claims, "__init__", hasty)


def leaves_unknown_claims_open(patch: pytest.MonkeyPatch) -> None:
    """A claim of which nobody knows may land, and nobody does the task."""

    async def forget(self: Claims) -> None:
        self._unclosed.clear()

    patch.setattr(Claims, "_close_unknown", forget)


def runs_what_comes_too_late(patch: pytest.MonkeyPatch) -> None:
    """A claim is acted on although the session was lost before the answer came."""
    patch.setattr(JobNode, "_may_run", lambda *_: lambda *_: True)


def ends_what_another_has(patch: pytest.MonkeyPatch) -> None:
    """A task is ended whoever has it by now."""

    async def end(self: Claims, bases: dict[str, Record], state: ClaimState) -> dict[str, str]:
        for task, base in bases.items():
            current = await self._store.get(base.key)
            assert current is not None
            ended = {**base.value, "state": state, "ended": self.now}
            (outcome,) = await self._store.write([current.replace(ended)])
            if isinstance(outcome, Applied):
                self._record_end(task, outcome.record)
        return {}

    patch.setattr(Claims, "_end", end)


def does_not_know_that_it_is_behind(patch: pytest.MonkeyPatch) -> None:
    """A claim under an earlier assignment is as good as any."""
    stands = Claims._find_conflict

    def wrong(self: Claims, record: Record, claim: Any, number: int, known: Any) -> str:
        return stands(self, record, claim, 10**9, known)

    patch.setattr(Claims, "_find_conflict", wrong)


def takes_a_living_name(patch: pytest.MonkeyPatch) -> None:
    """A second process of a name takes it from the first."""

    async def gone(self: Registration, holder: object) -> bool:
        return True

    patch.setattr(Registration, "_is_gone", gone)


def takes_moves_for_made(patch: pytest.MonkeyPatch) -> None:
    """A leader that takes over believes that what is on its way has arrived."""
    read = Rebalancer._read_plan

    async def hasty(self: Rebalancer, term: Any) -> Plan:
        plan = await read(self, term)
        holders = holders_of(plan.assignment)
        for move in plan.assignment.moves:
            for token in tokens_of(move):
                holders[token] = move.taker
        starts, packed = pack_holders(holders)
        made = replace(plan.assignment, starts=starts, holders=packed, moves=())
        return replace(plan, assignment=made)

    patch.setattr(Rebalancer, "_read_plan", hasty)


KILLED: dict[Patch, tuple[shifts.Story, int, str]] = {
    acknowledges_before_claims_are_closed: (shifts.lost_claims, 18, "T2"),
    acknowledges_and_goes_on: (shifts.minimum_nodes, 0, "T1"),
    takes_any_acknowledgement: (shifts.leaders_die_waiting, 0, "T3"),
    learns_nothing_of_what_it_gains: (shifts.leave_by_the_loop, 0, "T7"),
    ignores_its_trust: (shifts.pause_in_the_loop, 0, "T1"),
    keeps_what_an_earlier_session_had: (shifts.mute, 0, "T1"),
    takes_the_silent_for_dead: (shifts.doze, 0, "T3"),
    takes_the_leaving_for_gone: (shifts.leave, 0, "T3"),
    claims_what_others_have: (shifts.suspend_in_the_loop, 0, "T6"),
    acts_on_claims_of_an_earlier_session: (shifts.cut_while_claiming, 7, "T2"),
    reopens_at_once: (shifts.kill, 2, "T6"),
    leaves_unknown_claims_open: (shifts.lost_claims, 20, "TL3"),
    runs_what_comes_too_late: (shifts.cut_while_claiming, 4, "T2"),
    ends_what_another_has: (shifts.suspend, 0, "T2"),
    does_not_know_that_it_is_behind: (shifts.suspend_in_the_loop, 0, "T2"),
    takes_a_living_name: (shifts.name_taken, 0, "T8"),
    takes_moves_for_made: (shifts.leaders_die_waiting, 0, "T3"),
}
"""A story that kills each mutant, a seed that was seen to, and the promise that it finds broken."""

TIMES = 24
"""A seed tells another tale whenever the library takes one step more; these are tried too."""


@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: mutant.__name__)
def test_the_world_notices(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The story beside it finds the promise broken that is recorded beside it."""
    story, seed, invariant = KILLED[mutant]
    mutant(monkeypatch)
    seeds = dict.fromkeys((seed, *range(TIMES)))
    assert any(catches(run_story(story, each).violations, invariant) for each in seeds)


@pytest.mark.parametrize(
    ("story", "seed"),
    dict.fromkeys((story, seed) for story, seed, _ in KILLED.values()),
    ids=lambda each: each.__name__ if callable(each) else str(each),
)
def test_the_killers_find_nothing_in_the_real_protocol(story: shifts.Story, seed: int) -> None:
    """What kills a mutant is the mutation."""
    check_story(story, [seed])
