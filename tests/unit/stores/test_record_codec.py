"""The record after each kind of change, field by field; and what of it is stored and read back."""

from typing import Any

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Corrupt, Delete, Fenced, Invalid, NewerFormat, Put, Record
from jobsync.components import Ids
from jobsync.core.clock import Wall
from jobsync.errors import JobsyncError
from jobsync.stores.contract import TRAIL_LENGTH, Change
from jobsync.stores.objects.layout import decode_batch, decode_object, encode_object
from jobsync.stores.record_codec import (
    MAX_FORMAT,
    assign_nonces,
    build_records,
    decode_entry,
    decode_record,
    encode_entries,
    first_id_at,
)

NEW, FIRST, SECOND = "N" * 12, "A" * 12, "B" * 12
TRAIL = f"{FIRST} {SECOND}"
FULL = [f"{n:012d}" for n in range(TRAIL_LENGTH)]
BASE = Record("n/a", "old", FIRST, 7, 3, 2, TRAIL)
TOMBSTONE = Record("n/a", None, FIRST, 7, 3, 2, TRAIL, deleted=True)
LONG = Record("n/a", "old", FULL[0], 99, 0, 1, " ".join(FULL))
BATCH = "1794731956371-ca547d85fb8b"


def make_ids() -> Ids:
    """Return ids that are the same in each test."""
    return Ids(FakeClock(), SeededRandomness(1))


def made(value: Any, seq: int, epoch: int, form: int, trail: str, **more: Any) -> Record:
    """Return the record that a change with the nonce `NEW` makes."""
    return Record("n/a", value, NEW, seq, epoch, form, trail, **more)


@pytest.mark.parametrize(
    ("change", "record"),
    [
        (Put("n/a", 5, nonce=NEW), made(5, 1, 0, 1, NEW)),
        (Put("n/a", None, nonce=NEW), made(None, 1, 0, 1, NEW)),
        (Put("n/a", 5, epoch=0, nonce=NEW), made(5, 1, 0, 1, NEW)),
        (Put("n/a", 5, epoch=6, format=4, nonce=NEW), made(5, 1, 6, 4, NEW)),
        (Put("n/a", 5, BASE, format=2, nonce=NEW), made(5, 8, 3, 2, f"{NEW} {TRAIL}")),
        (Put("n/a", 5, BASE, epoch=3, format=2, nonce=NEW), made(5, 8, 3, 2, f"{NEW} {TRAIL}")),
        (Put("n/a", 5, BASE, epoch=9, format=6, nonce=NEW), made(5, 8, 9, 6, f"{NEW} {TRAIL}")),
        (Put("n/a", None, TOMBSTONE, format=2, nonce=NEW), made(None, 8, 3, 2, f"{NEW} {TRAIL}")),
        (
            Delete(BASE, format=2, nonce=NEW),
            made(None, 8, 3, 2, f"{NEW} {TRAIL}", deleted=True),
        ),
        (
            Delete(BASE, epoch=9, format=6, nonce=NEW),
            made(None, 8, 9, 6, f"{NEW} {TRAIL}", deleted=True),
        ),
        (Put("n/a", 5, LONG, nonce=NEW), made(5, 100, 0, 1, " ".join([NEW, *FULL[:-1]]))),
        (
            Delete(LONG, epoch=1, nonce=NEW),
            made(None, 100, 1, 1, " ".join([NEW, *FULL[:-1]]), deleted=True),
        ),
    ],
)
def test_a_change_and_its_base_make_the_next_record(change: Change, record: Record) -> None:
    """With all fields; and it is the same again after it was stored, in a table or an object."""
    (found,), (text,) = build_records([change], make_ids())
    assert found == record
    assert found.nonce == NEW
    assert (text is None) is record.deleted
    columns = (text, found.seq, found.epoch, found.format, found.trail)
    assert decode_record("n/a", *columns) == record
    content = encode_object(found, text)
    assert decode_object("n/a", content, "etag") == Record(
        *("n/a", record.value, "etag", record.seq, record.epoch, record.format, record.trail),
        deleted=record.deleted,
    )


@pytest.mark.parametrize(
    ("change", "kind", "fields"),
    [
        (
            Put("n/b", 5, BASE, epoch=0),
            Invalid,
            {"field": "base", "value": "n/a", "problem": "must be a version of 'n/b'"},
        ),
        (Put("n/a", 5, BASE, epoch=2, format=2), Fenced, {"epoch": 2, "current": 3}),
        (Put("n/a", 5, BASE, epoch=0, format=2), Fenced, {"epoch": 0, "current": 3}),
        (Put("n/a", 5, BASE, epoch=2, format=1), Fenced, {"epoch": 2, "current": 3}),
        (Delete(BASE, epoch=1, format=2), Fenced, {"epoch": 1, "current": 3}),
        (Put("n/a", 5, BASE), NewerFormat, {"found": 2, "known": 1}),
        (Put("n/a", 5, BASE, epoch=4), NewerFormat, {"found": 2, "known": 1}),
        (Put("n/a", 5, TOMBSTONE), NewerFormat, {"found": 2, "known": 1}),
        (Delete(BASE), NewerFormat, {"found": 2, "known": 1}),
        (Put("n/a", 5, format=0), Invalid, {"field": "format", "value": 0}),
        (Put("n/a", 5, format=MAX_FORMAT + 1), Invalid, {"field": "format"}),
        (Put("n/a", 5, BASE, epoch=-1, format=2), Invalid, {"field": "epoch", "value": -1}),
        (Delete(BASE, format=-1), Invalid, {"field": "format", "value": -1}),
        (Put("n/a", 5, BASE, format=2, nonce=FIRST), Invalid, {"field": "nonce", "value": FIRST}),
        (Put("n/a", 5, BASE, format=2, nonce=SECOND), Invalid, {"field": "nonce"}),
        (Delete(LONG, nonce=FULL[-1]), Invalid, {"field": "nonce", "value": FULL[-1]}),
        (Delete(BASE, format=2, nonce="short"), Invalid, {"field": "nonce", "value": "short"}),
        (Put("n//a", 5), Invalid, {}),
    ],
)
def test_a_change_that_may_not_follow_its_base_is_refused(
    change: Change, kind: type[JobsyncError], fields: dict[str, Any]
) -> None:
    """With the reason that comes first, alone and behind a change that is right."""
    for before in ([], [Put("n/z", 1)]):
        changes: list[Change] = [*before, change]
        with pytest.raises(kind) as caught:
            build_records(changes, make_ids())
        assert type(caught.value) is kind
        assert {name: getattr(caught.value, name) for name in fields} == fields
        if isinstance(caught.value, Fenced | NewerFormat):
            assert caught.value.key == "n/a"


MIXED: list[Change] = [
    Put("n/b", 1, nonce="1" * 12, mark=3),
    Put("n/c", 2, epoch=4, format=5, mark=6),
    Delete(LONG, epoch=7, format=8, nonce="2" * 12),
    Put("n/d", 3, nonce="3" * 12),
    Delete(Record("n/e", 1, FIRST, 1, 0, 1, FIRST), epoch=1, format=2),
]


@pytest.mark.parametrize(
    "wanted", [[0, 1, 2, 3, 4], [1, 4], [1], [0, 2, 3], [4, 3, 2, 1, 0], [0, 1], [1, 0], []]
)
def test_each_write_keeps_its_nonce_or_gets_a_new_one(wanted: list[int]) -> None:
    """In any order; nothing else of a change is another, and no more are drawn than needed."""
    changes = [MIXED[index] for index in wanted]
    fresh = iter(make_ids().nonces(sum(not change.nonce for change in changes)))
    nonces = [change.nonce or next(fresh) for change in changes]
    records, _ = build_records(changes, make_ids())
    assert [record.nonce for record in records] == nonces
    assert [record.key for record in records] == [change.key for change in changes]
    assigned = assign_nonces(changes, make_ids())
    assert len({change.nonce for change in assigned}) == len(changes)
    for before, after in zip(changes, assigned, strict=True):
        assert type(after) is type(before)
        assert after.nonce == before.nonce or not before.nonce
        for name in set(before.__struct_fields__) - {"nonce"}:
            assert getattr(after, name) == getattr(before, name)
    assert assign_nonces(assigned, make_ids()) == assigned


@pytest.mark.parametrize(
    "changes",
    [
        [Put("n/b", 1), Put("n/a", 1), Put("n/b", 2)],
        [Delete(LONG), Put("n/b", 1), Put("n/a", 2)],
        [Delete(LONG), Delete(LONG)],
    ],
)
def test_a_batch_that_changes_one_record_twice_is_refused(changes: list[Change]) -> None:
    """Whatever the changes are; the keys are shown sorted."""
    with pytest.raises(Invalid, match="must not change one record twice") as caught:
        build_records(changes, make_ids())
    assert caught.value.value == sorted(change.key for change in changes)


def test_the_texts_of_a_batch_are_those_of_its_values() -> None:
    """A tombstone has none, which is not the text of None."""
    changes: list[Change] = [
        Put("n/b", None),
        Delete(LONG),
        Put("n/c", {"é": [1, "x"]}),
        Put("n/d", ""),
    ]
    _, texts = build_records(changes, make_ids())
    assert texts == ["null", None, '{"é":[1,"x"]}', '""']


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (("1", 0, 3, 2, FIRST), "its numbers are 0, 3, 2"),
        (("1", 7, -1, 2, FIRST), "its numbers are 7, -1, 2"),
        (("1", 7, 3, 0, FIRST), "its numbers are 7, 3, 0"),
        (("1", 7, 3, 2, "x"), "its trail is 'x'"),
        ((None, 7, 3, 2, ""), "its trail is ''"),
        (("{", 7, 3, 2, FIRST), ""),
    ],
)
def test_damaged_columns_name_their_record(columns: tuple[Any, ...], words: str) -> None:
    """With what is wrong."""
    with pytest.raises(Corrupt) as caught:
        decode_record("n/a", *columns)
    assert caught.value.key == "n/a"
    assert words in caught.value.detail
    assert caught.value.detail


@pytest.mark.parametrize(
    "data",
    [
        '["NNNNNNNNNNNN",1,0,1,{]',
        '["short",1,0,1,5]',
        '["NNNNNNNNNNNN",1,0,1,1e999]',
        '["NNNNNNNNNNNN",1,0,1,{"a":[1e400]}]',
    ],
)
def test_a_damaged_object_names_its_record(data: str) -> None:
    """Not its version or its place."""
    with pytest.raises(Corrupt) as caught:
        decode_object("n/a", data.encode().ljust(256), "etag")
    assert caught.value.key == "n/a"
    with pytest.raises(Corrupt) as caught:
        decode_batch("h/a", b"[1,2]", 3)
    assert (caught.value.key, caught.value.detail) == (
        "h/a",
        "2 entries where its name says 3",
    )


def test_an_entry_is_read_back_with_its_place_and_its_time() -> None:
    """To the millisecond of its writer's clock, numbered in its batch."""
    encoded = encode_entries(["a", {"b": 2}, None], BATCH)
    assert [entry.id for entry in encoded] == [f"{BATCH}-{n:05d}" for n in range(3)]
    for entry, value in zip(encoded, ["a", {"b": 2}, None], strict=True):
        found = decode_entry(entry.id, "h/a", entry.data)
        assert (found.stream, found.id, found.value) == ("h/a", entry.id, value)
        assert found.at == Wall(1_794_731_956.371)


@pytest.mark.parametrize(
    ("entry_id", "data", "key"),
    [
        (f"{BATCH}-00007", "{", f"h/a#{BATCH}-00007"),
        ("nonsense", "1", "h/a#nonsense"),
        (BATCH, "1", f"h/a#{BATCH}"),
    ],
)
def test_a_damaged_entry_is_named_by_its_stream_and_id(entry_id: str, data: str, key: str) -> None:
    """So that it can be found."""
    with pytest.raises(Corrupt) as caught:
        decode_entry(entry_id, "h/a", data)
    assert caught.value.key == key


def test_an_entry_that_is_no_json_is_named_by_its_place() -> None:
    """Among those of its call."""
    wrong: Any = [1, 2, {3}, 4]
    with pytest.raises(Invalid) as caught:
        encode_entries(wrong, BATCH)
    assert caught.value.field.startswith("entries[2]")


@pytest.mark.parametrize("seconds", [0.0, 9.999, 1_700_000_000.25, 1_794_731_956.371])
def test_the_first_id_of_a_moment_parts_those_before_it_from_the_others(seconds: float) -> None:
    """To the millisecond, also of a clock that begins near zero."""
    clock = FakeClock()
    ids = Ids(clock, SeededRandomness(1))

    def at(moment: float) -> str:
        clock.wall_seconds = moment
        return ids.batch()

    first = first_id_at(Wall(seconds))
    assert first <= at(seconds)
    assert first < at(seconds + 0.002)
    assert seconds == 0 or at(seconds - 0.002) < first
