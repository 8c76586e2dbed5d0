"""How users' input becomes stored documents.

Input that breaks the schema is refused with every reason at once. A document has the types that are
read back from a store, so that indexes, which are computed from it, find it by what is stored.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import GenericAlias
from typing import Annotated, Any, Literal, NotRequired, Optional, TypeAlias, TypedDict

import msgspec

from jobsync.core.codec import MAX_INTEGER, Json, to_plain, to_plain_all
from jobsync.core.schema import (
    PATTERNS,
    Field,
    Fields,
    Schema,
    conform,
    find_strays,
)
from jobsync.database.document import CREATED, LIBRARY_FIELDS, UPDATED
from jobsync.errors import Invalid, InvalidRecord, Problem
from jobsync.safe_text import safe_repr

__all__ = ["FastValidator", "Validator", "merge"]


JsonObjects: TypeAlias = list[dict[str, Json]]

# Aliased: type checkers reject TypedDict() with computed keys.
_make_dict: Any = TypedDict


class FastValidator:
    """A quick check that accepts nearly all valid records at a fraction of the cost.

    Whatever it accepts, `conform` would accept too, unchanged. What it does not accept may still
    be valid: `conform` decides, and gives the reasons.

    Args:
        fields: what records look like.
    """

    def __init__(self, fields: Fields) -> None:
        self._defaults = {
            name: field.default
            for name, field in fields.items()
            if field.default is not msgspec.UNSET
        }
        expected = _describe_object(fields)
        if any(isinstance(default, dict | list) for default in self._defaults.values()):
            # Records must not share mutable defaults.
            expected = None
        # A class, because msgspec analyses a class once and a bare type at every call.
        self._expected: Any = expected and msgspec.defstruct(
            "_Expected", [("all", _list_of(expected))], array_like=True
        )

    def passes(self, documents: JsonObjects) -> bool:
        """Fill in defaults; return whether all documents are certainly valid."""
        if self._expected is None:
            return False
        for name, default in self._defaults.items():
            for document in documents:
                document.setdefault(name, default)
        try:
            msgspec.convert((documents,), self._expected)
        except (msgspec.ValidationError, TypeError, UnicodeEncodeError):
            return False
        return True


def _describe_object(fields: Fields) -> Any:
    """Return the type of documents with such fields, or None if msgspec cannot check them."""
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
        has_defaults = any(part.default is not msgspec.UNSET for part in field.fields.values())
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
            # Dates need a calendar; a required "json" field excludes null.
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
        # Lengths and integers need integer bounds; a length's bound must not be negative.
        is_integer = type(bound) is int and abs(bound) <= MAX_INTEGER
        if not is_integer or (bound < 0 and name.endswith("length")):
            return None
        rules[name] = bound
    if field.kind in PATTERNS:
        rules["pattern"] = rf"\A(?:{PATTERNS[field.kind]})\Z"
    return Annotated[kind, msgspec.Meta(**rules)] if rules else kind


class Validator:
    """Builds the documents of one resource from users' input.

    Args:
        resource: its name.
        schema: what its records look like.
    """

    def __init__(self, resource: str, schema: Schema) -> None:
        self._resource = resource
        self._strict = schema.strict
        # Every record has an id by the time it is checked.
        own = schema.fields.get("id", Field(kind="string"))
        self._fields = {**schema.fields, "id": msgspec.structs.replace(own, required=True)}
        self._fast = FastValidator(self._fields)

    def build_new(self, record: Any, new_id: str, now: float) -> dict[str, Json]:
        """Build the document of a new record, which takes the id if it has none.

        Raises:
            InvalidRecord: lists every invalid field.
            Invalid: no store can keep it.
        """
        documents = self._build_fast([record], [new_id])
        if documents is None:
            document, problems = self._build_checked(record, new_id)
            self._raise_problems(problems)
            documents = [document]
        return _stamp(to_plain_all(documents), now)[0]

    def build_many(
        self, records: Sequence[Any], new_ids: Sequence[str], now: float
    ) -> list[dict[str, Json]]:
        """Build the documents of new records.

        Raises:
            InvalidRecord: lists every invalid field of every record.
        """
        return _stamp(to_plain_all(self.check_many(records, new_ids)), now)

    def check_many(self, records: Sequence[Any], new_ids: Sequence[str]) -> list[dict[str, Json]]:
        """Build the documents of records that are not stored as such, without times.

        They may have values of types that only their text loses, such as tuples.

        Raises:
            InvalidRecord: lists every invalid field of every record.
        """
        documents = self._build_fast(records, new_ids)
        if documents is None:
            checked = list(map(self._build_checked, records, new_ids))
            self._raise_problems(
                problem._replace(field=f"[{i}].{problem.field}")
                for i, (_, problems) in enumerate(checked)
                for problem in problems
            )
            documents = [document for document, _ in checked]
        return documents

    def build_update(self, current: Json, changes: Any, now: float) -> dict[str, Json]:
        """Build the document that results when changes are merged into a record.

        Raises:
            InvalidRecord: lists every invalid field.
        """
        copy, problems = self._copy_input(changes)
        return self._build_successor(merge(current, copy), current, problems, now)

    def build_replacement(self, current: Json, record: Any, now: float) -> dict[str, Json]:
        """Build the document that replaces a record; the library's fields stay.

        Raises:
            InvalidRecord: lists every invalid field.
        """
        copy, problems = self._copy_input(record)
        # Newer code may store more library fields than this code knows.
        reserved = {name: value for name, value in current.items() if name.startswith("_")}
        document = {"id": current["id"], **copy, **reserved}
        return self._build_successor(document, current, problems, now)

    def _build_fast(self, records: Sequence[Any], new_ids: Sequence[str]) -> JsonObjects | None:
        """Build documents of records that are certainly valid; None if in doubt."""
        try:
            documents = [
                {"id": new_id, **record} for record, new_id in zip(records, new_ids, strict=True)
            ]
            names: set[str] = set().union(*documents)
            has_reserved = any(name.startswith("_") for name in names)
        except (TypeError, AttributeError):
            return None
        if has_reserved or self._strict or not self._fast.passes(documents):
            return None
        return documents

    def _build_checked(self, record: Any, new_id: str) -> tuple[dict[str, Json], list[Problem]]:
        copy, problems = self._copy_input(record)
        if copy.get("id") is None:
            copy = {"id": new_id} | {name: value for name, value in copy.items() if name != "id"}
        document, found = conform(self._fields, copy)
        return document, [*problems, *found]

    def _build_successor(
        self, document: dict[str, Json], current: Json, problems: list[Problem], now: float
    ) -> dict[str, Json]:
        if document["id"] != current["id"]:
            problem = f"differs from {current['id']!r}"
            problems.append(Problem("id", document["id"], problem, "ids cannot change"))
        document, found = conform(self._fields, document)
        self._raise_problems([*problems, *found])
        plain: dict[str, Json] = to_plain(document)
        return {**plain, UPDATED: now}

    def _copy_input(self, record: Any) -> tuple[dict[str, Json], list[Problem]]:
        """Copy a user's input without the library's fields; list fields that are not allowed."""
        if not isinstance(record, Mapping):
            raise Invalid("record", record, "must be a dictionary", "write {'field': value}")
        copy = {name: value for name, value in record.items() if name not in LIBRARY_FIELDS}
        problems = list(_find_reserved(copy))
        if self._strict:
            problems += find_strays(self._fields, copy)
        return copy, problems

    def _raise_problems(self, problems: Iterable[Problem]) -> None:
        if listed := list(problems):
            raise InvalidRecord(self._resource, listed)


def _stamp(documents: JsonObjects, now: float) -> JsonObjects:
    for document in documents:
        document[CREATED] = document[UPDATED] = now
    return documents


def _find_reserved(record: dict[Any, Json]) -> Iterator[Problem]:
    for name, value in record.items():
        if not isinstance(name, str):
            yield Problem(safe_repr(name), value, "must have a text name", "text names")
        elif name.startswith("_"):
            yield Problem(name, value, "is a reserved name", "no leading _")


def merge(old: Json, changes: Mapping[str, Json]) -> dict[str, Json]:
    """Return a document with changes merged in: objects recursively, all else replaced."""
    merged = dict(old)
    for name, value in changes.items():
        existing = merged.get(name)
        if isinstance(existing, Mapping) and isinstance(value, Mapping):
            merged[name] = merge(existing, value)
        else:
            merged[name] = value
    return merged
