"""The queue backend on stores without SQL: messages in pages.

A push is one request, and concurrent pushes of a process share it. A claim of a whole page is a
read and a conditional write; so is nothing but a write for a page in hand, and every settlement and
renewal of a page. See `page` for what is stored, and `watch` for when claims lapse.

What differs from SQL: a push has at most a thousand messages; time is that of the machines, because
the store has no clock; the order of messages is that of their pages, and of several workers each
takes pages of its own. Finished messages are remembered for at least an hour.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from jobsync.components import Components
from jobsync.core.arguments import check_count, check_seconds
from jobsync.core.messages import MessageState
from jobsync.errors import Invalid, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.queue.arguments import (
    check_finished,
    check_ids,
    check_reason,
    check_settled_once,
    check_state,
    check_states,
)
from jobsync.queue.backend import (
    ClaimResult,
    EndedClaim,
    MessageInfo,
    NewMessage,
    QueueBackend,
    Receipt,
    SeenKeys,
    Settlement,
)
from jobsync.queue.fleet import QueueFleet
from jobsync.queue.pages import changes, contents, message_changes
from jobsync.queue.pages.bell import QueueBell
from jobsync.queue.pages.changes import Claimant
from jobsync.queue.pages.claimer import PageClaimer, gather_all
from jobsync.queue.pages.control import QueueControl
from jobsync.queue.pages.dispatcher import Dispatcher, DispatcherHost
from jobsync.queue.pages.finder import PageFinder
from jobsync.queue.pages.keyed_push import KeyedPush
from jobsync.queue.pages.keys import PageKeys
from jobsync.queue.pages.moves import PageMoves
from jobsync.queue.pages.page import (
    DEAD_LANE,
    LIVE_LANE,
    MAX_MESSAGES,
    MAX_PUSH_BYTES,
    NO_TASK,
    PageMark,
    QueuePage,
    read_due,
)
from jobsync.queue.pages.page_store import PageStore
from jobsync.queue.pages.push_checks import check_push, split_push
from jobsync.queue.pages.retention import Retention
from jobsync.queue.pages.single_message import MAX_PAGE_RESULT, PagesMessageOperations
from jobsync.queue.pages.tickets import TicketReader
from jobsync.queue.settings import QueueOrder
from jobsync.queue.shared_push import SharedPush
from jobsync.stores.contract import Store
from jobsync.stores.scan import check_age, check_limit

__all__ = ["PagesBackend"]


class PagesBackend(PagesMessageOperations, QueueBackend):
    """The messages of a queue in pages.

    Args:
        store: where the pages are stored.
        queue: its name.
        components: time, randomness and events.
        order: which pages are claimed first.
    """

    max_push = MAX_MESSAGES

    def __init__(
        self, store: Store, queue: str, components: Components, *, order: QueueOrder = "fifo"
    ) -> None:
        super().__init__()
        self.queue = queue
        self.is_billed = store.is_billed
        if store.is_billed:
            self.max_result = MAX_PAGE_RESULT
        self.topic = f"queue/{queue}"
        self._clock = components.clock
        self._ids = components.ids
        self._pages = PageStore(store, queue, components)
        self._tickets = TicketReader(store, queue, components)
        self._finder = PageFinder(
            self._pages, self._tickets, components, is_billed=store.is_billed, order=order
        )
        self._bell = QueueBell(store, queue, self._finder.plan, components)
        self._control = QueueControl(store, queue, components)
        self._moves = PageMoves(self._pages, self._finder, components)
        self._claimer = PageClaimer(
            self._pages, self._finder, self._control, components, self._moves.finish
        )
        self._keys = PageKeys(store, self._pages, queue, components)
        self._keyed_push = KeyedPush(
            self._pages, self._keys, self._control, self._moves, components, self._announce
        )
        self._retention = Retention(store, self._pages, self._keys, components)
        self._shared_pushes: dict[int, SharedPush] = {}
        """By priority: the messages of a page have the same."""
        host = DispatcherHost(
            refresh=self._refresh,
            end_lapsed=self._end_lapsed,
            ring=self._bell.ring,
            wait=self._bell.wait,
        )
        self._dispatcher = Dispatcher(
            self._finder, self._tickets, host, components, lambda: self._pages.visibility
        )

    def join(self, fleet: QueueFleet | None) -> None:
        """Rely on the coordinator of the queue, and on this machine's clock if it is right."""
        self._tickets.fleet = self._claimer.fleet = fleet

    async def coordinate(self) -> None:
        """Look at the pages for all, and publish tickets."""
        fleet = self._tickets.fleet
        if fleet is not None:
            await self._dispatcher.run(fleet)

    async def _refresh(self) -> None:
        await self._claimer.refresh_if_stale()

    def split(self, new_messages: Sequence[NewMessage]) -> list[Sequence[NewMessage]]:
        """Return messages in parts that fit in a page each."""
        return split_push(new_messages)

    async def push(self, new_messages: Sequence[NewMessage]) -> Mapping[str, str]:
        """Add messages, all or none, in one page; one that has a key alone.

        Raises:
            Invalid: a message has a group, or messages differ in their priority, or several have
                keys: they would not be in one page.
        """
        if not new_messages:
            return {}
        payloads = check_push(new_messages)
        if new_messages[0].key is not None:
            return await self._keyed_push.push(new_messages[0], new_messages[0].key)
        if any(each.delay > 0 or each.at is not None for each in new_messages):
            # A page of its own: the others are not named for a later time, or kept with it.
            await self._push_page(new_messages, payloads)
        else:
            await self._share_push(new_messages[0].priority).push(new_messages, payloads)
        return {}

    def _share_push(self, priority: int) -> SharedPush:
        """Return what sends the pushes of one priority together."""
        shared = self._shared_pushes.get(priority)
        if shared is None:
            shared = SharedPush(self.topic, self._push_page, max_bytes=MAX_PUSH_BYTES // 2)
            self._shared_pushes[priority] = shared
        return shared

    async def push_within(
        self, connection: object, new_messages: Sequence[NewMessage]
    ) -> Mapping[str, str]:
        """Refuse the push.

        Raises:
            Invalid: there is no transaction to join.
        """
        del new_messages
        kind = type(connection)
        raise Invalid(
            "connection",
            f"{kind.__module__}.{kind.__qualname__}",
            "cannot be used: this queue is not in a SQL database",
            "leave it out, or use sqlite:/// or postgresql://",
        )

    async def _push_page(self, new_messages: Sequence[NewMessage], _: Sequence[bytes]) -> None:
        await self._control.register()
        now = self._clock.wall().seconds
        (birth,) = self._ids.nonces(1)
        due = now + min(each.find_delay(now) for each in new_messages)
        place = self._pages.name_new(LIVE_LANE, due, new_messages[0].priority)
        page = changes.new_page(birth, new_messages, now)
        if not await self._pages.create(place, page):
            # Not even bad luck: the name has 72 random bits.
            raise Unavailable(self.topic, f"the name {place} is in use")
        await self._announce(place)

    async def _announce(self, place: str) -> None:
        """Remember a page in which there is something to claim, and wake workers."""
        self._finder.add(place)
        await self._bell.ring()

    async def claim(
        self,
        limit: int,
        *,
        session: str,
        visibility: float,
        suspects: bool = False,
        tasks: Collection[str] | None = None,
        at_most: int | None = None,
    ) -> ClaimResult:
        """Claim messages: whole pages where it can be."""
        self._pages.visibility = visibility
        self._pages.sessions.add(session)
        wanted = Claimant(
            id="",
            session=session,
            visibility=visibility,
            limit=limit,
            suspects=suspects,
            tasks=NO_TASK if tasks is None else frozenset(tasks),
        )
        return await self._claimer.claim(wanted, at_most)

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """End claims: one write for each page."""
        check_settled_once([each.receipt.id for each in settlements])
        by_page: dict[str, list[tuple[Settlement, str]]] = defaultdict(list)
        for each in settlements:
            claim, _, place = each.receipt.claim.partition("@")
            by_page[place].append((each, claim))
        accepted: set[str] = set()
        is_any_settled = False

        async def settle(place: str) -> None:
            nonlocal is_any_settled
            accepted.update(await self._settle(place, by_page[place]))
            is_any_settled = True

        try:
            await gather_all([settle(place) for place in by_page if _is_place(place)])
        except (Misconfigured, Unavailable) as error:
            if is_any_settled:
                raise OutcomeUnknown(self.topic, str(error)) from error
            raise
        if any(each.target == "waiting" and not each.delay for each in settlements):
            await self._bell.ring()
        return [each.receipt.id in accepted for each in settlements]

    async def _settle(self, place: str, batch: Sequence[tuple[Settlement, str]]) -> set[str]:
        """Settle claims of one page; return the messages that are settled so."""
        targets = self._pages.build_targets(place)

        def change(page: QueuePage) -> tuple[QueuePage, list[bool]]:
            return changes.settle(page, batch, self._clock.wall().seconds, targets)

        answers = await self._pages.apply(place, change) or [False] * len(batch)
        await self._moves.follow_up(place)
        return {each.receipt.id for (each, _), done in zip(batch, answers, strict=True) if done}

    async def extend(self, receipts: Sequence[Receipt], visibility: float) -> list[bool]:
        """Extend claims: one write for each page."""
        check_seconds("seconds", visibility, is_zero_allowed=False)
        by_page: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for receipt in receipts:
            claim, _, place = receipt.claim.partition("@")
            if _is_place(place):
                by_page[place].append((receipt.id, claim))
        answers = await gather_all(
            [self._extend(place, batch, visibility) for place, batch in by_page.items()]
        )
        extended = {pair for pairs in answers for pair in pairs}
        return [message_changes.find_claim(each) in extended for each in receipts]

    async def _extend(
        self, place: str, batch: Sequence[tuple[str, str]], visibility: float
    ) -> set[tuple[str, str]]:
        def change(page: QueuePage) -> tuple[QueuePage, list[bool]]:
            after, answers = changes.extend(
                page, batch, visibility, lambda each: self._pages.find_left(place, each)
            )
            return self._note_progress(after, reports), answers

        reports = self._list_reports(batch)
        try:
            answers = await self._pages.apply(place, change) or [False] * len(batch)
        except OutcomeUnknown as error:
            raise Unavailable(self.topic, error.detail) from error
        self._drop_reports(reports)
        return {pair for pair, stands in zip(batch, answers, strict=True) if stands}

    async def end_claims(
        self, dead: Collection[str] = (), *, keep: Collection[str] = ()
    ) -> list[EndedClaim]:
        """End the claims that lapsed while they were watched, and those of dead sessions."""
        try:
            if dead:
                places = await self._find_claims(dead)
            else:
                await self._claimer.refresh()
                places = self._finder.list_lapsed()
            await gather_all([self._end_claims(place, dead, keep) for place in places])
        except OutcomeUnknown as error:
            raise Unavailable(self.topic, error.detail) from error
        return await self._report_ended()

    async def _report_ended(self) -> list[EndedClaim]:
        ended, self._pages.ended = self._pages.ended, []
        if ended:
            await self._bell.ring()
        return ended

    async def _end_lapsed(self) -> list[EndedClaim]:
        """End the claims of other processes that have lapsed while this one watched."""
        try:
            places = self._finder.list_lapsed()
            await gather_all(
                [self._end_claims(place, (), (), includes_own=False) for place in places]
            )
        except OutcomeUnknown as error:
            raise Unavailable(self.topic, error.detail) from error
        return await self._report_ended()

    async def _find_claims(self, sessions: Collection[str]) -> list[str]:
        """Return all pages with claims of these sessions; each that is not in hand is read."""
        listed = await self._pages.list_all(LIVE_LANE)
        unclaimed = {PageMark.DONE, PageMark.KEPT, PageMark.READY}
        opened = await self._pages.read(
            {page.place: page.version for page in listed if page.mark not in unclaimed}
        )
        return [
            place
            for place, (_, page, _) in opened.items()
            if any(each.session in sessions for each in page.claims)
        ]

    async def _end_claims(
        self,
        place: str,
        dead: Collection[str],
        keep: Collection[str],
        *,
        includes_own: bool = True,
    ) -> None:
        targets = self._pages.build_targets(place)

        def change(page: QueuePage) -> tuple[QueuePage, list[EndedClaim]]:
            age = self._finder.find_age(place)
            # Whoever asks about the dead does not say which claims of this process are in use.
            own = includes_own and not dead
            is_over = self._pages.judge(place, page, dead, keep, includes_own=own, age=age)
            return changes.end_claims(page, is_over, self._clock.wall().seconds, targets)

        ended = await self._pages.apply(place, change) or []
        # Reported by the next call if another page fails.
        self._pages.ended += ended
        await self._moves.follow_up(place)

    async def list_holders(self) -> list[str]:
        """Return the sessions that hold claims, as far as this process has seen. No request."""
        return sorted(self._pages.list_holders())

    async def browse(
        self, state: MessageState, *, after: str = "", limit: int = 100
    ) -> list[MessageInfo]:
        """Return messages in a state; reads every page."""
        check_state(state)
        contents.check_page_cursor(state, after)
        check_limit(limit)
        return contents.select_page(await self._read_infos(), state, after, limit)

    async def _read_infos(self) -> list[MessageInfo]:
        return await contents.read_infos(self._pages, self.queue, self._clock.wall().seconds)

    async def count(self) -> Mapping[MessageState, int]:
        """Count the messages in each state; reads every page."""
        return contents.build_content(await self._read_infos()).counts

    async def find_newer(self) -> Mapping[int, int]:
        """Count the messages of newer code by format, in pages that this process has met."""
        if not self.is_billed:
            return contents.count_newer(await self._read_infos())
        return self._pages.count_newer()

    async def redrive(self, ids: Collection[str] | None = None, *, limit: int | None = None) -> int:
        """Move dead letters back, page by page."""
        chosen = None if ids is None else check_ids(ids)
        if limit is not None:
            check_count("limit", limit, least=1)
        try:
            return await self._moves.redrive(chosen, limit)
        finally:
            await self._bell.ring()

    async def purge(self, states: Collection[MessageState]) -> int:
        """Remove messages for good, page by page."""
        unwanted = frozenset(check_states(states))

        def change(page: QueuePage) -> tuple[QueuePage, int]:
            return changes.purge(page, lambda each: each.state in unwanted)

        count = 0
        try:
            for lane in (LIVE_LANE, DEAD_LANE):
                for listed in await self._pages.list_all(lane):
                    if listed.mark is PageMark.DONE and "completed" not in unwanted:
                        continue
                    count += await self._pages.apply(listed.place, change) or 0
        except (Misconfigured, Unavailable) as error:
            if not count:
                raise
            detail = f"{count:,} messages were removed before: {error}"
            raise OutcomeUnknown(self.topic, detail) from error
        return count

    async def forget(self, state: MessageState, *, older_than: float, limit: int = 10_000) -> int:
        """Remove messages that were finished long ago, at least an hour."""
        check_finished(state)
        check_age(older_than)
        check_limit(limit)
        return await self._retention.forget(state, older_than, limit)

    async def forget_keys(self, *, after: str, limit: int) -> SeenKeys:
        """Remove those of the next keys that nobody holds, if there were ever any."""
        return await self._keys.forget(after, limit) if self._control.has_keys else SeenKeys()

    async def pause(self, reason: str = "") -> bool:
        """Stop all claims; returns when none can begin."""
        check_reason(reason)
        return await self._control.pause(reason)

    async def resume(self) -> bool:
        """Allow claims again, and wake the workers of this process."""
        try:
            return await self._control.resume()
        finally:
            await self._bell.ring()

    async def wait(self, timeout: float) -> None:
        """Return early if there may be something new: listens to this process, and to the bell."""
        await self._bell.wait(timeout)


def _is_place(place: str) -> bool:
    lane, _, name = place.partition("/")
    return lane == LIVE_LANE and read_due(name) is not None
