"""CPU time and memory of processes from /proc, those that ended meanwhile included. Blocking."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Times:
    """CPU seconds of a process, and of those children of it that ended and were waited for."""

    parent: int
    own_s: float
    ended_s: float


def times(pid: int) -> Times | None:
    """None when there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    user, system, ended_user, ended_system = (int(field) * TICK_S for field in fields[11:15])
    return Times(int(fields[1]), user + system, ended_user + ended_system)


def tree(top: int) -> dict[int, Times]:
    """A process and all below it, by number."""
    numbers = [int(path.name) for path in PROC.iterdir() if path.name.isdecimal()]
    every = {number: found for number in numbers if (found := times(number))}
    chosen, found_more = {top}, True
    while found_more:
        more = {n for n, seen in every.items() if seen.parent in chosen} - chosen
        chosen |= more
        found_more = bool(more)
    return {number: every[number] for number in chosen if number in every}


def spent_s(seen: dict[int, Times]) -> float:
    """CPU seconds of a whole tree since its start: a child that ends moves to its parent's."""
    return sum(one.own_s + one.ended_s for one in seen.values())


def rss_mib(pid: int, part: str = "VmRSS") -> float | None:
    """Resident memory with shared pages, as `ps` shows it; or a part of it, as RssAnon."""
    try:
        text = (PROC / str(pid) / "status").read_text()
    except OSError:
        return None
    found = [line.split()[1] for line in text.splitlines() if line.startswith(f"{part}:")]
    return int(found[0]) / 1024 if found else None


def command(pid: int) -> str:
    """What was started, for people; empty when it has ended."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()[:120]


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    models = [
        line.partition(":")[2].strip()
        for line in (PROC / "cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }
