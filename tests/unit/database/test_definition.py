"""What becomes of the indexes of a definition when its rules change, leave and come back."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from jobsync import Invalid, Record
from jobsync.core.attributes import parse
from jobsync.core.expiry import ExpiryRule
from jobsync.core.partitions import MAX_PARTITIONS, Partition, PartitionField
from jobsync.core.schema import Schema
from jobsync.database.definition import KNOWN_FORMAT, Definition, IndexState, Rule


def partition(name: str, field: str) -> Partition:
    """Return a partition by one field."""
    return Partition(name, (PartitionField(field),))


RULES: dict[str, Rule] = {
    "a": partition("by", "a"),
    "b": partition("by", "b"),
    "c": partition("by", "c"),
    "other": partition("other", "a"),
    # A partition may have the name that the index of the expiry has.
    "namesake": partition("expiry", "a"),
    **{f"namesake by {field}": partition("expiry", field) for field in "bcd"},
    "short": ExpiryRule(ttl=60.0),
    "long": ExpiryRule(ttl=3600.0),
    "longer": ExpiryRule(ttl=7200.0),
    "endless": ExpiryRule(ttl=1e9),
    "archived": ExpiryRule(ttl=3600.0, on_expire="archive", archive_resource="old"),
}


class Story:
    """A definition that processes change one after the other."""

    def __init__(self) -> None:
        self._tokens = map(str, itertools.count())
        self.definition = Definition("r")

    def set(self, *names: str) -> None:
        """Store rules."""
        rules = [RULES[name] for name in names]
        self.definition = self.definition.add_indexes(
            rules, lambda: next(self._tokens), is_new=False
        )

    def drop(self, name: str) -> None:
        """Drop the index of a rule."""
        index = self.definition.find_index(RULES[name].kind, RULES[name].name)
        assert index is not None
        self.definition = self.definition.remove_index(index.key)

    def find_expiry(self) -> ExpiryRule | None:
        """Return the rule of the expiry."""
        return self.definition.expiry

    def settle(self) -> None:
        """Complete all indexes, and forget the former ones."""
        for index in self.definition.list_unready():
            self.definition = self.definition.mark_ready(index.key)
        for index in self.definition.retired:
            self.definition = self.definition.abandon_index(index)
        for key in self.definition.abandoned:
            self.definition = self.definition.forget_index(key)
        assert self.definition.is_settled


@pytest.mark.parametrize(
    ("stored", "wanted", "other", "is_used"),
    [
        # It counts, and nobody wants another one.
        (["a"], "a", None, None),
        (["other", "a"], "a", None, None),
        # It was changed once: that is a deployment.
        (["a", "b"], "b", None, None),
        (["a", "b", "c"], "c", None, None),
        (["other", "a", "b"], "other", None, None),
        # It came back: two processes want different ones.
        (["a", "b", "a"], "a", "b", True),
        (["a", "b", "a", "b"], "b", "a", True),
        # Another one counts.
        (["a", "b"], "a", "b", False),
        (["a", "b", "a"], "b", "a", False),
        # It came back long ago.
        (["a", "b", "a", "settle"], "a", None, None),
        (["a", "b", "a", "settle"], "b", "a", False),
        (["a", "b", "a", "settle", "other"], "a", None, None),
        # Those of another name or kind do not count.
        (["namesake", "short", "long", "short"], "namesake", None, None),
        (["namesake", "short", "long", "short"], "short", "long", True),
        (["other", "a", "b", "a"], "other", None, None),
        # Nobody has stored it.
        (["a"], "other", None, None),
    ],
)
def test_processes_disagree_if_a_rule_came_back_or_another_one_counts(
    stored: Sequence[str], wanted: str, other: str | None, is_used: bool | None
) -> None:
    """Until what they have changed is over: then a rule that is there is no news."""
    story = Story()
    for name in stored:
        if name == "settle":
            story.settle()
        else:
            story.set(name)
    found = story.definition.find_dispute(RULES[wanted])
    if other is None:
        assert found is None
        return
    assert found is not None
    assert (found.rule, found.other) == (str(RULES[wanted]), str(RULES[other]))
    assert (found.resource, found.index, found.is_used) == ("r", RULES[wanted].name, is_used)


def test_an_index_is_that_of_its_kind_and_name() -> None:
    """A partition that is called like the index of the expiry has its own life."""
    story = Story()
    story.set("namesake", "a")
    namesake, by = (
        story.definition.find_index("partition", "expiry"),
        story.definition.find_index("partition", "by"),
    )
    assert story.definition.find_index("expiry", "expiry") is None
    assert story.find_expiry() is None
    for name in ("short", "long", "longer", "short"):
        # As many former ones as there may be; none of them is in the way of the others.
        story.set(name)
        assert story.find_expiry() == RULES[name]
        assert story.definition.find_index("partition", "expiry") == namesake
        assert story.definition.find_index("partition", "by") == by
    assert len(story.definition.retired) == 2
    story.drop("namesake")
    assert story.definition.find_index("partition", "expiry") is None
    assert story.find_expiry() == RULES["short"]
    story.set("namesake")
    again = story.definition.find_index("partition", "expiry")
    assert again is not None
    assert namesake is not None
    # It came back with the same index, which writers have kept.
    assert (again.key, again.retirements) == (namesake.key, 1)


@pytest.mark.parametrize(
    ("changed", "other"),
    [
        (["namesake by b", "namesake by c", "namesake by d", "namesake"], ["short", "long"]),
        (["short", "long", "longer", "endless"], ["namesake", "namesake by b"]),
    ],
)
def test_a_rule_that_changes_too_often_keeps_none_of_another_kind_from_changing(
    changed: Sequence[str], other: Sequence[str]
) -> None:
    """Only the former indexes of its own kind and name are in its way."""
    story = Story()
    story.set(*changed)
    story.set("a", "b", *other)
    last = RULES[other[-1]]
    index = story.definition.find_index(last.kind, last.name)
    assert index is not None
    assert index.rule == last
    # It is none that a former rule of the other kind has had.
    assert len(story.definition.retired) == 3 + 1 + 1
    assert story.definition.find_dispute(last) is None
    story.set("b", "c")
    by = story.definition.find_index("partition", "by")
    assert by is not None
    assert by.rule == RULES["c"]
    latest = RULES[changed[-1]]
    found = story.definition.find_index(latest.kind, latest.name)
    assert found is not None
    assert found.rule == latest


def test_what_happens_to_expired_records_may_change_without_another_index() -> None:
    """The order of expiry stays: so does the index, with the new rule, ready as it was."""
    story = Story()
    story.set("long")
    story.settle()
    before = story.definition.find_index("expiry", "expiry")
    story.set("archived")
    after = story.definition.find_index("expiry", "expiry")
    assert before is not None
    assert after is not None
    assert (after.key, after.is_ready, after.rule) == (before.key, True, RULES["archived"])
    assert story.definition.is_settled


@pytest.mark.parametrize(
    ("between", "is_abandoned"),
    [
        ([], True),
        (["other"], True),
        # It is in use again.
        (["a"], False),
        # It came back, and was retired again: somebody may read it since.
        (["a", "b"], False),
    ],
)
def test_a_former_index_is_abandoned_only_as_it_was_seen(
    between: Sequence[str], is_abandoned: bool
) -> None:
    """Whoever waits for its last reader has to wait anew if it came back meanwhile."""
    story = Story()
    story.set("a")
    story.set("b")
    (seen,) = story.definition.retired
    for name in between:
        story.set(name)
    after = story.definition.abandon_index(seen)
    assert (seen.key in after.abandoned) is is_abandoned
    assert (seen.key in [index.key for index in after.kept_indexes]) is not is_abandoned
    assert after.find_index("partition", "by") == story.definition.find_index("partition", "by")


@pytest.mark.parametrize(
    ("changed", "stays"),
    [
        (["namesake by b", "namesake by c", "namesake by d", "namesake"], partition("expiry", "e")),
        (["short", "long", "longer", "endless"], ExpiryRule(ttl=5.0)),
    ],
)
@pytest.mark.parametrize("position", range(3))
def test_a_rule_that_must_wait_keeps_none_beside_it_from_being_stored(
    changed: Sequence[str], stays: Rule, position: int
) -> None:
    """Rules that are stored together are judged one by one, whichever comes first."""
    story = Story()
    story.set(*changed)
    before = story.definition.find_index(stays.kind, stays.name)
    assert before is not None
    others = [RULES["a"], RULES["other"]]
    together = [*others[:position], stays, *others[position:]]
    after = story.definition.add_indexes(together, lambda: "y", is_new=False)
    assert after.find_index(stays.kind, stays.name) == before
    for rule in others:
        index = after.find_index(rule.kind, rule.name)
        assert index is not None
        assert index.rule == rule


def test_each_former_index_is_abandoned_and_forgotten_by_itself() -> None:
    """Those that were abandoned before are still to be emptied."""
    story = Story()
    story.set("a", "other", "short")
    story.set("b", "long")
    story.drop("other")
    former = [index.key for index in story.definition.retired]
    assert len(former) == 3
    for count, index in enumerate(story.definition.retired, 1):
        story.definition = story.definition.abandon_index(index)
        assert story.definition.abandoned == tuple(sorted(former[:count]))
        assert [each.key for each in story.definition.retired] == former[count:]
        # Every writer's share, and what is left to be done, are the same index keys.
        assert set(former) <= set(story.definition.index_keys)
        assert set(former) <= set(story.definition.unsettled_keys)
    for count, key in enumerate(former, 1):
        story.definition = story.definition.forget_index(key)
        assert story.definition.abandoned == tuple(sorted(former[count:]))


def store(definition: Definition, before: Record | None = None) -> Record:
    """Return the record of a definition."""
    value = msgspec.json.decode(msgspec.json.encode(definition.write(before)))
    return Record("resource/r", value, "v", 1, 0, definition.format, "")


PLAIN = Definition("r", Schema(fields=parse({"n": "number"}), strict=True))


@pytest.mark.parametrize("is_declared", [False, True])
@pytest.mark.parametrize(
    "story",
    [
        [],
        ["a"],
        ["a", "settle", "short"],
        # Retired once, retired twice, and abandoned.
        ["a", "b"],
        ["a", "b", "a", "b", "archived"],
        ["a", "b", "abandon", "c"],
    ],
)
def test_a_definition_is_read_as_it_was_written(story: Sequence[str], *, is_declared: bool) -> None:
    """With every part of it, by this code; newer code's fields stay."""
    written = Story()
    written.definition = msgspec.structs.replace(PLAIN, is_declared=is_declared)
    for name in story:
        if name == "settle":
            written.settle()
        elif name == "abandon":
            for index in written.definition.retired:
                written.definition = written.definition.abandon_index(index)
        else:
            written.set(name)
    definition = written.definition
    assert definition.format == (KNOWN_FORMAT if story else 1)
    record = store(definition)
    assert Definition.read(record) == definition
    newer = msgspec.structs.replace(record, value={**record.value, "color": "red"})
    assert definition.write(newer) == {**definition.write(None), "color": "red"}
    # Of newer code it tells what records look like, and no more.
    unknown = msgspec.structs.replace(record, format=KNOWN_FORMAT + 1)
    assert Definition.read(unknown) == msgspec.structs.replace(
        Definition("r", definition.schema, is_declared=is_declared), format=KNOWN_FORMAT + 1
    )


@pytest.mark.parametrize(
    ("fields", "strict", "expected_fields", "expected_strict"),
    [
        (None, None, {"n": "number"}, True),
        (None, False, {"n": "number"}, False),
        (None, True, {"n": "number"}, True),
        ({"n": "number", "m": "string"}, None, {"n": "number", "m": "string"}, True),
        ({"n": "number", "m": "string"}, False, {"n": "number", "m": "string"}, False),
    ],
)
def test_what_is_not_said_stays_as_it_is(
    fields: Any, strict: bool | None, expected_fields: Any, expected_strict: bool
) -> None:
    """Of a definition that is defined again."""
    parsed = None if fields is None else parse(fields)
    evolved = PLAIN.evolve(parsed, strict=strict, has_records=True)
    expected = Schema(fields=parse(expected_fields), strict=expected_strict)
    assert evolved == Definition("r", expected)


@pytest.mark.parametrize("is_declared", [False, True])
@pytest.mark.parametrize("has_records", [False, True])
def test_records_that_are_there_must_still_pass(*, is_declared: bool, has_records: bool) -> None:
    """Only what nobody has described, and what has no records, may be described in any way."""
    before = Definition("r", is_declared=is_declared)
    fields = parse({"n": "number|required"})
    if is_declared or has_records:
        with pytest.raises(Invalid, match="would refuse existing records"):
            before.evolve(fields, strict=None, has_records=has_records)
    else:
        after = before.evolve(fields, strict=None, has_records=has_records)
        assert after == Definition("r", Schema(fields=fields))


@pytest.mark.parametrize("more", [0, 5])
def test_a_resource_with_too_many_partitions_can_be_defined_again(more: int) -> None:
    """Code with another limit may have made them; only more of them are refused."""
    count = MAX_PARTITIONS + more
    rules = [partition(f"p{n}", "a") for n in range(count)]
    indexes = tuple(IndexState(rule.name, rule, is_ready=True) for rule in rules)
    definition = Definition("r", indexes=indexes)
    after = definition.add_indexes(
        [rules[0], partition("p1", "b"), RULES["short"]], lambda: "y", is_new=False
    )
    assert len(after.indexes) == count + 1
    with pytest.raises(Invalid) as caught:
        definition.add_indexes([rules[0], RULES["other"]], lambda: "y", is_new=False)
    assert (caught.value.field, caught.value.value) == ("partitions of r", count + 1)
