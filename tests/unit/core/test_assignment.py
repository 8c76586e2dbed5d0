"""The stored assignment: compact, exact, and refused when it is damaged."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync import Corrupt, Invalid
from jobsync.core.assignment import (
    HASH_FUNCTIONS,
    MAX_TOKENS,
    Assignment,
    Exceptions,
    Exempt,
    NodeRef,
    Ownership,
    Plan,
    TokenMove,
    count_moved,
    has_incoming,
    has_nothing,
    holders_of,
    must_acknowledge,
    owned_by,
    pack_holders,
    pack_move,
    promised_to,
    token_of,
    tokens_of,
)
from jobsync.core.codec import decode, encode
from jobsync.core.plan_documents import (
    count_parts,
    join_exceptions,
    name_exceptions,
    name_parts,
    read_heading,
    read_plan,
    split_exceptions,
    to_document,
)

A, B, C = (NodeRef(f"{name}-1", name) for name in "abc")

MOVING = Assignment(
    number=7,
    total=10,
    nodes=(A, B),
    starts=(0, 6),
    holders=(1, 2),
    moves=(TokenMove(1, 2, revoked=7, starts=(4,), counts=(2,)),),
)
"""a has 0 to 3, b has 6 to 9, and 4 and 5 are moving."""

PINNED = Exceptions(
    (A, B), (Exempt("mine", 1, 2), Exempt("moving", 2, 1, 2, 7), Exempt("waits", 3, 0))
)


def test_a_moving_token_has_no_owner() -> None:
    """The giver has lost it, and the taker does not have it yet."""
    assert owned_by(MOVING, A.incarnation) == {0, 1, 2, 3}
    assert owned_by(MOVING, B.incarnation) == {6, 7, 8, 9}
    assert promised_to(MOVING, B.incarnation) == {4, 5}
    assert promised_to(MOVING, A.incarnation) == frozenset()


def test_an_unlisted_node_owns_nothing() -> None:
    """An unlisted node owns nothing, and nobody owns free tokens."""
    assert owned_by(MOVING, C.incarnation) == frozenset()
    assert promised_to(MOVING, C.incarnation) == frozenset()
    assert owned_by(Assignment(0, 10), C.incarnation) == frozenset()


def test_exceptions_decide_before_tokens() -> None:
    """A task with an owner of its own belongs to that node, and to nobody while it moves."""
    plan = Plan(MOVING, PINNED)
    a, b = plan.seen_by(A.incarnation), plan.seen_by(B.incarnation)
    assert (a.covers("any", 1), b.covers("any", 1)) == (True, False)
    assert (a.covers("mine", 1), b.covers("mine", 1)) == (False, True)
    assert (a.covers("moving", 2), b.covers("moving", 2)) == (False, False)
    assert (a.covers("waits", 3), b.covers("waits", 3)) == (False, False)
    assert plan.seen_by(C.incarnation) == Ownership(7)


def test_a_node_has_incoming_tokens_and_tasks() -> None:
    """Either is enough; what other nodes have, or get, does not count."""
    free = Assignment(8, 10, (A, B), (0, 6), (1, 2))
    assert has_incoming(Plan(MOVING), B.incarnation)
    assert has_incoming(Plan(free, PINNED), B.incarnation)
    assert not has_incoming(Plan(MOVING, PINNED), A.incarnation)
    assert not has_incoming(Plan(free), B.incarnation)
    assert not has_incoming(Plan(free, PINNED), C.incarnation)
    # Each document counts its own nodes.
    for place, taker in ((1, B), (2, C)):
        others = Exceptions((B, C), (Exempt("moving", 1, 0, place, 7),))
        nodes = [n for n in (A, B, C) if has_incoming(Plan(free, others), n.incarnation)]
        assert nodes == [taker]


def test_a_node_has_nothing_once_all_is_acknowledged() -> None:
    """Neither moving tokens nor tasks of its own may remain."""
    assert not has_nothing(Plan(MOVING), A.incarnation)
    assert has_nothing(Plan(MOVING), C.incarnation)
    free = Assignment(8, 10, (B,), (0,), (1,))
    assert has_nothing(Plan(free), A.incarnation)
    assert not has_nothing(Plan(free, PINNED), A.incarnation)
    nobodys = Assignment(8, 10, (A, B), (0,), (0,))
    for place, holder in ((1, B), (2, C)):
        others = Exceptions((B, C), (Exempt("own", 1, place),))
        nodes = [n for n in (A, B, C) if not has_nothing(Plan(nobodys, others), n.incarnation)]
        assert nodes == [holder]


def test_a_node_acknowledges_what_was_taken_from_it_and_nothing_else() -> None:
    """A token or a task, either is enough; what it keeps, gets, or others give, does not count."""
    at_rest = Assignment(8, 10, (A, B), (0, 6), (1, 2))
    kept = Exceptions((A, B), (Exempt("mine", 1, 2), Exempt("waits", 3, 0)))
    for assignment, exceptions, givers in [
        (at_rest, Exceptions(), ""),
        (at_rest, kept, ""),
        (at_rest, PINNED, "a"),
        (MOVING, Exceptions(), "a"),
        (MOVING, kept, "a"),
        (at_rest, Exceptions((B, C), (Exempt("moving", 1, 2, 1, 7),)), "c"),
        (at_rest, Exceptions((B, C), (Exempt("moving", 1, 1, 0, 7),)), "b"),
        (MOVING, Exceptions((B, C), (Exempt("moving", 1, 2, 1, 7),)), "ac"),
    ]:
        plan = Plan(assignment, exceptions)
        found = [node.name for node in (A, B, C) if must_acknowledge(plan, node.incarnation)]
        assert found == [*givers]


@pytest.mark.parametrize("exceptions", [Exceptions(), PINNED], ids=["plain", "pinned"])
def test_a_plan_fits_the_number_of_tokens_and_the_hash_that_it_was_made_with(
    exceptions: Exceptions,
) -> None:
    """Another number alone does not fit, nor does another hash of a single exception."""
    plan = Plan(MOVING, exceptions)
    tokens = {task.task: task.token for task in exceptions.tasks}
    assert plan.fits(10, tokens.__getitem__)
    for other in (9, 11):
        assert not plan.fits(other, tokens.__getitem__)
    for task, token in tokens.items():
        assert not plan.fits(10, {**tokens, task: token + 1}.__getitem__)


def test_moved_tokens_are_counted_by_destination() -> None:
    """Counted when they are revoked, and not again when they arrive."""
    before = Assignment(6, 10, (A, B), (0, 6), (1, 2))
    arrived = Assignment(8, 10, (A, B), (0, 4), (1, 2))
    assert count_moved(before, MOVING) == 2
    assert count_moved(MOVING, arrived) == 0
    assert count_moved(before, before) == 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_runs_unpack_to_the_holders(holders: list[int]) -> None:
    """Packing loses nothing, and neighbours differ."""
    starts, held = pack_holders(holders)
    assignment = Assignment(1, len(holders), (A, B, C), starts, held)
    assert holders_of(assignment) == holders
    assert all(left != right for left, right in pairwise(held))


@given(st.sets(st.integers(0, 60), min_size=1))
def test_moves_unpack_to_their_tokens(tokens: set[int]) -> None:
    """Packing loses nothing."""
    assert list(tokens_of(pack_move(1, 2, 3, sorted(tokens)))) == sorted(tokens)


def test_a_plan_survives_the_store() -> None:
    """Written as JSON and read again, it is the same."""
    assignment = Assignment(**{**_fields(MOVING), "exceptions": "7-abc"})
    texts = [encode(to_document(part)) for part in (assignment, PINNED)]
    first, second = (decode(text, "plan") for text in texts)
    assert read_plan(first, second, "plan") == Plan(assignment, PINNED)


def test_fields_of_newer_code_are_ignored() -> None:
    """A reader ignores unknown fields."""
    document = {**to_document(MOVING), "weights": [1, 2]}
    assert read_plan(document, None, "plan") == Plan(MOVING)


@pytest.mark.parametrize(
    "damage",
    [
        {"number": "seven"},
        {"total": 0},
        {"total": MAX_TOKENS + 1},
        {"starts": [0]},
        {"starts": []},
        {"starts": [1, 6]},
        {"starts": [0, 0]},
        {"starts": [0, 10]},
        {"holders": [1, 3]},
        {"holders": [1, -1]},
        {"moves": [{"giver": 2, "taker": 1, "revoked": 7, "starts": [4], "counts": [2]}]},
        {"moves": [{"giver": 0, "taker": 1, "revoked": 7, "starts": [4], "counts": [2]}]},
        {"moves": [{"giver": 1, "taker": 3, "revoked": 7, "starts": [4], "counts": [2]}]},
        {"moves": [{"giver": 1, "taker": 2, "revoked": 7, "starts": [4], "counts": [7]}]},
        {"moves": [{"giver": 1, "taker": 2, "revoked": 7, "starts": [4], "counts": []}]},
        {"moves": [{"giver": 1, "taker": 2, "revoked": 7, "starts": [4, 4], "counts": [1, 1]}]},
        {"exceptions": "7-abc"},
    ],
)
def test_a_damaged_assignment_is_refused(damage: dict[str, Any]) -> None:
    """A token with two owners, or none, or out of range, is corruption."""
    with pytest.raises(Corrupt, match="assignment/x"):
        read_plan({**to_document(MOVING), **damage}, None, "assignment/x")


@pytest.mark.parametrize("row", [["t", 1, 3], ["t", 1, 1, 3, 7], ["t", 10, 1], ["t", -1, 1], ["t"]])
def test_damaged_exceptions_are_refused(row: list[Any]) -> None:
    """The error names the document."""
    document = {**to_document(MOVING), "exceptions": "7-abc"}
    exceptions = {**to_document(PINNED), "tasks": [row]}
    with pytest.raises(Corrupt, match="assignment/x 7-abc"):
        read_plan(document, exceptions, "assignment/x")


NO_DOCUMENTS: list[Any] = [{}, [], None, 5, "x", {"number": "7", "tasks": {}}]


@pytest.mark.parametrize("document", [*NO_DOCUMENTS, {"number": 7, "exceptions": 8}])
def test_the_heading_of_a_damaged_assignment_is_refused(document: Any) -> None:
    """It is read first; the error names the document."""
    with pytest.raises(Corrupt, match="assignment/x"):
        read_heading(document, "assignment/x")


@pytest.mark.parametrize(
    "document", [*NO_DOCUMENTS, *({"tasks": [], "parts": parts} for parts in (0, -1, 10**9, "2"))]
)
def test_damaged_parts_of_exceptions_are_refused(document: Any) -> None:
    """Of the first part how many there are, and of the others their tasks."""
    with pytest.raises(Corrupt, match="exceptions/x"):
        count_parts(document, "exceptions/x")
    with pytest.raises(Corrupt, match="exceptions/x"):
        join_exceptions({"tasks": []}, [document], "exceptions/x")


def test_exceptions_are_named_by_number_and_content() -> None:
    """Two leaders that decide the same write one document; no exceptions need none."""
    name = name_exceptions(7, PINNED)
    assert name.startswith("7-")
    assert name == name_exceptions(7, PINNED)
    assert name != name_exceptions(7, Exceptions((A,), PINNED.tasks))
    assert name_exceptions(7, Exceptions()) == ""


@pytest.mark.parametrize("total", [0, -1, MAX_TOKENS + 1])
def test_impossible_numbers_of_tokens_are_refused(total: int) -> None:
    """The error states the range."""
    with pytest.raises(Invalid, match=rf"total_tokens must be 1 to 100,000 \(got {total}\)"):
        Plan.empty(total)


def test_the_most_scattered_assignment_fits_one_record() -> None:
    """The most tokens, no two neighbours with one node, and all moving."""
    nodes = tuple(NodeRef(f"worker-1700000000000-{i:012x}-{'x' * 12}", f"n{i}") for i in range(50))
    holders = [i % 50 + 1 for i in range(MAX_TOKENS)]
    starts, held = pack_holders(holders)
    moves = tuple(
        pack_move(giver, giver % 50 + 1, 1_000_000, range(giver - 1, MAX_TOKENS, 50))
        for giver in range(1, 51)
    )
    assignment = Assignment(1_000_000, MAX_TOKENS, nodes, starts, held, moves)
    text = encode(to_document(assignment))
    assert len(text) < 2_000_000
    assert read_plan(decode(text, "plan"), None, "plan") == Plan(assignment)


def _fields(assignment: Assignment) -> dict[str, Any]:
    return {name: getattr(assignment, name) for name in assignment.__struct_fields__}


@pytest.mark.parametrize(
    ("count", "parts"), [(1, 1), (7999, 1), (8000, 1), (8001, 2), (16_000, 2), (16_001, 3)]
)
def test_a_document_of_exceptions_says_how_many_there_are(count: int, parts: int) -> None:
    """The first one, if there are others; none is empty, and joined they are the original."""
    tasks = tuple(Exempt(f"{n:05d}", n % 10, 1) for n in range(count))
    exceptions = Exceptions((NodeRef("worker-1.a", "a"),), tasks)
    documents = split_exceptions("7-abc", exceptions)
    first, *others = documents.values()
    assert len(documents) == first.get("parts", 1) == parts
    assert all(document["tasks"] for document in documents.values())
    assert not any("parts" in other for other in others)
    assert msgspec.convert(join_exceptions(first, others, "plan"), Exceptions) == exceptions


def test_exceptions_that_do_not_fit_one_document_are_several() -> None:
    """None is too large, for names of any length; joined, they are the original."""
    tasks = tuple(Exempt("\x01" * 60 + f"{n:06d}", n % 10, 1) for n in range(20_000))
    exceptions = Exceptions((NodeRef("worker-1.a", "a"),), tasks)
    documents = split_exceptions("7-abc", exceptions)
    assert list(documents) == name_parts("7-abc", exceptions) == ["7-abc", "7-abc.1", "7-abc.2"]
    for document in documents.values():
        encode(document)
    first, *others = documents.values()
    assert first["parts"] == 3
    assert msgspec.convert(join_exceptions(first, others, "plan"), Exceptions) == exceptions
    few = Exceptions(exceptions.nodes, tasks[:10])
    ((name, document),) = split_exceptions("8-abc", few).items()
    assert (name, join_exceptions(document, [], "plan")) == ("8-abc", to_document(few))


@pytest.mark.parametrize(
    ("task", "md5", "sha256", "double"),
    [
        (1, 8411, 2913, 8436),
        ("1", 8411, 2913, 8436),
        ("customer-X", 8519, 8562, 9638),
        (("a", 1), 1945, 5390, 2636),
    ],
)
def test_tokens_equal_those_of_the_original(
    task: object, md5: int, sha256: int, double: int
) -> None:
    """A fleet can migrate without a task changing its token."""
    tokens = [token_of(task, 10_000, name) for name in ("md5", "sha256", "double_sha256")]
    assert tokens == [md5, sha256, double]


def test_md5_is_the_default() -> None:
    """The guide documents it."""
    assert token_of("customer-X", 10_000) == 8519


@given(st.text(st.characters(codec="utf-8")), st.integers(1, 100_000))
def test_a_token_is_in_range(task: str, total: int) -> None:
    """Every text has a token under every hash."""
    assert all(0 <= token_of(task, total, name) < total for name in HASH_FUNCTIONS)


task_names = st.sampled_from("abcdef")


@given(
    tokens=st.frozensets(st.integers(0, 3)),
    own=st.frozensets(task_names),
    others=st.frozensets(task_names),
    withheld=st.frozensets(task_names),
)
def test_an_ownership_without_tasks_covers_all_but_these(
    tokens: frozenset[int], own: frozenset[str], others: frozenset[str], withheld: frozenset[str]
) -> None:
    """Whether a node has them by their token or by a pin."""
    before = Ownership(1, tokens, own, others)
    after = before.without(withheld)
    for task in "abcdef":
        for token in range(4):
            expected = before.covers(task, token) and task not in withheld
            assert after.covers(task, token) == expected
