"""Transactions of handlers on a store that opens no connections for users."""

from unittest.mock import create_autospec

import pytest

from jobsync.components import Components
from jobsync.errors import Invalid
from jobsync.queue.sql.postgres import PostgresBackend
from jobsync.stores.sql import PostgresAccess


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_a_transaction_is_refused_with_the_reason(*, is_blocking: bool) -> None:
    """Found: NotImplementedError without a word."""
    access = create_autospec(PostgresAccess, schema='"jobs"', channel="changes")
    access.user_connections = None
    backend = PostgresBackend(access, "emails", Components.system())
    assert backend.transactions is not None
    with pytest.raises(Invalid, match="opens no connections for users"):
        await backend.transactions.begin(1.0, is_blocking=is_blocking)
