"""The JobSync guide, and what it assumes: its helper functions and the packages it imports.

A reader of the guide would have written or installed everything here; the guide's own
text is executed as it is printed.
"""

import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jobsync

__all__ = ["PYTHON", "SQL", "SQLITE_SQL", "World", "installed", "read_all_blocks", "read_blocks"]

SQL_REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "sql-views.md"
GUIDE = Path(__file__).parents[1] / "seeds" / "documents" / "jobsync-usage-guide.md"


def read_blocks(language: str) -> list[str]:
    """Return the guide's code blocks of a language, in order."""
    text = GUIDE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def read_all_blocks() -> list[str]:
    """Return the languages of all the guide's Python and SQL blocks, in order."""
    text = GUIDE.read_text(encoding="utf-8")
    return re.findall(r"^```(python|sql)$", text, re.MULTILINE)


PYTHON = read_blocks("python")
SQL = read_blocks("sql")
SQLITE_SQL = re.findall(
    r"^```sql\n(.*?)^```$", SQL_REFERENCE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
"""The same queries for SQLite, as the SQL reference prints them."""


class Frame:
    """The result of `database.select`: rows with names, like a data frame."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        """Return the rows."""
        assert orient == "records"
        return self._rows


def select(cn: Any, sql: str, *parameters: Any) -> Frame:
    """Replacement of `database.select`."""
    cursor = cn.execute(sql, parameters)
    names = [column[0] for column in cursor.description]
    return Frame([dict(zip(names, row, strict=True)) for row in cursor.fetchall()])


def select_scalar(cn: Any, sql: str, *parameters: Any) -> Any:
    """Replacement of `database.select_scalar`."""
    return cn.execute(sql, parameters).fetchone()[0]


def execute(cn: Any, sql: str, *parameters: Any) -> None:
    """Replacement of `database.execute`."""
    cn.execute(sql, parameters)


class Setting:
    """Replacement of `libb.Setting`: nested attributes, while it is unlocked."""

    is_locked = True

    @classmethod
    def unlock(cls) -> None:
        cls.is_locked = False

    @classmethod
    def lock(cls) -> None:
        cls.is_locked = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or Setting.is_locked:
            raise AttributeError(name)
        nested = Setting()
        object.__setattr__(self, name, nested)
        return nested

    def __setattr__(self, name: str, value: Any) -> None:
        assert not Setting.is_locked
        object.__setattr__(self, name, value)


class Flask:
    """Replacement of `flask.Flask`: records routes and serves nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.routes: dict[str, Callable[[], Any]] = {}
        self.served: list[tuple[str, int]] = []

    def route(self, path: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        def register(handler: Callable[[], Any]) -> Callable[[], Any]:
            self.routes[path] = handler
            return handler

        return register

    def run(self, host: str, port: int) -> None:
        self.served.append((host, port))


def _make_module(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(content)
    return module


REPLACEMENTS = {
    "database": _make_module(
        "database", select=select, select_scalar=select_scalar, execute=execute
    ),
    "libb": _make_module("libb", Setting=Setting),
    "flask": _make_module("flask", Flask=Flask, jsonify=dict),
}


@contextmanager
def installed() -> Iterator[None]:
    """Install the replacements of the packages that the guide imports."""
    sys.modules.update(REPLACEMENTS)
    try:
        yield
    finally:
        for name in REPLACEMENTS:
            del sys.modules[name]


class _Log:
    """Replacement of a logger."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __getattr__(self, level: str) -> Callable[[str], None]:
        return lambda text: self.lines.append((level, text))


class _Config:
    """The reader's config module: the `sync` that a block has created, or None."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace

    @property
    def sync(self) -> Any:
        return self._namespace.get("sync")


class _Time:
    """Replacement of `time` that does not wait."""

    @staticmethod
    def sleep(_: float) -> None:
        """Return at once."""


class World:
    """A reader's program: the names that a block uses and does not define.

    Args:
        tasks: the ids of the tasks.
        site: used where the guide prints none.
    """

    def __init__(self, tasks: Sequence[Any] = tuple(range(12)), site: str = "production") -> None:
        self.tasks = list(tasks)
        self.site = site
        self.processed: list[Any] = []
        self.batches: list[list[Any]] = []
        self.saved: dict[Any, Any] = {}
        self.jobs: list[jobsync.Job] = []
        self.during: Callable[[jobsync.Job], None] = lambda _: None
        """Called while a job processes tasks."""
        self.log = _Log()
        self.defined: dict[str, list[Any]] = {}
        self.names: dict[str, Any] = {}
        self.names.update(
            __name__="guide",
            Job=self.make_job,
            Task=jobsync.Task,
            CoordinationConfig=jobsync.CoordinationConfig,
            db=REPLACEMENTS["database"],
            config=_Config(self.names),
            logger=self.log,
            time=_Time,
            process_task=self.process,
            process_gpu_task=self.process,
            process_batch=self.batches.append,
            process_tasks=self.process_all,
            test_task_processing=self.process_all,
            get_pending_tasks=self.pending,
            get_new_tasks=self.pending,
            get_all_tasks=lambda: list(self.tasks),
            get_task_list=lambda: list(self.tasks),
            get_tasks=lambda: list(self.tasks),
            compute_result=lambda task_id: f"result of {task_id}",
            compute_expensive_result=lambda task_id: f"result of {task_id}",
            save_result=self.saved.__setitem__,
            is_completed=lambda task_id, _: task_id in self.saved,
        )
        exec("from datetime import datetime, timedelta", self.names)

    def run(self, block: int, **names: Any) -> None:
        """Execute a block as it is printed; record every value that it assigns to a name."""
        self.names.update(names)
        world = self

        class RecordingNames(dict[str, Any]):
            def __setitem__(self, name: str, value: Any) -> None:
                world.defined.setdefault(name, []).append(value)
                world.names[name] = value

            def __missing__(self, name: str) -> Any:
                return world.names[name]

        code = compile(PYTHON[block], f"the guide's Python block {block}", "exec")
        with installed():
            exec(code, self.names, RecordingNames())

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function that a block has defined."""
        with installed():
            return self.names[name](*arguments)

    def make_job(self, *arguments: Any, **options: Any) -> jobsync.Job:
        """Create a job as printed; with a name, a site and a config where the guide prints dots."""
        if arguments == (...,):
            arguments = ("worker-01", self.site, self.names["config"])
        job = jobsync.Job(*arguments, **options)
        self.jobs.append(job)
        return job

    @property
    def job(self) -> jobsync.Job:
        """The latest job."""
        return self.jobs[-1]

    def process(self, task_id: Any) -> str:
        """Do a task."""
        self.processed.append(task_id)
        self.during(self.job)
        return f"result of {task_id}"

    def process_all(self, job: jobsync.Job) -> None:
        """Do all tasks that the job may claim."""
        for task_id in self.tasks:
            if job.can_claim_task(jobsync.Task(task_id)):
                job.add_task(jobsync.Task(task_id))
                self.process(task_id)
        job.write_audit()

    def pending(self, _: Any = None) -> list[Any]:
        """Return the tasks that were not processed."""
        return [task_id for task_id in self.tasks if task_id not in self.processed]
