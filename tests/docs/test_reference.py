"""The pages of settings and events say what the code says."""

from pathlib import Path

import pytest
from reference_pages import PAGES, render_events, render_settings

from jobsync.events import known_events
from jobsync.setting_fields import fields
from jobsync.settings import sections


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_is_written_from_the_code(page: Path) -> None:
    """Run `make api` if a setting or an event has changed."""
    assert page.read_text(encoding="utf-8") == PAGES[page]()


def test_every_event_is_on_the_page() -> None:
    """Also one of a family that is new."""
    page = render_events()
    names = [
        name
        for name, kind in known_events().items()
        if kind.__module__.startswith("jobsync.") and name == kind.name
    ]
    assert [name for name in names if f"| `{name}`" not in page] == []


def test_every_setting_is_on_the_page_with_its_variable() -> None:
    """Also one of a section that is new."""
    page = render_settings()
    variables = [
        f"JOBSYNC_{section}_{field.name}".replace("__", "_").upper()
        for section, kinds in sections().items()
        for kind in kinds
        if kind.__module__.startswith("jobsync.")
        for field in fields(kind)
    ]
    assert [name for name in variables if f"| `{name}` |" not in page] == []
