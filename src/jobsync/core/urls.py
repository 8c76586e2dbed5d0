"""Store URLs: which store, and where, without showing a secret.

No repr, no str and no error made here shows a password, a key, or a query value that might be
one. Where a text is too broken to identify the secret part, more is hidden rather than less.

    memory://                    private to its opener; memory://name is shared by name
    sqlite:///jobs.db            relative to the working directory; four slashes: absolute
    postgresql://user:password@host:5432/database?schema=…&sslmode=…
    s3://KEY:SECRET@bucket/prefix           Amazon's own
    s3://KEY:SECRET@host:port/bucket/prefix any other; a port, localhost or an IP marks a host
    gs://bucket/prefix           az://container/prefix

All parts are percent-decoded, see `core.url_parts`.
"""

import ipaddress
import re
from collections.abc import Mapping
from typing import Literal, TypeAlias
from urllib.parse import quote

import msgspec

from jobsync.core.keys import check_prefix
from jobsync.core.secrets import MASK, Secret, redact, split_address, split_parts, split_scheme
from jobsync.core.url_parts import (
    UrlParts,
    find_illegal,
    read_params,
    read_port,
    refuse,
    split_url,
    unquote_part,
)
from jobsync.errors import Invalid, Misconfigured, closest_name

__all__ = [
    "MAX_PREFIX",
    "MemoryUrl",
    "ObjectsUrl",
    "PostgresUrl",
    "SqliteUrl",
    "StoreUrl",
    "parse_url",
]

MAX_PREFIX = 300
"""The longest prefix within a bucket, in bytes: it leaves most of a key's 700 bytes."""

_DEFAULT_REGION = "us-east-1"
_MAX_IDENTIFIER = 63  # PostgreSQL cuts longer names without an error.

_SCHEMES = ("memory", "sqlite", "postgresql", "postgres", "s3", "gs", "az")
_EXAMPLES = "memory://, sqlite:///path, postgresql://…, s3://…, gs://… or az://…"
_S3_EXAMPLES = "s3://bucket/prefix or s3://KEY:SECRET@host:port/bucket/prefix"

_is_bucket = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,221}").fullmatch
# A path, without what separates or hides a user, a password or a parameter.
_is_harmless = re.compile(r"[^:=?@#%&]+").fullmatch
_is_label = re.compile(r"[A-Za-z0-9._-]*").fullmatch


class _Url(msgspec.Struct, frozen=True):
    """Base class of URLs: the repr is as safe as the str."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class MemoryUrl(_Url, frozen=True):
    """A store within this process. Without a name it is private to its opener."""

    name: str = ""

    def __str__(self) -> str:
        return f"memory://{self.name}"


class SqliteUrl(_Url, frozen=True):
    """A SQLite file. A relative path starts at the working directory."""

    path: str

    def __str__(self) -> str:
        return f"sqlite:///{quote(self.path, safe='/:')}"


class PostgresUrl(_Url, frozen=True, kw_only=True):
    """A PostgreSQL database. Empty parts are left to libpq and the server.

    All values of `params` are secrets: which of libpq's parameters holds one (`sslpassword`,
    `oauth_client_secret`, …) changes between its versions.
    """

    user: str = ""
    password: Secret | None = None
    host: str = ""
    port: int | None = None
    database: str = ""
    schema: str = ""
    params: tuple[tuple[str, Secret], ...] = ()

    def reveal(self) -> str:
        """Return the complete URL for libpq, with the password, without our own `schema`."""
        return self._compose({})

    def __str__(self) -> str:
        return redact(self._compose({"schema": self.schema} if self.schema else {}))

    def _compose(self, extra: Mapping[str, str]) -> str:
        query = dict(extra)
        address = f"[{self.host}]" if ":" in self.host else self.host
        if not split_address(address):
            # The path of a socket or a list of hosts cannot stand before the first slash.
            query["host"], address = self.host, ""
        if self.port is not None:
            address += f":{self.port}"
        if self.password is not None:
            address = f"{_quote(self.user)}:{_quote(self.password.reveal())}@{address}"
        elif self.user:
            address = f"{_quote(self.user)}@{address}"
        query.update((name, value.reveal()) for name, value in self.params)
        pairs = "&".join(f"{_quote(name)}={_quote(value)}" for name, value in query.items())
        return f"postgresql://{address}/{_quote(self.database)}{'?' if pairs else ''}{pairs}"


class ObjectsUrl(_Url, frozen=True, kw_only=True):
    """A bucket, or the part of one below a prefix.

    An empty `endpoint` is the provider's own. Without `key` and `secret` the client library
    finds credentials in the provider's usual places.
    """

    provider: Literal["s3", "gs", "az"]
    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    key: Secret | None = None
    secret: Secret | None = None
    token: Secret | None = None

    def __str__(self) -> str:
        scheme, _, host = self.endpoint.partition("://")
        user = f"{MASK}@" if self.key else ""
        path = "/".join(part for part in (host, self.bucket, self.prefix) if part)
        shown = {
            "region": self.region if self.region != _DEFAULT_REGION else "",
            "tls": "false" if scheme == "http" else "",
        }
        pairs = "&".join(f"{name}={_quote(value)}" for name, value in shown.items() if value)
        return f"{self.provider}://{user}{path}{'?' if pairs else ''}{pairs}"


def _quote(text: str) -> str:
    return quote(text, safe="")


StoreUrl: TypeAlias = MemoryUrl | SqliteUrl | PostgresUrl | ObjectsUrl


def parse_url(text: str, environ: Mapping[str, str] = {}) -> StoreUrl:
    """Read a store's URL. The environment supplies the missing parts of an `s3://` URL.

    Raises:
        Invalid: the text is not the URL of a store; states how to write it, without secrets.
        Misconfigured: a variable of the environment is wrong; names it.
    """
    if find_illegal(text):
        raise refuse(text, "must not contain a control character or a lone surrogate", "remove it")
    parts = split_scheme(text)
    if not parts:
        raise _describe_missing_scheme(text)
    scheme, rest = parts.groups()
    match scheme.lower():
        case "memory":
            return _read_memory(text, rest)
        case "sqlite":
            return _read_sqlite(text, rest)
        case "postgresql" | "postgres":
            return _read_postgres(split_url(text, rest))
        case "s3":
            return _read_s3(split_url(text, rest), environ)
        case "gs":
            return _read_bucket(split_url(text, rest), "gs")
        case "az":
            return _read_bucket(split_url(text, rest), "az")
        case other:
            hint = closest_name(other, _SCHEMES)
            fix = f"did you mean {hint}://?" if hint else f"use one of {_EXAMPLES}"
            raise refuse(text, f"has the unknown scheme {other!r}", fix)


def _describe_missing_scheme(text: str) -> Invalid:
    scheme = text.partition(":")[0].lower()
    if text in _SCHEMES:
        fix = f"did you mean {text}://?"
    elif scheme in _SCHEMES and ":" in text:
        start = f"{scheme}:///" if scheme == "sqlite" else f"{scheme}://"
        problem = f"must have {start.partition(':')[2]} after {scheme}:"
        rest = text.partition(":")[2]
        if not _is_harmless(rest):
            return refuse(text, problem, f"write {start}…")
        # One slash before a file is that of an absolute path.
        rest = rest if scheme == "sqlite" else rest.lstrip("/")
        return Invalid("url", text, problem, f"write {start}{rest}")
    elif redact(text) == text and ("." in text or "/" in text):
        fix = f"did you mean sqlite:///{text}?"
    else:
        fix = f"start it with {_EXAMPLES}"
    return refuse(text, "has no scheme", fix)


def _read_memory(text: str, rest: str) -> MemoryUrl:
    name, _, query = rest.partition("?")
    # Before the query: a '?' in a password must not turn its end into a parameter.
    if not _is_label(name):
        raise refuse(
            text, "must have a plain name", "use letters, digits, '.', '_' and '-': memory://name"
        )
    read_params(text, query, ())
    return MemoryUrl(name)


def _read_sqlite(text: str, rest: str) -> SqliteUrl:
    host, path, query, fragment = split_parts(rest)
    if fragment:
        raise refuse(text, "must not contain '#'", "write it as %23")
    if host:
        hint = f"did you mean sqlite:///{rest}?" if redact(text) == text else ""
        raise refuse(text, "must have three slashes", hint or "write sqlite:///path")
    read_params(text, query, ())
    file = unquote_part(text, path[1:])
    if ":memory:" in file:
        raise refuse(
            text, "must name a file: each connection would have its own database", "use memory://"
        )
    if not file or file.endswith("/"):
        raise refuse(
            text, "must name a file", "write sqlite:///jobs.db, or use memory:// to keep nothing"
        )
    return SqliteUrl(file)


def _read_postgres(parts: UrlParts) -> PostgresUrl:
    text = parts.text
    params = read_params(text, parts.query)
    schema = params.pop("schema", "")
    if len(schema.encode()) > _MAX_IDENTIFIER:
        raise refuse(text, f"must have a schema of at most {_MAX_IDENTIFIER} bytes", "shorten it")
    values = {
        "user": parts.user,
        "password": parts.password,
        "host": unquote_part(text, parts.host).strip("[]"),
        "port": str(parts.port or ""),
        "dbname": unquote_part(text, parts.path[1:]),
    }
    for name in values.keys() & params.keys():
        if values[name]:
            raise refuse(text, f"must not have {name!r} twice", "keep one of the two")
        # A list of ports belongs to a list of hosts; libpq reads both.
        if name != "port" or "," not in params[name]:
            values[name] = params.pop(name)
    return PostgresUrl(
        user=values["user"],
        password=Secret(values["password"]) if values["password"] else None,
        host=values["host"],
        port=read_port(text, values["port"]) if values["port"] else None,
        database=values["dbname"],
        schema=schema,
        params=tuple((name, Secret(value)) for name, value in params.items()),
    )


def _read_s3(parts: UrlParts, environ: Mapping[str, str]) -> ObjectsUrl:
    params = read_params(parts.text, parts.query, ("region", "tls"))
    path = unquote_part(parts.text, parts.path).strip("/")
    if _has_host(parts):
        endpoint = _build_endpoint(parts, params.get("tls"))
        bucket, _, prefix = path.partition("/")
    elif "tls" in params:
        raise refuse(
            parts.text,
            "must not have tls without a port or an IP: its host reads as a bucket",
            "add the port: s3://KEY:SECRET@host:port/bucket/prefix",
        )
    else:
        endpoint, bucket, prefix = _find_endpoint(environ), parts.host, path
    key, secret, token = _find_credentials(parts, environ)
    return ObjectsUrl(
        provider="s3",
        bucket=_check_bucket(parts.text, bucket, _S3_EXAMPLES),
        prefix=_check_prefix(parts.text, prefix),
        endpoint=endpoint,
        region=params.get("region")
        or environ.get("AWS_REGION")
        or environ.get("AWS_DEFAULT_REGION")
        or _DEFAULT_REGION,
        key=key,
        secret=secret,
        token=token,
    )


def _read_bucket(parts: UrlParts, provider: Literal["gs", "az"]) -> ObjectsUrl:
    text = parts.text
    read_params(text, parts.query, ())
    if parts.user or parts.password or parts.port:
        raise refuse(
            text,
            "must not have credentials or a port",
            f"write {provider}://bucket/prefix: its credentials come from the environment",
        )
    return ObjectsUrl(
        provider=provider,
        bucket=_check_bucket(text, parts.host, f"{provider}://bucket/prefix"),
        prefix=_check_prefix(text, unquote_part(text, parts.path)),
    )


def _check_bucket(text: str, bucket: str, example: str) -> str:
    if not bucket:
        raise refuse(text, "must name a bucket", f"write {example}")
    if not _is_bucket(bucket):
        raise refuse(
            text,
            "must have a bucket name that providers accept",
            "use 3 or more letters, digits, '.', '_' and '-'",
        )
    return bucket


def _check_prefix(text: str, path: str) -> str:
    prefix = path.strip("/")
    if not prefix:
        return ""
    if len(prefix.encode()) > MAX_PREFIX:
        raise refuse(text, f"must have a prefix of at most {MAX_PREFIX} bytes", "shorten it")
    try:
        check_prefix(f"{prefix}/")
    except Invalid as error:
        raise refuse(
            text,
            f"has a prefix that is not a key: it {error.problem}",
            "use a few short segments of letters, digits and ! - . = _ ~ between single slashes",
        ) from None
    return prefix


def _has_host(parts: UrlParts) -> bool:
    return parts.port is not None or parts.host == "localhost" or _read_ip(parts.host) is not None


def _read_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _build_endpoint(parts: UrlParts, tls: str | None) -> str:
    if not parts.host:
        raise refuse(parts.text, "must not have a port without a host", f"write {_S3_EXAMPLES}")
    ip = _read_ip(parts.host)
    match tls:
        case None:
            secure = not (parts.host == "localhost" or (ip is not None and ip.is_loopback))
        case "true" | "false":
            secure = tls == "true"
        case _:
            raise refuse(
                parts.text, "must have a tls of true or false", "write tls=true or tls=false"
            )
    port = f":{parts.port}" if parts.port else ""
    return f"{'https' if secure else 'http'}://{parts.host}{port}"


def _find_endpoint(environ: Mapping[str, str]) -> str:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if value := environ.get(name):
            scheme, _, rest = value.partition("://")
            address, path, query, fragment = split_parts(rest)
            known = scheme in ("http", "https") and address and split_address(address)
            if not known or query or fragment or path.strip("/"):
                raise Misconfigured(
                    name,
                    redact(value),
                    "must be the address of a server",
                    "write http://host:port or https://host",
                )
            return f"{scheme}://{address}"
    return ""


def _find_credentials(
    parts: UrlParts, environ: Mapping[str, str]
) -> tuple[Secret | None, Secret | None, Secret | None]:
    """Return key, secret and session token: all from the URL, or all from the environment."""
    if parts.user and parts.password:
        return Secret(parts.user), Secret(parts.password), None
    if parts.user or parts.password:
        present, missing = ("key", "secret") if parts.user else ("secret", "key")
        raise refuse(
            parts.text,
            f"must not have a {present} without a {missing}",
            "write s3://KEY:SECRET@…, or neither to read both from the environment",
        )
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    key, secret, token = (Secret(text) if (text := environ.get(n)) else None for n in names)
    if (key is None) is not (secret is None):
        present, missing = names[:2] if key else (names[1], names[0])
        problem = f"must be set, because {present} is"
        raise Misconfigured(missing, None, problem, "set both or neither")
    return key, secret, token if key else None
