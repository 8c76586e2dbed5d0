"""Three candidates elect a leader; it goes, the next one leads, and a late write is refused.

Run it with `python examples/elect.py`.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from jobsync import Fenced, Hooks, Membership, Term

CANDIDATES = 3
RECORD = "report/progress"
TIMING: dict[str, Any] = {"heartbeat_interval": 0.2, "worker_timeout": 1}


class Candidate:
    """One worker that wants to lead the report; usually a process of its own."""

    def __init__(self, name: str, led: asyncio.Queue["Candidate"]) -> None:
        self.name = name
        self.terms: list[Term] = []
        self._led = led

    async def join(self, url: str) -> None:
        """Become a candidate."""
        self.membership = await Membership.join(url, **TIMING)
        hooks = Hooks(on_become=self._lead)
        await self.membership.coordinate("report", hooks, governs=[RECORD])

    async def _lead(self, term: Term) -> None:
        self.terms.append(term)
        done = await term.get(RECORD) or []
        await term.put(RECORD, [*done, self.name])
        print(f"  {self.name} leads in epoch {term.epoch}, after {done or 'nobody'}")
        await self._led.put(self)


async def run(url: str) -> bool:
    """Let each candidate lead in turn; return whether only the last one can write."""
    led: asyncio.Queue[Candidate] = asyncio.Queue()
    candidates = [Candidate(f"candidate-{number}", led) for number in range(CANDIDATES)]
    for candidate in candidates:
        await candidate.join(url)
    leaders = []
    for _ in candidates:
        leader = await led.get()
        leaders.append(leader)
        if len(leaders) < CANDIDATES:
            await leader.membership.leave()  # the others take over at once
    refused = 0
    for former in leaders[:-1]:
        try:
            await former.terms[-1].put(RECORD, ["I still lead"])
        except Fenced as error:
            refused += 1
            print(f"  {former.name} was refused: {error}")
    last = leaders[-1]
    written = await last.terms[-1].get(RECORD)
    await last.membership.leave()
    epochs = [leader.terms[-1].epoch for leader in leaders]
    print(f"epochs {epochs}, and the record says {written}")
    is_right = refused == CANDIDATES - 1 and written == [leader.name for leader in leaders]
    print("one leader at a time" if is_right else "NOT ONE LEADER AT A TIME")
    return is_right and epochs == sorted(set(epochs))


def main() -> int:
    """Run the example; return 0 if there was one leader at a time."""
    with tempfile.TemporaryDirectory() as folder:
        print(f"{CANDIDATES} candidates want to lead the same work")
        return 0 if asyncio.run(run(f"sqlite:///{Path(folder) / 'demo.db'}")) else 1


if __name__ == "__main__":
    sys.exit(main())
