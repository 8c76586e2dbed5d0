"""What users write becomes stored documents: whole, or refused with every reason at once."""

from collections.abc import Callable
from typing import Any

import pytest

from jobsync import InvalidRecord
from jobsync.core.attributes import parse
from jobsync.core.schema import Schema
from jobsync.database.validation import Validator, merge

CURRENT = {
    "id": "a",
    "n": 1,
    "place": {"city": {"name": "Rome", "zip": "1"}, "floor": 2},
    "tags": ["x"],
    "_created_at": 5.0,
    "_updated_at": 6.0,
    # Of newer code.
    "_color": "red",
}
LIBRARY = {"_created_at": 5.0, "_updated_at": 9.0, "_color": "red"}


def make_validator(attributes: dict[str, Any] | None = None, *, strict: bool = False) -> Validator:
    """Return the validator of a resource."""
    return Validator("r", Schema(fields=parse(attributes or {}), strict=strict))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"n": 2}, {"n": 2}),
        ({"tags": []}, {"tags": []}),
        ({"place": None}, {"place": None}),
        ({"place": {"floor": 3}}, {"place": {**CURRENT["place"], "floor": 3}}),  # type: ignore[dict-item]
        (
            {"place": {"city": {"zip": "2"}}},
            {"place": {"city": {"name": "Rome", "zip": "2"}, "floor": 2}},
        ),
        ({"place": {"city": "Oslo"}}, {"place": {"city": "Oslo", "floor": 2}}),
        ({"n": {"a": {"b": 1}}}, {"n": {"a": {"b": 1}}}),
        # What was read may be written: the library's own fields are not the user's.
        ({"id": "a", "_created_at": 0, "_updated_at": 0, "_version": "v"}, {}),
    ],
)
def test_an_update_merges_and_a_replacement_replaces(
    changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Both keep the id, when it was created, and what newer code has stored."""
    before = repr(CURRENT)
    validator = make_validator()
    assert validator.build_update(CURRENT, changes, 9.0) == {**CURRENT, **expected, **LIBRARY}
    own = {name: value for name, value in changes.items() if not name.startswith("_")}
    assert validator.build_replacement(CURRENT, changes, 9.0) == {"id": "a", **own, **LIBRARY}
    assert repr(CURRENT) == before


def test_a_merge_changes_neither_part() -> None:
    """Nor anything in them."""
    old, new = {"a": {"b": {"c": 1}}}, {"a": {"b": {"d": 2}}}
    assert merge(old, new) == {"a": {"b": {"c": 1, "d": 2}}}
    assert (old, new) == ({"a": {"b": {"c": 1}}}, {"a": {"b": {"d": 2}}})


Build = Callable[[Validator, dict[str, Any]], Any]
BUILDS: dict[str, Build] = {
    "new": lambda validator, record: validator.build_new(record, "new", 9.0),
    "many": lambda validator, record: validator.build_many([record], ["new"], 9.0)[0],
    "checked": lambda validator, record: validator.check_many([record], ["new"])[0],
    "update": lambda validator, record: validator.build_update({"id": "new"}, record, 9.0),
    "replacement": lambda validator, record: validator.build_replacement(
        {"id": "new"}, record, 9.0
    ),
}


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    ("attributes", "good", "bad"),
    [
        ({"a": "email"}, "a@b.de", "a@b.de\n"),
        ({"a": "uuid"}, "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-00000000"),
        ({"a": "json|required"}, [None], None),
        ({"a": "string|enum:x,yy|max:1"}, "x", "yy"),
        ({"a": "string|enum:x,yy|min:2"}, "yy", "x"),
        ({"a": "integer|enum:1,2"}, 2, 3),
        ({"a": "number|min:0.5|max:1.5"}, 0.5, 0.25),
        ({"a": "number|min:0.5|max:1.5"}, 1.5, 1.75),
        ({"a": "integer|min:2|max:3"}, 3, 4),
        ({"a": "string|min:2|max:3"}, "ab", "a"),
        ({"a": "array|items:string|max:1"}, ["a"], ["a", "b"]),
        ({"a": "array|items:string"}, ["a"], [1]),
        ({"a": {"b": "string|required"}}, {"b": "x"}, {}),
        ({"a": "date"}, "2027-01-31", "2027-02-31"),
        ({"a": "boolean|required"}, False, None),
    ],
)
def test_every_verb_has_the_same_rules(
    attributes: dict[str, Any], good: object, bad: object, build: str
) -> None:
    """Those of the schema, at their bounds."""
    validator = make_validator(attributes)
    assert BUILDS[build](validator, {"a": good})["a"] == good
    with pytest.raises(InvalidRecord) as caught:
        BUILDS[build](validator, {"a": bad})
    (problem,) = caught.value.problems
    assert problem.field.removeprefix("[0].").startswith("a")


@pytest.mark.parametrize("build", BUILDS)
def test_defaults_are_filled_in_wherever_they_are(build: str) -> None:
    """Those within an object, too, and no record shares one with another."""
    validator = make_validator(
        {"a": "number|default:5", "b": {"c": "string|default:x", "d": "number"}}
    )
    for _ in range(2):
        built = BUILDS[build](validator, {"b": {}})
        assert (built["id"], built["a"], built["b"]) == ("new", 5, {"c": "x"})
        built["b"]["c"] = "changed"


@pytest.mark.parametrize("build", BUILDS)
def test_every_problem_is_listed_at_once(build: str) -> None:
    """Wrong values, reserved names, names that are no text, strays, and an id that is another's."""
    validator = make_validator({"a": "number", "b": "string"}, strict=True)
    record: Any = {"a": "x", "b": 5, "_own": 1, 5: 1, "stray": 1}
    names = {"a", "b", "_own", "5", "stray"}
    if build in {"update", "replacement"}:
        record, names = {**record, "id": "other"}, {*names, "id"}
    with pytest.raises(InvalidRecord) as caught:
        BUILDS[build](validator, record)
    assert {each.field.removeprefix("[0].") for each in caught.value.problems} == names


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", ["_own", "_", "_entries"])
def test_reserved_names_are_refused(build: str, name: str) -> None:
    """Also without any schema."""
    with pytest.raises(InvalidRecord, match="is a reserved name"):
        BUILDS[build](make_validator(), {"a": 1, name: 1})


def test_all_records_of_a_batch_are_explained() -> None:
    """Not only the first that is wrong."""
    validator = make_validator({"a": "number|required"})
    records: list[Any] = [{"a": "x"}, {"a": 1}, {}, {"a": []}]
    with pytest.raises(InvalidRecord) as caught:
        validator.build_many(records, ["1", "2", "3", "4"], 9.0)
    assert len(caught.value.problems) == 3
    times = {"_created_at": 9.0, "_updated_at": 9.0}
    built = validator.build_many([{"a": 1}, {"id": "own", "a": 2}], ["1", "2"], 9.0)
    assert built == [{"id": "1", "a": 1, **times}, {"id": "own", "a": 2, **times}]
    assert validator.check_many([{"a": 1}], ["1"]) == [{"id": "1", "a": 1}]


UNTEXT = "\ud800"
"""Half of a pair: no text that can be stored."""


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    ("attributes", "record"),
    [
        ({"a": "string|enum:x,y"}, {"a": UNTEXT}),
        ({"a": "uuid"}, {"a": UNTEXT}),
        ({"a": "date"}, {"a": UNTEXT}),
        ({"a": "number"}, {"a": UNTEXT}),
        ({"a": "array|items:number"}, {"a": [UNTEXT]}),
        ({"a": {"b": "string|enum:x,y"}}, {"a": {"b": UNTEXT}}),
        ({"a": "string|required"}, {UNTEXT: 1}),
        ({"a": {"b": "string|required"}}, {"a": {UNTEXT: 1}}),
    ],
    ids=ascii,
)
def test_what_no_text_can_be_is_refused_by_its_field(
    attributes: dict[str, Any], record: dict[str, Any], build: str
) -> None:
    """Where it is wrong by the schema; any other is refused when it is encoded."""
    with pytest.raises(InvalidRecord) as caught:
        BUILDS[build](make_validator(attributes), record)
    fields = {each.field.removeprefix("[0].") for each in caught.value.problems}
    assert fields <= {"a", "a[0]", "a.b"}


@pytest.mark.parametrize("build", BUILDS)
def test_a_bound_may_be_larger_than_any_stored_number(build: str) -> None:
    """Then it refuses nothing, or everything."""
    validator = make_validator({"a": f"integer|max:{10**30}", "b": f"integer|min:{10**30}"})
    assert BUILDS[build](validator, {"a": 5})["a"] == 5
    with pytest.raises(InvalidRecord, match="must be at least"):
        BUILDS[build](validator, {"b": 5})
