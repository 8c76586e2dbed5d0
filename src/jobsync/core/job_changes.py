"""What people and the code change about a scheduled job. Pure.

    define         what the code says; the highest generation's definition holds
    edit           what an operator changes, until the code's own definition changes
    pause          nothing is due until `resume`, which makes a gap of what was due meanwhile
    remove         the job ends; what has begun goes on
    add_request    a run that somebody asks for

No change fires anything of the past: what was due before it becomes a gap.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from jobsync.core.gaps import OVERLAPPED, add_gap, skip_queued
from jobsync.core.job_state import JobDefinition, JobPause, JobState, RunRequest

__all__ = ["add_request", "define", "edit", "pause", "remove", "resume"]


def define(
    state: JobState | None, definition: JobDefinition, worker: str, generation: int, now: float
) -> JobState | None:
    """Return the state with a definition from code; None if the stored one holds.

    Nothing that was due before is fired. A definition that differs from the code's before ends
    the operator's changes. A removed job is anybody's to define.
    """
    if state is None:
        return JobState(
            definition=definition, defined_by=worker, generation=generation, last=int(now)
        )
    if not state.is_removed and (state.definition == definition or generation < state.generation):
        return None
    state = _skip_past(state, now, "the job was defined anew")
    return msgspec.structs.replace(
        state,
        definition=definition,
        defined_by=worker,
        generation=generation,
        edits={},
        pause=None,
        is_removed=False,
    )


def _skip_past(state: JobState, now: float, reason: str) -> JobState:
    """Make gaps of what was due before a change and of what waits: the change never fires it."""
    if state.is_removed:
        return msgspec.structs.replace(state, last=max(state.last, int(now)))
    if not state.is_active:
        reason = _explain_pause(state)
    state = skip_queued(state, reason)
    return add_gap(state, int(now), reason, "skipped")


def _skip_overlapped(state: JobState, now: float) -> JobState:
    """Make a gap of the instants that were due during a run which has not ended."""
    if not (state.running and state.is_active and state.effective.overlap == "skip"):
        return state
    return add_gap(state, int(now), OVERLAPPED, "skipped")


def pause(state: JobState, new: JobPause) -> JobState | None:
    """Stop firing a job until `resume`; None if it is paused already. What waits is skipped."""
    if state.pause is not None:
        return None
    state = msgspec.structs.replace(_skip_overlapped(state, new.at), pause=new)
    return skip_queued(state, _explain_pause(state))


def resume(state: JobState, now: float) -> JobState | None:
    """End a pause; None if there is none. What was due meanwhile is skipped."""
    if state.is_active or state.is_removed:
        return None
    edits = state.edits
    if not state.effective.enabled:
        edits = _choose_edits(state, {"enabled": True})
    state = _skip_past(state, now, _explain_pause(state))
    return msgspec.structs.replace(state, pause=None, edits=edits)


def _explain_pause(state: JobState) -> str:
    found = state.pause
    if found is None:
        return "it was disabled"
    paused = f"it was paused by {found.by}" if found.by else "it was paused"
    return f"{paused}: {found.reason}" if found.reason else paused


def edit(state: JobState, changes: Mapping[str, Any], now: float) -> JobState | None:
    """Change fields of a definition; None if that changes nothing. Fires nothing of the past."""
    before = state.effective
    edits = _choose_edits(state, changes)
    after = msgspec.structs.replace(state.definition, **edits)
    if after == before:
        return None
    state = _skip_past(_skip_overlapped(state, now), now, "the job was changed")
    return msgspec.structs.replace(state, edits=edits)


def _choose_edits(state: JobState, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs from the code after more changes."""
    edits = {**state.edits, **changes}
    return {
        field: value for field, value in edits.items() if getattr(state.definition, field) != value
    }


def remove(state: JobState, now: float) -> JobState | None:
    """Remove a job; None if it was removed. Runs that have begun end as usual."""
    if state.is_removed:
        return None
    state = _skip_past(_skip_overlapped(state, now), now, "the job was removed")
    return msgspec.structs.replace(state, is_removed=True, requests=())


def add_request(state: JobState, request: RunRequest) -> JobState:
    """Ask for a run, by whichever process fires this job. Asking twice is the same."""
    if state.find_run(request.id) or request in state.requests:
        return state
    return msgspec.structs.replace(state, requests=(*state.requests, request))
