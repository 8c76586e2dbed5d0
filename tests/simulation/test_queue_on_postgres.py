"""A queue in the simulated world, with its messages on a real PostgreSQL server.

The stories and the checks are those of `test_queue`. Here the statements for PostgreSQL run, and
the code around them. `make prove-queue` runs storms.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import postgres_queue_stories
import pytest
from mutants import is_caught
from postgres_queue_stories import STORIES
from postgres_rows import opened_rows, use_database
from servers import PostgresServer

from jobsync.core.clock import Mono
from jobsync.queue.backend import NewMessage, Settlement
from jobsync.queue.opening import open_backend
from jobsync.queue.sql import postgres as postgres_queue
from jobsync.queue.sql import postgres_statements
from jobsync.queue.sql.postgres import PostgresBackend
from jobsync.testing import (
    Link,
    RecordingBackend,
    World,
    check_repeats,
    check_story,
    find_story,
)
from jobsync.testing.stories import Story, name_of
from jobsync.testing.weather import Fault

pytestmark = pytest.mark.usefixtures("without_logs")

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module", autouse=True)
def database(postgres: PostgresServer) -> Iterator[None]:
    """Use a database that nobody else uses."""
    name = f"worlds_{os.getpid()}"
    with use_database(postgres.create_database(name)):
        yield
    postgres.drop_database(name)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories(story: Story) -> None:
    """Each story ends well."""
    check_story(story, [0])


@pytest.mark.parametrize(
    "seed",
    [
        # Some settlements of a batch were accepted, and the request that asked for the others was
        # refused: the batch was reported as refused.
        1794874572,
    ],
)
def test_storms(seed: int) -> None:
    """No invalid request is accepted, and after the storm every message is handled."""
    check_story(get_story("stormy"), [seed])


@pytest.mark.parametrize("fault", ["refused", "forbidden", "lost"])
def test_a_batch_that_was_settled_in_part_is_settled_in_the_end(fault: Fault) -> None:
    """If the question for the rest fails, the batch is not refused but sent again."""

    async def story(world: World) -> list[bool]:
        with opened_rows() as open_store:
            node = world.node("a")
            link = Link(world, node, open_store(world))
            backend = open_backend(link, "mails", node.components)
            messages = [NewMessage(id=name, value=1, max_attempts=2) for name in ("one", "two")]
            await backend.push(messages)
            claimed = await backend.claim(2, session="me", visibility=30.0)
            batch = [
                Settlement(receipt=message.receipt, move="complete") for message in claimed.messages
            ]
            await backend.settle(batch[:1])
            recording = RecordingBackend(node, backend)
            # The first request arrives, only later.
            link.ordain("settle", "slow", fault)
            return await recording.settle(batch)

    world = World(0)
    assert world.run(lambda: story(world)) == [True, True]


def test_a_story_repeats(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed gives the same history, in other processes and databases."""
    monkeypatch.setenv("JOBSYNC_TEST_POSTGRES", postgres.url)
    check_repeats(get_story("drains"), seed=1)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_replay_finds_a_story(story: Story) -> None:
    """The name in the line that replays a story is that of the story on PostgreSQL."""
    assert find_story(name_of(story)) is story


def get_story(name: str) -> Story:
    """Return a story by its name."""
    story: Story = getattr(postgres_queue_stories, name)
    return story


def replace(patch: pytest.MonkeyPatch, statement: str, old: str, new: str = "") -> None:
    """Replace a part of a statement."""
    text = postgres_statements._SQL[statement]
    assert old in text
    patch.setitem(postgres_statements._SQL, statement, text.replace(old, new))


def claims_of_a_paused_queue(patch: pytest.MonkeyPatch) -> None:
    """Delayed messages of a paused queue are claimed."""
    is_open = "NOT EXISTS (SELECT 1 FROM {schema}.jobsync_pause WHERE queue = %(queue)s)"
    replace(patch, "claim_late", f"AND {is_open} {{late_filter}}\n  ORDER BY due", "ORDER BY due")


def claims_before_the_time(patch: pytest.MonkeyPatch) -> None:
    """A delay is ignored."""
    late, any_time = (f"suspect = %(suspects)s AND due {sign}" for sign in ("<=", "<> "))
    replace(patch, "claim_late", late, any_time)


def does_not_know_what_is_due(patch: pytest.MonkeyPatch) -> None:
    """Delayed messages are found when somebody looks by chance."""
    replace(patch, "claim", "::float8 AS due", "::float8 * NULL AS due")


def ends_what_is_to_be_kept(patch: pytest.MonkeyPatch) -> None:
    """A worker ends claims that it still uses."""
    replace(patch, "end_claims", "p.id <> ALL (%(keep)s::text[])", "%(keep)s::text[] IS NOT NULL")


def claims_too_many(patch: pytest.MonkeyPatch) -> None:
    """New messages are claimed beside as many that waited."""
    left = "LIMIT (SELECT %(limit)s - count(*) FROM late)"
    replace(patch, "claim_fifo", left, "LIMIT %(limit)s")
    rest = "(SELECT %(limit)s - count(*) FROM (SELECT FROM late UNION ALL SELECT FROM plain) AS f)"
    replace(patch, "claim_fifo", rest, "0")


def leaves_claims_of_the_dead(patch: pytest.MonkeyPatch) -> None:
    """The claims of a dead session last until they lapse."""
    replace(patch, "end_claims", "OR session = ANY", "OR session <> session AND session = ANY")


def settles_whoever_has_it(patch: pytest.MonkeyPatch) -> None:
    """A receipt settles a message although another worker has claimed it since."""
    for name in ("complete", "settle"):
        replace(patch, name, "claim = ANY (%(distinct)s::text[])", "closed IS NULL")
        replace(patch, name, "ON g.claim = c.claim AND", "ON")


def charges_what_is_given_back(patch: pytest.MonkeyPatch) -> None:
    """A clean return spends an attempt."""
    replace(patch, "settle", "p.returned + g.back", "p.returned")


def forgets_how_it_was_settled(patch: pytest.MonkeyPatch) -> None:
    """A settlement that is repeated after a lost reply is reported as stale."""
    replace(patch, "complete", "WHERE is_given AND outcome IN ('c', 'f')", "WHERE is_ended")
    answer = "WHERE outcome = wanted OR (outcome = 'f' AND wanted = 'c')"
    replace(patch, "settle", answer, "WHERE is_ended")


def suspects_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A message whose claim lapsed once runs alone for ever, although it was settled since."""
    replace(patch, "settle", "false AS is_suspect", "c.is_suspect")


def forgets_its_claims(patch: pytest.MonkeyPatch) -> None:
    """The messages of a claim whose reply was lost wait until the claim lapses."""
    replace(patch, "find_claimed", "claim = %(claim)s", "claim = '' AND %(claim)s <> ''")


def overlooks_what_is_finished(patch: pytest.MonkeyPatch) -> None:
    """A push with a lost reply is in doubt although its message has been handled."""
    replace(patch, "exists", "closed IS NOT NULL", "false")


def closes_too_early(patch: pytest.MonkeyPatch) -> None:
    """The first settlement drops the payloads of the other messages of its claim."""
    for name in ("complete", "settle"):
        replace(patch, name, "CASE WHEN e.open > 0 THEN c.payloads END", "NULL")


def confuses_places(patch: pytest.MonkeyPatch) -> None:
    """The outcomes of a claim's messages are recorded in another order."""
    for name in ("complete", "settle"):
        replace(
            patch,
            name,
            "string_agg(outcome, '' ORDER BY place)",
            "reverse(string_agg(outcome, '' ORDER BY place))",
        )


def never_scans_again(patch: pytest.MonkeyPatch) -> None:
    """Only the first claim looks at all messages."""

    def init(self: PostgresBackend, *arguments: Any) -> None:
        was(self, *arguments)
        self._scans[(), True].last_full = Mono(float("inf"))

    def schedule(self: PostgresBackend, scan: postgres_queue._ScanState, start: Mono) -> None:
        del self, start
        scan.next_full = Mono(float("inf"))

    was = PostgresBackend.__init__
    patch.setattr(PostgresBackend, "__init__", init)
    patch.setattr(PostgresBackend, "_schedule_full_scan", schedule)


def lets_the_newest_be_the_next(patch: pytest.MonkeyPatch) -> None:
    """The latest message of a group overtakes the others."""
    replace(patch, "unblock", "ORDER BY position", "ORDER BY position DESC")


def releases_groups_of_those_that_fail(patch: pytest.MonkeyPatch) -> None:
    """A head that is tried again later no longer blocks its group."""
    replace(
        patch,
        "settle",
        "is_ended AND state <> 'waiting' THEN group_name",
        "is_ended THEN group_name",
    )


def purges_heads_and_leaves_the_rest(patch: pytest.MonkeyPatch) -> None:
    """A purge of heads leaves the others blocked."""
    replace(patch, "purge", "CASE WHEN state <> 'blocked' THEN group_name END", "NULL::text")


def keeps_a_group_blocked_by_what_killed_its_worker(patch: pytest.MonkeyPatch) -> None:
    """A head that dies because its claims lapse blocks its group for ever."""
    replace(patch, "end_claims", "CASE state WHEN 'dead' THEN group_name END", "NULL::text")


def frees_keys_of_the_claimed(patch: pytest.MonkeyPatch) -> None:
    """A key is free as soon as its message is claimed."""
    replace(patch, "find_pending", "p.outcome = 'o'", "p.outcome = ''")


def removes_keys_that_are_held(patch: pytest.MonkeyPatch) -> None:
    """Keys are removed although their messages are pending."""
    replace(patch, "forget_keys", "NOT EXISTS", "true OR NOT EXISTS")


def forgets_priorities_of_those_that_waited(patch: pytest.MonkeyPatch) -> None:
    """A message whose delay is over stands among those without a priority."""
    replace(patch, "promote", "CASE WHEN m.priority = 0 THEN 'ready' ELSE 'ranked' END", "'ready'")


KILLED: dict[Patch, tuple[str, str]] = {
    claims_of_a_paused_queue: ("paused", "Q25"),
    claims_before_the_time: ("delays", "Q8"),
    does_not_know_what_is_due: ("delays", "QL5"),
    claims_too_many: ("paused", "Q10"),
    ends_what_is_to_be_kept: ("damaged", "Q13"),
    leaves_claims_of_the_dead: ("kill", "QL2"),
    settles_whoever_has_it: ("settled_late", "Q5"),
    charges_what_is_given_back: ("leave", "Q6"),
    forgets_how_it_was_settled: ("lost_replies", "Q15"),
    suspects_for_ever: ("lost_replies", "Q11"),
    forgets_its_claims: ("in_doubt", "QL1"),
    overlooks_what_is_finished: ("in_doubt", "Q15"),
    never_scans_again: ("commits_late", "QL3"),
    closes_too_early: ("kill", "Q2"),
    confuses_places: ("drains", "Q5"),
    lets_the_newest_be_the_next: ("groups", "Q9"),
    releases_groups_of_those_that_fail: ("groups", "Q9"),
    purges_heads_and_leaves_the_rest: ("purged", "Q9"),
    keeps_a_group_blocked_by_what_killed_its_worker: ("groups_of_poison", "Q9"),
    frees_keys_of_the_claimed: ("keys_for_a_time", "Q27"),
    removes_keys_that_are_held: ("keys_for_a_time", "Q27"),
    forgets_priorities_of_those_that_waited: ("priorities", "Q26"),
}
"""For each mutant of the backend a story that catches it, and the invariant that it violates."""


@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: mutant.__name__)
def test_the_world_notices(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded story reports a violation of the recorded invariant."""
    name, invariant = KILLED[mutant]
    mutant(monkeypatch)
    story = get_story(name)
    assert is_caught(story, invariant)
