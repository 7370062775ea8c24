"""Who runs IMEX: systemd, Kubernetes, Slurm or somebody by hand, told from its processes.

Called by agent/probes/imex.py. Two owners at once take each other's session away and jobs hang
(case E17), so all of them are found and each comes with what disables it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.probes.root import Root
    from agent.probes.services import Service

DAEMON: Final = "nvidia-imex"
MAX_PARENTS: Final = 8

_POD: Final = re.compile(r"pod([0-9a-f]{8}(?:[_-][0-9a-f]{4}){3}[_-][0-9a-f]{12})")
_SLURM: Final = re.compile(r"slurm[^\n]{0,200}?/job_([0-9]{1,12})")
_CONTAINER: Final = re.compile(r"(docker|containerd|crio|libpod|lxc)[-:/.]([0-9a-f]{12})")
_UNIT: Final = re.compile(r"([\w@.:\\-]{1,200}\.service)")
_BOX: Final = re.compile(r"kubepods|docker|containerd|crio|libpod|lxc")


@dataclass(frozen=True, slots=True)
class Owner:
    """Who runs the daemon: how it is called in reports, and what disables it."""

    name: str
    disable: str


def started_by(pid: int, cgroup: str, parents: Sequence[str]) -> Owner:
    """Who started a daemon: by its control group, else by its parents' names, nearest first."""
    daemon = f"process {pid} ({DAEMON})"
    names = " ".join(parents)
    if pod := _POD.search(cgroup):
        uid = pod[1].replace("_", "-")
        why = "the ComputeDomain or DaemonSet that runs it in Kubernetes"
        return Owner(f"{daemon}, started by the kubelet in pod {uid}", why)
    if job := _SLURM.search(cgroup):
        return Owner(f"slurm job {job[1]}: {daemon}", "the Slurm prolog or plugin that starts it")
    if "slurm" in cgroup or "slurm" in names:
        return Owner(f"slurm: {daemon}", "the Slurm prolog or plugin that starts it")
    if box := _CONTAINER.search(cgroup):
        why = f"container {box[2]}"
        return Owner(f"{daemon}, started by {box[1]} in container {box[2]}", why)
    runtime = next((p for p in parents if p.startswith(("containerd-shim", "conmon"))), None)
    if runtime:
        return Owner(f"{daemon}, started by {runtime.partition('-shim')[0]}", "that container")
    if unit := _UNIT.findall(cgroup):
        return _systemd(unit[-1])
    by = parents[0] if parents and parents[0] not in ("systemd", "init") else "hand or a script"
    return Owner(f"{daemon}, started by {by}", f"process {pid}")


def _systemd(unit: str) -> Owner:
    return Owner(f"systemd {unit}", f"`systemctl disable --now {unit}`")


def owners(unit: Service | None, daemons: Sequence[tuple[int, Owner]]) -> tuple[Owner, ...]:
    """All that run the daemon, systemd's own unit first; processes of one starter are one."""
    found: dict[str, Owner] = {}
    if unit is not None and unit.unit and (unit.state == "active" or unit.starting):
        own = _systemd(f"{DAEMON}.service")
        found[own.name] = own
    for pid, owner in daemons:
        # The number is no part of who it is: a daemon forks.
        found.setdefault(owner.name.replace(f"process {pid} ", ""), owner)
    return tuple(found.values())


def conflict(running: Sequence[Owner]) -> str | None:
    """What is wrong and what to do when more than one thing runs IMEX; None for one or none."""
    if len(running) < 2:
        return None
    names = " and ".join(owner.name for owner in running[:8])
    ways = " or ".join(owner.disable for owner in running[:8])
    return f"IMEX has {len(running)} owners that fight over it: {names}; keep one, disable {ways}"


def starter(root: Root, pid: int) -> Owner:
    """Who started a running daemon. Blocking, quick."""
    parents: list[str] = []
    parent = _parent(root, pid)
    while parent and len(parents) < MAX_PARENTS:
        parents.append((root.read(f"/proc/{parent}/comm", 64) or "?").strip())
        parent = _parent(root, parent)
    return started_by(pid, _cgroup(root, pid), parents)


def _parent(root: Root, pid: int) -> int | None:
    status = root.read(f"/proc/{pid}/status", 65536) or ""
    match = re.search(r"^PPid:\s{1,8}([0-9]{1,9})$", status, re.MULTILINE)
    return int(match[1]) or None if match else None


def own_config(root: Root, pid: int) -> str | None:
    """The file a daemon was started with by `-c`, where that is a file of this machine.

    A daemon in a container names a path of its own file system, which we cannot hand to our tool.
    """
    words = (root.read(f"/proc/{pid}/cmdline", 4096) or "").split("\x00")
    path = next((b for a, b in pairwise(words) if a == "-c"), None)
    boxed = _BOX.search(_cgroup(root, pid))
    return path if path and path.startswith("/") and not boxed and root.exists(path) else None


def _cgroup(root: Root, pid: int) -> str:
    return root.read(f"/proc/{pid}/cgroup", 65536) or ""
