"""Where a SQLite file may be: in a folder of a local disk, with an SQLite that is new enough."""

import re
import sqlite3
from pathlib import Path

from jobsync.errors import Misconfigured

__all__ = ["NETWORK_FILESYSTEMS", "check_location", "filesystem_of"]

NETWORK_FILESYSTEMS = frozenset(
    {
        "9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "fuse.rclone",
        "glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "smb2", "smb3", "smbfs", "virtiofs",
    }
)  # fmt: skip
"""Filesystems on which SQLite's locks or shared memory do not work between machines."""

_OLDEST_SQLITE = (3, 38, 0)
_MOUNTS = Path("/proc/self/mountinfo")

_octal = re.compile(r"\\([0-7]{3})")


def filesystem_of(path: Path, mountinfo: str) -> str:
    """Return the type of the filesystem of an absolute path, from the kernel's list of mounts.

    Returns "" if it is unknown.
    """
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        mount, separator, source = line.partition(" - ")
        fields = mount.split(" ")
        if not separator or len(fields) < 5:  # noqa: PLR2004 - the mount point is the fifth
            continue
        point = Path(_octal.sub(lambda match: chr(int(match.group(1), 8)), fields[4]))
        # A later mount on the same point hides the earlier one.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), source.split(" ")[0]
    return kind


def check_location(path: Path) -> None:
    """Raise if SQLite cannot keep its guarantees at this path.

    Raises:
        Misconfigured: with the reason and the fix.
    """
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        oldest = ".".join(map(str, _OLDEST_SQLITE))
        raise Misconfigured(
            "sqlite3", sqlite3.sqlite_version, f"is older than {oldest}", "use a newer Python"
        )
    folder = path.parent
    try:
        found, is_folder = folder.is_dir(), path.is_dir()
    except PermissionError:
        raise Misconfigured(
            "url", str(path), "cannot be accessed by this user", "grant access to the folder"
        ) from None
    except OSError as error:
        raise Misconfigured(
            "url", str(path), f"cannot be opened: {error.strerror}", "use another path"
        ) from None
    if not found:
        raise Misconfigured(
            "url", str(path), f"is in a folder that does not exist: {folder}", "create it"
        )
    if is_folder:
        raise Misconfigured("url", str(path), "is a folder", "use a file in it")
    kind = filesystem_of(path.resolve(), _MOUNTS.read_text()) if _MOUNTS.exists() else ""
    if kind in NETWORK_FILESYSTEMS:
        raise Misconfigured(
            "url",
            str(path),
            f"is on a network filesystem ({kind}), where SQLite loses data",
            "use a local disk, or postgresql:// or s3:// for several machines",
        )
