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
    visible = tuple({mount.mount: mount for mount in table}.values())
    holders = {mounts.identity(m) for path in weights if (m := mounts.holding(path, visible))}
    chosen: dict[tuple[str, str], mounts.Mount] = {}
    for mount in visible:
        if mounts.kind(mount) == "pseudo":
            continue
        key = mounts.identity(mount)
        if key not in chosen or _rank(mount) < _rank(chosen[key]):
            chosen[key] = mount
    disks = [
        Disk(mount.mount, mount.fstype, mounts.kind(mount), holds_weights=key in holders)
        for key, mount in chosen.items()
    ]
    return tuple(sorted(disks, key=lambda disk: disk.mount)[:MAX_DISKS])


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
    below = [
        d for d in disks if d.kind == "local" and d is not top and d.total_mib == top.total_mib
    ]
    merged = replace(top, holds_weights=any(d.holds_weights for d in (top, *below)))
    return tuple(merged if d is top else d for d in disks if d not in below)


async def read_disks(
    root: Root, weights: Iterable[str] = (), *, statvfs: Statvfs = os.statvfs
) -> tuple[Disk, ...]:
    """Filesystems of the machine, with space where they answer within STATVFS_TIMEOUT_S.

    A captured machine has no space to ask for: there sizes stay unknown.
    """
    text = await bounded(partial(root.read, "/proc/self/mountinfo"), key="mountinfo", timeout_s=3)
    places = await _real_paths(root, weights)
    disks = list(find(mounts.parse_mountinfo(text or ""), places))
    if not root.live and statvfs is os.statvfs:
        return tuple(disks)

    async def fill(position: int) -> None:
        disks[position] = await _with_space(disks[position], statvfs)

    async with trio.open_nursery() as nursery:
        for position in range(len(disks)):
            nursery.start_soon(fill, position)
    return merge_overlay(disks)


async def _with_space(disk: Disk, statvfs: Statvfs) -> Disk:
    def ask() -> os.statvfs_result | None:
        try:
            return statvfs(disk.mount)
        except (OSError, ValueError):
            return None  # stale handle, no permission: unknown, and the others are asked still

    space = await bounded(ask, key=f"statvfs {disk.mount}", timeout_s=STATVFS_TIMEOUT_S)
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
