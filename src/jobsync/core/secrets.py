"""Secrets, and URLs in a form that may be shown to anybody.

Where a text is too broken to identify the secret part, more is hidden rather than less.
"""

import re
from typing import Any, NoReturn

__all__ = ["MASK", "Secret", "is_name", "redact", "split_address", "split_parts", "split_scheme"]

MASK = "***"
"""Shown in place of a secret."""


class Secret:
    """A password, a key or a token. Immutable; equal to another one of the same text.

    Only `reveal()` returns the text: no repr, log or message shows it. A plain class and not a
    struct, so that no encoder writes it out by accident.

    Args:
        text: the secret.
    """

    __slots__ = ("_text",)

    _text: str

    def __init__(self, text: str) -> None:
        object.__setattr__(self, "_text", text)

    def reveal(self) -> str:
        """Return the text. Call it where the text is used, and do not keep the result."""
        return self._text

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a Secret cannot be changed")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a Secret cannot be changed")

    def __repr__(self) -> str:
        return MASK

    def __format__(self, spec: str) -> str:
        # A spec could cut or pad; the mask's width must reveal nothing.
        return MASK

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Secret) else NotImplemented

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> tuple[Any, ...]:
        # The default restores by assignment, which is refused above.
        return (Secret, (self._text,))


# Query parameters that hold no secret. All others are hidden, known or not.
_VISIBLE = {
    *("application_name", "connect_timeout", "dbname", "host", "hostaddr", "port", "prefix"),
    *("region", "schema", "sslmode", "target_session_attrs", "tls"),
}

split_scheme = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL).fullmatch
# A name, an IPv6 address, or the percent-encoded path of a socket; then a port.
split_address = re.compile(
    r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*|%2[Ff](?:[A-Za-z0-9._-]|%2[Ff])*)(?::([0-9]{0,5}))?"
).fullmatch
is_name = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}").fullmatch
_has_query = re.compile(r"\?.*=", re.DOTALL).search
_has_punctuation = re.compile(r"[:=?@#]").search


def redact(text: str) -> str:
    """Return a URL, even a malformed one, in a form that may be shown to anybody.

    Everything between `://` and the last `@` is hidden, and so is every query value that is
    not known to be harmless.
    """
    match = split_scheme(text)
    if not match:
        # It may be `user:password@host` or libpq's `password=…`.
        return MASK if _has_punctuation(text) else text
    scheme, rest = match.groups()
    hidden, at, shown = rest.rpartition("@")
    address, path, query, fragment = split_parts(shown)
    # An `@` within a query value leaves the end of a secret on its right; anything but a port
    # after a host is a password whose `@` was forgotten.
    if _has_query(hidden) or not split_address(address):
        return f"{scheme}://{MASK}"
    user = f"{MASK}@" if at else ""
    # Without empty pairs: '&&' may be a password.
    pairs = "&".join(_redact_pair(pair) for pair in query.split("&") if pair)
    tail = f"{'?' if pairs else ''}{pairs}{'#' + MASK if fragment else ''}"
    return f"{scheme}://{user}{address}{path}{tail}"


def _redact_pair(pair: str) -> str:
    name, equals, _ = pair.partition("=")
    if name in _VISIBLE:
        return pair
    return f"{name}={MASK}" if equals and is_name(name) else MASK


def split_parts(rest: str) -> tuple[str, str, str, str]:
    """Return address, path, query and fragment; the fragment with its '#', if there is one."""
    rest, hash_, fragment = rest.partition("#")
    rest, _, query = rest.partition("?")
    address, slash, path = rest.partition("/")
    return address, slash + path, query, hash_ + fragment
