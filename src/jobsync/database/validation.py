"""From what a user gives to the document that is stored, or every reason why it cannot be."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import GenericAlias
from typing import Annotated, Any, Literal, NotRequired, Optional, TypeAlias, TypedDict

import msgspec

from jobsync.core.codec import MAX_INTEGER, Json
from jobsync.core.schema import PATTERNS, Field, Fields, Schema, conform, find_strays
from jobsync.database.document import CREATED, LIBRARYS, UPDATED
from jobsync.errors import Invalid, InvalidRecord, Problem

__all__ = ["FastValidator", "Validator", "merge"]


# A quick look at records, which passes almost all that are right at a fraction of the cost.
#
# What it passes, `conform` would pass too, and leave as it is. What it doubts may be right or
# wrong: `conform` says which, and why.


JsonObjects: TypeAlias = list[dict[str, Json]]

# Given a name and keys: a function, because type checkers want to see the keys written out.
_make_dict: Any = TypedDict


class FastValidator:
    """Looks at records of one schema.

    Args:
        fields: what they look like.
    """

    def __init__(self, fields: Fields) -> None:
        self._defaults = {
            name: field.default
            for name, field in fields.items()
            if field.default is not msgspec.UNSET
        }
        wanted = _describe_object(fields)
        if any(isinstance(default, dict | list) for default in self._defaults.values()):
            # Records must not share what can be changed.
            wanted = None
        # A class, because msgspec analyses a class once and a bare type at every call.
        self._wanted: Any = wanted and msgspec.defstruct(
            "_Wanted", [("all", _list_of(wanted))], array_like=True
        )

    def passes(self, documents: JsonObjects) -> bool:
        """Fill in what is missing, and say whether all are surely right."""
        if self._wanted is None:
            return False
        for name, default in self._defaults.items():
            for document in documents:
                document.setdefault(name, default)
        try:
            msgspec.convert((documents,), self._wanted)
        except (msgspec.ValidationError, TypeError, UnicodeEncodeError):
            return False
        return True


def _describe_object(fields: Fields) -> Any:
    """Give the type of documents with such fields, or None if msgspec cannot look at them."""
    described = {name: _describe(field) for name, field in fields.items()}
    if None in described.values():
        return None
    return _make_dict(
        "_Document",
        {
            name: kind if fields[name].required else NotRequired[Optional[kind]]  # noqa: UP045 - a value
            for name, kind in described.items()
        },
    )


def _describe(field: Field) -> Any:
    if field.choices:
        return _describe_choices(field)
    if field.fields is not None:
        has_defaults = any(one.default is not msgspec.UNSET for one in field.fields.values())
        return None if has_defaults else _describe_object(field.fields)
    match field.kind:
        case "string" | "email" | "url" | "uuid":
            return _bound(str, field, "min_length", "max_length")
        case "number":
            return _bound(float, field, "ge", "le")
        case "integer":
            return _bound(int, field, "ge", "le")
        case "boolean":
            return bool
        case "array":
            items = Any if field.items is None else _describe(Field(kind=field.items))
            return items and _bound(_list_of(items), field, "min_length", "max_length")
        case "object":
            return dict[str, Any]
        case "json" if not field.required:
            return Any
        case _:
            # Dates need a calendar; and of "anything", null is no part where it is required.
            return None


def _list_of(items: Any) -> Any:
    return GenericAlias(list, (items,))


def _describe_choices(field: Field) -> Any:
    bounded = field.least is not None or field.most is not None
    return Literal[field.choices] if field.kind == "string" and not bounded else None


def _bound(kind: Any, field: Field, least: str, most: str) -> Any:
    """Add a field's bounds and its pattern to a type."""
    rules: dict[str, Any] = {}
    for name, bound in ((least, field.least), (most, field.most)):
        if bound is None:
            continue
        # Lengths and whole numbers have whole bounds; lengths none below 0.
        whole = type(bound) is int and abs(bound) <= MAX_INTEGER
        if not whole or (bound < 0 and name.endswith("length")):
            return None
        rules[name] = bound
    if field.kind in PATTERNS:
        rules["pattern"] = rf"\A(?:{PATTERNS[field.kind]})\Z"
    return Annotated[kind, msgspec.Meta(**rules)] if rules else kind


class Validator:
    """Makes the documents of one resource.

    Args:
        resource: its name.
        schema: what its records look like.
    """

    def __init__(self, resource: str, schema: Schema) -> None:
        self._resource = resource
        self._strict = schema.strict
        # An id is there by the time that a record is checked.
        own = schema.fields.get("id", Field(kind="string"))
        self._fields = {**schema.fields, "id": msgspec.structs.replace(own, required=True)}
        self._look = FastValidator(self._fields)

    def fresh(self, given: Any, fresh_id: str, now: float) -> dict[str, Json]:
        """Make the document of a new record, which takes the id if it has none.

        Raises:
            InvalidRecord: lists every field that is wrong.
        """
        documents = self._hurry([given], [fresh_id])
        if documents is None:
            document, problems = self._consider(given, fresh_id)
            self._refuse(problems)
            documents = [document]
        return _date(documents, now)[0]

    def fresh_all(
        self, given: Sequence[Any], fresh_ids: Sequence[str], now: float
    ) -> list[dict[str, Json]]:
        """Make the documents of new records.

        Raises:
            InvalidRecord: lists every field that is wrong, of every record.
        """
        documents = self._hurry(given, fresh_ids)
        if documents is None:
            considered = list(map(self._consider, given, fresh_ids))
            self._refuse(
                problem._replace(field=f"[{i}].{problem.field}")
                for i, (_, problems) in enumerate(considered)
                for problem in problems
            )
            documents = [document for document, _ in considered]
        return _date(documents, now)

    def updated(self, current: Json, given: Any, now: float) -> dict[str, Json]:
        """Make the document that takes a record's place when changes are merged into it.

        Raises:
            InvalidRecord: lists every field that is wrong.
        """
        changes, problems = self._take(given)
        merged = merge(current, changes)
        return self._succeed(merged, current, problems, now)

    def replaced(self, current: Json, given: Any, now: float) -> dict[str, Json]:
        """Make the document that takes a record's place, but for what is the library's.

        Raises:
            InvalidRecord: lists every field that is wrong.
        """
        record, problems = self._take(given)
        # Newer code may keep more about a record than this code knows.
        kept = {name: value for name, value in current.items() if name.startswith("_")}
        return self._succeed({"id": current["id"], **record, **kept}, current, problems, now)

    def _hurry(
        self, given: Sequence[Any], fresh_ids: Sequence[str]
    ) -> list[dict[str, Json]] | None:
        """Make documents of records that are surely right; None where there is a doubt."""
        try:
            documents = [
                {"id": fresh_id, **record}
                for record, fresh_id in zip(given, fresh_ids, strict=True)
            ]
            names: set[str] = set().union(*documents)
            strange = any(name.startswith("_") for name in names)
        except (TypeError, AttributeError):
            return None
        if strange or self._strict or not self._look.passes(documents):
            return None
        return documents

    def _consider(self, given: Any, fresh_id: str) -> tuple[dict[str, Json], list[Problem]]:
        record, problems = self._take(given)
        if record.get("id") is None:
            record = {"id": fresh_id} | {n: value for n, value in record.items() if n != "id"}
        document, found = conform(self._fields, record)
        return document, [*problems, *found]

    def _succeed(
        self, document: dict[str, Json], current: Json, problems: list[Problem], now: float
    ) -> dict[str, Json]:
        if document["id"] != current["id"]:
            problem = f"differs from {current['id']!r}"
            problems.append(Problem("id", document["id"], problem, "an id stays"))
        document, found = conform(self._fields, document)
        self._refuse([*problems, *found])
        return {**document, UPDATED: now}

    def _take(self, given: Any) -> tuple[dict[str, Json], list[Problem]]:
        """Copy what is given, without what the library adds itself; list what is strange."""
        if not isinstance(given, Mapping):
            raise Invalid("record", given, "is not a dictionary", "write {'field': value}")
        record = {name: value for name, value in given.items() if name not in LIBRARYS}
        problems = list(_find_reserved(record))
        if self._strict:
            problems += find_strays(self._fields, record)
        return record, problems

    def _refuse(self, problems: Iterable[Problem]) -> None:
        if listed := list(problems):
            raise InvalidRecord(self._resource, listed)


def _date(documents: list[dict[str, Json]], now: float) -> list[dict[str, Json]]:
    for document in documents:
        document[CREATED] = document[UPDATED] = now
    return documents


def _find_reserved(record: dict[Any, Json]) -> Iterator[Problem]:
    for name, value in record.items():
        if not isinstance(name, str):
            yield Problem(repr(name), value, "is not called by text", "names are text")
        elif name.startswith("_"):
            yield Problem(name, value, "begins with _", "such names are the library's")


def merge(old: Json, changes: Mapping[str, Json]) -> dict[str, Json]:
    """Put changes into a document: objects into objects, everything else in place of."""
    merged = dict(old)
    for name, value in changes.items():
        there = merged.get(name)
        if isinstance(there, Mapping) and isinstance(value, Mapping):
            merged[name] = merge(there, value)
        else:
            merged[name] = value
    return merged
