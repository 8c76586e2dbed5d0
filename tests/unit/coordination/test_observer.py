"""When an observer must check again."""

from chance import FakeClock, SeededRandomness

from jobsync import Components
from jobsync.coordination.observer import Observer
from jobsync.core.trust import Timing
from jobsync.events import Events
from jobsync.stores.memory import MemoryStore

TIMING = Timing(heartbeat=5, timeout=15)


async def test_what_falls_due_during_a_look_is_due_after_it() -> None:
    """A read that returned just before an expiry misses it; the next check does not wait."""
    clock = FakeClock()
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    observer = Observer(MemoryStore(components=components), components, TIMING)
    started = clock.mono()
    observer.update({"worker.1": None})
    expires = started + TIMING.timeout
    clock.mono_seconds += TIMING.timeout - 0.01
    checked = clock.mono()
    clock.mono_seconds += 0.02
    assert observer.next_expiry(checked) == expires
    assert observer.next_expiry(clock.mono()) is None
