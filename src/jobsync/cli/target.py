"""The database in a program of the user's that `module:name` refers to.

`name` is a `Database`, one of `jobsync.sync`, or a function, `async` or not, that returns one.
"""

import asyncio
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import click

from jobsync.database.database import Database
from jobsync.errors import Invalid, Misconfigured, closest_name
from jobsync.queue.tasks import QueueTask
from jobsync.safe_text import format_error, format_places

__all__ = ["create_database", "find_url", "load_target"]

_MAX_FRAMES = 10
_OUR_CODE = str(Path(__file__).parents[1])


def load_target(target: str, field: str = "TARGET") -> Database | Callable[[], Any]:
    """Import the database, or the function that returns one, that module:name refers to.

    Args:
        target: module:name.
        field: the argument or option that has it, for errors.

    Raises:
        Invalid: it does not exist, or is something else; the message suggests a similar name.
        Misconfigured: its module cannot be imported; the message has the user's lines alone.
    """
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        fix = f"{_suggest_target(module_name or 'tasks', 'db')}, if its Database is called db"
        raise Invalid(field, target, "is not module:name", fix)
    if module_name.startswith(".") or "/" in module_name or "\\" in module_name:
        _refuse_path(field, target)
    # Like `python -m`: modules in the working directory can be imported.
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            _refuse(field, target, "cannot be imported", error)
        if module_name.endswith(".py"):
            _refuse_path(field, target)
        problem = f"refers to a missing module, {error.name}"
        file = error.name.replace(".", "/") + (".py" if error.name == module_name else "")
        fix = f"check the name, or start it where {file} is: it was searched in {Path.cwd()}"
        raise Invalid(field, target, problem, fix) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's module may raise anything
        _refuse(field, target, "cannot be imported", error)
    found = _unwrap(getattr(module, attribute, None))
    problem = _find_problem(found)
    if problem:
        names = [name for name, each in vars(module).items() if isinstance(_unwrap(each), Database)]
        hint = closest_name(attribute, names) or ", ".join(names)
        create = f"create one in {module_name}: db = Database(…)"
        fix = f"did you mean {module_name}:{hint}?" if hint else create
        raise Invalid(field, target, problem, fix)
    return cast("Database | Callable[[], Any]", found)


def _refuse_path(field: str, target: str) -> NoReturn:
    """Refuse the path of a file in place of a module.

    Raises:
        Invalid: always.
    """
    path, _, attribute = target.partition(":")
    fix = _suggest_target(path, attribute)
    raise Invalid(field, target, "has the path of a file, not a module", fix) from None


def _suggest_target(path: str, attribute: str) -> str:
    """Return what to write for a name in a module that was given by name or as a file."""
    file = Path(path.replace("\\", "/").removesuffix(".py"))
    folder = os.path.relpath(file.parent)
    name = file.name.strip(".") or "tasks"
    if folder.startswith(".."):
        return f"start it in {file.parent} and write {name}:{attribute}"
    packages = "" if folder == "." else folder.replace(os.sep, ".") + "."
    return f"write {packages}{name}:{attribute}"


def _find_problem(found: object) -> str:
    """Return why something is neither a database nor a function that returns one; else nothing."""
    if isinstance(found, Database):
        return ""
    if isinstance(found, QueueTask):
        return "is a task of a queue, not a Database"
    if isinstance(found, type) or not callable(found):
        return "is not a Database"
    try:
        inspect.signature(found).bind()
    except TypeError:
        return "is a function with arguments, not a Database"
    except ValueError:
        # A function in C tells nothing of its arguments.
        pass
    return ""


async def create_database(
    target: str, loaded: Database | Callable[[], Any], field: str = "TARGET"
) -> Database:
    """Return the database that was loaded, or that the loaded function returns.

    Raises:
        Invalid: the function returns something else.
        Misconfigured: it raises; the message has the user's lines alone.
    """
    if isinstance(loaded, Database):
        return loaded
    try:
        result = loaded()
        if inspect.isawaitable(result):
            result = await result
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything
        _refuse(field, target, "raised an error", error)
    result = _unwrap(result)
    if not isinstance(result, Database):
        problem = f"returns {type(result).__name__}"
        raise Invalid(field, target, problem, "return a Database")
    return result


def find_url(target: str, field: str) -> str | None:
    """Return the URL of the store that a program's database uses; None for the default one.

    Raises:
        Invalid: there is no such database, or it was given an open store.
        Misconfigured: the user's code raises.
    """
    database = asyncio.run(create_database(target, load_target(target, field), field))
    url = database.store_target.target
    if not (url is None or isinstance(url, str)):
        problem = f"is a database on an open store, {database.store_name}, without a URL"
        raise Invalid(field, target, problem, "pass --url")
    return url


def _unwrap(found: object) -> object:
    """Return the database that a `jobsync.sync.Database` is around; else what was found."""
    wrapped = getattr(found, "wrapped", None)
    return wrapped if isinstance(wrapped, Database) else found


def _refuse(field: str, target: str, problem: str, error: BaseException) -> NoReturn:
    """Print the lines of the user's code that an error passed, and raise it as ours.

    Raises:
        Misconfigured: always.
    """
    frames = traceback.extract_tb(error.__traceback__)
    hidden = {frame.filename for frame in frames if _is_foreign(frame.filename)}
    places = format_places(error, _MAX_FRAMES, hidden)
    if places:
        click.echo(places, err=True)
    own = [frame for frame in frames if frame.filename not in hidden]
    where = f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else "the module"
    problem = f"{problem}: {format_error(error)}"
    raise Misconfigured(field, target, problem, f"correct {where}") from None


def _is_foreign(file: str) -> bool:
    """Whether a file is of this library or of the import system: its lines explain nothing."""
    return file.startswith(("<frozen importlib", _OUR_CODE)) or file == importlib.__file__
