"""Mutants of groups, keys, orders and limits: the simulated world must catch each."""

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import place_stories
import pytest
from mutants import is_caught

from jobsync.errors import OutcomeUnknown
from jobsync.queue.sql import sqlite, sqlite_claims, sqlite_selection
from jobsync.queue.sql.placed_push import PlacedPush
from jobsync.queue.sql.places import Places
from jobsync.queue.sql.sqlite_places import SQL
from jobsync.stores.sql import Steps
from jobsync.testing.stories import Story

pytestmark = pytest.mark.usefixtures("without_logs")

Patch = Callable[[pytest.MonkeyPatch], None]


def replace(patch: pytest.MonkeyPatch, statement: str, old: str, new: str = "") -> None:
    """Replace a part of a statement."""
    assert old in SQL[statement]
    patch.setitem(SQL, statement, SQL[statement].replace(old, new))


def keep_blocked(patch: pytest.MonkeyPatch, *moves: str) -> None:
    """Leave a group alone when its head ends in one of these ways."""

    def end(self: Any, connection: Any, place: int, ending: Any, time: Any) -> None:
        was(self, connection, place, ending, time)
        if ending.move in moves and self.messages[place].group in self.freed:
            self.freed.remove(self.messages[place].group)

    was = sqlite_claims.ClaimRow.end
    patch.setattr(sqlite_claims.ClaimRow, "end", end)


def keeps_a_group_blocked_by_the_dead(patch: pytest.MonkeyPatch) -> None:
    """A head that becomes a dead letter blocks its group for ever."""
    keep_blocked(patch, "bury")


def keeps_a_group_blocked_by_the_cancelled(patch: pytest.MonkeyPatch) -> None:
    """A head that is cancelled blocks its group for ever."""
    keep_blocked(patch, "cancel")


def keeps_a_group_blocked_by_what_killed_its_worker(patch: pytest.MonkeyPatch) -> None:
    """A head that dies because its claims lapse blocks its group for ever."""

    def end(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Places, "release", release_nothing)
            return was(*arguments)

    was = sqlite_claims.end_lapsed
    patch.setattr(sqlite, "end_lapsed", end)


def release_nothing(self: Places, names: Iterable[str]) -> Steps[None]:
    """Release no group."""
    del self, names
    yield "SELECT 1", {}


def lets_the_next_pass_a_head_that_failed(patch: pytest.MonkeyPatch) -> None:
    """A head that is tried again later no longer blocks its group."""

    def end(self: Any, connection: Any, place: int, ending: Any, time: Any) -> None:
        was(self, connection, place, ending, time)
        if ending.move == "retry" and self.messages[place].group is not None:
            self.freed.append(self.messages[place].group)

    was = sqlite_claims.ClaimRow.end
    patch.setattr(sqlite_claims.ClaimRow, "end", end)


def lets_the_newest_be_the_next(patch: pytest.MonkeyPatch) -> None:
    """The latest message of a group overtakes the others."""
    replace(patch, "unblock", "ORDER BY m.position", "ORDER BY m.position DESC")


def blocks_nothing(patch: pytest.MonkeyPatch) -> None:
    """A message is a head although its group has one."""

    def add(self: Places, groups: Sequence[str | None]) -> Steps[list[bool]]:
        yield from was(self, groups)
        return [False] * len(groups)

    was = Places._add_to_groups
    patch.setattr(Places, "_add_to_groups", add)


def makes_a_batch_of_heads(patch: pytest.MonkeyPatch) -> None:
    """All messages of a batch are heads if their group had none."""

    def add(self: Places, groups: Sequence[str | None]) -> Steps[list[bool]]:
        blocked = yield from was(self, groups)
        free = {group for group, is_blocked in zip(groups, blocked, strict=True) if not is_blocked}
        return [group not in free for group in groups]

    was = Places._add_to_groups
    patch.setattr(Places, "_add_to_groups", add)


def makes_heads_of_the_dead(patch: pytest.MonkeyPatch) -> None:
    """A dead letter that is put back is a head although its group has one."""
    replace(patch, "insert_redriven", "THEN 'blocked'", "THEN 'waiting'")


def puts_the_dead_first(patch: pytest.MonkeyPatch) -> None:
    """A dead letter that is put back comes before the others of its group."""
    replace(patch, "insert_redriven", "(\n  id, queue", "(\n  position, id, queue")
    low = "(SELECT min(position) - 1 FROM jobsync_message) - row_number() OVER ()"
    replace(patch, "insert_redriven", "SELECT id, queue,", f"SELECT {low}, id, queue,")


def purges_heads_and_leaves_the_rest(patch: pytest.MonkeyPatch) -> None:
    """A purge of heads leaves the others blocked."""
    replace(patch, "purge_live", "THEN group_name END", "THEN NULL END")


def remembers_empty_groups(patch: pytest.MonkeyPatch) -> None:
    """The next message of a group that was empty waits for a head."""
    replace(patch, "remove_groups", "DELETE FROM", "UPDATE")
    replace(patch, "remove_groups", "jobsync_group\n", "jobsync_group SET name = name\n")


def forgets_delays_of_the_blocked(patch: pytest.MonkeyPatch) -> None:
    """A delayed message can be claimed as soon as it is the head of its group."""
    replace(patch, "unblock", "max(wakes, :mono)", ":mono")


def makes_heads_by_replacing(patch: pytest.MonkeyPatch) -> None:
    """A blocked message that is replaced is a head."""
    replace(patch, "replace", "WHEN 'blocked' THEN 'blocked'", "WHEN 'blocked' THEN 'waiting'")


def frees_keys_of_the_claimed(patch: pytest.MonkeyPatch) -> None:
    """A key is free as soon as its message is claimed."""
    replace(patch, "find_pending", "c.open > 0", "c.open < 0")


def holds_keys_of_the_finished(patch: pytest.MonkeyPatch) -> None:
    """A key is held although its message is finished, until it is removed."""

    def find(self: Places, ids: list[str]) -> Steps[set[str]]:
        yield "SELECT 1", {}
        return {*ids}

    patch.setattr(Places, "_find_pending", find)


def holds_keys_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A key is held although its time is over."""
    replace(patch, "hold_keys", "k.held_until <= :now", "k.held_until < 0")


def holds_no_key_for_a_time(patch: pytest.MonkeyPatch) -> None:
    """A key is free although its time is not over."""
    replace(patch, "hold_keys", "k.held_until <= :now", "k.held_until IS NOT NULL")


def replaces_the_claimed(patch: pytest.MonkeyPatch) -> None:
    """A message that is claimed counts as replaced."""

    def replace_any(self: Places, holder: str, message: Any, text: str) -> Steps[bool]:
        yield from was(self, holder, message, text)
        return True

    was = Places._replace
    patch.setattr(Places, "_replace", replace_any)


def adds_instead_of_replacing(patch: pytest.MonkeyPatch) -> None:
    """A message that was to replace another one is added beside it."""

    def replace_none(self: Places, holder: str, message: Any, text: str) -> Steps[bool]:
        del self, holder, message, text
        yield "SELECT 1", {}
        return False

    patch.setattr(Places, "_replace", replace_none)


def removes_keys_that_are_held(patch: pytest.MonkeyPatch) -> None:
    """Keys are removed although their messages are pending."""
    replace(patch, "see_keys", "SELECT key, CASE", "SELECT key, 0 AND CASE")


def adds_what_it_may_not_in_doubt(patch: pytest.MonkeyPatch) -> None:
    """A push with an unknown outcome is acknowledged."""

    async def look_up(self: PlacedPush, new_messages: object) -> dict[str, str]:
        del self, new_messages
        return {}

    patch.setattr(PlacedPush, "_look_up", look_up)


def calls_refused_what_it_cannot_look_up(patch: pytest.MonkeyPatch) -> None:
    """A push with an unknown outcome is refused, because the check of it is."""

    async def push(self: PlacedPush, new_messages: Any, payloads: Any) -> Any:
        try:
            return await self._place(new_messages, payloads)
        except OutcomeUnknown:
            if (holders := await self._look_up(new_messages)) is None:
                raise
            return holders

    patch.setattr(PlacedPush, "push", push)


def charges_for_attempts_with_other_content(patch: pytest.MonkeyPatch) -> None:
    """A message that is replaced has only the attempts that are left."""
    replace(patch, "replace", "returned = deliveries, ")


def takes_the_least_urgent_first(patch: pytest.MonkeyPatch) -> None:
    """The order of priorities is reversed."""
    replace(patch, "select_high", "priority DESC", "priority")


def takes_the_newest_of_a_priority_first(patch: pytest.MonkeyPatch) -> None:
    """Of messages with the same priority the newest is claimed first."""
    replace(patch, "select_high", "priority DESC, position", "priority DESC, position DESC")


def forgets_priorities_of_those_that_waited(patch: pytest.MonkeyPatch) -> None:
    """A message whose delay is over stands among those without a priority."""
    replace(patch, "promote", "CASE WHEN priority = 0 THEN 'ready' ELSE 'ranked' END", "'ready'")


def takes_those_that_waited_first(patch: pytest.MonkeyPatch) -> None:
    """A message whose delay is over is claimed before more urgent ones."""

    def select(
        connection: sqlite3.Connection, parameters: Any, order: Any, *, has_waiting: bool
    ) -> Any:
        row = connection.execute(SQL["select_waiting"], parameters).fetchone()
        found = was(connection, parameters, order, has_waiting=has_waiting)
        return found if row is None else sqlite_selection.SelectedMessages([row], is_full=True)

    was = sqlite_selection._select
    patch.setattr(sqlite_selection, "_select", select)


def takes_the_oldest_first(patch: pytest.MonkeyPatch) -> None:
    """A queue whose newest messages come first takes the oldest."""
    patch.setitem(SQL, "select_newest", SQL["select_ready"])


def counts_claims_but_not_all_messages_in_them(patch: pytest.MonkeyPatch) -> None:
    """A claim of several messages uses one place of the limit."""
    replace(patch, "read_usage", "coalesce(sum(open), 0)", "count(*)")


def counts_no_claims_of_others(patch: pytest.MonkeyPatch) -> None:
    """Each claim may take as many as the limit allows in all."""
    replace(patch, "read_usage", "AND open > 0", "AND open > 1000")


def spends_no_tokens(patch: pytest.MonkeyPatch) -> None:
    """What was claimed does not count for the rate."""
    replace(patch, "use_tokens", "tokens = :tokens", "tokens = tokens")


def fills_the_bucket_at_each_claim(patch: pytest.MonkeyPatch) -> None:
    """After any claim the rate allows a burst again."""
    replace(patch, "read_usage", "min(:burst, tokens + ", "max(:burst, tokens + ")


def refills_from_the_first_claim_on(patch: pytest.MonkeyPatch) -> None:
    """Time counts more than once for the rate."""
    replace(patch, "use_tokens", "refilled = :mono", "refilled = refilled")


def keeps_a_place_of_the_dead(patch: pytest.MonkeyPatch) -> None:
    """Claims that have ended count for the limit, so that it is used up."""
    replace(patch, "read_usage", "coalesce(sum(open), 0)", "count(*)")
    replace(patch, "read_usage", "AND open > 0", "")


def keeps_one_head_of_a_group(patch: pytest.MonkeyPatch) -> None:
    """A group goes on with one message at a time, once a head has ended."""

    def settle(*arguments: Any) -> Any:
        return was(*arguments[:-1], 1)

    was: Any = sqlite_claims.settle_claim
    patch.setattr(sqlite, "settle_claim", settle)


KILLED: dict[Patch, tuple[Story, str]] = {
    keeps_a_group_blocked_by_the_dead: (place_stories.groups, "Q9"),
    keeps_a_group_blocked_by_the_cancelled: (place_stories.groups, "Q9"),
    keeps_a_group_blocked_by_what_killed_its_worker: (place_stories.groups_of_poison, "Q9"),
    lets_the_next_pass_a_head_that_failed: (place_stories.groups, "Q9"),
    lets_the_newest_be_the_next: (place_stories.groups, "Q9"),
    blocks_nothing: (place_stories.groups, "Q9"),
    makes_a_batch_of_heads: (place_stories.groups, "Q9"),
    makes_heads_of_the_dead: (place_stories.groups_of_poison, "Q9"),
    puts_the_dead_first: (place_stories.groups_of_poison, "Q9"),
    purges_heads_and_leaves_the_rest: (place_stories.purged, "Q9"),
    remembers_empty_groups: (place_stories.groups, "Q9"),
    makes_heads_by_replacing: (place_stories.replaced, "Q9"),
    forgets_delays_of_the_blocked: (place_stories.groups, "Q8"),
    frees_keys_of_the_claimed: (place_stories.keys_for_a_time, "Q27"),
    holds_keys_of_the_finished: (place_stories.keys, "Q27"),
    holds_keys_for_ever: (place_stories.keys_for_a_time, "Q27"),
    holds_no_key_for_a_time: (place_stories.keys_for_a_time, "Q27"),
    removes_keys_that_are_held: (place_stories.keys_for_a_time, "Q27"),
    adds_instead_of_replacing: (place_stories.replaced, "Q27"),
    replaces_the_claimed: (place_stories.replaced, "Q15"),
    adds_what_it_may_not_in_doubt: (place_stories.keys, "Q15"),
    calls_refused_what_it_cannot_look_up: (place_stories.keys, "Q15"),
    charges_for_attempts_with_other_content: (place_stories.replaced, "Q6"),
    takes_the_least_urgent_first: (place_stories.priorities, "Q26"),
    takes_the_newest_of_a_priority_first: (place_stories.priorities, "Q26"),
    forgets_priorities_of_those_that_waited: (place_stories.priorities, "Q26"),
    takes_those_that_waited_first: (place_stories.priorities, "Q26"),
    takes_the_oldest_first: (place_stories.newest_first, "Q26"),
    counts_claims_but_not_all_messages_in_them: (place_stories.limited, "Q28"),
    counts_no_claims_of_others: (place_stories.limited, "Q28"),
    keeps_a_place_of_the_dead: (place_stories.limited, "QL3"),
    spends_no_tokens: (place_stories.rated, "Q28"),
    fills_the_bucket_at_each_claim: (place_stories.rated, "Q28"),
    refills_from_the_first_claim_on: (place_stories.rated, "Q28"),
    keeps_one_head_of_a_group: (place_stories.groups_at_once, "Q9"),
}
"""For each mutant a story that catches it, and the invariant that it violates."""


@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: mutant.__name__)
def test_the_world_notices(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded story reports a violation of the recorded invariant."""
    story, invariant = KILLED[mutant]
    mutant(monkeypatch)
    assert is_caught(story, invariant)
