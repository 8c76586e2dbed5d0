"""The options that say where a message stands are checked before anything is sent."""

import enum
from datetime import timedelta
from typing import Any, cast

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
    ("key_ttl", {"key": lambda message: str(message["n"]), "key_ttl": -1}),
    ("key_ttl", {"key": lambda message: str(message["n"]), "key_ttl": 366 * 86_400 + 1}),
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
        (type("Derived", (timedelta,), {})(seconds=5), 5.0),
        (366 * 86_400, 366 * 86_400.0),
        (timedelta(days=366), 366 * 86_400.0),
        (None, None),
    ],
)
def test_a_key_is_held_for_seconds_or_for_a_duration(ttl: Any, seconds: float | None) -> None:
    """With all parts of it."""
    (placed,) = place_messages(MESSAGES[:1], {"key": "k", "key_ttl": ttl})
    assert placed.key_ttl == seconds


class Named(str, enum.Enum):  # noqa: UP042 - its text is that of the member
    """Names whose text is another one when they are formatted."""

    ORDERS = "orders"


@pytest.mark.parametrize("option", ["group", "key"])
@pytest.mark.parametrize("name", [Named.ORDERS, type("Derived", (str,), {})("orders")])
def test_a_name_of_another_type_is_stored_as_its_text(option: str, name: Any) -> None:
    """Whether it is passed, or a function of the message returns it."""
    for given in (name, lambda _: name):
        (placed,) = place_messages(MESSAGES[:1], cast("Any", {option: given}))
        found = getattr(placed, option)
        assert (type(found), found) == (str, "orders")


@pytest.mark.parametrize("option", ["group", "key"])
def test_a_function_gets_the_message_as_it_will_be_read(option: str) -> None:
    """As JSON has it, whatever was passed; one of them may have no name."""
    given: list[Any] = []
    values: list[Any] = [{"n": (1, 2)}, (3, "a"), 5]
    messages = [NewMessage(id=str(n), value=each, max_attempts=4) for n, each in enumerate(values)]

    def choose(message: Any) -> str | None:
        given.append(message)
        return None if message == 5 else str(message)

    placed = place_messages(messages, cast("Any", {option: choose}))
    assert given == [{"n": [1, 2]}, [3, "a"], 5]
    assert [getattr(each, option) for each in placed] == ["{'n': [1, 2]}", "[3, 'a']", None]


@pytest.mark.parametrize("keys", ["abcb", "baac"])
def test_the_error_names_the_key_that_is_there_twice(keys: str) -> None:
    """And no other one."""
    messages = [NewMessage(id=str(n), value=key, max_attempts=4) for n, key in enumerate(keys)]
    with pytest.raises(Invalid) as refused:
        place_messages(messages, {"key": str})
    assert refused.value.value == ("b" if keys == "abcb" else "a")


@pytest.mark.parametrize("priorities", [[0, 5], [0, -1], [5, 0]])
@pytest.mark.parametrize("order", ["fifo", "lifo"])
def test_each_priority_of_a_push_is_checked(priorities: list[int], order: str) -> None:
    """Those below 0 too, wherever they stand."""
    messages = [
        NewMessage(id=str(n), value=n, max_attempts=4, priority=each)
        for n, each in enumerate(priorities)
    ]
    with pytest.raises(Invalid) as refused:
        check_order(messages, order)
    assert refused.value.value == next(each for each in priorities if each)
    assert order in str(refused.value)
    check_order(messages, "priority")


@pytest.mark.parametrize("task", ["", "send"])
@pytest.mark.parametrize("priority", [0, 1, -1])
@pytest.mark.parametrize("group", [None, "a"])
def test_the_format_of_a_message_is_the_newest_that_it_needs(
    task: str, priority: int, group: str | None
) -> None:
    """Those of tasks are apart, whatever else they have; others by their places."""
    message = NewMessage(id="a", value=1, max_attempts=4, task=task, priority=priority, group=group)
    is_placed = priority != 0 or group is not None
    assert message.format == (3 if task else 2 if is_placed else 1)
    assert message.lane == ("task_" if task else "")
    assert are_plain([message]) is not is_placed
    plain = NewMessage(id="b", value=1, max_attempts=4)
    assert are_plain([plain, message]) is not is_placed
    assert are_plain([])


@pytest.mark.parametrize(
    ("delay", "at", "found"),
    [
        (0.0, None, 0.0),
        (7.0, None, 7.0),
        (7.0, 105.0, 5.0),
        (0.0, 105.0, 5.0),
        (7.0, 100.0, 0.0),
        (7.0, 95.0, 0.0),
        (7.0, 0.0, 0.0),
    ],
)
def test_a_message_waits_for_a_time_or_for_a_delay(
    delay: float, at: float | None, found: float
) -> None:
    """A time of day comes before a delay; one that is past is no delay."""
    message = NewMessage(id="a", value=1, max_attempts=4, delay=delay, at=at)
    assert message.find_delay(100.0) == found
