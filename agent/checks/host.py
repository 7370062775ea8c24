"""Checks of the machine itself: processors, limits, pressure, disks, installed engines. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from agent.checks import labels
from agent.checks.verdict import Verdict, failed, passed, together, warned
from agent.probes import warnings

if TYPE_CHECKING:
    from agent.probes.disks import Disk
    from agent.probes.engines import Engine
    from agent.probes.found import Found

FULL_SHARE: Final = 0.01
"""With less free than this part of a disk it is as good as full."""
PRESSURE_PERCENT: Final = 10.0
LEAST_CPUS: Final = 1.0
LEAST_MIB: Final = 1024
_NO_PROC: Final = "let the agent read /proc and /sys"
_RAISE: Final = "raise the limit of the agent's service or container"
_ENGINE: Final = (
    "put llama-server into PATH, or name the environment of vLLM or SGLang in the agent's "
    "engine_venvs (`uv venv ENV && uv pip install -p ENV vllm`)"
)


def cpu(found: Found) -> Verdict | None:
    """The processor's kind and what engines miss in it."""
    if found.host is None:
        return warned("the host could not be looked at", _NO_PROC)
    facts = found.host.cpu
    words = ", ".join(filter(None, (facts.model, facts.arch)))
    if not words:
        return warned("the kind of processor is not known", _NO_PROC)
    lacks = next(warnings.cpu(facts), None)
    if lacks:
        remedy = "set the virtual machine's CPU type to host, or use a newer machine"
        return warned(f"{words}: {lacks}", remedy)
    best = [flag.upper() for flag in ("avx2", "avx512f", "amx_tile", "sve") if flag in facts.flags]
    return passed(", ".join([words, *best]))


def cpu_limit(found: Found) -> Verdict | None:
    """Cores that engines here may use, beside those of the host."""
    host = found.host.cpu.count if found.host else None
    if found.cpus is None:
        return warned("the number of cores is not known", _NO_PROC)
    words = f"{found.cpus:g} of {'an unknown number of' if host is None else host} cores"
    if found.cpus < LEAST_CPUS:
        return warned(f"{words}: less than one", f"{_RAISE} (CPUQuota, --cpus)")
    return passed(f"{words} can be used")


def memory_limit(found: Found) -> Verdict | None:
    """Memory that engines here may use, beside that of the host."""
    host = found.host.memory.total_mib if found.host else None
    total, left = found.usable.total_mib, found.usable.available_mib
    if total is None:
        return warned("the size of memory is not known", _NO_PROC)
    of = "an unknown size" if host is None else _gib(host)
    words = f"{_gib(total)} of the host's {of} can be used"
    words += "" if left is None else f", {_gib(left)} of it available"
    if total < LEAST_MIB:
        return warned(words, f"{_RAISE} (MemoryMax, --memory)")
    return passed(words)


def _gib(mib: int) -> str:
    return f"{mib / 1024:.1f} GiB"


def pressure(found: Found) -> Verdict | None:
    """Whether all work stands still for memory, as before a machine runs out of it."""
    if found.host is None:
        return None
    stalls = found.host.pressure
    full = stalls.memory.full
    if full is None:
        return None
    words = f"all work waited for memory {full:g} % of the last ten seconds"
    if full > PRESSURE_PERCENT:
        return warned(words, "stop what uses the memory (`ps aux --sort -rss`), or place less here")
    others = (("CPU", stalls.cpu.some), ("disks", stalls.io.some))
    waits = (f"some for {name} {some:g} %" for name, some in others if some is not None)
    return passed(", ".join([words, *waits]))


def disk(found: Found) -> Verdict | None:
    """Free space of `/` and of every filesystem that holds weights."""
    watched = [disk for disk in found.disks if disk.holds_weights or disk.mount == "/"]
    if not watched:
        return warned("no filesystem could be looked at", "let the agent read /proc/self/mountinfo")
    return together(map(_disk, watched))


def _disk(one: Disk) -> Verdict:
    kind = "" if one.kind == "local" else f" ({one.kind}, {one.filesystem})"
    if one.free_mib is None or not one.total_mib:
        remedy = f"`df {one.mount}`: where that hangs its server is away"
        return warned(f"{one.mount}{kind}: free space not known", remedy)
    share = one.free_mib / one.total_mib
    words = f"{one.mount}{kind}: {_gib(one.free_mib)} free of {_gib(one.total_mib)} ({share:.0%})"
    remedy = "remove weights that no model uses, or add space"
    if share < FULL_SHARE and one.kind == "local":
        return failed(words, remedy)
    if share < FULL_SHARE or next(warnings.disks([one]), None):
        return warned(words, remedy)
    return passed(words)


def engines(found: Found) -> Verdict | None:
    """Engines that models can be served with; a plain `command` always can be started."""
    real = [engine for engine in found.engines if engine.engine != "command"]
    whole = [engine for engine in real if engine.state == "installed"]
    verdicts = list(_broken(real))
    if whole:
        verdicts.append(passed(labels.listed(dict.fromkeys(map(_named, whole)))))
    else:
        verdicts.append(warned("no engine is installed: only plain commands can run", _ENGINE))
    return together(verdicts)


def engine_ports(found: Found) -> Verdict | None:
    """Whether outgoing connections may take the ports of engines before these start."""
    ports = found.local_ports
    if ports is None:
        return None
    words = f"engines get {_range(ports.engines)}, outgoing connections {_range(ports.outgoing)}"
    if not ports.shared:
        return passed(words if not ports.kept else f"{words} without those kept")
    return warned(
        f"{words}: {labels.counted(ports.shared, 'port')} in both, where engines may find another",
        f"set other ports in agent.toml (outside {_range(ports.outgoing)}), or keep these: "
        f"`sysctl -w net.ipv4.ip_local_reserved_ports={_range(ports.engines)}` (and in "
        "/etc/sysctl.d)",
    )


def _range(ports: tuple[int, int]) -> str:
    return f"{ports[0]}-{ports[1]}"


def _named(engine: Engine) -> str:
    return f"{engine.engine} {engine.version or 'of unknown version'}"


def _broken(real: list[Engine]) -> Iterator[Verdict]:
    for engine in real:
        where = f"{_named(engine)} at {engine.path or 'an unknown place'}"
        if engine.state == "failed":
            words = f"{where} cannot be started: {engine.error or 'no reason given'}"
            yield warned(words, f"install it again, or remove {engine.path or 'it'}")
        elif engine.error:
            yield warned(
                f"{where}: {engine.error}", f"try `{engine.path or engine.engine}` by hand"
            )
