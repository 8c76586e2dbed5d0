"""What `jobsync work` is pointed at: module:name gives a database, or a function that makes one."""

import importlib
import inspect
import sys

from jobsync.database.database import Database
from jobsync.errors import Invalid, closest_name

__all__ = ["load", "make"]


def load(target: str) -> object:
    """Import what TARGET names.

    Raises:
        Invalid: there is nothing of the kind, with what is there instead.
    """
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        raise Invalid("TARGET", target, "is no module:attribute", "name it as in tasks:db")
    # As `python -m` does: what is in the working directory can be imported.
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise Invalid("TARGET", target, f"there is no module {error.name}", "check it") from None
    thing = getattr(found, attribute, None)
    if isinstance(thing, Database) or callable(thing):
        return thing
    there = [name for name, each in vars(found).items() if isinstance(each, Database)]
    hint = closest_name(attribute, there) or ", ".join(there)
    fix = f"did you mean {module}:{hint}?" if hint else f"make one in {module}: db = Database(…)"
    raise Invalid("TARGET", target, "is no Database", fix)


async def make(target: str, found: object) -> Database:
    """Give the database that was named, or that a function makes.

    Raises:
        Invalid: it makes something else.
    """
    made = found if isinstance(found, Database) or not callable(found) else found()
    if inspect.isawaitable(made):
        made = await made
    if not isinstance(made, Database):
        raise Invalid("TARGET", target, f"gives {type(made).__name__}", "return a Database")
    return made
