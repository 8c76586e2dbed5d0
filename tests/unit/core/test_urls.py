"""A URL names one store, and its secrets stay out of every message."""

import inspect
import traceback
from typing import Literal
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jobsync import errors
from jobsync.core import keys, url_parts, urls
from jobsync.core.secrets import Secret, redact
from jobsync.core.urls import (
    MAX_PREFIX,
    MemoryUrl,
    ObjectsUrl,
    PostgresUrl,
    SqliteUrl,
    parse_url,
)
from jobsync.errors import Invalid, JobsyncError, Misconfigured

AWS = {
    "AWS_ACCESS_KEY_ID": "AKENV",
    "AWS_SECRET_ACCESS_KEY": "env-secret",
    "AWS_SESSION_TOKEN": "env-token",
}


def refused(text: str, environ: dict[str, str] | None = None) -> Invalid:
    """Return the error of a URL that is refused."""
    with pytest.raises(Invalid) as caught:
        parse_url(text, environ or {})
    assert caught.value.field == "url"
    return caught.value


def postgres(text: str) -> PostgresUrl:
    """Read a URL that names a PostgreSQL database."""
    url = parse_url(text)
    assert isinstance(url, PostgresUrl)
    return url


def objects(text: str, environ: dict[str, str] | None = None) -> ObjectsUrl:
    """Read a URL that names a bucket."""
    url = parse_url(text, environ or {})
    assert isinstance(url, ObjectsUrl)
    return url


def everything_said_by(error: BaseException) -> str:
    """Return all that a log or a crash reporter would show, with causes and contexts."""
    said = []
    link: BaseException | None = error
    while link is not None:
        fields = [str(v) for v in vars(link).values()]
        said += [str(link), repr(link), *fields, *traceback.format_exception_only(link)]
        link = link.__cause__ or link.__context__
    return "\n".join(said)


# Memory and SQLite


@pytest.mark.parametrize(("text", "name"), [("memory://", ""), ("memory://shared-1", "shared-1")])
def test_memory_is_private_or_shared_by_name(text: str, name: str) -> None:
    """Without a name a memory store is private; the name is kept otherwise."""
    assert parse_url(text) == MemoryUrl(name)
    assert str(parse_url(text)) == text


@pytest.mark.parametrize("text", ["memory://a/b", "memory://a@b", "memory:///a", "memory://a b"])
def test_memory_takes_a_plain_name_only(text: str) -> None:
    """A path or a user in a memory URL is refused, with the form to use."""
    assert "memory://name" in refused(text).fix


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("sqlite:///jobs.db", "jobs.db"),
        ("sqlite:///a/b.db", "a/b.db"),
        ("sqlite:////var/lib/jobs.db", "/var/lib/jobs.db"),
        ("sqlite:///my%20jobs%23%3F.db", "my jobs#?.db"),
        ("sqlite:////home/me@corp/jobs.db", "/home/me@corp/jobs.db"),
        ("SQLite:///jobs.db", "jobs.db"),
    ],
)
def test_sqlite_slashes_mark_relative_and_absolute_paths(text: str, path: str) -> None:
    """Three slashes are relative, four absolute, and escapes are decoded."""
    url = parse_url(text)
    assert url == SqliteUrl(path)
    assert parse_url(str(url)) == url


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("sqlite://", "sqlite:///jobs.db"),
        ("sqlite:///", "sqlite:///jobs.db"),
        ("sqlite:////var/lib/", "sqlite:///jobs.db"),
        ("sqlite:///:memory:", "use memory://"),
        ("sqlite://foo.db", "did you mean sqlite:///foo.db?"),
        ("sqlite://var/foo.db", "did you mean sqlite:///var/foo.db?"),
        ("sqlite:///a#b.db", "%23"),
        ("sqlite:///a.db?timeout=5", "has no parameters"),
    ],
)
def test_sqlite_refusals_state_what_to_write(text: str, fix: str) -> None:
    """A SQLite URL without a file is refused with the right form."""
    assert fix in refused(text).fix


# PostgreSQL


def test_postgres_parts_are_decoded() -> None:
    """Each part of a PostgreSQL URL is found and percent-decoded."""
    url = postgres(
        "postgresql://me%40corp:p%3Aw%2F+%C3%A9@db.example:6432/my%20jobs?schema=fleet&sslmode=require"
    )
    assert url == PostgresUrl(
        user="me@corp",
        password=Secret("p:w/+é"),
        host="db.example",
        port=6432,
        database="my jobs",
        schema="fleet",
        params=(("sslmode", Secret("require")),),
    )
    assert url.reveal() == (
        "postgresql://me%40corp:p%3Aw%2F%2B%C3%A9@db.example:6432/my%20jobs?sslmode=require"
    )
    assert str(url) == "postgresql://***@db.example:6432/my%20jobs?schema=fleet&sslmode=require"
    assert repr(url) == f"PostgresUrl({str(url)!r})"


@pytest.mark.parametrize(
    ("text", "revealed"),
    [
        ("postgres://h/d", "postgresql://h/d"),
        ("postgresql://", "postgresql:///"),
        ("postgresql://u@[::1]:5432/d", "postgresql://u@[::1]:5432/d"),
        ("postgresql://%2Fvar%2Frun/d", "postgresql:///d?host=%2Fvar%2Frun"),
        ("postgresql:///d?host=/var/run", "postgresql:///d?host=%2Fvar%2Frun"),
        ("postgresql:///d?user=u&password=p&port=1", "postgresql://u:p@:1/d"),
        (
            "postgresql:///d?host=a,b&port=1,2",
            "postgresql:///d?host=a%2Cb&port=1%2C2",
        ),
        ("postgresql://u:a@b@h/d?schema=s", "postgresql://u:a%40b@h/d"),
        ("postgresql://u:a:b@h/d", "postgresql://u:a%3Ab@h/d"),
        ("postgresql://u:a+b@h/c+d", "postgresql://u:a%2Bb@h/c%2Bd"),
        ("postgresql://h/d?options=a+b%20c", "postgresql://h/d?options=a%2Bb%20c"),
        ("postgresql://h:1/d", "postgresql://h:1/d"),
        ("postgresql://h/d?port=65535", "postgresql://h:65535/d"),
    ],
)
def test_postgres_reveal_gives_libpq_the_same_place(text: str, revealed: str) -> None:
    """Aliases, sockets, IPv6, lists of hosts and query forms reach libpq, without our schema."""
    assert postgres(text).reveal() == revealed
    assert postgres(revealed).reveal() == revealed


def test_a_socket_is_a_host() -> None:
    """Both ways to write a socket's directory give the same URL."""
    assert postgres("postgresql://%2Fvar%2Frun/d") == postgres("postgresql:///d?host=/var/run")
    assert postgres("postgresql:///d?host=/var/run").host == "/var/run"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("postgresql://h:0/d", "port of 1 to 65535"),
        ("postgresql://h:65536/d", "port of 1 to 65535"),
        ("postgresql://h/d?port=655350", "port of 1 to 65535"),
        ("postgresql://h/d?port=655350000", "port of 1 to 65535"),
        ("postgresql://h/d?port=0", "port of 1 to 65535"),
        ("postgresql://h/d?port=%D9%A3", "port of 1 to 65535"),
        ("postgresql://h/d?port=" + "9" * 5000, "port of 1 to 65535"),
        ("postgresql://h/d?port=%2B80", "port of 1 to 65535"),
        ("postgresql://h/d?port=x", "port of 1 to 65535"),
        ("postgresql://h:port/d", "host:port"),
        ("postgresql://a,b/d", "host"),
        ("postgresql://h/d?host=i", "'host' twice"),
        ("postgresql://h/d?sslmode=a&sslmode=b", "'sslmode' twice"),
        ("postgresql://h/d?sslmode", "without a name or value"),
        ("postgresql://h/d#x", "'#'"),
        ("postgresql://h/%ff", "not text"),
        ("postgresql://h/a%00b", "not text"),
        ("postgresql://h/a\nb", "control character"),
        (f"postgresql://h/d?schema={'s' * 64}", "63 bytes"),
        (f"postgresql://h/d?schema={'é' * 32}", "63 bytes"),
    ],
)
def test_postgres_refusals_name_the_problem(text: str, problem: str) -> None:
    """A URL that libpq or the server would misread is refused here."""
    assert problem in refused(text).problem


@pytest.mark.parametrize("odd", ["/", "?", "#"])
def test_an_ambiguous_password_must_be_encoded(odd: str) -> None:
    """A bare '/', '?' or '#' in a password is refused, with the encoding to use."""
    for text in (f"postgresql://u:pa{odd}wd@h/d", f"s3://KEY:pa{odd}wd@bucket"):
        error = refused(text)
        assert "%2F" in error.fix
        assert f"pa{odd}wd" not in everything_said_by(error)


# Object stores


@pytest.mark.parametrize(
    ("text", "bucket", "prefix", "endpoint"),
    [
        ("s3://K:S@bucket", "bucket", "", ""),
        ("s3://K:S@bucket/a/b/", "bucket", "a/b", ""),
        ("s3://K:S@my.dotted.bucket/a", "my.dotted.bucket", "a", ""),
        ("s3://K:S@host:9000/bucket//a/", "bucket", "a", "https://host:9000"),
        ("s3://K:S@localhost/bucket/a", "bucket", "a", "http://localhost"),
        ("s3://K:S@127.3.2.1:9000/bucket", "bucket", "", "http://127.3.2.1:9000"),
        ("s3://K:S@[::1]:9000/bucket", "bucket", "", "http://[::1]:9000"),
        ("s3://K:S@10.0.0.1/bucket", "bucket", "", "https://10.0.0.1"),
        ("s3://K:S@10.0.0.1/bucket?tls=false", "bucket", "", "http://10.0.0.1"),
        ("s3://K:S@localhost:1/bucket?tls=true", "bucket", "", "https://localhost:1"),
    ],
)
def test_s3_distinguishes_hosts_from_buckets(
    text: str, bucket: str, prefix: str, endpoint: str
) -> None:
    """A port, localhost or an IP marks a host; loopback uses http by default."""
    assert objects(text) == ObjectsUrl(
        provider="s3",
        bucket=bucket,
        prefix=prefix,
        endpoint=endpoint,
        region="us-east-1",
        key=Secret("K"),
        secret=Secret("S"),
    )


def test_s3_credentials_are_decoded_and_plus_is_kept() -> None:
    """A secret key with '/' encoded and '+' bare arrives as it was issued."""
    url = objects("s3://AK%2B:a%2Fb+c%40d@bucket")
    assert (url.key, url.secret) == (Secret("AK+"), Secret("a/b+c@d"))


def test_s3_reads_the_rest_from_the_environment() -> None:
    """Parts that the URL does not have come from Amazon's own variables."""
    environ = {**AWS, "AWS_DEFAULT_REGION": "eu-west-1", "AWS_ENDPOINT_URL": "http://s3:9000/"}
    url = objects("s3://bucket/p", environ)
    assert url == ObjectsUrl(
        provider="s3",
        bucket="bucket",
        prefix="p",
        endpoint="http://s3:9000",
        region="eu-west-1",
        key=Secret("AKENV"),
        secret=Secret("env-secret"),
        token=Secret("env-token"),
    )
    assert str(url) == "s3://***@s3:9000/bucket/p?region=eu-west-1&tls=false"


def test_s3_url_wins_over_the_environment() -> None:
    """A URL's own key, host and region are never mixed with the environment's."""
    environ = {**AWS, "AWS_REGION": "eu-west-1", "AWS_ENDPOINT_URL_S3": "http://other:1"}
    url = objects("s3://K:S@host:9000/bucket?region=auto", environ)
    assert (url.key, url.secret, url.token) == (Secret("K"), Secret("S"), None)
    assert (url.endpoint, url.region) == ("https://host:9000", "auto")


def test_s3_specific_variables_come_first() -> None:
    """AWS_REGION and AWS_ENDPOINT_URL_S3 win over their general forms."""
    url = objects(
        "s3://bucket",
        {
            "AWS_REGION": "a",
            "AWS_DEFAULT_REGION": "b",
            "AWS_ENDPOINT_URL_S3": "https://one",
            "AWS_ENDPOINT_URL": "https://two",
        },
    )
    assert (url.region, url.endpoint, url.key) == ("a", "https://one", None)


@pytest.mark.parametrize(
    ("name", "environ"),
    [
        ("AWS_SECRET_ACCESS_KEY", {"AWS_ACCESS_KEY_ID": "AK"}),
        ("AWS_ACCESS_KEY_ID", {"AWS_SECRET_ACCESS_KEY": "hunter2"}),
        ("AWS_ENDPOINT_URL", {"AWS_ENDPOINT_URL": "user:hunter2@host"}),
        ("AWS_ENDPOINT_URL", {"AWS_ENDPOINT_URL": "http://user:hunter2@host"}),
        ("AWS_ENDPOINT_URL", {"AWS_ENDPOINT_URL": "http://host/path"}),
    ],
)
def test_a_bad_environment_is_named(name: str, environ: dict[str, str]) -> None:
    """Half a credential or a malformed endpoint names the variable, and shows no secret."""
    with pytest.raises(Misconfigured) as caught:
        parse_url("s3://bucket", environ)
    assert caught.value.field == name
    assert "hunter2" not in everything_said_by(caught.value)


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        ("s3://", "must name a bucket", "s3://bucket/prefix"),
        ("s3:///p", "must name a bucket", "s3://bucket/prefix"),
        ("s3://K:S@localhost:9000/", "must name a bucket", "s3://bucket/prefix"),
        ("s3://K:S@:9000/bucket", "port without a host", "s3://bucket/prefix"),
        ("s3://K@bucket", "key without a secret", "s3://KEY:SECRET@"),
        ("s3://:S@bucket", "secret without a key", "s3://KEY:SECRET@"),
        ("s3://ab", "bucket name", "3 or more"),
        ("s3://bucket/a//b", "empty segment", "single slashes"),
        ("s3://bucket/a/../b", "'..'", "segments"),
        ("s3://bucket/a%20b", "must not contain ' '", "letters"),
        ("s3://bucket/p?regoin=x", "unknown parameter 'regoin'", "did you mean region?"),
        ("s3://localhost/bucket?tls=maybe", "tls of true or false", "tls=true"),
        ("s3://minio.lan/bucket?tls=false", "reads as a bucket", "host:port"),
        ("gs://", "must name a bucket", "gs://bucket/prefix"),
        ("az://K:S@container", "credentials", "az://bucket/prefix"),
        ("az://container:80", "port", "az://bucket/prefix"),
        ("az://K@container", "credentials", "az://bucket/prefix"),
        ("gs://K@bucket/p", "credentials", "gs://bucket/prefix"),
        ("gs://:S@bucket/p", "credentials", "gs://bucket/prefix"),
        ("gs://bucket:80/p", "port", "gs://bucket/prefix"),
        ("gs://bucket/p?region=x", "unknown parameter 'region'", "has no parameters"),
    ],
)
def test_object_store_refusals_state_what_to_write(text: str, problem: str, fix: str) -> None:
    """A malformed bucket is refused with the problem and the right form."""
    error = refused(text)
    assert problem in error.problem
    assert fix in error.fix


@pytest.mark.parametrize("provider", ["s3", "gs", "az"])
def test_names_of_buckets_have_a_length(provider: str) -> None:
    """Google's may have dots and 222 characters; each provider knows its own limit."""
    for name in ("abc", "a" * 63, f"{'a' * 110}.{'b' * 111}"):
        assert objects(f"{provider}://{name}/p").bucket == name
    for name in ("ab", "a" * 223):
        assert "bucket name that providers accept" in refused(f"{provider}://{name}/p").problem


def test_a_prefix_leaves_room_for_keys() -> None:
    """A prefix of 300 bytes is accepted, one byte more is refused."""
    longest = f"{'a' * 150}/{'b' * (MAX_PREFIX - 151)}"
    assert objects(f"s3://bucket/{longest}").prefix == longest
    assert "at most 300 bytes" in refused(f"s3://bucket/{longest}b").problem


@pytest.mark.parametrize("provider", ["gs", "az"])
def test_other_providers_name_a_bucket_and_a_prefix(provider: Literal["gs", "az"]) -> None:
    """Google's and Microsoft's URLs parse to the same kind, and nothing of Amazon's applies."""
    text = f"{provider}://bucket/a/b"
    url = objects(text, {**AWS, "AWS_REGION": "x"})
    assert url == ObjectsUrl(provider=provider, bucket="bucket", prefix="a/b")
    assert str(url) == text


# Schemes


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        (
            "mysql://u:p@h/d",
            "has the unknown scheme 'mysql'",
            "use one of memory://, sqlite:///path",
        ),
        (
            "postgressql://h/d",
            "has the unknown scheme 'postgressql'",
            "did you mean postgresql://?",
        ),
        ("postgresql+psycopg://h/d", "has the unknown scheme", "did you mean postgresql://?"),
        ("jobs.db", "has no scheme", "did you mean sqlite:///jobs.db?"),
        ("/var/jobs.db", "has no scheme", "did you mean sqlite:////var/jobs.db?"),
        ("memory", "has no scheme", "did you mean memory://?"),
        ("postgres:/host/db", "must have // after postgres:", "write postgres://host/db"),
        ("s3:/bucket", "must have // after s3:", "write s3://bucket"),
        ("s3:KEY%3Ahunter2%40bucket", "must have // after s3:", "write s3://…"),
        ("postgres:/h/d?password=hunter2", "must have // after postgres:", "write postgres://…"),
        ("postgresql:me:hunter2@h/db", "must have // after postgresql:", "write postgresql://…"),
        ("sqlite:jobs.db", "must have /// after sqlite:", "write sqlite:///jobs.db"),
        ("sqlite:/srv/jobs.db", "must have /// after sqlite:", "write sqlite:////srv/jobs.db"),
        ("sqlite:", "must have /// after sqlite:", "write sqlite:///…"),
        ("", "has no scheme", "start it with memory://"),
        ("host=h password=hunter2.x", "has no scheme", "start it with memory://"),
    ],
)
def test_an_unknown_scheme_gets_a_suggestion(text: str, problem: str, fix: str) -> None:
    """A missing or unknown scheme gets the nearest known one as a hint."""
    error = refused(text)
    assert problem in error.problem
    assert fix in error.fix
    assert "hunter2" not in everything_said_by(error)


def test_a_url_without_slashes_and_secrets_is_shown() -> None:
    """What cannot hold a secret is quoted, so that its user finds it again."""
    assert "(got 'sqlite:jobs.db')" in str(refused("sqlite:jobs.db"))
    assert "(got '***')" in str(refused("sqlite:me:hunter2@jobs.db"))


# Redaction


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:p@h:1/d", "postgresql://***@h:1/d"),
        ("postgresql://u:a@b/c#d?e@h/d", "postgresql://***@h/d"),
        (
            "postgresql://h/d?password=x&sslmode=require",
            "postgresql://h/d?password=***&sslmode=require",
        ),
        ("postgresql://u:p@h/d?password=a@b", "postgresql://***"),
        ("s3://b/p?secret_access_key=x&region=eu", "s3://b/p?secret_access_key=***&region=eu"),
        ("postgresql://h/d?password=&&&&", "postgresql://h/d?password=***"),
        ("s3://b/p?hunter2", "s3://b/p?***"),
        ("s3://KEY:SECRET/bucket", "s3://***"),
        ("s3://KEY%3ASECRET%40bucket", "s3://***"),
        ("postgresql://h/d#x", "postgresql://h/d#***"),
        ("u:p@h/d", "***"),
        ("password=x", "***"),
        ("sqlite:///jobs.db", "sqlite:///jobs.db"),
        ("jobs.db", "jobs.db"),
    ],
)
def test_redact_hides_what_may_be_secret(text: str, shown: str) -> None:
    """Credentials and unknown query values are hidden, the place is shown."""
    assert redact(text) == shown


@pytest.mark.parametrize(
    "name",
    [
        *("application_name", "connect_timeout", "dbname", "host", "hostaddr", "port", "prefix"),
        *("region", "schema", "sslmode", "target_session_attrs", "tls"),
    ],
)
def test_parameters_that_hold_no_secret_are_shown(name: str) -> None:
    """Without them nobody could tell two places apart. Those with similar names are hidden."""
    assert redact(f"any://h/d?{name}=x&user=u") == f"any://h/d?{name}=x&user=***"
    assert redact(f"any://h/d?{name}s=x&{name.upper()}=y") == (
        f"any://h/d?{name}s=***&{name.upper()}=***"
    )


@pytest.mark.parametrize("name", ["", "a b", "a-b", "1a", "wo!rd", "é", "a" * 41, "a%62"])
def test_what_cannot_be_a_name_is_hidden_with_its_value(name: str) -> None:
    """It may be a part of a password that has an `&`, and the value is not the only secret then."""
    assert redact(f"any://h/d?user=u&{name}=x") == "any://h/d?user=***&***"
    assert redact(f"any://h/d?{name}=") == "any://h/d?***"


def test_the_parts_of_a_url_show_no_secret() -> None:
    """In a log or an error they look as the redacted URL does."""
    text = "any://u:hunter2@h:1/p?password=hunter3"
    parts = url_parts.split_url(text, text.partition("://")[2])
    assert (parts.user, parts.password) == ("u", "hunter2")
    for shown in (repr(parts), str(parts), f"{[parts]}"):
        assert "any://***@h:1/p?password=***" in shown
        assert "hunter" not in shown


@given(st.text(alphabet="ab:/@?#&=%[]., *", max_size=30))
def test_redacting_twice_changes_nothing(text: str) -> None:
    """A redacted text stays as it is."""
    for url in (text, f"s3://{text}"):
        assert redact(redact(url)) == redact(url)


# Whatever the password

ODD = "ab1:/@?#&=%[]+ é\\'\"\n\x00"
PASSWORDS = st.one_of(
    st.text(alphabet=ODD, min_size=4, max_size=12), st.text(min_size=4, max_size=30)
)


# Digits alone would read as a port: hence the x.
FORGOTTEN_AT = "s3://KEYID:x{}/bucket/prefix"
MALFORMED = [
    "postgresql://somebody:{}@db.example:99999/jobs",
    "postgresql://somebody:{}@db.example:port/jobs",
    "postgresql://somebody:{}@/jobs?schema",
    "postgresql://somebody:{}@db.example/jobs?x=1&x=2",
    "postgresql://somebody:{}@db.example/%ff",
    "postgresql://db.example/jobs?password={}&schema",
    "postgresql://db.example/jobs?password={}#x",
    "postgresql//somebody:{}@db.example/jobs",
    "somebody:{}@db.example/jobs",
    "host=db.example password={}",
    "mysql://somebody:{}@db.example/jobs",
    "sqlite://somebody:{}@db.example/jobs",
    "memory://somebody:{}@shared",
    "s3://KEYID:{}@",
    FORGOTTEN_AT,
    "s3://:{}@bucket/prefix",
    "s3://{}@bucket/prefix",
    "s3://KEYID:{}@bucket/prefix?secret_access_key=x",
    "s3://bucket/prefix?secret_access_key={}",
    "gs://KEYID:{}@bucket/prefix",
]


# A password that is one of our own words ("host", "bucket") may occur without a leak.
OWN_WORDS = "\n".join([*map(inspect.getsource, (urls, url_parts, keys, errors)), *MALFORMED])


def is_telling(password: str) -> bool:
    """Whether finding the password in a message means that it leaked."""
    return password not in OWN_WORDS and password.strip("*") != "" and not password.isdigit()


def shown_for(text: str) -> str:
    """Return all that is ever shown of a URL, valid or not."""
    try:
        url = parse_url(text)
    except JobsyncError as error:
        return f"{redact(text)}\n{everything_said_by(error)}"
    return f"{redact(text)}\n{url!r}\n{url}"


@given(PASSWORDS, st.sampled_from(MALFORMED))
def test_no_error_shows_a_password(password: str, form: str) -> None:
    """For any malformed URL and any password, the error hides the password."""
    encoded = quote(password, safe="")
    assume(is_telling(password) and is_telling(encoded))
    # With an '@' of its own it is a well-formed URL with another password.
    assume(form != FORGOTTEN_AT or "@" not in password)
    for written in (password, encoded):
        shown = shown_for(form.format(written))
        assert password not in shown
        assert encoded not in shown


MARK = "Zq7Xw9"


@given(
    st.text(alphabet=ODD, max_size=6),
    st.text(alphabet=ODD, max_size=6),
    st.sampled_from([form for form in MALFORMED if "{}@" in form]),
)
def test_no_error_shows_a_part_of_a_password(before: str, after: str, form: str) -> None:
    """A password that ends in '@' is hidden completely, wherever its special characters are."""
    assert MARK not in shown_for(form.format(before + MARK + after))


@given(PASSWORDS)
def test_an_encoded_password_always_works(password: str) -> None:
    """Any text is a password once it is percent-encoded: kept exactly, and never shown."""
    encoded = quote(password, safe="")
    assume("\x7f" not in password and min(password) >= " ")
    assume(is_telling(password) and is_telling(encoded))
    texts = (
        f"postgresql://somebody:{encoded}@db.example:5432/jobs?schema=fleet",
        f"s3://KEYID:{encoded}@bucket/prefix",
    )
    database, bucket = postgres(texts[0]), objects(texts[1])
    assert database.password == bucket.secret == Secret(password)
    assert postgres(database.reveal()).password == Secret(password)
    for text in texts:
        assert password not in shown_for(text)
        assert encoded not in shown_for(text)


@given(st.text(alphabet="ab@:+&=!$", min_size=1, max_size=12))
def test_a_bare_at_sign_in_a_password_works(password: str) -> None:
    """Only '/', '?', '#' and '%' need encoding in a password."""
    assert postgres(f"postgresql://u:{password}@h/d").password == Secret(password)
