"""Answers in memory: how long, how many, and which go first."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync.cache.memory import CacheStats, MemoryCache
from jobsync.core.clock import Mono
from jobsync.database.readable_resource import Page

START = Mono(1000.0)
TASKS, USERS = "data/tasks/", "data/users/"


def make(ttl: float = 60.0, max_size: int = 3, resources: Any = None) -> MemoryCache:
    """Return a cache."""
    return MemoryCache(ttl=ttl, max_size=max_size, resources=resources)


def make_page(items: list[Any]) -> Page:
    """Return a page of anything: the cache does not look into it."""
    return Page(items, None)


def test_an_answer_is_given_for_ttl_seconds_after_its_question() -> None:
    """It counts from the question: the answer may be as old as that."""
    cache = make(ttl=10.0)
    cache.keep(TASKS, "a", {"n": 1}, START)
    assert cache.find(TASKS, "a", START + 9.9) == {"n": 1}
    assert cache.find(TASKS, "a", START + 10.0) is None
    assert cache.stats == CacheStats(hits=1, misses=1, size=0, evictions=0)


def test_the_least_recently_used_answer_goes_first() -> None:
    """Being asked for counts as use."""
    cache = make()
    for name in "abc":
        cache.keep(TASKS, name, name, START)
    assert cache.find(TASKS, "a", START) == "a"
    cache.keep(TASKS, "d", "d", START)
    found = [name for name in "abcd" if cache.find(TASKS, name, START)]
    assert found == ["a", "c", "d"]
    assert cache.stats.evictions == 1


def test_answers_that_make_room_are_counted_however_many_records_they_have() -> None:
    """One for each record or listing that goes; one that is replaced makes no room."""
    cache = make()
    cache.keep(TASKS, ("list",), ["a", "b"], START)
    cache.keep(TASKS, "c", "c", START)
    cache.keep(TASKS, "c", "d", START)
    assert cache.stats.evictions == 0
    cache.keep(TASKS, ("other",), ["a", "b"], START)
    assert (cache.stats.evictions, cache.stats.size) == (1, 3)
    cache.keep(TASKS, ("third",), ["a", "b", "c"], START)
    assert (cache.stats.evictions, cache.stats.size) == (3, 3)


@pytest.mark.parametrize(
    ("answer", "size"),
    [
        ([], 1),
        (0, 1),
        (["a", "b"], 2),
        (Page([], None), 1),
        (make_page(["a", "b", "c"]), 3),
        ({"n": [1, 2, 3, 4]}, 1),
    ],
)
def test_a_listing_counts_as_its_records(answer: Any, size: int) -> None:
    """At least as one."""
    cache = make()
    cache.keep(TASKS, ("list",), answer, START)
    assert cache.stats.size == size


def test_an_answer_that_is_too_large_is_not_kept() -> None:
    """It would evict all others, and not fit even then. The older answer goes all the same."""
    cache = make()
    cache.keep(TASKS, "a", "a", START)
    cache.keep(TASKS, ("list",), ["a"], START)
    cache.keep(TASKS, ("list",), ["a"] * 4, START)
    assert cache.find(TASKS, ("list",), START) is None
    assert cache.find(TASKS, "a", START) == "a"
    assert cache.stats.evictions == 0


def test_everybody_gets_a_copy() -> None:
    """What one reader does to an answer, no other reader sees."""
    cache = make()
    original = {"tags": ["x"]}
    cache.keep(TASKS, "a", original, START)
    original["tags"].append("y")
    first = cache.find(TASKS, "a", START)
    first["tags"].append("z")
    assert cache.find(TASKS, "a", START) == {"tags": ["x"]}


def test_forgetting_a_record_forgets_the_listings_of_its_resource() -> None:
    """Other records and other resources stay."""
    cache = make(max_size=10)
    for prefix in (TASKS, USERS):
        cache.keep(prefix, "a", "a", START)
        cache.keep(prefix, "b", "b", START)
        cache.keep(prefix, ("list",), ["a", "b"], START)
    cache.forget(TASKS, {"a"})
    requests: list[Any] = ["a", "b", ("list",)]
    assert [bool(cache.find(TASKS, each, START)) for each in requests] == [False, True, False]
    assert [bool(cache.find(USERS, each, START)) for each in requests] == [True, True, True]
    cache.clear(USERS)
    assert cache.stats.size == 1
    cache.clear()
    assert cache.stats.size == 0


def test_it_covers_the_resources_that_it_was_given() -> None:
    """By default all."""
    assert make().covers(TASKS)
    assert make(resources=["tasks"]).covers(TASKS)
    assert not make(resources=["tasks"]).covers(USERS)


PAGE = ("page", 1)
requests = st.sampled_from(["a", "b", "c", ("list", 1), PAGE])
sizes = st.integers(0, 5)
cache_steps = st.one_of(
    st.tuples(st.just("keep"), requests, sizes),
    st.tuples(st.just("find"), requests),
    st.tuples(st.just("forget"), st.frozensets(st.sampled_from("abc"))),
    st.tuples(st.just("clear")),
    st.tuples(st.just("wait"), st.integers(1, 30)),
)


class AnswerModel:
    """What a cache does, without shortcuts."""

    def __init__(self, *, ttl: float, max_size: int) -> None:
        self._ttl = ttl
        self._max_size = max_size
        self._answers: list[tuple[Any, list[int], Mono]] = []
        """From the least to the most recently used."""

    @property
    def size(self) -> int:
        return sum(max(1, len(answer)) for _, answer, _ in self._answers)

    def keep(self, request: Any, answer: list[int], now: Mono) -> None:
        self._drop(lambda other: other == request)
        self._answers.append((request, answer, now))
        while self.size > self._max_size:
            self._answers.pop(0)

    def find(self, request: Any, now: Mono) -> list[int] | None:
        found = [each for each in self._answers if each[0] == request]
        self._drop(lambda other: other == request)
        self._answers += [each for each in found if now - each[2] < self._ttl]
        return found[0][1] if found and self._answers[-1:] == found else None

    def forget(self, keys: frozenset[str]) -> None:
        self._drop(lambda other: other in keys or not isinstance(other, str))

    def clear(self) -> None:
        self._answers.clear()

    def _drop(self, is_dropped: Callable[[Any], bool]) -> None:
        self._answers = [each for each in self._answers if not is_dropped(each[0])]


@given(history=st.lists(cache_steps, max_size=40))
def test_it_behaves_as_the_model(history: list[Any]) -> None:
    """Random histories: the same answers and the same size."""
    now = START
    cache, model = make(ttl=20.0, max_size=6), AnswerModel(ttl=20.0, max_size=6)
    for step in history:
        match step:
            case ("keep", request, size):
                records = list(range(size))
                is_page = request == PAGE
                cache.keep(TASKS, request, make_page(records) if is_page else records, now)
                model.keep(request, records, now)
            case ("find", request):
                found = cache.find(TASKS, request, now)
                assert (found.items if isinstance(found, Page) else found) == model.find(
                    request, now
                )
            case ("forget", keys):
                cache.forget(TASKS, keys)
                model.forget(keys)
            case ("clear",):
                cache.clear()
                model.clear()
            case ("wait", seconds):
                now += seconds
        assert cache.stats.size == model.size
