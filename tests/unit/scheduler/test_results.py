"""Results as they are recorded: JSON as it is, a short description of anything else."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hostile import HOSTILE, build_object, contain

from jobsync.scheduler.results import describe_result


@pytest.mark.parametrize(
    "result",
    [None, True, 5, 0.5, "text", [1, [2]], {"count": 3, "names": ["a", "ä"]}, "x" * 16_000],
)
def test_json_is_recorded_as_it_is(result: Any) -> None:
    """Up to 16 KB."""
    assert describe_result(result) == result


def test_the_record_is_a_copy() -> None:
    """What the caller changes later does not change it."""
    result = {"rows": [1]}
    record = describe_result(result)
    result["rows"].append(2)
    assert record == {"rows": [1]}


class Exits:
    """An object whose repr exits."""

    def __repr__(self) -> str:
        raise SystemExit


def _nest(depth: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested


def _build_cycle() -> list[Any]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (datetime(2026, 3, 1, tzinfo=UTC), "datetime.datetime(2026, 3, 1"),
        ({1: "a"}, "{1: 'a'}"),
        (float("nan"), "nan"),
        (b"bytes", "b'bytes'"),
        ({"b"}, "{'b'}"),
        ("x" * 20_000, "'xxx"),
        ("a\0b", "'a\\x00b'"),
        (list(range(100_000)), "[0, 1, 2"),
        ({str(i): i for i in range(100_000)}, "{'0': 0, '1': 1"),
        ([["x" * 100_000] * 1000] * 1000, "[['xxx"),
        (10**10_000, "<int, whose repr() raised ValueError>"),
        (_nest(100_000), "[[[["),
        (_build_cycle(), "[[[["),
        (Exits(), "a result that cannot be described"),
        ([Exits()], "a result that cannot be described"),
    ],
    ids=range(15),
)
def test_anything_else_is_described(result: Any, shown: str) -> None:
    """In at most 1,000 characters, and quickly."""
    text = describe_result(result)
    assert text.startswith(shown)
    assert len(text) <= 1000


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset, dict.fromkeys])
def test_a_container_is_described_by_its_first_20_items(kind: Any) -> None:
    """Whatever its kind."""
    text = describe_result(kind(timedelta(days=n) for n in range(1, 30)))
    assert text.count("timedelta(days=") == 20
    assert "..." in text


@pytest.mark.parametrize("contain_it", [lambda it: it, lambda it: [it], lambda it: {"key": it}])
def test_ctrl_c_while_a_result_is_described_ends_the_program(contain_it: Any) -> None:
    """It is not an error of the result."""

    class Interrupted:
        def __repr__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        describe_result(contain_it(Interrupted()))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_results_are_described(name: str) -> None:
    """By themselves, and in containers."""
    with contain():
        hostile = build_object(name)
        for result in (hostile, [hostile], {"key": hostile}, {hostile: 1}):
            text = describe_result(result)
            assert type(text) is str
            json.dumps(text).encode()
            assert len(text) <= 1000


class Long:
    """An object with a long description."""

    def __repr__(self) -> str:
        return "x" * 5000


@pytest.mark.parametrize("result", [Long(), "x" * 20_000, b"x" * 20_000, {Long(), 1}, [Long()] * 9])
def test_a_description_has_at_most_1000_characters(result: object) -> None:
    """Of whatever it is; its end shows that it was cut."""
    shown = describe_result(result)
    assert isinstance(shown, str)
    assert 100 < len(shown) <= 1000
    assert "…" in shown
    if not isinstance(result, (set, list)):
        assert len(shown) == 1000
