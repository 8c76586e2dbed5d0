"""Fixtures of the simulated worlds: what they log is expected, and takes longer than they do."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def without_warnings() -> Iterator[None]:
    """Log errors only: worlds have thousands of faults."""
    yield from _disable(logging.WARNING)


@pytest.fixture
def without_logs() -> Iterator[None]:
    """Log nothing: mutants, storms and failures on purpose log errors too."""
    yield from _disable(logging.CRITICAL)


def _disable(level: int) -> Iterator[None]:
    logging.disable(level)
    yield
    logging.disable(logging.NOTSET)
