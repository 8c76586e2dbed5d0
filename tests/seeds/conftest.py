"""The stores on which the examples of the specification run."""

import itertools

import pytest
from servers import Locate

_numbers = itertools.count()


@pytest.fixture(params=["memory", "sqlite", "postgres", "s3"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """The URL of a store; stands for `s3://key:secret@bucket` in the specification."""
    return locate(request.param)
