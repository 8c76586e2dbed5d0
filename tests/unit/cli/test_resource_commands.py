"""What the commands of resources show of records, and of partitions."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jobsync import Database
from jobsync.cli import resources as module
from jobsync.cli.render import format_time
from jobsync.cli.resources import _build_column, _format_partitions, resources
from jobsync.database.document import CREATED, UPDATED, VERSION
from jobsync.errors import Invalid, NotFound
from jobsync.stores.memory import MemoryStore


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command on records of which each has another field."""
    store = MemoryStore()

    def use(_: str | None, work: Callable[[Database], Awaitable[Any]]) -> Any:
        async def call() -> Any:
            async with Database(connection=store) as database:
                return await work(database)

        return asyncio.run(call())

    async def fill(database: Database) -> None:
        users = await database.create_resource("users", {"name": "string"})
        await users.insert({"id": "u1", "name": "ann"})
        await users.insert({"id": "u2", "age": 7})

    use(None, fill)
    monkeypatch.setattr(module, "run_on_database", use)
    return lambda *words: CliRunner().invoke(resources, words)


def test_each_field_of_any_record_is_a_column(run: Callable[..., Result]) -> None:
    """Those that only a later one has, too; what a record lacks is empty, or null."""
    header, *lines = run("query", "users").stdout.splitlines()
    names = header.split("\t")
    assert {"id", "name", "age"} <= {*names}
    rows = [dict(zip(names, line.split("\t"), strict=True)) for line in lines]
    assert [(row["id"], row["name"], row["age"]) for row in rows] == [
        *(("u1", "ann", ""), ("u2", "", "7")),
    ]
    shown = json.loads(run("query", "users", "--json").stdout)
    assert [(row["id"], row["name"], row["age"]) for row in shown] == [
        *(("u1", "ann", None), ("u2", None, 7)),
    ]


def test_records_are_chosen_by_a_filter(run: Callable[..., Result]) -> None:
    """Up to the limit; what is no filter is refused."""
    found = json.loads(run("query", "users", "--where", '{"age": 7}', "--json").stdout)
    assert [row["id"] for row in found] == ["u2"]
    assert len(json.loads(run("query", "users", "--limit", "1", "--json").stdout)) == 1
    for text in ("[1]", "{", "7"):
        error = run("query", "users", "--where", text).exception
        assert isinstance(error, Invalid)
        assert (error.field, error.value) == ("--where", text)


def test_a_record_is_shown_field_by_field(run: Callable[..., Result]) -> None:
    """As one object in JSON; an unknown one is an error that names its resource."""
    (record,) = json.loads(run("get", "users", "u1", "--json").stdout)
    assert (record["id"], record["name"]) == ("u1", "ann")
    header, *lines = run("get", "users", "u1").stdout.splitlines()
    assert header == "field\tvalue"
    assert [line.split("\t")[0] for line in lines] == list(record)
    error = run("get", "users", "u9").exception
    assert isinstance(error, NotFound)
    assert "record of users 'u9'" in str(error)


@pytest.mark.parametrize(
    ("name", "is_time", "is_spare"),
    [
        ("name", False, False),
        (CREATED, True, True),
        (UPDATED, True, True),
        (VERSION, False, True),
    ],
)
def test_fields_of_the_library_are_left_out_first(name: str, is_time: bool, is_spare: bool) -> None:
    """Its times are shown as times."""
    column = _build_column(name)
    assert (column.name, column.spare) == (name, is_spare)
    assert column.format(5) == (format_time(5) if is_time else "5")


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (None, "-"),
        ({}, "-"),
        ({"a": ({"x": "string"}, "")}, "a (x)"),
        (
            {"a": ({"x": "string", "y": "date"}, "7 records done")},
            "a (x, y): building, 7 records done",
        ),
        (
            {"a": ({"x": "string"}, "not begun"), "b": ({"y": "date"}, "")},
            "a (x): building, not begun, b (y)",
        ),
    ],
)
def test_partitions_are_shown_with_their_progress(
    found: dict[str, tuple[dict[str, str], str]] | None, shown: str
) -> None:
    """Until they are ready."""
    partitions: object = None
    if found is not None:
        partitions = {
            name: {"fields": fields, "is_ready": not progress, "progress": progress or "ready"}
            for name, (fields, progress) in found.items()
        }
    assert _format_partitions(partitions) == shown
