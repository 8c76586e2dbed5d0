"""What a database says of whether it can work now."""

import pytest
from waiting import until

from jobsync import CoordinatorPlugin, Database, Invalid, Plugin


class Fussy(Plugin):
    """A plugin that has reasons of its own."""

    reason = ""

    def unready(self) -> str:
        return self.reason or super().unready()


class Leader(CoordinatorPlugin):
    """A plugin with a session."""


async def test_a_database_tells_what_keeps_it_from_working() -> None:
    """Not connected, a plugin that was stopped, a plugin with reasons of its own."""
    fussy, leader = Fussy(), Leader()
    database = Database("memory://", plugins=[fussy, leader])
    assert database.unready() == ["the database is not connected"]
    async with database:
        assert database.unready() == []
        await leader.stop()
        assert database.unready() == ["leader: is not running"]
        await leader.start()
        fussy.reason = "tired"
        assert database.unready() == ["fussy: tired"]
    assert database.unready() == ["the database is not connected"]


async def test_a_database_that_has_failed_says_why() -> None:
    """What background work raised is the reason."""

    class Broken(Plugin):
        async def on_start(self) -> None:
            self.run_in_background(self.work)

        async def work(self) -> None:
            raise ZeroDivisionError("a bug")

    database = await Database("memory://", plugins=[Broken()]).connect()
    failed: list[object] = []
    database.on("db:failed", failed.append)
    await until(lambda: failed)
    (why,) = database.unready()
    assert "the database has failed" in why
    assert "a bug" in why
    await database.disconnect()


def test_plugins_can_be_given_at_once() -> None:
    """As `use_plugin` adds them, with the same checks."""
    one = Fussy()
    assert Database("memory://", plugins=[one]).plugins.fussy is one
    with pytest.raises(Invalid, match="must be a Plugin"):
        Database("memory://", plugins=["fussy"])  # type: ignore[list-item]
    with pytest.raises(Invalid, match="is taken"):
        Database("memory://", plugins=[Fussy(), Fussy()])
