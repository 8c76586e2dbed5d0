"""Errors of tasks that are called in a wrong way, each with a fix that can be copied."""

import copy
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from jobsync import Database, Event, Invalid, QueuePlugin, TaskHandle
from jobsync.database.enqueue_calls import EnqueueOptions

queue = QueuePlugin("emails")


@queue.task(name="mail.send")
async def send(to: str, timeout: int = 0) -> None:
    """Take an argument that has the name of an option."""


@pytest.mark.parametrize(
    ("option", "shown"), [({"delay": 5}, "delay=5"), ({"group": "a"}, "group=…")]
)
async def test_an_option_among_the_arguments_is_shown_where_it_belongs(
    option: dict[str, object], shown: str
) -> None:
    """`enqueue` takes the arguments of the function alone; the fix takes the option too."""
    fix = f"Use send.with_options({shown})"
    with pytest.raises(Invalid, match=r"is not a parameter of mail\.send") as caught:
        await send.enqueue("a", **option)  # type: ignore[arg-type]
    assert f"{fix}.enqueue(…)" in str(caught.value)
    with pytest.raises(Invalid, match=r"is not a parameter of mail\.send") as caught:
        await send.enqueue_many([{"to": "a", **option}])
    assert f"{fix}.enqueue_many(…)" in str(caught.value)
    # A parameter of the function is no option.
    with pytest.raises(Invalid, match=r"Pass what send\(") as caught:
        send.encode("a", timeout="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["send", "mail.send", "app.mail.send"])
async def test_a_fix_names_the_function_alone(name: str) -> None:
    """Wherever its module is: that is what its user writes."""
    task = QueuePlugin("own").task(name=name)(send.function)
    with pytest.raises(Invalid, match=r"Use send\.with_options\(delay=5\)"):
        await task.enqueue("a", delay=5)  # type: ignore[call-arg]
    with pytest.raises(Invalid, match=r"\(got 'send\.enqueue_sync'\). Await send\.enqueue\("):
        task.enqueue_sync("a")
    with pytest.raises(AttributeError, match=r"use `await send\.enqueue\(…\)`"):
        task.delay("a")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "file", "name"),
    [
        (None, None, "__main__"),
        (None, "/srv/app/mails.py", "mails"),
        ("app.mails", "/srv/app/mails.py", "app.mails"),
        ("app.__main__", "/srv/app/__main__.py", "app"),
        ("app.main", "/srv/app/main.py", "app.main"),
    ],
    ids=["typed", "script", "module", "package", "module of a package"],
)
def test_a_task_has_the_same_name_where_its_module_is_run_and_where_it_is_imported(
    spec: str | None, file: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a worker finds what a script has enqueued."""
    main = SimpleNamespace(__spec__=spec and SimpleNamespace(name=spec), __file__=file)
    monkeypatch.setitem(sys.modules, "__main__", cast("ModuleType", main))

    def work() -> None: ...

    work.__module__, work.__qualname__ = "__main__", "Mails.work"
    assert QueuePlugin("own").task(work).name == f"{name}.Mails.work"
    work.__module__ = "other"
    assert QueuePlugin("own").task(work).name == "other.Mails.work"


async def test_a_call_with_a_connection_of_the_caller_needs_no_event_loop_of_the_database() -> None:
    """None is no connection."""
    own = QueuePlugin("own")
    task = own.task(name="send")(send.function)
    assert task.home_loop is None
    async with Database("memory://", plugins=[own], work=False):
        assert own.home_loop is not None
        for call in (task, task.with_options(delay=5), task.with_options(connection=None)):
            assert call.home_loop is own.home_loop
        assert task.with_options(connection=object()).home_loop is None


@pytest.mark.parametrize("wrong", [0, 1, 2])
async def test_each_message_of_a_task_is_checked_before_any_is_stored(wrong: int) -> None:
    """Not only the first one."""
    own = QueuePlugin("own")
    task = own.task(name="send")(send.function)
    messages: list[dict[str, Any]] = [{"to": "a"}, {"to": "b"}, {"to": "c"}]
    messages[wrong] = {"to": 5}
    async with Database("memory://", plugins=[own], work=False):
        with pytest.raises(Invalid, match="to must be `str`"):
            await own.enqueue_many(messages, task="send")
        with pytest.raises(Invalid, match="to must be `str`"):
            await task.enqueue_many(messages)
        assert await own.count("all") == 0


def test_the_calls_of_celery_name_ours() -> None:
    """Other attributes that are missing are as with any object, also for `copy` and `pickle`."""
    for task in (send, send.with_options(delay=1)):
        with pytest.raises(AttributeError, match=r"use `await send\.enqueue\(…\)`"):
            task.delay("a")  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match=r"use `await send\.enqueue\(…\)`"):
            task.apply_async(["a"])  # type: ignore[attr-defined]
        assert not hasattr(task, "delay")
        assert not hasattr(task, "__deepcopy__")
        with pytest.raises(AttributeError, match=r"has no attribute 'retry'$"):
            task.retry()  # type: ignore[attr-defined]
        assert copy.copy(task).name == "mail.send"


async def test_a_task_that_this_process_does_not_have_is_reported_once() -> None:
    """It is stored all the same, for another process; a typing error is found by the warning."""
    own, plain = QueuePlugin("own"), QueuePlugin("plain")
    own.task(name="mail.object")(send.function)
    async with Database("memory://", plugins=[own, plain], work=False) as database:
        reports: list[Event] = []
        database.on("plg:queue:task-unknown", reports.append)
        for task in ("mail.obbject", "mail.obbject", "print", "mail.object"):
            await own.enqueue({"to": "a"}, task=task)
        # Without tasks of its own, a process cannot know better.
        await plain.enqueue({"to": "a"}, task="mail.obbject")
        assert await own.count() == 4
    assert [(report["task"], report["fix"]) for report in reports] == [
        ("mail.obbject", "did you mean mail.object?"),
        ("print", "start a worker that has this task"),
    ]


async def test_a_blocking_call_in_a_coroutine_names_itself_and_what_to_await() -> None:
    """Not a method within, which its user has never written."""
    handle = TaskHandle[None]("m1", send.queue, send._signature)
    calls: list[tuple[Callable[[], object], str, str]] = [
        (lambda: send.enqueue_sync("a"), "send.enqueue_sync", "send.enqueue(…)"),
        (lambda: send.enqueue_many_sync([]), "send.enqueue_many_sync", "send.enqueue_many(…)"),
        (lambda: queue.enqueue_sync({}), "queue.enqueue_sync", "queue.enqueue(…)"),
        (handle.result_sync, "result_sync", "handle.result(…)"),
        (handle.cancel_sync, "cancel_sync", "handle.cancel()"),
    ]
    for call, name, awaited in calls:
        with pytest.raises(Invalid, match="would block the event loop") as caught:
            call()
        assert f"(got {name!r}). Await {awaited} instead." in str(caught.value)


async def test_the_options_of_a_task_hold_for_each_call_without_its_own() -> None:
    """A call that does without the key, or replaces an option, changes nothing for the next."""
    own = QueuePlugin("own")
    own.task(name="send", key="k", key_ttl=60, replace=True, timeout=5)(send.function)
    calls: list[dict[str, Any]] = [{}, {"key": None}, {}, {"timeout": 9, "key": "other"}, {}]
    found = []
    for options in calls:
        chosen = cast("EnqueueOptions", {**options, "task": "send"})
        completed = own._complete_options([{"to": "a"}], chosen)
        found.append(
            tuple(completed.get(name) for name in ("key", "key_ttl", "replace", "timeout"))
        )
    usual = ("k", 60, True, 5)
    assert found == [usual, (None, None, None, 5), usual, ("other", 60, True, 9), usual]


@pytest.mark.parametrize(
    "options", [{"max_concurrency": 2}, {"rate_limit": "5/second"}, {"rate_limit": "bad"}]
)
async def test_a_task_that_is_refused_leaves_nothing(options: dict[str, Any]) -> None:
    """Neither its limits, which no other store than a database has, nor its name."""
    own = QueuePlugin("own")
    async with Database("memory://", plugins=[own]):
        own.pause()
        with pytest.raises(Invalid):
            own.task(name="send", cron="@daily", **options)(lambda: None)
        assert (own._task_limits, own._cron_tasks, own.handlers) == ({}, {}, {})
        own.task(name="send")(lambda: None)
        assert [*own.handlers] == ["send"]
        await own.enqueue({}, task="send")
