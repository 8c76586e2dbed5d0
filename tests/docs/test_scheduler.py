"""The page of schedulers names every option with its default, and every attribute."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jobsync import HistoryEntry, JobContext, JobStatus, SchedulerPlugin
from jobsync.core.job_state import JobDefinition
from jobsync.scheduler.settings import JobOptions, SchedulerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "scheduler.md").read_text()


def find_rows(title: str) -> dict[str, str]:
    """Return the second cell of each row under a title, by each name in the first cell."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]*?) ?\|", section, re.MULTILINE)
    return {name: cell for names, cell in rows for name in re.findall(r"`(\w+)", names)}


def list_public(kind: type[Any]) -> set[str]:
    """Return the public attributes of a class."""
    return {name for name in dir(kind) if not name.startswith("_")}


def test_every_option_of_a_job_is_on_the_page() -> None:
    """No option is missing, none is invented."""
    fields = {*JobDefinition.__struct_fields__, *JobOptions.__struct_fields__}
    # The queue is part of `enqueue`.
    assert set(find_rows("Options of a job")) == fields - {"definition", "queue"}


@pytest.mark.parametrize(
    "name", ["enabled", "overlap", "misfire", "max_catch_up", "jitter", "run_on_start"]
)
def test_the_defaults_of_a_job_are_the_codes(name: str) -> None:
    """The page prints the default of the stored definition."""
    printed = find_rows("Options of a job")[name].strip('`"')
    assert printed == str(getattr(JobDefinition(schedule="@daily"), name)).removesuffix(".0")


def test_every_option_of_a_scheduler_is_on_the_page_with_its_default() -> None:
    """No setting is missing, none is invented, no default is another one."""
    printed = {
        name: cell.strip("`").replace(",", "")
        for name, cell in find_rows("Options of a scheduler").items()
    }
    assert printed == {
        name: str(value).removesuffix(".0")
        for name, value in msgspec.structs.asdict(SchedulerSettings()).items()
    }


def test_every_method_is_on_the_page() -> None:
    """What a scheduler has beyond its base class, apart from its life cycle."""
    inherited = {*list_public(SchedulerPlugin.__mro__[1]), "slug"}
    named = set(re.findall(r"scheduler\.(\w+)\(", PAGE.partition("\n## Methods\n")[2]))
    assert list_public(SchedulerPlugin) - inherited <= named


@pytest.mark.parametrize(
    ("title", "attributes"),
    [
        ("Job status", {*JobStatus.__struct_fields__, "is_running"}),
        ("History", set(HistoryEntry.__struct_fields__)),
        ("The context of a run", {*list_public(JobContext), "job_name"}),
    ],
)
def test_every_attribute_is_on_the_page(title: str, attributes: set[str]) -> None:
    """What users read of a job, a run and its history."""
    internal = {"for_attempt", "mark_lost", "get"}
    assert attributes - internal <= set(find_rows(title))
