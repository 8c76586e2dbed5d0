"""What a `Database` that is used in a wrong way says, and the fix that can be copied."""

from typing import Any

import pytest

from jobsync import Database, Invalid, QueuePlugin, sync

IMPORT = "`from jobsync.sync import Database`, then `with db:`"


def test_a_plain_with_is_refused_with_the_import_for_blocking_code() -> None:
    """The error is ours, not Python's about the protocol of context managers."""
    database = Database("memory://")
    with (
        pytest.raises(Invalid, match=r"^database cannot be used in a plain `with`") as caught,
        database,  # type: ignore[attr-defined]
    ):
        pass
    assert IMPORT in str(caught.value)
    assert "`async with db:`" in str(caught.value)


def test_an_unconnected_database_names_the_import_for_blocking_code() -> None:
    """What is to be written can be copied."""
    with pytest.raises(Invalid, match="is not connected") as caught:
        _ = Database("memory://").store
    assert IMPORT in str(caught.value)


@pytest.mark.parametrize("kind", [Database, sync.Database])
def test_plugins_without_their_name_are_refused_with_the_fix(kind: Any) -> None:
    """Python's error would count arguments; what may be a secret is not shown."""
    with pytest.raises(Invalid, match=r"\(got \[QueuePlugin\('z'\)\]\)\. Write plugins=\[…\]"):
        kind("memory://", [QueuePlugin("z")])
    with pytest.raises(Invalid, match=r"must be passed by its name") as caught:
        kind("memory://", "postgresql://me:hunter2@host/db")
    assert "hunter2" not in str(caught.value)
