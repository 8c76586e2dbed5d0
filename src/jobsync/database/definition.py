"""What a resource is, as the store has it: every process that connects sees the same.

A definition changes only in ways under which the records that are there still pass; any
other change is refused with the reason, and nothing is written.
"""

from typing import Any

import msgspec

from jobsync.core.attributes import parse, render
from jobsync.core.codec import Json
from jobsync.core.evolution import evolve, find_breaks
from jobsync.core.schema import Schema
from jobsync.errors import Corrupt, Invalid
from jobsync.stores.contract import Record

__all__ = ["DEFINITIONS", "Definition"]

DEFINITIONS = "resource/"
"""Where definitions are."""


class Definition(msgspec.Struct, frozen=True):
    """A name and a schema."""

    name: str
    schema: Schema = Schema()

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
        return cls(stored.name, schema)

    def write(self, before: Record | None) -> Json:
        """Give what is to be stored; what newer code has added stays."""
        stored = _Stored(self.name, render(self.schema.fields), self.schema.strict)
        return {**(before.value if before else {}), **msgspec.to_builtins(stored)}

    def evolve(self, schema: Schema) -> "Definition":
        """Give the definition that takes this one's place.

        Raises:
            Invalid: records that are there would no longer pass; names every reason.
        """
        if breaks := list(find_breaks(self.schema.fields, schema.fields)):
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
