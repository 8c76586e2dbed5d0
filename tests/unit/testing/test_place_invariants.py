"""Groups, orders and keys: each check of where messages stand finds what breaks it."""

from typing import Any

import pytest
from message_histories import QUEUE, WALL, QueueHistory

from jobsync.testing import check_places

States = dict[str, str]


def find(world: QueueHistory) -> list[str]:
    """Return what is found: the id of the promise, and the problem."""
    return [str(each) for each in check_places(world.history)]


def push(world: QueueHistory, places: dict[str, dict[str, Any]], **details: Any) -> int:
    """Request a push of messages whose payloads are their names."""
    messages = [[name, name, 0.0, 3, *([place] if place else [])] for name, place in places.items()]
    return world.request("push", messages=messages, **details)


def commit(world: QueueHistory, request: int, states: States, **row: Any) -> None:
    """Commit the states of messages at one moment."""
    world.at += 1
    for name, state in states.items():
        world.row(name, state, request, payload=name, **row)


GROUPED = {"x": {"group": "g"}, "b": {"group": "g"}, "c": {"group": "g"}}
FIRST = {"x": "waiting", "b": "blocked", "c": "blocked"}


@pytest.mark.parametrize(
    ("states", "most", "wrong"),
    [
        (FIRST, 1, 0),
        ({"c": "blocked", "b": "blocked", "x": "waiting"}, 1, 0),
        ({**FIRST, "x": "ready"}, 1, 0),
        ({**FIRST, "b": "waiting"}, 1, 1),
        ({**FIRST, "x": "blocked"}, 1, 1),
        ({**FIRST, "x": "blocked", "b": "waiting"}, 1, 1),
        ({**FIRST, "x": "blocked", "c": "ready"}, 1, 1),
        ({**FIRST, "b": "waiting"}, 2, 0),
        ({**FIRST, "x": "blocked", "b": "ready", "c": "waiting"}, 2, 0),
        (FIRST, 2, 1),
        ({**FIRST, "b": "waiting", "c": "ready"}, 2, 1),
        ({**FIRST, "b": "waiting", "c": "ready"}, 4, 0),
        ({**FIRST, "b": "waiting"}, 4, 1),
    ],
)
def test_the_head_of_a_group(states: States, most: int, wrong: int) -> None:
    """The first as pushed can be claimed, alone; or as many as may be handled at once."""
    world = QueueHistory()
    if most > 1:
        limits = {"group_concurrency": most}
        world.request("claim", limit=1, suspects=False, limits=limits)
    commit(world, push(world, GROUPED), states)
    found = find(world)
    assert [each[:14] for each in found] == ["Q9: of group g"] * wrong, found


@pytest.mark.parametrize(
    ("ended", "states", "wrong"),
    [
        ("completed", {"b": "waiting"}, 0),
        ("completed", {}, 1),
        ("completed", {"c": "waiting"}, 1),
        ("completed", {"b": "waiting", "c": "waiting"}, 1),
        ("dead", {"b": "waiting"}, 0),
        ("cancelled", {}, 1),
        ("gone", {"b": "waiting"}, 0),
        ("gone", {}, 1),
        ("claimed", {}, 0),
        ("claimed", {"b": "waiting"}, 1),
        ("waiting", {"b": "waiting"}, 1),
    ],
)
def test_the_next_of_a_group(ended: str, states: States, wrong: int) -> None:
    """It can be claimed from the commit that ends the head, in whatever order its rows are."""
    for changes in ({"x": ended, **states}, {**states, "x": ended}):
        world = QueueHistory()
        request = push(world, GROUPED)
        commit(world, request, FIRST)
        commit(world, request, changes)
        assert len(find(world)) == wrong, find(world)


def test_groups_are_apart() -> None:
    """Each has a head, and so has a group with its name in another queue."""
    world = QueueHistory()
    places = {"x": {"group": "g"}, "y": {"group": "h"}, "z": {"group": "g"}}
    request = push(world, places)
    commit(world, request, {"x": "waiting", "y": "waiting"})
    commit(world, request, {"z": "waiting"}, queue="letters")
    assert find(world) == []


@pytest.mark.parametrize(
    ("states", "wrong"),
    [({"x": "blocked"}, 0), ({"x": "waiting"}, 1), ({"x": "waiting", "y": "blocked"}, 1)],
)
def test_a_dead_letter_that_is_put_back(states: States, wrong: int) -> None:
    """It goes to the end of its group."""
    world = QueueHistory()
    request = push(world, {"x": {"group": "g"}, "y": {"group": "g"}})
    commit(world, request, {"x": "waiting", "y": "blocked"})
    commit(world, request, {"x": "dead", "y": "waiting"})
    commit(world, world.request("redrive"), states)
    assert len(find(world)) == wrong


@pytest.mark.parametrize(("head", "wrong"), [("x", 1), ("y", 0)])
def test_dead_letters_that_are_put_back_together(head: str, wrong: int) -> None:
    """The one that died first comes first, whatever their names are."""
    world = QueueHistory()
    request = push(world, {"x": {"group": "g"}, "y": {"group": "g"}})
    world.row("x", "dead", request, due=WALL + 5)
    world.row("y", "dead", request, due=WALL + 3)
    states = {"x": "blocked", "y": "blocked", head: "waiting"}
    commit(world, world.request("redrive"), states)
    assert len(find(world)) == wrong


RANKED = {"v": {}, "w": {"priority": 5}, "x": {"priority": 2}, "y": {"priority": 5}, "z": {}}


@pytest.mark.parametrize(
    ("order", "taken", "suspects", "wrong"),
    [
        ("lifo", "z", False, 0),
        ("lifo", "zy", False, 0),
        ("lifo", "yz", False, 0),
        ("lifo", "y", False, 1),
        ("lifo", "zx", False, 1),
        ("lifo", "v", True, 0),
        ("priority", "w", False, 0),
        ("priority", "y", False, 1),
        ("priority", "wy", False, 0),
        ("priority", "wx", False, 1),
        ("priority", "wyx", False, 0),
        ("priority", "wyxv", False, 0),
        ("priority", "wyxz", False, 1),
        ("priority", "z", True, 0),
        ("", "v", False, 0),
        ("", "z", False, 0),
    ],
)
def test_the_order_of_claims(order: str, taken: str, *, suspects: bool, wrong: int) -> None:
    """A claim leaves no ready message that comes before one that it takes; suspects are apart."""
    world = QueueHistory()
    request = push(world, RANKED)
    commit(world, request, dict.fromkeys(RANKED, "ready"))
    rules = {"order": order} if order else {}
    claim = world.request("claim", limit=5, suspects=suspects, **rules)
    commit(world, claim, dict.fromkeys(taken, "claimed"))
    found = find(world)
    assert [each[:4] for each in found] == ["Q26:"] * wrong, found


@pytest.mark.parametrize(
    ("newest", "row", "wrong"),
    [
        ("ready", {}, 1),
        ("waiting", {}, 0),
        ("claimed", {}, 0),
        ("completed", {}, 0),
        ("gone", {}, 0),
        ("ready", {"queue": "letters"}, 0),
    ],
)
def test_only_ready_messages_of_the_queue_come_first(
    newest: str, row: dict[str, Any], wrong: int
) -> None:
    """Others cannot be claimed at all."""
    world = QueueHistory()
    request = push(world, {"v": {"priority": 1}, "w": {"priority": 9}})
    commit(world, request, {"v": "ready"})
    commit(world, request, {"w": "ready"}, **row)
    if newest != "ready":
        commit(world, request, {"w": newest}, **({} if newest == "gone" else row))
    claim = world.request("claim", limit=5, suspects=False, order="priority")
    commit(world, claim, {"v": "claimed"})
    assert len(find(world)) == wrong


def test_a_message_that_is_put_back_is_new_in_the_order() -> None:
    """The latest is first, and it is the latest again."""
    world = QueueHistory()
    request = push(world, {"v": {}, "w": {"priority": 1}})
    commit(world, request, {"v": "dead", "w": "ready"})
    commit(world, world.request("redrive"), {"v": "ready"})
    claim = world.request("claim", limit=5, suspects=False, order="lifo")
    commit(world, claim, {"w": "claimed"})
    assert [each[:4] for each in find(world)] == ["Q26:"]


KEY = {"key": "k"}


@pytest.mark.parametrize(
    ("place", "state", "again", "wrong"),
    [
        *((KEY, state, KEY, 1) for state in ("ready", "waiting", "claimed", "blocked")),
        *((KEY, state, KEY, 0) for state in ("completed", "cancelled", "dead", "gone")),
        (KEY, "ready", {"key": "l"}, 0),
        (KEY, "ready", {"group": "k"}, 0),
        ({"key": "l"}, "ready", KEY, 0),
        *((KEY, state, {**KEY, "replace": True}, 1) for state in ("ready", "waiting", "blocked")),
        (KEY, "claimed", {**KEY, "replace": True}, 0),
        ({**KEY, "key_ttl": 3.0}, "completed", KEY, 1),
        ({**KEY, "key_ttl": 3.0}, "gone", KEY, 1),
        ({**KEY, "key_ttl": 2.0}, "completed", KEY, 0),
        ({**KEY, "key_ttl": 2.0}, "ready", KEY, 0),
        (KEY, "completed", {**KEY, "key_ttl": 3.0}, 0),
    ],
)
def test_a_key_keeps_others_out(
    place: dict[str, Any], state: str, again: dict[str, Any], wrong: int
) -> None:
    """While its message is pending, or for its time and no longer, two seconds after its push."""
    world = QueueHistory()
    first = push(world, {"x": place})
    commit(world, first, {"x": "ready"})
    commit(world, first, {"x": state})
    commit(world, push(world, {"y": again}), {"y": "waiting"})
    found = [each for each in find(world) if each.startswith("Q27: y was added")]
    assert len(found) == wrong


def test_a_key_is_one_of_a_queue() -> None:
    """Another queue has keys of its own."""
    world = QueueHistory()
    commit(world, push(world, {"x": KEY}), {"x": "ready"}, queue=QUEUE)
    commit(world, push(world, {"y": KEY}), {"y": "ready"}, queue="letters")
    assert find(world) == []


@pytest.mark.parametrize(
    ("is_before", "name", "wrong"), [(True, "x", 0), (False, "x", 1), (True, "z", 1)]
)
def test_a_key_may_be_released_first(name: str, *, is_before: bool, wrong: int) -> None:
    """A pending message in a page loses its key before another one takes it."""
    world = QueueHistory()
    commit(world, push(world, {"x": KEY}), {"x": "ready"})
    if is_before:
        world.note("key released", id=name)
    commit(world, push(world, {"y": KEY}), {"y": "ready"})
    world.note("key released", id="other" if is_before else name)
    assert len(find(world)) == wrong


def test_the_latest_holder_of_a_key_counts() -> None:
    """Not one that had it before; a dead letter that was put back may have lost it."""
    world = QueueHistory()
    first = push(world, {"x": KEY})
    commit(world, first, {"x": "ready"})
    commit(world, first, {"x": "dead"})
    commit(world, world.request("redrive"), {"x": "ready"})
    commit(world, push(world, {"y": KEY}), {"y": "ready"})
    assert find(world) == []
    commit(world, push(world, {"z": KEY}), {"z": "ready"})
    assert [each[:33] for each in find(world)] == ["Q27: z was added, and y holds the"]


@pytest.mark.parametrize(
    ("holder", "ttl", "seconds", "wrong"),
    [
        ("x", 9.0, 8, 1),
        ("x", 9.0, 9, 0),
        ("y", 9.0, 9, 1),
        ("x", None, 1, 1),
        ("x", None, 900, 1),
    ],
)
def test_a_replacement_holds_the_key_anew(
    holder: str, ttl: float | None, seconds: int, wrong: int
) -> None:
    """Only the holder is replaced, and the time of the key counts from then."""
    world = QueueHistory()
    commit(world, push(world, {"y": KEY}), {"y": "ready"})
    commit(world, push(world, {"y": KEY}), {"y": "completed"})
    commit(world, push(world, {"x": {**KEY, "key_ttl": 4.0}}), {"x": "ready"})
    place = {**KEY, "replace": True, **({} if ttl is None else {"key_ttl": ttl})}
    request = push(world, {"new": place})
    commit(world, request, {holder: "waiting"})
    if holder == "x":
        world.at += seconds - 1
        commit(world, push(world, {"z": KEY}), {"z": "ready"})
    assert len(find(world)) == wrong, find(world)


TTL = {**KEY, "key_ttl": 5.0}


@pytest.mark.parametrize(
    ("place", "events", "details", "problem"),
    [
        (KEY, ["x ready", "ask", "answer"], {}, ""),
        (KEY, ["ask", "x ready", "answer"], {}, ""),
        (KEY, ["x ready", "ask", "x completed", "answer"], {}, ""),
        (KEY, ["x ready", "x claimed", "ask", "answer"], {}, ""),
        (KEY, ["x ready", "x completed", "ask", "answer"], {}, "does not hold the key k"),
        (KEY, ["ask", "answer", "x ready"], {}, "does not hold the key k"),
        (KEY, ["x ready", "x dead", "x ready", "ask", "answer"], {}, ""),
        ({"key": "l"}, ["x ready", "ask", "answer"], {}, "has another key"),
        ({"group": "k"}, ["x ready", "ask", "answer"], {}, "has another key"),
        (KEY, ["ask", "answer"], {}, "has another key"),
        (TTL, ["x completed", "ask", "answer"], {}, ""),
        (TTL, ["x completed", "late", "ask", "answer"], {}, "does not hold the key k"),
        (TTL, ["x completed", "ask", "late", "answer"], {}, ""),
        (TTL, ["ask", "answer", "x completed"], {}, "does not hold the key k"),
        (TTL, ["ask", "answer", "x completed"], {"wall": WALL}, "does not hold the key k"),
        (TTL, ["x ready", "late", "ask", "answer"], {}, ""),
        (TTL, ["x completed", "late", "ask", "answer"], {"wall": WALL + 15.9}, ""),
        (TTL, ["x completed", "ask", "answer"], {"wall": WALL + 16.1}, "does not hold the key k"),
        (TTL, ["x ready", "ask", "answer"], {"wall": WALL + 900}, ""),
    ],
)
def test_who_is_told_to_hold_a_key_holds_it(
    place: dict[str, Any], events: list[str], details: dict[str, Any], problem: str
) -> None:
    """At some moment between the request and the response: pending, or for its time."""
    world = QueueHistory()
    first = push(world, {"x": place, "other": {"group": "a"}})
    request = -1
    for event in events:
        match event.split():
            case ["ask"]:
                request = push(world, {"y": {**KEY}}, **details)
            case ["answer"]:
                world.respond(request, {"y": "x"})
            case ["late"]:
                world.at = 20.0
                commit(world, first, {"other": "ready"})
            case [name, state]:
                commit(world, first, {name: state}, queue=QUEUE)
    found = [each for each in find(world) if each.startswith("Q27")]
    assert len(found) == bool(problem), found
    assert all(f"x {problem}" in each for each in found)


def test_answers_that_name_no_holder_are_true() -> None:
    """Of a push that added all or some of its messages, and of other calls."""
    world = QueueHistory()
    request = push(world, {"x": KEY})
    commit(world, request, {"x": "ready"})
    world.respond(request)
    claim = world.request("claim", limit=5, suspects=False)
    world.respond(claim, [["x", "C1", 1]])
    some = push(world, {"y": {}, "z": KEY})
    commit(world, some, {"y": "ready"})
    world.respond(some, {"z": "x"})
    world.respond(push(world, {"w": KEY}), error="Unavailable")
    assert find(world) == []


def test_an_equal_message_may_be_its_own_earlier_copy() -> None:
    """A push whose outcome was unknown is repeated when its message has ended."""
    world = QueueHistory()
    commit(world, push(world, {"x": KEY}), {"x": "ready"})
    commit(world, world.request("settle", receipts=[]), {"x": "completed"})
    request = world.request("push", messages=[["y", "x", 0.0, 3, KEY]])
    world.respond(request, {"y": "x"})
    assert find(world) == []


def test_an_order_is_a_place() -> None:
    """Also of messages that have no other; a claim may make messages ready and take none."""
    world = QueueHistory()
    commit(world, push(world, {"x": {}, "y": {}}), {"x": "waiting", "y": "ready"})
    claim = world.request("claim", limit=5, suspects=False, order="lifo")
    commit(world, claim, {"x": "ready"})
    assert find(world) == []
    commit(world, claim, {"x": "claimed"})
    assert [each[:4] for each in find(world)] == ["Q26:"]


def test_only_requests_have_places() -> None:
    """A story may note what it likes, and a person may change what has a group or a key."""
    world = QueueHistory()
    world.note("ordered", order=1, messages=[1, 2])
    assert find(world) == []
    places = {**GROUPED, "k": KEY, "l": {}}
    commit(world, push(world, places), {**FIRST, "k": "ready", "l": "ready"})
    world.at += 1
    for name, state in {"x": "completed", "b": "waiting", "k": "completed"}.items():
        world.row(name, state, node="")
    assert find(world) == []


def test_a_queue_without_places_is_not_checked() -> None:
    """Its messages have neither groups nor keys, and it has no order."""
    world = QueueHistory()
    commit(world, push(world, {"x": {}}), {"x": "blocked"})
    assert find(world) == []
