"""Whether a schema may take another's place, and what stands then.

One rule: what the old one described and took, the new one takes. So records need no
migration, and a process that still knows the old one alone writes nothing that the new one
refuses. What breaks the rule is refused with the reason. A field that was not described
until now may hold anything in records that are there; they are judged when they are changed.

A field that the new schema does not mention stays, as an optional one: code of an earlier
release that starts again beside a newer one takes nothing away.
"""

from collections.abc import Iterator

import msgspec

from jobsync.core.schema import TEXTS, Field, Fields, Kind, Schema

__all__ = ["Break", "evolve", "find_breaks"]


class Break(msgspec.Struct, frozen=True):
    """A change of one field under which records that are there would no longer pass."""

    field: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem} ({self.fix})"


def evolve(old: Schema, new: Schema) -> Schema:
    """Give what stands when a new schema has taken an old one's place."""
    return Schema(fields=_merge(old.fields, new.fields), strict=new.strict)


def _merge(old: Fields, new: Fields) -> Fields:
    kept = {
        name: msgspec.structs.replace(field, required=False)
        for name, field in old.items()
        if name not in new
    }
    return {name: _merge_field(old.get(name), field) for name, field in new.items()} | kept


def _merge_field(old: Field | None, new: Field) -> Field:
    if old is None or old.fields is None or new.fields is None:
        return new
    return msgspec.structs.replace(new, fields=_merge(old.fields, new.fields))


def find_breaks(old: Fields, new: Fields, place: str = "") -> Iterator[Break]:
    """Find the changes under which records that are there would no longer pass."""
    for name, field in new.items():
        path = f"{place}{name}"
        before = old.get(name)
        if before is None:
            if _must_be_given(field):
                yield Break(path, "records that are there lack it", "add a default")
        else:
            yield from _find_field_breaks(before, field, path)


def _find_field_breaks(old: Field, new: Field, path: str) -> Iterator[Break]:
    if not _takes(new.kind, old.kind):
        problem = f"records that are there hold {old.kind}, not {new.kind}"
        yield Break(path, problem, "choose another name")
        return
    if _must_be_given(new) and not old.required:
        yield Break(path, "records that are there may lack it", "add a default")
    if not _is_as_wide(old.least, new.least, upward=False):
        yield Break(path, "records that are there may be below its min", "lower it")
    if not _is_as_wide(old.most, new.most, upward=True):
        yield Break(path, "records that are there may be above its max", "raise it")
    if new.choices and not (old.choices and set(old.choices) <= set(new.choices)):
        yield Break(path, "records that are there may hold another choice", "keep all")
    if new.items is not None and (old.items is None or not _takes(new.items, old.items)):
        yield Break(path, "records that are there may hold other items", "widen it")
    if new.fields is not None:
        if old.fields is None:
            yield Break(path, "records that are there hold any object", "leave it open")
        else:
            yield from find_breaks(old.fields, new.fields, f"{path}.")


def _must_be_given(field: Field) -> bool:
    return field.required and field.default is msgspec.UNSET


def _takes(new: Kind, old: Kind) -> bool:
    """Say whether every value of one kind is one of the other, too."""
    wider = {old, "json"}
    if old in TEXTS:
        wider.add("string")
    if old == "integer":
        wider.add("number")
    return new in wider


def _is_as_wide(old: float | None, new: float | None, *, upward: bool) -> bool:
    if new is None:
        return True
    if old is None:
        return False
    return new >= old if upward else new <= old
