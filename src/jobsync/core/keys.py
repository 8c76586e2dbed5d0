"""The names of records: legal on every store, and in the same order on each.

A key is 1 to 8 segments joined by `/`; a prefix is a key's beginning and ends in `/`.
Segments are made of letters, digits and `! - . = _ ~`. Whatever a user names goes
through `escape`, whose result sorts exactly as the UTF-8 bytes of the original, so that
"list in order" means one thing everywhere.

How the escape keeps the order: letters, digits and `-` stand for themselves. Each gap
between those in ASCII has one lead character that lies in the gap and announces an
escaped byte: `!` below `-`, `.` for `.` and `/`, `=` from `:` to `@`, `_` from `[` to
the back-tick, `~` above `z`.
"""

import re

from jobsync.errors import Corrupt, Invalid

__all__ = [
    "MAX_KEY",
    "MAX_SEGMENT",
    "MAX_SEGMENTS",
    "check_key",
    "check_prefix",
    "escape",
    "parent",
    "unescape",
]

MAX_SEGMENTS = 8
MAX_SEGMENT = 200
MAX_KEY = 700

_SEGMENT = rf"(?!\.\.?(?:/|\Z))[!.0-9=A-Z_a-z~-]{{1,{MAX_SEGMENT}}}"
_is_key = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT}){{0,{MAX_SEGMENTS - 1}}}").fullmatch
_is_prefix = re.compile(rf"(?:{_SEGMENT}/){{1,{MAX_SEGMENTS - 1}}}").fullmatch
_find_strange = re.compile(r"[^!.0-9=A-Z_a-z~/-]").search


def _images() -> dict[int, str]:
    """Give each byte its escaped form; `str.translate` applies it to latin-1 text."""
    literal = "-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    images = {}
    for byte in range(256):
        if byte < ord("-"):
            image = f"!{byte:02X}"
        elif chr(byte) in literal:
            image = chr(byte)
        elif byte < ord("0"):
            image = f".{byte & 15:X}"
        elif byte < ord("A"):
            image = f"={byte:02X}"
        elif byte < ord("a"):
            # Snake case stays readable: `_` doubles, its neighbours get one letter.
            image = "_" + "BCDE_a"[byte - ord("[")]
        else:
            image = f"~{byte:02X}"
        images[byte] = image
    return images


_IMAGES = _images()
_BYTES = {image: byte for byte, image in _IMAGES.items() if byte}
_is_literal = re.compile(rf"[-0-9A-Za-z]{{1,{MAX_SEGMENT}}}").fullmatch
_find_images = re.compile(r"!..|\..|=..|_.|~..|[-0-9A-Za-z]", re.DOTALL).findall


def escape(text: str, field: str = "id") -> str:
    """Turn any text into a segment that sorts as the text's UTF-8 bytes do.

    Raises:
        Invalid: it is empty, holds NUL or a lone surrogate, or is too long.
    """
    if _is_literal(text):
        return text
    if not text:
        raise Invalid(field, text, "is empty", "give it at least one character")
    if "\0" in text:
        raise Invalid(field, text, "contains NUL", "remove it")
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise Invalid(field, text, "contains a lone surrogate", "decode it properly") from None
    segment = raw.decode("latin-1").translate(_IMAGES)
    if len(segment) > MAX_SEGMENT:
        raise Invalid(
            field,
            text,
            f"takes {len(segment)} bytes when escaped, {MAX_SEGMENT} at most",
            "shorten it, or use a hash of it",
        )
    return segment


def unescape(segment: str) -> str:
    """Give the text that `escape` was given.

    Raises:
        Corrupt: `escape` never made this segment.
    """
    images = _find_images(segment)
    try:
        text = bytes(_BYTES[image] for image in images).decode()
    except (KeyError, UnicodeDecodeError):
        text = ""
    if not text or len(segment) > MAX_SEGMENT or "".join(images) != segment:
        raise Corrupt(segment, "not an escaped name")
    return text


def parent(key: str) -> str:
    """Give the prefix that lists a key."""
    return key[: key.rfind("/") + 1]


def check_key(key: str, field: str = "key", *, room: int = MAX_KEY) -> None:
    """Refuse a key that some store could not keep.

    Raises:
        Invalid: names what is wrong with it.
    """
    if not (_is_key(key) and len(key) <= room):
        raise _explain(key, key.split("/"), field, room, segments=MAX_SEGMENTS)


def check_prefix(prefix: str, *, room: int = MAX_KEY) -> None:
    """Refuse a prefix that lists no level of keys.

    Raises:
        Invalid: names what is wrong with it.
    """
    if _is_prefix(prefix) and len(prefix) <= room:
        return
    if not prefix.endswith("/"):
        raise Invalid("prefix", prefix, "does not end in '/'", "add it: a prefix lists one level")
    raise _explain(prefix, prefix[:-1].split("/"), "prefix", room, segments=MAX_SEGMENTS - 1)


def _explain(key: str, parts: list[str], field: str, room: int, *, segments: int) -> Invalid:
    if strange := _find_strange(key):
        problem = f"contains {strange.group()!r}"
        fix = "pass user-given names through escape()"
    elif "" in parts:
        problem, fix = "has an empty segment", "write a/b, not /a, a/ or a//b"
    elif "." in parts or ".." in parts:
        problem, fix = "has '.' or '..' as a segment", "pass user-given names through escape()"
    elif len(parts) > segments:
        problem, fix = f"has {len(parts)} segments, {segments} at most", "use fewer levels"
    elif max(map(len, parts)) > MAX_SEGMENT:
        longest = max(map(len, parts))
        problem = f"has a segment of {longest} bytes, {MAX_SEGMENT} at most"
        fix = "shorten it, or use a hash of it"
    else:
        problem, fix = f"is {len(key)} bytes long, {room} at most", "shorten it"
    return Invalid(field, key, problem, fix)
