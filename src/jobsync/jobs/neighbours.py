"""Another library of the same name, installed in the same place, is found before it does harm."""

from functools import cache
from importlib import metadata

from jobsync.errors import Misconfigured

__all__ = ["check_neighbours"]

_OTHER = "jobsync"


@cache
def check_neighbours() -> None:
    """Refuse to work beside the distribution `jobsync`, which has a package of our name.

    Raises:
        Misconfigured: it is installed; gives the line that helps.
    """
    try:
        version = metadata.version(_OTHER)
    except metadata.PackageNotFoundError:
        return
    raise Misconfigured(
        "installed",
        f"{_OTHER} {version}",
        "is another library, whose files and those of jobsync-fleet overwrite each other",
        "run: pip uninstall -y jobsync && pip install --force-reinstall jobsync-fleet",
    )
