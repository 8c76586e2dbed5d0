"""Processes that push and handle messages of one queue, and what must hold of them."""

import asyncio
import itertools
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import carrier
import msgspec
from ledger import Fact, Ledger
from waiting import TIMEOUT, now, until

from jobsync import Database, QueuePlugin
from jobsync.core.messages import LIVE
from jobsync.queue.backend import MessageInfo
from jobsync.queue.opening import open_backend

__all__ = ["Depot", "Hand", "Handling", "judge"]


class Handling(Fact, frozen=True):
    """What a process told of a message."""

    @property
    def id(self) -> str:
        """Which one."""
        return str(self["id"])


class Hand:
    """A carrier, seen from outside."""

    def __init__(self, orders: carrier.Orders, complaints: Path) -> None:
        self.name = orders.name
        self.killed: float | None = None
        self.is_frozen = False
        self._complaints = complaints
        with complaints.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, carrier.__file__, msgspec.json.encode(orders).decode()],
                stderr=stderr,
            )

    def __repr__(self) -> str:
        return self.name

    @property
    def complaints(self) -> str:
        """What it wrote to stderr."""
        return self._complaints.read_text()

    @property
    def runs(self) -> bool:
        """Whether it is there."""
        return self.process.poll() is None

    def strike(self, signal_: signal.Signals) -> None:
        """Send a signal."""
        if signal_ == signal.SIGKILL:
            self.killed = now()
        self.process.send_signal(signal_)

    async def ended(self) -> int:
        """Wait until it is gone; give its exit status."""
        await until(lambda: not self.runs, f"{self} ends")
        return self.process.returncode


class Depot:
    """Processes on one queue, and the ledger that they share."""

    def __init__(self, url: str, folder: Path, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.url = url
        self.everybody: list[Hand] = []
        self.options = {"completed_ttl": 36_000.0, "skip_cold_start": True, **options}
        self._folder = folder
        self._ledger = Ledger(folder / "ledger.jsonl", Handling)
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for hand in self.everybody:
            if hand.runs:
                hand.strike(signal.SIGKILL)
            hand.process.wait()

    async def start(self, count: int, role: carrier.Role = "handle", **orders: Any) -> list[Hand]:
        """Start processes; return when they stand."""
        hands = [self.hire(role, **orders) for _ in range(count)]
        await self.stand(hands)
        return hands

    async def stand(self, hands: Iterable[Hand]) -> None:
        """Wait until some processes stand."""
        names = {hand.name for hand in hands}
        await until(lambda: names <= {fact.who for fact in self.told("stands")}, "all stand")

    def hire(self, role: carrier.Role = "handle", **orders: Any) -> Hand:
        """Start a process."""
        name = f"{role}-{next(self._numbers)}"
        hand = Hand(
            carrier.Orders(
                url=orders.pop("url", self.url),
                name=name,
                ledger=str(self._ledger.path),
                role=role,
                options=self.options,
                **orders,
            ),
            self._folder / f"{name}.txt",
        )
        self.everybody.append(hand)
        return hand

    def told(self, *what: str) -> list[Handling]:
        """Give what was told, of some kinds or of all, in the order of the ledger."""
        return self._ledger.told(*what)

    def check_exits(self) -> None:
        """Nobody is gone but by SIGKILL, or in good order and in silence."""
        for hand in self.everybody:
            status = hand.process.poll()
            fine = status in {None, 0} or (status == -signal.SIGKILL and hand.killed is not None)
            assert fine, f"{hand}, {status}: {hand.complaints}"

    async def look(self, *states: Any) -> dict[str, MessageInfo]:
        """Read messages from the store, by their names."""
        found: dict[str, MessageInfo] = {}
        async with Database(self.url) as db:
            queue = await db.use_plugin(QueuePlugin(resource="tasks", **self.options))
            for state in states:
                after = ""
                while page := await queue.browse(state, after=after, limit=1000):
                    found |= {kept.id: kept for kept in page}
                    after = page[-1].cursor
        return found

    async def drained(self, patience: float = TIMEOUT) -> None:
        """Wait until nothing is left to handle."""
        async with Database(self.url) as db:
            queue = await db.use_plugin(QueuePlugin(resource="tasks", **self.options))
            give_up = now() + patience
            port = open_backend(db.store, queue.queue, db.components)
            # In one look: between two a message may go from one state to the other.
            while left := {*await port.count()} & {*LIVE}:
                assert now() < give_up, f"messages are left: {left}"
                await asyncio.sleep(0.1)


def judge(depot: Depot, finished: Mapping[str, MessageInfo]) -> Counter[str]:
    """Count what became of messages that were all handled; complain of what must not be.

    Raises:
        AssertionError: one is lost, came from nowhere, or was handled twice without a reason.
    """
    acknowledged = {
        name: (fact.who, number)
        for fact in depot.told("acknowledged")
        for name, number in fact["ids"].items()
    }
    perhaps = {(fact.who, number) for fact in depot.told("unknown") for number in fact["numbers"]}
    lost = acknowledged.keys() - finished.keys()
    assert not lost, f"{len(lost)} were lost: {sorted(lost)[:5]}"
    begins: dict[str, list[Handling]] = defaultdict(list)
    for fact in depot.told("begins"):
        origin = (fact["by"], fact["n"])
        assert acknowledged.get(fact.id, origin) == origin, f"{fact} is not what was pushed"
        assert fact.id in acknowledged or origin in perhaps, f"{fact} came from nowhere"
        begins[fact.id].append(fact)
    assert begins.keys() >= acknowledged.keys()
    repeats = [_explain_repeats(depot, each) for each in begins.values()]
    return Counter(
        acknowledged=len(acknowledged),
        perhaps=len(perhaps),
        finished=len(finished),
        again=sum(repeats),
    )


def _explain_repeats(depot: Depot, begins: Iterable[Handling]) -> int:
    """Count how often a message was handled again; each time its claim must have ended."""
    ordered = sorted(begins, key=lambda fact: fact["epoch"])
    epochs = [fact["epoch"] for fact in ordered]
    assert len(epochs) == len(set(epochs)), f"two had one delivery: {ordered}"
    for before, after in itertools.pairwise(ordered):
        assert _has_ended(depot, before, after), f"handled again: {before} {after}"
    return len(ordered) - 1


def _has_ended(depot: Depot, before: Handling, after: Handling) -> bool:
    """Say whether a claim was given back, lost, or its process struck, before the next began."""
    (hand,) = (each for each in depot.everybody if each.name == before.who)
    if hand.killed is not None and before.at <= hand.killed <= after.at:
        return True
    ends = {"message-returned", "message-retry", "message-recovered", "message-lost"}
    return any(fact.id == before.id and fact.at >= before.at for fact in depot.told(*ends))
