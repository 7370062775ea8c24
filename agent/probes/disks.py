"""Filesystems with their space: each once, local told apart from shared, none able to hang us.

Called by agent/probes/inventory.py. A dead NFS server blocks statvfs() in the kernel for ever, so
every call runs in a thread with a deadline and a filesystem that does not answer has unknown space.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from agent.probes import mounts
from agent.probes.root import bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from agent.probes.root import Root

    Statvfs = Callable[[str], os.statvfs_result]

STATVFS_TIMEOUT_S: Final = 3.0
SAME_FREE_MIB: Final = 1024
"""How much may be written between asking two mounts of one disk."""
MAX_DISKS: Final = 256
"""More filesystems than any machine has for weights; the rest of a runaway table is left out."""


@dataclass(frozen=True, slots=True)
class Disk:
    """One filesystem, named by its shortest mount point. Sizes in MiB, None when unknown."""

    mount: str
    filesystem: str
    kind: mounts.Kind
    total_mib: int | None = None
    free_mib: int | None = None
    holds_weights: bool = False


def find(table: tuple[mounts.Mount, ...], weights: Iterable[str] = ()) -> tuple[Disk, ...]:
    """Filesystems of a mount table, each once. `weights` are real paths where weights are kept.

    A mount hidden by a later one on the same directory is not counted.
    """
    return tuple(disk for disk, _ in _find(table, weights))


def _find(
    table: tuple[mounts.Mount, ...], weights: Iterable[str]
) -> list[tuple[Disk, mounts.Mount]]:
    visible = tuple({mount.mount: mount for mount in table}.values())
    # One device number is one filesystem, also where a filer gives its parts names of their own.
    by_device: dict[str, tuple[str, str]] = {}
    for mount in sorted(visible, key=_rank):
        by_device.setdefault(mount.device, mounts.identity(mount))

    def key(mount: mounts.Mount) -> tuple[str, str]:
        return by_device[mount.device]

    holders = {key(m) for path in weights if (m := mounts.holding(path, visible))}
    chosen: dict[tuple[str, str], mounts.Mount] = {}
    for mount in visible:
        if mounts.kind(mount) == "pseudo":
            continue
        if mounts.within_another(mount) and mount.mount != "/" and key(mount) not in holders:
            continue
        if key(mount) not in chosen or _rank(mount) < _rank(chosen[key(mount)]):
            chosen[key(mount)] = mount
    found = [
        (Disk(mount.mount, mount.fstype, mounts.kind(mount), holds_weights=name in holders), mount)
        for name, mount in chosen.items()
    ]
    return sorted(found, key=lambda pair: pair[0].mount)[:MAX_DISKS]


def _rank(mount: mounts.Mount) -> tuple[bool, int, str]:
    """Best name first: the whole filesystem before a bind mount of a part, short before long."""
    return (mount.root != "/", len(mount.mount), mount.mount)


def merge_overlay(disks: Sequence[Disk]) -> tuple[Disk, ...]:
    """In a container `/` is an overlay on a disk that is often bind-mounted as well: count once.

    An overlay answers with the numbers of the disk below it, which is how the two are recognised.
    """
    top = next((d for d in disks if d.mount == "/" and d.filesystem in mounts.OVERLAYS), None)
    if top is None or top.total_mib is None:
        return tuple(disks)
    free = top.free_mib or 0
    below = [
        (abs((disk.free_mib or 0) - free), disk.mount, disk)
        for disk in disks
        if disk.kind == "local" and disk is not top and disk.total_mib == top.total_mib
    ]
    # Machines have eight disks of one size: it lies on one of them, the one as full as it is.
    distance, _, disk = min(below, default=(SAME_FREE_MIB + 1, "", top), key=lambda one: one[:2])
    if distance > SAME_FREE_MIB:
        return tuple(disks)
    merged = replace(top, holds_weights=top.holds_weights or disk.holds_weights)
    return tuple(merged if d is top else d for d in disks if d is not disk)


async def read_disks(
    root: Root, weights: Iterable[str] = (), *, statvfs: Statvfs = os.statvfs
) -> tuple[Disk, ...]:
    """Filesystems of the machine, with space where they answer within STATVFS_TIMEOUT_S.

    A captured machine has no space to ask for: there sizes stay unknown.
    """
    text = await bounded(partial(root.read, "/proc/self/mountinfo"), key="mountinfo", timeout_s=3)
    places = await _real_paths(root, weights)
    found = _find(mounts.parse_mountinfo(text or ""), places)
    disks = [disk for disk, _ in found]
    if not root.live and statvfs is os.statvfs:
        return tuple(disks)
    groups: dict[str, list[int]] = {}
    for position, (disk, mount) in enumerate(found):
        name = disk.mount if disk.kind == "local" else mounts.server(mount)
        groups.setdefault(f"statvfs {name}", []).append(position)

    async def fill(key: str, positions: Sequence[int]) -> None:
        # A dead filer is met once, not once a mount: each call that hangs holds a thread for ever.
        for position in positions:
            disks[position] = await _with_space(disks[position], key, statvfs)

    async with trio.open_nursery() as nursery:
        for key, positions in groups.items():
            nursery.start_soon(fill, key, positions)
    return merge_overlay(disks)


async def _with_space(disk: Disk, key: str, statvfs: Statvfs) -> Disk:
    def ask() -> os.statvfs_result | None:
        try:
            return statvfs(disk.mount)
        except (OSError, ValueError):
            return None  # stale handle, no permission: unknown, and the others are asked still

    space = await bounded(ask, key=key, timeout_s=STATVFS_TIMEOUT_S)
    if space is None:
        return disk
    unit = space.f_frsize or space.f_bsize
    return replace(
        disk, total_mib=space.f_blocks * unit // 2**20, free_mib=space.f_bavail * unit // 2**20
    )


async def _real_paths(root: Root, paths: Iterable[str]) -> list[str]:
    """Paths with links followed (on the live machine only), as given when that hangs."""
    found = []
    for path in paths:
        real = None
        if root.live:
            real = await bounded(
                partial(os.path.realpath, path), key=f"realpath {path}", timeout_s=STATVFS_TIMEOUT_S
            )
        found.append(real or path)
    return found
