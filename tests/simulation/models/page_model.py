"""Model of a page of messages: nothing is lost, nothing is in two places, nothing comes back.

A producer pushes a page. Two workers read it, claim a message each, handle it and settle; a
settlement with a long delay moves its message to another page. Each change is a conditional write
that may be applied without a reply, be lost, or land later. A worker may pause between any two
steps, or crash. An observer looks at the page and ends the claims that have lapsed. A page that is
done is dropped an hour after its last change, when nothing can land any more.

- A message that was pushed is finished, or in exactly one page.
- A message that is finished is in no page as one to handle, and a dropped page never comes back.
- A message is handled again only if its earlier claim was ended, or was settled to be tried again.
- While a worker trusts its claim, the claim stands.
- If somebody looks regularly, a claim that nobody renews ends in time, whatever else happens to its
  page; and an outage of the store alone ends no claim.
- A push that arrived is never reported as unknown.
- Where nobody lives long enough to watch a claim, all messages can still be finished.

The model uses the library's own changes of pages and its own sightings of claims.
"""

from collections.abc import Iterator
from functools import cache
from typing import Literal, TypeAlias

import msgspec
from explorer import Model, Step

from jobsync.core.clock import Mono
from jobsync.queue.backend import NewMessage, Receipt, Settlement
from jobsync.queue.pages import changes
from jobsync.queue.pages.page import PageMark, PageMessage, QueuePage
from jobsync.queue.pages.watch import Sighting, has_lapsed, look, look_inside

__all__ = ["MUTATIONS", "WORLDS", "PageModel", "Scene"]

Phase: TypeAlias = Literal["idle", "claimed", "running", "handled", "dead"]
Kind: TypeAlias = Literal["push", "claim", "renew", "settle", "release", "create", "finish"]

ABSENT, STALE = 0, -1
HOLD = 2
"""Ticks after which a claim lapses, and for which its holder trusts it."""
GAP = 1
"""Ticks without a look after which an observer counts again."""
NOW = 1000.0
"""The time of day, after all delays."""
SOURCE, TARGET = "0/P", "0/T"
TARGETS = changes.Targets("dead/T", lambda _: TARGET)

replace = msgspec.structs.replace


class Scene(msgspec.Struct, frozen=True):
    """The limits of a model, and what may happen in it."""

    ids: str = "a"
    """The messages, one letter each."""
    ticks: int = 0
    """For how long time passes; without it nothing lapses by being watched."""
    claims: int = 1
    """How often each worker claims."""
    strays: int = 1
    """How many requests may be under way whose senders do not wait for them."""
    crashes: int = 1
    moves: bool = False
    """Whether the first settlement of the message `a` moves it."""
    pushes: bool = False
    """Whether the page is pushed in the model; otherwise it is there."""
    drops: bool = False
    """Whether an hour may pass, after which what is done is dropped."""
    regular: bool = False
    """Whether somebody looks at each tick."""
    outages: int = 0
    """How often the store is away for a while."""
    forgets: bool = False
    """Whether each observer lives for less than a tick, as one-shot drains do."""
    workers: str = "AB"
    is_instant: bool = False
    """Whether requests are answered at once: fewer states, for scenes about time."""
    handles: bool = True
    """Whether messages are handled and settled; otherwise claims are only renewed."""


class Request(msgspec.Struct, frozen=True, gc=False):
    """A write of a page, in place of the version that its sender has read.

    The base is `ABSENT` for a create, and `STALE` once another write has replaced it.
    """

    nonce: str
    kind: Kind
    name: str
    base: int
    page: QueuePage


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A page in the store."""

    version: int
    page: QueuePage


class Worker(msgspec.Struct, frozen=True, gc=False):
    """A worker, or the producer, which only pushes."""

    name: str
    phase: Phase = "idle"
    claim: str = ""
    message: str = ""
    place: str = ""
    """The page of its message."""
    sent: int = 0
    """When its claim, or its last renewal, was sent."""
    claims: int = 0
    """How often it has claimed, or pushed."""
    request: Request | None = None
    sent_at: int = 0
    """When that request was first sent."""
    is_waiting: bool = False
    """Whether it waits for the reply; if not, it must find out what happened."""
    finishing: QueuePage | None = None
    """A page with a move that it is about to finish."""


class State(msgspec.Struct, frozen=True, gc=False):
    """The store, those who use it, and what has truly happened."""

    workers: tuple[Worker, ...]
    source: Stored | None = None
    target: Stored | None = None
    now: int = 0
    landed: frozenset[str] = frozenset()
    """The requests that were applied, of those whose senders do not know it."""
    strays: frozenset[Request] = frozenset()
    seen: Sighting | None = None
    """What the observer has seen of the source."""
    has_looked: bool = False
    """Whether somebody has looked since the last tick."""
    is_away: bool = False
    left: int = 0
    back: int = -9
    """When the store went away, and came back."""
    outages: int = 0
    crashes: int = 0
    pushed: bool = False
    finished: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    """Claims that were ended by others, or settled to be tried again."""
    handled: tuple[tuple[str, str], ...] = ()
    """Messages and the claims under which they were handled."""
    dropped: frozenset[str] = frozenset()
    renewed: tuple[tuple[str, int], ...] = ()
    """When each claim was last written."""
    fault: str = ""
    """What went wrong in the last step."""


class PageModel(Model[State]):
    """Two workers, a producer and an observer on one page and the target of its moves."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def starts(self) -> Iterator[State]:
        workers = tuple(Worker(name) for name in self._scene.workers)
        if self._scene.pushes:
            yield State((*workers, Worker("P")))
        else:
            page = first_page(self._scene.ids)
            yield State(workers, Stored(1, page), pushed=True)

    def steps(self, state: State) -> Iterator[Step[State]]:
        for number, worker in enumerate(state.workers):
            yield from self._act(state, number, worker)
        for stray in state.strays:
            if not state.is_away:
                yield Step(f"{stray.nonce} lands late", self._land(drop_stray(state, stray), stray))
        yield from self._observe(state)
        yield from self._pass_time(state)

    def find_violation(self, state: State) -> str | None:
        if state.fault:
            return state.fault
        pages = [each.page for each in (state.source, state.target) if each is not None]
        for name in self._scene.ids if state.pushed else "":
            live = sum(is_live(page, name) for page in pages)
            moving = sum(is_moving(page, name) for page in pages)
            if name in state.finished:
                if live:
                    return f"{name} is finished, and came back"
            elif not live and not moving:
                return f"{name} is lost"
            elif live > 1:
                return f"{name} is in two pages"
        for name in state.dropped:
            if find(state, name) is not None:
                return f"the dropped page {name} came back"
        return self._find_broken_promise(state)

    def _find_broken_promise(self, state: State) -> str | None:
        for count, (name, claim) in enumerate(state.handled):
            for earlier, other in state.handled[:count]:
                if earlier == name and other not in state.ended:
                    return f"{name} was handled again by {claim}, though {other} had not ended"
        for worker in state.workers:
            if is_holding(worker) and self._is_trusted(state, worker):
                page = find(state, worker.place)
                if page is None or not has_claim(page.page, worker.message, worker.claim):
                    return f"{worker.name} trusts {worker.claim}, which was ended"
        if self._scene.regular and state.source is not None:
            for claim, at in state.renewed:
                is_open = any(has_claim(state.source.page, name, claim) for name in self._scene.ids)
                if is_open and state.now - at > HOLD + 2:
                    return f"{claim} was not renewed for {state.now - at} ticks, and stands"
        return None

    def is_goal(self, state: State) -> bool:
        is_at_limit = all(
            worker.claims == self._scene.claims
            for worker in state.workers
            if worker.phase != "dead"
        )
        is_finished = state.finished == frozenset(self._scene.ids)
        return is_finished or is_at_limit or not self._scene.forgets

    # Overridden by mutations.

    def has_lapsed(self, state: State, message: PageMessage) -> bool:
        """Whether the observer may end a claim."""
        return has_lapsed(state.seen, message, Mono(state.now))

    def look(self, state: State, stored: Stored) -> Sighting:
        """Return what the observer has seen after a look."""
        seen = look(state.seen, str(stored.version), Mono(state.now), GAP)
        return look_inside(seen, stored.page)

    def is_done(self, page: QueuePage) -> bool:
        """Whether a page may be dropped."""
        return page.find_mark(NOW) is PageMark.DONE

    def may_drop(self, state: State, name: str) -> bool:
        """Whether a done page may be dropped: not while a move to it is open."""
        source = state.source
        return name == SOURCE or source is None or not source.page.targets

    def lasts_an_hour(self) -> bool:
        """Whether a done page stays until nothing can land any more."""
        return True

    def may_still_create(self) -> bool:
        """Whether a finisher acts on what it read an hour ago."""
        return False

    def may_release(self, worker: Worker) -> bool:
        """Whether a worker that lost its trust gives a message back."""
        return worker.phase == "claimed"

    def ends_old_claims(self) -> bool:
        """Whether anybody ends the claims of a page that has not changed for an hour."""
        return True

    def knows_push(self, page: QueuePage, nonce: str) -> bool:
        """Whether the producer finds its push in a page."""
        return page.birth == nonce

    def may_finish(self, state: State) -> bool:
        """Whether the source may forget what was moved."""
        return state.target is not None

    # Steps of workers.

    def _act(self, state: State, number: int, worker: Worker) -> Iterator[Step[State]]:
        if worker.phase == "dead":
            return
        if state.crashes < self._scene.crashes and worker.name != "P":
            yield Step(f"{worker.name} crashes", self._crash(state, number), is_fault=True)
        if worker.request is not None:
            yield from self._follow(state, number, worker, worker.request)
        elif worker.name == "P":
            if not worker.claims:
                yield self._send(state, number, "push", SOURCE, ABSENT, first_page(self._scene.ids))
        elif worker.finishing is not None:
            yield from self._finish(state, number, worker, worker.finishing)
        elif worker.phase == "idle":
            yield from self._begin(state, number, worker)
        else:
            yield from self._hold(state, number, worker)

    def _begin(self, state: State, number: int, worker: Worker) -> Iterator[Step[State]]:
        """Read a page: claim in it, or finish its move."""
        for name in (SOURCE, TARGET):
            stored = find(state, name)
            if stored is None or state.is_away:
                continue
            claim = f"{worker.name}{worker.claims}"
            after, found = claim_one(stored.page, claim)
            # Where somebody looks regularly, later claims would show the same, later.
            is_early = state.now == 0 or not self._scene.regular
            if found and worker.claims < self._scene.claims and is_early:
                yield self._send(state, number, "claim", name, stored.version, after)
            if stored.page.targets:
                yield Step(
                    f"{worker.name} reads that {name} is moving",
                    put(state, number, replace(worker, finishing=stored.page)),
                )

    def _finish(
        self, state: State, number: int, worker: Worker, page: QueuePage
    ) -> Iterator[Step[State]]:
        """Create the target of a move from the page that was read, then forget the message."""
        given_up = replace(worker, finishing=None)
        yield Step(f"{worker.name} does not go on", put(state, number, given_up))
        target = changes.build_target(page, TARGET, "")
        yield self._send(state, number, "create", TARGET, ABSENT, target)

    def _hold(self, state: State, number: int, worker: Worker) -> Iterator[Step[State]]:
        stored = find(state, worker.place)
        is_trusted = self._is_trusted(state, worker)
        if worker.phase == "claimed" and is_trusted and self._scene.handles:
            yield Step(
                f"{worker.name} starts to handle {worker.message}",
                put(state, number, replace(worker, phase="running")),
            )
        if worker.phase == "running" and is_trusted:
            handled = (*state.handled, (worker.message, worker.claim))
            after = put(state, number, replace(worker, phase="handled"))
            yield Step(
                f"{worker.name} has handled {worker.message}", replace(after, handled=handled)
            )
        if stored is None or state.is_away:
            return
        if is_trusted and state.now > worker.sent:
            yield self._send(state, number, "renew", worker.place, *self._renew(stored, worker))
        if worker.phase == "handled":
            yield self._send(state, number, "settle", worker.place, *self._settle(stored, worker))
        if not is_trusted and self.may_release(worker):
            yield self._send(state, number, "release", worker.place, *self._release(stored, worker))

    def _is_trusted(self, state: State, worker: Worker) -> bool:
        return state.now - worker.sent < HOLD

    def _renew(self, stored: Stored, worker: Worker) -> tuple[int, QueuePage]:
        receipts = [(worker.message, worker.claim)]
        page, _ = changes.extend(stored.page, receipts, HOLD, lambda _: 0.0)
        return stored.version, page

    def _settle(self, stored: Stored, worker: Worker) -> tuple[int, QueuePage]:
        each = message_of(stored.page, worker.message)
        is_first = each is not None and each.deliveries == 1
        moves = self._scene.moves and is_first and worker.message == "a"
        page = settle_one(stored.page, worker.message, worker.claim, is_later=moves)
        return stored.version, page

    def _release(self, stored: Stored, worker: Worker) -> tuple[int, QueuePage]:
        receipt = Receipt(worker.message, 1, worker.claim)
        settlement = Settlement(receipt=receipt, move="release")
        page, _ = changes.settle(stored.page, [(settlement, worker.claim)], 0.0, TARGETS)
        return stored.version, page

    def _send(
        self, state: State, number: int, kind: Kind, name: str, base: int, page: QueuePage
    ) -> Step[State]:
        worker = state.workers[number]
        used = {stray.nonce for stray in state.strays}
        nonce = next(text for n in range(9) if (text := f"{worker.name}-{n}") not in used)
        request = Request(nonce, kind, name, base, page)
        sent = replace(
            worker,
            request=request,
            claims=worker.claims + (kind == "push"),
            sent_at=state.now,
            is_waiting=True,
        )
        after = put(state, number, sent)
        if self._scene.is_instant:
            is_applied = fits(after, request)
            after = self._conclude(self._land(after, request), number, is_applied=is_applied)
        return Step(f"{worker.name} sends {nonce}: {kind} {name}", after)

    def _follow(
        self, state: State, number: int, worker: Worker, request: Request
    ) -> Iterator[Step[State]]:
        """Deliver a request, with or without a reply, or find out what happened to it."""
        nonce = request.nonce
        if worker.is_waiting:
            if not state.is_away:
                after = self._land(state, request)
                # A conflict of a second copy proves nothing: the first may have been applied.
                is_applied = nonce in after.landed
                yield Step(
                    f"{nonce} is answered: {'applied' if is_applied else 'conflicted'}",
                    self._conclude(after, number, is_applied=is_applied),
                )
            if len(state.strays) < self._scene.strays:
                unsure = put(state, number, replace(worker, is_waiting=False))
                yield Step(
                    f"{nonce} gets no reply",
                    replace(unsure, strays=state.strays | {request}),
                    is_fault=True,
                )
            return
        if state.is_away:
            return
        stored = find(state, request.name)
        yield from self._judge(state, number, request, stored)

    def _judge(
        self, state: State, number: int, request: Request, stored: Stored | None
    ) -> Iterator[Step[State]]:
        worker = state.workers[number]
        if fits(state, request):
            again = put(state, number, replace(worker, is_waiting=True))
            yield Step(f"{worker.name} reads: {request.nonce} is pending", again)
        elif request.kind == "push":
            is_mine = stored is not None and self.knows_push(stored.page, request.nonce)
            after = self._conclude(state, number, is_applied=is_mine)
            if not is_mine and request.nonce in state.landed:
                after = replace(after, fault="a push that arrived is reported as unknown")
            yield Step(f"{worker.name} looks for its push", after)
        else:
            is_mine = request.nonce in state.landed
            what = "is there" if is_mine else "is not there"
            yield Step(
                f"{worker.name} reads: {request.nonce} {what}",
                self._conclude(state, number, is_applied=is_mine),
            )

    def _conclude(self, state: State, number: int, *, is_applied: bool) -> State:
        """Go on after a request whose outcome is known."""
        worker = state.workers[number]
        request = worker.request
        assert request is not None
        state = replace(state, landed=state.landed - {request.nonce})
        rest = replace(worker, request=None, is_waiting=False)
        match request.kind:
            case "claim" if is_applied:
                claim = f"{worker.name}{worker.claims}"
                (message,) = [each.id for each in request.page.messages if each.claim == claim]
                rest = replace(
                    rest,
                    phase="claimed",
                    claim=claim,
                    message=message,
                    place=request.name,
                    sent=worker.sent_at,
                    claims=worker.claims + 1,
                )
            case "renew" if is_applied:
                rest = replace(rest, sent=worker.sent_at)
            case "settle" | "release":
                rest = self._after_settling(state, rest, request, is_applied=is_applied)
            case "create":
                # A target that is there, whoever created it, means that this step is done.
                return self._forget_moved(state, number, rest)
            case _:
                pass
        return put(state, number, rest)

    def _after_settling(
        self, state: State, worker: Worker, request: Request, *, is_applied: bool
    ) -> Worker:
        stored = find(state, request.name)
        stands = stored is not None and has_claim(stored.page, worker.message, worker.claim)
        if not is_applied and stands:
            # Another write came first: settle again, in place of that.
            return worker
        idle = replace(worker, phase="idle", claim="", message="", place="")
        return replace(idle, finishing=request.page if request.page.targets else None)

    def _forget_moved(self, state: State, number: int, worker: Worker) -> State:
        """Write the source without the message that was moved; one step, to keep the model small.

        A finisher that stops before it is `does not go on`, and a conflict is its next read.
        """
        worker = replace(worker, finishing=None)
        source = state.source
        if source is not None and source.page.targets and self.may_finish(state):
            page = changes.finish_move(source.page, TARGET)
            state = write(state, SOURCE, page)
        return put(state, number, worker)

    def _crash(self, state: State, number: int) -> State:
        worker = state.workers[number]
        strays = state.strays
        if worker.request is not None and worker.is_waiting:
            strays |= {worker.request}
        dead = Worker(worker.name, "dead")
        return replace(put(state, number, dead), strays=strays, crashes=state.crashes + 1)

    def _land(self, state: State, request: Request) -> State:
        """Apply one copy of a request, if its condition holds."""
        if not fits(state, request):
            return state
        before = find(state, request.name)
        page = request.page
        if request.base == ABSENT:
            page = replace(page, birth=request.nonce)
        finished = state.finished | {each.id for each in page.messages if is_finished(each)}
        state = replace(
            write(state, request.name, page),
            landed=state.landed | {request.nonce},
            finished=finished,
            pushed=state.pushed or request.kind == "push",
        )
        return self._record_claims(state, None if before is None else before.page, page)

    def _record_claims(self, state: State, before: QueuePage | None, after: QueuePage) -> State:
        old = {} if before is None else renewals(before)
        new = renewals(after)
        ended = {claim for claim in old if claim not in new}
        # A claim that ended with its message finished was settled; the message is not tried again.
        ended -= {each.claim for each in after.messages if each.state == "completed"}
        released = {
            mark.partition(":")[0]
            for each in after.messages
            for mark in each.marks.split()
            if mark.endswith(":release")
        }
        changed = [claim for claim in new if new[claim] != old.get(claim)]
        kept = [(claim, at) for claim, at in state.renewed if claim in new and claim not in changed]
        times = sorted([*kept, *((claim, state.now) for claim in changed)])
        # What was handled and then released is handled twice for nothing.
        return replace(
            state,
            ended=state.ended | (ended - released),
            renewed=tuple(times) if self._scene.regular else (),
        )

    # Time, the observer, and the end of pages.

    def _observe(self, state: State) -> Iterator[Step[State]]:
        stored = state.source
        if not self._scene.ticks or stored is None or state.is_away:
            return
        looked = replace(state, seen=self.look(state, stored), has_looked=True)
        if looked != state:
            yield Step("the observer looks", looked)
        page, over = changes.end_claims(
            stored.page, lambda each: self.has_lapsed(looked, each), 0.0, TARGETS
        )
        if over:
            after = end_source_claims(looked, page)
            for worker in state.workers:
                stands = has_claim(stored.page, worker.message, worker.claim)
                was_trusted = state.left - worker.sent < HOLD
                was_away = state.back - state.left > GAP and state.now - state.back < GAP
                if is_holding(worker) and stands and was_trusted and was_away:
                    after = replace(after, fault="an outage of the store ended a claim")
            yield Step("the observer ends what has lapsed", after)

    def _pass_time(self, state: State) -> Iterator[Step[State]]:
        scene = self._scene
        if state.now < scene.ticks and (state.has_looked or not scene.regular):
            is_settled = not scene.regular or not self._is_overdue(state)
            if is_settled:
                seen = None if scene.forgets else state.seen
                yield Step(
                    "time passes", replace(state, now=state.now + 1, has_looked=False, seen=seen)
                )
        if state.outages < scene.outages and not state.is_away:
            away = replace(state, is_away=True, outages=state.outages + 1, left=state.now)
            yield Step("the store is away", away, is_fault=True)
        if state.is_away:
            yield Step("the store is back", replace(state, is_away=False, back=state.now))
        if scene.drops or scene.forgets:
            yield from self._pass_an_hour(state)

    def _is_overdue(self, state: State) -> bool:
        """Whether the observer could end a claim now."""
        return state.source is not None and any(
            each.state == "claimed" and self.has_lapsed(state, each)
            for each in state.source.page.messages
        )

    def _pass_an_hour(self, state: State) -> Iterator[Step[State]]:
        """Nothing lands any more that was sent before, and nobody trusts an old claim."""
        workers = tuple(self._age(worker) for worker in state.workers)
        unsure = {worker.request.nonce for worker in workers if worker.request is not None}
        later = replace(state, workers=workers, strays=frozenset(), landed=state.landed & unsure)
        for name in (SOURCE, TARGET):
            stored = find(state, name)
            is_done = stored is not None and self.is_done(stored.page)
            if self._scene.drops and is_done and self.may_drop(state, name):
                field = "source" if name == SOURCE else "target"
                before = later if self.lasts_an_hour() else state
                after = replace(before, dropped=state.dropped | {name}, **{field: None})
                yield Step(f"an hour later {name} is dropped", after)
        stored = state.source
        if self._scene.forgets and stored is not None and self.ends_old_claims():
            page, over = changes.end_claims(stored.page, lambda _: True, 0.0, TARGETS)
            if over:
                yield Step("an hour later the claims are ended", end_source_claims(later, page))

    def _age(self, worker: Worker) -> Worker:
        """Return a worker after an hour in which it did nothing."""
        if worker.phase == "dead":
            return worker
        finishing = worker.finishing if self.may_still_create() else None
        request = worker.request
        if request is not None and request.kind != "create":
            finishing = None
        return replace(
            worker,
            sent=-9,
            finishing=finishing,
            request=request if self.may_still_create() else None,
            is_waiting=False,
        )


@cache
def first_page(ids: str) -> QueuePage:
    """Return the page that is pushed."""
    new = [NewMessage(id=name, value=None, max_attempts=9) for name in ids]
    return changes.new_page("", new, 0.0)


@cache
def claim_one(page: QueuePage, claim: str) -> tuple[QueuePage, tuple[PageMessage, ...]]:
    """Claim one message, a suspect or not."""
    for suspects in (False, True):
        claimant = changes.Claimant(
            id=claim, session=claim, visibility=HOLD, limit=1, suspects=suspects
        )
        after, found = changes.claim(page, claimant, NOW)
        if found:
            return after, tuple(found)
    return page, ()


@cache
def settle_one(page: QueuePage, message: str, claim: str, *, is_later: bool) -> QueuePage:
    """Complete a message, or have it tried again later, in another page."""
    receipt = Receipt(message, 1, claim)
    settlement = (
        Settlement(receipt=receipt, move="retry", delay=100.0)
        if is_later
        else Settlement(receipt=receipt, move="complete")
    )
    return changes.settle(page, [(settlement, claim)], 0.0, TARGETS)[0]


def find(state: State, name: str) -> Stored | None:
    """Return a page, if it is there."""
    return state.source if name == SOURCE else state.target


def fits(state: State, request: Request) -> bool:
    """Whether the condition of a request holds."""
    stored = find(state, request.name)
    return (ABSENT if stored is None else stored.version) == request.base


def write(state: State, name: str, page: QueuePage) -> State:
    """Return the state with a new version of a page.

    Versions are the lowest numbers that mean nothing yet, so that equal states are equal: requests
    on the earlier version never apply, and those that nobody waits for are left out.
    """
    before = find(state, name)
    used = {"" if state.seen is None else state.seen.version, str(before and before.version)}
    version = next(number for number in (1, 2, 3) if str(number) not in used)
    stored = Stored(version, page)
    workers = tuple(
        replace(worker, request=replace(worker.request, base=STALE))
        if worker.request is not None and worker.request.name == name
        else worker
        for worker in state.workers
    )
    return replace(
        state,
        workers=workers,
        strays=frozenset(stray for stray in state.strays if stray.name != name),
        source=stored if name == SOURCE else state.source,
        target=stored if name == TARGET else state.target,
    )


def put(state: State, number: int, worker: Worker) -> State:
    """Return the state with another worker."""
    workers = state.workers
    return replace(state, workers=(*workers[:number], worker, *workers[number + 1 :]))


def drop_stray(state: State, stray: Request) -> State:
    """Return the state without a request that arrives now."""
    return replace(state, strays=state.strays - {stray})


def end_source_claims(state: State, page: QueuePage) -> State:
    """Return the state after claims of the source were ended by a write."""
    assert state.source is not None
    gone = renewals(state.source.page).keys() - renewals(page).keys()
    return replace(
        write(state, SOURCE, page),
        ended=state.ended | gone,
        renewed=tuple(each for each in state.renewed if each[0] not in gone),
    )


def message_of(page: QueuePage, name: str) -> PageMessage | None:
    """Return a message of a page."""
    return next((each for each in page.messages if each.id == name), None)


def has_claim(page: QueuePage, name: str, claim: str) -> bool:
    """Whether a claim has a message."""
    each = message_of(page, name)
    return each is not None and each.state == "claimed" and each.claim == claim


def renewals(page: QueuePage) -> dict[str, int]:
    """Return the claims in a page, with the number of their renewals."""
    return {each.claim: each.renewal for each in page.messages if each.state == "claimed"}


def is_holding(worker: Worker) -> bool:
    """Whether a worker relies on its claim: it has one, and has not sent how it ends."""
    is_ending = worker.request is not None and worker.request.kind in {"settle", "release"}
    return worker.phase in {"claimed", "running", "handled"} and not is_ending


def is_live(page: QueuePage, name: str) -> bool:
    """Whether a page has a message that somebody may handle."""
    each = message_of(page, name)
    return each is not None and not each.move and each.state in {"ready", "waiting", "claimed"}


def is_moving(page: QueuePage, name: str) -> bool:
    """Whether a page has a message that is on its way to another."""
    each = message_of(page, name)
    return each is not None and bool(each.move)


def is_finished(message: PageMessage) -> bool:
    """Whether a message is finished for good."""
    return message.state == "completed" and not message.move


class WatchTheVersion(PageModel):
    """A page is watched as a whole: the renewals of one claim hide that another stands still."""

    def has_lapsed(self, state: State, message: PageMessage) -> bool:
        stored, seen = state.source, state.seen
        if stored is None or seen is None or seen.version != str(stored.version):
            return False
        return Mono(state.now) - seen.since >= message.hold


class MovingIsDone(PageModel):
    """A page whose messages are all settled is dropped while one of them is on its way."""

    def is_done(self, page: QueuePage) -> bool:
        return not any(is_live(page, each.id) for each in page.messages)


class DropTheTarget(PageModel):
    """A consumed target is dropped although its source still says that the message moves there."""

    def may_drop(self, state: State, name: str) -> bool:
        return True


class DropAtOnce(PageModel):
    """A done page is dropped while a late copy of the push can still arrive."""

    def lasts_an_hour(self) -> bool:
        return False


class LateFinisher(PageModel):
    """Somebody who read of a move finishes it hours later."""

    def may_drop(self, state: State, name: str) -> bool:
        """Whether a done page may be dropped: not while a move to it is open."""
        source = state.source
        return name == SOURCE or source is None or not source.page.targets

    def lasts_an_hour(self) -> bool:
        """Whether a done page stays until nothing can land any more."""
        return True

    def may_still_create(self) -> bool:
        return True


class ImpatientObserver(PageModel):
    """After an outage the observer goes on with its count."""

    def look(self, state: State, stored: Stored) -> Sighting:
        seen = look(state.seen, str(stored.version), Mono(state.now), 1000)
        return look_inside(seen, stored.page)


class ReleaseTheHandled(PageModel):
    """A worker without trust gives everything back, also what it has handled."""

    def may_release(self, worker: Worker) -> bool:
        return worker.phase in {"claimed", "handled"}


class ReleaseTheRunning(PageModel):
    """A worker without trust gives back what still runs, and the handler finishes."""

    def may_release(self, worker: Worker) -> bool:
        return worker.phase in {"claimed", "running"}

    def _is_trusted(self, state: State, worker: Worker) -> bool:
        return worker.phase == "running" or super()._is_trusted(state, worker)


class NobodyWatchesLongEnough(PageModel):
    """One-shot drains each see a dead claim for less than it holds, and none ends it."""

    def ends_old_claims(self) -> bool:
        return False


class TrailOnly(PageModel):
    """A push looks for its nonce among the latest writes, of which a page keeps a few."""

    def knows_push(self, page: QueuePage, nonce: str) -> bool:
        is_unchanged = all(each.state == "ready" for each in page.messages)
        return is_unchanged and super().knows_push(page, nonce)


class ForgetBeforeCopy(PageModel):
    """The source forgets a message before its copy is there."""

    def _finish(
        self, state: State, number: int, worker: Worker, page: QueuePage
    ) -> Iterator[Step[State]]:
        yield Step(f"{worker.name} forgets first", self._forget_moved(state, number, worker))

    def may_finish(self, state: State) -> bool:
        return True


class CopyKeepsMoving(PageModel):
    """The source keeps a message that was copied, as one that can be claimed."""

    def _forget_moved(self, state: State, number: int, worker: Worker) -> State:
        source = state.source
        if source is not None and source.page.targets:
            back = tuple(replace(each, move="") for each in source.page.messages)
            page = replace(source.page, messages=back)
            state = write(state, SOURCE, page)
        return put(state, number, replace(worker, finishing=None))


class CountFromTheLook(PageModel):
    """The observer ends a claim one tick early."""

    def has_lapsed(self, state: State, message: PageMessage) -> bool:
        return super().has_lapsed(state, replace(message, hold=message.hold - 1))


WORLDS = {
    "two claims of a page": Scene("ab", ticks=1, crashes=0, strays=0),
    "a crash beside a living claim": Scene(
        "ab", ticks=5, regular=True, handles=False, is_instant=True
    ),
    "an outage": Scene("a", ticks=5, outages=1, workers="A", is_instant=True),
    "a lost trust": Scene("a", ticks=2, claims=2, strays=1, crashes=0, workers="A"),
    "a crash": Scene("a", ticks=3, claims=2, is_instant=True),
    "a move": Scene("a", claims=2, moves=True, drops=True, strays=1),
    "a move beside a claim": Scene("ab", claims=2, moves=True, crashes=0, strays=0),
    "one-shot drains": Scene("a", ticks=1, forgets=True, is_instant=True),
    "a push": Scene("a", pushes=True, drops=True, workers="A", strays=1),
}

MUTATIONS: dict[type[PageModel], str] = {
    WatchTheVersion: "a crash beside a living claim",
    MovingIsDone: "a move",
    DropTheTarget: "a move",
    DropAtOnce: "a push",
    LateFinisher: "a move",
    ImpatientObserver: "an outage",
    ReleaseTheHandled: "a lost trust",
    ReleaseTheRunning: "a lost trust",
    NobodyWatchesLongEnough: "one-shot drains",
    TrailOnly: "a push",
    ForgetBeforeCopy: "a move",
    CopyKeepsMoving: "a move",
    CountFromTheLook: "an outage",
}
