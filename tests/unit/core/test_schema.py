"""Schemas are parsed, and checks list all problems of a record at once."""

import re
from decimal import Decimal
from typing import Any

import pytest
import schemas
from hypothesis import assume, given
from hypothesis import strategies as st

from jobsync.core.attributes import parse, render
from jobsync.core.codec import encode
from jobsync.core.schema import Field, Schema, conform, evolve, find_breaks, find_strays
from jobsync.database.validation import FastValidator
from jobsync.errors import Invalid, Problem


def problems_of(attributes: dict[str, Any], record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the wrong fields, each with the rule that it breaks."""
    _, problems = conform(parse(attributes), record)
    return [(problem.field, problem.rule) for problem in problems]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("string", Field(kind="string")),
        ("string|required|min:3", Field(kind="string", required=True, least=3)),
        ("string|optional", Field(kind="string")),
        ("string | minlength:1 | maxlength:9", Field(kind="string", least=1, most=9)),
        ("number|min:-0.5|max:1e3", Field(kind="number", least=-0.5, most=1000.0)),
        ("number|default:0", Field(kind="number", default=0)),
        ("number|min:0|max:0", Field(kind="number", least=0, most=0)),
        ("array|minlength:1|maxlength:2", Field(kind="array", least=1, most=2)),
        ("date|minlength:10|maxlength:10", Field(kind="date", least=10, most=10)),
        ("boolean|default:true", Field(kind="boolean", default=True)),
        ("string|default:", Field(kind="string", default="")),
        ("string|default:a:b", Field(kind="string", default="a:b")),
        ("json|default:null", Field(kind="json", default=None)),
        ("array|items:string|max:2", Field(kind="array", items="string", most=2)),
        ('array|default:["a"]', Field(kind="array", default=["a"])),
        ("enum:a, b|required", Field(kind="string", choices=("a", "b"), required=True)),
        ("string|enum:a,b", Field(kind="string", choices=("a", "b"))),
        ("integer|enum:1,2|default:2", Field(kind="integer", choices=(1, 2), default=2)),
        ("string|required|email", Field(kind="email", required=True)),
        ("email", Field(kind="email")),
    ],
)
def test_a_field_description_is_parsed(text: str, field: Field) -> None:
    """The first word is a type, the others are rules."""
    assert parse({"x": text}) == {"x": field}
    assert parse(render({"x": field})) == {"x": field}


def test_objects_may_be_nested_up_to_a_limit() -> None:
    """The schema itself is the first level."""
    attributes: dict[str, Any] = {"x": "string"}
    for _ in range(15):
        attributes = {"x": attributes}
    assert parse(render(parse(attributes))) == parse(attributes)
    with pytest.raises(Invalid, match=r"(\.x){16} must not be nested deeper than 16"):
        parse({"x": attributes})


def test_a_dictionary_describes_an_object() -> None:
    """Its own rules are under `$$type`."""
    nested = {"city": "string|required", "geo": {"$$type": "object|required", "lat": "number"}}
    assert parse({"address": nested})["address"] == Field(
        kind="object",
        fields={
            "city": Field(kind="string", required=True),
            "geo": Field(kind="object", required=True, fields={"lat": Field(kind="number")}),
        },
    )


@pytest.mark.parametrize("kind", ["string", "uuid", "email", "url", "date", "datetime"])
def test_an_id_is_any_kind_of_text(kind: str) -> None:
    """At the first level; further in, the name means nothing."""
    assert parse({"id": f"{kind}|required"})["id"].kind == kind
    assert parse({"x": {"id": "number"}})["x"].fields == {"id": Field(kind="number")}


def test_a_field_has_a_name_of_up_to_200_characters() -> None:
    """Dollars and underscores may be within it, not at its begin."""
    for name in ("n" * 200, "a_b", "a$b", "a b", "ä"):
        assert parse({name: "string"}) == {name: Field(kind="string")}
    for name in ("n" * 201, "$b", "_b", "$$typ"):
        with pytest.raises(Invalid, match=r"must .*have field names"):
            parse({name: "string"})


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"x": "strin"},
            r"attributes.x has the unknown type 'strin' \(got 'strin'\)\. Did you mean string\?",
        ),
        ({"x": "str"}, r"Did you mean string\?"),
        ({"x": "bool"}, r"Did you mean boolean\?"),
        ({"x": "qqq"}, "Use one of string, number"),
        ({"x": ""}, "unknown type ''"),
        ({"x": "required"}, "unknown type 'required'"),
        ({"x": "string:3"}, "unknown type 'string:3'"),
        ({"x": "string|requird"}, r"unknown rule 'requird'.*\. Did you mean required\?"),
        ({"x": "string|number"}, "unknown rule 'number'"),
        ({"x": "email|url"}, "unknown rule 'url'"),
        ({"x": "string|email|url"}, "unknown rule 'url'"),
        ({"x": "number|email"}, "unknown rule 'email'"),
        ({"x": "string|email:a"}, "unknown rule 'email'"),
        ({"x": "string|"}, "unknown rule ''"),
        ({"x": "string|min"}, "min needs a value"),
        ({"x": "string|required:yes"}, "required must not have a value"),
        ({"x": "string|min:a"}, "min must be a number, not 'a'"),
        ({"x": "string|min:nan"}, "min must be a number, not 'nan'"),
        ({"x": "string|min:1|minlength:2"}, "minlength is given twice"),
        ({"x": "string|minlength:1|min:2"}, "min is given twice"),
        ({"x": "string|max:1|maxlength:2"}, "maxlength is given twice"),
        ({"x": "string|maxlength:1|max:2"}, "max is given twice"),
        ({"x": "string|required|optional"}, "optional is given twice"),
        ({"x": "string|optional|required"}, "required is given twice"),
        ({"x": "string|required|required"}, "required is given twice"),
        ({"x": "string|default:a|default:b"}, "default is given twice"),
        ({"x": "string|enum:a|enum:b"}, "enum is given twice"),
        ({"x": "enum:a|enum:b"}, "enum is given twice"),
        ({"x": "array|items:string|items:number"}, "items is given twice"),
        ({"x": "boolean|min:1"}, "min does not apply to boolean"),
        ({"x": "number|minlength:1"}, "minlength does not apply to number"),
        ({"x": "boolean|enum:true"}, "enum does not apply to boolean"),
        ({"x": "string|items:string"}, "items does not apply to string"),
        ({"x": "array|items:strin"}, r"unknown type 'strin'.*\. Did you mean string\?"),
        ({"x": "number|default:x"}, "default must be a number, not 'x'"),
        ({"x": "json|default:{"}, "default must be JSON, not '{'"),
        ({"x": "string|min:3|default:ab"}, "wrong default: it must have at least 3 characters"),
        (
            {"x": {"$$type": "object|min:1", "y": "string"}},
            r"attributes\.x\.\$\$type .*min does not",
        ),
        ({"x": {"$$type": 'object|default:{"y":1}', "y": "string"}}, "x has a wrong default"),
        ({"x": "number|min:3|max:2"}, "must not have a min above its max"),
        ({"x": 5}, r"attributes.x must be a dictionary \(got 5\)"),
        ({"x": {"$$type": "string"}}, "must be an object, because it has fields"),
        ({"x": {"y": {"z": "strin"}}}, "attributes.x.y.z .*got 'strin'"),
        ({"_x": "string"}, "must not have field names that begin with"),
        ({"a.b": "string"}, "must not have field names that .* contain"),
        ({"": "string"}, "must have field names of 1 to 200"),
        ({"id": "number"}, "attributes.id must be text"),
        ([], "attributes must be a dictionary"),
    ],
)
def test_a_malformed_schema_is_refused(attributes: Any, message: str) -> None:
    """The error has the field, its text, and what was probably meant."""
    with pytest.raises(Invalid, match=message):
        parse(attributes)


@given(described=schemas.fields())
def test_a_rendered_schema_parses_to_the_same_fields(described: Any) -> None:
    """The text form of a schema loses nothing, and is JSON."""
    encode(render(described))
    assert parse(render(described)) == described


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("string", ["", "a"], [1, True, [], {}]),
        ("number", [0, -1.5, Decimal("0.5")], ["1", True, [1]]),
        ("integer", [0, -1], [1.0, True, "1", Decimal(1)]),
        ("boolean", [True, False], [0, "true"]),
        ("json", [0, "a", [], {}], []),
        ("array", [[], (1,)], ["a", {}]),
        ("object", [{}], [[], "a"]),
        ("email", ["ann@example.org"], ["ann", "ann@example", "a b@c.d", "a@b..c", 1]),
        ("url", ["https://example.org", "s3://b/p?x=1"], ["example.org", "http://", "a b", 1]),
        ("date", ["2026-02-28"], ["2026-02-30", "20260228", "2026-W01", "today", 1]),
        (
            "datetime",
            [
                *("2026-01-31T12:00:00Z", "2026-01-31 12:00", "2026-01-31T12:00:00.5+01:00"),
                *("2026-01-31T12:00:00.123456Z", "2026-01-31T12:00:00-0130"),
            ],
            ["2026-01-31", "2026-01-31T25:00:00Z", "2026-01-31T12:00:00.1234567Z", "soon", 1],
        ),
        ("uuid", ["018f4a2e-7b1c-7def-8abc-0123456789ab"], ["018f", 1]),
    ],
)
def test_a_type_accepts_its_own_values(kind: str, good: list[Any], bad: list[Any]) -> None:
    """Each type accepts its own values, and null, and nothing else."""
    for value in [*good, None]:
        assert problems_of({"x": kind}, {"x": value}) == []
    for value in bad:
        assert problems_of({"x": kind}, {"x": value}) == [("x", kind)]


def test_every_bad_field_is_listed_at_once() -> None:
    """A check does not stop at the first problem; each has its value and its rule."""
    attributes = {
        "user_id": "string|required",
        "expires_at": "number|required|min:1",
        "active": "boolean",
        "role": "enum:admin,guest",
        "tags": "array|items:string|max:2",
        "address": {"city": "string|required", "zip": "string|min:4"},
    }
    record = {
        "expires_at": 0,
        "active": "yes",
        "role": "root",
        "tags": ["a", 2, None],
        "address": {"zip": "12"},
        "other": object,
    }
    _, problems = conform(parse(attributes), record)
    assert problems == [
        Problem("user_id", None, "is missing", "required"),
        Problem("expires_at", 0, "must be at least 1", "min:1"),
        Problem("active", "yes", "must be True or False", "boolean"),
        Problem("role", "root", "must be one of the choices", "enum:admin,guest"),
        Problem("tags", ["a", 2, None], "must have at most 2 elements", "max:2"),
        Problem("tags[1]", 2, "must be text", "string"),
        Problem("tags[2]", None, "must be text", "string"),
        Problem("address.city", None, "is missing", "required"),
        Problem("address.zip", "12", "must have at least 4 characters", "min:4"),
    ]


def test_defaults_are_filled_in() -> None:
    """A missing field gets its default; a null field only if it is required."""
    fields = parse(
        {
            "a": "number|default:1",
            "b": "number|required|default:2",
            "c": 'array|default:["x"]',
            "d": {"e": "string|default:dark"},
            "f": {"g": "string|required", "h": "number|default:1"},
        }
    )
    assert conform(fields, {}) == ({"a": 1, "b": 2, "c": ["x"], "d": {"e": "dark"}}, [])
    given_null = {"a": None, "b": None, "c": None, "d": None, "f": None}
    assert conform(fields, given_null) == (given_null | {"b": 2}, [])


def test_a_default_cannot_be_changed_through_a_record() -> None:
    """Records do not share a default value, nor what is inside it."""
    fields = parse({"tags": 'array|default:["x"]', "rows": 'array|default:[["x"]]'})
    first, _ = conform(fields, {})
    first["tags"].append("y")
    first["rows"][0].append("y")
    assert conform(fields, {}) == ({"tags": ["x"], "rows": [["x"]]}, [])


def test_a_required_object_must_be_present() -> None:
    """An object of optional fields may be absent, unless it is required."""
    nested = {"city": "string|required"}
    assert problems_of({"address": nested}, {}) == []
    required = {"address": {"$$type": "object|required", **nested}}
    assert problems_of(required, {}) == [("address", "required")]
    assert problems_of(required, {"address": {}}) == [("address.city", "required")]


def test_a_check_does_not_change_its_argument() -> None:
    """The caller's record is not changed, at any depth."""
    record: dict[str, Any] = {"a": {}}
    conform(parse({"a": {"b": "number|default:1"}, "c": "number|default:1"}), record)
    assert record == {"a": {}}


def test_undescribed_fields_are_found_with_a_hint() -> None:
    """Undescribed fields are listed, in objects too."""
    fields = parse({"active": "boolean", "more": {"city": "string"}, "any": "object"})
    strays = find_strays(fields, {"actve": 1, "more": {"citi": 1}, "any": {"x": 1}, "zzz": 1})
    assert [(stray.field, stray.problem) for stray in strays] == [
        ("actve", "is not in the schema: did you mean active?"),
        ("more.citi", "is not in the schema: did you mean city?"),
        ("zzz", "is not in the schema"),
    ]


@given(described=schemas.fields(), data=st.data())
def test_a_check_is_idempotent(described: Any, data: st.DataObject) -> None:
    """A valid record stays valid and unchanged: defaults follow the rules."""
    passed, problems = conform(described, data.draw(schemas.records(described)))
    assume(not problems)
    assert conform(described, passed) == (passed, [])


@given(described=schemas.fields(), data=st.data())
def test_a_quick_look_passes_only_what_a_check_passes(described: Any, data: st.DataObject) -> None:
    """What the quick look is sure of, a check leaves as it is."""
    records = data.draw(st.lists(schemas.records(described), max_size=3))
    checked = [conform(described, record) for record in records]
    if FastValidator(described).passes(records):
        assert [(record, []) for record in records] == checked


@pytest.mark.parametrize(
    "attributes",
    [
        {"a": "string|required|min:1|max:9", "b": "number|min:0", "c": "boolean|default:true"},
        {"a": "array|items:string|max:2", "b": {"c": "string|required", "d": {"e": "integer"}}},
        {"a": "json", "b": "object", "c": "enum:x,y", "d": "email", "e": "uuid", "f": "url"},
    ],
)
def test_a_quick_look_is_there_for_common_schemas(attributes: Any) -> None:
    """It is worth its while: nothing but dates and odd bounds needs the walk."""
    assert FastValidator(parse(attributes)).passes([]) is True


@pytest.mark.parametrize(
    ("attributes", "bad"),
    [
        ({"a": "json|required"}, {"a": None}),
        ({"a": "string|min:2"}, {"a": "x"}),
        ({"a": "number"}, {"a": True}),
        ({"a": "integer"}, {"a": 1.5}),
        ({"a": "email"}, {"a": "a@b\n.c@"}),
        ({"a": "uuid"}, {"a": "018f4a2e-7b1c-7def-8abc-0123456789ab\n"}),
        ({"a": "array|items:string"}, {"a": [None]}),
        ({"a": {"b": "string|required"}}, {"a": {}}),
        ({"a": "enum:x"}, {"a": "y"}),
        ({"a": "date"}, {"a": "2026-02-30"}),
        ({"a": "string|required"}, {}),
    ],
)
def test_a_quick_look_doubts_what_is_wrong(attributes: Any, bad: Any) -> None:
    """Whatever a check refuses, it does not pass."""
    assert conform(parse(attributes), bad)[1] != []
    assert FastValidator(parse(attributes)).passes([bad]) is False


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"a": "string"}),
        ({}, {"a": "string|required|default:x"}),
        ({"a": "string|required"}, {}),
        ({"a": "string|required"}, {"a": "string"}),
        ({"a": "string"}, {"a": "string|required|default:x"}),
        ({"a": "integer"}, {"a": "number"}),
        ({"a": "email"}, {"a": "string"}),
        ({"a": "boolean"}, {"a": "json"}),
        ({"a": "string|min:3|max:5"}, {"a": "string|min:2|max:6"}),
        ({"a": "enum:x"}, {"a": "enum:x,y"}),
        ({"a": "enum:x"}, {"a": "string"}),
        ({"a": "array|items:integer"}, {"a": "array|items:number"}),
        ({"a": {"b": "string"}}, {"a": {"b": "string", "c": "number"}}),
        ({"a": {"b": "string"}}, {"a": "object"}),
        ({"a": "string"}, {"a": "string", "b": {"c": "string|required"}}),
    ],
)
def test_a_wider_schema_is_compatible(old: Any, new: Any) -> None:
    """Widening a schema needs no migration."""
    assert list(find_breaks(parse(old), parse(new))) == []


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ({}, {"a": "string|required"}, r"a: existing records do not have it \(add a default\)"),
        ({"a": "string"}, {"a": "string|required"}, "a: existing records may not have it"),
        ({"a": "number"}, {"a": "string"}, "a: existing records hold number, not string"),
        ({"a": "number"}, {"a": "integer"}, "hold number, not integer"),
        ({"a": "string"}, {"a": "email"}, "hold string, not email"),
        ({"a": "string"}, {"a": "string|min:1"}, "may be below its min"),
        ({"a": "number|min:1"}, {"a": "number|min:2"}, "may be below its min"),
        ({"a": "string"}, {"a": "string|max:5"}, "may be above its max"),
        ({"a": "string|max:5"}, {"a": "string|max:4"}, "may be above its max"),
        ({"a": "array|items:number"}, {"a": "array|items:integer"}, "may hold other items"),
        ({"a": "string"}, {"a": "enum:x"}, "may hold another choice"),
        ({"a": "enum:x,y"}, {"a": "enum:x"}, "may hold another choice"),
        ({"a": "array"}, {"a": "array|items:string"}, "may hold other items"),
        ({"a": "object"}, {"a": {"b": "string"}}, "hold any object"),
        ({"a": {"b": "string"}}, {"a": {"b": "number"}}, "a.b: existing records hold"),
        ({"a": {"b": "string"}}, {"a": {"b": "string", "c": "number|required"}}, "a.c:"),
    ],
)
def test_a_narrower_schema_is_reported(old: Any, new: Any, reason: str) -> None:
    """The reason names the field."""
    (broken,) = find_breaks(parse(old), parse(new))
    assert re.search(reason, str(broken))


def test_a_field_that_is_no_longer_mentioned_stays_as_an_optional_one() -> None:
    """Code of an earlier release that starts again removes nothing."""
    old = Schema(fields=parse({"a": "string|required", "b": {"c": "number|required"}}))
    new = Schema(fields=parse({"b": {"d": "number"}}), strict=True)
    assert evolve(old, new) == Schema(
        fields=parse({"b": {"d": "number", "c": "number"}, "a": "string"}), strict=True
    )


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_the_new_schema_says_whether_it_is_strict(before: bool, after: bool) -> None:
    """Whatever the old one said."""
    assert evolve(Schema(strict=before), Schema(strict=after)) == Schema(strict=after)


@given(old=schemas.fields(), new=schemas.fields(), data=st.data())
def test_records_survive_every_compatible_change(old: Any, new: Any, data: st.DataObject) -> None:
    """Whatever two schemas: if the change is allowed, what passed before passes after."""
    # Neighbours, so that not every pair is worlds apart.
    mixed = {**old, **{name: field for name, field in new.items() if data.draw(st.booleans())}}
    assume(not list(find_breaks(old, mixed)))
    passed, problems = conform(old, data.draw(schemas.records(old)))
    assume(not problems)
    evolved = evolve(Schema(fields=old), Schema(fields=mixed))
    assert conform(evolved.fields, passed)[1] == []
    assert list(find_breaks(old, evolved.fields)) == []
