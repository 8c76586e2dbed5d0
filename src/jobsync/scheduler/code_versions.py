"""The versions of the code of a fleet: which jobs each has, and whose definitions are stored.

    schedule/<namespace>                     exists, so that namespaces can be listed
    schedule/<namespace>/code/<digest>       the jobs of one version
    schedule/<namespace>/defined             the version whose definitions are stored

These records only save work. One that cannot be read is reported, and counts as none.
"""

import hashlib
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TypeVar

import msgspec

from jobsync.core.codec import Json
from jobsync.core.job_state import JobDefinition
from jobsync.database.keyspace import Disposition, Keyspace
from jobsync.errors import Corrupt, NewerFormat
from jobsync.stores.contract import Applied, Put, Record, find_applied
from jobsync.stores.corruption_log import convert_record, read_existing

__all__ = ["CodeVersions", "Defined", "digest_code"]

_CODE_AGE = 86_400.0
"""Seconds after which a version of the code is forgotten that no process has."""
_MAX_LOOKED_AT = 100
_DEFINED = "defined"

_T = TypeVar("_T")


class _Code(msgspec.Struct, frozen=True):
    """The jobs of one version of the code."""

    names: tuple[str, ...]
    at: float = 0.0
    """When a process has published it; again at most every half a day."""


class Defined(msgspec.Struct, frozen=True):
    """The version of the code whose definitions are stored."""

    code: str = ""
    """Its digest; empty while they are being replaced."""
    generation: int = 0
    """How many processes have started with another version than the stored one."""


def digest_code(definitions: Mapping[str, JobDefinition]) -> str:
    """Return an id of a set of definitions."""
    encoded = msgspec.json.encode(sorted(definitions.items()))
    return hashlib.sha256(encoded).hexdigest()[:24]


class CodeVersions:
    """Reads and writes the versions of the code in one namespace.

    Args:
        notes: the records of the namespace.
        code: those of the versions.
        report: called with the error if a record cannot be read.
    """

    def __init__(
        self,
        notes: Keyspace,
        code: Keyspace,
        report: Callable[[Corrupt | NewerFormat], object],
    ) -> None:
        self._notes = notes
        self._code = code
        self.prefix = code.prefix
        self._report = report

    async def read(self, digest: str) -> frozenset[str]:
        """Read which jobs a version of the code has; none, if nobody knows."""
        if not digest:
            return frozenset()
        code = await self._read(self._code, digest, _Code)
        return frozenset() if code is None else frozenset(code.names)

    async def write(self, digest: str, names: Iterable[str], now: float) -> bool:
        """Write which jobs a version of the code has, unless that was written lately.

        Returns:
            Whether it was not known before.

        Raises:
            OutcomeUnknown: it may have been written, may still be, or never.
        """
        key = self._code.key(digest)
        try:
            base = await self._code.store.get(key, tombstones=True)
        except (Corrupt, NewerFormat) as error:
            self._report(error)
            return False
        is_stored = base is not None and not base.deleted
        before = self._decode(base) if base and is_stored else None
        if before is not None and before.at > now - _CODE_AGE / 2:
            return False
        puts = [Put(key, msgspec.to_builtins(_Code(tuple(sorted(names)), at=now)), base)]
        if not is_stored:
            # So that the namespace can be listed.
            puts.append(Put(self._notes.prefix.removesuffix("/"), {}))
        for put, outcome in zip(puts, await self._code.store.write(puts), strict=True):
            # One that was written meanwhile says the same.
            find_applied(outcome, put.key)
        return not is_stored

    async def forget(self, used: Container[str], now: float, digest: str) -> int:
        """Remove versions of the code that no process has and that were published a day ago.

        A process publishes its version before its session names it, and publishes an old one
        again: what is removed here is named by nobody. Only 100 are looked at, beginning with the
        one after `digest`: digests are as good as random, so each has its turn.

        Args:
            used: the digests that live sessions name.
            now: the time by which they were published.
            digest: of the version that was added last.

        Returns:
            How many were removed.
        """
        store, prefix = self._code.store, self._code.prefix
        heads = await store.heads(prefix, after=self._code.key(digest), limit=_MAX_LOOKED_AT)
        if (left := _MAX_LOOKED_AT - len(heads)) > 0:
            heads += await store.heads(prefix, limit=left)
        keys = dict.fromkeys(head.key for head in heads)
        unused = [key for key in keys if self._code.name(key) not in used]
        records = await read_existing(store, unused, self._report)
        old = [
            record.delete()
            for record in records.values()
            if (code := self._decode(record)) is not None and code.at < now - _CODE_AGE
        ]
        outcomes = await self._code.store.write(old) if old else []
        return sum(isinstance(outcome, Applied) for outcome in outcomes)

    async def read_defined(self) -> Defined:
        """Read which version of the code has its definitions stored; none, if nobody knows."""
        return await self._read(self._notes, _DEFINED, Defined) or Defined()

    async def begin_generation(self) -> int | None:
        """Note that definitions are about to be replaced.

        Returns:
            A number above those of all processes that have called this before; None, and a
            report, if the record is damaged.

        Raises:
            OutcomeUnknown: it may have been written, may still be, or never.
        """
        return await self._change_defined(lambda before: Defined("", before.generation + 1))

    async def write_defined(self, digest: str, generation: int) -> None:
        """Write that the definitions of a version are stored, unless a later process has begun."""
        await self._change_defined(
            lambda before: Defined(digest, generation) if generation == before.generation else None
        )

    async def clear_defined(self) -> None:
        """Write that the stored definitions are no version's: the next process defines its own."""
        await self._change_defined(lambda before: Defined("", before.generation))

    async def _change_defined(self, decide: Callable[[Defined], Defined | None]) -> int | None:
        """Change the record, unless it is damaged; return the generation that it has then."""
        generation = 0

        def choose(current: Record | None) -> Json | Disposition:
            nonlocal generation
            before = Defined() if current is None else convert_record(current, Defined)
            after = decide(before)
            generation = (after or before).generation
            return Disposition.KEEP if after is None else msgspec.to_builtins(after)

        try:
            await self._notes.change(_DEFINED, choose)
        except (Corrupt, NewerFormat) as error:
            self._report(error)
            return None
        return generation

    async def _read(self, records: Keyspace, name: str, kind: type[_T]) -> _T | None:
        try:
            record = await records.get(name)
            return None if record is None else convert_record(record, kind)
        except (Corrupt, NewerFormat) as error:
            self._report(error)
            return None

    def _decode(self, record: Record) -> _Code | None:
        try:
            return convert_record(record, _Code)
        except Corrupt as error:
            self._report(error)
            return None
