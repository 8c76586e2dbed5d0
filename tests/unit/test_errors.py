"""Errors say what is wrong and what to do, from fields that survive a pickle."""

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
    JobsyncError,
    Misconfigured,
    MissingExtra,
    NewerFormat,
    NotFound,
    OutcomeUnknown,
    Problem,
    Unavailable,
)

SAMPLES: list[tuple[JobsyncError, str]] = [
    (JobsyncError("why"), "why"),
    (Invalid("ttl", -1, "is negative", "use 0 or more"), "ttl=-1: is negative; use 0 or more"),
    (Misconfigured("url", "x", "is no URL", "write x://"), "url='x': is no URL; write x://"),
    (
        MissingExtra("s3", "obstore", "s3"),
        "url='s3://…': needs the package 'obstore'; run: pip install 'jobsync-fleet[s3]'",
    ),
    (NotFound("queue", "a"), "no queue 'a'"),
    (NotFound("queue", "a", ["b", "c"]), "no queue 'a'; there are: b, c"),
    (
        NotFound("queue", "bb", ["b", "c"], "b"),
        "no queue 'bb' (did you mean b?); there are: b, c",
    ),
    (Conflict("a/b"), "a/b was written by somebody else; read it again and decide again"),
    (
        OutcomeUnknown("a/b", "timeout"),
        "a/b: the outcome of this write is unknown; read it before you act: timeout",
    ),
    (
        Corrupt("{a}", "not JSON"),
        "{a} cannot be read and was left as it is; mend or remove it by hand: not JSON",
    ),
    (
        ClaimLost("ann", "node-2 is doing it"),
        "task 'ann' was not claimed: node-2 is doing it; do not do it here",
    ),
    (Fenced("a/b", 3, 5), "a/b: epoch 3 was replaced by 5; stop acting on it"),
    (
        NewerFormat("a/b", 9, 1),
        (
            "a/b has format 9, this code writes 1; it was left as it is: "
            "upgrade jobsync in this process"
        ),
    ),
    (
        InvalidRecord(
            "users",
            [Problem("name", "ab", "has 2 characters", "min:3"), Problem("age", None, "…", "…")],
        ),
        "users: name='ab': has 2 characters (rule: min:3); age=None: … (rule: …)",
    ),
    (
        Incomplete("users", written=["a"], conflicts=["b"], unsent=["c", "d", "e", "f"]),
        "users: 1 written, 1 in conflict ('b'), 4 not sent ('c', 'd', 'e', …)",
    ),
    (Incomplete("users", unknown=["a"]), "users: 0 written, 1 of unknown outcome ('a')"),
    (Unavailable("s3", "refused"), "s3: refused; try again later"),
    (Unavailable("s3", "refused", "start it"), "s3: refused; start it"),
]


def _public() -> dict[str, type[JobsyncError]]:
    return {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, JobsyncError) and not name.startswith("_")
    }


def _real_tree() -> dict[str, str]:
    """Give each error the nearest public one above it."""
    return {
        name: next(base.__name__ for base in kind.__mro__[1:] if base in _public().values())
        for name, kind in _public().items()
        if kind is not JobsyncError
    }


def _drawn_tree() -> dict[str, str]:
    """Read the docstring's drawing: four columns are one level."""
    above: list[str] = []
    tree = {}
    for line in (errors.__doc__ or "").splitlines():
        drawn = re.fullmatch(r" {4}((?:[│ ]   )*)(?:[├└]── )?(\w+)(?:  +\S.*)?", line)
        if not drawn:
            continue
        depth = len(drawn[1]) // 4 + ("── " in line)
        above[depth:] = [drawn[2]]
        if depth:
            tree[drawn[2]] = above[depth - 1]
    return tree


@pytest.mark.parametrize(("error", "message"), SAMPLES, ids=lambda case: type(case).__name__)
def test_a_message_is_made_of_its_fields(error: JobsyncError, message: str) -> None:
    """The message names the thing, the problem and the way out."""
    assert str(error) == message


@pytest.mark.parametrize("error", [error for error, _ in SAMPLES], ids=lambda e: type(e).__name__)
def test_an_error_survives_a_pickle(error: JobsyncError) -> None:
    """An error that crosses a process keeps its type, its fields and its message."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


def test_every_error_is_sampled_here() -> None:
    """No error class escapes the two tests above."""
    assert {type(error) for error, _ in SAMPLES} == set(_public().values())


def test_a_long_value_is_cut() -> None:
    """A message stays readable when the value is a megabyte; the field keeps it whole."""
    error = Invalid("body", "x" * 1_000_000, "is too long", "shorten it")
    assert str(error) == f"body='{'x' * 118}…: is too long; shorten it"
    assert len(str(error.value)) == 1_000_000


def test_a_long_list_of_problems_is_cut() -> None:
    """A message stays readable when a thousand records are wrong; the field has them all."""
    error = InvalidRecord("users", [Problem(f"[{i}].n", i, "p", "r") for i in range(1000)])
    assert str(error).endswith("[19].n=19: p (rule: r); and 980 more")
    assert len(error.problems) == 1000


def test_a_value_that_just_fits_is_whole() -> None:
    """A value of exactly the width is not cut."""
    assert str(Invalid("a", "x" * 118, "p", "f")) == f"a='{'x' * 118}': p; f"


def test_the_drawn_tree_is_the_real_one() -> None:
    """The drawing in the module's docstring shows each class under its parent, and no other."""
    assert _drawn_tree() == _real_tree()


def test_every_error_is_public() -> None:
    """`__all__` names each public class of the tree."""
    assert sorted(errors.__all__) == sorted([*_public(), "Problem"])


def test_a_missing_extra_is_a_misconfiguration() -> None:
    """Whoever handles a wrong set-up handles a missing package, and has the line to run."""
    error = MissingExtra("postgresql", "psycopg", "postgres")
    assert isinstance(error, Misconfigured)
    assert error.install == "pip install 'jobsync-fleet[postgres]'"
