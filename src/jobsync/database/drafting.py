"""From what a user gives to the document that is stored, or every reason why it cannot be."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from jobsync.core.codec import Json
from jobsync.core.quicklook import FastValidator
from jobsync.core.schema import Field, Schema, conform, find_strays
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
