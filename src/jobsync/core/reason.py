"""Why something has not happened yet, for programs and for people."""

import msgspec

__all__ = ["Reason"]


class Reason(msgspec.Struct, frozen=True):
    """What stands between a piece of work and its being done. Times are Unix seconds."""

    code: str
    """For programs."""
    text: str
    """For people."""
    since: float | None = None
    """Since when it is so, where that is known."""
    until: float | None = None
    """When it is over, at the latest, where that is known."""
