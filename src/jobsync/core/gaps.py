"""Instants of a scheduled job that are not fired: they become gaps, each with a reason. Pure.

A gap is decided like an instant that is fired: no process fires what is in one.
"""

from typing import Literal

import msgspec

from jobsync.core.job_state import Gap, JobState, find_schedule

__all__ = ["OVERLAPPED", "add_gap", "skip_queued"]

OVERLAPPED = "the run before had not ended"
"""The reason of a gap where `overlap="skip"`."""

_MAX_COUNTED = 1000
"""Instants of a gap that are counted exactly."""


def add_gap(
    state: JobState, until: int, reason: str, kind: Literal["missed", "skipped"]
) -> JobState:
    """Make a gap of all undecided instants up to one, so that they are decided.

    Args:
        state: of the job.
        until: the last instant of the gap, or any time after it.
        reason: why they are not fired.
        kind: whether nobody could fire them, or they were not to be fired.
    """
    if until <= state.last:
        return state
    schedule = find_schedule(state)
    counted = schedule.between(state.last, until, _MAX_COUNTED + 1)
    if not counted:
        return msgspec.structs.replace(state, last=until)
    newest = schedule.latest_until(until)
    gap = Gap(
        first=counted[0],
        last=counted[-1] if newest is None else newest,
        count=min(len(counted), _MAX_COUNTED),
        reason=reason,
        kind=kind,
        is_counted=len(counted) <= _MAX_COUNTED,
    )
    return msgspec.structs.replace(_record_gap(state, gap), last=until)


def _record_gap(state: JobState, gap: Gap) -> JobState:
    """Add a gap to the state, and count its instants."""
    counted = {gap.kind: getattr(state.statistics, gap.kind) + gap.count}
    statistics = msgspec.structs.replace(state.statistics, **counted)
    return msgspec.structs.replace(state, gaps=(*state.gaps, gap), statistics=statistics)


def skip_queued(state: JobState, reason: str, keep: int = 0) -> JobState:
    """Make gaps of the instants that wait, except for the oldest ones.

    A gap has only instants in a row: between two that wait, others may have been decided.
    """
    skipped = state.queued[keep:]
    if not skipped:
        return state
    schedule = find_schedule(state)
    stretches: list[list[int]] = []
    expected: int | None = None
    for instant in skipped:
        if instant == expected:
            stretches[-1].append(instant)
        else:
            stretches.append([instant])
        expected = schedule.next_after(instant)
    state = msgspec.structs.replace(state, queued=state.queued[:keep])
    for stretch in stretches:
        gap = Gap(
            first=stretch[0], last=stretch[-1], count=len(stretch), reason=reason, kind="skipped"
        )
        state = _record_gap(state, gap)
    return state
