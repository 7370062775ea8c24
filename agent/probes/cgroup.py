"""Limits of the control groups the agent lives in: what of the host it may really use.

The smallest limit on the path from our group to the root of the mount wins, in v1, v2 and hybrid
layouts (case E13). `max` and v1's huge numbers are no limit, and page cache is not used memory:
the kernel drops it before anyone is killed (case E14). Engines inherit our group, so these are
their limits too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, TypeVar

from agent.probes import mounts, values

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agent.probes.host import Memory
    from agent.probes.root import Root

N = TypeVar("N", int, float)

V1_UNLIMITED: Final = 2**62
"""v1 writes "no limit" as a page-rounded 2**63; nobody has a limit of 4 EiB."""
MAX_DEPTH: Final = 64
MAX_TEXT: Final = 65536
_STAT: Final = re.compile(r"^(\w+) ([0-9]{1,19})$", re.MULTILINE)
CONTROLLERS: Final = ("memory", "cpu", "cpuset")


@dataclass(frozen=True, slots=True)
class Level:
    """One group on the path. Bytes, CPUs; None means no limit here, or unknown."""

    memory_limit: int | None = None
    memory_used: int | None = None
    memory_reclaimable: int = 0
    cpu_quota: float | None = None
    cpuset: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What all levels together allow: bytes and CPUs, None where nothing limits."""

    memory_limit: int | None = None
    memory_available: int | None = None
    cpus: float | None = None


@dataclass(frozen=True, slots=True)
class Membership:
    """A line of /proc/self/cgroup; `controllers` is empty for the v2 hierarchy."""

    controllers: frozenset[str]
    path: str


def parse_membership(text: str) -> tuple[Membership, ...]:
    """/proc/self/cgroup: `9:name=systemd:/`, `4:memory:/docker/ab`, `0::/user.slice`."""
    found = []
    for line in text[:MAX_TEXT].splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3 and parts[2].startswith("/"):
            found.append(Membership(frozenset(filter(None, parts[1].split(","))), parts[2]))
    return tuple(found)


def directories(
    membership: Iterable[Membership], table: Sequence[mounts.Mount], controller: str
) -> tuple[str, ...]:
    """Directories from our group up to the mount's root that may hold files of a controller.

    Both hierarchies of a hybrid layout are named; the files exist in one of them only.
    """
    found: list[str] = []
    for mount in table:
        if mount.fstype == "cgroup2":
            paths = [member.path for member in membership if not member.controllers]
        elif mount.fstype == "cgroup" and controller in mount.options:
            paths = [member.path for member in membership if controller in member.controllers]
        else:
            continue
        for path in paths[:1]:
            found += _upwards(PurePosixPath(mount.mount), mount.root, path)
    return tuple(dict.fromkeys(found))


def _upwards(mount: PurePosixPath, mount_root: str, path: str) -> list[str]:
    """From our group up to the mount; a container mounts its own group as the root of the tree."""
    try:
        below = PurePosixPath(path).relative_to(mount_root)
    except ValueError:
        below = PurePosixPath()  # we live outside what is mounted: its root is all there is to see
    if ".." in below.parts:
        below = PurePosixPath()
    parts = below.parts[:MAX_DEPTH]
    return [str(mount.joinpath(*parts[:depth])) for depth in range(len(parts), -1, -1)]


def parse_limit(text: str | None) -> int | None:
    """Bytes of memory.max or memory.limit_in_bytes; `max` and v1's huge numbers are no limit."""
    limit = values.whole(text)
    return limit if limit is not None and 0 <= limit < V1_UNLIMITED else None


def parse_cpu_max(text: str | None) -> float | None:
    """CPUs of cpu.max: `150000 100000` is 1.5, `max 100000` no limit."""
    quota, _, period = (text or "").strip().partition(" ")
    return _quota(values.whole(quota), values.whole(period))


def _quota(quota_us: int | None, period_us: int | None) -> float | None:
    if quota_us is None or period_us is None or quota_us <= 0 or period_us <= 0:
        return None
    return quota_us / period_us


def parse_reclaimable(text: str) -> int:
    """Bytes of memory.stat the kernel gives back under pressure: file pages and clean slab.

    v1 counts children under `total_` names; they are wanted there. tmpfs is in neither.
    """
    stat = {key: int(n) for key, n in _STAT.findall(text[:MAX_TEXT])}
    if "total_inactive_file" in stat:
        return stat["total_inactive_file"] + stat.get("total_active_file", 0)
    names = ("inactive_file", "active_file", "slab_reclaimable")
    return sum(stat.get(name, 0) for name in names)


def parse_hierarchical(text: str) -> int | None:
    """v1's word on the smallest limit of all groups above, also those a container cannot see."""
    match = re.search(r"^hierarchical_memory_limit ([0-9]{1,20})$", text[:MAX_TEXT], re.MULTILINE)
    return parse_limit(match[1]) if match else None


def combine(levels: Iterable[Level], allowed_cpus: int | None = None) -> Limits:
    """The smallest of every limit on the path, and the least that any level still has to give."""
    limit: int | None = None
    available: int | None = None
    cpus: float | None = float(allowed_cpus) if allowed_cpus else None
    for level in levels:
        limit = least(limit, level.memory_limit)
        if level.memory_limit is not None and level.memory_used is not None:
            used = max(0, level.memory_used - level.memory_reclaimable)
            available = least(available, max(0, level.memory_limit - used))
        cpus = least(cpus, level.cpu_quota)
        cpus = least(cpus, float(level.cpuset) if level.cpuset else None)
    return Limits(limit, available, cpus)


def least(a: N | None, b: N | None) -> N | None:
    """The smaller of two numbers, where None is unknown or unlimited."""
    return b if a is None else a if b is None else min(a, b)


def effective_memory(host: Memory, limits: Limits) -> Memory:
    """Host memory as far as the limits let us use it, in MiB."""
    limit = None if limits.memory_limit is None else limits.memory_limit // 2**20
    left = None if limits.memory_available is None else limits.memory_available // 2**20
    return replace(
        host,
        total_mib=least(host.total_mib, limit),
        available_mib=least(least(host.available_mib, left), limit),
    )


def read_limits(root: Root) -> Limits:
    """Limits of the group this process lives in. Blocking, quick: kernel files only."""
    table = mounts.parse_mountinfo(root.read("/proc/self/mountinfo") or "")
    membership = parse_membership(root.read("/proc/self/cgroup") or "")
    if not any(mount.fstype in {"cgroup", "cgroup2"} for mount in table):
        table, membership = _assumed(root)
    levels = [
        _read_level(root, directory, controller)
        for controller in CONTROLLERS
        for directory in directories(membership, table, controller)
    ]
    return combine(levels, _allowed_cpus(root))


def _assumed(root: Root) -> tuple[tuple[mounts.Mount, ...], tuple[Membership, ...]]:
    """The usual places, for captures that hold /sys/fs/cgroup without our own /proc/self."""
    top = "/sys/fs/cgroup"
    if root.exists(f"{top}/cgroup.controllers") or root.exists(f"{top}/memory.max"):
        return (mounts.Mount("0:0", "/", top, "cgroup2", "cgroup2", ()),), (
            Membership(frozenset(), "/"),
        )
    table = tuple(
        mounts.Mount("0:0", "/", f"{top}/{name}", "cgroup", "cgroup", (name,))
        for name in CONTROLLERS
    )
    return table, (Membership(frozenset(CONTROLLERS), "/"),)


def _read_level(root: Root, directory: str, controller: str) -> Level:
    def text(name: str) -> str | None:
        return root.read(f"{directory}/{name}", 65536)

    if controller == "memory":
        stat = text("memory.stat") or ""
        v1 = least(parse_limit(text("memory.limit_in_bytes")), parse_hierarchical(stat))
        hard = least(parse_limit(text("memory.max")), v1)
        # Above memory.high the kernel slows everything down so far that an engine is of no use.
        return Level(
            memory_limit=least(hard, parse_limit(text("memory.high"))),
            memory_used=values.whole(text("memory.current") or text("memory.usage_in_bytes")),
            memory_reclaimable=parse_reclaimable(stat),
        )
    if controller == "cpu":
        old = (values.whole(text(f"cpu.cfs_{part}_us")) for part in ("quota", "period"))
        return Level(cpu_quota=least(parse_cpu_max(text("cpu.max")), _quota(*old)))
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    sets = [values.cpu_list(text(name)) for name in names]
    return Level(cpuset=next((len(cpus) for cpus in sets if cpus), None))


def _allowed_cpus(root: Root) -> int | None:
    """CPUs our process may run on (taskset, cpuset seen from inside a container)."""
    match = re.search(
        r"^Cpus_allowed_list:\s*([0-9,-]+)$", root.read("/proc/self/status") or "", re.MULTILINE
    )
    cpus = values.cpu_list(match[1]) if match else None
    return len(cpus) if cpus else None
