"""What a resource is, as the store has it: every process that connects sees the same.

A definition changes only in ways under which the records that are there still pass; any
other change is refused with the reason, and nothing is written. One that says nothing of
records, as plugins make it for what they need, gives way to the first that does.
"""

from typing import Any

import msgspec

from jobsync.core.attributes import parse, render
from jobsync.core.codec import Json
from jobsync.core.schema import Fields, Schema, evolve, find_breaks
from jobsync.errors import Corrupt, Invalid
from jobsync.stores.contract import Record

__all__ = ["DEFINITIONS", "Definition"]

DEFINITIONS = "resource/"
"""Where definitions are."""


class Definition(msgspec.Struct, frozen=True):
    """A name and a schema."""

    name: str
    schema: Schema = Schema()
    is_declared: bool = True
    """Whether anybody has said what its records look like."""

    @classmethod
    def read(cls, record: Record) -> "Definition":
        """Understand what is stored.

        Raises:
            Corrupt: it is no definition.
        """
        try:
            stored = msgspec.convert(record.value, _Stored)
            schema = Schema(fields=parse(stored.attributes), strict=stored.strict)
        except (msgspec.ValidationError, Invalid) as error:
            raise Corrupt(record.key, f"not a definition ({error})") from error
        return cls(stored.name, schema, is_declared=stored.declared)

    def write(self, before: Record | None) -> Json:
        """Give what is to be stored; what newer code has added stays."""
        fields = render(self.schema.fields)
        stored = _Stored(self.name, fields, self.schema.strict, self.is_declared)
        return {**(before.value if before else {}), **msgspec.to_builtins(stored)}

    def evolve(
        self, fields: Fields | None, *, strict: bool | None, has_records: bool
    ) -> "Definition":
        """Give the definition that takes this one's place; None keeps what this one says.

        Args:
            fields: what records look like.
            strict: whether they may have no others.
            has_records: whether any is there, as far as is known.

        Raises:
            Invalid: records that are there would no longer pass; names every reason.
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
                "; ".join(map(str, breaks)),
                "keep what there was, or move the records to another resource",
            )
        return Definition(self.name, evolve(self.schema, schema))


class _Stored(msgspec.Struct, frozen=True):
    """The part of what is stored that this code understands."""

    name: str
    attributes: dict[str, Any] = {}
    strict: bool = False
    declared: bool = True
