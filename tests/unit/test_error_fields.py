"""Errors keep every field as it was given, whatever becomes of what they were given."""

import copy
import pickle
from typing import Any

import pytest

from jobsync.errors import (
    ClaimLost,
    Conflict,
    Corrupt,
    Fenced,
    Incomplete,
    Invalid,
    InvalidRecord,
    JobRunning,
    JobsyncError,
    MessageClaimLost,
    Misconfigured,
    MissingExtra,
    NewerFormat,
    NoResult,
    NotFound,
    OutcomeUnknown,
    Problem,
    Unavailable,
    closest_name,
)

PROBLEMS = (Problem("name", "ab", "is short", "min:3"), Problem("age", 7, "is low", "min:18"))

CASES: list[tuple[JobsyncError, dict[str, Any], str]] = [
    (
        Invalid("ttl", None, "must be a number", "use 5"),
        {"field": "ttl", "value": None, "problem": "must be a number", "fix": "use 5"},
        "ttl must be a number (got None). Use 5.",
    ),
    (
        Misconfigured("url", 0, "must be a text", "run: jobsync help"),
        {"field": "url", "value": 0, "problem": "must be a text", "fix": "run: jobsync help"},
        "url must be a text (got 0). Run: jobsync help",
    ),
    (
        InvalidRecord("users", PROBLEMS),
        {
            "field": "name",
            "value": "ab",
            "problem": "is short",
            "fix": "follow the rule min:3",
            "resource": "users",
            "problems": PROBLEMS,
        },
        "users: name is short (got 'ab', rule min:3); age is low (got 7, rule min:18)",
    ),
    (
        MissingExtra("postgresql", "psycopg", "postgres"),
        {
            "field": "url",
            "value": "postgresql://…",
            "problem": "needs the package 'psycopg'",
            "fix": "run: pip install 'jobsync-fleet[postgres]'",
            "install": "pip install 'jobsync-fleet[postgres]'",
        },
        (
            "url needs the package 'psycopg' (got 'postgresql://…'). "
            "Run: pip install 'jobsync-fleet[postgres]'"
        ),
    ),
    (
        NotFound("queue", "bb", hint="b"),
        {"kind": "queue", "name": "bb", "known": (), "hint": "b"},
        "There is no queue 'bb'. Did you mean b?",
    ),
    (
        NotFound("job", "x", ["b", "c"]),
        {"kind": "job", "name": "x", "known": ("b", "c"), "hint": None},
        "There is no job 'x'. Known: b, c.",
    ),
    (
        NoResult("m1", "cancelled", "a user said so..."),
        {"id": "m1", "state": "cancelled", "reason": "a user said so..."},
        "Message 'm1' has no result, it is cancelled: a user said so.",
    ),
    (
        Conflict("a/b", "version 3"),
        {"key": "a/b", "detail": "version 3"},
        "a/b was changed by another writer (version 3). Read it again and decide again.",
    ),
    (
        JobRunning("report", "since noon"),
        {"key": "report", "detail": "since noon"},
        (
            "Job report is running (since noon). "
            'Wait for its end, or define it with overlap="queue".'
        ),
    ),
    (
        OutcomeUnknown("a/b"),
        {"key": "a/b", "detail": ""},
        "The outcome of the write to a/b is unknown. Read it before you act.",
    ),
    (
        Corrupt("a/b"),
        {"key": "a/b", "detail": ""},
        "a/b cannot be read and was left as it is. Repair or remove it by hand.",
    ),
    (
        ClaimLost("t1", "it is over"),
        {"task_id": "t1", "reason": "it is over"},
        "Task 't1' was not claimed: it is over. Do not do it here.",
    ),
    (
        MessageClaimLost("m1", "it is over"),
        {"task_id": "m1", "reason": "it is over"},
        (
            "Message 'm1' is no longer claimed here: it is over. "
            "Nothing of the transaction was written."
        ),
    ),
    (
        Fenced("a/b", 3),
        {"key": "a/b", "epoch": 3, "current": None},
        "a/b: the term of epoch 3 is over. Stop acting on it.",
    ),
    (
        Fenced("a/b", 3, 3),
        {"key": "a/b", "epoch": 3, "current": 3},
        "a/b: another worker holds epoch 3 too. Stop acting on it.",
    ),
    (
        Fenced("a/b", 3, 0),
        {"key": "a/b", "epoch": 3, "current": 0},
        "a/b: epoch 3 was replaced by 0. Stop acting on it.",
    ),
    (
        NewerFormat("a/b", 9, 2),
        {"key": "a/b", "found": 9, "known": 2},
        (
            "a/b has format 9, but this code writes format 2. It was left as it is. "
            "Upgrade jobsync in this process."
        ),
    ),
    (
        Incomplete("users", written="ab", conflicts="c", unknown="defg", unsent="hijkl"),
        {
            "resource": "users",
            "written": ("a", "b"),
            "conflicts": ("c",),
            "unknown": tuple("defg"),
            "unsent": tuple("hijkl"),
        },
        (
            "users: 2 written, 1 in conflict ('c'), 4 of unknown outcome ('d', 'e', 'f', …), "
            "5 not sent ('h', 'i', 'j', …)"
        ),
    ),
    (
        Unavailable("s3://b", "it is away", "run: start it"),
        {"store": "s3://b", "reason": "it is away", "fix": "run: start it"},
        "s3://b is unavailable: it is away. Run: start it",
    ),
    (
        Unavailable("s3://b", "it is away"),
        {"store": "s3://b", "reason": "it is away", "fix": "try again later"},
        "s3://b is unavailable: it is away. Try again later.",
    ),
]


@pytest.mark.parametrize(
    ("error", "fields", "message"), CASES, ids=lambda case: type(case).__name__
)
def test_an_error_has_its_fields_and_a_message_of_them(
    error: JobsyncError, fields: dict[str, Any], message: str
) -> None:
    """Also after pickling and copying, twice; none is taken for another or for a default."""
    for same in (
        error,
        pickle.loads(pickle.dumps(error)),
        pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(error)))),
        copy.copy(error),
        copy.deepcopy(error),
    ):
        assert type(same) is type(error)
        assert vars(same) == fields
        assert {name: type(value) for name, value in vars(same).items()} == {
            name: type(value) for name, value in fields.items()
        }
        assert str(same) == message


def test_lists_that_change_later_do_not_change_an_error() -> None:
    """What it was about is kept: the ids, the known names, the problems."""
    ids = {name: [name] for name in ("written", "conflicts", "unknown", "unsent")}
    incomplete = Incomplete("users", **ids)
    known, problems = ["a", "b"], list(PROBLEMS)
    missing, invalid = NotFound("queue", "x", known), InvalidRecord("users", problems)
    before = [str(error) for error in (incomplete, missing, invalid)]
    for changed in ids.values():
        changed.clear()
    known.clear()
    problems.clear()
    assert [str(error) for error in (incomplete, missing, invalid)] == before
    assert [getattr(incomplete, name) for name in ids] == [(name,) for name in ids]
    assert (missing.known, invalid.problems) == (("a", "b"), PROBLEMS)
    assert [str(pickle.loads(pickle.dumps(error))) for error in (missing, invalid)] == before[1:]


@pytest.mark.parametrize(
    ("fix", "sentence"),
    [
        ("use 5", "Use 5."),
        ("use 5.", "Use 5."),
        ("did you mean a?", "Did you mean a?"),
        ("stop!", "Stop!"),
        ("run: jobsync work", "Run: jobsync work"),
        ("start it, or run: jobsync work", "Start it, or run: jobsync work."),
        ("GRANT CONNECT", "GRANT CONNECT."),
        ("", "."),
    ],
)
def test_a_fix_is_a_sentence(fix: str, sentence: str) -> None:
    """With one mark at its end; a command that is all of it has none, to be copied."""
    for error in (Invalid("a", 1, "is wrong", fix), Misconfigured("a", 1, "is wrong", fix)):
        assert str(error) == f"a is wrong (got 1). {sentence}"
        assert error.fix == fix
    assert str(Unavailable("a", "gone", fix)) == f"a is unavailable: gone. {sentence}"


@pytest.mark.parametrize(
    ("name", "likeness", "close"),
    [
        ("waitOnEnter", 0.6, "wait_on_enter"),
        ("on2Messages", 0.6, "on2_messages"),
        ("wait_on_entr", 0.6, "wait_on_enter"),
        ("wait_on_entr", 0.99, None),
        ("wait_enter", 0.8, "wait_on_enter"),
        ("wait_enter", 0.9, None),
        ("weit_ontr", 0.6, "wait_on_enter"),
        ("zzz", 0.6, None),
        (5, 0.0, None),
        (None, 0.0, None),
    ],
)
def test_the_closest_name_is_as_close_as_asked(
    name: object, likeness: float, close: str | None
) -> None:
    """Also from names that can be read only once; in snake_case it is the name itself."""
    known = ["wait_on_enter", "on2_messages"]
    assert closest_name(name, iter(known), likeness=likeness) == close
    assert closest_name(name, known, likeness=likeness) == close
    if likeness == 0.6:
        assert closest_name(name, known) == close
