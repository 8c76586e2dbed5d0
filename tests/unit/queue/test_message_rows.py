"""Messages as rows of a database: what is impossible is refused, and what is damaged is shown."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock

from jobsync import Corrupt, Events
from jobsync.core.arguments import LONGEST_DELAY
from jobsync.queue.backend import Failure, Message, MessageInfo, Receipt
from jobsync.queue.sql.claims import UnsettledClaims
from jobsync.queue.sql.message_rows import (
    ClaimedRow,
    encode_any_error,
    find_stored_states,
    keep_latest,
    read_infos,
    read_message,
)
from jobsync.queue.sql.sqlite_directory import read_clock
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.sql import SqliteAccess

RECEIPT = Receipt("id-1", 3, "claim-1")
MOST = 2**31 - 2


def build_row(**columns: Any) -> ClaimedRow:
    """Return the row of a claimed message."""
    known = {"id": "id-1", "payload": '{"n": 1}', "deliveries": 3, "returned": 1}
    known |= {"max_attempts": 7, "timeout": 2.5, "suspect": True, "enqueued": 5.0, "task": "send"}
    known |= columns
    return tuple(known.values())  # type: ignore[return-value]


def test_a_claimed_message_has_all_columns_of_its_row() -> None:
    """Returned deliveries are no attempts."""
    assert read_message(RECEIPT, build_row()) == Message(
        receipt=RECEIPT,
        value={"n": 1},
        attempt=2,
        max_attempts=7,
        timeout=2.5,
        is_suspect=True,
        enqueued=5.0,
        task="send",
    )


@pytest.mark.parametrize(
    ("columns", "is_fine"),
    [
        ({"deliveries": 1, "returned": 0}, True),
        ({"deliveries": MOST, "returned": MOST - 1}, True),
        ({"deliveries": MOST + 1, "returned": 1}, False),
        ({"deliveries": 3, "returned": 3}, False),
        ({"deliveries": 3, "returned": -1}, False),
        ({"deliveries": 0, "returned": 0}, False),
        ({"timeout": None}, True),
        ({"timeout": LONGEST_DELAY}, True),
        ({"timeout": LONGEST_DELAY + 1}, False),
        ({"timeout": 0.0}, False),
        ({"timeout": -1.0}, False),
        ({"timeout": float("nan")}, False),
        ({"payload": "{"}, False),
    ],
)
def test_a_row_with_impossible_numbers_is_corrupt(columns: dict[str, Any], is_fine: bool) -> None:
    """The first and the last possible ones are not."""
    row = build_row(**columns)
    if is_fine:
        read_message(RECEIPT, row)
    else:
        with pytest.raises(Corrupt, match="id-1"):
            read_message(RECEIPT, row)


def build_info_row(**columns: Any) -> list[Any]:
    """Return the row of a message for display, with a value of its own in each column."""
    known: dict[str, Any] = {"queue": "emails", "id": "id-1", "state": "claimed"}
    known |= {"payload": b'{"n": 1}', "deliveries": 5, "returned": 2, "max_attempts": 7}
    known |= {"errors": '{"attempt":1,"error":"first"}\n{"attempt":2,"error":"last"}\n'}
    known |= {"session": "me", "suspect": 1, "enqueued": 11.0, "due": 12.0, "claimed": 13.0}
    known |= {"finished": 14.0, "seen": 15.0, "format": 3, "priority": 4, "group": "g"}
    known |= {"task": "send", "cursor": "99", "progress": 0.5, "note": "half", "at": 16.0}
    known |= {"result": "[1]", "problem": "why"}
    return [*(known | columns).values()]


INFO = MessageInfo(
    queue="emails",
    id="id-1",
    state="claimed",
    value={"n": 1},
    attempts=3,
    deliveries=5,
    max_attempts=7,
    errors=(Failure(1, "first"), Failure(2, "last")),
    session="me",
    is_suspect=True,
    enqueued=11.0,
    due=12.0,
    claimed=13.0,
    finished=14.0,
    seen=15.0,
    is_readable=True,
    format=3,
    priority=4,
    group="g",
    task="send",
    progress=0.5,
    progress_note="half",
    progress_at=16.0,
    result=[1],
    result_problem="why",
    cursor="99",
)


@pytest.mark.parametrize(
    ("columns", "facts", "reports"),
    [
        ({}, {}, 0),
        ({"payload": None}, {"value": None}, 0),
        ({"payload": b"{\xff"}, {"value": "{�", "is_readable": False}, 0),
        ({"payload": "{"}, {"value": "{", "is_readable": False}, 0),
        ({"result": "{"}, {"result": "{"}, 0),
        ({"result": "{", "payload": "}"}, {"result": "{", "value": "}", "is_readable": False}, 0),
        ({"result": None, "problem": None}, {"result": None, "result_problem": ""}, 0),
        (
            {"progress": None, "note": None, "at": None},
            {"progress": None, "progress_note": "", "progress_at": None},
            0,
        ),
        ({"errors": ""}, {"errors": ()}, 0),
        (
            {"errors": 'x\n{"attempt":2,"error":"last"}\n'},
            {"errors": (Failure(0, "x"), Failure(2, "last"))},
            1,
        ),
        (
            {"errors": '{"attempt":2,"error":"a\u2028b"}'},
            {"errors": (Failure(2, "a\u2028b"),)},
            0,
        ),
    ],
)
def test_what_is_damaged_of_a_message_is_shown_as_text(
    columns: dict[str, Any], facts: dict[str, Any], reports: int
) -> None:
    """All else of it, and the other messages, are shown as they are."""
    events = Events()
    reported: list[Any] = []
    events.on("*", reported.append)
    rows = [build_info_row(**columns), build_info_row(id="id-2")]
    expected = {name: getattr(INFO, name) for name in INFO.__struct_fields__}
    assert read_infos(rows, CorruptionLog("queue/emails", events)) == [
        MessageInfo(**(expected | facts)),
        MessageInfo(**(expected | {"id": "id-2"})),
    ]
    assert len(reported) == reports


def test_of_very_many_errors_the_latest_are_kept_as_whole_lines() -> None:
    """Up to 400,000 characters all of them."""
    line = "x" * 99 + "\n"
    assert keep_latest(line * 4_000) == line * 4_000
    kept = keep_latest(f"{line * 4_000}y\n")
    assert kept == f"{line * 1_999}y\n"


def test_states_are_found_as_they_are_stored() -> None:
    """With a priority and with a task, they are stored as others."""
    assert find_stored_states(["ready", "dead", "waiting"]) == [
        "ready",
        "ranked",
        "task_ready",
        "task_ranked",
        "dead",
        "waiting",
        "task_waiting",
    ]
    assert find_stored_states([]) == []


def test_no_error_is_not_stored() -> None:
    """An empty text is none."""
    assert (encode_any_error(""), encode_any_error("a")) == (None, '"a"')


def test_the_latest_claims_of_which_nothing_was_settled_are_known() -> None:
    """A thousand of them, each until something of it is settled."""
    claims = UnsettledClaims()
    for number in range(1_001):
        claims.add(f"claim-{number}", [build_row(id=f"id-{number}"), build_row(id="other")])
    assert claims.remove("claim-0") == set()
    for number in (1, 1_000):
        assert claims.remove(f"claim-{number}") == {f"id-{number}", "other"}
        assert claims.remove(f"claim-{number}") == set()


@pytest.mark.parametrize(("boot", "delay_now"), [(7, 30.0), (0, 5_000.0)])
def test_what_is_shown_is_counted_by_the_clocks_of_claims_and_delays(
    boot: int, delay_now: float
) -> None:
    """Where a boot has no id, delays count by the time of day; claims never do."""
    clock = FakeClock()
    clock.boot_id, clock.mono_seconds, clock.wall_seconds = boot, 30.0, 5_000.0
    assert read_clock(cast("SqliteAccess", SimpleNamespace(clock=clock))) == {
        "now": 5_000.0,
        "boot": boot,
        "mono": 30.0,
        "delay_boot": boot,
        "delay_now": delay_now,
    }
