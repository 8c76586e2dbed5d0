"""The weather of a simulated network: which faults a request may have, and how likely each is."""

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import msgspec

__all__ = ["CALM", "FAULTS", "PASSING", "SINGLE", "Fault", "Weather"]

Fault: TypeAlias = Literal[
    "slow",
    "slow_reply",
    "refused",
    "forbidden",
    "undecided",
    "lost",
    "unanswered",
    "late",
    "doubled",
]
"""A fault of one request: a probability of `Weather`."""

FAULTS: tuple[Fault, ...] = get_args(Fault)


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """The probabilities of faults of a request, from 0 to 1, and durations in seconds."""

    latency: float = 0.01
    """Maximum for each direction."""
    slow: float = 0.0
    slow_by: float = 25.0
    """Maximum that is added to a slow request."""
    slow_reply: float = 0.0
    """It is executed at once, and the reply takes almost as long as the sender waits."""
    refused: float = 0.0
    """It is refused before it is executed, and the sender gets an error."""
    forbidden: float = 0.0
    """Likewise, for lack of permission."""
    undecided: float = 0.0
    """Nothing is decided (409): the outcome of a write is unknown, and it was not executed."""
    lost: float = 0.0
    """It is executed, and the sender gets an error that does not say so."""
    unanswered: float = 0.0
    """It is executed, and no reply ever arrives."""
    late: float = 0.0
    late_by: float = 600.0
    """Maximum after which a late request arrives."""
    late_after: float = 0.0
    """Minimum, which is added."""
    doubled: float = 0.0
    """It arrives twice."""
    corrupt: float = 0.0
    """A record arrives damaged, once; the stored one is intact."""
    patience: float = 5.0
    """Seconds without a reply after which the sender gives up."""
    again: float = 0.0
    """After a request with a fault, the next one has one too, of any kind."""
    calls: frozenset[str] | None = None
    """The only calls with faults, such as "heads" or "settle"; all if None."""


CALM = Weather()
"""No faults."""

SINGLE: Mapping[Fault, Weather] = {
    fault: msgspec.structs.replace(
        Weather(slow_by=4.0, late_after=CALM.patience, late_by=60.0), **{fault: 1.0}
    )
    for fault in FAULTS
}
"""Weather with one certain fault. A slow request is executed in time, a late one too late."""

PASSING = tuple(fault for fault in FAULTS if fault != "forbidden")
"""The faults that do not end a process."""
