"""Each setting has one value, a known origin, and a helpful message when it is wrong."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, get_type_hints
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jobsync import (
    CoordinationConfig,
    Database,
    Job,
    Membership,
    QueuePlugin,
    open_store,
    producer,
    settings,
)
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.core.secrets import Secret
from jobsync.errors import Invalid, Misconfigured
from jobsync.queue.settings import QueueOptions, QueueSettings
from jobsync.scheduler.settings import SchedulerOptions, SchedulerSettings
from jobsync.setting_fields import Origin, convert_value, fields, mask_unknown, show_settings
from jobsync.settings import COMMAND_LINE, Sources, StoreSettings, in_section, resolve, sections
from jobsync.ttl.settings import TTLOptions, TTLSettings


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """A settings type with one field of each kind."""

    poll: float = 1.0
    batch: Annotated[int, msgspec.Meta(ge=1)] = 10
    eager: bool = False
    mode: Literal["fast", "safe"] = "safe"
    timeout: float | None = None
    total_tokens: int = 100
    password: str = ""
    key: Secret | None = None
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.poll <= 0:
            raise Invalid("poll", self.poll, "is not above 0", "use 0.1 or more")
        if self.password == "short":
            raise Invalid("password", self.password, "is too short", "use a longer one")


@pytest.fixture(autouse=True)
def pace_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register `Pace` as the section `pace`, for one test."""
    monkeypatch.setattr(settings, "_sections", dict(settings._sections))
    in_section("pace")(Pace)


def from_environ(**environ: str) -> Sources:
    """Return sources with these variables and no file."""
    return Sources(environ)


def from_file(table: dict[str, Any]) -> Sources:
    """Return sources with this jobsync.toml and no variables."""
    return Sources({}, (("jobsync.toml", table),))


def misconfigured(kind: type[msgspec.Struct], sources: Sources, section: str = "") -> Misconfigured:
    """Return the error of sources that are refused."""
    with pytest.raises(Misconfigured) as caught:
        resolve(kind, {}, sources, section=section)
    return caught.value


# Order and origins


def test_the_nearest_source_wins() -> None:
    """Code, then environment, then jobsync.toml, then pyproject.toml, then the default."""
    documents = (
        ("jobsync.toml", {"url": "memory://own"}),
        ("pyproject.toml [tool.jobsync]", {"url": "memory://shared"}),
    )
    cases: list[tuple[dict[str, Any], dict[str, str], Any]] = [
        ({"url": "memory://code"}, {"JOBSYNC_URL": "memory://env"}, documents),
        ({"url": None}, {"JOBSYNC_URL": "memory://env"}, documents),
        ({}, {"JOBSYNC_URL": ""}, documents),
        ({}, {}, documents[1:]),
        ({}, {}, ()),
    ]
    results = [resolve(StoreSettings, code, Sources(env, files)) for code, env, files in cases]
    assert [(result.value.url, str(result.origin("url"))) for result in results] == [
        ("memory://code", "code"),
        ("memory://env", "environment JOBSYNC_URL"),
        ("memory://own", "file jobsync.toml url"),
        ("memory://shared", "file pyproject.toml [tool.jobsync] url"),
        ("sqlite:///jobsync.db", "default"),
    ]


def test_files_are_merged_setting_by_setting() -> None:
    """A setting that jobsync.toml does not have is read from pyproject.toml."""
    documents = (("jobsync.toml", {"poll": 2.0}), ("pyproject.toml", {"poll": 3.0, "batch": 4}))
    resolved = resolve(Pace, {}, Sources({}, documents))
    assert (resolved.value.poll, resolved.value.batch) == (2.0, 4)


def test_a_section_has_its_own_names() -> None:
    """A section adds its name to the variable and opens its table."""
    sources = Sources({"JOBSYNC_PACE_POLL": "3"}, (("jobsync.toml", {"pace": {"batch": 7}}),))
    resolved = resolve(Pace, {}, sources, section="pace")
    assert (resolved.value.poll, resolved.value.batch) == (3.0, 7)
    assert resolved.origin("poll") == Origin("environment", "JOBSYNC_PACE_POLL")
    assert resolved.origin("batch") == Origin("file", "jobsync.toml pace.batch")


def test_a_required_setting_says_how_to_give_it() -> None:
    """A missing setting without a default is an error that names its variable."""

    class Needy(msgspec.Struct, frozen=True, kw_only=True):
        name: str

    with pytest.raises(Invalid) as caught:
        resolve(Needy, {}, Sources(), section="x")
    assert caught.value.fix == "pass it, or set JOBSYNC_X_NAME"
    files = [("jobsync.toml", {"x": {"name": "a"}}), ("pyproject.toml", {"x": {"name": "b"}})]
    for code, sources in (
        ({"name": "c"}, Sources()),
        ({}, from_environ(JOBSYNC_X_NAME="d")),
        ({}, Sources({}, (*files,))),
        ({}, Sources({}, (files[1],))),
    ):
        assert resolve(Needy, code, sources, section="x").value.name in "abcd"


# Values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(word, True) for word in ("true", "1", "YES", "on")],
        *[(word, False) for word in ("False", "0", "no", "off")],
    ],
)
def test_variables_spell_booleans_in_many_ways(text: str, value: object) -> None:
    """All usual words for yes and no are understood in the environment."""
    resolved = resolve(Pace, {}, from_environ(JOBSYNC_EAGER=text))
    assert resolved.value.eager is value
    assert resolved.origin("eager").kind == "environment"


def test_variables_are_read_as_their_types() -> None:
    """Text from the environment becomes numbers, choices and secrets."""
    sources = from_environ(
        JOBSYNC_POLL="2.5", JOBSYNC_BATCH="3", JOBSYNC_MODE="fast", JOBSYNC_KEY="hunter2"
    )
    value = resolve(Pace, {}, sources).value
    assert value == Pace(poll=2.5, batch=3, mode="fast", key=Secret("hunter2"))


@pytest.mark.parametrize(
    ("kind", "error", "field"),
    [
        ("code", Invalid, "poll"),
        ("default", Invalid, "poll"),
        ("config", Misconfigured, "somewhere"),
        ("environment", Misconfigured, "somewhere"),
        ("file", Misconfigured, "somewhere"),
    ],
)
def test_the_error_of_a_wrong_value_is_that_of_its_origin(
    kind: Any, error: type[Invalid | Misconfigured], field: str
) -> None:
    """Code has wrong arguments; all else is configured, and its place is named."""
    (poll,) = [each for each in fields(Pace) if each.name == "poll"]
    with pytest.raises(error) as caught:
        convert_value(poll, "fast", Origin(kind, "somewhere"))
    assert type(caught.value) is error
    assert (caught.value.field, caught.value.value) == (field, "fast")


@pytest.mark.parametrize("name", ["poll", "timeout"])
def test_a_timedelta_becomes_seconds(name: str) -> None:
    """A duration in seconds may be a timedelta."""
    duration = timedelta(days=1, minutes=2, milliseconds=500)
    resolved = resolve(Pace, {name: duration}, Sources())
    assert getattr(resolved.value, name) == 86_520.5


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("poll", "fast", "use a number"),
        ("poll", "nan", "use a number"),
        ("batch", "0", "use a whole number"),
        ("batch", "2.5", "use a whole number"),
        ("eager", "maybe", "use true or false"),
        ("mode", "slow", "use 'fast' or 'safe'"),
        ("timeout", "never", "use a number or nothing"),
        ("total_tokens", "many", "use a whole number"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str, fix: str) -> None:
    """A wrong value in the environment names the variable and the accepted values."""
    error = misconfigured(Pace, Sources({f"JOBSYNC_{name.upper()}": value}))
    assert (error.field, error.value, error.fix) == (f"JOBSYNC_{name.upper()}", value, fix)


def test_a_bad_value_in_a_file_is_named() -> None:
    """A wrong value in a file names the file and the key; text is not a number there."""
    error = misconfigured(Pace, from_file({"poll": "5"}))
    assert (error.field, error.value) == ("jobsync.toml poll", "5")
    assert error.problem == "has a wrong value: expected `float`, got `str`"


@pytest.mark.parametrize("value", ["5", True, float("inf"), [1]])
def test_a_bad_value_in_code_is_invalid(value: object) -> None:
    """A wrong value in code names the argument."""
    with pytest.raises(Invalid) as caught:
        resolve(Pace, {"poll": value}, Sources())
    assert caught.value.field == "poll"
    assert caught.value.fix == "use a number"


# Checks of the struct itself


def test_a_struct_check_blames_the_origin() -> None:
    """An error of a struct's own check names the variable, the file's key or the argument."""
    sources = from_environ(JOBSYNC_POLL="-1")
    assert misconfigured(Pace, sources).field == "JOBSYNC_POLL"
    error = misconfigured(Pace, from_file({"poll": -1}))
    assert str(error) == "jobsync.toml poll is not above 0 (got -1.0). Use 0.1 or more."
    with pytest.raises(Invalid) as caught:
        resolve(Pace, {"poll": -1}, sources)
    assert caught.value.field == "poll"


def test_a_struct_check_about_no_field_passes_through() -> None:
    """An error that names no field of the struct arrives unchanged."""

    class Pair(msgspec.Struct, frozen=True, kw_only=True):
        low: int = 0

        def __post_init__(self) -> None:
            raise Invalid("low and high", 0, "cross", "swap them")

    with pytest.raises(Invalid, match=r"low and high cross \(got 0\)\. Swap them"):
        resolve(Pair, {}, from_environ(JOBSYNC_LOW="1"))


def test_a_bad_url_blames_its_variable_and_hides_the_password() -> None:
    """A store URL is checked at once; its password stays out of the message."""
    error = misconfigured(StoreSettings, from_environ(JOBSYNC_URL="mysql://u:hunter2@h/d"))
    assert (error.field, error.value) == ("JOBSYNC_URL", "mysql://***@h/d")
    assert error.__context__ is None


# Unknown names


def test_an_unknown_name_in_code_is_refused() -> None:
    """A mistyped argument gets the nearest known one as a hint, even if it is None."""
    for value in ("memory://", None):
        with pytest.raises(Invalid) as caught:
            resolve(StoreSettings, {"ulr": value}, Sources())
        assert (caught.value.field, caught.value.fix) == ("ulr", "did you mean url?")


@pytest.mark.parametrize(
    ("table", "section", "field", "fix"),
    [
        ({"ulr": "memory://"}, "", "jobsync.toml ulr", "did you mean url?"),
        ({"zzz": 1}, "", "jobsync.toml zzz", "use one of "),
        ({"pac": {"poll": 1}}, "", "jobsync.toml pac", "did you mean pace?"),
        ({"pace": 5}, "", "jobsync.toml pace", "write [pace]"),
        ({"pace": 5}, "pace", "jobsync.toml pace", "write [pace]"),
        ({"pace": {"pol": 1}}, "pace", "jobsync.toml pace.pol", "did you mean poll?"),
        ({"pace": {"poll": {}}}, "pace", "jobsync.toml pace.poll", "use a number"),
        ({"pace": {"x": {"y": 1}}}, "pace", "jobsync.toml pace.x", "use one of batch"),
    ],
)
def test_an_unknown_name_in_a_file_is_refused(
    table: dict[str, Any], section: str, field: str, fix: str
) -> None:
    """A mistyped key or table gets the nearest known one as a hint."""
    kind = Pace if section else StoreSettings
    error = misconfigured(kind, from_file(table), section)
    assert error.field == field
    assert fix in error.fix


def test_other_known_names_in_a_file_are_left_alone() -> None:
    """Another section's table, and another type's settings in the same section, are accepted."""
    in_section("")(Pace)
    sources = from_file({"url": "memory://", "poll": 2.0, "pace": {"pol": 1}})
    assert resolve(StoreSettings, {}, sources).value.url == "memory://"
    assert resolve(Pace, {}, sources).value.poll == 2.0


def test_sections_are_those_registered() -> None:
    """The registry lists each section with its types, and cannot be changed through the list."""
    assert sections()["pace"] == (Pace,)
    assert StoreSettings in sections()[""]
    assert sections() is not sections()


@pytest.mark.parametrize(
    ("variable", "hint"),
    [("JOBSYNC_ULR", "JOBSYNC_URL"), ("JOBSYNC_PACE_POL", "JOBSYNC_PACE_POLL")],
)
def test_a_nearly_known_variable_is_refused(variable: str, hint: str) -> None:
    """A mistyped variable gets the nearest one of any section as a hint."""
    error = misconfigured(StoreSettings, Sources({variable: "1"}))
    assert (error.field, error.fix) == (variable, f"did you mean {hint}?")


@pytest.mark.parametrize(
    "variable",
    [
        "JOBSYNC_PACE_POLL",
        "JOBSYNC_SOMETHING_ELSE",
        "JOBSYNC_TTL",
        "JOBSYNC_TEST_URL",
        "JOBSYNC_TEST_PACE_POL",
        "JOBSYNC_SERVICE_HOST",
        "JOBSYNC_SERVICE_PORT_HTTP",
        "JOBSYNC_PORT",
        "JOBSYNC_PORT_5432_TCP",
        "JOBSYNC_PORT_5432_TCP_ADDR",
        "JOBSYNC_PACE_PORT",
        "XJOBSYNC_ULR",
    ],
)
def test_foreign_variables_are_ignored(variable: str) -> None:
    """Known, dissimilar and test names are accepted, and so are variables of Kubernetes."""

    class Near(msgspec.Struct, frozen=True, kw_only=True):
        service_hosts: str = "default"
        ports: int = 0
        port_5432_tc: int = 0

    resolved = resolve(Near, {}, Sources({variable: "tcp://10.0.0.1:5432"}))
    assert resolved.value == Near()


@pytest.mark.parametrize("name", sorted(COMMAND_LINE))
def test_the_command_lines_own_variables_are_no_mistakes(name: str) -> None:
    """`jobsync work` creates plugins whose settings have similar names."""
    sources = Sources({f"JOBSYNC_{name}": "1"})
    assert resolve(QueueSettings, {}, sources, section="queue").value == QueueSettings()
    assert resolve(CoordinatorSettings, {}, sources).value == CoordinatorSettings()


@pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp"])
def test_what_kubernetes_puts_into_our_name_is_not_ours(protocol: str) -> None:
    """A service's address in the variable of a port setting is ignored."""

    class Page(msgspec.Struct, frozen=True, kw_only=True):
        port: int = 8080

    sources = from_environ(JOBSYNC_WEB_PORT=f"{protocol}://10.0.0.1:80")
    assert resolve(Page, {}, sources, section="web").origin("port").kind == "default"
    sources = from_environ(JOBSYNC_WEB_PORT="81")
    assert resolve(Page, {}, sources, section="web").value.port == 81


# Secrets


def test_explain_gives_a_line_a_setting() -> None:
    """The explanation shows values and origins, and masks secrets and URLs."""
    sources = from_environ(JOBSYNC_POLL="2", JOBSYNC_PASSWORD="hunter2")
    given_ = {"key": "hunter3", "hosts": ["s3://K:hunter4@bucket"]}
    assert resolve(Pace, given_, sources).explain().splitlines() == [
        "poll = 2.0  (environment JOBSYNC_POLL)",
        "batch = 10  (default)",
        "eager = False  (default)",
        "mode = 'safe'  (default)",
        "timeout = None  (default)",
        "total_tokens = 100  (default)",
        "password = ***  (environment JOBSYNC_PASSWORD)",
        "key = ***  (code)",
        "hosts = ['s3://***@bucket']  (code)",
    ]


def test_settings_of_any_values_can_be_explained_and_are_not_kept() -> None:
    """Also those that have no hash; what describes a type remembers none of its instances."""

    class Tagged(msgspec.Struct, frozen=True, weakref=True):
        tags: dict[str, str] = {}

    tagged = Tagged({"a": "b"})
    assert show_settings(tagged) == "Tagged(tags={'a': 'b'})"
    assert fields(tagged) == fields(Tagged)
    gone = weakref.ref(tagged)
    del tagged
    gc.collect()
    assert gone() is None


def test_reprs_show_no_secret() -> None:
    """Neither settings, nor their resolution, nor their sources show a secret."""
    url = "postgresql://u:hunter2@h/d"
    sources = Sources({"JOBSYNC_URL": url}, (("jobsync.toml", {"url": url}),))
    resolved = resolve(StoreSettings, {}, sources)
    assert repr(resolved.value) == "StoreSettings(url='postgresql://***@h/d')"
    assert "hunter2" not in f"{resolved!r} {sources!r} {resolved.explain()}"
    assert resolved.value.url == url


@given(st.text(min_size=4).map(lambda text: f"Zq{text}"))
def test_errors_show_no_secret(text: str) -> None:
    """The value of a secret setting or of a URL is in no error message."""
    assume("\0" not in text)
    wrong: list[tuple[type[msgspec.Struct], dict[str, Any], Sources]] = [
        (Pace, {"password": [text]}, Sources()),
        (Pace, {"key": [text]}, Sources()),
        (Pace, {"pasword": text}, Sources()),
        (StoreSettings, {"url": f"s3://K:{text}@"}, Sources()),
        (StoreSettings, {}, from_file({"ulr": f"s3://K:{text}@bucket"})),
        (StoreSettings, {}, from_file({"ulr": f"host=h password={text}"})),
        (StoreSettings, {}, from_file({"url": [f"s3://K:{text}@bucket"]})),
        (StoreSettings, {}, from_file({"pace": text})),
        (StoreSettings, {}, from_environ(JOBSYNC_ULR=f"host=h password={text}")),
        (StoreSettings, {}, from_environ(JOBSYNC_PACE_PASWORD=text)),
    ]
    for kind, given_, sources in wrong:
        with pytest.raises((Invalid, Misconfigured)) as caught:
            resolve(kind, given_, sources)
        said = f"{caught.value} {caught.value!r} {caught.value.value!r}"
        assert text not in said
        assert repr(text)[1:-1] not in said
        assert caught.value.__context__ is None


URL, SHOWN = "s3://K:hunter2@bucket", "s3://***@bucket"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (URL, SHOWN),
        ([URL, 5], [SHOWN, 5]),
        ((URL,), [SHOWN]),
        ({"password": "hunter2", "port": 5}, {"password": "***", "port": 5}),
        ({"url": "host=h password=hunter2"}, {"url": "***"}),
        (
            {"store": {"password": "hunter2", "url": URL}},
            {"store": {"password": "***", "url": SHOWN}},
        ),
        ([{"secret": "hunter2"}, {"mode": "fast"}], [{"secret": "***"}, {"mode": "fast"}]),
        ({"password": None, "token": False}, {"password": None, "token": False}),
    ],
)
def test_a_value_of_any_shape_shows_no_secret(value: object, shown: object) -> None:
    """The names within it tell what is secret."""
    assert mask_unknown("stores", value, ["mode"]) == shown


class Dsn:
    """A URL of another library's."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Dsn({self.text!r})"


_URL = "postgresql://ann:hunter2@db/x"


@pytest.mark.parametrize(
    "url",
    [
        Dsn(_URL),
        _URL.encode(),
        bytearray(_URL.encode()),
        urlsplit(_URL),
        [_URL],
        (Dsn(_URL),),
        {_URL},
        {"url": _URL},
        {_URL: 1},
        {(_URL,): 1},
        {"address": Dsn(_URL)},
        {"password": "hunter2"},
        Enum("Urls", {"APP": _URL}).APP,  # type: ignore[attr-defined]
        PurePosixPath(_URL),
    ],
    ids=lambda url: type(url).__name__,
)
@pytest.mark.parametrize(
    "use",
    [
        Database,
        lambda url: Database(connection=url),
        lambda url: asyncio.run(open_store(url)),
        lambda url: asyncio.run(Membership.join(url)),
        lambda url: CoordinationConfig(url=url),
        lambda url: CoordinationConfig(host=url, dbname="x"),
        lambda url: CoordinationConfig(dbnam=url),  # type: ignore[call-arg]
    ],
    ids=["url", "connection", "open_store", "join", "config", "host", "unknown"],
)
def test_a_url_that_is_no_text_is_refused_without_its_password(
    use: Callable[[Any], object], url: object
) -> None:
    """Nor is it in the fields of the error; whatever was put in the place of the text."""
    with pytest.raises(Invalid) as caught:
        use(url)
    assert "hunter2" not in f"{caught.value} {caught.value!r}"


def test_a_struct_check_on_a_secret_hides_it() -> None:
    """A struct's own check of a password does not show it, wherever it came from."""
    for given_, sources in [
        ({"password": "short"}, Sources()),
        ({}, from_environ(JOBSYNC_PASSWORD="short")),
    ]:
        with pytest.raises((Invalid, Misconfigured)) as caught:
            resolve(Pace, given_, sources)
        assert caught.value.value == "***"


def test_a_choice_named_like_a_secret_is_not_quoted() -> None:
    """The converter's message about a secret is not passed on: it quotes the value."""

    class Login(msgspec.Struct, frozen=True, kw_only=True):
        token: Literal["a", "b"] = "a"

    error = misconfigured(Login, from_environ(JOBSYNC_TOKEN="hunter2"))
    assert "hunter2" not in str(error)
    assert error.problem == "has a wrong value"


# Files


def test_load_reads_both_files(tmp_path: Path) -> None:
    """Both files are read, jobsync.toml first; tables of other tools are ignored."""
    (tmp_path / "jobsync.toml").write_text('url = "memory://a"\n[pace]\npoll = 2\n')
    (tmp_path / "pyproject.toml").write_text("[tool.jobsync.pace]\nbatch = 5\n[tool.x]\ny = 1\n")
    sources = Sources.load({"JOBSYNC_PACE_MODE": "fast"}, tmp_path)
    assert [where for where, _ in sources.documents] == [
        "jobsync.toml",
        "pyproject.toml [tool.jobsync]",
    ]
    assert resolve(StoreSettings, {}, sources).value.url == "memory://a"
    pace = resolve(Pace, {}, sources, section="pace")
    assert pace.value == Pace(poll=2.0, batch=5, mode="fast")
    assert pace.origin("batch").where == "pyproject.toml [tool.jobsync] pace.batch"


def test_load_without_files_gives_the_environment(tmp_path: Path) -> None:
    """Missing files, and a pyproject.toml without our table, count as empty."""
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert Sources.load({"A": "b"}, tmp_path) == Sources({"A": "b"})


@pytest.mark.parametrize(
    ("name", "content", "value", "problem"),
    [
        ("jobsync.toml", b"url = 'memory://'\npoll = \n", "line 2, column 8", "is not TOML"),
        ("pyproject.toml", b"[tool", "end of document", "is not TOML"),
        ("jobsync.toml", b"url = '\xff'", "byte 7", "is not UTF-8"),
        ("pyproject.toml [tool.jobsync]", b"[tool]\njobsync = 5", "int", "must be a table"),
        ("pyproject.toml [tool]", b"tool = 5", "int", "must be a table"),
    ],
)
def test_a_broken_file_is_named(
    tmp_path: Path, name: str, content: bytes, value: str, problem: str
) -> None:
    """A malformed file is named, with the place in it, and not quoted."""
    (tmp_path / name.partition(" ")[0]).write_bytes(content)
    with pytest.raises(Misconfigured) as caught:
        Sources.load({}, tmp_path)
    assert (caught.value.field, caught.value.value) == (name, value)
    assert problem in caught.value.problem
    assert caught.value.__context__ is None


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A directory in the place of the file is reported, not skipped."""
    (tmp_path / "jobsync.toml").mkdir()
    with pytest.raises(Misconfigured, match="cannot be read"):
        Sources.load({}, tmp_path)


@pytest.mark.parametrize(
    ("options", "settings", "aliases"),
    [
        (
            QueueOptions,
            QueueSettings,
            {"workers": int, "max_retries": int | None, "ticket_interval": float},
        ),
        (SchedulerOptions, SchedulerSettings, {}),
        (TTLOptions, TTLSettings, {}),
    ],
)
def test_type_checkers_know_every_option_of_a_plugin(
    options: type, settings: type, aliases: dict[str, Any]
) -> None:
    """With the type that the setting has; the other names of an option have that of the option."""
    settings_hints = get_type_hints(CoordinatorSettings) | get_type_hints(settings)
    known = {field: settings_hints[field] for field in settings_hints if not field.startswith("_")}
    assert get_type_hints(options) == known | aliases


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            lambda given: Database(**given),
            "Database (got 'postgresql://***@h/d'). Did you mean connection_string?",
        ),
        (lambda given: producer(**given), "is not an argument of producer (got 'postgresql://***"),
        (lambda given: Job("n", **given), "is not an argument of Job (got 'postgresql://***"),
        (lambda _: Job("n", waitOnEnter=3), "Did you mean wait_on_enter?"),  # type: ignore[call-arg]
        (lambda _: Database(plugins=QueuePlugin("a")), "plugins must be a list"),  # type: ignore[arg-type]
        (lambda _: Database(Path("a.db")), "Write a URL such as sqlite:///a.db"),  # type: ignore[arg-type]
        (
            lambda _: Database(connection=5),  # type: ignore[arg-type]
            "connection must be a text (got 5). Write a URL such as sqlite:///app.db",
        ),
        (lambda _: Database(plugins=7), "plugins must be a list (got 7). Write plugins=["),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_is_named_with_the_one_that_was_meant(
    call: Callable[[dict[str, Any]], object], problem: str
) -> None:
    """In snake_case; its value is shown without secrets."""
    with pytest.raises(Invalid) as caught:
        call({"connectionString": "postgresql://u:hush@h/d"})
    assert problem in str(caught.value)
