"""Keys are what is stored: those of fleets, nodes, dates and tasks never meet, and never change."""

from datetime import date

import pytest

from jobsync.jobs.job_keys import JobKeys

DAY = date(2026, 1, 5)

STORED = {
    "settings": "fleet/{fleet}",
    "assignments": "assignment/",
    "assignment": "assignment/{fleet}",
    "exceptions": "exceptions/{fleet}/part",
    "nodes": "node/{fleet}/",
    "node": "node/{fleet}/{name}",
    "dates": "date/{fleet}/",
    "work_date": "date/{fleet}/2026-01-05",
    "claims": "claim/{fleet}/2026-01-05/",
    "claim": "claim/{fleet}/2026-01-05/{name}",
    "pins": "pin/{fleet}/",
    "pins_of": "pin/{fleet}/{name}",
    "rebalances": "history/{fleet}/rebalance",
}


@pytest.mark.parametrize(("fleet", "segment"), [("sync_", "sync__"), ("app", "app")])
@pytest.mark.parametrize(
    ("name", "escaped"), [("a", "a"), ("a/b", "a.Fb"), ("Ä b", "~C3~84!20b"), ("..", ".E.E")]
)
def test_each_key_is_the_one_that_earlier_versions_have_written(
    fleet: str, segment: str, name: str, escaped: str
) -> None:
    """With the fleet's name in each, and names of users escaped."""
    keys = JobKeys(fleet)
    found = {
        "settings": keys.settings,
        "assignments": keys.assignments,
        "assignment": keys.assignment,
        "exceptions": keys.exceptions("part"),
        "nodes": keys.nodes,
        "node": keys.node(name),
        "dates": keys.dates,
        "work_date": keys.work_date(DAY),
        "claims": keys.claims(DAY),
        "claim": keys.claim(DAY, name),
        "pins": keys.pins,
        "pins_of": keys.pins_of(name),
        "rebalances": keys.rebalances,
    }
    assert found == {kind: key.format(fleet=segment, name=escaped) for kind, key in STORED.items()}
