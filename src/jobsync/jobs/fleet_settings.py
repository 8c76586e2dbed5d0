"""The settings that all nodes of a fleet share, and how they change when no node is alive.

A token means the same task on every node only if all compute it in the same way. So one record
has the fleet's settings, and a live node has exactly these. A node with others waits until all
nodes have left or died, then changes the record:

    settled ──▶ changing, by one session ──▶ settled: the new settings
                     └── a node with the old ones is alive ──▶ settled: the old settings

A node joins in three steps: it registers with its settings, it reads the record, and it goes on
only if the record is settled and equal. A node that changes the record first marks it, then
looks for nodes with the old settings. So of two nodes that start at once with different settings
at least one sees the other, and never do both go on. Until the last write the record has the old
settings; a session that dies before leaves its mark, which the next node replaces with its own.

Claims do not depend on these settings: a task that was done stays done. Pins contain tokens for
readers in SQL, which are written anew before the record is settled.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Annotated

import msgspec

from jobsync.coordination.membership import Membership
from jobsync.coordination.role import worker_of
from jobsync.coordination.session import SESSIONS, read_session_record
from jobsync.core.assignment import HASH_FUNCTIONS, MAX_TOKENS, token_maker
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.core.keys import KeySegment
from jobsync.core.pins import read_sheet, write_sheet
from jobsync.errors import Conflict, Misconfigured
from jobsync.jobs.events import SettingsChanged
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.registration import NodeRecord
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import CorruptionLog, convert_record
from jobsync.stores.paging import scan_all

__all__ = ["FleetSettings", "SettingsDiffer", "SharedSettings", "read_shared_settings"]

_CHANGING = "changing"
"""The field that has the session which changes the settings."""
_POLL_INTERVAL = 1.0
_WATCH = "settings"


_ABSENT = object()
"""In place of the value of a setting that only the other side has."""


class SettingsDiffer(Misconfigured):
    """Live nodes of the fleet have other settings."""


class SharedSettings(msgspec.Struct, frozen=True):
    """What every record of settings has: what decides a task's token."""

    total_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    hash_function: str
    """Newer code may know other functions than this."""
    changing: KeySegment | None = None
    """The session that changes them."""


def read_shared_settings(record: Record) -> SharedSettings:
    """Decode the settings of a fleet.

    Raises:
        Corrupt: no version of this library wrote them.
    """
    return convert_record(record, SharedSettings)


class FleetSettings:
    """One node's view of the settings of its fleet.

    Args:
        membership: this node's session; knows which other sessions are dead.
        keys: the fleet's keys.
        node: this node's name.
        values: this node's settings.
        list_nodes: returns the nodes of the fleet.
    """

    def __init__(
        self,
        membership: Membership,
        keys: JobKeys,
        node: str,
        values: Mapping[str, Json],
        list_nodes: Callable[[], Awaitable[Iterable[NodeRecord]]],
    ) -> None:
        self._membership = membership
        self._store: Store = membership.store
        self._clock = membership.components.clock
        self._events = membership.components.events
        self._corruption_log = CorruptionLog(self._store.name, self._events)
        self._keys = keys
        self._node = node
        self.values = dict(values)
        self._list_nodes = list_nodes

    async def wait(self, until: Mono) -> None:
        """Wait until this node may register: no live node has other settings.

        Raises:
            SettingsDiffer: a node with other settings is still alive; names it.
        """
        while (problem := await self._find_problem(await self._read())) is not None:
            if self._clock.mono() >= until:
                raise problem
            await self._store.wait(SESSIONS, min(_POLL_INTERVAL, until - self._clock.mono()))

    async def settle(self) -> bool:
        """Make this node's settings the fleet's; whether they are. Call it once registered.

        Raises:
            OutcomeUnknown, Unavailable: the store does not answer; call again.
        """
        try:
            while True:
                record = await self._read()
                if record is None or record.deleted:
                    if await self._write(record, self.values):
                        return True
                elif record.value == self.values:
                    return True
                elif await self._find_problem(record) is not None:
                    return False
                else:
                    await self._change(record)
        finally:
            self._membership.watch(_WATCH, ())

    async def _change(self, record: Record) -> None:
        """Change the record's settings to this node's, unless a node with the old ones is alive."""
        old = _settings_of(record)
        marked = await self._write(record, {**old, _CHANGING: self._membership.incarnation})
        if marked is None:
            return
        is_free = await self._find_problem(marked) is None
        new = self.values if is_free else old
        if new["hash_function"] in HASH_FUNCTIONS:
            await self._rewrite_pins(new)
        if await self._write(marked, new) and new != old:
            changed = {field: value for field, value in new.items() if old.get(field) != value}
            name = self._keys.name
            self._events.emit(SettingsChanged(node=self._node, appname=name, changed=changed))

    async def _read(self) -> Record | None:
        """Read the record.

        Raises:
            Corrupt: it has no settings.
        """
        record = await self._store.get(self._keys.settings, tombstones=True)
        if record is not None and not record.deleted:
            read_shared_settings(record)
        return record

    async def _write(self, base: Record | None, value: Json) -> Record | None:
        """Write the record; None if another node was first."""
        try:
            if base is None:
                return await self._store.create(self._keys.settings, value)
            return await self._store.put(base, value)
        except Conflict:
            return None

    async def _find_problem(self, record: Record | None) -> SettingsDiffer | None:
        """Return why this node's settings cannot be the fleet's now."""
        if record is None or record.deleted or record.value == self.values:
            return None
        session = record.value.get(_CHANGING)
        theirs = _settings_of(record)
        is_ours = session is None or worker_of(session) == self._membership.worker_id
        nodes = [node for node in await self._list_others() if node.fleet in (theirs, {})]
        sessions = {node.incarnation for node in nodes} | (set() if is_ours else {session})
        self._membership.watch(_WATCH, sessions)
        if not is_ours and await self._is_alive(session):
            return SettingsDiffer(
                "appname",
                self._keys.name,
                "has settings that another node is changing at this moment",
                "start this node again",
            )
        if theirs == self.values:
            return None
        for node in nodes:
            if await self._is_alive(node.incarnation):
                return self._describe(theirs, node.name)
        return None

    async def _list_others(self) -> list[NodeRecord]:
        nodes = await self._list_nodes()
        return [node for node in nodes if node.stage != "left" and node.name != self._node]

    def _describe(self, theirs: Mapping[str, Json], node: str) -> SettingsDiffer:
        # Newer code may share more settings than this.
        fields = {**self.values, **theirs}
        field = next(f for f in fields if theirs.get(f, _ABSENT) != self.values.get(f, _ABSENT))
        return SettingsDiffer(
            field,
            self.values.get(field),
            f"must be {theirs.get(field)!r} as on the live node {node}",
            "use the same value on every node, stop the others first, or use another appname",
        )

    async def _is_alive(self, incarnation: str) -> bool:
        record = await self._store.get(f"{SESSIONS}{incarnation}")
        if record is None:
            return not self._membership.is_dead(incarnation)
        return read_session_record(record).state == "live"

    async def _rewrite_pins(self, values: Mapping[str, Json]) -> None:
        """Write the tokens of all pins anew."""
        token_of = token_maker(values["total_tokens"], values["hash_function"])

        def renew(record: Record) -> Json:
            pins = read_sheet(record.value, record.key, token_of)
            return write_sheet(record.value["created_by"], pins)

        changed = True
        while changed:
            # Again if another writer was first: what it has written may have the old tokens.
            changed = False
            for record in await scan_all(self._store, self._keys.pins):
                renewed = self._corruption_log.read(renew, record)
                if renewed is not None and renewed != record.value:
                    try:
                        await self._store.put(record, renewed)
                    except Conflict:
                        changed = True


def _settings_of(record: Record) -> dict[str, Json]:
    return {field: value for field, value in record.value.items() if field != _CHANGING}
