"""Records that expire: removed, marked or archived by one process of the fleet.

    ttl = TTLPlugin(resources={"sessions": {"ttl": 3600}}, cleanup_interval=60)
    await db.use_plugin(ttl)

Guarantees: a record is dealt with at most `cleanup_interval` and the duration of a sweep after its
expiry, while some process leads and the store answers; after an outage, all that has expired
meanwhile. A record that has not expired, or is renewed before it is removed, stays. What has
expired is decided by the fleet's clock, see `coordination.fleet_clock`: a process whose clock is
wrong hands its role over, and removes nothing.

The rules are stored in the definitions of the resources, so processes without this plugin keep the
indexes too. Records that exist already are added in the background.

Without `resources`, only completed messages of the queues in the same database are governed: those
queues remember them for `default_ttl`. The process that leads a queue decides, so all that work on
it need the same plugins. Dead letters are never touched.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Unpack

from jobsync.coordination.fleet_clock import FleetClock
from jobsync.core.clock import Mono, Seconds
from jobsync.core.expiry import OnExpire
from jobsync.database.coordinator_plugin import CoordinatorPlugin, split_options
from jobsync.database.definition import Definition, Rule
from jobsync.database.document import Document
from jobsync.database.plugin import Plugin
from jobsync.errors import (
    Invalid,
    JobsyncError,
    NewerFormat,
    NotFound,
    Unavailable,
    closest_name,
    plain_text,
)
from jobsync.safe_text import format_error
from jobsync.settings import Sources, resolve
from jobsync.ttl import events
from jobsync.ttl.callback import ExpiryCallback, find_calling_callback
from jobsync.ttl.governed_rules import GovernedRules
from jobsync.ttl.settings import TTLOptions, TTLSettings, parse_resources
from jobsync.ttl.sweep import ResourceSweep, SweepCounts, SweepListener

__all__ = ["TTLPlugin"]

_WORK_INTERVAL: Seconds = 5.0
_CLOCK_RETRY: Seconds = 1.0
_SWEEPS_WITHOUT = 2
"""After how many sweeps a missing resource is reported: the first comes right after the start."""

_MAX_ERRORS = 10
"""How many records with errors are reported one by one in a sweep of a resource."""


class TTLPlugin(CoordinatorPlugin):
    """Deals with records that have expired, in one process of the fleet.

    Args:
        resources: names of resources, or options by name: `ttl`, `field`, `on_expire`
            (`hard-delete`, `soft-delete` with `delete_field`, `archive` with `archive_resource` and
            `keep_original_id`, or `callback` with `callback`). A resource without `ttl` and `field`
            expires by its field `expires_at` if its schema has one, else by `default_ttl`.
        namespace: separates several plugins.
        options: as in `TTLSettings` and `CoordinatorSettings`.

    Raises:
        Invalid, Misconfigured: an option is wrong, with the fix.
    """

    slug: ClassVar[str] = "ttl"

    def __init__(
        self,
        *,
        resources: Sequence[str] | Mapping[str, Mapping[str, Any] | None] | None = None,
        namespace: str | None = None,
        **options: Unpack[TTLOptions],
    ) -> None:
        if "coordinator_work_interval" in options:
            given = options["coordinator_work_interval"]
            fix = "pass cleanup_interval"
            raise Invalid("coordinator_work_interval", given, "is not an option here", fix)
        passed, shared = split_options(
            TTLSettings, options, "a TTL plugin", ("resources", "namespace")
        )
        sources = Sources.load(os.environ, Path.cwd())
        self.settings = resolve(TTLSettings, passed, sources, section="ttl").value
        self._governed = parse_resources(resources, self.settings)
        super().__init__(
            namespace=namespace,
            coordinator_work_interval=min(self.settings.cleanup_interval, _WORK_INTERVAL),
            **shared,
        )
        self._rules = GovernedRules(self._governed, lambda: self.database)
        self._callbacks = {
            name: ExpiryCallback(governed.callback)
            for name, governed in self._governed.items()
            if governed.callback is not None
        }
        self._fleet_clock: FleetClock | None = None
        self._veto = ""
        self._next_sweep = Mono(float("-inf"))
        self._turns: dict[str, asyncio.Lock] = {}
        """By resource: two sweeps would ask its callback twice."""
        self._awaited: Counter[str] = Counter()
        """How many sweeps have missed a resource."""
        self._totals = SweepCounts()
        self._sweeps = 0
        self._last_sweep: events.CleanupCompleted | None = None
        self._last_sweep_at: float | None = None

    @property
    def completed_message_ttl(self) -> float | None:
        """The `default_ttl`, if no resources are named."""
        return None if self._governed else self.settings.default_ttl

    def choose_rules(self, definition: Definition) -> Sequence[Rule]:
        """Return the rule of a resource that it governs.

        Raises:
            Invalid: the schema, or the rule of another resource, does not fit the options.
        """
        return self._rules.choose(definition)

    async def run_cleanup(self) -> events.CleanupCompleted:
        """Deal with everything that has expired now, in this process; return what was done.

        Raises:
            Unavailable: the store does not answer, this machine's clock is wrong, or the plugin
                was stopped meanwhile.
        """
        return await self._sweep(list(self._governed))

    async def cleanup_resource(self, name: str) -> events.CleanupCompleted:
        """Deal with the expired records of one resource now; return what was done.

        Raises:
            NotFound: this plugin does not govern it.
            Unavailable: the store does not answer, this machine's clock is wrong, or the plugin
                was stopped meanwhile.
        """
        if plain_text(name) not in self._governed:
            hint = closest_name(name, self._governed)
            raise NotFound("resource of this TTL plugin", name, list(self._governed), hint)
        return await self._sweep([name])

    def stats(self) -> dict[str, Any]:
        """Return what this process has done since it was created, from counters."""
        totals, last = self._totals, self._last_sweep
        return {
            "total_scans": self._sweeps,
            "total_expired": totals.expired,
            "total_deleted": totals.deleted,
            "total_soft_deleted": totals.soft_deleted,
            "total_archived": totals.archived,
            "total_kept": totals.kept,
            "total_errors": totals.errors,
            "last_scan_at": self._last_sweep_at,
            "last_scan_duration": None if last is None else last.duration,
            "resources": len(self._governed),
            "is_running": self.is_running,
        }

    async def on_start(self) -> None:
        """Store the rules of resources that exist, and watch the clock."""
        if not self._governed:
            return
        database = self.database
        self._fleet_clock = FleetClock(self._get_membership(), database.store, database.components)
        self._turns = {name: asyncio.Lock() for name in self._governed}
        self._awaited.clear()
        self._veto = ""
        # All are checked before any is stored.
        self._rules.check_all()
        for governed in self._governed.values():
            archive = governed.options.archive_resource
            if archive is not None and archive not in database.resources:
                await database.create_resource(archive)
        for name in self._governed:
            try:
                await self._rules.store(name)
            except NewerFormat as error:
                # Newer code has defined it, and sweeps it.
                self._report_error(name, None, format_error(error))
        self.run_in_background(partial(self._watch_clock, self._fleet_clock), "watches the clock")

    async def on_stop(self) -> None:
        """Remove nothing more."""
        self._fleet_clock = None

    async def on_become_coordinator(self) -> None:
        """Sweep at once."""
        self._next_sweep = Mono(float("-inf"))

    async def coordinator_work(self) -> None:
        """Wait until a sweep is due, and deal with what has expired."""
        clock = self.database.components.clock
        if (wait := self._next_sweep - clock.mono()) > 0:
            await clock.sleep(wait)
        self._next_sweep = clock.mono() + self.settings.cleanup_interval
        try:
            await self._sweep(list(self._governed))
        except Unavailable:
            # Reported already; the next sweep finds what this one has left.
            return

    @property
    def runs_caller(self) -> bool:
        """Whether the caller is one of its callbacks."""
        calling = find_calling_callback()
        return calling is not None and calling.is_running and calling in self._callbacks.values()

    def list_running(self) -> list[str]:
        """Return descriptions of callbacks that run."""
        return [f"callback of {name}" for name, call in self._callbacks.items() if call.is_running]

    async def _set_up(self, exit_stack: AsyncExitStack) -> None:
        """Start. Without resources there is nothing to lead, so no session is needed."""
        if self._governed:
            await super()._set_up(exit_stack)
        else:
            await Plugin._set_up(self, exit_stack)  # noqa: SLF001 - that of its base class

    async def _watch_clock(self, clock: FleetClock) -> None:
        """Stand back while this machine's clock cannot be right."""
        beat = self._get_membership().timing.heartbeat
        while True:
            await self.database.components.clock.sleep(beat)
            if self._veto:
                await clock.refresh()
            if self._veto or self.is_coordinator:
                self._check_veto(clock)

    def _check_veto(self, clock: FleetClock) -> None:
        """Hand the role over, or stand again, if the clock's state has changed."""
        reason = clock.veto if clock.is_off else ""
        if reason == self._veto:
            return
        self._veto = reason
        if reason:
            self.emit(events.CleanupVetoed(reason=reason))
        if self._coordinator is not None:
            if reason:
                self._coordinator.withhold(reason)
            else:
                self._coordinator.stand()

    def _get_clock(self) -> FleetClock:
        if self._fleet_clock is None:
            raise Invalid("plugin", self.name, "is not running", "await plugin.start() first")
        return self._fleet_clock

    def _get_now(self) -> Seconds:
        """Return the time by which records have expired.

        Raises:
            Unavailable: the clock that decides is not known, or wrong.
        """
        clock = self._get_clock()
        now = clock.measured_now()
        if veto := clock.veto:
            self._check_veto(clock)
            raise Unavailable("the fleet's time", veto, "correct the clock, or try again later")
        return now

    async def _read_clock(self) -> None:
        """Compare the clocks before a sweep; wait for a first comparison."""
        clock, membership = self._get_clock(), self._get_membership()
        deadline = self.database.components.clock.mono() + membership.timing.timeout
        await clock.refresh()
        while clock.veto and not clock.is_off:
            if self.database.components.clock.mono() >= deadline:
                break
            await self.database.components.clock.sleep(_CLOCK_RETRY)
            await clock.refresh()

    async def _sweep(self, names: Sequence[str]) -> events.CleanupCompleted:
        """Sweep resources, one after another.

        Raises:
            Unavailable: the store does not answer, or the time is not known.
        """
        if self.runs_caller:
            # It would wait for its own end.
            fix = "return True to delete the record, or False to keep it"
            raise Invalid("callback", self.name, "cannot start a sweep", fix)
        clock = self.database.components.clock
        fleet_clock = self._get_clock() if self._governed else None
        if fleet_clock is not None:
            try:
                await self._read_clock()
            except JobsyncError as error:
                raise self._explain(error, fleet_clock) from error
        start = clock.mono()
        self.emit(events.CleanupStarted(resources=tuple(names)))
        counts = SweepCounts()
        try:
            await self._sweep_all(names, counts, fleet_clock)
        finally:
            # Also if it is cancelled: what was done is done.
            completed = events.CleanupCompleted(
                resources=tuple(names),
                expired=counts.expired,
                deleted=counts.deleted,
                soft_deleted=counts.soft_deleted,
                archived=counts.archived,
                kept=counts.kept,
                errors=counts.errors,
                duration=clock.mono() - start,
            )
            self._totals.add(counts)
            self._sweeps += 1
            self._last_sweep, self._last_sweep_at = completed, clock.wall().seconds
            self.emit(completed)
        return completed

    async def _sweep_all(
        self, names: Sequence[str], counts: SweepCounts, fleet_clock: FleetClock | None
    ) -> None:
        """Sweep resources; one that cannot be swept stops none of the others.

        Raises:
            Unavailable: the store does not answer, or the time is not known.
        """
        for name in names:
            try:
                self._get_now()
                await self._sweep_resource(name, counts)
            except JobsyncError as error:
                counts.errors += 1
                problem = self._explain(error, fleet_clock)
                self._report_error(name, None, format_error(problem))
                if problem is not error:
                    raise problem from error
                if isinstance(error, Unavailable):
                    raise

    def _explain(self, error: JobsyncError, fleet_clock: FleetClock | None) -> JobsyncError:
        """Return why a sweep has failed: by an error, or because the plugin was stopped."""
        if self._fleet_clock is fleet_clock or isinstance(error, Unavailable):
            return error
        return Unavailable(self.name, "it was stopped during the sweep", "start it and try again")

    async def _sweep_resource(self, name: str, counts: SweepCounts) -> None:
        async with self._turns[name]:
            if not await self._find_rule(name):
                return
            resource = self.database.resource(name)
            reported = 0

            def on_error(record_id: str | None, problem: str) -> None:
                nonlocal reported
                reported += 1
                if reported <= _MAX_ERRORS:
                    self._report_error(name, record_id, problem)

            sweep = ResourceSweep(
                resource,
                self._callbacks.get(name),
                self._get_now,
                self.settings.batch_size,
                SweepListener(partial(self._on_expired, name), on_error),
                counts,
            )
            try:
                await sweep.run()
            finally:
                if reported > _MAX_ERRORS:
                    self._report_error(name, None, f"{reported - _MAX_ERRORS} more records failed")

    async def _find_rule(self, name: str) -> bool:
        """Whether a resource has a rule; it may have been created since."""
        resources = self.database.resources
        if name in resources and resources[name].definition.expiry is not None:
            return True
        await self.database.list_resources()
        if await self._rules.store(name):
            return True
        self._awaited[name] += 1
        if self._awaited[name] == _SWEEPS_WITHOUT:
            self.emit(events.ResourceAwaited(resource=name))
        return False

    def _on_expired(
        self,
        name: str,
        record: Document,
        on_expire: OnExpire,
        expired_at: Seconds,
        is_kept: bool,  # noqa: FBT001 - as the listener says
    ) -> None:
        if self.events.has_listener(events.RecordExpired):
            self.emit(
                events.RecordExpired(
                    resource=name,
                    record_id=record["id"],
                    on_expire=on_expire,
                    expired_at=expired_at,
                    is_kept=is_kept,
                )
            )

    def _report_error(self, name: str, record_id: str | None, problem: str) -> None:
        self.emit(events.CleanupFailed(resource=name, error=problem, record_id=record_id))
