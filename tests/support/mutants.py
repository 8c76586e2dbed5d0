"""Whether a run found the promise that a mutant breaks."""

from collections.abc import Iterable

from jobsync.testing import Violation

__all__ = ["catches"]


def catches(violations: Iterable[Violation], invariant: str) -> bool:
    """Whether a promise was found broken, in a run that shows no defect.

    A mutant that crashes, because it patches something that was renamed, breaks promises too,
    by accident. It proves nothing about the checks.
    """
    found = {each.invariant for each in violations}
    return invariant in found and "crash" not in found
