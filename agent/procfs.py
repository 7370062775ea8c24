"""What /proc says of processes and listening sockets.

Called by process, readiness and supervise, from worker threads: a scan of all processes takes
milliseconds. Reads only; a process that vanishes while it is read is simply absent.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc/<pid>/stat, as far as it is needed here."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    cpu_ticks: int
    start_ticks: int
    rss_bytes: int

    @property
    def gone(self) -> bool:
        """Zombies hold no memory and no port: they only wait for their parent."""
        return self.state in "ZX"

    @property
    def halted(self) -> bool:
        """Stopped by SIGSTOP or a debugger: the kernel still accepts connections for it."""
        return self.state in "Tt"


def parse_stat(text: str) -> Process:
    """Parse /proc/<pid>/stat; the name may hold spaces and brackets, so count from its last one."""
    head, _, rest = text.rpartition(")")
    f = rest.split()
    return Process(
        pid=int(head.split(" ", 1)[0]),
        state=f[0],
        parent=int(f[1]),
        group=int(f[2]),
        session=int(f[3]),
        cpu_ticks=int(f[11]) + int(f[12]),
        start_ticks=int(f[19]),
        rss_bytes=int(f[21]) * PAGE_BYTES,
    )


def process(pid: int) -> Process | None:
    """The process now under this number, or None."""
    try:
        return parse_stat((PROC / str(pid) / "stat").read_text(errors="replace"))
    except (OSError, ValueError, IndexError):
        return None


def processes() -> list[Process]:
    """Every process that has not ended."""
    found = (process(int(name)) for name in os.listdir(PROC) if name.isdigit())  # noqa: PTH208
    return [p for p in found if p is not None and not p.gone]


def environment(pid: int) -> dict[str, str] | None:
    """The environment a process was started with; None when it is gone or another user's."""
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (
        item.partition("=") for item in raw.decode(errors="replace").split("\0") if "=" in item
    )
    return {name: value for name, _, value in pairs}


def written_over(pid: int) -> bool:
    """Whether a process has written a title over its environment, so that none can be read."""
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return bool(raw) and b"=" not in raw.partition(b"\0")[0]


def command_line(pid: int) -> str:
    """How the process was started, for people, at most 200 characters."""
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return "unknown program"
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()[:200] or "unknown program"


def listening_inodes(port: int) -> frozenset[int] | None:
    """Inodes of the sockets that listen on a TCP port in our network namespace; None: unknown."""
    found: set[int] = set()
    readable = False
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        readable = True
        for line in lines:
            f = line.split()
            if f[3] == LISTEN and int(f[1].rpartition(":")[2], 16) == port:
                found.add(int(f[9]))
    return frozenset(found) if readable else None


def socket_inodes(pid: int) -> frozenset[int]:
    """Inodes of the sockets a process holds; empty when it is gone or another user's."""
    found: set[int] = set()
    folder = PROC / str(pid) / "fd"
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names are enough
    except OSError:
        return frozenset()
    for name in names:
        try:
            target = (folder / name).readlink().name
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return frozenset(found)


def holder_of(inodes: frozenset[int]) -> int | None:
    """A process that holds one of these sockets; None when nobody we may look at does."""
    for p in processes():
        if socket_inodes(p.pid) & inodes:
            return p.pid
    return None


def age_s(start_ticks: int) -> float:
    """How long ago a process of this boot was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / TICKS_PER_S


def boot_id() -> str:
    """Changes with every boot: process numbers and start times of another boot mean nothing."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()
