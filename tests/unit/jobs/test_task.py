"""A task is identified by the text of its id, which is the same on every node."""

import copy
import math
import pickle
import time
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any

import msgspec
import pytest
from chance import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from jobsync import Components, Invalid
from jobsync.jobs.task import Task, read_date, read_seconds, to_task

ids = st.integers() | st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)


def test_a_number_and_its_text_are_one_task() -> None:
    """They are equal and have the same hash."""
    assert Task(1) == Task("1")
    assert {Task(1): "found"}[Task("1")] == "found"
    assert Task(1) != Task(2)
    assert Task(1) != 1


def test_a_task_keeps_its_id_and_name() -> None:
    """The id is unchanged; the name is for people and has no effect."""
    task = Task(("a", 1), "first")
    assert (task.id, task.name, task.text) == (("a", 1), "first", "('a', 1)")
    assert Task(1, "one") == Task(1)
    with pytest.raises(AttributeError, match="cannot be changed"):
        task.id = 2
    with pytest.raises(AttributeError, match="cannot be removed"):
        del task.id
    assert repr(task) == "Task(id=('a', 1), name='first')"


class Report(Task):
    """A task of a program, with attributes of its own."""

    def __init__(self, id: object, rows: int) -> None:
        super().__init__(id, f"report {id}")
        self.rows = rows


class Bare(Task):
    """A subclass that sets the id itself."""

    def __init__(self, id: object) -> None:
        self.id = id
        self.name = None


def test_a_subclass_may_have_an_init_of_its_own() -> None:
    """It is the same task, with further attributes, and its id is checked."""
    task = Report(1, rows=5)
    assert (task.id, task.name, task.rows) == (1, "report 1", 5)
    assert task == Task("1")
    assert len({task, Task(1)}) == 1
    assert to_task(task) is task
    task.rows = 6
    assert task.rows == 6
    for kind in (partial(Report, rows=1), Bare):
        with pytest.raises(Invalid, match="id is empty"):
            kind("")
        with pytest.raises(AttributeError, match="cannot be changed"):
            kind(1).id = 2


@pytest.mark.parametrize("task", [Task(("a", 1), "first"), Report(1, rows=5), Bare(3)])
def test_copies_are_equal(task: Task) -> None:
    """Made by `copy` and by `pickle`, with all attributes."""
    for made in (copy.copy(task), copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        assert made == task
        assert type(made) is type(task)
        assert (made.id, made.name) == (task.id, task.name)
        assert getattr(made, "rows", None) == getattr(task, "rows", None)


def test_tasks_sort_by_id() -> None:
    """Integers by value, then names; a text that only looks like a number is a name."""
    tasks = [Task(each) for each in ("b", 10, "9", -3, "007", "a", "-0", date(2025, 1, 1))]
    assert [task.text for task in sorted(tasks)] == [
        *("-3", "9", "10"),
        *("-0", "007", "2025-01-01", "a", "b"),
    ]
    with pytest.raises(TypeError):
        assert Task(1) < 2


def test_numbers_that_python_does_not_parse_sort_as_names() -> None:
    """They are longer than any real one; those before are integers."""
    long, longer = "1" * 1000, "1" * 5000
    tasks = [Task(each) for each in (longer, "a", long, 2, f"-{long}", f"-{longer}")]
    ordered = [f"-{long}", "2", long, f"-{longer}", longer, "a"]
    assert [task.text for task in sorted(tasks)] == ordered


@given(ids, ids)
def test_order_and_equality_agree(left: Any, right: Any) -> None:
    """Exactly one of less, equal and greater is true, whatever the types of ids."""
    one, other = Task(left), Task(right)
    assert (one < other) + (one == other) + (one > other) == 1
    assert (one <= other) == (not one > other)
    assert (one >= other) == (not one < other)


@pytest.mark.parametrize(
    ("id", "fix"),
    [
        (None, "Pass a name or a number"),
        (..., "Pass a name or a number"),
        ("", "Pass a name or a number"),
        ([1], "Use a name, a number or a tuple"),
        (frozenset({"a"}), r"Use tuple\(sorted\(id\)\)"),
        (object(), "Give object a __str__"),
        ("a\0b", "Remove it"),
        ("a\ud800", "Decode it properly"),
    ],
)
def test_ids_that_differ_between_nodes_are_refused(id: Any, fix: str) -> None:
    """An id must identify the same task in every process."""
    with pytest.raises(Invalid, match=f"id .*{fix}"):
        Task(id)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(0, 0), (0.5, 0.5), (120, 120), (timedelta(minutes=2), 120), (timedelta(0), 0)],
)
def test_a_duration_is_a_number_or_a_timedelta(value: Any, seconds: float) -> None:
    """Also one of no length."""
    assert read_seconds("wait_on_exit", value) == seconds


@pytest.mark.parametrize("value", [-1, -0.001, math.nan, timedelta(seconds=-1), None, "5", [5]])
def test_what_is_no_duration_is_refused(value: Any) -> None:
    """The error names the argument."""
    with pytest.raises(Invalid, match="wait_on_exit is not a duration"):
        read_seconds("wait_on_exit", value)


@pytest.mark.parametrize(
    ("zone", "hour", "today"),
    [
        ("UTC", 0, date(2026, 1, 5)),
        ("UTC", 23, date(2026, 1, 5)),
        ("Pacific/Kiritimati", 9, date(2026, 1, 5)),
        ("Pacific/Kiritimati", 10, date(2026, 1, 6)),
        ("America/Adak", 9, date(2026, 1, 4)),
        ("America/Adak", 10, date(2026, 1, 5)),
    ],
)
def test_today_is_the_date_where_the_process_runs(
    monkeypatch: pytest.MonkeyPatch, zone: str, hour: int, today: date
) -> None:
    """By its own clock; a date that is passed is the date, whatever its zone."""
    clock = FakeClock()
    clock.wall_seconds = datetime(2026, 1, 5, hour, 30, tzinfo=UTC).timestamp()
    components = msgspec.structs.replace(Components.system(), clock=clock)
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        found = read_date(None, components)
        late = read_date(datetime(2026, 3, 1, 23, 59, tzinfo=UTC), components)
    time.tzset()
    assert (found, late) == (today, date(2026, 3, 1))
