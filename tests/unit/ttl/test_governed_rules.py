"""The rules that a TTL plugin wants: by its options, the schemas, and what others have stored."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobsync.core.attributes import parse
from jobsync.core.expiry import ExpiryRule
from jobsync.core.schema import Schema
from jobsync.database.archive import _ADDED
from jobsync.database.definition import Definition, IndexState
from jobsync.errors import Invalid
from jobsync.ttl.governed_rules import GovernedRules
from jobsync.ttl.settings import TTLSettings, parse_resources


def archive_to(name: str) -> dict[str, Any]:
    """Return options of a resource that is archived to another."""
    return {"ttl": 60, "on_expire": "archive", "archive_resource": name}


def make_rules(
    governed: Any,
    stored: dict[str, str] | None = None,
    schemas: dict[str, Schema] | None = None,
    **settings: Any,
) -> GovernedRules:
    """Return the rules of a plugin, in a database with rules that others have stored."""
    definitions = {name: Definition(name, schema) for name, schema in (schemas or {}).items()}
    for name, archive in (stored or {}).items():
        rule = ExpiryRule(ttl=60.0, on_expire="archive", archive_resource=archive)
        index = IndexState("key", rule, is_ready=True)
        definitions[name] = Definition(name, indexes=(index,))
    resources = {
        name: SimpleNamespace(definition=definition, schema=definition.schema)
        for name, definition in definitions.items()
    }
    database = cast("Any", SimpleNamespace(resources=resources))
    parsed = parse_resources(governed, TTLSettings(**settings))
    return GovernedRules(parsed, lambda: database)


@pytest.mark.parametrize(
    ("options", "settings", "is_declared", "expected"),
    [
        # Nobody knows yet by what it expires.
        ({}, {}, False, None),
        ({}, {}, True, ExpiryRule(ttl=None, field="expires_at")),
        ({}, {"default_ttl": 5.0}, False, ExpiryRule(ttl=5.0)),
        ({"ttl": 7}, {}, False, ExpiryRule(ttl=7.0)),
        ({"field": "at"}, {}, False, ExpiryRule(ttl=None, field="at")),
        ({"ttl": 7, "field": "at"}, {"default_ttl": 5.0}, False, ExpiryRule(ttl=7.0, field="at")),
    ],
)
def test_a_resource_waits_only_for_what_its_options_do_not_say(
    options: Any, settings: Any, is_declared: bool, expected: ExpiryRule | None
) -> None:
    """A resource that the plugin does not govern has no rule at all."""
    rules = make_rules({"a": options}, **settings)
    fields = parse({"expires_at": "number", "at": "number"}) if is_declared else {}
    definition = Definition("a", Schema(fields=fields), is_declared=is_declared)
    assert [*rules.choose(definition)] == ([] if expected is None else [expected])
    assert [*rules.choose(Definition("b", Schema(fields=fields)))] == []


@pytest.mark.parametrize(
    ("governed", "stored", "way"),
    [
        (["b"], {}, None),
        (["b"], {"b": "c"}, None),
        (["b"], {"b": "c", "c": "d"}, None),
        (["b"], {"b": "a"}, "a to b to a"),
        (["b"], {"b": "c", "c": "a"}, "a to b to c to a"),
        (["b", "c"], {"c": "a"}, "a to b to c to a"),
        # A circle that it leads into is found by whoever stores the rules there.
        (["b"], {"b": "c", "c": "b"}, None),
        # What this plugin wants for a resource counts, not what is stored of it.
        (["b"], {"a": "c", "c": "a"}, None),
    ],
)
def test_records_never_come_back_from_their_archives(
    governed: list[str], stored: dict[str, str], way: str | None
) -> None:
    """Neither by the rules of this plugin, nor by those that others have stored."""
    names = ["a", *governed]
    options = dict(zip(names, map(archive_to, governed), strict=False))
    rules = make_rules(options, stored)
    if way is None:
        (rule,) = rules.choose(Definition("a"))
        assert rule == ExpiryRule(ttl=60.0, on_expire="archive", archive_resource="b")
        return
    with pytest.raises(Invalid) as caught:
        rules.choose(Definition("a"))
    assert (caught.value.field, caught.value.value) == ("resources.a.archive_resource", "b")
    assert caught.value.problem == f"moves records in a circle: {way}"
    last = way.split(" to ")[-2]
    assert f'drop_expiry("{last}")' in str(caught.value.fix)


@pytest.mark.parametrize("wanted", [{}, {"ttl": 5}, {"field": "at"}])
def test_a_rule_that_a_plugin_replaces_makes_no_circle(wanted: Any) -> None:
    """What is stored of a resource that it governs does not count, also if it archives no more."""
    rules = make_rules({"a": archive_to("b"), "b": wanted}, {"b": "a"})
    (rule,) = rules.choose(Definition("a"))
    assert rule == ExpiryRule(ttl=60.0, on_expire="archive", archive_resource="b")


@pytest.mark.parametrize("count", range(len(_ADDED) + 1))
@pytest.mark.parametrize("stored", [{}, {"x": "a"}, {"x": "b"}])
def test_a_move_overwrites_no_field_of_users(count: int, stored: dict[str, str]) -> None:
    """An archive has such fields by earlier moves: those are not users' fields."""
    rules = make_rules({"a": archive_to("b")}, stored)
    fields = parse(dict.fromkeys(_ADDED[:count], "json"))
    definition = Definition("a", Schema(fields=fields))
    is_refused = 0 < count < len(_ADDED) and "a" not in stored.values()
    if is_refused:
        with pytest.raises(Invalid, match=f"would overwrite {_ADDED[0]}"):
            rules.choose(definition)
    else:
        assert len([*rules.choose(definition)]) == 1


@pytest.mark.parametrize("missing", [None, *_ADDED])
@pytest.mark.parametrize("is_strict", [False, True])
def test_an_archive_that_exists_can_hold_what_a_move_adds(
    missing: str | None, *, is_strict: bool
) -> None:
    """Otherwise the plugin does not start; one that does not exist is made as needed."""
    fields = parse({name: "json" for name in _ADDED if name != missing})
    schemas = {"a": Schema(), "b": Schema(fields=fields, strict=is_strict)}
    rules = make_rules({"a": archive_to("b"), "z": {"ttl": 1}}, schemas=schemas)
    if missing is not None and is_strict:
        with pytest.raises(Invalid, match=f"is strict and has no {missing}") as caught:
            rules.check_all()
        assert caught.value.field == "resources.a.archive_resource"
    else:
        rules.check_all()
    make_rules({"a": archive_to("b")}).check_all()


def test_the_schemas_of_all_resources_are_checked() -> None:
    """Also of the last one."""
    names = ["a", "b", "c"]
    schemas = {name: Schema(fields=parse({"at": "number"})) for name in names}
    governed = {name: {"field": "at"} for name in names}
    make_rules(governed, schemas=schemas).check_all()
    for wrong in names:
        broken = {**schemas, wrong: Schema(fields=parse({"at": "boolean"}))}
        with pytest.raises(Invalid) as caught:
            make_rules(governed, schemas=broken).check_all()
        assert caught.value.field == f"resources.{wrong}.field"


@pytest.mark.parametrize("exists", [True, False])
def test_an_archive_is_checked_though_its_resource_may_come_later(*, exists: bool) -> None:
    """Else its records could not be archived on the day that they expire."""
    strict = Schema(fields=parse({"user": "string"}), strict=True)
    orders = {"orders": Schema(fields=parse({"at": "number"}))} if exists else {}
    rules = make_rules({"orders": archive_to("old")}, schemas={"old": strict, **orders})
    with pytest.raises(Invalid, match=r"resources\.orders\.archive_resource.*has no"):
        rules.check_all()
