"""A reply is lost, others change what stands, and only then is the operation repeated.

Each operation is combined with everything that others may do meanwhile. What stands in the end, and
what the caller learns, is what it would have been without the fault: the same calls in the same
order, with every reply. So no case says what is right.
"""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import pytest
from queue_calls import ME, OTHER, claim
from queue_locations import PagesQueues, PostgresQueues, QueueLocation, find_empty_location

from jobsync import Components, OutcomeUnknown, Unavailable
from jobsync.core.clock import SystemClock
from jobsync.core.messages import FINISHED, LIVE, Transition
from jobsync.queue.backend import Message, MessageInfo, NewMessage, QueueBackend, Settlement
from jobsync.queue.single_message import StoredResult

Loss = Literal["reply", "request"]
ALL = "abcdefgh"
"""The letters of the messages; each of them has something else happen to it meanwhile."""
_runs = itertools.count(1)


class _PromptClock(SystemClock):
    """The machine's clock, without pauses between repetitions."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(min(seconds, 0.0))


class Stage:
    """The messages of one run, by letters, and the two processes that use them.

    Attributes:
        mine: the process that loses a reply.
        other: the process that acts meanwhile.
        claimed: the messages that the first one has claimed, in their order.
    """

    def __init__(self, location: QueueLocation, mine: QueueBackend, other: QueueBackend) -> None:
        self.location = location
        self.mine = mine
        self.other = other
        self.claimed: list[Message] = []
        self._run = next(_runs)

    def name(self, letter: str) -> str:
        """Return the id or the key of this run for a letter."""
        return f"{self._run:04}-{letter}"

    def new(self, letters: str, **options: Any) -> list[NewMessage]:
        """Return messages with these letters."""
        return [
            NewMessage(id=self.name(each), value={"n": each}, max_attempts=2, **options)
            for each in letters
        ]

    async def claim(self, **options: Any) -> None:
        """Claim everything for the first process."""
        self.claimed += await claim(self.mine, **options)

    def settlements(self, letters: str, move: Transition, **how: Any) -> list[Settlement]:
        """Return settlements of those messages that are claimed; each failure has an error."""
        if move in {"retry", "bury"}:
            how = {"error": "boom", **how}
        chosen = [each for each in self.claimed if each.id[-1] in letters]
        return [Settlement(receipt=each.receipt, move=move, **how) for each in chosen]

    async def see(self) -> Mapping[str, Any]:
        """Return what stands of the messages, as others see it."""
        names = [self.name(letter) for letter in f"{ALL}xy"]
        found = await self.location.open_directory().find(names)
        return {each.id[-1]: _describe(each) for each in found}


def _describe(info: MessageInfo) -> tuple[Any, ...]:
    """Return what others see of a message, without times."""
    state = (
        "ready" if info.state == "waiting" and info.due and info.due <= info.seen else info.state
    )
    errors = [(each.attempt, each.error, each.session) for each in info.errors]
    counts = (info.attempts, info.deliveries, info.max_attempts)
    rest = (info.is_suspect, info.priority, info.group, info.result, info.progress)
    return (state, info.value, info.session, counts, errors, rest)


def _plainly(answer: Any) -> Any:
    """Return an answer without the number of its run."""
    match answer:
        case str():
            return answer[-1] if answer[:4].isdigit() else answer
        case Message():
            return (answer.id[-1], answer.attempt, answer.is_suspect, answer.value)
        case msgspec.Struct():
            return _plainly(msgspec.structs.astuple(answer))
        case Mapping():
            return {_plainly(key): _plainly(value) for key, value in answer.items()}
        case list() | tuple():
            return [_plainly(each) for each in answer]
    return answer


Step = Callable[[Stage], Awaitable[Any]]


class Operation(NamedTuple):
    """Something that is repeated after its reply was lost."""

    prepare: Step
    act: Step


async def _nothing(stage: Stage) -> None:
    """Do nothing."""
    del stage


def _push(letters: str = ALL, **options: Any) -> Step:
    return lambda stage: stage.other.push(stage.new(letters, **options))


def _push_mine(letters: str, *, key: str = "", **options: Any) -> Step:
    def act(stage: Stage) -> Awaitable[Any]:
        named = {"key": stage.name(key)} if key else {}
        return stage.mine.push(stage.new(letters, **named, **options))

    return act


def _in_turn(*steps: Step) -> Step:
    async def act(stage: Stage) -> None:
        for step in steps:
            await step(stage)

    return act


async def _take(stage: Stage) -> None:
    await stage.claim()


async def _hold_key(stage: Stage) -> None:
    await stage.other.push(stage.new("a", key=stage.name("k")))


def _settle(letters: str, move: Transition, **how: Any) -> Step:
    return lambda stage: stage.mine.settle(stage.settlements(letters, move, **how))


def _settle_elsewhere(letters: str, move: Transition) -> Step:
    return lambda stage: stage.other.settle(stage.settlements(letters, move))


async def _suspect(stage: Stage) -> None:
    await _push("b")(stage)
    await claim(stage.mine)
    await stage.mine.end_claims([ME])


async def _extend(stage: Stage) -> list[bool]:
    return await stage.mine.extend([each.receipt for each in stage.claimed], 90)


claimed = _in_turn(_push(), _take)
partly = _in_turn(claimed, _settle_elsewhere("ab", "complete"))
dead = _in_turn(claimed, _settle_elsewhere(ALL, "bury"))
completed = _in_turn(claimed, _settle_elsewhere(ALL, "complete"))
RESULT = StoredResult('{"x":1}')
MOVES: tuple[Transition, ...] = ("complete", "retry", "bury", "release")

ANYWHERE: dict[str, Operation] = {
    "push": Operation(_nothing, _push_mine(ALL)),
    "push one": Operation(_nothing, _push_mine("b")),
    "push with a key": Operation(_nothing, _push_mine("b", key="k")),
    "push in place of another": Operation(_hold_key, _push_mine("b", key="k", replace=True)),
    "claim": Operation(_push(), lambda stage: claim(stage.mine)),
    "claim a part": Operation(_push(), lambda stage: claim(stage.mine, 7)),
    "claim a suspect": Operation(_suspect, lambda stage: claim(stage.mine, suspects=True)),
    **{move: Operation(claimed, _settle(ALL, move)) for move in MOVES},
    "complete a part": Operation(claimed, _settle(ALL[:-1], "complete")),
    "complete the rest": Operation(partly, _settle(ALL, "complete")),
    "retry the rest": Operation(partly, _settle(ALL, "retry")),
    "complete with results": Operation(claimed, _settle(ALL, "complete", result=RESULT)),
    "complete after failures": Operation(claimed, _settle(ALL, "complete", error="why")),
    "extend": Operation(claimed, _extend),
    "end claims": Operation(claimed, lambda stage: stage.mine.end_claims([ME])),
    "cancel": Operation(_push(), lambda stage: stage.mine.cancel(stage.name("b"))),
    "cancel what is claimed": Operation(claimed, lambda stage: stage.mine.cancel(stage.name("a"))),
    "delete": Operation(_push(), lambda stage: stage.mine.delete(stage.name("b"))),
    "delete what is completed": Operation(
        completed, lambda stage: stage.mine.delete(stage.name("a"))
    ),
    "delete what is dead": Operation(dead, lambda stage: stage.mine.delete(stage.name("a"))),
    "run now": Operation(_push(delay=500), lambda stage: stage.mine.run_now(stage.name("h"))),
    "redrive": Operation(dead, lambda stage: stage.mine.redrive()),
    "redrive one": Operation(dead, lambda stage: stage.mine.redrive([stage.name("b")])),
    "purge what is claimed": Operation(partly, lambda stage: stage.mine.purge(["claimed"])),
    "purge what is completed": Operation(partly, lambda stage: stage.mine.purge(["completed"])),
}

_HEADS = _in_turn(_push("abc", group="g"), _push("de", group="h"), _take)
IN_GROUPS: dict[str, Operation] = {
    "push to a group": Operation(_nothing, _push_mine("abc", group="g")),
    "claim heads": Operation(
        _in_turn(_push("abc", group="g"), _push("de", group="h")), lambda stage: claim(stage.mine)
    ),
    **{f"{move} heads": Operation(_HEADS, _settle(ALL, move)) for move in MOVES[:3]},
    "end the claims of heads": Operation(_HEADS, lambda stage: stage.mine.end_claims([ME])),
    "cancel a head": Operation(_HEADS, lambda stage: stage.mine.cancel(stage.name("a"))),
    "cancel the next": Operation(_HEADS, lambda stage: stage.mine.cancel(stage.name("b"))),
    "purge heads": Operation(_HEADS, lambda stage: stage.mine.purge(["claimed"])),
}

ASKS_TWICE = {
    "complete the rest",
    "cancel what is claimed",
    "cancel a head",
    "cancel the next",
    "delete what is completed",
    "delete what is dead",
}
"""Operations of several statements on PostgreSQL: the first may find nothing to do."""


async def _claim_and(stage: Stage, move: Transition) -> None:
    messages = await claim(stage.other, session=OTHER)
    await stage.other.settle(
        [Settlement(receipt=each.receipt, move=move, error="theirs") for each in messages]
    )


async def _end_and_claim(stage: Stage) -> None:
    await stage.other.end_claims([ME])
    await claim(stage.other, session=OTHER, suspects=True)
    await claim(stage.other, session=OTHER)


async def _hold_the_key(stage: Stage) -> None:
    await stage.other.push(stage.new("x", key=stage.name("k")))
    await stage.other.push(stage.new("y", key=stage.name("k"), replace=True))


EACH_ITS_OWN = _in_turn(
    # Nothing happens to `a`.
    lambda stage: stage.other.cancel(stage.name("b")),
    _settle_elsewhere("c", "complete"),
    _settle_elsewhere("d", "bury"),
    _settle_elsewhere("e", "release"),
    lambda stage: stage.other.cancel(stage.name("f")),
    lambda stage: stage.other.redrive([stage.name("f")]),
    lambda stage: stage.other.delete(stage.name("g")),
    lambda stage: stage.other.run_now(stage.name("h")),
)
MEANWHILE: Mapping[str, Step] = {
    "something else to each": EACH_ITS_OWN,
    "end the claims and claim": _end_and_claim,
    "purge what is live": lambda stage: stage.other.purge([*LIVE]),
    "purge what is finished": lambda stage: stage.other.purge([*FINISHED]),
    "claim and complete": lambda stage: _claim_and(stage, "complete"),
    "claim and bury": lambda stage: _claim_and(stage, "bury"),
    "hold the key": _hold_the_key,
    "redrive": lambda stage: stage.other.redrive(),
}
ONLY_DURING = {
    "purge what is live": "push claim retry release end extend run redrive",
    "purge what is finished": "complete bury cancel delete purge",
    "end the claims and claim": "push claim complete retry bury end extend redrive",
    "claim and complete": "push redrive run",
    "claim and bury": "push redrive run",
    "hold the key": "push",
    "redrive": "redrive delete bury cancel purge",
}
"""What is worth a try only during these operations, by their first words."""
ALSO_WITHOUT_A_REQUEST = {"push", "claim", "complete", "retry the rest", "extend", "end claims"}
"""Operations of which the request is lost, too, so that they are repeated after all that."""
NOT_ONE_WRITE = {"claim", "claim a part", "run now"}
"""Operations on several pages: others may change one in between. A purge leaves what moves."""


def _list_cases(name: str) -> Iterator[tuple[Loss, str]]:
    """Yield what is lost, and what happens meanwhile."""
    for what in MEANWHILE:
        if name.split(maxsplit=1)[0] in ONLY_DURING.get(what, name).split():
            yield "reply", what
    if name in ALSO_WITHOUT_A_REQUEST:
        yield "request", "something else to each"


class Ending(NamedTuple):
    """What a run has shown."""

    answer: Any
    seen: Mapping[str, Any]


async def _lose(stage: Stage, operation: Operation, meanwhile: Step, loss: Loss) -> Ending | None:
    """Lose the reply or the request; None if the caller was told so."""
    faults = stage.location.faults
    await operation.prepare(stage)
    acted: list[str] = []

    async def act() -> None:
        acted.append(loss)
        await meanwhile(stage)

    faults.meanwhile = act
    setattr(faults, "lost_replies" if loss == "reply" else "lost_requests", 1)
    try:
        answer = await operation.act(stage)
    except (OutcomeUnknown, Unavailable):
        return None
    finally:
        assert acted, "the operation has sent nothing"
    return Ending(_plainly(answer), await stage.see())


async def _answer(stage: Stage, operation: Operation, steps: Iterable[Step]) -> Ending:
    """Make the same calls with every reply; return the last answer of the operation."""
    answer = None
    await operation.prepare(stage)
    for step in steps:
        found = await step(stage)
        answer = found if step is operation.act else answer
    return Ending(_plainly(answer), await stage.see())


class Stages:
    """Makes the stage of each run, in an empty queue."""

    def __init__(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        self._request = request
        self._path = tmp_path
        self.location = find_empty_location(request, tmp_path)
        self._backends: list[QueueBackend] = []
        self.is_on_pages = isinstance(self.location, PagesQueues)

    async def open(self) -> Stage:
        """Return a new stage; pages are new, and tables are emptied."""
        if self._backends and not self.is_on_pages:
            await self._backends[1].purge([*LIVE, *FINISHED])
        else:
            await self.location.close()
            self.location = find_empty_location(self._request, self._path)
            components = msgspec.structs.replace(Components.system(), clock=_PromptClock())
            self._backends = [await self.location.open("emails", components) for _ in range(2)]
        return Stage(self.location, *self._backends)


@pytest.fixture(params=["sqlite", "postgres", "memory"])
async def stages(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stages]:
    """The stages on each kind of store."""
    stages = Stages(request, tmp_path)
    yield stages
    await stages.location.close()


@pytest.mark.parametrize("name", [*ANYWHERE, *IN_GROUPS])
async def test_what_others_do_before_a_repetition_stands(stages: Stages, name: str) -> None:
    """Nothing is done twice or undone, and the answer is that of one operation before or after."""
    if stages.is_on_pages and (name in IN_GROUPS or name in NOT_ONE_WRITE):
        pytest.skip("pages have no groups" if name in IN_GROUPS else "it is more than one write")
    operation = {**ANYWHERE, **IN_GROUPS}[name]
    # Several writes, or several statements: what others do may come before the one that counts.
    is_one_step = not stages.is_on_pages and name not in ASKS_TWICE
    is_read_again = isinstance(stages.location, PostgresQueues) and name.startswith("claim")
    for loss, what in _list_cases(name):
        meanwhile = MEANWHILE[what]
        stage = await stages.open()
        ending = await _lose(stage, operation, meanwhile, loss)
        again = [] if ending is not None else [operation.act]
        if ending is None:
            ending = Ending(_plainly(await operation.act(stage)), await stage.see())
        first, second = [operation.act, meanwhile, *again], [meanwhile, operation.act]
        orders = [first, second] if loss == "reply" else [second, first]
        allowed: list[Ending] = []
        for order in orders[:1] if is_one_step else orders:
            if ending not in allowed:
                allowed.append(await _answer(await stages.open(), operation, order))
        if is_read_again and not again:
            # A claim whose reply was lost has only what stands of it.
            standing = {
                letter
                for letter, (state, _, session, *_) in ending.seen.items()
                if (state, session) == ("claimed", ME)
            }
            answer = [each for each in allowed[0].answer if each[0] in standing]
            allowed = [Ending(answer, allowed[0].seen)]
        assert ending in allowed, f"{what}, after a lost {loss}"
