"""When records expire: the same answer in every process, and no answer is a guess."""

import itertools
import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync.core.attributes import parse
from jobsync.core.expiry import (
    ARCHIVING,
    ExpiryOptions,
    ExpiryRule,
    rank_of_time,
    read_time,
    render_time,
)
from jobsync.core.schema import Field, Schema
from jobsync.errors import Invalid

NOON = 1_769_860_800.0
"""2026-01-31T12:00:00Z."""

LAST_RANK = "999999999999999"


def build_schema(*, strict: bool = False, **attributes: Any) -> Schema:
    """Return a schema with these attributes."""
    return Schema(fields=parse(attributes), strict=strict)


@pytest.mark.parametrize(
    ("value", "time"),
    [
        (NOON, NOON),
        (int(NOON), NOON),
        (0, 0.0),
        (-5.5, -5.5),
        ("2026-01-31T12:00:00Z", NOON),
        ("2026-01-31T12:00:00", NOON),
        ("2026-01-31 12:00", NOON),
        ("2026-01-31T14:00:00+02:00", NOON),
        ("2026-01-31T14:00:00+0200", NOON),
        ("2026-01-31T12:00:00.250Z", NOON + 0.25),
        ("2026-01-31", NOON - 43_200),
        ("0001-01-01T00:00:00+23:59", -62_135_596_800.0 - 23 * 3600 - 59 * 60),
        ("9999-12-31T23:59:59-23:59", 253_402_300_799.0 + 23 * 3600 + 59 * 60),
    ],
)
def test_numbers_are_unix_seconds_and_text_is_iso_8601(value: object, time: float) -> None:
    """Text without a zone is in UTC; a date is its beginning."""
    assert read_time(value) == time
    assert ExpiryRule().expires_at({"expires_at": value}) == time
    assert ExpiryRule(ttl=60, field="t").expires_at({"t": value}) == time + 60


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, "", "soon", "1769860800", [NOON], {"at": NOON}),
        *(math.nan, math.inf, -math.inf, 10**400, -(10**400)),
        *(
            "2026-02-30",
            "2026-01-31T24:00:00",
            "20260131",
            "2026-W05-6",
            "2026-01-31T12:00:00+99:00",
        ),
    ],
)
def test_what_is_not_a_time_never_expires(value: object) -> None:
    """Neither does a record without the field."""
    for rule in (ExpiryRule(), ExpiryRule(ttl=1, field="expires_at")):
        assert rule.expires_at({"expires_at": value}) is None
        assert rule.rank({"expires_at": value}) is None
        assert rule.rank({}) is None


def test_a_ttl_counts_from_the_creation_unless_a_field_is_named() -> None:
    """Dots step into objects, and never into lists."""
    document = {"_created_at": NOON, "seen": {"last": NOON + 5, "all": [NOON]}, "expires_at": 1}
    assert ExpiryRule(ttl=60).expires_at(document) == NOON + 60
    assert ExpiryRule(ttl=60, field="seen.last").expires_at(document) == NOON + 65
    assert ExpiryRule(field="seen.last").expires_at(document) == NOON + 5
    for field in ("seen", "seen.first", "seen.all.0", "seen.last.x"):
        assert ExpiryRule(field=field).expires_at(document) is None


@pytest.mark.parametrize(
    ("mark", "expires"), [(NOON, False), ("x", False), (0, False), (None, True)]
)
def test_a_soft_deleted_record_does_not_expire_again(mark: object, *, expires: bool) -> None:
    """Null is not a mark; everything else is."""
    rule = ExpiryRule(on_expire="soft-delete", delete_field="deleted_at")
    assert rule.rank({"expires_at": 1}) is not None
    assert (rule.rank({"expires_at": 1, "deleted_at": mark}) is not None) is expires


@pytest.mark.parametrize(
    "rule",
    [
        ExpiryRule(),
        ExpiryRule(ttl=1e9),
        ExpiryRule(field="other"),
        ExpiryRule(on_expire="soft-delete", delete_field="gone"),
    ],
)
def test_a_record_that_is_being_archived_has_expired_by_any_rule(rule: ExpiryRule) -> None:
    """When its move began, or before; so its rank is the same as when the move began."""
    mark = {"resource": "old", "id": "x", "at": 500.0, "token": "t"}
    moving = {"expires_at": 400, "_created_at": 300.0, "gone": 1, ARCHIVING: mark}
    assert rule.expires_at(moving) == (400 if rule == ExpiryRule() else 500)
    assert rule.expires_at({ARCHIVING: "damaged", "expires_at": 900}) == (
        900 if rule.field == "expires_at" else None
    )


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2))
def test_ranks_sort_as_times_do(times: list[float]) -> None:
    """Also very large and negative ones. A rank is never before its time."""
    rule = ExpiryRule()
    ranks = [rule.rank({"expires_at": time}) or "" for time in sorted(times)]
    assert ranks == sorted(ranks)
    assert {len(rank) for rank in ranks} == {15}
    for time, rank in zip(sorted(times), ranks, strict=True):
        if 0 <= time < 1e11:
            assert time * 1000 <= int(rank) < time * 1000 + 1.001


@given(st.floats(min_value=0, max_value=1e10), st.floats(min_value=0, max_value=1e10))
def test_nothing_is_due_before_it_has_expired(expiry: float, now: float) -> None:
    """A record's rank is rounded up, the current time down."""
    rank = ExpiryRule().rank({"expires_at": expiry})
    assert rank is not None
    if rank <= rank_of_time(now):
        assert expiry <= now
    if now >= expiry + 0.002:
        assert rank <= rank_of_time(now)


@pytest.mark.parametrize(
    ("time", "rank"),
    [
        (0.0, "000000000000000"),
        (-1e300, "000000000000000"),
        (1.5, "000000000001500"),
        (1.0001, "000000000001001"),
        (1e300, LAST_RANK),
        (1e12, LAST_RANK),
    ],
)
def test_a_rank_is_15_digits_of_milliseconds(time: float, rank: str) -> None:
    """What lies outside is the first or the last."""
    assert ExpiryRule().rank({"expires_at": time}) == rank


@given(st.datetimes(timezones=st.just(UTC)), st.integers(-1439, 1439))
def test_any_zone_names_the_same_time(time: datetime, minutes: int) -> None:
    """Every process computes the same rank, wherever it runs."""
    try:
        elsewhere = time.astimezone(timezone(timedelta(minutes=minutes)))
    except OverflowError:
        return
    assert read_time(elsewhere.isoformat()) == read_time(time.isoformat().replace("+00:00", "Z"))


def test_the_digest_covers_what_decides_the_rank_and_nothing_else() -> None:
    """An index is built anew only if its order changes."""
    base = ExpiryRule(ttl=60)
    assert len(base.digest) == 8
    for same in (
        ExpiryRule(ttl=60.0),
        ExpiryRule(ttl=60, field="_created_at"),
        ExpiryRule(ttl=60, on_expire="archive", archive_resource="a", keep_original_id=True),
        ExpiryRule(ttl=60, on_expire="callback"),
    ):
        assert same.digest == base.digest
    different = [
        base,
        ExpiryRule(ttl=61),
        ExpiryRule(field="_created_at"),
        ExpiryRule(ttl=60, field="seen"),
        ExpiryRule(ttl=60, on_expire="soft-delete", delete_field="deleted_at"),
        ExpiryRule(ttl=60, on_expire="soft-delete", delete_field="gone"),
    ]
    for one, other in itertools.combinations(different, 2):
        assert one.digest != other.digest


def test_a_rule_survives_storage() -> None:
    """It stands in the definition of its resource."""
    rule = ExpiryRule(ttl=60, on_expire="soft-delete", delete_field="deleted_at")
    assert msgspec.convert(msgspec.to_builtins(rule), ExpiryRule) == rule


@pytest.mark.parametrize(
    ("options", "schema", "rule"),
    [
        ({}, build_schema(expires_at="datetime"), ExpiryRule()),
        ({"default_ttl": 9.0}, build_schema(expires_at="number"), ExpiryRule()),
        ({"default_ttl": 9.0}, build_schema(name="string"), ExpiryRule(ttl=9)),
        ({"default_ttl": 9.0}, Schema(), ExpiryRule(ttl=9)),
        ({"ttl": 5.0, "default_ttl": 9.0}, build_schema(expires_at="date"), ExpiryRule(ttl=5)),
        ({"field": "x"}, Schema(), ExpiryRule(field="x")),
        ({"field": "a.b"}, build_schema(a={"b": "date"}), ExpiryRule(field="a.b")),
        ({"field": "a.b"}, build_schema(a="object"), ExpiryRule(field="a.b")),
        (
            {"field": "_updated_at", "ttl": 5.0},
            build_schema(a="string"),
            ExpiryRule(ttl=5, field="_updated_at"),
        ),
        (
            {"on_expire": "soft-delete", "ttl": 5.0},
            build_schema(a="string"),
            ExpiryRule(ttl=5, on_expire="soft-delete", delete_field="deleted_at"),
        ),
    ],
)
def test_the_rule_follows_from_the_options_and_the_schema(
    options: dict[str, Any], schema: Schema, rule: ExpiryRule
) -> None:
    """`expires_at` if the schema has it, else the default."""
    assert ExpiryOptions(resource="sessions", **options).resolve(schema) == rule


@pytest.mark.parametrize(
    ("options", "schema", "message"),
    [
        (
            {},
            build_schema(name="string"),
            (
                "resources.sessions has neither a ttl nor a field expires_at in its schema (got "
                "'sessions'). Pass default_ttl, or {'sessions': {'ttl': 3600}}."
            ),
        ),
        (
            {"field": "expire_at"},
            build_schema(expires_at="number"),
            (
                "resources.sessions.field is not in the schema (got 'expire_at'). "
                "Did you mean expires_at?"
            ),
        ),
        (
            {"field": "a.c", "ttl": 5.0},
            build_schema(a={"b": "date"}),
            "resources.sessions.field is not in the schema (got 'a.c'). Did you mean a.b?",
        ),
        (
            {"field": "_version"},
            Schema(),
            (
                "resources.sessions.field is a reserved name (got '_version'). "
                "Use _created_at or _updated_at."
            ),
        ),
        (
            {"field": "live"},
            build_schema(live="boolean"),
            (
                "resources.sessions.field cannot hold a time: its type is boolean (got 'live'). "
                "Use a field of the type datetime, date or number."
            ),
        ),
        (
            {"on_expire": "soft-delete", "delete_field": "gone_at", "ttl": 5.0},
            build_schema(strict=True, name="string"),
            (
                "resources.sessions.delete_field is not in the schema, which is strict (got "
                "'gone_at'). Add gone_at='datetime' to its attributes."
            ),
        ),
        (
            {"on_expire": "soft-delete", "delete_field": "gone", "ttl": 5.0},
            build_schema(gone="boolean"),
            (
                "resources.sessions.delete_field cannot hold a time: its type is boolean "
                "(got 'gone'). "
                "Use a field of the type datetime or number."
            ),
        ),
        (
            {"on_expire": "soft-delete", "ttl": 5.0},
            build_schema(deleted_at="string|maxlength:3"),
            (
                "resources.sessions.delete_field cannot hold what a soft-delete writes,"
                " '2001-09-09T01:46:40.000+00:00': must have at most 3 characters (got "
                "'deleted_at'). Loosen its schema, or use another field."
            ),
        ),
        (
            {"on_expire": "soft-delete", "ttl": 5.0},
            build_schema(deleted_at="integer|max:2000000000"),
            (
                "resources.sessions.delete_field cannot hold what a soft-delete writes,"
                " 4000000000: must be at most 2000000000 (got 'deleted_at'). Loosen its"
                " schema, or use another field."
            ),
        ),
        (
            {"on_expire": "soft-delete", "ttl": 5.0},
            build_schema(deleted_at="number|default:0"),
            (
                "resources.sessions.delete_field marks every record as deleted: its "
                "schema says default (got 'deleted_at'). Use an optional field without "
                "default."
            ),
        ),
        (
            {"on_expire": "soft-delete", "ttl": 5.0},
            build_schema(deleted_at="number|required"),
            (
                "resources.sessions.delete_field marks every record as deleted: its "
                "schema says required (got 'deleted_at'). Use an optional field without"
                " required."
            ),
        ),
        (
            {"on_expire": "soft-delete", "ttl": 5.0},
            build_schema(is_deleted="integer"),
            (
                "resources.sessions has a field is_deleted of the type integer, which "
                "cannot be set (got 'is_deleted'). Use the type boolean, or another "
                "name."
            ),
        ),
        (
            {"on_expire": "soft-delete", "ttl": 5.0},
            build_schema(is_deleted="string|maxlength:3"),
            (
                "resources.sessions cannot hold what a soft-delete writes, 'true': must"
                " have at most 3 characters (got 'is_deleted'). Loosen its schema, or "
                "use another field."
            ),
        ),
        (
            {"on_expire": "soft-delete", "delete_field": "at", "field": "at"},
            Schema(),
            (
                "resources.sessions.delete_field cannot mark a deleted record (got 'at'). "
                "Use deleted_at."
            ),
        ),
    ],
)
def test_a_rule_that_the_schema_cannot_follow_is_refused(
    options: dict[str, Any], schema: Schema, message: str
) -> None:
    """With the field, the value and the fix."""
    with pytest.raises(Invalid) as caught:
        ExpiryOptions(resource="sessions", **options).resolve(schema)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("field", "rendered"),
    [
        (None, NOON + 0.123),
        (Field(kind="number"), NOON + 0.123),
        (Field(kind="json"), NOON + 0.123),
        (Field(kind="integer"), int(NOON)),
        (Field(kind="datetime"), "2026-01-31T12:00:00.123+00:00"),
        (Field(kind="string"), "2026-01-31T12:00:00.123+00:00"),
    ],
)
def test_a_time_is_written_as_the_field_holds_it(field: Field | None, rendered: object) -> None:
    """So that a soft-delete never breaks the schema."""
    assert render_time(NOON + 0.1234, field) == rendered
