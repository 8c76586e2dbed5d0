"""What must hold for records, their indexes and their expiry in every history.

The checks go by commits, in the order in which the store made them, and by what stories have noted.
They restate the rules apart from the code that follows them, which is what makes them a check. Each
function returns the violations that it finds.

A story notes what the commits do not tell:

    deleting      a user deletes a record: `resource`, `id`
    verb          a verb has ended: `marks`, one for each record that it should write, and
                  `outcomes`: written, unwritten or unknown, for each
    lookup        a partition was read: `resource`, `fields` with their values, `since`, the length
                  of the history when it began, and `found`, pairs of ids and nonces
    expiring      a callback is asked about a record: `resource`, `id`, `mark`, and its `verdict`,
                  whether to delete it

Each write of a user sets a `mark` that is used once, so a commit that keeps the mark is one of a
sweep. Of the fields that decide about expiry, all values are numbers.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from jobsync.core.expiry import ExpiryRule
from jobsync.core.keys import unescape
from jobsync.database.archive import ARCHIVING
from jobsync.database.definition import IndexState
from jobsync.database.document import UPDATED
from jobsync.database.index_entries import ENTRIES, INDEXES
from jobsync.database.registry import DEFINITIONS
from jobsync.database.resource_records import DATA
from jobsync.stores.contract import BURIAL_AGE
from jobsync.testing.invariants import Violation
from jobsync.testing.nodes import WORLD_START
from jobsync.testing.world import Occurrence

__all__ = ["check_records", "find_leftovers", "find_overdue"]

_BEFORE_ID = "!01"
_BEFORE_NONCE = "!00"
_MARKS = {"archive": ARCHIVING}
"""The field that a strategy sets, if it is always the same."""


def check_records(history: Sequence[Occurrence], *, early: float = 0.05) -> list[Violation]:
    """Check every commit of a record, an entry or a definition, and every verb and lookup.

    Args:
        history: of the world.
        early: seconds by which the clock of a process may be ahead that removes what has expired.
    """
    checker = _RecordChecker(early)
    return [
        violation for at, done in enumerate(history) for violation in checker.check(at, done)
    ] + list(checker.check_verbs())


def find_leftovers(history: Sequence[Occurrence], *, slack: float) -> list[Violation]:
    """Check the end of a calm phase: all is ready, nothing has expired, no entry is dangling.

    Args:
        history: of the world.
        slack: seconds that something may take to be removed.
    """
    return list(_replay(history).find_leftovers(history[-1].at, slack))


def find_overdue(history: Sequence[Occurrence], *, slack: float) -> list[Violation]:
    """Check that nothing has expired more than some seconds before the end of the history."""
    return list(_replay(history).find_overdue(history[-1].at, slack))


def _replay(history: Sequence[Occurrence]) -> "_RecordChecker":
    checker = _RecordChecker(early=0.0)
    for at, done in enumerate(history):
        for _ in checker.check(at, done):
            # Reported by `check_records`.
            continue
    return checker


class _RecordVersion(msgspec.Struct, frozen=True, gc=False):
    """What a record was from some position of the history on."""

    since: int
    nonce: str
    value: Mapping[str, Any] | None
    """None if it was deleted."""


class _ResourceState:
    """What the store has of a resource."""

    def __init__(self) -> None:
        self.indexes: tuple[IndexState, ...] = ()
        self.versions: dict[str, list[_RecordVersion]] = defaultdict(list)
        """By id, in order."""
        self.entries: dict[str, dict[str, dict[tuple[str, str], float]]] = {}
        """When the entries were written, by index and id, then by rank and nonce."""

    @property
    def rule(self) -> ExpiryRule | None:
        """When its records expire."""
        rules = [index.rule for index in self.indexes]
        return next((rule for rule in rules if isinstance(rule, ExpiryRule)), None)

    def list_current(self) -> Iterator[tuple[str, _RecordVersion]]:
        """Yield the records that exist, with their ids."""
        for name, versions in self.versions.items():
            if versions[-1].value is not None:
                yield name, versions[-1]

    def find_current(self, name: str) -> _RecordVersion | None:
        """Return a record if it exists."""
        versions = self.versions.get(name)
        return versions[-1] if versions and versions[-1].value is not None else None

    def has_entry(self, index: str, name: str, rank: str, nonce: str) -> bool:
        """Whether there is an entry."""
        return (rank, nonce) in self.entries.get(index, {}).get(name, ())


class _RecordChecker:
    def __init__(self, early: float) -> None:
        self._early = early
        self._resources: dict[str, _ResourceState] = defaultdict(_ResourceState)
        self._deleting: set[tuple[str, str, str]] = set()
        """Nodes, resources and ids of what users delete."""
        self._verdicts: dict[tuple[str, str, Any], bool] = {}
        """What a callback has said, by resource, id and mark."""
        self._written: dict[str, str] = {}
        """The nonce of the commit of each mark."""
        self._confirmed: set[str] = set()
        """The nonces of the writes that the store has confirmed to their writers."""
        self._verbs: list[Occurrence] = []
        self._copies: dict[tuple[str, str, str], tuple[str, str]] = {}
        """The archive and the id of each copy, by the resource, id and mark of the record."""

    def check(self, at: int, done: Occurrence) -> Iterator[Violation]:
        """Check one occurrence, at a position of the history."""
        match done.what:
            case "commit":
                key = done.details["key"]
                yield from _describe(done, key, self._check_commit(at, done))
            case "drop":
                for key in done.details["keys"]:
                    yield from _describe(done, key, self._check_drop(key))
            case "expiring":
                yield from _describe(done, done.details["id"], self._check_asked(done))
            case "lookup":
                yield from _describe(done, done.details["resource"], self._check_lookup(at, done))
            case "deleting":
                self._deleting.add((done.node, done.details["resource"], done.details["id"]))
            case "reply" if done.details["outcome"] == "Applied":
                self._confirmed.add(done.details["nonce"])
            case "verb":
                self._verbs.append(done)

    def check_verbs(self) -> Iterator[Violation]:
        """X6: what a verb says is true, also later."""
        for verb in self._verbs:
            for mark, outcome in zip(verb.details["marks"], verb.details["outcomes"], strict=True):
                nonce = self._written.get(mark)
                is_known = outcome != "unknown" or nonce in self._confirmed
                if is_known and (outcome == "written") != (nonce is not None):
                    yield Violation("X6", f"{mark} is said to be {outcome}, and is not: {verb}")

    def find_leftovers(self, now: float, slack: float) -> Iterator[Violation]:
        """Find what should be gone or ready by now."""
        yield from self.find_overdue(now, slack)
        for title, resource in self._resources.items():
            for index in resource.indexes:
                if not index.is_ready:
                    yield Violation("XL3", f"{title}: {index.key} is not ready")
                yield from self._find_dangling(title, resource, index, now - slack)
            known = {index.key for index in resource.indexes}
            for key, entries in resource.entries.items():
                if key not in known and any(entries.values()):
                    yield Violation("XL2", f"{title}: the former index {key} has {entries}")

    def find_overdue(self, now: float, slack: float) -> Iterator[Violation]:
        """XL1: find records that have expired, and X2: that are archived, and are still there."""
        for title, resource in self._resources.items():
            for name, version in resource.list_current():
                mark = (version.value or {}).get("mark")
                expiry = (
                    None if resource.rule is None else _expires_at(resource.rule, version.value)
                )
                is_kept = self._verdicts.get((title, name, mark)) is False
                if expiry is not None and expiry < WORLD_START + now - slack and not is_kept:
                    age = WORLD_START + now - expiry
                    yield Violation("XL1", f"{title}/{name} expired {age:.0f} s ago")
                    if (title, name, mark) in self._copies:
                        yield Violation("X2", f"{title}/{name} is archived, and still there")

    def _find_dangling(
        self, title: str, resource: _ResourceState, index: IndexState, due: float
    ) -> Iterator[Violation]:
        """XL2: entries that no record names, where a sweep or a lookup has passed."""
        for name, entries in resource.entries.get(index.key, {}).items():
            version = resource.find_current(name)
            named = None if version is None else _name_entry(index, version)
            for entry, at in entries.items():
                # By its writer's clock, which may be wrong.
                is_old = at + BURIAL_AGE < WORLD_START + due
                is_passed = not isinstance(index.rule, ExpiryRule) or int(entry[0]) < (
                    (WORLD_START + due) * 1000
                )
                if entry != named and is_old and is_passed:
                    yield Violation("XL2", f"{title}: {index.key} has {entry} of {name}")

    def _check_commit(self, at: int, done: Occurrence) -> Iterator[tuple[str, str]]:
        details = done.details
        key, value = details["key"], details["value"]
        if key.startswith(INDEXES):
            title, index, name, entry = _parse_entry(key)
            entries = self._resources[title].entries.setdefault(index, {})
            entries.setdefault(name, {})[entry] = value["at"]
        elif key.startswith(DEFINITIONS):
            indexes = msgspec.convert((value or {}).get("indexes", ()), tuple[IndexState, ...])
            resource = self._resources[unescape(key.removeprefix(DEFINITIONS))]
            resource.indexes = indexes
            for name, version in resource.list_current():
                yield from _check_entries(resource, name, version)
        elif key.startswith(DATA):
            title, _, segment = key.removeprefix(DATA).partition("/")
            resource, name = self._resources[title], unescape(segment)
            before = resource.find_current(name)
            after = _RecordVersion(at, details["nonce"], None if details["deleted"] else value)
            resource.versions[name].append(after)
            if after.value is not None:
                yield from self._check_written(title, name, before, after)
                yield from _check_entries(resource, name, after)
            if before is not None:
                yield from self._check_change(title, name, before, after, done)

    def _check_drop(self, key: str) -> Iterator[tuple[str, str]]:
        if key.startswith(DATA):
            yield "X1", "a record was removed without a trace"
        if not key.startswith(INDEXES):
            return
        title, index, name, entry = _parse_entry(key)
        resource = self._resources[title]
        resource.entries.get(index, {}).get(name, {}).pop(entry, None)
        version = resource.find_current(name)
        if version is not None:
            yield from _check_entries(resource, name, version)

    def _check_written(
        self, title: str, name: str, before: _RecordVersion | None, after: _RecordVersion
    ) -> Iterator[tuple[str, str]]:
        """X3: nothing is written again that was replaced. Copies are checked apart."""
        value = after.value or {}
        if "archived_from" in value:
            if before is None:
                yield from self._check_copy(title, name, value)
            return
        mark = str(value.get("mark"))
        is_same = before is not None and before.value is not None and before.value["mark"] == mark
        if mark in self._written and not is_same:
            yield "X3", f"an earlier version was written again: {value}"
        self._written.setdefault(mark, after.nonce)

    def _check_change(
        self, title: str, name: str, before: _RecordVersion, after: _RecordVersion, done: Occurrence
    ) -> Iterator[tuple[str, str]]:
        """X1, X2, X3: what a sweep changes has expired, and it changes nothing else."""
        rule = self._resources[title].rule
        old, new = before.value or {}, after.value
        is_deleted = new is None and (done.node, title, name) in self._deleting
        if ARCHIVING in old:
            if new is None and not self._is_copied(old):
                yield "X2", f"removed, and not archived: {old}"
            elif new is not None and _strip(new, ARCHIVING) != _strip(old, ARCHIVING):
                yield "X3", f"changed while it is being archived: {old}, {new}"
        elif new is None and not is_deleted:
            yield from self._check_due(rule, old, done, "removed")
            yield from self._check_removal(rule, title, name, old)
        elif new is not None and new.get("mark") == old.get("mark"):
            yield from self._check_due(rule, old, done, "changed")
            expected = None if rule is None else _MARKS.get(rule.on_expire, rule.delete_field)
            if expected is None or expected not in new:
                yield "X3", f"changed, but not as {rule} says: {old}, {new}"
            elif _strip(new, expected) != _strip(old, expected):
                yield "X3", f"another field was changed: {old}, {new}"

    def _check_removal(
        self, rule: ExpiryRule | None, title: str, name: str, old: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """X2, X3: a removal is what the rule says."""
        match None if rule is None else rule.on_expire:
            case "archive":
                yield "X2", f"removed, and not archived: {old}"
            case "soft-delete":
                yield "X3", f"removed, and not marked: {old}"
            case "callback" if not self._verdicts.get((title, name, old.get("mark"))):
                yield "X3", f"removed, and the callback did not say so: {old}"

    def _check_due(
        self, rule: ExpiryRule | None, old: Mapping[str, Any], done: Occurrence, deed: str
    ) -> Iterator[tuple[str, str]]:
        """X1: what happens to a record by itself happens after its expiry."""
        now = WORLD_START + done.at + self._early
        expiry = None if rule is None else _expires_at(rule, old)
        if expiry is None:
            yield "X1", f"{deed}, and does not expire: {old}"
        elif expiry > now:
            yield "X1", f"{deed} {expiry - now + self._early:.3f} s before its expiry: {old}"

    def _check_copy(
        self, title: str, name: str, copy: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """X2, X3: a copy is of a record that is being moved, equal to it, and the only one."""
        key = (copy["archived_from"], copy["original_id"], copy["mark"])
        if self._copies.setdefault(key, (title, name)) != (title, name):
            yield "X2", f"{key} has another copy, {self._copies[key]}"
        version = self._resources[copy["archived_from"]].find_current(copy["original_id"])
        source = {} if version is None or version.value is None else version.value
        if source.get(ARCHIVING, {}).get("id") != name:
            yield "X2", f"a copy of a record that is not being moved: {source}"
        elif any(copy.get(each) != source[each] for each in source if _is_content(each)):
            yield "X3", f"the copy differs: {copy}, {source}"

    def _is_copied(self, old: Mapping[str, Any]) -> bool:
        """Whether the copy of a record that is being moved has been made."""
        move = old[ARCHIVING]
        return move["id"] in self._resources[move["resource"]].versions

    def _check_asked(self, done: Occurrence) -> Iterator[tuple[str, str]]:
        """X1: a callback is asked about records that have expired."""
        details = done.details
        title, name, mark = details["resource"], details["id"], details["mark"]
        self._verdicts[title, name, mark] = details["verdict"]
        resource = self._resources[title]
        values = [version.value or {} for version in resource.versions[name]]
        asked = [value for value in values if value.get("mark") == mark]
        yield from self._check_due(resource.rule, asked[-1], done, "a callback was asked")

    def _check_lookup(self, at: int, done: Occurrence) -> Iterator[tuple[str, str]]:
        """X5: what was there all the time is found, and what is found was there at some time."""
        details = done.details
        fields, since = details["fields"], details["since"]
        found = dict(details["found"])
        if len(found) < len(details["found"]):
            yield "X5", f"a record was found twice: {details}"
        for name, versions in self._resources[details["resource"]].versions.items():
            visible = _list_visible(versions, since, at)
            belonging = {each.nonce for each in visible if _belongs(each, fields)}
            if name in found and found[name] not in belonging:
                yield "X5", f"{name} is not among {fields}, and was found: {details}"
            is_old = bool(visible) and visible[0].since < since
            if name not in found and is_old and all(_belongs(each, fields) for each in visible):
                yield "X5", f"{name} is among {fields}, and was not found: {details}"


def _describe(
    done: Occurrence, where: str, found: Iterator[tuple[str, str]]
) -> Iterator[Violation]:
    for invariant, problem in found:
        yield Violation(invariant, f"{where}: {problem} ({done.node}, {done.at:.3f} s)")


def _check_entries(
    resource: _ResourceState, name: str, version: _RecordVersion
) -> Iterator[tuple[str, str]]:
    """X4: a record has its entry in each index that is ready."""
    for index in resource.indexes:
        named = _name_entry(index, version)
        if index.is_ready and named is not None and not resource.has_entry(index.key, name, *named):
            yield "X4", f"{name} has no entry {named} in {index.key}"


def _name_entry(index: IndexState, version: _RecordVersion) -> tuple[str, str] | None:
    """Return the rank and nonce of the entry that a record names; None if it is left out."""
    value = dict(version.value or {})
    rank = index.rank(value)
    return None if rank is None else (rank, value.get(ENTRIES, {}).get(index.key, version.nonce))


def _parse_entry(key: str) -> tuple[str, str, str, tuple[str, str]]:
    """Return the resource, the index, the id, and the rank and nonce of an entry."""
    title, index, name = key.removeprefix(INDEXES).split("/")
    rank, _, rest = name.partition(_BEFORE_ID)
    segment, _, nonce = rest.rpartition(_BEFORE_NONCE)
    return title, index, unescape(segment), (rank, nonce)


def _list_visible(
    versions: Sequence[_RecordVersion], since: int, at: int
) -> Sequence[_RecordVersion]:
    """Return the versions that a record had between two positions of the history."""
    position = attrgetter("since")
    first = max(0, bisect_left(versions, since, key=position) - 1)
    return versions[first : bisect_left(versions, at, key=position)]


def _belongs(version: _RecordVersion, fields: Mapping[str, Any]) -> bool:
    value = version.value
    return value is not None and all(value.get(name) == fields[name] for name in fields)


def _expires_at(rule: ExpiryRule, value: Mapping[str, Any] | None) -> float | None:
    """Return when a record of a story expires; its times are numbers.

    One that is being moved has expired by then, whatever the rule says.
    """
    times: list[float] = []
    if value is not None and ARCHIVING in value:
        times.append(value[ARCHIVING]["at"])
    is_deleted = value is None or (rule.delete_field is not None and rule.delete_field in value)
    if value is not None and not is_deleted and rule.field in value:
        times.append(value[rule.field] + (rule.ttl or 0.0))
    return min(times, default=None)


def _strip(value: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Return what a sweep leaves alone."""
    changed = (mark, ENTRIES, UPDATED)
    return {name: each for name, each in value.items() if name not in changed}


def _is_content(name: str) -> bool:
    return name != "id" and not name.startswith("_")
