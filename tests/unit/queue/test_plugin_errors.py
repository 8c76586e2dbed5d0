"""A `QueuePlugin` in errors, as its user has written it."""

from typing import Any

import pytest

from jobsync import Database, Invalid, QueuePlugin


def test_a_queue_is_shown_by_its_resource() -> None:
    """Not by its name in the database, which is that of its kind."""
    queue = QueuePlugin("z")
    assert repr(queue) == "QueuePlugin('z')"
    Database("memory://", plugins=[queue])
    assert repr(queue) == "QueuePlugin('z')"
    assert repr(QueuePlugin("z", namespace="b")) == "QueuePlugin('z', namespace='b')"


async def test_a_queue_without_a_database_is_named_with_the_fix() -> None:
    """The error shows which queue was forgotten, and where it belongs."""
    with pytest.raises(Invalid, match=r"\(got QueuePlugin\('orphan'\)\)") as caught:
        await QueuePlugin("orphan").enqueue({"n": 1})
    assert "Write Database(url, plugins=[…])" in str(caught.value)


def test_two_queues_of_one_name_are_refused_by_their_name() -> None:
    """The error shows the queue that is there twice."""
    problem = r"has the name of another plugin of this database \(got QueuePlugin\('z'\)\)"
    with pytest.raises(Invalid, match=problem):
        Database("memory://", plugins=[QueuePlugin("a"), QueuePlugin("z"), QueuePlugin("z")])


def test_a_queue_with_a_name_that_no_resource_can_have_is_refused_at_once() -> None:
    """Not when its database connects, which is elsewhere and later."""
    with pytest.raises(Invalid, match=r"^resource must be a valid .*\(got 'my queue'\)"):
        QueuePlugin("my queue")


@pytest.mark.parametrize("timeout", [0, 0.0, -1, "5", float("nan")])
def test_a_queue_without_any_time_for_its_handlers_is_refused(timeout: Any) -> None:
    """No limit is None; an hour by default."""
    with pytest.raises(Invalid, match="timeout"):
        QueuePlugin("z", timeout=timeout)
    assert QueuePlugin("z", timeout=None)._timeout is None
    assert QueuePlugin("z", timeout=0.5)._timeout == 0.5
    assert QueuePlugin("z")._timeout == 3600
