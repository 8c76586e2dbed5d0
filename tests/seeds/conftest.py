"""The stores on which the documents' examples run."""

import itertools

import pytest
from servers import Locate

_numbers = itertools.count()


@pytest.fixture(params=["memory", "sqlite", "postgres", "s3"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """Where the documents say `s3://key:secret@bucket`."""
    return locate(request.param)
