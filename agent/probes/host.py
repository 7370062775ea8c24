"""The machine itself: processors, memory, operating system, load. Pure parsers, then one reader.

Called by agent/probes/inventory.py. Limits of the control group the agent lives in are
agent/probes/cgroup.py's; here is what the whole machine has.
"""

from __future__ import annotations

import platform
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from agent.probes import board, values
from agent.probes.pressure import Pressure, read_pressure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agent.probes.root import Root

NODES: Final = "/sys/devices/system/node"
ARM_CORES: Final[Mapping[tuple[str, str], str]] = {
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x41", "0xd83"): "Neoverse-V3AE",
    ("0x41", "0xd84"): "Neoverse-V3",
    ("0x41", "0xd8e"): "Neoverse-N3",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1a",
}
"""ARM kernels print no model name, only implementer and part (Grace and Graviton4: Neoverse-V2)."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """Processors of the machine. `flags` is what every one of them can do, empty when unknown."""

    model: str | None = None
    flags: tuple[str, ...] = ()
    count: int | None = None
    arch: str | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory in MiB. `coherent_mib` is GPU memory that shows up as CPU-less NUMA nodes."""

    total_mib: int | None = None
    available_mib: int | None = None
    coherent_mib: int = 0


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node: whether it has CPUs, and its memory in kB."""

    has_cpus: bool
    total_kb: int
    free_kb: int


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Jiffies of /proc/stat's `cpu` line: user nice system idle iowait irq softirq steal."""

    fields: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Host:
    """What the machine is; every field may be unknown.

    `numa_nodes` counts nodes with CPUs. `booted_at` is in seconds since 1970 by the machine's own
    clock, for show only; `boot_id` tells two boots apart.
    """

    hostname: str | None
    os: str | None
    kernel: str | None
    cpu: Cpu
    memory: Memory
    pressure: Pressure = field(default_factory=Pressure)
    layout: board.Layout = field(default_factory=board.Layout)
    numa_nodes: int | None = None
    boot_id: str | None = None
    booted_at: int | None = None
    product: str | None = None
    virtual: bool | None = None
    wsl: bool | None = None


def parse_cpuinfo(text: str) -> Cpu:
    """/proc/cpuinfo of x86 (`flags`), ARM (`Features`), POWER (`cpu`) and RISC-V (`isa`)."""
    first: dict[str, str] = {}
    flag_lines: set[str] = set()
    count = 0
    for line in text[: board.MAX_CPUINFO].splitlines():
        key, colon, value = line.partition(":")
        key, value = key.strip(), value.strip()
        if not colon:
            continue
        if key == "processor" and value.isdecimal():
            count += 1
        elif key in {"flags", "Features"}:
            flag_lines.add(value)
        first.setdefault(key, value)
    return Cpu(
        model=_model(first),
        flags=_common_flags(flag_lines),
        count=count or None,
        arch=_arch(first),
    )


def _model(first: Mapping[str, str]) -> str | None:
    arm = ARM_CORES.get((first.get("CPU implementer", ""), first.get("CPU part", "").lower()))
    names = (first.get("model name"), first.get("cpu"), arm, first.get("uarch"))
    return next((re.sub(r"\s+", " ", name) for name in names if name), None)


def _common_flags(lines: Iterable[str]) -> tuple[str, ...]:
    """Flags that all processors have: hybrid machines run an engine on any of them."""
    sets = [set(line.split()) for line in lines]
    return tuple(sorted(set.intersection(*sets))) if sets else ()


def _arch(first: Mapping[str, str]) -> str | None:
    if "CPU implementer" in first:
        return "aarch64"
    if "vendor_id" in first and "flags" in first:
        return "x86_64" if " lm" in f" {first['flags']}" else "i686"
    if first.get("cpu", "").startswith("POWER"):
        return "ppc64le"
    return "riscv64" if first.get("isa", "").startswith("rv64") else None


def parse_meminfo(text: str) -> dict[str, int]:
    """Sizes of /proc/meminfo (or a NUMA node's) by name, in kB; other lines are left out."""
    sizes: dict[str, int] = {}
    for line in text[:65536].splitlines():
        match = re.match(r"(?:Node +[0-9]+ +)?([A-Za-z0-9_()]+): +([0-9]{1,18}) *kB", line)
        if match:
            sizes[match[1]] = int(match[2])
    return sizes


def memory(meminfo: Mapping[str, int], nodes: Iterable[NumaNode] = ()) -> Memory:
    """Host memory without the GPU memory that coherent machines (GH200, GB200) add as nodes.

    Old kernels have no MemAvailable: then free memory and caches that can be dropped.
    """
    total, available = meminfo.get("MemTotal"), meminfo.get("MemAvailable")
    if available is None and "MemFree" in meminfo:
        caches = sum(meminfo.get(name, 0) for name in ("Buffers", "Cached", "SReclaimable"))
        available = max(0, meminfo["MemFree"] + caches - meminfo.get("Shmem", 0))
    nodes = tuple(nodes)
    coherent = [node for node in nodes if not node.has_cpus and node.total_kb]
    with_cpus = sum(node.total_kb for node in nodes if node.has_cpus)
    if coherent and with_cpus and total is not None:
        total = min(total, with_cpus)
        if available is not None:
            available = max(0, available - sum(node.free_kb for node in coherent))
    if total is not None and available is not None:
        available = min(available, total)
    return Memory(
        total_mib=total // 1024 if total else None,
        available_mib=available // 1024 if available is not None else None,
        coherent_mib=sum(node.total_kb for node in coherent) // 1024 if with_cpus else 0,
    )


def parse_os_release(text: str) -> str | None:
    """The name of the operating system for people: PRETTY_NAME, else NAME and VERSION."""
    fields: dict[str, str] = {}
    for line in text[:65536].splitlines():
        key, equals, value = line[:4096].strip().partition("=")
        if not equals or key.startswith("#"):
            continue
        try:
            fields[key] = " ".join(shlex.split(value))
        except ValueError:  # unbalanced quotes: take the text as it is
            fields[key] = value.strip("\"' ")
    plain = " ".join(filter(None, (fields.get("NAME"), fields.get("VERSION"))))
    return fields.get("PRETTY_NAME") or plain or None


def parse_loadavg(text: str) -> tuple[float, float, float] | None:
    """Load over 1, 5 and 15 minutes."""
    match = re.match(r"\s*([0-9]+\.[0-9]+) ([0-9]+\.[0-9]+) ([0-9]+\.[0-9]+)\b", text[:256])
    return (float(match[1]), float(match[2]), float(match[3])) if match else None


def parse_cpu_times(text: str) -> CpuTimes | None:
    """The `cpu` line of /proc/stat. Guest time is left out: user time contains it already."""
    match = re.search(r"^cpu +([0-9]{1,20}(?: [0-9]{1,20}){3,15})", text, re.MULTILINE)
    return CpuTimes(tuple(int(part) for part in match[1].split()[:8])) if match else None


def cpu_percent(before: CpuTimes, after: CpuTimes) -> float | None:
    """Busy share of all CPUs between two samples, 0 to 100; None when no time has passed.

    Counters go backwards when a CPU goes offline and on old kernels' iowait: such steps count as 0.
    """
    steps = [max(0, b - a) for a, b in zip(before.fields, after.fields, strict=False)]
    total = sum(steps)
    if not total:
        return None
    idle = sum(steps[3:5])
    return round(100 * (total - idle) / total, 1)


def read_numa_nodes(root: Root) -> tuple[NumaNode, ...]:
    """NUMA nodes from sysfs; empty where the kernel has none. Blocking, quick."""
    found = []
    for name in root.names(NODES):
        sizes = parse_meminfo(root.read(f"{NODES}/{name}/meminfo") or "")
        cpus = values.cpu_list(root.read(f"{NODES}/{name}/cpulist"))
        if re.fullmatch(r"node[0-9]+", name) and cpus is not None and "MemTotal" in sizes:
            found.append(NumaNode(bool(cpus), sizes["MemTotal"], sizes.get("MemFree", 0)))
    return tuple(found)


def read_memory(root: Root) -> Memory:
    """Host memory now. Blocking, quick."""
    return memory(parse_meminfo(root.read("/proc/meminfo") or ""), read_numa_nodes(root))


def read_host(root: Root) -> Host:
    """All of it. Blocking, quick: kernel files only."""
    cpuinfo = root.read("/proc/cpuinfo") or ""
    cpu = parse_cpuinfo(cpuinfo)
    nodes = read_numa_nodes(root)
    kernel = _first_line(root, "/proc/sys/kernel/osrelease")
    product = board.read_product(root)
    arch = platform.machine() if root.live else _first_line(root, "/proc/sys/kernel/arch")
    release = root.read("/etc/os-release") or root.read("/usr/lib/os-release") or ""
    hostname = _first_line(root, "/proc/sys/kernel/hostname") or _first_line(root, "/etc/hostname")
    return Host(
        hostname=hostname,
        os=parse_os_release(release),
        kernel=kernel,
        cpu=Cpu(cpu.model, cpu.flags, cpu.count, arch or cpu.arch),
        memory=memory(parse_meminfo(root.read("/proc/meminfo") or ""), nodes),
        pressure=read_pressure(root),
        layout=board.read_layout(root, cpuinfo),
        numa_nodes=sum(node.has_cpus for node in nodes) or None,
        boot_id=board.parse_boot_id(root.read("/proc/sys/kernel/random/boot_id", 64)),
        booted_at=board.parse_boot_time(root.read("/proc/stat") or ""),
        product=product,
        virtual=board.virtual(cpu.flags, product),
        wsl=board.wsl(kernel),
    )


def _first_line(root: Root, path: str) -> str | None:
    return next(iter((root.read(path) or "").strip().splitlines()), None)
