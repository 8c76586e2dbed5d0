"""The options of a TTL plugin: wrong ones are refused with the field, the value and the fix."""

import enum
import math
from collections.abc import Iterator
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from jobsync.core.expiry import ExpiryOptions
from jobsync.errors import Invalid
from jobsync.ttl.settings import TTLSettings, parse_resources


def keep(record: Any, resource: Any) -> bool:
    """Keep every record."""
    del record, resource
    return False


def generate(record: Any, resource: Any) -> Iterator[bool]:
    """Never run."""
    del record, resource
    yield True


def parse(resources: Any, **settings: Any) -> dict[str, ExpiryOptions]:
    """Return the options by name."""
    parsed = parse_resources(resources, TTLSettings(**settings))
    return {name: governed.options for name, governed in parsed.items()}


def test_a_list_of_names_means_the_defaults() -> None:
    """Hard-delete, by `expires_at` or `default_ttl`."""
    plain = ExpiryOptions(resource="sessions", default_ttl=60.0)
    assert plain.on_expire == "hard-delete"
    spellings: list[Any] = [["sessions"], ("sessions",), {"sessions": {}}, {"sessions": None}]
    spellings += [{"sessions"}, frozenset(["sessions"]), MappingProxyType({"sessions": {}})]
    spellings += [{"sessions": MappingProxyType({})}]
    # An option of None is left out.
    names = ("ttl", "field", "on_expire", "delete_field", "archive_resource")
    unset = dict.fromkeys((*names, "keep_original_id", "callback"))
    spellings += [{"sessions": unset}]
    for resources in spellings:
        assert parse(resources, default_ttl=60.0) == {"sessions": plain}
    assert parse(["sessions"])["sessions"].default_ttl is None


def test_settings_by_name_are_kept() -> None:
    """Durations may be timedelta; a ttl in milliseconds is not refused."""
    parsed = parse_resources(
        {
            "a": {"ttl": timedelta(minutes=1), "on_expire": "archive", "archive_resource": "b"},
            "b": {"ttl": 604_800_000, "on_expire": "callback", "callback": keep},
            "c": {"field": "at", "on_expire": "soft-delete", "delete_field": "gone"},
            "d": {
                "ttl": timedelta(days=30, milliseconds=500),
                "field": "at",
                "on_expire": "archive",
                "archive_resource": "e",
                "keep_original_id": True,
            },
            # It does not tell what it takes.
            "f": {"on_expire": "callback", "callback": max},
        },
        TTLSettings(default_ttl=5.0),
    )
    expected = [
        ExpiryOptions(resource="a", ttl=60.0, on_expire="archive", archive_resource="b"),
        ExpiryOptions(resource="b", ttl=604_800_000, on_expire="callback"),
        ExpiryOptions(resource="c", field="at", on_expire="soft-delete", delete_field="gone"),
        ExpiryOptions(
            resource="d",
            ttl=30 * 86_400 + 0.5,
            field="at",
            on_expire="archive",
            archive_resource="e",
            keep_original_id=True,
        ),
        ExpiryOptions(resource="f", on_expire="callback"),
    ]
    assert {name: each.options for name, each in parsed.items()} == {
        each.resource: msgspec.structs.replace(each, default_ttl=5.0) for each in expected
    }
    callbacks = {name: each.callback for name, each in parsed.items()}
    assert callbacks == {"a": None, "b": keep, "c": None, "d": None, "f": max}


class Name(str, enum.Enum):  # noqa: UP042 - members of a StrEnum are formatted by their values
    """Members are formatted by their own names, not by what they are."""

    ORDERS = "orders"
    OLD = "old"
    AT = "at"
    GONE = "gone"


def test_names_may_be_members_of_an_enum() -> None:
    """What is kept is what they are."""
    archived = {"field": Name.AT, "on_expire": "archive", "archive_resource": Name.OLD}
    marked = {"field": "at", "on_expire": "soft-delete", "delete_field": Name.GONE}
    parsed = parse({Name.ORDERS: archived, "sessions": marked})
    assert [(type(name), name) for name in parsed] == [(str, "orders"), (str, "sessions")]
    assert [each.resource for each in parsed.values()] == ["orders", "sessions"]
    kept = [parsed["orders"].field, parsed["orders"].archive_resource]
    kept.append(parsed["sessions"].delete_field)
    assert [(type(text), text) for text in kept] == [(str, "at"), (str, "old"), (str, "gone")]


def test_without_resources_a_default_is_needed() -> None:
    """Otherwise nothing would expire, and nobody would know."""
    assert parse(None, default_ttl=60.0) == {}
    with pytest.raises(Invalid, match="resources is missing: nothing would expire"):
        parse(None)


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (
            "sessions",
            "resources must be a list of names or a dict by name (got 'sessions'). Write ",
        ),
        (5, "resources must be a list of names or a dict by name (got 5)."),
        ([], "resources must not be empty (got [])."),
        ([""], "resources must have names of resources (got '')."),
        ([7], "resources must have names of resources (got 7)."),
        (["a", "a"], "resources is listed twice (got 'a')."),
        ({"a": 5}, "resources.a must be a dict of options (got 5)."),
        (["a/b"], "resources must be a valid resource name (got 'a/b')."),
        (["1a"], "resources must be a valid resource name (got '1a')."),
        (["a" * 101], "resources must be a valid resource name (got 'aaa"),
    ],
)
def test_resources_of_another_shape_are_refused(resources: object, message: str) -> None:
    """With what to write instead."""
    for settings in ({}, {"default_ttl": 60.0}):
        with pytest.raises(Invalid) as caught:
            parse(resources, **settings)
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"ttl": ttl}, "resources.a.ttl must be more than 0 to 1,000,000 days, in seconds")
            for ttl in (-1, 0, math.nan, math.inf, 1e12, "60", True, timedelta(-1))
        ),
        ({"tll": 5}, "resources.a.tll is not an option (got 5). Did you mean ttl?"),
        (
            {"onExpire": "x"},
            "resources.a.onExpire is not an option (got 'x'). Did you mean on_expire?",
        ),
        (
            {"on_expire": "soft_delete"},
            "resources.a.on_expire is unknown (got 'soft_delete'). Did you mean soft-delete?",
        ),
        (
            {"on_expire": 5},
            (
                "resources.a.on_expire is unknown (got 5). "
                "Use one of hard-delete, soft-delete, archive, callback."
            ),
        ),
        ({"field": 5}, "resources.a.field must be text (got 5)."),
        ({"field": ""}, "resources.a.field must be text (got '')."),
        (
            {"on_expire": "archive"},
            "resources.a.archive_resource is missing: there is nowhere to archive to (got None).",
        ),
        (
            {"on_expire": "archive", "archive_resource": "a"},
            (
                "resources.a.archive_resource must be another resource than the archived one "
                "(got 'a'). "
                'Write archive_resource="a_archive".'
            ),
        ),
        (
            {"on_expire": "archive", "archive_resource": "b c"},
            "resources.a.archive_resource must be a valid resource name (got 'b c').",
        ),
        ({"field": "b..c"}, "resources.a.field must be a field name (got 'b..c')."),
        ({"field": "b."}, "resources.a.field must be a field name (got 'b.')."),
        ({"field": "_entries"}, "resources.a.field is a reserved name (got '_entries')."),
        *(
            (
                {"on_expire": "soft-delete", "field": "at", "delete_field": name},
                f"resources.a.delete_field cannot mark a deleted record (got {name!r}).",
            )
            for name in ("id", "at", "_entries", "b.c", "is_deleted")
        ),
        (
            {"on_expire": "archive", "archive_resource": "b", "keep_original_id": "yes"},
            "resources.a.keep_original_id must be True or False (got 'yes').",
        ),
        (
            {"archive_resource": "b"},
            (
                "resources.a.archive_resource has no effect on hard-delete (got 'b'). "
                "Write on_expire='archive', or leave it out."
            ),
        ),
        (
            {"on_expire": "archive", "archive_resource": "b", "delete_field": "gone"},
            "resources.a.delete_field has no effect on archive (got 'gone').",
        ),
        *(
            (
                {"on_expire": on_expire, "archive_resource": archive, option: value},
                (
                    f"resources.a.{option} has no effect on {on_expire} (got {value!r}). "
                    f"Write on_expire={needed!r}, or leave it out."
                ),
            )
            for option, value, needed in (
                ("delete_field", "gone", "soft-delete"),
                ("archive_resource", "b", "archive"),
                ("keep_original_id", False, "archive"),
                ("callback", 5, "callback"),
            )
            for on_expire, archive in (
                ("hard-delete", None),
                ("soft-delete", None),
                ("archive", "b"),
                ("callback", None),
            )
            if on_expire != needed
        ),
        ({"on_expire": "callback"}, "resources.a.callback is missing (got None)."),
        (
            {"on_expire": "callback", "callback": "keep"},
            "resources.a.callback must be a function (got 'keep').",
        ),
        (
            {"on_expire": "callback", "callback": generate},
            "resources.a.callback is a generator, which nobody runs",
        ),
        *(
            (
                {"on_expire": "callback", "callback": function},
                "resources.a.callback does not take a record and its resource",
            )
            for function in (lambda: True, lambda record: record, lambda a, b, c: (a, b, c))
        ),
    ],
)
def test_wrong_options_of_a_resource_are_refused(options: dict[str, Any], message: str) -> None:
    """With the field, the value and the fix."""
    with pytest.raises(Invalid) as caught:
        parse({"a": options})
    assert str(caught.value).startswith(message)


def archive(**ways: str) -> dict[str, Any]:
    """Return resources that are archived to others."""
    return {
        name: {"ttl": 1, "on_expire": "archive", "archive_resource": archive}
        for name, archive in ways.items()
    }


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        ({"a": "b", "b": "a"}, "resources.b.archive_resource moves records in a circle: a to b"),
        (
            {"x": "a", "a": "b", "b": "c", "c": "a"},
            (
                "resources.c.archive_resource moves records in a circle: a to b to c to a "
                "(got 'a'). "
                'Write archive_resource="a_archive".'
            ),
        ),
    ],
)
def test_archives_in_a_circle_are_refused(ways: dict[str, str], message: str) -> None:
    """Records would be moved for ever."""
    with pytest.raises(Invalid) as caught:
        parse(archive(**ways))
    assert str(caught.value).startswith(message)


def test_archives_may_be_archived() -> None:
    """To a common one, and in several steps."""
    assert list(parse(archive(a="c", b="c", c="d"))) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"default_ttl": -1.0}, "default_ttl must be more than 0 to 1,000,000 days"),
        ({"default_ttl": 0.0}, "default_ttl must be more than 0 to 1,000,000 days"),
        ({"default_ttl": 86_400_000_001.0}, "default_ttl must be more than 0 to 1,000,000 days"),
        ({"default_ttl": math.nan}, "default_ttl must be more than 0 to 1,000,000 days"),
        ({"cleanup_interval": 0.0}, "cleanup_interval must be more than 0 to 366 days"),
        ({"cleanup_interval": 31_622_401.0}, "cleanup_interval must be more than 0 to 366 days"),
        ({"batch_size": 0}, "batch_size must be 1 to 10,000"),
        ({"batch_size": 10_001}, "batch_size must be 1 to 10,000"),
    ],
)
def test_wrong_options_of_the_plugin_are_refused(settings: dict[str, Any], message: str) -> None:
    """Before anything is written."""
    with pytest.raises(Invalid) as caught:
        TTLSettings(**settings)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"default_ttl": 86_400_000_000.0, "cleanup_interval": 31_622_400.0, "batch_size": 10_000},
        {"default_ttl": 0.001, "cleanup_interval": 0.001, "batch_size": 1},
    ],
)
def test_the_least_and_the_most_of_an_option_are_accepted(settings: dict[str, Any]) -> None:
    """What is left out is as in the reference."""
    defaults = {"default_ttl": None, "cleanup_interval": 60.0, "batch_size": 100}
    assert msgspec.structs.asdict(TTLSettings(**settings)) == {**defaults, **settings}
