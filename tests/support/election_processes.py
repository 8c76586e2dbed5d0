"""Candidates on one store, each a real process, and the checks of all that they report."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import election_worker
from processes import ProcessGroup, WorkerProcess
from waiting import TIMEOUT, now, until
from worker_protocol import Fact

from jobsync import Store, open_store
from jobsync.coordination.role import ROLES, Role, name_role, read_role
from jobsync.core.trust import Timing

__all__ = ["CandidateProcess", "ElectionProcesses", "check_beliefs", "check_writes"]


class CandidateProcess(WorkerProcess):
    """A candidate; it ends only when it is told to."""

    roles: Sequence[str] = ()

    @property
    def worker_id(self) -> str:
        """Its id in the fleet."""
        return str(self.last("joined")["worker"])

    def count_heartbeats(self, begin: float, end: float) -> int:
        """Count its own heartbeats between two moments."""
        beats = self.facts("coord:worker-heartbeat")
        return sum(begin < beat.at < end for beat in beats if beat["worker_id"] == self.worker_id)

    def check_exit(self) -> None:
        """Check that it runs, or was stopped or killed by the test."""
        assert self.is_alive or self.is_ending, f"{self} ended: {self.log}"


class ElectionProcesses(ProcessGroup[CandidateProcess]):
    """Candidates on one store.

    Args:
        url: the store.
        folder: where their facts and logs are kept.
        timing: of all of them.
        roles: what each is a candidate for by default.
        script: what each of them runs.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        timing: Timing,
        roles: Sequence[str] = ("schedule", "sweep"),
        script: str = election_worker.__file__,
    ) -> None:
        super().__init__(folder, CandidateProcess)
        self.roles = roles
        self._url = url
        self._timing = timing
        self._script = script

    def prepare(
        self,
        roles: Sequence[str] | None = None,
        shutdown: str = "",
        *,
        within: Sequence[str] = (),
    ) -> CandidateProcess:
        """Start a process that joins when it is released, perhaps within another command."""
        roles = self.roles if roles is None else roles
        settings = {
            "heartbeat_interval": self._timing.heartbeat,
            "worker_timeout": self._timing.timeout,
            "coordinator_work_interval": self._timing.heartbeat / 4,
        }
        worker = self.launch(
            self._script,
            "candidate",
            url=self._url,
            roles=roles,
            settings=settings,
            shutdown=shutdown,
            within=within,
        )
        worker.roles = roles
        return worker

    async def start(self, count: int, roles: Sequence[str] | None = None) -> list[CandidateProcess]:
        """Start processes that join all at once."""
        return await self.release([self.prepare(roles) for _ in range(count)])

    def facts(self, *what: str) -> list[Fact]:
        """Return what all reported, of some kinds or all, by time.

        Raises:
            AssertionError: a process ended although nobody told it to.
        """
        self.check_exits()
        return sorted(super().facts(*what), key=lambda fact: fact.at)

    def find_believers(self, role: str) -> list[CandidateProcess]:
        """Return the running processes that last reported to coordinate a role."""
        return [
            worker
            for worker in self.running
            if any(fact["epochs"].get(role) is not None for fact in worker.facts("believes")[-1:])
        ]

    async def leaders(self) -> dict[str, CandidateProcess]:
        """Wait until the store and the processes agree on one leader of each role."""
        found: dict[str, CandidateProcess] = {}
        store = await open_store(self._url)
        try:
            deadline = now() + TIMEOUT
            while not (found := await self._find_leaders(store)):
                assert now() < deadline, f"no agreement; stored: {await self._read_roles(store)}"
        finally:
            await store.close()
        return found

    async def _find_leaders(self, store: Store) -> dict[str, CandidateProcess]:
        """Return the leader of each role, if all agreed between two equal reads of the store."""
        begun, before = now(), await self._read_roles(store)
        await until(
            lambda: all(each.has_reported("believes", since=begun) for each in self.running),
            f"{self.running} report what they believe",
        )
        facts = {each: each.last("believes") for each in self.running}
        if before != await self._read_roles(store):
            return {}
        leaders = {}
        for name, role in before.items():
            believers = [each for each, fact in facts.items() if fact["epochs"].get(name)]
            if role is None or len(believers) != 1:
                return {}
            fact = facts[believers[0]]
            if (fact["epochs"][name], fact["incarnation"]) != (role.epoch, role.owner):
                return {}
            leaders[name] = believers[0]
        return leaders

    async def _read_roles(self, store: Store) -> dict[str, Role | None]:
        keys = [f"{ROLES}{name_role('default', role)}" for role in self.roles]
        records = await store.get_many(keys)
        return {role: read_role(r) for role, r in zip(self.roles, records, strict=True)}

    async def read_singletons(self) -> dict[str, Any]:
        """Read what the leaders have written."""
        store = await open_store(self._url)
        records = await store.get_many([f"single/{role}" for role in self.roles])
        await store.close()
        return {role: r and r.value for role, r in zip(self.roles, records, strict=True)}

    def promotions(self, role: str) -> list[Fact]:
        """Return the terms of a role that began, by time."""
        name = name_role("default", role)
        return [f for f in self.facts("coord:coordinator-promoted") if f["role"] == name]

    def find_silent_failures(self) -> list[str]:
        """Return what failed in any of the processes without an error to its owner."""
        found = [f"{each}: {each.log}" for each in self.workers if each.log]
        found += [f"member failed: {fact}" for fact in self.facts("coord:member-failed")]
        # A term that ends while it shuts out earlier ones is refused, and reports that.
        failed = [f for f in self.facts("jobsync:handler-failed") if "Fenced" not in f["error"]]
        found += [f"a hook failed: {fact}" for fact in failed]
        found += [f"task ended: {fact}" for fact in self.facts("believes") if fact["dead_tasks"]]
        return found


def check_beliefs(facts: Iterable[Fact], role: str) -> list[str]:
    """Check that nobody believed in its term after somebody believed in a later one.

    The belief was read between `asked_at` and the fact's own moment. So a term that was believed
    in although a later one had been believed in before `asked_at` surely overlaps with it.
    """
    believed = [f for f in facts if f.what == "believes" and f["epochs"].get(role) is not None]
    first: dict[int, float] = {}
    for fact in believed:
        epoch = fact["epochs"][role]
        first[epoch] = min(fact.at, first.get(epoch, fact.at))
    return [
        f"{role}: epoch {fact['epochs'][role]} was believed in after epoch {later}: {fact}"
        for fact in believed
        for later, since in first.items()
        if later > fact["epochs"][role] and since < fact["asked_at"]
    ]


def check_writes(facts: Iterable[Fact], role: str, final: Mapping[str, Any] | None) -> list[str]:
    """Check that no write of an earlier term was accepted after one of a later term.

    Each write counts up from the one that it replaces, so the counts are the order in which the
    store accepted them. A write that came between two others, or over them, shows as a count that
    was accepted twice, or as an epoch that goes back. Writes without a known outcome (a process
    was killed, or its work cancelled) may only fill a gap.
    """
    writes = [f for f in facts if f.what in {"writes", "wrote"} and f["role"] == role]
    accepted = sorted((f for f in writes if f.what == "wrote"), key=lambda f: int(f["count"]))
    sent = {(f["count"], f["epoch"], f["by"]) for f in writes if f.what == "writes"}
    if final is None:
        return [f"{role}: nothing is stored, but {len(accepted)} writes were accepted"]
    violations = []
    for earlier, later in itertools.pairwise(accepted):
        if earlier["count"] == later["count"]:
            violations.append(f"{role}: both were accepted: {earlier} {later}")
        if earlier["epoch"] > later["epoch"]:
            violations.append(f"{role}: accepted late: {later} after {earlier}")
    owners: dict[int, set[str]] = {}
    for fact in writes:
        owners.setdefault(fact["epoch"], set()).add(fact["by"])
    violations += [f"{role}: epoch {e} has owners {by}" for e, by in owners.items() if len(by) > 1]
    counts = {fact["count"] for fact in accepted}
    unknown = {count for count, _, _ in sent} - counts
    missing = set(range(1, final["count"] + 1)) - counts - unknown
    violations += [f"{role}: nobody made write {count}" for count in sorted(missing)]
    if (final["count"], final["epoch"], final["by"]) not in sent:
        violations.append(f"{role}: nobody wrote what is stored: {final}")
    if accepted and (final["count"], final["epoch"]) < (
        accepted[-1]["count"],
        accepted[-1]["epoch"],
    ):
        violations.append(f"{role}: {accepted[-1]} was accepted, but {final} is stored")
    return violations
