"""URLs in a form that may be shown to anybody.

Where a text is too broken to tell which part is the secret, more is hidden rather than
less.
"""

import re
from typing import Any, NoReturn

__all__ = ["MASK", "Secret", "is_name", "redact", "split_address", "split_scheme", "take_apart"]


# Text that does not show itself. Only `reveal()` gives it: no repr, log or message does.
#
# A plain class and not a struct, so that no encoder writes it out by accident.


MASK = "***"
"""What stands wherever a secret would have been shown."""


class Secret:
    """A password, a key or a token. Immutable; equal to another one of the same text.

    Args:
        text: what to hide.
    """

    __slots__ = ("_text",)

    _text: str

    def __init__(self, text: str) -> None:
        object.__setattr__(self, "_text", text)

    def reveal(self) -> str:
        """Give the text. Call it where the text is used, and keep the result nowhere."""
        return self._text

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a Secret cannot be changed")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a Secret cannot be changed")

    def __repr__(self) -> str:
        return MASK

    def __format__(self, spec: str) -> str:
        # A spec could cut or pad; the mask's width must tell nothing either way.
        return MASK

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Secret) else NotImplemented

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> tuple[Any, ...]:
        # The default restores by assignment, which is refused above.
        return (Secret, (self._text,))


# Query values that hold no secret. All others are hidden, known or not.
_VISIBLE = frozenset(
    {
        "application_name",
        "connect_timeout",
        "dbname",
        "host",
        "hostaddr",
        "port",
        "prefix",
        "region",
        "schema",
        "sslmode",
        "target_session_attrs",
        "tls",
    }
)

split_scheme = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL).fullmatch
# A name, an IPv6 address, or the percent-encoded path of a socket; then a port.
split_address = re.compile(
    r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*|%2[Ff](?:[A-Za-z0-9._-]|%2[Ff])*)(?::([0-9]{0,5}))?"
).fullmatch
is_name = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}").fullmatch
_has_query = re.compile(r"\?.*=", re.DOTALL).search
_has_punctuation = re.compile(r"[:=?@#]").search


def redact(text: str) -> str:
    """Give a URL, however malformed, in a form that may be shown to anybody.

    What stands between `://` and the last `@` is hidden, and so is every query value
    that is not known to be harmless.
    """
    found = split_scheme(text)
    if not found:
        # It may be `user:password@host` or libpq's `password=…`: nothing tells.
        return MASK if _has_punctuation(text) else text
    scheme, rest = found.groups()
    hidden, at, shown = rest.rpartition("@")
    address, path, query, fragment = take_apart(shown)
    # An `@` within a query value leaves the end of a secret on its right; what is not a
    # port after a host is a password whose `@` was forgotten.
    if _has_query(hidden) or not split_address(address):
        return f"{scheme}://{MASK}"
    user = f"{MASK}@" if at else ""
    # Without empty pairs: a password of nothing but '&' is one too.
    pairs = "&".join(_redact_pair(pair) for pair in query.split("&") if pair)
    tail = f"{'?' if pairs else ''}{pairs}{'#' + MASK if fragment else ''}"
    return f"{scheme}://{user}{address}{path}{tail}"


def _redact_pair(pair: str) -> str:
    name, equals, _ = pair.partition("=")
    if name in _VISIBLE:
        return pair
    return f"{name}={MASK}" if equals and is_name(name) else MASK


def take_apart(rest: str) -> tuple[str, str, str, str]:
    """Give address, path, query and fragment; the fragment with its '#', to tell an empty one."""
    rest, sharp, fragment = rest.partition("#")
    rest, _, query = rest.partition("?")
    address, slash, path = rest.partition("/")
    return address, slash + path, query, sharp + fragment
