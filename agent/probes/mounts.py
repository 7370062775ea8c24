"""The mount table: /proc/self/mountinfo as values, and what each filesystem is to us. Pure.

Called by disks.py for capacity and by cgroup.py for where control groups are mounted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["local", "shared", "pseudo"]

_SHARED = """nfs nfs4 cifs smb3 smbfs ceph lustre gpfs mmfs beegfs fhgfs wekafs afs pvfs2 orangefs
    panfs ocfs2 gfs gfs2 glusterfs 9p virtiofs quobyte vastfs daos coda ncpfs vboxsf prl_fs"""
_LOCAL = """ext2 ext3 ext4 xfs btrfs zfs f2fs bcachefs jfs reiserfs nilfs2 ntfs ntfs3 fuseblk vfat
    exfat msdos ufs hfsplus"""
_PSEUDO_FUSE = """lxcfs gvfsd-fuse portal snapfuse squashfuse mergerfs bindfs encfs gocryptfs
    unionfs rofiles-fuse archivemount"""

SHARED: Final = frozenset(_SHARED.split())
"""Filesystems whose space belongs to others as well."""
LOCAL: Final = frozenset(_LOCAL.split())
PSEUDO_FUSE: Final = frozenset(f"fuse.{name}" for name in _PSEUDO_FUSE.split())
"""FUSE programs that show kernel facts, images or other mounts again: no space of their own."""
IMAGES: Final = frozenset({"squashfs", "erofs", "iso9660", "udf", "cramfs"})
OVERLAYS: Final = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})
MAX_MOUNTS: Final = 20_000
MAX_TABLE: Final = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. `root` is the part of the filesystem that is seen at `mount`."""

    device: str
    root: str
    mount: str
    fstype: str
    source: str
    options: tuple[str, ...]


def unescape(text: str) -> str:
    r"""Undo the kernel's octal escapes: `/data\040disk` -> `/data disk`."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda match: chr(int(match[1], 8)), text)


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """Mounts in the order of the kernel; lines that are none are left out.

    Six fixed fields, any number of optional ones, a dash, then type, source and options.
    """
    found = []
    # Only a line feed ends a line: names may hold what Unicode calls a line separator.
    for line in text[:MAX_TABLE].split("\n", MAX_MOUNTS)[:MAX_MOUNTS]:
        left, dash, right = line.partition(" - ")
        fields, rest = [*filter(None, left.split(" "))], right.split(" ", 2)
        if not dash or len(fields) < 6 or len(rest) < 2 or not fields[4].startswith("/"):
            continue
        options = tuple(rest[2].split(",")) if len(rest) > 2 else ()
        found.append(
            Mount(
                device=fields[2],
                root=unescape(fields[3]),
                mount=unescape(fields[4]),
                fstype=rest[0],
                source=unescape(rest[1]),
                options=options,
            )
        )
    return tuple(found)


def kind(mount: Mount) -> Kind:
    """Whether space there is this machine's own, shared with others, or none at all.

    Images and layers are none; an overlay counts only as `/`, where a container sees its disk.
    A type that we do not know is local on a block device, shared when its source names a host.
    """
    fstype = mount.fstype.lower()
    if fstype in OVERLAYS:
        return "local" if mount.mount == "/" else "pseudo"
    if fstype in PSEUDO_FUSE or fstype in IMAGES:
        return "pseudo"
    if fstype in SHARED or fstype == "fuse" or fstype.startswith("fuse."):
        return "shared"
    if fstype in LOCAL or mount.source.startswith("/dev/"):
        return "local"
    return "shared" if re.match(r"(//|[^/\s]+:/)", mount.source) else "pseudo"


def identity(mount: Mount) -> tuple[str, str]:
    """What makes two mounts the same filesystem: its device, or a filer's own name for it."""
    fstype = mount.fstype.lower()
    if kind(mount) == "local":
        if fstype == "zfs":  # datasets of one pool share its space
            return ("zfs", mount.source.split("/", 1)[0])
        # Every btrfs subvolume has a device number of its own; the source tells them together.
        return (fstype, mount.source) if fstype == "btrfs" else ("device", mount.device)
    if fstype == "beegfs":  # the source is always beegfs_nodev
        return (fstype, next((o for o in mount.options if o.startswith("cfgFile=")), mount.source))
    if fstype == "lustre":  # one filesystem, several servers and routes before the last ":/"
        return (fstype, mount.source.rsplit(":/", 1)[-1].split("/", 1)[0])
    return (fstype.replace("nfs4", "nfs"), mount.source)


def within_another(mount: Mount) -> bool:
    """Whether its space is part of another filesystem's (an image file) or of memory."""
    return re.match(r"/dev/(loop|ram|zram)[0-9]", mount.source) is not None


def server(mount: Mount) -> str:
    """Who answers for a shared filesystem: the host of `host:/path`, else the whole source."""
    match = re.match(r"(?://)?([^/\s]{1,255}?)(?::?/|$)", mount.source)
    return f"{mount.fstype} {match[1] if match else mount.source[:255]}"


def holding(path: str, table: tuple[Mount, ...]) -> Mount | None:
    """The mount that a path lies on: the longest one above it, and of equals the latest."""
    best: Mount | None = None
    for mount in table:
        below = mount.mount.rstrip("/") + "/"
        if (path.rstrip("/") + "/").startswith(below) and (
            best is None or len(mount.mount) >= len(best.mount)
        ):
            best = mount
    return best
