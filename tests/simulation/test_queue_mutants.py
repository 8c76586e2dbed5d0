"""Mutants of the queue's protocol: the simulated world must catch each.

A mutant that survives means that the world checks too little, not that the protocol is safe. Not
comparing a receipt's number of deliveries is not a mutant: every claim has its own name, and that
is compared.
"""

import asyncio
import itertools
import sqlite3
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

import pytest
import queue_stories
from msgspec.structs import replace
from mutants import is_caught

from jobsync.coordination import runner
from jobsync.core import messages
from jobsync.core.clock import Mono
from jobsync.core.messages import TRANSITIONS
from jobsync.errors import Corrupt, OutcomeUnknown, Unavailable
from jobsync.queue.backend import Message, NewMessage, Receipt, Settlement
from jobsync.queue.completer import Completer
from jobsync.queue.executor import Executor, HandlerOutcome, build_late_verdict
from jobsync.queue.handler_slots import HandlerSlots
from jobsync.queue.in_flight import Delivery, InFlight
from jobsync.queue.maintenance import Maintenance
from jobsync.queue.plugin import QueuePlugin
from jobsync.queue.pull import ClaimedMessage, PulledClaims
from jobsync.queue.reaper import Quarantine
from jobsync.queue.shutdown import Shutdown, wait_for_change
from jobsync.queue.sql import sqlite, sqlite_claims, sqlite_messages
from jobsync.queue.sql.common import SqlBackend
from jobsync.queue.sql.sqlite import SqliteBackend
from jobsync.queue.sql.sqlite_places import SQL
from jobsync.testing import check_story
from jobsync.testing.stories import Story

pytestmark = pytest.mark.usefixtures("without_logs")

Patch = Callable[[pytest.MonkeyPatch], None]


def without(patch: pytest.MonkeyPatch, statement: str, *conditions: str) -> None:
    """Remove conditions from a statement."""
    text = SQL[statement]
    for condition in conditions:
        assert condition in text
        text = text.replace(condition, "")
    patch.setitem(SQL, statement, text)


def find_latest_claim(connection: sqlite3.Connection, name: str) -> str:
    """Return the latest claim of a message."""
    query = """
    SELECT c.claim FROM jobsync_claim AS c, json_each(c.messages) AS m
    WHERE json_extract(m.value, '$[0]') = ? ORDER BY c.number DESC
    """
    return str(connection.execute(query, [name]).fetchone()[0])


def revive(connection: sqlite3.Connection, claim: str, names: Iterable[str]) -> None:
    """Open the messages of a claim that were ended."""
    query = "UPDATE jobsync_claim SET outcomes = replace(outcomes, 'l', 'o') WHERE claim = ?"
    connection.execute(query, [claim])
    for name in names:
        connection.execute("DELETE FROM jobsync_message WHERE id = ?", [name])


def settles_whoever_has_it(patch: pytest.MonkeyPatch) -> None:
    """A receipt settles a message although another worker has claimed it since."""

    def settle(connection: sqlite3.Connection, _: str, part: Any, *rest: Any) -> set[str]:
        latest = [find_latest_claim(connection, each.receipt.id) for each in part]
        return set().union(
            *(
                was(connection, claim, [each], *rest)
                for claim, each in zip(latest, part, strict=True)
            )
        )

    was = sqlite_claims.settle_claim
    patch.setattr(sqlite, "settle_claim", settle)


def settles_what_has_ended(patch: pytest.MonkeyPatch) -> None:
    """A receipt completes a message although its claim was ended."""

    def settle(connection: sqlite3.Connection, claim: str, part: Any, *rest: Any) -> set[str]:
        revive(connection, claim, [each.receipt.id for each in part])
        return was(connection, claim, part, *rest)

    was = sqlite_claims.settle_claim
    patch.setattr(sqlite, "settle_claim", settle)


def calls_everything_settled(patch: pytest.MonkeyPatch) -> None:
    """A settlement is reported as accepted although its receipt is stale."""

    async def settle(self: SqliteBackend, batch: Sequence[Settlement]) -> set[str]:
        await was(self, batch)
        return {each.receipt.id for each in batch}

    was = SqliteBackend._settle
    patch.setattr(SqliteBackend, "_settle", settle)


def takes_a_lost_reply_for_a_refusal(patch: pytest.MonkeyPatch) -> None:
    """A receipt is reported as stale because the reply was lost."""

    async def persist(self: SqlBackend, batch: Sequence[Settlement]) -> set[str]:
        try:
            return await self._settle(batch)
        except OutcomeUnknown:
            return set()

    patch.setattr(SqlBackend, "_settle_until_answered", persist)


def forgets_how_it_was_settled(patch: pytest.MonkeyPatch) -> None:
    """A settlement that is repeated after a lost reply is reported as stale."""

    def settle(connection: sqlite3.Connection, claim: str, part: Any, *rest: Any) -> set[str]:
        query = "SELECT outcomes NOT LIKE '%o%' FROM jobsync_claim WHERE claim = ?"
        (is_closed,) = connection.execute(query, [claim]).fetchone()
        return set() if is_closed else was(connection, claim, part, *rest)

    was = sqlite_claims.settle_claim
    patch.setattr(sqlite, "settle_claim", settle)


def claims_what_is_claimed(patch: pytest.MonkeyPatch) -> None:
    """The first claim of a message leaves it where the next one finds it."""

    def insert(connection: sqlite3.Connection, request: Any, rows: Any, values: Any) -> None:
        query = "SELECT * FROM jobsync_message WHERE position = ? AND deliveries = 0"
        kept = [connection.execute(query, row[:1]).fetchall() for row in rows]
        was(connection, request, rows, values)
        for row in itertools.chain(*kept):
            marks = ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO jobsync_message VALUES ({marks})", row)
            connection.execute("UPDATE jobsync_message SET deliveries = 1 WHERE id = ?", [row[1]])

    was = sqlite_claims.insert_claim
    patch.setattr(sqlite, "insert_claim", insert)


def ends_claims_that_stand(patch: pytest.MonkeyPatch) -> None:
    """A claim is ended half-way through its visibility timeout."""

    def end(connection: Any, row: Any, keep: Any, dead: Any, time: Any, *rest: Any) -> Any:
        return was(connection, row, keep, dead, {**time, "since": time["since"] + 15}, *rest)

    was = sqlite_claims.end_lapsed
    patch.setattr(sqlite, "end_lapsed", end)
    early = SQL["find_lapsed"].replace("due <= :mono", "due <= :mono + 15")
    patch.setitem(SQL, "find_lapsed", early)


def ends_claims_of_the_silent(patch: pytest.MonkeyPatch) -> None:
    """A worker treats all others as dead."""

    async def end_claims(self: Any) -> None:
        others = {*await self._backend.list_holders()} - {self._membership.incarnation}
        self._listener.on_ended(await self._backend.end_claims(others))

    patch.setattr("jobsync.queue.reaper.Reaper._end_dead_claims", end_claims)


def extends_whoever_has_it(patch: pytest.MonkeyPatch) -> None:
    """A receipt extends a claim that another worker has."""

    def extend(connection: sqlite3.Connection, _: str, ids: set[str], until: Any) -> set[str]:
        found = [was(connection, find_latest_claim(connection, name), ids, until) for name in ids]
        return set().union(*found)

    was = sqlite_claims.extend_claim
    patch.setattr(sqlite, "extend_claim", extend)


def extends_what_has_ended(patch: pytest.MonkeyPatch) -> None:
    """A receipt restores a claim that was ended."""

    def extend(connection: sqlite3.Connection, claim: str, ids: set[str], until: Any) -> set[str]:
        revive(connection, claim, ids)
        return was(connection, claim, ids, until)

    was = sqlite_claims.extend_claim
    patch.setattr(sqlite, "extend_claim", extend)


def charges_nobody_for_dying_alone(patch: pytest.MonkeyPatch) -> None:
    """A message that kills its workers is never dead."""
    patch.setattr(sqlite_claims, "decide_lapse", lambda **_: "spare")


def charges_everybody_for_a_death(patch: pytest.MonkeyPatch) -> None:
    """When a worker dies, all its messages in flight spend an attempt."""
    decide = messages.decide_lapse

    def charge(**facts: Any) -> Any:
        return decide(**{**facts, "is_suspect": True})

    patch.setattr(sqlite_claims, "decide_lapse", charge)


def charges_what_is_given_back(patch: pytest.MonkeyPatch) -> None:
    """A deployment spends an attempt of every message in flight."""
    counted = {**TRANSITIONS, "release": replace(TRANSITIONS["release"], returns=False)}
    patch.setattr(sqlite_claims, "TRANSITIONS", counted)


def tries_once_more(patch: pytest.MonkeyPatch) -> None:
    """A message has one attempt too many."""
    patch.setattr(messages, "has_spent", lambda attempts, most: attempts > most)


def counts_from_the_reply(patch: pytest.MonkeyPatch) -> None:
    """A worker counts a claim from the reply instead of the request."""
    add = InFlight.add

    def hopeful(self: InFlight, message: Message, session: str, sent: Mono) -> Delivery:
        return add(self, message, session, self._clock.mono())

    patch.setattr(InFlight, "add", hopeful)


def ignores_its_session(patch: pytest.MonkeyPatch) -> None:
    """A worker checks the age of its claims, but not its session."""

    def check(self: InFlight, delivery: Delivery, now: Mono) -> bool:
        is_over = now - delivery.sent >= self._lease
        if is_over and not delivery.is_settling:
            self.lose(delivery, "its claim could not be renewed in time")
        return not delivery.is_lost

    patch.setattr(InFlight, "check", check)


def watches_only_between_renewals(patch: pytest.MonkeyPatch) -> None:
    """A worker does not check the clock while a renewal is unanswered."""

    async def rest(self: InFlight) -> None:
        await self._clock.sleep(1e9)

    patch.setattr(InFlight, "watch", rest)


def takes_a_short_extension_for_a_whole_one(patch: pytest.MonkeyPatch) -> None:
    """A worker that extends a claim by a second trusts it for the full visibility timeout."""

    async def extend(self: InFlight, due: Sequence[Delivery], seconds: float) -> None:
        sent = self._clock.mono()
        answers = await self._backend.extend(
            [delivery.message.receipt for delivery in due], seconds
        )
        for delivery, is_extended in zip(due, answers, strict=True):
            if is_extended:
                delivery.sent = sent

    patch.setattr(InFlight, "_extend", extend)


def keeps_a_suspect_that_it_lost(patch: pytest.MonkeyPatch) -> None:
    """A worker waits for a suspect that it never started."""

    def drop(self: HandlerSlots, delivery: Delivery) -> None:
        is_async = self._executor.find("").is_async
        if delivery.task is not None and is_async and not delivery.is_settling:
            delivery.task.cancel()
        if delivery in self._ready:
            self._ready.remove(delivery)
            self._owner.on_released(delivery)

    patch.setattr(HandlerSlots, "drop", drop)


def claims_before_the_time(patch: pytest.MonkeyPatch) -> None:
    """Delays are ignored."""
    without(patch, "select_waiting", " AND wakes <= :mono")


def delays_by_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    """Delays end when the wall clock says so, although it may be set."""
    patch.setattr(sqlite, "read_delay_clock", lambda clock: (0, clock.wall().seconds))


def delays_again_after_a_reboot(patch: pytest.MonkeyPatch) -> None:
    """What is left of a delay after a reboot may be more than the whole delay."""
    assert SQL["adopt"].count(" delay,") == 1
    patch.setitem(SQL, "adopt", SQL["adopt"].replace(" delay,", " due - :now,"))


def pushes_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Each message of a batch is its own transaction."""

    async def push(
        self: SqliteBackend, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> None:
        for message, payload in zip(new_messages, payloads, strict=True):
            await was(self, [message], [payload])

    was = SqliteBackend._push
    patch.setattr(SqliteBackend, "_push", push)


def pushes_again_in_doubt(patch: pytest.MonkeyPatch) -> None:
    """A push with an unknown outcome is sent again, although it may have arrived."""

    async def push(
        self: SqliteBackend, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> None:
        while True:
            try:
                return await was(self, new_messages, payloads)
            except OutcomeUnknown:
                await self._clock.sleep(20)

    was = SqliteBackend._push
    patch.setattr(SqliteBackend, "_push", push)


def acknowledges_in_doubt(patch: pytest.MonkeyPatch) -> None:
    """A push with an unknown outcome is reported as done."""

    async def is_there(self: SqliteBackend, ids: Sequence[str]) -> bool:
        return True

    patch.setattr(SqliteBackend, "_exists", is_there)


def forgets_its_doubt(patch: pytest.MonkeyPatch) -> None:
    """The check after an unknown push raises its own error instead."""

    async def is_there(self: SqlBackend, ids: Sequence[str]) -> bool:
        try:
            return await self._exists(ids)
        except Unavailable:
            return False

    patch.setattr(SqlBackend, "_has_arrived", is_there)


def fails_of_what_it_cannot_read(patch: pytest.MonkeyPatch) -> None:
    """A worker claims nothing until an unreadable row is buried, or fails because of it."""

    async def set_aside(self: SqlBackend, unreadable: Sequence[tuple[Receipt, Corrupt]]) -> None:
        await self.settle(
            [
                Settlement(receipt=receipt, move="bury", error=str(corrupt))
                for receipt, corrupt in unreadable
            ]
        )

    patch.setattr(SqlBackend, "_bury_unreadable", set_aside)


def buries_without_a_grave(patch: pytest.MonkeyPatch) -> None:
    """A message without attempts left is deleted instead of buried."""

    def end(connection: sqlite3.Connection, *arguments: Any) -> Any:
        ended = was(connection, *arguments)
        for each in ended:
            if each.state == "dead":
                connection.execute("DELETE FROM jobsync_finished WHERE id = ?", [each.id])
        return ended

    was = sqlite_claims.end_lapsed
    patch.setattr(sqlite, "end_lapsed", end)


def buries_without_the_error(patch: pytest.MonkeyPatch) -> None:
    """A dead letter lacks its last error."""
    assert ":errors" in SQL["finish"]
    patch.setitem(SQL, "finish", SQL["finish"].replace(":errors", "''"))


def runs_suspects_in_company(patch: pytest.MonkeyPatch) -> None:
    """Suspects are claimed together with others."""
    without(patch, "select_waiting", " AND suspect = :suspects")


def claims_beside_a_suspect(patch: pytest.MonkeyPatch) -> None:
    """A worker claims other messages while a suspect runs, and the reverse."""
    patch.setattr(Quarantine, "wait", lambda *_, **_options: 0.0)


def gives_up_settling(patch: pytest.MonkeyPatch) -> None:
    """A settlement without an answer counts as done."""

    async def settle(self: Completer, batch: list[Any]) -> list[bool]:
        try:
            return await self._backend.settle(batch)
        except Exception as error:  # noqa: BLE001 - it is a mutant
            self._listener.on_failure(error)
            return [True] * len(batch)

    patch.setattr(Completer, "_settle", settle)


def settles_a_message_twice_at_once(patch: pytest.MonkeyPatch) -> None:
    """A message that was claimed again is settled twice in one batch, which the backend refuses.

    The worker dies of its own request, which breaks A1.
    """

    def take(self: Completer) -> list[Any]:
        batch, self._pending = self._pending, []
        return batch

    patch.setattr(Completer, "_take_batch", take)


def hides_timeouts_from_handlers(patch: pytest.MonkeyPatch) -> None:
    """A handler that exceeds its timeout is cancelled, but its context is not marked as lost."""

    def on_deadline(self: HandlerSlots, delivery: Delivery) -> None:
        if delivery.is_late or delivery.is_lost:
            self._conclude_cancelled(delivery)
            self._report_overrun(delivery)
        else:
            delivery.is_late = True
            self._cancel(delivery)

    patch.setattr(HandlerSlots, "_on_deadline", on_deadline)


def hides_stops_from_functions(patch: pytest.MonkeyPatch) -> None:
    """A plain function is not told that its worker stops."""

    def interrupt(self: HandlerSlots) -> None:
        for delivery in self.list_useful():
            delivery.is_interrupted = True
            if delivery.is_on_loop and delivery.task is not None:
                delivery.task.cancel()

    patch.setattr(HandlerSlots, "interrupt", interrupt)


def hides_lost_claims_from_handlers(patch: pytest.MonkeyPatch) -> None:
    """The context of a handler is never marked as lost."""
    patch.setattr(Delivery, "mark_context_lost", lambda _: None)


def hides_failures_from_functions(patch: pytest.MonkeyPatch) -> None:
    """A plain function is not told that its worker has failed."""

    def lose(self: InFlight, delivery: Delivery, reason: str) -> None:
        if not reason.startswith("its worker has failed"):
            was(self, delivery, reason)

    was = InFlight.lose
    patch.setattr(InFlight, "lose", lose)


def _ignore_losses(patch: pytest.MonkeyPatch, reason: str) -> None:
    """Keep claims that are lost for a reason."""

    def lose(self: InFlight, delivery: Delivery, found: str) -> None:
        if found != reason:
            was(self, delivery, found)

    was = InFlight.lose
    patch.setattr(InFlight, "lose", lose)


def hides_the_end_from_those_left_behind(patch: pytest.MonkeyPatch) -> None:
    """A handler that does not end in time is not told that its worker has stopped without it."""
    _ignore_losses(patch, "its handler did not end in time")


def forgets_what_it_could_not_settle(patch: pytest.MonkeyPatch) -> None:
    """Nobody hears of settlements that were not answered when a worker has stopped."""
    _ignore_losses(patch, "it could not be returned in time")


def calls_settled_what_it_could_not_settle(patch: pytest.MonkeyPatch) -> None:
    """Settlements that were not answered when a worker has stopped are reported as accepted."""

    async def run(self: Shutdown) -> None:
        await was(self)
        for delivery in unanswered:
            self._completer._listener.on_answer(delivery, is_accepted=True)

    def lose(self: InFlight, delivery: Delivery, reason: str) -> None:
        if reason == "it could not be returned in time":
            unanswered.append(delivery)
        else:
            lose_claim(self, delivery, reason)

    unanswered: list[Delivery] = []
    was, lose_claim = Shutdown.run, InFlight.lose
    patch.setattr(Shutdown, "run", run)
    patch.setattr(InFlight, "lose", lose)


def completes_what_a_function_gave_up(patch: pytest.MonkeyPatch) -> None:
    """A plain function that has read that nothing counts any more, and returns, has completed."""

    def call(*arguments: Any) -> Any:
        return was(*arguments)._replace(has_seen_loss=False)

    was = Executor._call_function
    patch.setattr(Executor, "_call_function", call)


def charges_for_interruptions(patch: pytest.MonkeyPatch) -> None:
    """A handler that is cancelled because its worker stops spends an attempt."""

    def interrupt(self: HandlerSlots) -> None:
        for delivery in self.list_useful():
            if delivery.task is not None:
                delivery.task.cancel()

    patch.setattr(HandlerSlots, "interrupt", interrupt)


def charges_for_errors_of_interrupted_handlers(patch: pytest.MonkeyPatch) -> None:
    """A handler that raises another error when it is cancelled by a stop spends an attempt."""

    async def run(self: Executor, delivery: Delivery) -> HandlerOutcome:
        outcome = await was(self, delivery)
        if isinstance(outcome.verdict, messages.Failed):
            delivery.is_interrupted = False
        return outcome

    was = Executor.run
    patch.setattr(Executor, "run", run)


def returns_what_cancels_itself(patch: pytest.MonkeyPatch) -> None:
    """A handler that cancels its own task spends no attempt."""

    def conclude(self: HandlerSlots, delivery: Delivery) -> None:
        self._owner.conclude(delivery, build_late_verdict(delivery) or messages.Returned())

    patch.setattr(HandlerSlots, "_conclude_cancelled", conclude)


def loses_the_slot_of_what_cancels_itself(patch: pytest.MonkeyPatch) -> None:
    """A handler that cancels its own task takes its slot along."""

    async def serve(self: HandlerSlots) -> None:
        task = asyncio.current_task()
        assert task is not None
        now = self._clock.mono()
        while not task.cancelling() and (delivery := self._next_ready(now)) is not None:
            delivery.task = task
            now = await self._handle(delivery, now)
        if not task.cancelling():
            self._servers -= 1

    patch.setattr(HandlerSlots, "_serve", serve)


def waits_for_handlers_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A worker that stops waits for its handlers, however long they take."""

    async def wait(self: Shutdown, list_busy: Callable[[], Sized], until: object) -> None:
        while list_busy():
            self._changed.clear()
            await wait_for_change(self._changed, self._interval)

    patch.setattr(Shutdown, "_wait_while", wait)


def claims_while_another_queue_stops(patch: pytest.MonkeyPatch) -> None:
    """A queue claims until it is its turn to stop."""
    patch.setattr(QueuePlugin, "prepare_stop", lambda _: None)


def cancels_no_step_of_a_disconnect(patch: pytest.MonkeyPatch) -> None:
    """A step of a disconnect that takes too long is left behind without being cancelled."""

    async def cancel(task: object, seconds: float) -> None:
        pass

    patch.setattr(runner, "_cancel", cancel)


def leaves_no_step_of_a_disconnect_behind(patch: pytest.MonkeyPatch) -> None:
    """A step of a disconnect is cancelled until it ends."""

    async def cancel(task: asyncio.Task[None], seconds: float) -> None:
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=seconds)

    patch.setattr(runner, "_cancel", cancel)


def counts_from_the_reply_to_a_renewal(patch: pytest.MonkeyPatch) -> None:
    """A worker trusts a renewed claim from the reply on, not from the request."""

    async def extend(self: InFlight, due: Sequence[Delivery], seconds: float) -> None:
        before = {delivery.id: delivery.sent for delivery in due}
        await was(self, due, seconds)
        for delivery in due:
            if delivery.sent != before[delivery.id]:
                delivery.sent = self._clock.mono() + min(0.0, seconds - self._visibility)

    was = InFlight._extend
    patch.setattr(InFlight, "_extend", extend)


def keeps_dead_letters_like_others(patch: pytest.MonkeyPatch) -> None:
    """Dead letters are removed after `completed_ttl`."""

    def list_retention(self: Maintenance) -> dict[messages.MessageState, Any]:
        seconds = self._get_completed_ttl()
        return {"completed": seconds, "dead": seconds, "cancelled": seconds}

    patch.setattr(Maintenance, "_list_retention", list_retention)


def believes_claims_of_an_earlier_boot(patch: pytest.MonkeyPatch) -> None:
    """A claim lapses by the time since boot, whichever boot that was."""
    without(patch, "find_lapsed", "boot <> :boot OR ")


def claims_of_a_paused_queue(patch: pytest.MonkeyPatch) -> None:
    """Delayed messages of a paused queue are claimed."""
    is_open = "NOT EXISTS (SELECT 1 FROM jobsync_pause WHERE queue = :queue)"
    without(patch, "select_waiting", f" AND {is_open}")
    without(patch, "outlook", f"{is_open} AND ")


def suspects_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A message whose claim lapsed once runs alone for ever, although it was settled since."""
    before = "max(:suspect, (SELECT suspect FROM jobsync_claim WHERE number = :number))"
    assert ":suspect" in SQL["put_back"]
    patch.setitem(SQL, "put_back", SQL["put_back"].replace(":suspect", before))


def cancels_beside_the_claim(patch: pytest.MonkeyPatch) -> None:
    """A claimed message is cancelled, and its claim stands."""
    patch.setattr(sqlite_claims.ClaimRow, "write", lambda *_: None)


def cancels_without_a_trace(patch: pytest.MonkeyPatch) -> None:
    """A message that was cancelled from outside does not say so."""
    patch.setattr(sqlite_messages, "add_failure", lambda errors, *_: errors)


def deletes_what_is_claimed(patch: pytest.MonkeyPatch) -> None:
    """A message is deleted although a handler runs."""
    patch.setattr(sqlite_messages, "COMPLETED", sqlite_claims.OPEN)


def hurries_nothing(patch: pytest.MonkeyPatch) -> None:
    """The end of a delay is reported, and is an hour away."""
    late = SQL["run_now"].replace("wakes = :mono", "wakes = :mono + 3600", 1)
    patch.setitem(SQL, "run_now", late)


def renews_in_vain(patch: pytest.MonkeyPatch) -> None:
    """A worker does not look whether the claims that it renews still stand."""

    async def extend(self: InFlight, due: Sequence[Delivery], seconds: float) -> None:
        sent = self._clock.mono() + min(0.0, seconds - self._visibility)
        await self._backend.extend([each.message.receipt for each in due], seconds)
        for delivery in due:
            delivery.sent = max(delivery.sent, sent)

    patch.setattr(InFlight, "_extend", extend)


def forgets_to_renew_what_was_pulled(patch: pytest.MonkeyPatch) -> None:
    """The claims of a program that owns its loop lapse while it holds them."""

    async def claim(self: PulledClaims, limit: int, wait: float) -> list[ClaimedMessage]:
        claimed = await pull(self, limit, wait)
        for delivery in list(self._in_flight):
            self._in_flight.remove(delivery)
        return claimed

    pull = PulledClaims.claim
    patch.setattr(PulledClaims, "claim", claim)


KILLED: dict[Patch, tuple[Story, int, str]] = {
    settles_whoever_has_it: (queue_stories.settled_late, 0, "Q5"),
    settles_what_has_ended: (queue_stories.settled_late, 0, "Q5"),
    calls_everything_settled: (queue_stories.settled_late, 0, "Q15"),
    takes_a_lost_reply_for_a_refusal: (queue_stories.lost_replies, 0, "Q15"),
    forgets_how_it_was_settled: (queue_stories.lost_replies, 0, "Q15"),
    claims_what_is_claimed: (queue_stories.begins, 0, "Q19"),
    ends_claims_that_stand: (queue_stories.kill_beside_old_claims, 0, "Q13"),
    ends_claims_of_the_silent: (queue_stories.long, 0, "Q13"),
    extends_whoever_has_it: (queue_stories.late, 0, "Q5"),
    extends_what_has_ended: (queue_stories.late, 0, "Q5"),
    charges_nobody_for_dying_alone: (queue_stories.poison, 0, "Q6"),
    charges_everybody_for_a_death: (queue_stories.kill, 0, "Q6"),
    charges_what_is_given_back: (queue_stories.leave, 0, "Q6"),
    tries_once_more: (queue_stories.poison, 0, "Q6"),
    counts_from_the_reply: (queue_stories.slow, 1, "Q14"),
    ignores_its_session: (queue_stories.cut, 1, "Q14"),
    watches_only_between_renewals: (queue_stories.drifts, 0, "Q14"),
    keeps_a_suspect_that_it_lost: (queue_stories.heard_late, 0, "QL3"),
    takes_a_short_extension_for_a_whole_one: (queue_stories.nudges, 0, "Q14"),
    claims_before_the_time: (queue_stories.delays, 0, "Q8"),
    delays_by_the_wall_clock: (queue_stories.delays, 0, "QL3"),
    delays_again_after_a_reboot: (queue_stories.rebooted, 0, "QL3"),
    pushes_one_by_one: (queue_stories.batches, 0, "Q7"),
    pushes_again_in_doubt: (queue_stories.batches, 0, "Q3"),
    acknowledges_in_doubt: (queue_stories.batches, 0, "Q1"),
    forgets_its_doubt: (queue_stories.batches, 1, "Q15"),
    fails_of_what_it_cannot_read: (queue_stories.damaged, 29, "Q17"),
    buries_without_a_grave: (queue_stories.poison, 0, "Q1"),
    buries_without_the_error: (queue_stories.poison, 0, "Q12"),
    runs_suspects_in_company: (queue_stories.kill, 0, "Q11"),
    claims_beside_a_suspect: (queue_stories.epidemic, 1, "Q6"),
    gives_up_settling: (queue_stories.settled_late, 0, "Q15"),
    settles_a_message_twice_at_once: (queue_stories.settled_again, 0, "A1"),
    hides_timeouts_from_handlers: (queue_stories.timeouts_of_functions, 0, "Q19"),
    hides_stops_from_functions: (queue_stories.stops_with_functions, 0, "Q18"),
    hides_lost_claims_from_handlers: (queue_stories.disconnects_itself, 0, "Q14"),
    hides_failures_from_functions: (queue_stories.forbid_functions, 0, "Q19"),
    hides_the_end_from_those_left_behind: (queue_stories.stops_although_stubborn, 0, "Q23"),
    forgets_what_it_could_not_settle: (queue_stories.stops_in_silence, 0, "Q23"),
    calls_settled_what_it_could_not_settle: (queue_stories.stops_in_silence, 0, "Q15"),
    completes_what_a_function_gave_up: (queue_stories.stops_with_functions, 0, "Q1"),
    charges_for_interruptions: (queue_stories.stops, 0, "Q6"),
    charges_for_errors_of_interrupted_handlers: (queue_stories.stops, 0, "Q6"),
    returns_what_cancels_itself: (queue_stories.cancels_itself, 0, "Q20"),
    loses_the_slot_of_what_cancels_itself: (queue_stories.cancels_itself, 0, "QL3"),
    waits_for_handlers_for_ever: (queue_stories.stops_although_stubborn, 0, "Q18"),
    claims_while_another_queue_stops: (queue_stories.stops_with_two_queues, 0, "Q22"),
    counts_from_the_reply_to_a_renewal: (queue_stories.renewed_late, 0, "Q14"),
    keeps_dead_letters_like_others: (queue_stories.retained, 0, "Q24"),
    believes_claims_of_an_earlier_boot: (queue_stories.power_fails, 0, "QL2"),
    claims_of_a_paused_queue: (queue_stories.paused, 0, "Q25"),
    suspects_for_ever: (queue_stories.lost_replies, 0, "Q11"),
    cancels_no_step_of_a_disconnect: (queue_stories.stops_in_silence, 0, "Q22"),
    leaves_no_step_of_a_disconnect_behind: (queue_stories.stops_with_hooks, 0, "Q21"),
    cancels_beside_the_claim: (queue_stories.revoked, 0, "Q3"),
    cancels_without_a_trace: (queue_stories.revoked, 0, "Q12"),
    deletes_what_is_claimed: (queue_stories.revoked, 0, "Q1"),
    hurries_nothing: (queue_stories.revoked, 0, "Q8"),
    renews_in_vain: (queue_stories.revoked, 0, "Q14"),
    forgets_to_renew_what_was_pulled: (queue_stories.pulled, 0, "Q16"),
}
"""For each mutant a story and a seed that catch it, and the invariant that it violates."""


@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: mutant.__name__)
def test_the_world_notices(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded story reports a violation of the recorded invariant."""
    story, seed, invariant = KILLED[mutant]
    mutant(monkeypatch)
    assert is_caught(story, invariant, first=seed)


@pytest.mark.parametrize(
    ("story", "seed"),
    dict.fromkeys((story, seed) for story, seed, _ in KILLED.values()),
    ids=lambda each: each.__name__ if callable(each) else str(each),
)
def test_the_killers_find_nothing_in_the_real_protocol(story: Story, seed: int) -> None:
    """Without a mutation these stories report nothing."""
    check_story(story, [seed])
