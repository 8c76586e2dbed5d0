"""Errors of tasks that are called in a wrong way, each with a fix that can be copied."""

import asyncio
import copy
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from jobsync import Database, Event, Invalid, QueuePlugin, TaskHandle
from jobsync.database.enqueue_calls import EnqueueOptions
from jobsync.queue.limits import QueueLimits
from jobsync.queue.task_arguments import TaskSignature
from jobsync.queue.task_calls import TaskOptions
from jobsync.queue.tasks import CallOptions, QueueTask

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)

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


def pause_long(failures: int) -> float:
    """Pause for longer and longer."""
    return 100.0 * failures


@queue.task(name="mail.clean")
async def clean() -> None:
    """Take no argument."""


def show_task(own: QueuePlugin[Any], task: Any) -> dict[str, Any]:
    """Return what the options of a task have become."""
    retries = own._executor.find(task.name).retries
    return {
        "name": task.name,
        "messages": own._known_tasks[task.name].options,
        "backoff": None if retries is None else retries.backoff,
        "limits": own._task_limits.get(task.name),
        "job": own.scheduled_jobs.get(task.name),
    }


MESSAGE = {"enqueue": {"resource": "own", "namespace": "eu", "data": {}, "task": "clean"}}
TASK_OPTIONS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "name": [({"name": "other"}, {"name": "other"})],
    "max_retries": [
        ({"max_retries": 0}, {"messages": {"max_attempts": 1}}),
        ({"max_retries": 5}, {"messages": {"max_attempts": 6}}),
    ],
    "timeout": [
        ({"timeout": 2.5}, {"messages": {"timeout": 2.5}}),
        ({"timeout": None}, {"messages": {"timeout": None}}),
    ],
    "backoff": [({"backoff": pause_long}, {"backoff": pause_long})],
    "priority": [({"priority": 3}, {"messages": {"priority": 3}})],
    "group": [({"group": "a"}, {"messages": {"group": "a"}})],
    "key": [({"key": "k"}, {"messages": {"key": "k"}})],
    "key_ttl": [({"key": "k", "key_ttl": 60}, {"messages": {"key": "k", "key_ttl": 60}})],
    "replace": [({"key": "k", "replace": True}, {"messages": {"key": "k", "replace": True}})],
    "max_concurrency": [
        ({"max_concurrency": 1}, {"limits": QueueLimits(max_concurrency=1)}),
        ({"max_concurrency": None}, {}),
    ],
    "rate_limit": [
        ({"rate_limit": "30/minute"}, {"limits": QueueLimits(rate=0.5)}),
        ({"rate_limit": None}, {}),
    ],
    "rate_burst": [
        ({"rate_limit": "2/second", "rate_burst": 7}, {"limits": QueueLimits(rate=2.0, burst=7)}),
        ({"rate_burst": None}, {}),
    ],
    "cron": [({"cron": "0 3 * * *"}, {"job": {"schedule": "0 3 * * *", **MESSAGE}})],
    "timezone": [
        (
            {"cron": "0 3 * * *", "timezone": "Asia/Tokyo"},
            {"job": {"schedule": "0 3 * * *", "timezone": "Asia/Tokyo", **MESSAGE}},
        )
    ],
}
"""For each option of a task: what it changes, and nothing else."""


@pytest.mark.parametrize("option", TaskOptions.__annotations__)
def test_each_option_of_a_task_has_its_effect_and_no_other(option: str) -> None:
    """On its name, its messages, its pauses, its limits or its schedule."""
    usual: dict[str, Any] = {
        "name": "clean",
        "messages": {},
        "backoff": None,
        "limits": None,
        "job": None,
    }
    for options, changed in TASK_OPTIONS[option]:
        own = QueuePlugin("own", namespace="eu", order="priority")
        task = own.task(**{"name": "clean", **options})(clean.function)
        assert show_task(own, task) == {**usual, **changed}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": 5}, "name"),
        ({"max_retries": -1}, "max_retries"),
        ({"max_retries": 1.5}, "max_retries"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"backoff": 5}, "backoff"),
        ({"priority": 3}, "priority"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"rate_limit": "fast"}, "rate_limit"),
        ({"rate_limit": "1/second", "rate_burst": 0}, "rate_burst"),
        ({"rate_burst": 5}, "rate_burst"),
        ({"cron": "0 3 * *"}, "cron"),
        ({"cron": "@daily", "timezone": "Asia/Tokio"}, "timezone"),
        ({"timezone": "Asia/Tokyo"}, "timezone"),
        ({"delay": 5}, "delay"),
        ({"max_retrys": 5}, "max_retrys"),
    ],
)
def test_a_wrong_option_of_a_task_is_refused_where_it_is_written(
    options: dict[str, Any], field: str
) -> None:
    """By its name; and nothing is left of the task."""
    own = QueuePlugin("own")
    with pytest.raises(Invalid) as caught:
        own.task(**{"name": "clean", "max_concurrency": 1, **options})(clean.function)
    assert caught.value.field == field
    assert (own._known_tasks, own._task_limits, own._cron_tasks, own.handlers) == ({}, {}, {}, {})
    assert own.task(name="clean")(clean.function).name == "clean"


CALL_OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "delay": (5, {"delay": 5}),
    "at": (NOON, {"at": NOON}),
    "timeout": (2.5, {"timeout": 2.5}),
    "max_retries": (0, {"max_attempts": 1}),
    "priority": (3, {"priority": 3}),
    "group": ("a", {"group": "a"}),
    "key": ("k", {"key": "k"}),
    "key_ttl": (60, {"key_ttl": 60}),
    "replace": (True, {"replace": True}),
    "connection": ("connection", {"connection": "connection"}),
}


@pytest.mark.parametrize("option", CallOptions.__annotations__)
async def test_each_option_of_a_call_reaches_its_message(option: str) -> None:
    """And not the calls of the same task without it."""
    value, passed = CALL_OPTIONS[option]
    calls: list[Any] = []

    class Recorder:
        home_loop = None

        async def enqueue_many(self, data: Any, **options: Any) -> list[str]:
            calls.append((data, options))
            return [f"m{number}" for number, _ in enumerate(data)]

    signature = TaskSignature("mail.send", send.function)
    task: QueueTask[..., Any, ..., Any] = QueueTask(
        cast("Any", Recorder()), "mail.send", signature, send.function
    )
    call = task.with_options(**cast("Any", {option: value}))
    assert (await call.enqueue("a")).id == "m0"
    assert [each.id for each in await call.enqueue_many([{"to": "b"}, {"to": "c"}])] == ["m0", "m1"]
    await task.enqueue("d")
    assert calls == [
        ([{"to": "a"}], {**passed, "task": "mail.send"}),
        ([{"to": "b"}, {"to": "c"}], {**passed, "task": "mail.send"}),
        ([{"to": "d"}], {"task": "mail.send"}),
    ]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"delay": -1}, "delay"),
        ({"delay": "5"}, "delay"),
        ({"delay": 1e300}, "delay"),
        ({"delay": 5, "at": NOON}, "at"),
        ({"at": "noon"}, "at"),
        ({"at": datetime(2026, 3, 1)}, "at"),  # noqa: DTZ001 - without a zone
        ({"max_retries": -1}, "max_retries"),
        ({"max_retries": 10**6}, "max_retries"),
        ({"timeout": 0}, "timeout"),
        ({"priority": 1 << 40}, "priority"),
    ],
)
def test_a_wrong_option_is_refused_where_it_is_written(options: Any, field: str) -> None:
    """Not by the first call: that may come much later, and from somebody else."""
    with pytest.raises(Invalid) as refused:
        send.with_options(**options)
    assert refused.value.field == field


@pytest.mark.parametrize("timeout", [None, 2.5])
async def test_a_handle_asks_its_queue_for_its_own_message(timeout: float | None) -> None:
    """With the timeout of the caller, awaited or on a thread."""
    calls: list[tuple[Any, ...]] = []

    class Recorder:
        def __init__(self) -> None:
            loop = asyncio.get_running_loop()

            def call(work: Any) -> Any:
                return asyncio.run_coroutine_threadsafe(work, loop).result()

            self.home_loop = None
            self.database = SimpleNamespace(home_loop=SimpleNamespace(call=call))

        async def result(self, id: str, *, timeout: float | None = None) -> Any:
            calls.append(("result", id, timeout))

        async def cancel(self, id: str) -> bool:
            calls.append(("cancel", id))
            return True

        async def get(self, id: str) -> None:
            calls.append(("get", id))

    handle = TaskHandle[None]("m1", cast("Any", Recorder()), send._signature)
    assert repr(handle) == "TaskHandle(id='m1')"
    await handle.result(timeout=timeout)
    await asyncio.to_thread(lambda: handle.result_sync(timeout=timeout))
    assert await handle.cancel() is await asyncio.to_thread(handle.cancel_sync) is True
    assert await handle.get() is None
    result = ("result", "m1", timeout)
    assert calls == [result, result, ("cancel", "m1"), ("cancel", "m1"), ("get", "m1")]


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
