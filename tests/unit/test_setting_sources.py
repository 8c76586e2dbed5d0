"""Sources of settings as they are now, values in each of their forms, and fixes that work."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from jobsync import settings
from jobsync.core.secrets import Secret
from jobsync.errors import Invalid, Misconfigured
from jobsync.setting_fields import Origin, convert_value, fields, mask_unknown, refuse_unknown
from jobsync.settings import (
    Layer,
    Sources,
    StoreSettings,
    check_given,
    combine,
    in_section,
    resolve,
    sections,
)

WHEN = 1_700_000_000


class Forms(msgspec.Struct, frozen=True, kw_only=True):
    """A settings type with fields whose values have several forms."""

    flag: bool = True
    either: bool | str = True
    seconds: float | None = 5.0
    span: timedelta = timedelta(seconds=5)
    count: int = 5
    word: str = "five"
    hosts: tuple[str, ...] = ("five",)
    key: Secret | None = None
    level: Annotated[float, msgspec.Meta(ge=0)] | None = None
    token: int | str = 5
    tokens: int | None = 5


@pytest.fixture(autouse=True)
def forms_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register `Forms` as the section `forms`, for one test."""
    monkeypatch.setattr(settings, "_sections", dict(settings._sections))
    in_section("forms")(Forms)


def refuse(kind: type[msgspec.Struct], sources: Sources, section: str = "") -> Misconfigured:
    """Return the error of sources that are refused."""
    with pytest.raises(Misconfigured) as caught:
        resolve(kind, {}, sources, section=section)
    return caught.value


# Files and variables as they are now


@pytest.mark.parametrize(
    ("file", "table"), [("jobsync.toml", ""), ("pyproject.toml", "[tool.jobsync]\n")]
)
def test_a_file_is_read_as_it_is_now(file: str, table: str, tmp_path: Path) -> None:
    """However often it changes: also with the same size and time, away, broken, and back."""
    path = tmp_path / file
    for url in ("memory://a", "memory://b", None, "memory://c", "broken", "memory://a"):
        if url is None:
            path.unlink()
            assert Sources.load({}, tmp_path).documents == ()
            continue
        if url == "broken":
            path.write_text(f"{table}url = ")
            with pytest.raises(Misconfigured, match="is not TOML"):
                Sources.load({}, tmp_path)
            continue
        path.write_text(f"{table}url = '{url}'")
        os.utime(path, (WHEN, WHEN))
        ((_, found),) = Sources.load({}, tmp_path).documents
        assert found == {"url": url}


def test_each_folder_has_its_own_files(tmp_path: Path) -> None:
    """Those of another folder that was read before, or of its parent, do not count."""
    below = tmp_path / "below"
    below.mkdir()
    for folder, url in ((tmp_path, "memory://a"), (below, "memory://b")):
        (folder / "jobsync.toml").write_text(f"url = '{url}'")
    (tmp_path / "pyproject.toml").write_text("[tool.jobsync]\nurl = 'memory://c'")
    for folder, url in ((tmp_path, "memory://a"), (below, "memory://b"), (tmp_path, "memory://a")):
        assert resolve(StoreSettings, {}, Sources.load({}, folder)).value.url == url
    assert len(Sources.load({}, below).documents) == 1


def test_sources_keep_the_variables_that_they_were_loaded_with(tmp_path: Path) -> None:
    """A program that changes its environment later changes no settings that are resolved then."""
    environ = {"JOBSYNC_URL": "memory://a"}
    sources = Sources.load(environ, tmp_path)
    environ["JOBSYNC_URL"] = "memory://b"
    assert resolve(StoreSettings, {}, sources).value.url == "memory://a"
    later = Sources.load(environ, tmp_path)
    assert resolve(StoreSettings, {}, later).value.url == "memory://b"


# Fixes


@pytest.mark.parametrize(
    ("file", "content", "value", "fix"),
    [
        ("jobsync.toml", b"url = ", "end of document", "correct that line of {path}"),
        ("pyproject.toml", b"a = 1\na = 2\n", "line 2, column 6", "correct that line of {path}"),
        ("jobsync.toml", b"url = '\xff'", "byte 7", "save {path} as UTF-8"),
        ("pyproject.toml", b"\xff", "byte 0", "save {path} as UTF-8"),
        ("jobsync.toml", None, "{path}", "repair or remove it"),
        ("pyproject.toml", None, "{path}", "repair or remove it"),
        ("pyproject.toml", b"tool = 5", "int", "write [tool]"),
        ("pyproject.toml", b"tool = []", "list", "write [tool]"),
        ("pyproject.toml", b"[tool]\njobsync = 5", "int", "write [tool.jobsync]"),
        ("pyproject.toml", b"[tool]\njobsync = ''", "str", "write [tool.jobsync]"),
        ("pyproject.toml", b"[tool]\njobsync = false", "bool", "write [tool.jobsync]"),
        ("pyproject.toml", b"[[tool.jobsync]]\nurl = 'a'", "list", "write [tool.jobsync]"),
    ],
)
def test_a_broken_file_is_named_with_its_folder_in_the_fix(
    file: str, content: bytes | None, value: str, fix: str, tmp_path: Path
) -> None:
    """So that a reader knows which of many to correct; a wrong value that is empty is wrong too."""
    path = tmp_path / file
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(Misconfigured) as caught:
        Sources.load({}, tmp_path)
    assert caught.value.field.startswith(file)
    assert caught.value.value == value.format(path=path)
    assert caught.value.fix == fix.format(path=path)


@pytest.mark.parametrize("wrong", [5, 0, "", False, [], [{"count": 1}]])
@pytest.mark.parametrize(
    ("where", "fix"),
    [
        ("jobsync.toml", "write [forms]"),
        ("pyproject.toml [tool.jobsync]", "write [tool.jobsync.forms]"),
    ],
)
@pytest.mark.parametrize("section", ["forms", ""])
def test_a_section_that_is_no_table_says_which_table_to_write(
    section: str, where: str, fix: str, wrong: object
) -> None:
    """Whatever it is instead, whichever file it is in, and whoever reads it."""
    kind = Forms if section else StoreSettings
    error = refuse(kind, Sources({}, ((where, {"forms": wrong}),)), section)
    assert (error.field, error.problem) == (f"{where} forms", "must be a table")
    assert (error.value, error.fix) == (type(wrong).__name__, fix)


def test_an_unknown_table_gets_the_names_of_tables() -> None:
    """Those of all sections; the top level has no name."""
    error = refuse(StoreSettings, Sources({}, (("jobsync.toml", {"zzzzzzz": {"count": 1}}),)))
    assert error.fix == f"use one of {', '.join(sorted(filter(None, sections())))}"


def test_mistyped_variables_of_a_section_that_is_not_registered() -> None:
    """The names of the type that is read count, and of several mistakes the first by name."""
    assert "web" not in sections()
    variables = {"JOBSYNC_WEB_SECNDS": "1", "JOBSYNC_WEB_COUT": "2", "JOBSYNC_WEB_WRD": "3"}
    error = refuse(Forms, Sources(variables), "web")
    assert (error.field, error.fix) == ("JOBSYNC_WEB_COUT", "did you mean JOBSYNC_WEB_COUNT?")


# Values


def test_what_code_gives_counts_also_if_it_is_empty() -> None:
    """Only None is absent, of all settings and where only code is asked."""
    given = {"flag": False, "either": "", "seconds": 0.0, "count": 0, "word": "", "hosts": ()}
    environ = {
        **{f"JOBSYNC_{name.upper()}": "1" for name in given if name != "hosts"},
        "JOBSYNC_SPAN": "PT3S",
    }
    document = ("jobsync.toml", {"hosts": ["file"], "word": "file"})
    resolved = resolve(Forms, {**given, "span": None}, Sources(environ, (document,)))
    assert resolved.value == Forms(**given, span=timedelta(seconds=3))  # type: ignore[arg-type]
    assert {str(resolved.origin(name)) for name in given} == {"code"}
    assert check_given(Forms, {**given, "span": None, "key": None}) == given


@pytest.mark.parametrize("kind", ["code", "config", "environment", "file"])
@pytest.mark.parametrize(
    ("name", "value", "converted", "is_text"),
    [
        ("flag", "yes", True, True),
        ("flag", "OFF", False, True),
        ("flag", False, False, False),
        ("either", "no", "no", False),
        ("either", "on", "on", False),
        ("either", False, False, False),
        ("count", "7", 7, True),
        ("seconds", "7", 7.0, True),
        ("seconds", 7, 7.0, False),
        ("seconds", None, None, False),
        ("seconds", timedelta(days=2, seconds=3, milliseconds=500), 172_803.5, False),
        ("span", timedelta(days=2, seconds=3), timedelta(days=2, seconds=3), False),
        ("level", timedelta(minutes=2), 120.0, False),
        ("level", "0.5", 0.5, True),
        ("key", "hush", Secret("hush"), False),
        ("key", Secret("hush"), Secret("hush"), False),
        ("hosts", ["a", "b"], ("a", "b"), False),
        ("word", "off", "off", False),
        ("word", "7", "7", False),
    ],
)
def test_a_value_is_converted_by_its_field_and_its_origin(
    kind: Any, name: str, value: object, converted: object, *, is_text: bool
) -> None:
    """Text is a number or a word for yes only where it may come from a variable."""
    (field,) = [each for each in fields(Forms) if each.name == name]
    if is_text and kind in ("code", "file"):
        with pytest.raises((Invalid, Misconfigured)):
            convert_value(field, value, Origin(kind, "somewhere"))
        return
    result = convert_value(field, value, Origin(kind, "somewhere"))
    assert (result, type(result)) == (converted, type(converted))


@pytest.mark.parametrize("kind", ["code", "config", "environment", "file"])
@pytest.mark.parametrize(
    ("name", "value", "shown", "fix"),
    [
        ("flag", "maybe", "maybe", "use true or false"),
        ("either", 5, 5, "use true or false or text"),
        ("count", "\udc80", "\udc80", "use a whole number"),
        ("count", timedelta(seconds=5), timedelta(seconds=5), "use a whole number"),
        ("count", 1.5, 1.5, "use a whole number"),
        ("seconds", float("-inf"), float("-inf"), "use a number or nothing"),
        ("seconds", "\udc80", "\udc80", "use a number or nothing"),
        ("level", -1.0, -1.0, "use a number or nothing"),
        ("level", float("inf"), float("inf"), "use a number or nothing"),
        ("word", Secret("hush"), "***", "use text"),
        ("key", 55, "***", "use text or nothing"),
        ("token", [55], "***", "use a whole number or text"),
        ("token", {"a": 55}, "***", "use a whole number or text"),
        ("tokens", "hush", "hush", "use a whole number or nothing"),
    ],
)
def test_a_wrong_value_is_refused_with_the_words_for_its_type(
    kind: Any, name: str, value: object, shown: object, fix: str
) -> None:
    """Wherever it is from; one that may be a secret is not shown, nor is the error it came from."""
    (field,) = [each for each in fields(Forms) if each.name == name]
    with pytest.raises((Invalid, Misconfigured)) as caught:
        convert_value(field, value, Origin(kind, "somewhere"))
    assert (caught.value.value, caught.value.fix) == (shown, fix)
    assert caught.value.__context__ is None
    assert shown != "***" or caught.value.problem == "has a wrong value" or name == "word"


def test_each_layer_adds_what_the_layers_before_it_do_not_have() -> None:
    """With the origin of each; a setting that none has is the default."""
    layers: list[Layer] = [
        {"count": (Origin("code"), 1)},
        {"count": (Origin("config", "a"), 2), "word": (Origin("config", "a"), "x")},
        {"word": (Origin("environment", "B"), "y"), "flag": (Origin("environment", "B"), "no")},
        {"flag": (Origin("file", "c"), True), "hosts": (Origin("file", "c"), ["z"])},
    ]
    resolved = combine(Forms, layers)
    assert resolved.value == Forms(count=1, word="x", flag=False, hosts=("z",))
    assert {name: str(origin) for name, origin in resolved.origins.items()} == {
        **dict.fromkeys((field.name for field in fields(Forms)), "default"),
        "count": "code",
        "word": "config a",
        "flag": "environment B",
        "hosts": "file c",
    }


def test_a_resolution_is_shown_with_its_type() -> None:
    """On one line, each setting with its origin."""
    resolved = resolve(StoreSettings, {"url": "s3://K:hush@bucket"}, Sources())
    assert repr(resolved) == "Resolved(StoreSettings: url = 's3://***@bucket'  (code))"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("pasword", "hush", "***"),
        ("db_password_old", "hush", "***"),
        ("PASSWD", "hush", "***"),
        ("my_token", "hush", "***"),
        ("ulr", "host=h password=hush", "***"),
        ("ulr", ["host=h password=hush"], ["***"]),
        ("database_url", "host=h password=hush", "***"),
        ("DATABASE_URL", "host=h password=hush", "***"),
        ("count", "s3://K:hush@bucket", "s3://***@bucket"),
        ("count", {5: "five", "Secret": "hush"}, {5: "five", "Secret": "***"}),
        ("count", Secret("hush"), "***"),
        ("count", ("s3://K:hush@bucket", 5, None), ["s3://***@bucket", 5, None]),
        ("token", "hush", "***"),
        ("token", True, True),
        ("token", None, None),
        ("count", "plain", "plain"),
    ],
)
def test_an_unknown_name_hides_what_it_or_its_likeness_would(
    name: str, value: object, shown: object
) -> None:
    """A secret by its own name, or by that of the setting which was probably meant."""
    assert mask_unknown(name, value, ["password", "url", "cont", "broken"]) == shown


@pytest.mark.parametrize(
    ("given", "shown", "fix"),
    [
        ({"zzz": 5}, 5, "use url, password, count"),
        ({"zzz": "s3://K:hush@bucket"}, "s3://***@bucket", "use url, password, count"),
        ({"Password": "hush"}, "***", "did you mean password?"),
        ({"passwort": "hush"}, "***", "did you mean password?"),
        ({"cont": None}, None, "did you mean count?"),
        ({"count": 1, "coutn": 2}, 2, "did you mean count?"),
    ],
)
def test_an_argument_that_a_method_does_not_have_is_refused(
    given: dict[str, Any], shown: object, fix: str
) -> None:
    """With those that it has; the call itself does not happen."""
    calls: list[object] = []

    class Service:
        @refuse_unknown("Service")
        def start(self, url: str = "", *, password: str = "", count: int = 0) -> str:
            """Start it."""
            calls.append((url, password, count))
            return url

    service = Service()
    with pytest.raises(Invalid) as caught:
        service.start("a", **given)
    (name,) = given.keys() - {"count"}
    assert (caught.value.field, caught.value.problem) == (name, "is not an argument of Service")
    assert (caught.value.value, caught.value.fix) == (shown, fix)
    assert calls == []
    assert service.start("a", password="b", count=3) == "a"
    assert calls == [("a", "b", 3)]
    assert (Service.start.__name__, Service.start.__doc__) == ("start", "Start it.")
