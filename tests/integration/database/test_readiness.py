"""A database reports why it cannot work now."""

import pytest
from waiting import until

from jobsync import CoordinatorPlugin, Database, Invalid, Plugin


class Picky(Plugin):
    """A plugin with its own reasons to be unready."""

    reason = ""

    def unready(self) -> str:
        return self.reason or super().unready()


class Leader(CoordinatorPlugin):
    """A plugin with a session."""


async def test_a_database_reports_why_it_is_not_ready() -> None:
    """It is not connected, a plugin was stopped, or a plugin has its own reason."""
    picky, leader = Picky(), Leader()
    database = Database("memory://", plugins=[picky, leader])
    assert database.unready() == ["the database is not connected"]
    async with database:
        assert database.unready() == []
        await leader.stop()
        assert database.unready() == ["leader: is not running"]
        await leader.start()
        picky.reason = "tired"
        assert database.unready() == ["picky: tired"]
    assert database.unready() == ["the database is not connected"]


async def test_a_failed_database_reports_the_cause() -> None:
    """The reason is the error of the background work."""

    class Broken(Plugin):
        async def on_start(self) -> None:
            self.run_in_background(self.work)

        async def work(self) -> None:
            raise ZeroDivisionError("a bug")

    database = await Database("memory://", plugins=[Broken()]).connect()
    failed: list[object] = []
    database.on("db:failed", failed.append)
    await until(lambda: failed)
    (reason,) = database.unready()
    assert "the database has failed" in reason
    assert "a bug" in reason
    await database.disconnect()


def test_plugins_can_be_passed_to_the_constructor() -> None:
    """They are added as by `use_plugin`, with the same checks."""
    one = Picky()
    assert Database("memory://", plugins=[one]).plugins.picky is one
    with pytest.raises(Invalid, match="must be a Plugin"):
        Database("memory://", plugins=["picky"])  # type: ignore[list-item]
    with pytest.raises(Invalid, match="has the name of another plugin"):
        Database("memory://", plugins=[Picky(), Picky()])
