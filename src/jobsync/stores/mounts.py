"""Which kind of filesystem a path is on, from the kernel's own list of mounts."""

import re
from pathlib import Path

__all__ = ["NETWORK_FILESYSTEMS", "filesystem_of"]

NETWORK_FILESYSTEMS = frozenset(
    {
        "9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "fuse.rclone",
        "glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "smb2", "smb3", "smbfs", "virtiofs",
    }
)  # fmt: skip
"""Filesystems on which SQLite's locks or shared memory do not hold between machines."""

_octal = re.compile(r"\\([0-7]{3})")


def filesystem_of(path: Path, mountinfo: str) -> str:
    """Give the type of the filesystem that holds an absolute path, '' if unknown."""
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
