"""Every limit of the stores: what is exactly at it is accepted, and one more is refused."""

from collections.abc import Callable
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Corrupt, Invalid, Put, Record
from jobsync.components import Ids
from jobsync.core.codec import MAX_INTEGER, MAX_VALUE
from jobsync.stores.contract import MAX_MARK, TRAIL_LENGTH
from jobsync.stores.objects.layout import encode_object
from jobsync.stores.record_codec import (
    MAX_FORMAT,
    build_records,
    check_after,
    decode_entry,
    decode_record,
    encode_entries,
)
from jobsync.stores.scan import check_age, check_limit

IDS = Ids(FakeClock(), SeededRandomness(1))
BATCH = "1794731956371-ca547d85fb8b"
NONCE = "A" * 12
FULL_TRAIL = " ".join(f"{n:012d}" for n in range(TRAIL_LENGTH))
LONG = "x" * (MAX_VALUE // 2 - 2)


def build(**options: Any) -> object:
    """Build the record of one change."""
    return build_records([Put("n/a", 1, **options)], IDS)


def decode(**columns: Any) -> object:
    """Decode a stored record."""
    row = {"seq": 1, "epoch": 0, "format": 1, "trail": NONCE, **columns}
    return decode_record("n/a", "1", **row)


def encode(mark: int = 0, **columns: Any) -> object:
    """Encode a record as an object."""
    row = {"seq": 1, "epoch": 0, "format": 1, "trail": NONCE, **columns}
    return encode_object(Record("n/a", 1, "v", **row), "1", mark)


LIMITS: dict[str, tuple[Callable[[Any], object], list[Any], list[Any]]] = {
    "limit": (check_limit, [1, 100_000], [0, -1, 100_001, True, 1.0]),
    "older_than": (check_age, [0, 1e9, -1e9], [1.0000001e9, -1.0000001e9, float("nan")]),
    "entries": (
        lambda count: encode_entries([0] * count, BATCH),
        [0, 1, 10_000],
        [10_001],
    ),
    "bytes of entries": (
        lambda more: encode_entries([LONG, f"{LONG}{'x' * more}"], BATCH),
        [0],
        [1],
    ),
    "batch": (
        lambda batch: encode_entries([1], batch),
        [BATCH],
        ["", f"{BATCH}0", BATCH[1:], BATCH.upper(), f"{BATCH}\n"],
    ),
    "after": (
        check_after,
        ["", f"{BATCH}-00000", f"{BATCH}-99999"],
        [BATCH, f"{BATCH}-0000", f"{BATCH}-000000", f"{BATCH}-00000\n"],
    ),
    "epoch": (lambda epoch: build(epoch=epoch), [None, 0, MAX_INTEGER], [-1, MAX_INTEGER + 1]),
    "format": (lambda form: build(format=form), [1, MAX_FORMAT], [0, MAX_FORMAT + 1]),
    "nonce": (
        lambda nonce: build(nonce=nonce),
        ["", NONCE, "-_09azAZ----"],
        [NONCE[1:], f"{NONCE}A", f"{NONCE}\n", "A" * 11 + "é"],
    ),
    "stored seq": (lambda seq: decode(seq=seq), [1, MAX_INTEGER], [0, MAX_INTEGER + 1]),
    "stored epoch": (lambda epoch: decode(epoch=epoch), [0, MAX_INTEGER], [-1, MAX_INTEGER + 1]),
    "stored format": (lambda form: decode(format=form), [1, MAX_FORMAT], [0, MAX_FORMAT + 1]),
    "stored trail": (
        lambda trail: decode(trail=trail),
        [NONCE, FULL_TRAIL],
        ["", f"{NONCE} ", f"{FULL_TRAIL} {NONCE}", NONCE[1:], f"{NONCE}  {NONCE}"],
    ),
    "stored id": (
        lambda entry_id: decode_entry(entry_id, "h", "1"),
        [f"{BATCH}-00000", f"{BATCH}-99999"],
        [BATCH, f"{BATCH}-0000", f"{BATCH}-000000"],
    ),
    "mark": (encode, [0, 1, MAX_MARK], [-1, MAX_MARK + 1]),
    "seq of an object": (lambda seq: encode(seq=seq), [1, MAX_INTEGER], [-1, MAX_INTEGER + 1]),
    "epoch of an object": (lambda e: encode(epoch=e), [0, MAX_INTEGER], [-1, MAX_INTEGER + 1]),
    "format of an object": (lambda f: encode(format=f), [1, MAX_FORMAT], [-1, MAX_FORMAT + 1]),
    "trail of an object": (
        lambda trail: encode(trail=trail),
        [NONCE, FULL_TRAIL],
        ["", f"{FULL_TRAIL} {NONCE}"],
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_is_exact(name: str) -> None:
    """To the last number, byte and character, at both ends."""
    check, accepted, refused = LIMITS[name]
    for value in accepted:
        check(value)
    for value in refused:
        with pytest.raises((Invalid, Corrupt)):
            check(value)
