"""How an election begins where nobody leads yet.

Workers that start together look around first, so that they elect once, and whoever is
elected prepares for a moment before it leads. This saves elections and promises nothing:
the store decides. Somebody who leads already, or who has led meanwhile, ends it at once.

    observing ── window over, or a leader seen ──▶ electing ── somebody elected ──▶ preparing
                                                    ready ◀── delay over, or not oneself ──┘
"""

from jobsync.components import Components
from jobsync.coordination.events import ColdStartPhaseChanged, Phase
from jobsync.coordination.settings import WorkSettings
from jobsync.core.clock import Mono

__all__ = ["ColdStart"]


class ColdStart:
    """One worker's way through the phases for one role.

    Args:
        components: the clock that counts, and a place to tell facts.
        settings: how long the phases last.
        role: whose election it is.
    """

    def __init__(self, components: Components, settings: WorkSettings, role: str) -> None:
        self._clock = components.clock
        self._events = components.events
        self._role = role
        self._begun = components.clock.mono()
        self._electing_from = self._begun + settings.cold_start_observation_window
        self._delay = settings.cold_start_preparation_delay
        self._ready_from = self._begun
        self.phase: Phase = "observing"
        self._enter("ready" if settings.skip_cold_start else "observing")

    @property
    def is_ready(self) -> bool:
        """Whether whoever is elected may lead."""
        return self.phase == "ready"

    @property
    def next_change(self) -> Mono | None:
        """When a phase ends by itself."""
        match self.phase:
            case "observing":
                return self._electing_from
            case "preparing":
                return self._ready_from
            case _:
                return None

    def may_elect(self) -> bool:
        """Go on if it is time; say whether the role may be taken."""
        if self.phase == "observing" and self._clock.mono() >= self._electing_from:
            self._enter("electing")
        return self.phase != "observing"

    def see_leader(self, *, is_self: bool = False) -> None:
        """Somebody has been elected."""
        now = self._clock.mono()
        if self.phase == "observing":
            self._enter("electing")
        if self.phase == "electing":
            self._ready_from = now + (self._delay if is_self else 0.0)
            self._enter("preparing")
        if self.phase == "preparing" and now >= self._ready_from:
            self._enter("ready")

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        duration = self._clock.mono() - self._begun
        self._events.emit(ColdStartPhaseChanged(role=self._role, phase=phase, duration=duration))
