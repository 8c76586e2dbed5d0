"""The demo with real processes: its leader is killed, another worker is frozen."""

from pathlib import Path
from typing import Any

import pytest
from servers import Locate

from jobsync import Components
from jobsync.demo.show import DemoScreen, DemoShow


class Listening(DemoScreen):
    """A screen that remembers what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def tell(self, text: str) -> None:
        """Remember an event."""
        self.events.append(text)


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "s3"])
async def test_nothing_is_lost_or_doubled_in_the_demo(
    kind: str, locate: Locate, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """The verdict is good, and the viewer has seen a death, a freeze and a new leader."""
    if kind != "sqlite" and not full_scale:
        pytest.skip("at full scale; the stores have their own tests")
    screen = Listening()
    seconds = 30.0 if full_scale else 3.0
    show = DemoShow(locate(kind), 4, seconds, screen, tmp_path, Components.system())
    verdict = await show.run()
    assert verdict.is_good, (verdict, screen.events)
    assert verdict.enqueued >= seconds * 30
    for part in ("SIGKILL to", "leads with epoch 2", "is started", "SIGSTOP to", "SIGCONT to"):
        assert any(part in event for event in screen.events), (part, screen.events)
    proof.record("demo", kind=kind, again=verdict.again, vacancy=round(verdict.vacancy, 1))
