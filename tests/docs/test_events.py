"""The page of events lists every event, with its fields."""

import importlib
import pkgutil
import re
from pathlib import Path

import jobsync
from jobsync.events import known_events

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "events.md"
ROWS = re.compile(r"^\| (`[^|]+`) \| ([^|]+) \|$", re.MULTILINE)


def test_every_event_is_on_the_page_with_its_fields() -> None:
    """No event of the library is missing, none is invented, no field is forgotten."""
    for module in pkgutil.walk_packages(jobsync.__path__, "jobsync."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    listed = {
        name: set(re.findall(r"`(\w+)`", fields.partition(":")[0]))
        for names, fields in ROWS.findall(PAGE.read_text(encoding="utf-8"))
        for name in re.findall(r"`([^`]+)`", names)
    }
    real = {
        name: set(kind.__struct_fields__)
        for name, kind in known_events().items()
        if kind.__module__.startswith("jobsync.")
    }
    assert listed == real
