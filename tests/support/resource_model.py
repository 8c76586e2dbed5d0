"""Reference model of a resource in plain Python, which all stores must agree with."""

from collections.abc import Callable
from typing import Any

__all__ = ["ATTRIBUTES", "FILTERS", "Refused", "ResourceModel"]

ATTRIBUTES = {
    "n": "number|required",
    "tag": "string",
    "ok": "boolean|default:true",
    "more": {"x": "number", "y": "number"},
}

FILTERS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = {
    "big": ({"n": {"$gt": 1}}, lambda record: record["n"] > 1),
    "tagged": ({"tag": {"$exists": True}}, lambda record: "tag" in record),
    "ok and small": (
        {"ok": True, "n": {"$lte": 2}},
        lambda record: record["ok"] is True and record["n"] <= 2,
    ),
    "deep": ({"more.x": {"$ne": 1}}, lambda record: record.get("more", {}).get("x") != 1),
    "or": (
        {"$or": [{"tag": "é"}, {"n": 0}]},
        lambda record: record.get("tag") == "é" or record["n"] == 0,
    ),
}
"""Filters, each with its meaning."""


class Refused(Exception):
    """A call was refused; the text is the name of the error."""


class ResourceModel:
    """The model of one resource."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}

    @property
    def ids(self) -> list[str]:
        """Ids in the order of their bytes."""
        return sorted(self.records, key=str.encode)

    def insert(self, record: dict[str, Any]) -> dict[str, Any]:
        checked = _check(record)
        if record["id"] in self.records:
            raise Refused("Conflict")
        self.records[record["id"]] = checked
        return checked

    def insert_many(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        checked = [_check(record) for record in records]
        if len({record["id"] for record in records}) < len(records):
            raise Refused("Invalid")
        taken = [record for record in checked if record["id"] in self.records]
        self.records |= {r["id"]: r for r in checked if r["id"] not in self.records}
        if taken:
            raise Refused("Incomplete")
        return checked

    def update(self, name: str, changes: dict[str, Any], *, stale: bool) -> dict[str, Any]:
        before = self._find(name, stale=stale)
        self.records[name] = _check(_merge(before, changes))
        return self.records[name]

    def replace(self, name: str, record: dict[str, Any], *, stale: bool) -> dict[str, Any]:
        self._find(name, stale=stale)
        self.records[name] = _check({**record, "id": name})
        return self.records[name]

    def upsert(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] in self.records:
            return self.update(record["id"], record, stale=False)
        return self.insert(record)

    def delete(self, name: str, *, stale: bool) -> bool:
        if name in self.records and stale:
            raise Refused("Conflict")
        return self.records.pop(name, None) is not None

    def delete_many(self, names: list[str]) -> int:
        return sum(self.records.pop(name, None) is not None for name in names)

    def get(self, name: str) -> dict[str, Any] | None:
        return self.records.get(name)

    def query(self, kind: str | None, sort: str | None, cut: slice) -> list[dict[str, Any]]:
        keep = FILTERS[kind][1] if kind else lambda _: True
        found = [self.records[name] for name in self.ids if keep(self.records[name])]
        if sort is not None:
            field = sort.removeprefix("-")
            found.sort(key=lambda record: _rank(record.get(field)), reverse=sort[0] == "-")
        return found[cut]

    def _find(self, name: str, *, stale: bool) -> dict[str, Any]:
        if name not in self.records:
            raise Refused("NotFound")
        if stale:
            raise Refused("Conflict")
        return self.records[name]


def _check(record: dict[str, Any]) -> dict[str, Any]:
    """Apply ATTRIBUTES, as far as the tests' records need it."""
    if isinstance(record.get("n"), bool) or not isinstance(record.get("n"), int | float):
        raise Refused("InvalidRecord")
    return {**record, "ok": record.get("ok", True)}


def _merge(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: _merge(old.get(name), value) for name, value in new.items()}
    return new


def _rank(value: Any) -> tuple[int, Any]:
    # For each field that tests sort by: missing, null, then values of one type.
    return (0, 0) if value is None else (1, value)
