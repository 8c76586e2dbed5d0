"""Where a file of SQLite may be: every filesystem, every form of a mount, and what is refused."""

import sqlite3
from pathlib import Path

import pytest

from jobsync import Misconfigured
from jobsync.stores.sqlite import location
from jobsync.stores.sqlite.location import NETWORK_FILESYSTEMS, check_location, filesystem_of

REMOTE = [
    *("9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "fuse.rclone"),
    *("glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "smb2", "smb3", "smbfs", "virtiofs"),
]
LOCAL = ["ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs", "fuse.ntfs-3g", "nfsd", "apfs", ""]


@pytest.mark.parametrize("kind", [*REMOTE, *LOCAL])
def test_a_file_is_refused_on_every_network_filesystem_and_on_no_other(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file and the filesystem, and what to use instead."""
    assert set(REMOTE) == NETWORK_FILESYSTEMS
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 8:1 / / rw - {kind} /dev/sda1 rw\n")
    monkeypatch.setattr(location, "_MOUNTS", mounts)
    path = tmp_path / "jobs.db"
    if kind in LOCAL:
        check_location(path)
        return
    with pytest.raises(Misconfigured) as caught:
        check_location(path)
    assert (caught.value.field, caught.value.value) == ("url", str(path))
    assert f"({kind})" in caught.value.problem
    assert "local disk" in caught.value.fix


ROOT = "1 0 8:1 / / rw - ext4 a rw"


@pytest.mark.parametrize(
    ("lines", "path", "kind"),
    [
        ([ROOT], "/x", "ext4"),
        ([ROOT], "/", "ext4"),
        ([ROOT, "2 1 0:1 / /data rw - nfs b rw"], "/data", "nfs"),
        ([ROOT, "2 1 0:1 / /data rw - nfs b rw"], "/data/x/y", "nfs"),
        ([ROOT, "2 1 0:1 / /data rw - nfs b rw"], "/data2/x", "ext4"),
        (["2 1 0:1 / /data rw - nfs b rw", ROOT], "/data/x", "nfs"),
        (
            ["3 2 0:1 / /data/deep rw - xfs c rw", "2 1 0:1 / /data rw - nfs b rw", ROOT],
            "/data/deep/x",
            "xfs",
        ),
        ([ROOT, "2 1 0:1 / /d rw - nfs b rw", "3 1 0:1 / /d rw - xfs c rw"], "/d/x", "xfs"),
        ([ROOT, "3 1 0:1 / /d rw - xfs c rw", "2 1 0:1 / /d rw - nfs b rw"], "/d/x", "nfs"),
        ([ROOT, r"2 1 0:1 / /my\040disk rw - nfs b rw"], "/my disk/x", "nfs"),
        ([ROOT, r"2 1 0:1 / /my\011disk rw - nfs b rw"], "/my\tdisk/x", "nfs"),
        ([ROOT, r"2 1 0:1 / /my\134disk rw - nfs b rw"], "/my\\disk/x", "nfs"),
        ([ROOT, r"2 1 0:1 / /a\040b\040c rw - nfs b rw"], "/a b c/x", "nfs"),
        ([ROOT, "2 1 0:1 / /d rw shared:1 master:2 - nfs b rw"], "/d/x", "nfs"),
        ([ROOT, "2 1 0:1 /export /d rw - nfs server:/a - b rw"], "/d/x", "nfs"),
        ([ROOT, "2 1 0:1 /d - nfs b rw", "", "nonsense", "2 1 0:1 / /d rw"], "/d/x", "ext4"),
        (["2 1 0:1 / /data rw - nfs b rw"], "/x", ""),
        ([], "/x", ""),
    ],
)
def test_the_filesystem_is_that_of_the_closest_mount(
    lines: list[str], path: str, kind: str
) -> None:
    """Of several on one point the last; whatever the order and the names are."""
    assert filesystem_of(Path(path), "\n".join(lines)) == kind


def test_a_machine_without_a_list_of_mounts_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only Linux has one."""
    monkeypatch.setattr(location, "_MOUNTS", tmp_path / "missing")
    check_location(tmp_path / "jobs.db")


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [((3, 37, 99), True), ((2, 99, 0), True), ((3, 38, 0), False), ((4, 0, 0), False)],
)
def test_an_sqlite_that_is_too_old_is_refused(
    version: tuple[int, int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_refused: bool,
) -> None:
    """Before it is used; the error has both versions."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    monkeypatch.setattr(sqlite3, "sqlite_version", ".".join(map(str, version)))
    if not is_refused:
        check_location(tmp_path / "jobs.db")
        return
    with pytest.raises(Misconfigured, match=r"older than 3\.38\.0") as caught:
        check_location(tmp_path / "jobs.db")
    assert caught.value.value == ".".join(map(str, version))


@pytest.mark.parametrize(
    ("failure", "problem", "fix"),
    [
        (PermissionError(13, "denied"), "cannot be accessed by this user", "grant access"),
        (OSError(36, "File name too long"), "cannot be opened: File name too long", "another path"),
        (OSError(5, "Input/output error"), "cannot be opened: Input/output error", "another path"),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_refused_with_the_reason(
    failure: OSError, problem: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the system, without its traceback."""

    def fail(_: Path) -> bool:
        raise failure

    monkeypatch.setattr(Path, "is_dir", fail)
    with pytest.raises(Misconfigured) as caught:
        check_location(tmp_path / "jobs.db")
    assert (caught.value.problem, caught.value.value) == (problem, str(tmp_path / "jobs.db"))
    assert fix in caught.value.fix
    assert caught.value.__cause__ is None


def test_a_folder_and_a_file_in_a_missing_folder_are_refused(tmp_path: Path) -> None:
    """Each with its own fix; the missing folder is named."""
    for path, problem, fix in (
        (tmp_path, "is a folder", "use a file in it"),
        (
            tmp_path / "a" / "b.db",
            f"is in a folder that does not exist: {tmp_path / 'a'}",
            "create it",
        ),
    ):
        with pytest.raises(Misconfigured) as caught:
            check_location(path)
        assert (caught.value.value, caught.value.problem) == (str(path), problem)
        assert caught.value.fix == fix
