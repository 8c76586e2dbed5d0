"""The stores on which the documents' examples run."""

import itertools
from pathlib import Path

import pytest

_numbers = itertools.count()


@pytest.fixture(params=["memory", "sqlite", "postgres", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the documents say `s3://key:secret@bucket`."""
    number = next(_numbers)
    match request.param:
        case "memory":
            return f"memory://seeds-{number}"
        case "sqlite":
            return f"sqlite:///{tmp_path / 'jobs.db'}"
        case "postgres":
            return f"{request.getfixturevalue('postgres').url}?schema=seeds_{number}"
        case _:
            return str(request.getfixturevalue("bucket_url"))
