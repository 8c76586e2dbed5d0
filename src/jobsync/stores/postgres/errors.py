"""What the errors of a PostgreSQL server mean, in words that hide every secret of the URL."""

import psycopg

from jobsync.core.secrets import MASK
from jobsync.core.urls import PostgresUrl
from jobsync.errors import JobsyncError, Misconfigured, Unavailable

__all__ = ["SCHEMA_FIX", "explain", "explain_refusal", "first_line", "hide"]

SCHEMA_FIX = "run `jobsync schema URL` and have an administrator apply it"

_REACH = "check that the server runs and can be reached"


def first_line(url: PostgresUrl, error: psycopg.Error) -> str:
    """Give what an error says first."""
    return hide(url, (str(error).strip() or type(error).__name__).splitlines()[0])


def hide(url: PostgresUrl, text: str) -> str:
    """Mask whatever in a text is a secret of the URL."""
    secrets = [value.reveal() for _, value in url.params]
    if url.password is not None:
        secrets.append(url.password.reveal())
    for secret in filter(None, secrets):
        text = text.replace(secret, MASK)
    return text


def explain(url: PostgresUrl, error: psycopg.Error) -> JobsyncError:
    """Say what an error means that kept a statement from happening."""
    name = str(url)
    match error.sqlstate or "":
        case "":
            return Unavailable(name, first_line(url, error), _REACH)
        case "25006":
            return Unavailable(
                name,
                "the server takes no writes; it may be a standby since a failover",
                "point the url to the primary",
            )
        case "42501" | "42P01" | "42703" | "3F000":
            problem = f"lacks a table or a right: {first_line(url, error)}"
            return Misconfigured("url", name, problem, SCHEMA_FIX)
        case "57014" | "55P03":
            return Unavailable(
                name,
                "the server's own time limit ended the statement; nothing was written",
                "raise statement_timeout and lock_timeout of this role",
            )
        case "53100":
            return Unavailable(
                name, "the server's disk is full; nothing was written", "free some space"
            )
        case state if state[:2] in {"08", "53", "55", "57", "58", "XX"}:
            return Unavailable(name, first_line(url, error), "look into the server's log")
        case _:
            return Misconfigured(
                "url",
                name,
                first_line(url, error),
                "check that nobody else changed jobsync's tables",
            )


def explain_refusal(url: PostgresUrl, error: psycopg.Error) -> JobsyncError:
    """Say why no connection was made. The server gives no code then, only words."""
    name, text = str(url), str(error)
    if error.pgconn is not None and error.pgconn.needs_password:
        return Misconfigured("url", name, "needs a password", "write user:password@ in it")
    for words, problem, fix in _REFUSALS:
        if words in text:
            return Misconfigured("url", name, problem, fix)
    if "too many c" in text or "connection slots" in text:
        return Unavailable(
            name,
            "the server has no connection left",
            "raise its max_connections, or put PgBouncer in front",
        )
    return Unavailable(name, first_line(url, error), _REACH)


_REFUSALS = (
    (
        "authentication failed",
        "is refused: wrong user or password",
        "correct user:password@ in it",
    ),
    ("no pg_hba.conf entry", "is refused by pg_hba.conf", "let this user in from this host"),
    ('" does not exist', "names a database or user that does not exist", "create it first"),
    ("is not permitted to log in", "names a role that may not log in", "ALTER ROLE … LOGIN"),
    ("permission denied for database", "names a database closed to this user", "GRANT CONNECT"),
    ("does not support SSL", "asks for TLS, which the server has not", "set sslmode"),
    ("certificate", "meets a certificate that does not fit", "correct sslmode and sslrootcert"),
)
