"""What a process that handles messages tells the others of it, with its session.

Told when it begins, when it pauses and when it ends: whoever looks can tell a queue whose
workers are busy from one that nobody works on. Costs a beat each time, and nothing else.
"""

from collections.abc import Mapping

import msgspec

from jobsync.core.codec import Json

__all__ = ["Duty", "describe_duty", "read_duties"]

_PREFIX = "queue:"


class Duty(msgspec.Struct, frozen=True, kw_only=True):
    """One process's part in a queue."""

    concurrency: int
    """How many handlers it runs at once."""
    is_paused: bool = False
    """Whether that process alone claims nothing for now."""


def describe_duty(queue: str, duty: Duty | None) -> dict[str, Json]:
    """Give the fact to tell; None says that the process has done with the queue."""
    return {f"{_PREFIX}{queue}": None if duty is None else msgspec.to_builtins(duty)}


def read_duties(facts: Mapping[str, Json]) -> dict[str, Duty]:
    """Give the queues that a session tells of; nothing of what newer code may have told."""
    duties = {}
    for name, told in facts.items():
        if name.startswith(_PREFIX) and told is not None:
            try:
                duties[name.removeprefix(_PREFIX)] = msgspec.convert(told, Duty)
            except msgspec.ValidationError:
                continue
    return duties
