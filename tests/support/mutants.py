"""Check whether a run found the invariant that a mutant breaks."""

from collections.abc import Iterable

from jobsync.testing import Violation

__all__ = ["catches"]


def catches(violations: Iterable[Violation], invariant: str) -> bool:
    """Whether a run violates an invariant and does not crash.

    A mutant that crashes, because it patches a name that no longer exists, may violate invariants
    by accident. That proves nothing about the checks.
    """
    found = {each.invariant for each in violations}
    return invariant in found and "crash" not in found
