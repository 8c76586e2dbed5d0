"""URLs in a form that may be shown to anybody.

Where a text is too broken to tell which part is the secret, more is hidden rather than
less.
"""

import re

from jobsync.core.secret import MASK

__all__ = ["is_name", "redact", "split_address", "split_scheme", "take_apart"]

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
