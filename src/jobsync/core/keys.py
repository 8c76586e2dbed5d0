"""Keys of records: legal on every store, and in the same order on each.

A key is 1 to 8 segments joined by `/`; a prefix is the beginning of a key and ends in `/`.
Segments consist of letters, digits and `! - . = _ ~`. Every name from a user goes through
`escape`, whose result sorts exactly as the UTF-8 bytes of the original, so that "list in
order" means the same everywhere.

How the escape keeps the order: letters, digits and `-` are unchanged. Each gap between
those in ASCII has one lead character that lies in the gap and starts an escaped byte: `!`
below `-`, `.` for `.` and `/`, `=` from `:` to `@`, `_` from `[` to
the back-tick, `~` above `z`.
"""

import re
from typing import Annotated, TypeAlias

import msgspec

from jobsync.errors import Corrupt, Invalid

__all__ = [
    "MAX_KEY",
    "MAX_SEGMENT",
    "MAX_SEGMENTS",
    "KeySegment",
    "OptionalKeySegment",
    "check_key",
    "check_prefix",
    "escape",
    "is_segment",
    "parent",
    "unescape",
]

MAX_SEGMENTS = 8
MAX_SEGMENT = 200
MAX_KEY = 700

_SEGMENT = rf"(?!\.\.?(?:/|\Z))[!.0-9=A-Z_a-z~-]{{1,{MAX_SEGMENT}}}"

KeySegment: TypeAlias = Annotated[str, msgspec.Meta(pattern=rf"\A{_SEGMENT}\Z")]
"""A text of a record that is a segment of another key, such as a session: no other is read."""

OptionalKeySegment: TypeAlias = Annotated[str, msgspec.Meta(pattern=rf"\A(?:{_SEGMENT})?\Z")]
"""Likewise; empty for none."""

_is_segment = re.compile(_SEGMENT).fullmatch
_is_key = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT}){{0,{MAX_SEGMENTS - 1}}}").fullmatch
_is_prefix = re.compile(rf"(?:{_SEGMENT}/){{1,{MAX_SEGMENTS - 1}}}").fullmatch
_find_illegal = re.compile(r"[^!.0-9=A-Z_a-z~/-]").search


def _build_escapes() -> dict[int, str]:
    """Return the escaped form of each byte; `str.translate` applies it to latin-1 text."""
    literal = "-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    escapes = {}
    for byte in range(256):
        if byte < ord("-"):
            escaped = f"!{byte:02X}"
        elif chr(byte) in literal:
            escaped = chr(byte)
        elif byte < ord("0"):
            escaped = f".{byte & 15:X}"
        elif byte < ord("A"):
            escaped = f"={byte:02X}"
        elif byte < ord("a"):
            # Snake case stays readable: `_` doubles, its neighbours get one letter.
            escaped = "_" + "BCDE_a"[byte - ord("[")]
        else:
            escaped = f"~{byte:02X}"
        escapes[byte] = escaped
    return escapes


_ESCAPES = _build_escapes()
_BYTES = {escaped: byte for byte, escaped in _ESCAPES.items() if byte}
_is_literal = re.compile(rf"[-0-9A-Za-z]{{1,{MAX_SEGMENT}}}").fullmatch
_split_escapes = re.compile(r"!..|\..|=..|_.|~..|[-0-9A-Za-z]", re.DOTALL).findall


def escape(text: str, field: str = "id") -> str:
    """Return any text as a segment that sorts like the text's UTF-8 bytes.

    Raises:
        Invalid: it is empty, contains NUL or a lone surrogate, or is too long.
    """
    if _is_literal(text):
        return text
    if not text:
        raise Invalid(field, text, "must not be empty", "use at least one character")
    if "\0" in text:
        raise Invalid(field, text, "must not contain NUL", "remove it")
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise Invalid(
            field, text, "must not contain a lone surrogate", "decode it properly"
        ) from None
    segment = raw.decode("latin-1").translate(_ESCAPES)
    if len(segment) > MAX_SEGMENT:
        raise Invalid(
            field,
            text,
            f"must take at most {MAX_SEGMENT} bytes when escaped, and takes {len(segment)}",
            "shorten it, or use a hash of it",
        )
    return segment


def unescape(segment: str) -> str:
    """Return the text whose escaped form is the segment.

    Raises:
        Corrupt: `escape` cannot have returned this segment.
    """
    parts = _split_escapes(segment)
    try:
        text = bytes(_BYTES[part] for part in parts).decode()
    except (KeyError, UnicodeDecodeError):
        text = ""
    if not text or len(segment) > MAX_SEGMENT or "".join(parts) != segment:
        raise Corrupt(segment, "not an escaped name")
    return text


def parent(key: str) -> str:
    """Return the prefix that lists a key."""
    return key[: key.rfind("/") + 1]


def is_segment(text: str) -> bool:
    """Whether a text can be a segment of a key."""
    return _is_segment(text) is not None


def check_key(key: str, field: str = "key", *, room: int = MAX_KEY) -> None:
    """Check that every store can keep a key.

    Raises:
        Invalid: states what is wrong with it.
    """
    if not (_is_key(key) and len(key) <= room):
        raise _describe_bad_key(key, key.split("/"), field, room, segments=MAX_SEGMENTS)


def check_prefix(prefix: str, *, room: int = MAX_KEY) -> None:
    """Check that a prefix lists one level of keys.

    Raises:
        Invalid: states what is wrong with it.
    """
    if _is_prefix(prefix) and len(prefix) <= room:
        return
    if not prefix.endswith("/"):
        raise Invalid("prefix", prefix, "must end in '/'", "add it: a prefix lists one level")
    raise _describe_bad_key(
        prefix, prefix[:-1].split("/"), "prefix", room, segments=MAX_SEGMENTS - 1
    )


def _describe_bad_key(
    key: str, parts: list[str], field: str, room: int, *, segments: int
) -> Invalid:
    fix = "pass names from users through escape()"
    if illegal := _find_illegal(key):
        problem = f"must not contain {illegal.group()!r}"
    elif "" in parts:
        problem, fix = "must not have an empty segment", "write a/b, not /a, a/ or a//b"
    elif "." in parts or ".." in parts:
        problem = "must not have '.' or '..' as a segment"
    elif len(parts) > segments:
        problem = f"must have at most {segments} segments, and has {len(parts)}"
        fix = "use fewer levels"
    elif (longest := max(map(len, parts))) > MAX_SEGMENT:
        problem = f"must have segments of at most {MAX_SEGMENT} bytes, and has one of {longest}"
        fix = "shorten it, or use a hash of it"
    else:
        problem = f"must be at most {room} bytes long, and is {len(key)}"
        fix = "shorten it"
    return Invalid(field, key, problem, fix)
