"""What a worker says that it is going to do, and what it refuses to start for."""

import logging
from pathlib import Path

import pytest

from jobsync import (
    CachePlugin,
    CoordinatorPlugin,
    Database,
    Invalid,
    QueuePlugin,
)
from jobsync.cli.worker_plan import (
    check_work,
    choose_work,
    describe_store,
    describe_work,
    warn_of_other_store,
)
from jobsync.stores.memory import MemoryStore


def handle(_: object) -> None:
    """Handle a message."""


def send(to: str) -> str:
    """Handle a task."""
    return to


def test_handlers_are_listed_by_queue_and_task() -> None:
    """Also queues without one, and other plugins."""
    emails = QueuePlugin("emails", on_message=handle)
    emails.task(name="send")(send)
    database = Database("memory://", plugins=[emails, CoordinatorPlugin(), CachePlugin()])
    assert list(describe_work(database)) == [
        "coordinator (CoordinatorPlugin)",
        f"default/emails → messages without a task → {__name__}.handle",
        f"default/emails → send → {__name__}.send",
    ]
    check_work("app:db", database)
    for count, last in ((20, f"default/emails → task9 → {__name__}.send"), (21, 1), (25, 5)):
        emails = QueuePlugin("emails")
        for number in range(count):
            emails.task(name=f"task{number}")(send)
        lines = list(describe_work(Database("memory://", plugins=[emails])))
        expected = last if isinstance(last, str) else f"default/emails → {last} more tasks"
        assert (len(lines), lines[-1]) == (min(count, 21), expected)


@pytest.mark.parametrize(
    ("plugins", "queues", "problem"),
    [
        ([], None, "has no plugin that works"),
        (["cache"], None, "has no plugin that works"),
        (["emails"], None, "has no handler for default/emails"),
        (["emails", "images"], "emails", "has no handler for default/emails"),
        (["emails", "images"], None, ""),
        (["emails", "coordinator"], None, ""),
    ],
)
def test_a_process_that_would_do_nothing_is_refused(
    plugins: list[str], queues: str | None, problem: str
) -> None:
    """A queue without a handler is enough beside something that works."""
    known = {
        "cache": CachePlugin(),
        "emails": QueuePlugin("emails"),
        "images": QueuePlugin("images", on_message=handle),
        "coordinator": CoordinatorPlugin(),
    }
    database = Database("memory://", plugins=[known[name] for name in plugins])
    choose_work(database, queues, None)
    if not problem:
        check_work("app:db", database)
        return
    with pytest.raises(Invalid, match=f"TARGET {problem}: the process would do nothing"):
        check_work("app:db", database)


def test_the_store_is_shown_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Resolved and without secrets; a variable that the code overrides is a warning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOBSYNC_URL", raising=False)
    default = f"sqlite:///{tmp_path}/jobsync.db"
    assert describe_store(Database()) == (default, "by default; JOBSYNC_URL names another")
    given = Database("postgresql://me:secret@host/db")
    assert describe_store(given) == ("postgresql://***@host/db", "from the code")
    opened = Database(connection=MemoryStore("x"))
    assert describe_store(opened) == ("memory://x", "an open store, from the code")
    warn_of_other_store(given, {})
    assert not caplog.records
    monkeypatch.setenv("JOBSYNC_URL", "sqlite:///jobsync.db")
    environ = {"JOBSYNC_URL": "sqlite:///jobsync.db"}
    assert describe_store(Database()) == (default, "from JOBSYNC_URL")
    warn_of_other_store(Database(), environ)
    warn_of_other_store(Database("sqlite:///jobsync.db"), environ)
    assert not caplog.records
    for database in (given, opened, Database("sqlite:///other.db")):
        with caplog.at_level(logging.WARNING):
            warn_of_other_store(database, {"JOBSYNC_URL": "postgresql://u:secret@host/fleet"})
        (record,) = caplog.records
        assert "JOBSYNC_URL is postgresql://***@host/fleet and not used" in record.getMessage()
        caplog.clear()


@pytest.mark.parametrize("other", ["no-url", "postgresql://u:secret@", "memcached://host"])
def test_a_url_that_is_not_used_may_be_wrong(caplog: pytest.LogCaptureFixture, other: str) -> None:
    """It is told that it is not used, without its secrets, and nothing else."""
    with caplog.at_level(logging.WARNING):
        warn_of_other_store(Database("memory://"), {"JOBSYNC_URL": other})
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("JOBSYNC_URL is ")
    assert "and not used: the code says memory://" in text
    assert "secret" not in text


@pytest.mark.parametrize("url", ["memory://x", "sqlite:///a.db", "sqlite:///./a.db"])
def test_the_same_store_is_no_other_one(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """However its URL is written."""
    monkeypatch.chdir(tmp_path)
    database = Database("memory://x" if url == "memory://x" else f"sqlite:///{tmp_path}/a.db")
    warn_of_other_store(database, {"JOBSYNC_URL": url})
    assert not caplog.records


def test_queues_are_told_apart_by_what_they_handle() -> None:
    """A queue without a handler is listed as one; what is idle here is not listed."""
    plugins = [
        QueuePlugin("emails"),
        QueuePlugin("images", on_message=handle, namespace="eu"),
        QueuePlugin("reports", on_message=handle),
    ]
    database = Database("memory://", plugins=plugins)
    choose_work(database, "emails,images", None)
    assert list(describe_work(database)) == [
        "default/emails → no handler here: messages can only be enqueued",
        f"eu/images → messages without a task → {__name__}.handle",
    ]
