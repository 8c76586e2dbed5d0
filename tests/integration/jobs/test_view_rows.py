"""The rows of the SQL views follow from the records, on both databases. No node runs here."""

import asyncio
import datetime as dt
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

import msgspec
import pytest
import servers
from waiting import until

from jobsync import Components, open_store
from jobsync.core import plan_documents
from jobsync.core.assignment import (
    NOBODY,
    Assignment,
    Exceptions,
    Exempt,
    NodeRef,
    Plan,
    owned_by,
    pack_holders,
    pack_move,
)
from jobsync.core.codec import Json
from jobsync.core.pins import Pin, like, pattern_in_force, write_sheet
from jobsync.core.plan_documents import name_exceptions, split_exceptions, to_document
from jobsync.core.trust import Timing
from jobsync.jobs.foreign_claims import Claim, ClaimState
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.sql_views import SqlViews
from jobsync.stores.opening import read_url

KEYS = JobKeys("sync_")
TOTAL = 12
NAMES = ("a", "B", "n[1]", "n1", "n*", "n?", r"back\slash", "x_y", "50%")
PATTERNS = (
    *("a", "b", "B", "%", "_", "n[1]", "n_1_", "n*", "n?", "%]", r"back\\slash", r"x\_y", "x_y"),
    *(r"50\%", "gone", "gone-%"),
)

STATES: tuple[ClaimState, ...] = ("done", "failed", "running")

Rows: TypeAlias = list[tuple[Any, ...]]


class Views:
    """The views of a store, and what is written there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.write({})
        self._views = SqlViews(read_url(url), KEYS, Components.system())
        self._views.install("a")

    def write(self, records: Mapping[str, Json]) -> None:
        """Write records; what a key had before is replaced."""

        async def work() -> None:
            store = await open_store(self.url)
            for key, value in records.items():
                record = await store.get(key, tombstones=True)
                await (store.create(key, value) if record is None else store.put(record, value))
            await store.close()

        asyncio.run(work())

    def read_version(self, key: str) -> str | None:
        """Return the version of a record."""

        async def work() -> str | None:
            store = await open_store(self.url)
            record = await store.get(key)
            await store.close()
            return None if record is None else record.version

        return asyncio.run(work())

    def run(self, statement: str, *parameters: Any) -> Any:
        """Run a statement on this thread's connection."""
        return self._views.connection.execute(statement, parameters or None)

    def ask(self, query: str, *parameters: Any) -> Rows:
        """Return the rows of a query."""
        return [tuple(row) for row in self.run(query, *parameters).fetchall()]

    def close(self) -> None:
        """Close the connections."""
        self._views.close()


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of the database."""
    return str(request.param)


@pytest.fixture
def views(kind: str, locate: servers.Locate) -> Iterator[Views]:
    """Views of an empty store."""
    opened = Views(locate(kind))
    yield opened
    opened.close()


def make_plan(chance: random.Random) -> Plan:
    """Return a plan in which tokens and single tasks are held, move, or wait for a node."""
    nodes = [NodeRef(f"worker-{i}.1", name) for i, name in enumerate(chance.sample(NAMES, 4))]
    holders = [NOBODY, *(chance.randrange(len(nodes) + 1) for _ in range(1, TOTAL))]
    moving = [token for token in range(TOTAL) if holders[token] and chance.random() < 0.3]
    moves = [pack_move(holders[token], NOBODY, 5, [token]) for token in moving]
    # In an order of their own: the two documents have different indexes.
    others = chance.sample(nodes, 3)
    tasks = []
    for number in range(8):
        holder = chance.randrange(len(others) + 1)
        revoked = 5 if holder and chance.random() < 0.4 else 0
        tasks.append(Exempt(f"t{number}", chance.randrange(TOTAL), holder, NOBODY, revoked))
    exceptions = Exceptions(tuple(others), tuple(tasks))
    starts, packed = pack_holders(holders)
    name = name_exceptions(5, exceptions)
    assignment = Assignment(5, TOTAL, tuple(nodes), starts, packed, tuple(moves), name)
    return Plan(assignment, exceptions)


def make_pins(chance: random.Random, plan: Plan) -> list[Pin]:
    """Return pins of tasks that follow their token and of tasks that do not."""
    tokens = {exempt.task: exempt.token for exempt in plan.exceptions.tasks}
    tokens |= {f"u{number}": chance.randrange(TOTAL) for number in range(8)}
    return [
        Pin(task=task, token=token, patterns=tuple(chance.sample(PATTERNS, count)))
        for task, token in tokens.items()
        for count in chance.sample([1, 2, 3], 2)
    ]


def find_token_owners(plan: Plan) -> dict[int, str]:
    """Return the name of the node that may use each token."""
    nodes = plan.assignment.nodes
    return {t: n.name for n in nodes for t in owned_by(plan.assignment, n.incarnation)}


def expect_pins(plan: Plan, pins: list[Pin]) -> Rows:
    """Return the rows of pins: their task, the pattern that counts, node and token."""
    names = [node.name for node in plan.assignment.nodes]
    nodes = ["", *(node.name for node in plan.exceptions.nodes)]
    apart = {e.task: "" if e.revoked else nodes[e.holder] for e in plan.exceptions.tasks}
    owners = find_token_owners(plan)
    found = []
    for pin in pins:
        pattern = pattern_in_force(pin.patterns, names) or pin.patterns[0]
        node = apart[pin.task] if pin.task in apart else owners.get(pin.token, "")
        found.append((pin, pattern, node, bool(node) and like(pattern)(node)))
    served = {pin.task for pin, *_, fits in found if fits}
    return [
        (
            *(pin.task, pattern, node or None, pin.token),
            pin.token if pin.task not in apart and (fits or pin.task not in served) else None,
        )
        for pin, pattern, node, fits in found
    ]


def test_tokens_and_pins_are_those_of_the_plan(
    views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is held, moves or waits, also if the exceptions take several records."""
    monkeypatch.setattr(plan_documents, "_MAX_TASKS", 3)
    columns = "task_id, node_pattern, node, task_token, token_id"
    for seed in range(12):
        chance = random.Random(seed)
        plan = make_plan(chance)
        pins = make_pins(chance, plan)
        parts = split_exceptions(plan.assignment.exceptions, plan.exceptions)
        assert len(parts) == 3
        views.write({KEYS.exceptions(name): part for name, part in parts.items()})
        views.write(
            {
                KEYS.assignment: to_document(plan.assignment),
                KEYS.pins_of("a"): write_sheet("a", pins),
            }
        )
        tokens: dict[int, str] = dict(views.ask("SELECT token_id, node FROM sync_token"))
        assert tokens == find_token_owners(plan), seed
        rows = views.ask(f"SELECT {columns} FROM sync_lock")
        assert sorted(rows, key=repr) == sorted(expect_pins(plan, pins), key=repr), seed


@pytest.fixture
def set_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the time zone of this process, until the test ends."""
    with monkeypatch.context() as patch:

        def set_zone(zone: str) -> None:
            patch.setenv("TZ", zone)
            time.tzset()

        yield set_zone
    time.tzset()


def test_claims_are_of_the_local_day_on_which_they_started(
    kind: str, locate: servers.Locate, set_zone: Callable[[str], None]
) -> None:
    """A task that is done under another date is in the audit only, in every time zone."""
    day = dt.date(2026, 3, 10)
    for zone in ("UTC", "Pacific/Kiritimati", "America/Adak"):
        set_zone(zone)
        records: dict[str, Json] = {}
        expected = set()
        times = [dt.time(0, 30), dt.time(12), dt.time(23, 30)]
        cases = itertools.product(times, (-1, 0, 1), STATES)
        for number, (at, days, state) in enumerate(cases):
            date = day + dt.timedelta(days=days)
            started = dt.datetime.combine(day, at, ZoneInfo(zone)).timestamp()
            task = f"t{number}"
            records[KEYS.claim(date, task)] = build_claim(task, date, state, started)
            if state != "done" or days == 0:
                expected.add((task, date.isoformat()))
        views = Views(locate(kind))
        views.write(records)
        rows = views.ask("SELECT item, date FROM sync_claim")
        audit = views.ask("SELECT count(*) FROM sync_audit")
        views.close()
        assert {(item, str(date)) for item, date in rows} == expected, zone
        assert audit == [(len(records) // 3,)], zone


def build_claim(task: str, date: dt.date, state: ClaimState, started: float) -> Json:
    """Return the record of a claim."""
    claim = Claim(
        task=task,
        token=1,
        date=date.isoformat(),
        node="a",
        owner="a.1",
        number=1,
        run=1,
        state=state,
        started=started,
        ended=None if state == "running" else started + 1,
    )
    return msgspec.to_builtins(claim)


def test_a_silent_node_is_dead_before_its_death_is_written(views: Views, kind: str) -> None:
    """By its own timeout, counted from its last heartbeat."""
    silences = {"talks": 0, "pauses": 800, "silent": 1200, "short": 60}
    for name in silences:
        facts = {"stage": "ready", "applied": 3, "is_observer": False, "host": "h", "pid": 7}
        node = {"name": name, "incarnation": f"{name}.1", "created": 1e9, **facts}
        timing = msgspec.to_builtins(Timing(heartbeat=5.0, timeout=30 if name == "short" else 1000))
        session = {"worker": name, "state": "live", "beat": 1, "timing": timing}
        views.write({KEYS.node(name): node, f"session/{name}.1": session})
    table, age = ("sessions.jobsync_record", "%s")
    if kind == "postgres":
        table, age = "jobsync_record", "%s * interval '1 second'"
    for name, silence in silences.items():
        statement = f"UPDATE {table} SET written = written - {age} WHERE key = %s"
        views.run(statement, silence, f"session/{name}.1")
    statuses: dict[str, str] = dict(views.ask("SELECT name, status FROM sync_node"))
    assert statuses == {"talks": "ACTIVE", "pauses": "ACTIVE", "silent": "DEAD", "short": "DEAD"}


def test_each_delete_of_tokens_is_a_write(views: Views) -> None:
    """A leader that receives no notifications polls for writes."""
    views.write(
        {KEYS.assignment: to_document(Assignment(1, 2, (NodeRef("a.1", "a"),), (0,), (1,)))}
    )
    versions = [views.read_version(f"ask/{KEYS.segment}")]
    for _ in range(3):
        views.run("DELETE FROM sync_token")
        versions.append(views.read_version(f"ask/{KEYS.segment}"))
    assert len({*versions}) == 4


def test_a_delete_writes_as_the_library_does(views: Views, kind: str) -> None:
    """A new version, whose mark comes before those of the versions until then.

    PostgreSQL has a clock, which dates it too.
    """
    key = KEYS.pins_of("a")
    made = [Pin(task=task, token=1, patterns=("x",)) for task in "tuv"]
    views.write({key: write_sheet("a", made)})
    age = "interval '60 seconds'" if kind == "postgres" else "60"
    for task in "tuv":
        views.run(f"UPDATE jobsync_record SET written = written - {age} WHERE key = %s", key)
        columns = "SELECT seq, trail, written FROM jobsync_record WHERE key = %s"
        ((seq, trail, written),) = views.ask(columns, key)
        views.run("DELETE FROM sync_lock WHERE task_id = %s", task)
        ((new_seq, new_trail, new_written),) = views.ask(columns, key)
        assert new_seq == seq + 1
        assert new_trail.endswith(f" {trail}")
        assert new_trail != trail
        assert (new_written > written) is (kind == "postgres")


def test_a_delete_of_pins_leaves_all_others(views: Views) -> None:
    """Those of the same task, pattern or node, and one that was deleted before and made again."""
    pins = [
        (creator, task, pattern)
        for creator, task, pattern in itertools.product("ab", "tu", ("x", "y"))
    ]

    def write(creator: str) -> None:
        made = [Pin(task=t, token=1, patterns=(p,)) for c, t, p in pins if c == creator]
        views.write({KEYS.pins_of(creator): write_sheet(creator, made)})

    def read() -> Rows:
        return sorted(views.ask("SELECT created_by, task_id, node_pattern FROM sync_lock"))

    where = "(created_by = %s AND task_id = %s AND node_pattern = %s)"
    # One pin, and two that have nothing in common.
    for gone in [*((pin,) for pin in pins), *zip(pins[:4], reversed(pins[4:]), strict=True)]:
        for creator in "ab":
            write(creator)
        wheres = " OR ".join([where] * len(gone))
        views.run(f"DELETE FROM sync_lock WHERE {wheres}", *itertools.chain(*gone))
        assert read() == [pin for pin in pins if pin not in gone]


def test_pins_that_are_made_during_a_delete_are_kept(locate: servers.Locate) -> None:
    """The delete waits for the other writer, then edits what that has written."""
    views = Views(locate("postgres"))
    views.write({KEYS.pins_of("a"): write_sheet("a", [Pin(task="t", token=1, patterns=("x",))])})
    both = [Pin(task=task, token=1, patterns=("x",)) for task in ("t", "new")]
    document = msgspec.json.encode(write_sheet("a", both)).decode()
    connection = views._views.connect()
    deleting = threading.Thread(
        target=lambda: views.run("DELETE FROM sync_lock WHERE task_id = 't'")
    )
    with connection.transaction():
        change = "UPDATE jobsync_record SET value = %s, seq = seq + 1 WHERE key = %s"
        connection.execute(change, [document, KEYS.pins_of("a")])
        deleting.start()
        blocked = (
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND %s = ANY(pg_blocking_pids(pid))"
        )
        pid = connection.info.backend_pid
        asyncio.run(until(lambda: connection.execute(blocked, [pid]).fetchone()[0] == 1))
    deleting.join()
    connection.close()
    assert views.ask("SELECT task_id FROM sync_lock") == [("new",)]
    views.close()
