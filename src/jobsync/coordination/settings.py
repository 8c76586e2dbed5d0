"""How often a worker beats, how long a mandate lasts, how an election begins.

Durations are seconds. What is left open follows the store's price: beats of 5 s where a
request costs nothing, of 30 s where it costs money.
"""

from jobsync.core.trust import Timing, check_duration
from jobsync.errors import Invalid
from jobsync.settings import Settings, in_section
from jobsync.stores.contract import Store

__all__ = ["CoordinatorSettings", "WorkSettings"]


class WorkSettings(Settings, frozen=True, kw_only=True):
    """What an election goes by, with nothing left open."""

    min_epoch_duration: float
    max_epoch_duration: float
    cold_start_observation_window: float
    cold_start_preparation_delay: float
    skip_cold_start: bool


@in_section("")
class CoordinatorSettings(Settings, frozen=True, kw_only=True):
    """The options of everything that has a coordinator.

    Attributes:
        enable_coordinator: False means one instance that does all the work itself.
        heartbeat_interval: seconds between beats; 5 on SQL, 30 on objects.
        worker_timeout: seconds of silence after which a worker is dead; 15 on SQL, 90 on
            objects. At least three beats, so that one lost beat costs nothing.
        min_epoch_duration: seconds before a coordinator hands over to whom it is asked to;
            60, so that requests cannot make it flap.
        max_epoch_duration: seconds after which it renews its mandate, or hands over to an
            older worker that asks; 300.
        cold_start_observation_window: seconds to look around before the first election;
            none on SQL, half a beat on objects, where everybody who starts at once then
            elects once.
        cold_start_preparation_delay: seconds between being elected and leading; none on
            SQL, a sixth of a beat on objects.
        skip_cold_start: neither looks around nor waits. Safe: the store decides.
        coordinator_work_interval: seconds between calls of `coordinator_work`; one beat.
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
        check_duration("coordinator_work_interval", self.coordinator_work_interval)
        if not 0 <= self.min_epoch_duration <= self.max_epoch_duration:
            raise Invalid(
                "min_epoch_duration",
                self.min_epoch_duration,
                f"is not between 0 and max_epoch_duration, {self.max_epoch_duration:g}",
                "lower it, or raise max_epoch_duration",
            )
        if self.heartbeat_interval is not None or self.worker_timeout is not None:
            self.timing_of(is_billed=False)

    def timing(self, store: Store) -> Timing:
        """Give the beat and the timeout of sessions in a store."""
        return self.timing_of(is_billed=store.is_billed)

    def timing_of(self, *, is_billed: bool) -> Timing:
        """Give the beat and the timeout of sessions, by whether requests cost money."""
        beat, timeout = self.heartbeat_interval, self.worker_timeout
        if beat is None:
            usual = 30.0 if is_billed else 5.0
            beat = usual if timeout is None else min(usual, timeout / 3)
        return Timing(beat=beat, timeout=3 * beat if timeout is None else timeout)

    def for_store(self, store: Store, timing: Timing) -> WorkSettings:
        """Give what an election in a store goes by."""
        beat = timing.beat if store.is_billed else 0.0
        window, delay = self.cold_start_observation_window, self.cold_start_preparation_delay
        return WorkSettings(
            min_epoch_duration=self.min_epoch_duration,
            max_epoch_duration=self.max_epoch_duration,
            cold_start_observation_window=beat / 2 if window is None else window,
            cold_start_preparation_delay=beat / 6 if delay is None else delay,
            skip_cold_start=self.skip_cold_start,
        )
