"""Options of sessions and elections.

Durations are seconds. Defaults depend on the store: a heartbeat every 5 s where requests are
free, every 30 s where they cost money.
"""

from typing import TypedDict

from jobsync.core.trust import LONGEST_HEARTBEAT, Timing, check_duration
from jobsync.errors import Invalid
from jobsync.settings import Settings, in_section
from jobsync.stores.contract import Store

__all__ = ["CoordinatorOptions", "CoordinatorSettings", "ElectionSettings"]

_MAX_EPOCH = 86400.0
"""Seconds. A longer mandate was probably given in milliseconds."""


class ElectionSettings(Settings, frozen=True, kw_only=True):
    """The settings of one election, with all defaults filled in."""

    min_epoch_duration: float
    max_epoch_duration: float
    cold_start_observation_window: float
    cold_start_preparation_delay: float
    skip_cold_start: bool


@in_section("")
class CoordinatorSettings(Settings, frozen=True, kw_only=True):
    """Options of everything that has a coordinator.

    Attributes:
        enable_coordinator: False for a single instance that does all the work itself.
        heartbeat_interval: seconds between heartbeats; 5 on SQL, 30 on objects.
        worker_timeout: seconds without a heartbeat after which a worker is dead; 15 on SQL, 90
            on objects. At least three heartbeats, so that one lost heartbeat costs nothing.
        min_epoch_duration: seconds before a coordinator hands over on request; 60, so that
            requests cannot make leadership flap.
        max_epoch_duration: seconds after which a coordinator renews its mandate, or hands over
            to an older worker that asked for it; 300.
        cold_start_observation_window: seconds to wait before the first election; 0 on SQL, half
            a heartbeat on objects, where workers that start together then elect only once.
        cold_start_preparation_delay: seconds between being elected and leading; 0 on SQL, a
            sixth of a heartbeat on objects.
        skip_cold_start: skip both waits. Safe: the store decides the election.
        coordinator_work_interval: seconds between calls of `coordinator_work`; one heartbeat.
    """

    enable_coordinator: bool = True
    heartbeat_interval: float | None = None
    worker_timeout: float | None = None
    min_epoch_duration: float = 60.0
    max_epoch_duration: float = 300.0
    cold_start_observation_window: float | None = None
    cold_start_preparation_delay: float | None = None
    skip_cold_start: bool = False
    coordinator_work_interval: float | None = None

    def __post_init__(self) -> None:
        for field in ("cold_start_observation_window", "cold_start_preparation_delay"):
            check_duration(field, getattr(self, field), least=0.0)
        # Before `Timing`, which would name the one that follows from the other.
        check_duration("heartbeat_interval", self.heartbeat_interval, most=LONGEST_HEARTBEAT)
        for field in ("coordinator_work_interval", "worker_timeout"):
            check_duration(field, getattr(self, field))
        if self.max_epoch_duration > _MAX_EPOCH:
            seconds = self.max_epoch_duration / 1000
            problem = f"must be a number of seconds, at most {_MAX_EPOCH:g}"
            fix = f"did you mean {seconds:g}?"
            raise Invalid("max_epoch_duration", self.max_epoch_duration, problem, fix)
        if not 0 <= self.min_epoch_duration <= self.max_epoch_duration:
            raise Invalid(
                "min_epoch_duration",
                self.min_epoch_duration,
                f"must be between 0 and max_epoch_duration={self.max_epoch_duration:g}",
                "lower it, or raise max_epoch_duration",
            )
        if self.heartbeat_interval is not None or self.worker_timeout is not None:
            self.timing_of(is_billed=False)

    def timing(self, store: Store) -> Timing:
        """Return the heartbeat interval and the timeout of sessions in a store."""
        return self.timing_of(is_billed=store.is_billed)

    def timing_of(self, *, is_billed: bool) -> Timing:
        """Return the heartbeat interval and the timeout, by whether requests cost money."""
        beat, timeout = self.heartbeat_interval, self.worker_timeout
        if beat is None:
            default = 30.0 if is_billed else 5.0
            beat = default if timeout is None else min(default, timeout / 3)
        return Timing(heartbeat=beat, timeout=3 * beat if timeout is None else timeout)

    def for_store(self, store: Store, timing: Timing) -> ElectionSettings:
        """Return the settings of elections in a store."""
        beat = timing.heartbeat if store.is_billed else 0.0
        window, delay = self.cold_start_observation_window, self.cold_start_preparation_delay
        return ElectionSettings(
            min_epoch_duration=self.min_epoch_duration,
            max_epoch_duration=self.max_epoch_duration,
            cold_start_observation_window=beat / 2 if window is None else window,
            cold_start_preparation_delay=beat / 6 if delay is None else delay,
            skip_cold_start=self.skip_cold_start,
        )


class CoordinatorOptions(TypedDict, total=False):
    """Options as they are passed to a plugin with a coordinator: see `CoordinatorSettings`."""

    enable_coordinator: bool
    heartbeat_interval: float | None
    worker_timeout: float | None
    min_epoch_duration: float
    max_epoch_duration: float
    cold_start_observation_window: float | None
    cold_start_preparation_delay: float | None
    skip_cold_start: bool
    coordinator_work_interval: float | None
