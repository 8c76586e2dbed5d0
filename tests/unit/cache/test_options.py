"""The options of a cache: what is accepted, and what is refused with which fix."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from jobsync import CachePlugin, Invalid, Misconfigured
from jobsync.cache.plugin import CacheSettings


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_documents_example_is_accepted() -> None:
    """Every duration is in seconds, also one that was meant as milliseconds."""
    cache = CachePlugin(driver="memory", ttl=3_600_000)
    assert (cache.settings.ttl, cache.settings.max_size) == (3_600_000.0, 1000)


def test_a_duration_may_be_a_timedelta() -> None:
    """As for every duration."""
    assert CachePlugin(ttl=timedelta(minutes=5)).settings.ttl == 300.0
    assert CachePlugin(ttl=timedelta(days=2, milliseconds=500)).settings.ttl == 172_800.5


def test_the_defaults_are_those_of_the_reference() -> None:
    """Another process's write is seen after a minute; a thousand records are kept."""
    assert CachePlugin().settings == CacheSettings(driver="memory", ttl=60.0, max_size=1000)
    assert CachePlugin(ttl=None, max_size=None).settings == CacheSettings()


def test_the_smallest_and_the_largest_cache_are_accepted() -> None:
    """One record, and as many as memory has."""
    for size in (1, 100_000_000):
        assert CachePlugin(max_size=size).settings.max_size == size


@pytest.mark.parametrize(
    ("options", "field", "fix"),
    [
        ({"ttl": 0}, "ttl", "seconds"),
        ({"ttl": -1}, "ttl", "seconds"),
        ({"ttl": float("inf")}, "ttl", "number"),
        ({"ttl": float("nan")}, "ttl", "number"),
        ({"ttl": "60"}, "ttl", "number"),
        ({"max_size": 0}, "max_size", "whole number"),
        ({"max_size": 1.5}, "max_size", "whole number"),
        ({"max_size": 100_000_001}, "max_size", "whole number"),
        ({"max_sise": 10}, "max_sise", "did you mean max_size"),
        ({"resources": "tasks"}, "resources", "write [...]"),
        ({"resources": [1]}, "resources", "write ['sessions'"),
        ({"driver": "memori"}, "driver", "did you mean memory"),
        ({"driver": "redis"}, "driver", "driver='memory'"),
        ({"driver": "filesystem"}, "driver", "driver='memory'"),
        ({"driver": "s3"}, "driver", "driver='memory'"),
        ({"drivers": [{"driver": "memory"}, {"driver": "s3"}]}, "drivers", "driver='memory'"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], field: str, fix: str) -> None:
    """The error names the field, the value and the fix."""
    with pytest.raises(Invalid) as caught:
        CachePlugin(**options)
    assert caught.value.field == field
    assert fix in str(caught.value.fix)


@pytest.mark.parametrize("driver", ["redis", "filesystem", "s3"])
def test_a_shared_driver_is_refused_with_the_reason(driver: str) -> None:
    """Nothing could guarantee that it forgets what other processes change."""
    with pytest.raises(Invalid, match="could not be kept true to every process's writes"):
        CachePlugin(driver=driver)


def test_options_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of every plugin; a wrong one is reported with its variable."""
    monkeypatch.setenv("JOBSYNC_CACHE_TTL", "5")
    assert CachePlugin().settings.ttl == 5.0
    monkeypatch.setenv("JOBSYNC_CACHE_TTL", "-5")
    with pytest.raises(Misconfigured, match="JOBSYNC_CACHE_TTL must be more than 0"):
        CachePlugin()


def test_a_cache_that_was_never_started_is_empty() -> None:
    """It can be cleared and asked all the same."""
    cache = CachePlugin()
    cache.clear()
    cache.clear("tasks")
    assert (cache.stats().hits, cache.stats().misses, cache.stats().size) == (0, 0, 0)
