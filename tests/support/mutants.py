"""Check whether runs find the invariant that a mutant breaks."""

from collections.abc import Iterable

from jobsync.testing import Violation, run_story
from jobsync.testing.stories import Story

__all__ = ["catches", "is_caught"]

_SEEDS = range(48)
"""Seeds to try: a seed's history changes whenever the library takes one more step."""


def is_caught(story: Story, invariant: str, *, first: int = 0) -> bool:
    """Whether a story violates an invariant with one of many seeds, and does not crash.

    Args:
        story: to run.
        invariant: that it must violate.
        first: the seed that did so when the mutant was written.
    """
    seeds = dict.fromkeys((first, *_SEEDS))
    return any(catches(run_story(story, seed).violations, invariant) for seed in seeds)


def catches(violations: Iterable[Violation], invariant: str) -> bool:
    """Whether a run violates an invariant and does not crash.

    A mutant that crashes, because it patches a name that no longer exists, may violate invariants
    by accident. That proves nothing about the checks.
    """
    found = {each.invariant for each in violations}
    return invariant in found and "crash" not in found
