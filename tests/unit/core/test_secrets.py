"""A secret is shown by `reveal` only."""

import copy
import pickle
from collections.abc import Callable
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync.core.secrets import Secret


@pytest.mark.parametrize("shown", [repr, str, "{}".format, "{!r:>20}".format, "{:.1}".format])
def test_every_way_to_print_it_shows_the_mask(shown: Callable[[object], str]) -> None:
    """No conversion to text reveals a secret."""
    assert shown(Secret("hunter2")).strip() == "***"


def test_containers_of_it_hide_it_too() -> None:
    """A secret inside a list or a dictionary stays hidden."""
    assert str([Secret("hunter2")]) == "[***]"
    assert f"{ {'password': Secret('hunter2')} }" == "{'password': ***}"


def test_reveal_returns_the_text() -> None:
    """Only `reveal` returns the text, unchanged."""
    assert Secret("hunter2").reveal() == "hunter2"


@given(st.text(), st.text())
def test_equality_and_hash_go_by_content(one: str, other: str) -> None:
    """Two secrets are equal exactly when their texts are; a secret never equals plain text."""
    assert (Secret(one) == Secret(other)) is (one == other)
    assert hash(Secret(one)) == hash(Secret(one))
    assert Secret(one) != one
    assert (Secret(one) == mock.ANY) is True
    assert len({Secret(one), Secret(one), Secret(other)}) == (1 if one == other else 2)


def test_it_cannot_be_changed() -> None:
    """Neither assignment nor deletion changes a secret."""
    secret = Secret("hunter2")
    with pytest.raises(AttributeError):
        secret._text = "other"
    with pytest.raises(AttributeError):
        del secret._text
    with pytest.raises(AttributeError):
        secret.other = "x"
    assert secret.reveal() == "hunter2"


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_copies_are_equal(make: Callable[[Secret], Secret]) -> None:
    """A secret survives copying and pickling."""
    assert make(Secret("hunter2")) == Secret("hunter2")


def test_encoders_refuse_it() -> None:
    """A secret inside a value that is encoded is an error, not a leak."""
    with pytest.raises(TypeError) as caught:
        msgspec.json.encode({"password": Secret("hunter2")})
    assert "hunter2" not in str(caught.value)
