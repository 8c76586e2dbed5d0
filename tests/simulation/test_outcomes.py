"""Handlers that write in transactions, and results, in the simulated world.

The stories are in `outcome_stories`. `jobsync.testing` checks every commit (Q29, Q30). On
PostgreSQL they run in `test_queue_on_postgres`, results on an object store in
`test_queue_on_pages`.
"""

import sqlite3
from collections.abc import Callable
from typing import Any

import msgspec
import outcome_stories
import pytest
from histories import compared_with_recorded
from mutants import is_caught
from outcome_stories import STORIES, stormy_outcomes

from jobsync.core.codec import Json
from jobsync.queue.backend import Receipt, Settlement
from jobsync.queue.context import Context
from jobsync.queue.sql import sqlite_claims
from jobsync.queue.sql.sqlite_transactions import SqliteTransactions
from jobsync.queue.transaction import TransactionBlock
from jobsync.queue.transaction_backend import ClaimOutcome
from jobsync.testing import Occurrence, check_effects, check_results, check_story
from jobsync.testing.stories import Story

pytestmark = pytest.mark.usefixtures("without_logs")

Patch = Callable[[pytest.MonkeyPatch], None]
SEEDS = (0, -1)
"""The second one is a world in which all machines differ."""


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories(story: Story) -> None:
    """Each story ends well with every seed, and has its recorded histories."""
    with compared_with_recorded(f"outcomes.{story.__name__}", SEEDS):
        check_story(story, SEEDS)


def test_a_storm() -> None:
    """No invariant is broken, and after the storm every message is handled."""
    check_story(stormy_outcomes, [5])


def ignores_that_the_claim_has_ended(patch: pytest.MonkeyPatch) -> None:
    """A handler counts as completed whatever the database says."""

    async def commit(self: Any, opened: Any) -> bool:
        await was(self, opened)
        return True

    was = TransactionBlock._commit
    patch.setattr(TransactionBlock, "_commit", commit)


def believes_that_a_lost_commit_has_arrived(patch: pytest.MonkeyPatch) -> None:
    """A COMMIT without a reply counts as done."""

    async def read_outcome(*_: object) -> ClaimOutcome:
        return "completed"

    patch.setattr(TransactionBlock, "_read_outcome", read_outcome)


def completes_what_others_have_claimed(patch: pytest.MonkeyPatch) -> None:
    """A handler whose claim has ended completes its message by the claim of another."""

    def complete(self: Any, connection: sqlite3.Connection, receipt: Receipt) -> bool:
        if was(self, connection, receipt):
            return True
        found = connection.execute(
            "SELECT c.claim FROM jobsync_claim AS c, json_each(c.messages) AS m"
            " WHERE json_extract(m.value, '$[0]') = ? AND substr(c.outcomes, m.key + 1, 1) = 'o'",
            [receipt.id],
        ).fetchone()
        other = msgspec.structs.replace(receipt, claim=found[0]) if found else receipt
        return was(self, connection, other)

    was = SqliteTransactions.complete
    patch.setattr(SqliteTransactions, "complete", complete)


def completes_all_of_a_claim(patch: pytest.MonkeyPatch) -> None:
    """A handler completes whatever was claimed with its message."""

    def complete(self: Any, connection: sqlite3.Connection, receipt: Receipt) -> bool:
        count = len(self._unsettled.remove(receipt.claim))
        now = self._read_time()["now"]
        if count and sqlite_claims.complete_claim(connection, receipt.claim, count, now):
            return True
        return was(self, connection, receipt)

    was = SqliteTransactions.complete
    patch.setattr(SqliteTransactions, "complete", complete)


def forgets_what_ack_was_given(patch: pytest.MonkeyPatch) -> None:
    """A result that a handler passes to `ack` is not kept."""

    async def ack(self: Context, result: Json = None) -> bool:
        del result
        return await was(self)

    was = Context.ack
    patch.setattr(Context, "ack", ack)


def mixes_up_results(patch: pytest.MonkeyPatch) -> None:
    """A result is kept with the message that was completed before."""

    def insert(connection: Any, queue: str, settlement: Settlement, now: float) -> None:
        results.append(settlement.result)
        swapped = msgspec.structs.replace(settlement, result=results[-2:][0])
        was(connection, queue, swapped, now)

    results: list[Any] = []
    was = sqlite_claims._insert_result
    patch.setattr(sqlite_claims, "_insert_result", insert)


KILLED: dict[Patch, tuple[Story, str]] = {
    ignores_that_the_claim_has_ended: (outcome_stories.effects_of_the_suspended, "Q15"),
    believes_that_a_lost_commit_has_arrived: (outcome_stories.effects_in_bad_weather, "Q15"),
    completes_what_others_have_claimed: (outcome_stories.effects_of_the_suspended, "Q29"),
    completes_all_of_a_claim: (outcome_stories.effects, "Q5"),
    forgets_what_ack_was_given: (outcome_stories.results, "Q30"),
    mixes_up_results: (outcome_stories.results, "Q30"),
}
"""For each mutant a story that catches it, and the invariant that it violates."""


@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: mutant.__name__)
def test_the_world_notices(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded story reports a violation of the recorded invariant."""
    story, invariant = KILLED[mutant]
    mutant(monkeypatch)
    assert is_caught(story, invariant)


def occur(what: str, at: float = 1.0, **details: Any) -> Occurrence:
    """Return an entry of a history about one message."""
    return Occurrence(at=at, node="a", what=what, details={"id": "m", **details})


COMPLETED = occur("row", state="completed", deliveries=2)


@pytest.mark.parametrize(
    ("history", "is_broken"),
    [
        ([COMPLETED, occur("effect", epoch=2)], False),
        ([occur("effect", epoch=2)], True),
        ([COMPLETED, occur("effect", epoch=1)], True),
        ([COMPLETED, occur("effect", at=1.5, epoch=2)], True),
        ([occur("row", state="claimed", deliveries=2), occur("effect", epoch=2)], True),
        ([COMPLETED, occur("effect", epoch=2), COMPLETED, occur("effect", epoch=2)], True),
    ],
)
def test_effects_are_committed_once_with_the_completion(
    history: list[Occurrence], is_broken: bool
) -> None:
    """Alone, in another commit, of another delivery or again, an effect is a violation."""
    assert [each.invariant for each in check_effects(history)] == ["Q29"] * is_broken


@pytest.mark.parametrize(("epoch", "is_broken"), [(1, True), (2, False)])
def test_a_result_is_that_of_the_delivery_that_counts(epoch: int, is_broken: bool) -> None:
    """Of two handlers that have returned something, one has completed the message."""
    returned = [occur("returned", epoch=each, value=f"of {each}") for each in (1, 2)]
    history = [*returned, COMPLETED, occur("result", value=f"of {epoch}")]
    assert [each.invariant for each in check_results(history)] == ["Q30"] * is_broken
