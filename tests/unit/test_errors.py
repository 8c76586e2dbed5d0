"""Errors state what is wrong and what to do, from fields that survive pickling."""

import inspect
import pickle
import re

import pytest

from jobsync import errors
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
)

SAMPLES: list[tuple[JobsyncError, str]] = [
    (JobsyncError("why"), "why"),
    (
        Invalid("ttl", -1, "must be 0 or more", "use None for no limit"),
        "ttl must be 0 or more (got -1). Use None for no limit.",
    ),
    (
        Misconfigured("url", "x", "must start with a scheme", "did you mean sqlite:///x?"),
        "url must start with a scheme (got 'x'). Did you mean sqlite:///x?",
    ),
    (
        MissingExtra("s3", "obstore", "s3"),
        "url needs the package 'obstore' (got 's3://…'). Run: pip install 'jobsync-fleet[s3]'",
    ),
    (NoResult("a", "dead", "boom"), "Message 'a' has no result, it is dead: boom."),
    (NoResult("a", "completed", "No."), "Message 'a' has no result, it is completed: No."),
    (NotFound("queue", "a"), "There is no queue 'a'."),
    (NotFound("queue", "a", ["b", "c"]), "There is no queue 'a'. Known: b, c."),
    (
        NotFound("queue", "bb", ["b", "c"], "b"),
        "There is no queue 'bb'. Did you mean b? Known: b, c.",
    ),
    (Conflict("a/b"), "a/b was changed by another writer. Read it again and decide again."),
    (
        JobRunning("report"),
        'Job report is running. Wait for its end, or define it with overlap="queue".',
    ),
    (
        OutcomeUnknown("a/b", "timeout"),
        "The outcome of the write to a/b is unknown (timeout). Read it before you act.",
    ),
    (
        Corrupt("{a}", "not JSON"),
        "{a} cannot be read (not JSON) and was left as it is. Repair or remove it by hand.",
    ),
    (
        ClaimLost("ann", "node-2 is doing it"),
        "Task 'ann' was not claimed: node-2 is doing it. Do not do it here.",
    ),
    (
        MessageClaimLost("01a1", "another worker has it"),
        (
            "Message '01a1' is no longer claimed here: another worker has it. "
            "Nothing of the transaction was written."
        ),
    ),
    (Fenced("a/b", 3, 5), "a/b: epoch 3 was replaced by 5. Stop acting on it."),
    (
        NewerFormat("a/b", 9, 1),
        (
            "a/b has format 9, but this code writes format 1. It was left as it is. "
            "Upgrade jobsync in this process."
        ),
    ),
    (
        InvalidRecord(
            "users",
            [
                Problem("name", "ab", "must have at least 3 characters", "min:3"),
                Problem("age", None, "…", "…"),
            ],
        ),
        (
            "users: name must have at least 3 characters (got 'ab', rule min:3); "
            "age … (got None, rule …)"
        ),
    ),
    (
        Incomplete("users", written=["a"], conflicts=["b"], unsent=["c", "d", "e", "f"]),
        "users: 1 written, 1 in conflict ('b'), 4 not sent ('c', 'd', 'e', …)",
    ),
    (Incomplete("users", unknown=["a"]), "users: 0 written, 1 of unknown outcome ('a')"),
    (
        Incomplete("users", conflicts=["a", "b", "c"]),
        "users: 0 written, 3 in conflict ('a', 'b', 'c')",
    ),
    (
        Unavailable("s3", "the server refused"),
        "s3 is unavailable: the server refused. Try again later.",
    ),
    (
        Unavailable("s3", "the server refused", "start it"),
        "s3 is unavailable: the server refused. Start it.",
    ),
]


def _public() -> dict[str, type[JobsyncError]]:
    return {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, JobsyncError) and not name.startswith("_")
    }


def _real_tree() -> dict[str, str]:
    """Return the nearest public base class of each error."""
    return {
        name: next(base.__name__ for base in kind.__mro__[1:] if base in _public().values())
        for name, kind in _public().items()
        if kind is not JobsyncError
    }


def _drawn_tree() -> dict[str, str]:
    """Read the tree drawn in the docstring: four columns are one level."""
    bases: list[str] = []
    tree = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r" {4}((?:[│ ]   )*)(?:[├└]── )?(\w+)(?:  +\S.*)?", line)
        if not match:
            continue
        depth = len(match[1]) // 4 + ("── " in line)
        bases[depth:] = [match[2]]
        if depth:
            tree[match[2]] = bases[depth - 1]
    return tree


@pytest.mark.parametrize(("error", "message"), SAMPLES, ids=lambda case: type(case).__name__)
def test_a_message_is_built_from_the_fields(error: JobsyncError, message: str) -> None:
    """The message states the field, the problem, the value and the fix."""
    assert str(error) == message


@pytest.mark.parametrize("error", [error for error, _ in SAMPLES], ids=lambda e: type(e).__name__)
def test_an_error_survives_pickling(error: JobsyncError) -> None:
    """An error that crosses a process keeps its type, its fields and its message."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


def _list_parameters(error: JobsyncError) -> set[str]:
    return {*inspect.signature(type(error).__init__).parameters} - {"self"}


BUILT_FROM_FIELDS = [error for error, _ in SAMPLES if _list_parameters(error) <= vars(error).keys()]


@pytest.mark.parametrize("error", BUILT_FROM_FIELDS, ids=lambda case: type(case).__name__)
def test_an_error_whose_fields_were_passed_by_name_survives_pickling(error: JobsyncError) -> None:
    """None of its fields is lost on the way because of how it was built."""
    built = type(error)(**{name: vars(error)[name] for name in _list_parameters(error)})
    copy = pickle.loads(pickle.dumps(built))
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


def test_every_error_is_sampled_here() -> None:
    """The two tests above cover every error class."""
    assert {type(error) for error, _ in SAMPLES} == set(_public().values())


def test_a_long_value_is_cut() -> None:
    """A message stays short when the value is a megabyte; the field keeps all of it."""
    error = Invalid("body", "x" * 1_000_000, "is too long", "shorten it")
    assert str(error) == f"body is too long (got '{'x' * 118}…). Shorten it."
    assert len(str(error.value)) == 1_000_000


def test_a_long_list_of_problems_is_cut() -> None:
    """A message stays short when a thousand records are wrong; the field has them all."""
    error = InvalidRecord("users", [Problem(f"[{i}].n", i, "p", "r") for i in range(1000)])
    assert str(error).endswith("[19].n p (got 19, rule r); and 980 more")
    assert len(error.problems) == 1000


def test_a_value_that_just_fits_is_not_cut() -> None:
    """A value of exactly the width is shown in full."""
    assert str(Invalid("a", "x" * 118, "p", "f")) == f"a p (got '{'x' * 118}'). F."


def test_a_value_too_large_to_show_is_left_out() -> None:
    """A value of "…" adds nothing to the message."""
    assert str(Invalid("a", "…", "must be smaller", "cut it")) == "a must be smaller. Cut it."


def test_the_drawn_tree_is_the_real_one() -> None:
    """The tree in the module's docstring shows each class under its base, and no other."""
    assert _drawn_tree() == _real_tree()


def test_every_error_is_public() -> None:
    """`__all__` lists each public class of the tree."""
    assert sorted(errors.__all__) == sorted([*_public(), "Problem"])


def test_a_missing_extra_is_a_misconfiguration() -> None:
    """A handler for a wrong setup also catches a missing package, with the command to run."""
    error = MissingExtra("postgresql", "psycopg", "postgres")
    assert isinstance(error, Misconfigured)
    assert error.install == "pip install 'jobsync-fleet[postgres]'"
