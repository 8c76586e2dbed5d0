"""Opening the store of a URL, or a clear error."""

import importlib.util
from pathlib import Path

import pytest

from jobsync import Components, Invalid, MissingExtra, open_store
from jobsync.core.urls import SqliteUrl
from jobsync.stores.opening import open_another, open_bare, read_url


async def test_memory_of_one_name_is_shared() -> None:
    """Two stores of one name share their records; stores without a name do not."""
    one, two = await open_store("memory://shared"), await open_store("memory://shared")
    await one.create("n", 1)
    assert await two.get("n") is not None
    alone, also_alone = await open_store("memory://"), await open_store("memory://")
    await alone.create("n", 1)
    assert await also_alone.get("n") is None


@pytest.mark.parametrize(
    ("url", "install"),
    [
        ("postgresql://me:hush-hush@db/jobs", "pip install 'jobsync-fleet[postgres]'"),
        ("s3://AKIA:hush-hush@bucket/prefix", "pip install 'jobsync-fleet[s3]'"),
    ],
)
async def test_a_missing_extra_shows_the_install_command(
    url: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command can be copied, and the error shows no secret."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra) as caught:
        await open_store(url)
    assert str(caught.value).endswith(f"Run: {install}")
    assert "hush-hush" not in str(caught.value) + repr(caught.value)


async def test_an_unknown_scheme_is_refused() -> None:
    """The error lists the known schemes, and shows no secret."""
    with pytest.raises(Invalid, match="sqlite:///path") as caught:
        await open_store("mysql://me:hush-hush@db/jobs")
    assert "hush-hush" not in str(caught.value) + repr(caught.value)


async def test_the_url_comes_from_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment overrides the file, and an argument overrides both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOBSYNC_URL", raising=False)
    Path("jobsync.toml").write_text('url = "memory://from-file"')
    assert (await open_store()).name == "memory://from-file"
    monkeypatch.setenv("JOBSYNC_URL", "memory://from-environment")
    assert (await open_store()).name == "memory://from-environment"
    assert (await open_store("memory://from-code")).name == "memory://from-code"


async def test_a_relative_path_is_the_same_file_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may change its directory before it opens the store again, for another thread."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    url, components = read_url("sqlite:///jobs.db"), Components.system()
    assert url == SqliteUrl(f"{tmp_path}/first/jobs.db")
    assert read_url(f"sqlite:///{tmp_path}/jobs.db") == SqliteUrl(f"{tmp_path}/jobs.db")
    monkeypatch.chdir(tmp_path / "second")
    store = await open_bare(url, components)
    another = await open_another(store, url, components)
    made = await store.create("n/a", 1)
    assert await another.get("n/a") == made
    assert not any((tmp_path / "second").iterdir())
    await store.close()
    await another.close()
