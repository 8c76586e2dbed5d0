"""The parts of a URL, whichever store it names: user, password, host, port, path and parameters.

All parts are percent-decoded. A password may contain a literal `@`, but not `/`, `?` or `#`: it
could be read in two ways, and is refused. No error shows a secret.
"""

import re
from collections.abc import Collection
from urllib.parse import unquote

import msgspec

from jobsync.core.secrets import is_name, redact, split_address, split_parts
from jobsync.errors import Invalid, closest_name

__all__ = [
    "UrlParts",
    "find_illegal",
    "read_params",
    "read_port",
    "refuse",
    "split_url",
    "unquote_part",
]

_MAX_PORT = 65535

find_illegal = re.compile("[\x00-\x1f\x7f\ud800-\udfff]").search
"""Finds a control character or a lone surrogate, which no URL may have."""


def refuse(text: str, problem: str, fix: str) -> Invalid:
    """Return the error about a URL, without its secrets."""
    return Invalid("url", redact(text), problem, fix)


class UrlParts(msgspec.Struct, frozen=True):
    """The parts of a URL. User and password are decoded, the rest is as written."""

    text: str
    user: str
    password: str
    host: str
    port: int | None
    path: str
    query: str

    def __repr__(self) -> str:
        return f"UrlParts({redact(self.text)!r})"


def split_url(text: str, rest: str) -> UrlParts:
    """Split a URL, given whole and without its scheme.

    Raises:
        Invalid: it could be read in two ways, or has no valid address.
    """
    authority, path, query, fragment = split_parts(rest)
    if "@" in rest[len(authority) :]:
        raise refuse(
            text,
            "must not have an '@' after a '/', '?' or '#'",
            "percent-encode these in a password or value: %40, %2F, %3F, %23",
        )
    if fragment:
        raise refuse(text, "must not contain '#'", "write it as %23")
    userinfo, _, address = authority.rpartition("@")
    user, _, password = userinfo.partition(":")
    host, port = _read_address(text, address)
    return UrlParts(
        text, unquote_part(text, user), unquote_part(text, password), host, port, path, query
    )


def _read_address(text: str, address: str) -> tuple[str, int | None]:
    parts = split_address(address)
    if not parts:
        raise refuse(
            text,
            "must have a host, or host:port, after '://' or '@'",
            "write one host, then a number for its port; end a password with '@'",
        )
    host, port = parts.groups()
    return host, read_port(text, port) if port else None


def read_port(text: str, port: str) -> int:
    """Return the number of a port.

    Raises:
        Invalid: it is not one.
    """
    if not (port.isascii() and port.isdecimal() and 1 <= int(port[:6]) <= _MAX_PORT):
        raise refuse(text, f"must have a port of 1 to {_MAX_PORT}", "correct the number")
    return int(port)


def read_params(text: str, query: str, known: Collection[str] | None = None) -> dict[str, str]:
    """Read a query.

    Raises:
        Invalid: a name occurs twice, or without a value, or is not known unless `known` is None.
    """
    params: dict[str, str] = {}
    for pair in filter(None, query.split("&")):
        # Not `parse_qsl`: it turns '+' into a blank, which libpq does not.
        name, equals, value = pair.partition("=")
        if not (equals and is_name(name)):
            raise refuse(
                text, "must not have a parameter without a name or value", "write ?name=value"
            )
        if known is not None and name not in known:
            raise _describe_unknown_parameter(text, name, known)
        if name in params:
            raise refuse(text, f"must not have {name!r} twice", "keep one of the two")
        params[name] = unquote_part(text, value)
    return params


def _describe_unknown_parameter(text: str, name: str, known: Collection[str]) -> Invalid:
    hint = closest_name(name, known)
    if hint:
        fix = f"did you mean {hint}?"
    else:
        fix = f"use only {', '.join(known)}" if known else "remove it: this store has no parameters"
    return refuse(text, f"has the unknown parameter {name!r}", fix)


def unquote_part(text: str, part: str) -> str:
    """Return a part of a URL without its percent-encoding.

    Raises:
        Invalid: it encodes bytes that are not text.
    """
    try:
        decoded = unquote(part, errors="strict")
    except UnicodeDecodeError:
        decoded = "\0"
    # Not raised within `except`: the error would carry the part as its context.
    if find_illegal(decoded):
        raise refuse(
            text,
            "must not have percent-encoded bytes that are not text",
            "encode it as UTF-8, without %00",
        )
    return decoded
