"""What a role tells: its past terms, why it is free, and for how long others go first."""

import msgspec
import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, CoordinatorSettings, Events
from jobsync.coordination.role import (
    CHECK_FRACTION,
    ColdStart,
    Role,
    name_role,
    read_role,
    worker_of,
)
from jobsync.core.codec import Json
from jobsync.core.trust import Timing
from jobsync.errors import Corrupt, Invalid, NewerFormat
from jobsync.stores.contract import Record
from jobsync.stores.memory import MemoryStore

BEAT, TIMEOUT = 5.0, 15.0
NOW = 1_700_000_000.0


def make(owner: str | None = "worker-1.a", **options: object) -> Role:
    """Return a role."""
    values: dict[str, object] = {"epoch": 1, "since": NOW, "until": NOW, "timeout": TIMEOUT}
    return Role(owner=owner, **{**values, **options})  # type: ignore[arg-type]


def test_it_remembers_the_latest_eight_terms_in_order() -> None:
    """However many there were; one that nobody held adds nothing."""
    role = make()
    for epoch in range(1, 20):
        role = make(f"worker-{epoch}.a", epoch=epoch, past=role.past, since=NOW + epoch)
        role = role.without_owner(f"end {epoch}", NOW + epoch + 0.5)
        assert role.past == role.past_after("nobody", NOW + epoch + 1)
        found = [(term.epoch, term.worker, term.why) for term in role.past]
        expected = [(each, f"worker-{each}", f"end {each}") for each in range(1, epoch + 1)]
        assert found == expected[-8:]
        assert [term.ended - term.since for term in role.past] == [0.5] * len(found)
        assert (role.owner, role.former, role.epoch) == (None, f"worker-{epoch}.a", epoch)
        assert (role.since, role.successor) == (NOW + epoch + 0.5, None)


def test_a_released_role_keeps_what_its_owner_has_not_changed() -> None:
    """It names the successor that was chosen now, not an earlier one, and who had it last."""
    role = make("w.a", epoch=3, timeout=7.0, active=("w", "v"), successor="u.1", former="u.0")
    for chosen in (None, "v.1"):
        left = role.without_owner("handed over", NOW + 5, chosen)
        assert left == msgspec.structs.replace(
            role, owner=None, successor=chosen, former="w.a", since=NOW + 5, past=left.past
        )
        (term,) = left.past
        assert (term.epoch, term.worker, term.why) == (3, "w", "handed over")
        assert (term.since, term.ended) == (NOW, NOW + 5)


@pytest.mark.parametrize("worker", ["w", "w.1", "host.example.org", "a..b"])
def test_a_worker_may_have_dots_in_its_name(worker: str) -> None:
    """Its session adds one part."""
    assert worker_of(f"{worker}.x7") == worker
    role = make(f"{worker}.a")
    assert role.why_free_to(f"{worker}.b") == "session lost"
    assert role.why_free_to("w.a.b") == "died"


def test_a_role_has_a_name_that_is_legal_in_keys() -> None:
    """Of its namespace and its work, which may contain anything; the wrong one is named."""
    assert name_role("default", "jobs") == "default/jobs"
    assert name_role("a/b", "c d") == "a.Fb/c!20d"
    for place, names in (("namespace", ("", "x")), ("work", ("x", ""))):
        with pytest.raises(Invalid) as caught:
            name_role(*names)
        assert caught.value.field == place


@pytest.mark.parametrize(
    ("elapsed", "is_lately"),
    [(-3600.0, False), (-0.1, False), (0.0, True), (14.9, True), (15.0, False), (3600.0, False)],
)
def test_a_release_is_late_only_by_a_plausible_time(elapsed: float, *, is_lately: bool) -> None:
    """The time comes from another machine's clock, which may be ahead or behind."""
    released = make().without_owner("stopped", NOW)
    assert released.was_released_lately(NOW + elapsed, TIMEOUT) is is_lately
    assert not make(None).was_released_lately(NOW + elapsed, TIMEOUT)


@pytest.mark.parametrize(
    ("elapsed", "wait"),
    [
        *((-3600.0, BEAT), (-0.1, BEAT), (0.0, BEAT), (1.0, BEAT - 1.0)),
        *((CHECK_FRACTION * BEAT, (1 - CHECK_FRACTION) * BEAT), (4.9, (1 - CHECK_FRACTION) * BEAT)),
        *((BEAT, BEAT), (3600.0, BEAT)),
    ],
)
def test_others_go_first_for_the_rest_of_a_plausible_interval(elapsed: float, wait: float) -> None:
    """After a death only for what checks leave of it, whatever the clocks say."""
    released = make().without_owner("stopped", NOW)
    assert released.deference(NOW + elapsed, BEAT) == pytest.approx(wait)
    assert make().deference(NOW + elapsed, BEAT) == pytest.approx((1 - CHECK_FRACTION) * BEAT)


def test_why_a_role_may_be_taken() -> None:
    """By its owner itself, by the next session of the same worker, and by others."""
    role = make("worker-1.a")
    assert role.why_free_to("worker-1.a") == "trust lapsed"
    assert role.why_free_to("worker-1.b") == "session lost"
    assert role.why_free_to("worker-2.a") == "died"


def stored(role: dict[str, Json], *, epoch: int = 1, format: int = 1) -> Record:
    """Return a role's record."""
    fields = {"epoch": 1, "owner": None, "since": NOW, "until": NOW, "timeout": TIMEOUT}
    return Record("role/default/work", fields | role, "v", 1, epoch, format, "n")


@pytest.mark.parametrize("role", [{}, {"epoch": 7}, {"owner": "w.1", "former": "w.0"}])
def test_a_role_may_be_ahead_of_the_epoch_of_its_record(role: dict[str, Json]) -> None:
    """What any version has written can be read; without a record there is no role."""
    assert read_role(stored(role)) == make(**{"owner": None, **role})
    assert read_role(None) is None
    assert read_role(msgspec.structs.replace(stored(role), deleted=True, value=None)) is None


@pytest.mark.parametrize("field", ["owner", "successor", "former"])
@pytest.mark.parametrize("name", ["", "a//b", "a/b", "..", "a\0b", "a" * 201])
def test_a_role_that_names_no_session_is_damaged(field: str, name: str) -> None:
    """In whichever of its fields."""
    with pytest.raises(Corrupt, match="is not the name of a session"):
        read_role(stored({field: name}))


def test_a_role_that_no_version_wrote_is_refused() -> None:
    """It is behind the epoch of its record, incomplete, or of a later format."""
    with pytest.raises(Corrupt, match="epoch 1 in a record of epoch 2"):
        read_role(stored({}, epoch=2))
    for wrong in ({"timeout": 0}, {"timeout": None}, {"epoch": -1}, {"epoch": "1"}):
        with pytest.raises(Corrupt):
            read_role(stored(wrong))
    with pytest.raises(NewerFormat):
        read_role(stored({}, format=2))


@pytest.mark.parametrize("seen_at", [0.0, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("must_prepare", [True, False])
def test_a_cold_start_prepares_from_the_election_on(seen_at: float, *, must_prepare: bool) -> None:
    """For the whole delay, however long it took until then; each phase is told, with its time."""
    clock = FakeClock()
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    told: list[tuple[str, float, str]] = []
    components.events.on(
        "coord:cold-start-phase-changed", lambda e: told.append((e.phase, e.duration, e.role))
    )
    settings = CoordinatorSettings(
        cold_start_observation_window=3.0, cold_start_preparation_delay=2.0
    )
    timing = Timing(heartbeat=BEAT, timeout=TIMEOUT)
    options = settings.for_store(MemoryStore(components=components), timing)
    start = ColdStart(components, options, "default/work")
    began = clock.mono()
    assert (start.phase, start.next_change, start.is_ready) == ("observing", began + 3.0, False)
    clock.mono_seconds += seen_at
    assert start.may_elect() == (seen_at >= 3.0)
    start.on_leader_seen(must_prepare=must_prepare)
    assert start.is_ready != must_prepare
    if must_prepare:
        assert start.next_change == began + seen_at + 2.0
        clock.mono_seconds += 1.5
        start.on_leader_seen(must_prepare=True)
        assert not start.is_ready
        clock.mono_seconds += 0.5
        start.on_leader_seen(must_prepare=True)
    assert (start.phase, start.next_change, start.may_elect()) == ("ready", None, True)
    ready_at = seen_at + (2.0 if must_prepare else 0.0)
    expected = [
        ("observing", 0.0),
        ("electing", seen_at),
        ("preparing", seen_at),
        ("ready", ready_at),
    ]
    assert told == [(*each, "default/work") for each in expected]


def test_a_cold_start_that_is_skipped_is_ready_at_once() -> None:
    """Whatever the waits are; nothing changes it any more."""
    components = Components(clock=FakeClock(), randomness=SeededRandomness(1), events=Events())
    told: list[str] = []
    components.events.on("coord:cold-start-phase-changed", lambda e: told.append(e.phase))
    settings = CoordinatorSettings(
        cold_start_observation_window=3.0, cold_start_preparation_delay=2.0, skip_cold_start=True
    )
    timing = Timing(heartbeat=BEAT, timeout=TIMEOUT)
    options = settings.for_store(MemoryStore(components=components), timing)
    start = ColdStart(components, options, "default/work")
    for _ in range(2):
        assert (start.is_ready, start.next_change, start.may_elect()) == (True, None, True)
        start.on_leader_seen(must_prepare=True)
    assert told == ["ready"]
