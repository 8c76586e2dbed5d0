"""From what a user gives to the document that is stored, or every reason why it cannot be."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jobsync.core.codec import Json
from jobsync.core.schema import Schema, conform, find_strays
from jobsync.database.document import CREATED, LIBRARYS, UPDATED
from jobsync.errors import Invalid, InvalidRecord, Problem

__all__ = ["Drafting", "merge"]


class Drafting:
    """Makes the documents of one resource.

    Args:
        resource: its name.
        schema: what its records look like.
    """

    def __init__(self, resource: str, schema: Schema) -> None:
        self._resource = resource
        self._schema = schema

    def fresh(self, given: Any, id: str, now: float) -> dict[str, Json]:
        """Make the document of a new record, which takes the id if it has none.

        Raises:
            InvalidRecord: lists every field that is wrong.
        """
        document, problems = self._fresh(given, id, now)
        self._refuse(problems)
        return document

    def fresh_all(self, given: Sequence[Any], ids: Sequence[str], now: float) -> list[Json]:
        """Make the documents of new records.

        Raises:
            InvalidRecord: lists every field that is wrong, of every record.
        """
        documents = []
        problems: list[Problem] = []
        for i, (record, fresh_id) in enumerate(zip(given, ids, strict=True)):
            document, found = self._fresh(record, fresh_id, now)
            documents.append(document)
            problems += [one._replace(field=f"[{i}].{one.field}") for one in found]
        self._refuse(problems)
        return documents

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

    def _fresh(self, given: Any, id: str, now: float) -> tuple[dict[str, Json], list[Problem]]:
        record, problems = self._take(given)
        if record.get("id") is None:
            record = {"id": id, **{name: value for name, value in record.items() if name != "id"}}
        document, found = conform(self._schema.fields, record)
        if not isinstance(document["id"], str):
            found.append(Problem("id", document["id"], "is not text", "string"))
        document[CREATED] = document[UPDATED] = now
        return document, [*problems, *found]

    def _succeed(
        self, document: dict[str, Json], current: Json, problems: list[Problem], now: float
    ) -> dict[str, Json]:
        if document["id"] != current["id"]:
            problem = f"differs from {current['id']!r}"
            problems.append(Problem("id", document["id"], problem, "an id stays"))
        document, found = conform(self._schema.fields, document)
        self._refuse([*problems, *found])
        return {**document, UPDATED: now}

    def _take(self, given: Any) -> tuple[dict[str, Json], list[Problem]]:
        """Copy what is given, without what the library adds itself; list what is strange."""
        if not isinstance(given, Mapping):
            raise Invalid("record", given, "is not a dictionary", "write {'field': value}")
        record = {name: value for name, value in given.items() if name not in LIBRARYS}
        problems = list(_find_reserved(record))
        if self._schema.strict:
            own = {name: value for name, value in record.items() if name != "id"}
            problems += find_strays(self._schema.fields, own)
        return record, problems

    def _refuse(self, problems: list[Problem]) -> None:
        if problems:
            raise InvalidRecord(self._resource, problems)


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
