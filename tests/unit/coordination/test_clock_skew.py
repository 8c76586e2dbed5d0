"""The comparison of a machine's wall clock with a server's that tells its time in listings."""

from collections.abc import Sequence

import msgspec
import pytest
from chance import FakeClock, SeededRandomness
from fleets import BilledStore
from hypothesis import given
from hypothesis import strategies as st

from jobsync import Components, Events
from jobsync.coordination.clock_skew import ClockComparison, WriteTimes, list_with_probe
from jobsync.stores.contract import Change, Head, Outcome

KEY = "session/a.1"


def compare(
    skew: float,
    *,
    sent: float = 10.0,
    written: float = 10.01,
    known: float = 10.02,
    has_fraction: bool = False,
) -> tuple[FakeClock, ClockComparison]:
    """Return a clock with this skew, compared by a write at moments of the monotonic clock."""
    clock = FakeClock()
    boot = 1_700_000_000.0
    clock.mono_seconds, clock.wall_seconds = known, boot + known + skew
    server_time = boot + written
    head = Head(KEY, "v", server_time if has_fraction else float(int(server_time)))
    comparison = ClockComparison(clock)
    start = clock.mono()
    writes = {"v": WriteTimes(start + (sent - known), start)}
    comparison.note_listed(head, writes)
    return clock, comparison


@pytest.mark.parametrize("skew", [-9000.0, -92.0, -31.0, 31.0, 92.0, 9000.0])
@pytest.mark.parametrize("has_fraction", [False, True])
def test_a_wrong_clock_is_measured_to_the_second(skew: float, *, has_fraction: bool) -> None:
    """What a listing leaves out is never added to the error."""
    _, comparison = compare(skew, has_fraction=has_fraction)
    assert comparison.skew is not None
    assert abs(skew) - 1.03 <= abs(comparison.skew) <= abs(skew)
    assert comparison.skew * skew > 0


@given(
    sent=st.floats(10, 20),
    until_written=st.floats(0, 100),
    until_known=st.floats(0, 100),
    has_fraction=st.booleans(),
)
def test_an_honest_clock_is_never_accused(
    sent: float, until_written: float, until_known: float, *, has_fraction: bool
) -> None:
    """However slow a request was, and whether its way there or back was slow."""
    written = sent + until_written
    _, comparison = compare(
        0.0,
        sent=sent,
        written=written,
        known=written + until_known,
        has_fraction=has_fraction,
    )
    assert comparison.skew == pytest.approx(0, abs=1e-5)


def test_a_step_of_the_wall_clock_counts_at_once() -> None:
    """Without another heartbeat; and no longer once it is corrected."""
    clock, comparison = compare(0.0)
    clock.wall_seconds += 3600
    clock.mono_seconds += 3600
    assert comparison.skew == 0
    clock.wall_seconds += 95
    assert comparison.skew is not None
    assert 93 < comparison.skew <= 95
    clock.wall_seconds -= 190
    assert comparison.skew is not None
    assert -95 <= comparison.skew < -93
    clock.wall_seconds += 95
    assert comparison.skew == 0


def test_a_write_whose_reply_is_under_way_is_compared_when_that_arrives() -> None:
    """A listing may show a version before its writer knows it."""
    clock = FakeClock()
    comparison = ClockComparison(clock)
    clock.wall_seconds += 60
    comparison.note_listed(Head(KEY, "v2", 1_700_000_000.0), {})
    assert comparison.skew is None
    assert comparison.age is None
    comparison.note_writes({"v1": WriteTimes(clock.mono(), clock.mono())})
    assert comparison.skew is None
    comparison.note_writes({"v2": WriteTimes(clock.mono(), clock.mono())})
    assert comparison.skew == pytest.approx(59)
    assert comparison.age == 0


@pytest.mark.parametrize(
    "later", [None, Head(KEY, "v3"), Head(KEY, "v3", 1_700_000_005.0)], ids=str
)
def test_the_reply_to_a_listed_write_counts_whatever_is_listed_next(later: Head | None) -> None:
    """Nobody has looked between the reply and the next listing, whose own write is under way."""
    clock = FakeClock()
    comparison = ClockComparison(clock)
    clock.wall_seconds += 60
    comparison.note_listed(Head(KEY, "v2", 1_700_000_000.0), {})
    write = WriteTimes(clock.mono(), clock.mono())
    clock.mono_seconds += 5
    comparison.note_listed(later, {"v2": write})
    assert comparison.age == 5
    if later is None or later.written_at is None:
        return
    # And the later one counts from its own reply on.
    comparison.note_writes({"v2": write, "v3": WriteTimes(clock.mono(), clock.mono())})
    assert comparison.age == 0


@pytest.mark.parametrize("later", [None, Head(KEY, "v3")], ids=str)
def test_a_listing_that_tells_nothing_leaves_the_one_before(later: Head | None) -> None:
    """The reply to the write that was listed then may still be under way, and counts."""
    clock = FakeClock()
    comparison = ClockComparison(clock)
    clock.wall_seconds += 60
    comparison.note_listed(Head(KEY, "v2", 1_700_000_000.0), {})
    comparison.note_listed(later, {"v1": WriteTimes(clock.mono(), clock.mono())})
    assert comparison.skew is None
    comparison.note_writes({"v2": WriteTimes(clock.mono(), clock.mono())})
    assert comparison.skew == pytest.approx(59)


def test_a_listing_without_times_tells_nothing() -> None:
    """Nor does one without the worker's own session."""
    clock = FakeClock()
    comparison = ClockComparison(clock)
    writes = {"v": WriteTimes(clock.mono(), clock.mono())}
    comparison.note_listed(Head(KEY, "v"), writes)
    comparison.note_listed(None, writes)
    assert comparison.skew is None


class ServerTime(BilledStore):
    """A bucket whose listings tell the server's time, if they tell any."""

    tells = True

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        found = await super().heads(prefix, after=after, until=until, limit=limit)
        return [
            msgspec.structs.replace(head, written_at=None) if not self.tells else head
            for head in found
        ]


class SlowServer(ServerTime):
    """A bucket far away: each request takes some seconds there, and some back."""

    def __init__(self, clocks: list[FakeClock], there: float, back: float) -> None:
        components = Components(clock=clocks[0], randomness=SeededRandomness(1), events=Events())
        super().__init__(components=components)
        self.clocks, self.there, self.back = clocks, there, back

    def pass_time(self, seconds: float) -> None:
        """Advance the time everywhere."""
        for clock in self.clocks:
            clock.mono_seconds += seconds
            clock.wall_seconds += seconds

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self.pass_time(self.there)
        outcomes = await super().write(changes)
        self.pass_time(self.back)
        return outcomes

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        self.pass_time(self.there)
        found = await super().heads(prefix, after=after, until=until, limit=limit)
        self.pass_time(self.back)
        return found


@pytest.mark.parametrize("there", [0.0, 5.0, 100.0])
@pytest.mark.parametrize("back", [0.0, 5.0, 100.0])
@pytest.mark.parametrize("skew", [-3600.0, 0.0, 3600.0])
async def test_a_probe_says_when_it_was_sent_and_known_however_slow_it_was(
    there: float, back: float, skew: float
) -> None:
    """So an honest clock is not accused, and a wrong one is by no more than it is wrong."""
    server, here = FakeClock(), FakeClock()
    here.wall_seconds += skew
    store = SlowServer([server, here], there, back)
    components = Components(clock=here, randomness=SeededRandomness(2), events=Events())
    listing = await list_with_probe(store, "meta/level/probe-", components)
    comparison = ClockComparison(here)
    assert listing.probe is not None
    comparison.note_listed(listing.probe, {listing.probe.version: listing.write})
    assert comparison.skew is not None
    wrong = max(0.0, abs(skew) - 2 * (there + back) - 1.1)
    assert wrong <= abs(comparison.skew) <= abs(skew) + 1e-5
    assert comparison.skew * skew >= 0


@pytest.mark.parametrize("skew", [-7200.0, 0.0, 7200.0])
@pytest.mark.parametrize("tells", [True, False])
async def test_a_probe_removes_itself_and_what_was_left_an_hour_ago_by_the_servers_clock(
    skew: float, *, tells: bool
) -> None:
    """Whatever this machine's clock says; other records of the level, however old, stay."""
    server = FakeClock()
    events, randomness = Events(), SeededRandomness(1)
    store = ServerTime(components=Components(clock=server, randomness=randomness, events=events))
    for age, name in [(3601.0, "probe-old"), (3599.0, "probe-young"), (9999.0, "note-old")]:
        server.wall_seconds = 1_700_000_000.0 - age
        await store.create(f"meta/level/{name}", {})
    server.wall_seconds = 1_700_000_000.0
    here = FakeClock()
    here.wall_seconds += skew
    components = Components(clock=here, randomness=randomness, events=events)
    store.tells = tells
    listing = await list_with_probe(store, "meta/level/probe-", components)
    assert listing.now == (server.wall_seconds if tells else None)
    assert listing.probe is not None
    left = {head.key.removeprefix("meta/level/") for head in await store.heads("meta/level/")}
    assert left == {"probe-young", "note-old"} | ({"probe-old"} if not tells else set())
