"""Candidates on one store, each a real process, and what must hold of all that they say."""

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import candidate
import msgspec
from ledger import Fact, Ledger
from waiting import TIMEOUT, now, until

from jobsync import Store, open_store
from jobsync.coordination.role import ROLES, Role, name_role, read_role
from jobsync.core.trust import Timing

__all__ = ["Citizen", "Electorate", "check_beliefs", "check_writes"]


class Citizen:
    """A candidate, seen from outside."""

    def __init__(self, orders: candidate.Orders, script: str) -> None:
        self.works = orders.works
        self.path = Path(orders.words)
        self.is_paused = False
        self.is_doomed = False
        self._ledger = Ledger(self.path, Fact)
        self._stderr = self.path.with_suffix(".err")
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, script, msgspec.json.encode(orders).decode()],
                stdin=subprocess.PIPE,
                stderr=stderr,
            )

    def __repr__(self) -> str:
        return self.path.stem

    @property
    def is_running(self) -> bool:
        """Whether it gets on, neither gone nor stopped."""
        return self.process.poll() is None and not self.is_paused

    @property
    def complaints(self) -> str:
        """What it wrote to stderr: nothing, as long as nothing dies unheard."""
        return self._stderr.read_text()

    @property
    def worker(self) -> str:
        """Its name in the fleet."""
        return str(self.last("stands")["worker"])

    def order(self, *what: object) -> None:
        """Tell it to do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, what)).encode() + b"\n")
        self.process.stdin.flush()

    def strike(self, signal_: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(signal_)
        match signal_:
            case signal.SIGSTOP:
                self.is_paused = True
            case signal.SIGCONT:
                self.is_paused = False
            case _:
                self.is_doomed = True

    async def ended(self) -> int:
        """Wait until it is gone; give its exit status."""
        await until(lambda: self.process.poll() is not None, f"{self} ends")
        return self.process.returncode

    def words(self, *what: str, since: float = 0.0) -> list[Fact]:
        """Give what it told, of some kinds or of all.

        Raises:
            AssertionError: it is gone, though nobody has struck it.
        """
        status = self.process.poll()
        assert status is None or self.is_doomed, f"{self} ended, {status}: {self.complaints}"
        return [word for word in self._ledger.told(*what) if word.at >= since]

    def last(self, what: str) -> Fact:
        """Give the latest word of a kind."""
        return self.words(what)[-1]

    def said(self, what: str, since: float = 0.0) -> bool:
        """Say whether it told such a fact."""
        return bool(self.words(what, since=since))

    def beats(self, begin: float, end: float) -> int:
        """Count its own beats between two moments."""
        own = (w for w in self.words("coord:worker-heartbeat") if w["worker_id"] == self.worker)
        return sum(begin < word.at < end for word in own)


class Electorate:
    """Candidates on one store.

    Args:
        url: the store.
        folder: where their words are kept.
        timing: of all of them.
        works: what each stands for, unless told otherwise.
        script: what each of them runs.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        timing: Timing,
        works: Sequence[str] = ("schedule", "sweep"),
        script: str = candidate.__file__,
    ) -> None:
        self.works = works
        self.timing = timing
        self.everybody: list[Citizen] = []
        self._url = url
        self._folder = folder
        self._script = script
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        for citizen in self.everybody:
            if citizen.process.poll() is None:
                citizen.strike(signal.SIGKILL)
            citizen.process.wait()
            assert citizen.process.stdin is not None
            citizen.process.stdin.close()

    @property
    def running(self) -> list[Citizen]:
        """Those who get on."""
        return [citizen for citizen in self.everybody if citizen.is_running]

    def prepare(self, works: Sequence[str] | None = None, manner: str = "") -> Citizen:
        """Start a process that stands for nothing before it is told to."""
        number = next(self._numbers)
        orders = candidate.Orders(
            url=self._url,
            words=str(self._folder / f"candidate-{number}.jsonl"),
            works=tuple(self.works if works is None else works),
            options={
                "heartbeat_interval": self.timing.beat,
                "worker_timeout": self.timing.timeout,
                "coordinator_work_interval": self.timing.beat / 4,
            },
            manner=manner,
        )
        citizen = Citizen(orders, self._script)
        self.everybody.append(citizen)
        return citizen

    async def start(self, count: int, works: Sequence[str] | None = None) -> list[Citizen]:
        """Start processes, and let them stand all at once."""
        return await self.let_go([self.prepare(works) for _ in range(count)])

    async def let_go(self, citizens: list[Citizen]) -> list[Citizen]:
        """Let processes that were prepared stand, all at once."""
        await until(lambda: all(each.said("ready") for each in citizens), "all are ready")
        for citizen in citizens:
            citizen.order("go")
        return citizens

    async def standing(self, citizens: Iterable[Citizen]) -> None:
        """Wait until candidates have joined."""
        wanted = list(citizens)
        await until(lambda: all(each.said("stands") for each in wanted), f"{wanted} stand")

    def believers(self, work: str) -> list[Citizen]:
        """Give those who get on and last said that they lead a work."""
        return [each for each in self.running if _belief(each, work) is not None]

    async def leaders(self) -> dict[str, Citizen]:
        """Wait until the store and the processes agree on one leader for each work."""
        found: dict[str, Citizen] = {}
        store = await open_store(self._url)
        try:
            give_up = now() + TIMEOUT
            while not (found := await self._find_leaders(store)):
                assert now() < give_up, f"nobody is agreed on; {await self.roles(store)}"
        finally:
            await store.close()
        return found

    async def roles(self, store: Store) -> dict[str, Role | None]:
        """Read who leads what."""
        keys = [f"{ROLES}{name_role('default', work)}" for work in self.works]
        records = await store.get_many(keys)
        return {work: read_role(r) for work, r in zip(self.works, records, strict=True)}

    async def _find_leaders(self, store: Store) -> dict[str, Citizen]:
        """Give the leader of each work, if between two equal looks at the store all agreed."""
        begun, before = now(), await self.roles(store)
        await until(
            lambda: all(each.said("believes", since=begun) for each in self.running),
            f"{self.running} tell what they believe",
        )
        words = {each: each.last("believes") for each in self.running}
        if before != await self.roles(store):
            return {}
        leaders = {}
        for work, role in before.items():
            believers = [each for each, word in words.items() if word["epochs"].get(work)]
            if role is None or len(believers) != 1:
                return {}
            word = words[believers[0]]
            if (word["epochs"][work], word["incarnation"]) != (role.epoch, role.owner):
                return {}
            leaders[work] = believers[0]
        return leaders

    async def singletons(self) -> dict[str, Any]:
        """Read what the leaders have written."""
        store = await open_store(self._url)
        records = await store.get_many([f"single/{work}" for work in self.works])
        await store.close()
        return {work: r and r.value for work, r in zip(self.works, records, strict=True)}

    def told(self, *what: str) -> list[Fact]:
        """Give everybody's words of some kinds, by time."""
        words = (word for citizen in self.everybody for word in citizen.words(*what))
        return sorted(words, key=lambda word: word.at)

    def promotions(self, work: str) -> list[Fact]:
        """Give the terms of a work that began, by time."""
        role = name_role("default", work)
        return [w for w in self.told("coord:coordinator-promoted") if w["role"] == role]

    def silent_deaths(self) -> list[str]:
        """Say what ended without a word to its owner, in any of the processes."""
        found = [f"{each}: {each.complaints}" for each in self.everybody if each.complaints]
        found += [f"member failed: {word}" for word in self.told("coord:member-failed")]
        # A term that ends while it shuts earlier ones out is refused, and tells so.
        failed = [w for w in self.told("jobsync:handler-failed") if "Fenced" not in w["error"]]
        found += [f"a hook failed: {word}" for word in failed]
        found += [f"task ended: {word}" for word in self.told("believes") if word["dead_tasks"]]
        return found


def _belief(citizen: Citizen, work: str) -> int | None:
    words = citizen.words("believes")
    return words[-1]["epochs"].get(work) if words else None


def check_beliefs(words: Iterable[Fact], work: str) -> list[str]:
    """Check that nobody believed to lead in a term after somebody did in a later one.

    A belief was asked for between `begun` and the word's own moment. So a term that was
    believed in from `begun` on, when a later term had already been, overlaps with it surely.
    """
    believed = [w for w in words if w.what == "believes" and w["epochs"].get(work) is not None]
    first: dict[int, float] = {}
    for word in believed:
        epoch = word["epochs"][work]
        first[epoch] = min(word.at, first.get(epoch, word.at))
    return [
        f"{work}: epoch {word['epochs'][work]} was believed in after epoch {later}: {word}"
        for word in believed
        for later, since in first.items()
        if later > word["epochs"][work] and since < word["begun"]
    ]


def check_writes(words: Iterable[Fact], work: str, final: Mapping[str, Any] | None) -> list[str]:
    """Check that no write of an earlier term was accepted after one of a later term.

    Each write counts up from the very one that it replaces, so the counts give the order in
    which the store accepted them: a write that came between two others, or over them, would
    show as a count that was accepted twice, or as an epoch that goes back. Writes whose
    outcome nobody heard of (a process was killed, or work cancelled) may fill a gap only.
    """
    mine = [word for word in words if word.what in {"writes", "wrote"} and word["work"] == work]
    accepted = sorted((w for w in mine if w.what == "wrote"), key=lambda w: int(w["count"]))
    sent = {(w["count"], w["epoch"], w["by"]) for w in mine if w.what == "writes"}
    if final is None:
        return [f"{work}: nothing stands where {len(accepted)} writes were accepted"]
    violations = []
    for earlier, later in itertools.pairwise(accepted):
        if earlier["count"] == later["count"]:
            violations.append(f"{work}: both were accepted: {earlier} {later}")
        if earlier["epoch"] > later["epoch"]:
            violations.append(f"{work}: accepted late: {later} after {earlier}")
    owners: dict[int, set[str]] = {}
    for word in mine:
        owners.setdefault(word["epoch"], set()).add(word["by"])
    violations += [f"{work}: epoch {e} has owners {by}" for e, by in owners.items() if len(by) > 1]
    counts = {word["count"] for word in accepted}
    unheard = {count for count, _, _ in sent} - counts
    missing = set(range(1, final["count"] + 1)) - counts - unheard
    violations += [f"{work}: nobody made write {count}" for count in sorted(missing)]
    if (final["count"], final["epoch"], final["by"]) not in sent:
        violations.append(f"{work}: nobody wrote what stands: {final}")
    if accepted and (final["count"], final["epoch"]) < (
        accepted[-1]["count"],
        accepted[-1]["epoch"],
    ):
        violations.append(f"{work}: {accepted[-1]} was accepted, but {final} stands")
    return violations
