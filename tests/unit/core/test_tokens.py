"""A task has the same token on every node, and in the original."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync.core.assignment import HASH_FUNCTIONS, token_of


@pytest.mark.parametrize(
    ("task", "md5", "sha256", "double"),
    [
        (1, 8411, 2913, 8436),
        ("1", 8411, 2913, 8436),
        ("customer-X", 8519, 8562, 9638),
        (("a", 1), 1945, 5390, 2636),
    ],
)
def test_tokens_are_those_of_the_original(task: object, md5: int, sha256: int, double: int) -> None:
    """A fleet can change over without a task changing its token."""
    found = [token_of(task, 10_000, name) for name in ("md5", "sha256", "double_sha256")]
    assert found == [md5, sha256, double]


def test_md5_is_the_default() -> None:
    """What the guide documents."""
    assert token_of("customer-X", 10_000) == 8519


@given(st.text(st.characters(codec="utf-8")), st.integers(1, 100_000))
def test_a_token_is_one_of_those_there_are(task: str, total: int) -> None:
    """Any text has a token, whatever the hash."""
    assert all(0 <= token_of(task, total, name) < total for name in HASH_FUNCTIONS)
