"""Records and batches as objects: content, sizes, names."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync import Corrupt, Invalid, Record
from jobsync.components import NONCE_LENGTH
from jobsync.core.codec import MAX_INTEGER, encode
from jobsync.core.keys import MAX_KEY
from jobsync.core.urls import MAX_PREFIX
from jobsync.stores.contract import MAX_MARK, TRAIL_LENGTH
from jobsync.stores.objects.layout import (
    LIVE_SIZE,
    BatchName,
    ObjectNames,
    decode_batch,
    decode_object,
    encode_batch,
    encode_object,
    is_segment,
    is_tombstone,
    read_mark,
)
from jobsync.stores.record_codec import MAX_FORMAT, encode_entries

nonces = st.text("abcXYZ019-_", min_size=NONCE_LENGTH, max_size=NONCE_LENGTH)
trails = st.lists(nonces, min_size=1, max_size=TRAIL_LENGTH).map(" ".join)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text('aé😀"\\,]\n ')),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text("ab]"), inner)),
)


def record(value: Any, trail: str, seq: int, epoch: int, format: int, **more: Any) -> Record:
    """Create a record of version `v`."""
    return Record("a/b", value, "v", seq, epoch, format, trail, **more)


counts = st.integers(0, MAX_INTEGER)


@given(json_values, trails, counts, counts, st.integers(0, MAX_FORMAT))
def test_a_record_is_decoded_again_and_never_small(
    value: Any, trail: str, seq: int, epoch: int, format: int
) -> None:
    """A live record has 256 bytes or more, with its value's text."""
    expected = record(value, trail, seq, epoch, format)
    body = encode_object(expected, encode(value).decode())
    assert len(body) >= LIVE_SIZE
    assert encode(value) in body
    assert decode_object("a/b", body, "v") == expected


@given(trails, counts, counts, st.integers(0, MAX_FORMAT))
def test_a_tombstone_is_decoded_again_and_always_small(
    trail: str, seq: int, epoch: int, format: int
) -> None:
    """A tombstone has fewer than 256 bytes, whatever its numbers."""
    expected = record(None, trail, seq, epoch, format, deleted=True)
    body = encode_object(expected, None)
    assert len(body) < LIVE_SIZE
    assert decode_object("a/b", body, "v") == expected


def test_the_longest_tombstone_just_fits() -> None:
    """With the highest numbers it has 255 bytes, and higher numbers are refused."""
    trail = " ".join(["x" * NONCE_LENGTH] * TRAIL_LENGTH)
    body = encode_object(record(None, trail, MAX_INTEGER, MAX_INTEGER, MAX_FORMAT), None)
    assert len(body) == LIVE_SIZE - 1
    for numbers in [
        (MAX_INTEGER + 1, 0, 1),
        (1, MAX_INTEGER + 1, 1),
        (1, 0, MAX_FORMAT + 1),
        (1, -1, 1),
    ]:
        with pytest.raises(Invalid, match="must be between 0 and"):
            encode_object(record(None, trail, *numbers), "1")


@pytest.mark.parametrize("nonce", ["", "short", 'quo"te-12345', "x" * 13])
def test_a_malformed_nonce_is_refused(nonce: str) -> None:
    """It could make a tombstone too long, or invalid JSON."""
    with pytest.raises(Invalid, match="must be a nonce"):
        encode_object(record(1, nonce, 1, 0, 1), "1")


TRAIL = "x" * NONCE_LENGTH


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[1]",
        b'["%b",1,0]' % TRAIL.encode(),
        b'["short",1,0,1]',
        b'["%b",1,0,1,5]' % TRAIL.encode(),
        (b'["%b",1,0,1]' % TRAIL.encode()).ljust(LIVE_SIZE),
        (b'["%b",1,0,1,5' % TRAIL.encode()).ljust(LIVE_SIZE),
        (b'["%b","1",0,1,5]' % TRAIL.encode()).ljust(LIVE_SIZE),
        b"\xff" * 300,
        b"[" * 100_000,
    ],
)
def test_foreign_content_is_corrupt(body: bytes) -> None:
    """Truncated, of the wrong type, or of a size that would be wrong in a listing."""
    with pytest.raises(Corrupt, match="a/b cannot be read"):
        decode_object("a/b", body, "v")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'["%b",1,0,1,5]' % TRAIL.encode(), "a value in {} bytes"),
        ((b'["%b",1,0,1,5]' % TRAIL.encode()).ljust(LIVE_SIZE - 1), "a value in {} bytes"),
        ((b'["%b",1,0,1]' % TRAIL.encode()).ljust(LIVE_SIZE), "a tombstone in {} bytes"),
        (b'["short",1,0,1]', "its trail is 'short'"),
        (b"{", "not a record"),
    ],
)
def test_corrupt_content_is_described(body: bytes, problem: str) -> None:
    """What it is, and what is wrong with it: people decide by that whether it can be removed."""
    with pytest.raises(Corrupt, match=re.escape(problem.format(len(body)))):
        decode_object("a/b", body, "v")


@given(st.lists(json_values, max_size=5))
def test_a_batch_is_decoded_again(values: list[Any]) -> None:
    """Each entry's text, in order."""
    entries = encode_entries(values, "1794731956371-ca547d85fb8b")
    texts = decode_batch("h", encode_batch(entries), len(values))
    assert texts == [entry.data for entry in entries]


@pytest.mark.parametrize("body", [b"", b"[1", b"{}", b"[1]", b"[1,2,3]"])
def test_a_batch_must_have_the_size_in_its_name(body: bytes) -> None:
    """Fewer or more entries, or something else, is corrupt."""
    with pytest.raises(Corrupt):
        decode_batch("h", body, 2)


@pytest.mark.parametrize("mark", range(MAX_MARK + 1))
@pytest.mark.parametrize("length", [1, 230, 250, 251, 1000])
def test_a_listing_shows_the_mark_by_the_size(mark: int, length: int) -> None:
    """Of every live record that has one; a tombstone has none, whatever its size."""
    text = encode("x" * length).decode()
    body = encode_object(record("x" * length, TRAIL, 1, 0, 1), text, mark)
    assert not is_tombstone(len(body))
    assert not mark or read_mark(len(body)) == mark
    assert decode_object("a/b", body, "v").value == "x" * length
    assert {read_mark(size) for size in range(LIVE_SIZE)} == {0}


def test_no_folder_has_two_levels() -> None:
    """A key and the keys below it never share a folder, so tree order is byte order."""
    names = ObjectNames("app")
    assert names.of_record("a") == "app/r1/a"
    assert names.of_record("a/b") == "app/r2/a/b"
    assert names.folder_of_level("a/") == "app/r2/a/"
    assert names.folder_of_stream("a/b") == "app/h2/a/b/"
    assert ObjectNames("").of_record("a") == "r1/a"


@given(st.integers(0, MAX_PREFIX), st.integers(1, MAX_KEY))
def test_every_name_is_allowed_on_s3(prefix: int, length: int) -> None:
    """Even with the longest prefix, an accepted name has at most 1,024 bytes."""
    names = ObjectNames("p" * prefix)
    key = "/".join(["k" * 99] * 7)[:length].rstrip("/")
    assert len(names.of_record(key)) <= 1024
    try:
        names.check_stream(key)
    except Invalid:
        return
    assert len(f"{names.folder_of_stream(key)}{BatchName('0' * 26, 10_000)}") <= 1024


def test_a_stream_name_that_is_too_long_is_refused() -> None:
    """With a long prefix, a history's name must be shorter than a key."""
    longest = "/".join(["k" * 100] * 7)[:MAX_KEY]
    ObjectNames("p").check_stream(longest)
    with pytest.raises(Invalid, match="at most"):
        ObjectNames("p" * MAX_PREFIX).check_stream(longest)


@pytest.mark.parametrize("prefix", [0, 1, 285, 286, 287, 288, 289, 295, MAX_PREFIX])
def test_the_longest_stream_name_leaves_exactly_enough_room(prefix: int) -> None:
    """It has 700 bytes, or its batches have names of 1,024; one byte more is refused."""
    names = ObjectNames("p" * prefix)

    def is_accepted(length: int) -> bool:
        try:
            names.check_stream(("k" * 99 + "/") * (length // 100) + "k" * (length % 100))
        except Invalid:
            return False
        return True

    lengths = [length for length in range(600, 750) if length % 100 and is_accepted(length)]
    room = 1024 - len(f"{names.folder_of_stream('')}{BatchName('0' * 26, 10_000)}")
    assert max(lengths) == min(MAX_KEY - 1, room)


def test_foreign_objects_are_recognised_by_their_names() -> None:
    """Jobsync's objects have the last segment of a key or a batch's name."""
    assert is_segment("ann-1")
    assert not any(map(is_segment, ["", "a/b", "a b", "é", ".."]))
    assert BatchName.parse("1794731956371-ca547d85fb8b-00002") == BatchName(
        "1794731956371-ca547d85fb8b", 2
    )
    assert BatchName.parse("1794731956371-ca547d85fb8b") is None


@pytest.mark.parametrize(
    ("size", "tombstone"),
    [(0, False), (1, False), (21, False), (22, True), (255, True), (256, False), (10_000, False)],
)
def test_a_listing_tells_tombstones_by_their_size(size: int, *, tombstone: bool) -> None:
    """What is smaller than the smallest was written by others: it is listed, and reported."""
    assert is_tombstone(size) is tombstone
    smallest = encode_object(record(None, TRAIL, 1, 0, 1, deleted=True), None)
    assert len(smallest) == 22
