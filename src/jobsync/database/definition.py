"""Definitions of resources: what their records look like, and by what they can be found.

A definition is stored, so every process that connects sees the same. Its schema changes only in
ways under which existing records still pass; any other change is refused with the reason, and
nothing is written. A definition that does not describe records, as plugins create it for what they
need, is replaced by the first that does.

A resource has an index for each partition, and one for the expiry of its records. Writers keep an
index from the moment at which the definition names it. Readers use it once it is ready: at once if
the resource is new, otherwise when a backfill has added the records that existed before. An index
whose rule has changed is replaced by a new one and retired. Processes with an older definition
still read it, so writers keep it until there are none. Then it is abandoned, and its entries are
removed once nobody writes any.

A rule that comes back while its index is retired gets the same index: writers have kept it without
a gap, so it has what it would have if the rule had stayed. So processes that disagree about a rule,
each of which stores its own, share a few indexes. If there are too many former ones, the rule that
counts stays: each costs every writer.

A definition with indexes has a higher format, so that code that does not know them refuses to
write records that they would not find.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from jobsync.core.attributes import parse, render
from jobsync.core.codec import Json
from jobsync.core.expiry import ExpiryRule
from jobsync.core.partitions import MAX_PARTITIONS, Partition
from jobsync.core.schema import Fields, Schema, evolve, find_breaks
from jobsync.errors import Corrupt, Invalid
from jobsync.events import Event
from jobsync.stores.contract import Record

__all__ = ["KNOWN_FORMAT", "Definition", "IndexState", "ProcessesDisagree", "Rule"]

KNOWN_FORMAT = 2
"""The newest format of definitions that this code can write."""

_PLAIN_FORMAT = 1
_MAX_RETIRED = 3
"""How many former indexes of one name writers keep before its rule can change again."""

Rule: TypeAlias = Partition | ExpiryRule


class ProcessesDisagree(Event, frozen=True, kw_only=True):
    """Processes have stored different rules for one index within the last minutes.

    Every change costs all writers for minutes, and records may have to be read again. So the rule
    that counts stays if there were too many. Deploy one rule everywhere, then define it once more.
    """

    name = "resource:processes-disagree"
    level = logging.WARNING

    resource: str
    index: str
    rule: str
    """What this process wants."""
    other: str
    """What another process wants."""
    is_used: bool
    """Whether the rule of this process counts now; otherwise the other one does."""


class IndexState(msgspec.Struct, frozen=True, omit_defaults=True):
    """One index of a resource."""

    key: str
    """Its name in the store; never used again for another index."""
    rule: Rule
    is_ready: bool
    """Whether it has all records."""
    retirements: int = 0
    """How often it was retired; more than once if its rule came back."""

    def rank(self, document: Json) -> str | None:
        """Return the rank of a document in this index; None if it is left out."""
        return self.rule.rank(document) if isinstance(document, dict) else None


class Definition(msgspec.Struct, frozen=True):
    """The name of a resource, its schema, and its indexes."""

    name: str
    schema: Schema = Schema()
    is_declared: bool = True
    """Whether anybody has described its records."""
    indexes: tuple[IndexState, ...] = ()
    retired: tuple[IndexState, ...] = ()
    """Former indexes, which others may still read; writers keep them."""
    abandoned: tuple[str, ...] = ()
    """Keys of former indexes that may still have entries."""
    format: int = _PLAIN_FORMAT
    """The format in which it is stored."""

    @classmethod
    def read(cls, record: Record) -> "Definition":
        """Decode a stored definition. Of a newer format it tells only what records look like.

        Raises:
            Corrupt: it is not a definition.
        """
        try:
            kind = _StoredDefinition if record.format <= KNOWN_FORMAT else _StoredSchema
            stored = msgspec.convert(record.value, kind)
            schema = Schema(fields=parse(stored.attributes), strict=stored.strict)
        except (msgspec.ValidationError, Invalid) as error:
            raise Corrupt(record.key, f"not a definition ({error})") from error
        definition = cls(stored.name, schema, is_declared=stored.declared, format=record.format)
        if isinstance(stored, _StoredDefinition):
            return msgspec.structs.replace(
                definition,
                indexes=stored.indexes,
                retired=stored.retired,
                abandoned=stored.abandoned,
            )
        return definition

    def write(self, before: Record | None) -> Json:
        """Return the value to store; fields that newer code has added stay."""
        stored = _StoredDefinition(
            self.name,
            render(self.schema.fields),
            self.schema.strict,
            self.is_declared,
            self.indexes,
            self.retired,
            self.abandoned,
        )
        value = msgspec.to_builtins(stored)
        if not (self.indexes or not self.is_settled or self.format > _PLAIN_FORMAT):
            del value["indexes"], value["retired"], value["abandoned"]
        return {**(before.value if before else {}), **value}

    def evolve(
        self, fields: Fields | None, *, strict: bool | None, has_records: bool
    ) -> "Definition":
        """Return the definition that replaces this one; None keeps what this one says.

        Args:
            fields: what records look like.
            strict: whether other fields are refused.
            has_records: whether there are records, as far as is known.

        Raises:
            Invalid: existing records would no longer pass; lists every reason.
        """
        if fields is None and strict is None:
            return self
        schema = Schema(
            fields=self.schema.fields if fields is None else fields,
            strict=self.schema.strict if strict is None else strict,
        )
        breaks = list(find_breaks(self.schema.fields, schema.fields))
        if breaks and (self.is_declared or has_records):
            raise Invalid(
                f"attributes of {self.name}",
                [found.field for found in breaks],
                f"would refuse existing records: {'; '.join(map(str, breaks))}",
                "keep the old rules, or move the records to another resource",
            )
        return msgspec.structs.replace(self, schema=evolve(self.schema, schema), is_declared=True)

    def add_indexes(
        self, rules: Sequence[Rule], make_token: Callable[[], str], *, is_new: bool
    ) -> "Definition":
        """Return a definition with more indexes; one of the same name is replaced.

        An index that would be the fourth former one of its name stays: see `find_dispute`.

        Args:
            rules: of the indexes.
            make_token: returns what makes the key of a new index unique.
            is_new: whether the resource has no records and no other writers yet.

        Raises:
            Invalid: there would be too many partitions.
        """
        definition = self
        for rule in rules:
            before = definition.find_index(rule.kind, rule.name)
            former = definition._find_retired(rule)
            same = next((i for i in (before, *former) if i and i.rule.digest == rule.digest), None)
            if same is not None:
                after = msgspec.structs.replace(same, rule=rule)
            elif before is not None and len(former) >= _MAX_RETIRED:
                continue
            else:
                key = f"{rule.name}.{rule.digest}.{make_token()}"
                after = IndexState(key, rule, is_ready=is_new)
            definition = definition._replace_index(before, after)
        count = _count_partitions(definition)
        if count > max(MAX_PARTITIONS, _count_partitions(self)):
            problem = f"must be at most {MAX_PARTITIONS} in all: each costs a write"
            fix = "drop those that are not queried with drop_partition"
            raise Invalid(f"partitions of {self.name}", count, problem, fix)
        return definition

    def find_dispute(self, rule: Rule) -> ProcessesDisagree | None:
        """Return an event if some process has wanted another rule than this one a moment ago.

        The other one counts now, or has replaced this one, which came back.
        """
        now = self.find_index(rule.kind, rule.name)
        former = self._find_retired(rule)
        if now is None:
            return None
        is_used = now.rule.digest == rule.digest
        if is_used and not (former and now.retirements):
            return None
        return ProcessesDisagree(
            resource=self.name,
            index=rule.name,
            rule=str(rule),
            other=str(former[-1].rule if is_used else now.rule),
            is_used=is_used,
        )

    def remove_index(self, key: str) -> "Definition":
        """Return a definition without an index, which is retired."""
        before = next((index for index in self.indexes if index.key == key), None)
        return self if before is None else self._replace_index(before, None)

    def mark_ready(self, key: str) -> "Definition":
        """Return a definition in which an index has all records."""
        indexes = [
            msgspec.structs.replace(index, is_ready=True) if index.key == key else index
            for index in self.indexes
        ]
        return msgspec.structs.replace(self, indexes=tuple(indexes))

    def abandon_index(self, index: IndexState) -> "Definition":
        """Return a definition in which nobody keeps a retired index, which nobody reads.

        If it came back meanwhile, and was retired again, somebody may read it.
        """
        found = next((each for each in self.retired if each.key == index.key), None)
        if found is None or found.retirements != index.retirements:
            return self
        retired = tuple(each for each in self.retired if each is not found)
        abandoned = tuple(sorted({*self.abandoned, index.key}))
        return msgspec.structs.replace(self, retired=retired, abandoned=abandoned)

    def forget_index(self, key: str) -> "Definition":
        """Return a definition that does not know an abandoned index, which has no more entries."""
        abandoned = tuple(each for each in self.abandoned if each != key)
        return msgspec.structs.replace(self, abandoned=abandoned)

    def find_index(self, kind: str, name: str) -> IndexState | None:
        """Return the index of this kind and name."""
        return next((i for i in self.indexes if i.rule.kind == kind and i.rule.name == name), None)

    @property
    def expiry(self) -> ExpiryRule | None:
        """When its records expire; None if they do not."""
        rules = [index.rule for index in self.indexes]
        return next((rule for rule in rules if isinstance(rule, ExpiryRule)), None)

    @property
    def kept_indexes(self) -> tuple[IndexState, ...]:
        """The indexes that a writer keeps."""
        return (*self.indexes, *self.retired)

    @property
    def index_keys(self) -> tuple[str, ...]:
        """The keys of all indexes that may have entries."""
        return (*(index.key for index in self.kept_indexes), *self.abandoned)

    @property
    def unsettled_keys(self) -> tuple[str, ...]:
        """The keys of the indexes that are not ready, and of former ones."""
        unready = (index.key for index in self.list_unready())
        return (*unready, *(index.key for index in self.retired), *self.abandoned)

    @property
    def is_settled(self) -> bool:
        """Whether all its indexes are ready, and no former ones have entries."""
        return not self.unsettled_keys

    def list_unready(self) -> list[IndexState]:
        """Return the indexes that do not have all records."""
        return [index for index in self.indexes if not index.is_ready]

    def _find_retired(self, rule: Rule) -> list[IndexState]:
        """Return the retired indexes of the same kind and name."""
        return [
            index
            for index in self.retired
            if (index.rule.kind, index.rule.name) == (rule.kind, rule.name)
        ]

    def _replace_index(self, before: IndexState | None, after: IndexState | None) -> "Definition":
        indexes = [index for index in self.indexes if index is not before]
        retired = [index for index in self.retired if after is None or index.key != after.key]
        if before is not None and (after is None or after.key != before.key):
            retired.append(msgspec.structs.replace(before, retirements=before.retirements + 1))
        if after is not None:
            indexes.append(after)
        return msgspec.structs.replace(
            self,
            indexes=tuple(sorted(indexes, key=lambda index: index.key)),
            retired=tuple(sorted(retired, key=lambda index: index.key)),
            format=max(self.format, KNOWN_FORMAT),
        )


def _count_partitions(definition: Definition) -> int:
    return sum(isinstance(index.rule, Partition) for index in definition.indexes)


class _StoredSchema(msgspec.Struct, frozen=True):
    """The part of a stored definition that code of any age understands."""

    name: str
    attributes: dict[str, Any] = {}
    strict: bool = False
    declared: bool = True


class _StoredDefinition(_StoredSchema, frozen=True):
    """A stored definition of a format that this code understands."""

    indexes: tuple[IndexState, ...] = ()
    retired: tuple[IndexState, ...] = ()
    abandoned: tuple[str, ...] = ()
