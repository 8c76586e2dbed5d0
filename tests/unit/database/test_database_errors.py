"""What a `Database` that is used in a wrong way says, and the fix that can be copied."""

from typing import Any

import pytest

from jobsync import Database, Invalid, Plugin, QueuePlugin, sync

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


@pytest.mark.parametrize("plugins", ["queue", "", 5, None, QueuePlugin("z")])
def test_plugins_that_are_no_list_are_refused_with_the_fix(plugins: Any) -> None:
    """Also a text, which is a list of letters."""
    with pytest.raises(Invalid, match=r"plugins must be a list .*Write plugins=\[QueuePlugin\("):
        Database("memory://", plugins=plugins)


async def test_a_database_that_is_being_disconnected_is_not_ready() -> None:
    """So nobody sends it any work."""
    told: list[list[str]] = []

    class LastPlugin(Plugin):
        async def on_stop(self) -> None:
            told.append(self.database.unready())

    async with Database("memory://", plugins=[LastPlugin()]) as database:
        assert database.unready() == []
    assert told == [["the database is not connected"]]
    assert database.unready() == ["the database is not connected"]
