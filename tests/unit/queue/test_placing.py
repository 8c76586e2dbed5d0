"""The options that say where a message stands are checked before anything is sent."""

from datetime import timedelta
from typing import Any

import pytest

from jobsync import Invalid, QueuePlugin
from jobsync.queue.backend import NewMessage
from jobsync.queue.message import are_plain
from jobsync.queue.placing import check_order, place_messages

MESSAGES = [NewMessage(id=f"id-{n}", value={"n": n}, max_attempts=4) for n in range(3)]


def test_messages_get_their_places() -> None:
    """Texts apply to all of them, functions to each."""
    placed = place_messages(
        MESSAGES,
        {
            "priority": -100,
            "group": "all",
            "key": lambda message: f"key-{message['n']}",
            "key_ttl": timedelta(hours=1),
            "replace": True,
        },
    )
    assert [(each.id, each.value) for each in placed] == [
        (each.id, each.value) for each in MESSAGES
    ]
    assert [each.key for each in placed] == ["key-0", "key-1", "key-2"]
    assert {(each.priority, each.group, each.key_ttl, each.replace) for each in placed} == {
        (-100, "all", 3600.0, True)
    }


@pytest.mark.parametrize("option", ["group", "key"])
@pytest.mark.parametrize("size", [200, 201])
def test_names_have_at_most_200_bytes(option: str, size: int) -> None:
    """Counted in bytes, as databases do."""
    options: Any = {option: "ä" * (size // 2) + "x" * (size % 2)}
    if size == 200:
        (placed,) = place_messages(MESSAGES[:1], options)
        assert getattr(placed, option) == options[option]
    else:
        with pytest.raises(Invalid, match=option):
            place_messages(MESSAGES[:1], options)


WRONG: list[tuple[str, Any]] = [
    ("priority", {"priority": 101}),
    ("priority", {"priority": -101}),
    ("priority", {"priority": 1.0}),
    ("priority", {"priority": True}),
    ("priority", {"priority": None}),
    ("group", {"group": ""}),
    ("group", {"group": "a\nb"}),
    ("group", {"group": 7}),
    ("key", {"key": "a\0"}),
    ("key", {"key": ""}),
    ("key_ttl", {"key": lambda message: str(message["n"]), "key_ttl": 0}),
    ("key_ttl", {"key": lambda message: str(message["n"]), "key_ttl": "1h"}),
    ("replace", {"key": lambda message: str(message["n"]), "replace": 1}),
]
"""Options that are wrong for any message."""

WRONG_FOR_SOME: list[tuple[str, Any]] = [
    ("group", {"group": lambda _: 7}),
    ("key", {"key": "same"}),
    ("key", {"key": lambda message: f"{message['n'] % 2}"}),
    ("key_ttl", {"key_ttl": 5}),
    ("replace", {"replace": True}),
]
"""Options that other messages may have, or with other options beside them."""


@pytest.mark.parametrize(("field", "options"), [*WRONG, *WRONG_FOR_SOME])
def test_what_makes_no_sense_is_refused(field: str, options: Any) -> None:
    """The error names the option, and has its value."""
    with pytest.raises(Invalid) as refused:
        place_messages(MESSAGES, options)
    assert refused.value.field == field
    if not callable(options[field]):
        assert refused.value.value == options[field]


@pytest.mark.parametrize(("field", "options"), WRONG)
def test_a_task_with_a_wrong_option_is_refused_when_it_is_defined(field: str, options: Any) -> None:
    """Found: only its messages were, one by one, in the program that enqueues."""
    queue = QueuePlugin("tasks", order="priority")

    async def run(n: int) -> int:
        return n

    with pytest.raises(Invalid) as refused:
        queue.task(**options)(run)
    assert refused.value.field == field
    task = queue.task(run)
    with pytest.raises(Invalid) as refused:
        task.with_options(**options)
    assert refused.value.field == field


@pytest.mark.parametrize(("field", "options"), WRONG_FOR_SOME)
def test_a_task_may_have_what_depends_on_its_messages(field: str, options: Any) -> None:
    """A call may add what is missing, such as the key."""
    queue = QueuePlugin("tasks")

    @queue.task(**options)
    async def run(n: int) -> int:
        return n

    assert queue._known_tasks[run.name].options[field] == options[field]  # type: ignore[literal-required]


@pytest.mark.parametrize("order", ["fifo", "lifo", "priority"])
def test_a_priority_needs_a_queue_with_priorities(order: str) -> None:
    """It would have no effect in another; a priority of 0 is none."""
    check_order(place_messages(MESSAGES, {"priority": 0}), order)
    urgent = place_messages(MESSAGES, {"priority": 1})
    if order == "priority":
        check_order(urgent, order)
    else:
        with pytest.raises(Invalid, match='order="priority"'):
            check_order(urgent, order)


@pytest.mark.parametrize(
    ("options", "format", "is_plain"),
    [
        ({}, 1, True),
        ({"key": lambda message: str(message["n"])}, 1, False),
        ({"priority": 1}, 2, False),
        ({"group": "a"}, 2, False),
    ],
)
def test_the_format_says_what_older_code_must_leave_alone(
    options: Any, format: int, *, is_plain: bool
) -> None:
    """Only a key does not concern it."""
    for message in place_messages(MESSAGES, options):
        assert (message.format, are_plain([message])) == (format, is_plain)


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [
        (5, 5.0),
        (timedelta(seconds=5), 5.0),
        (timedelta(days=2, seconds=5), 172_805.0),
        (timedelta(milliseconds=1500), 1.5),
        (None, None),
    ],
)
def test_a_key_is_held_for_seconds_or_for_a_duration(ttl: Any, seconds: float | None) -> None:
    """With all parts of it."""
    (placed,) = place_messages(MESSAGES[:1], {"key": "k", "key_ttl": ttl})
    assert placed.key_ttl == seconds
