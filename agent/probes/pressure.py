"""How long work waits for CPU, memory and disks: the kernel's pressure figures. Pure parser first.

Called by host.py and inventory.py. Kernels before 4.20, and those started without `psi=1`, have no
figures: then everything is None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from agent.probes.root import Root

FOLDER: Final = "/proc/pressure"
_LINE: Final = re.compile(r"^(some|full) avg10=([0-9]{1,3}(?:\.[0-9]{1,4})?)(?: |$)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stall:
    """Per cent of the last ten seconds in which `some` task, or the `full` set of them, waited.

    Kernels before 5.13 have no `full` for the CPU.
    """

    some: float | None = None
    full: float | None = None


@dataclass(frozen=True, slots=True)
class Pressure:
    """Stalls by what was waited for."""

    cpu: Stall = Stall()
    memory: Stall = Stall()
    io: Stall = Stall()


def parse(text: str | None) -> Stall:
    """One file of /proc/pressure: `some avg10=1.53 avg60=0.87 avg300=0.73 total=1067`."""
    found = {match[1]: float(match[2]) for match in _LINE.finditer((text or "")[:4096])}
    kept = {name: percent for name, percent in found.items() if percent <= 100}
    return Stall(kept.get("some"), kept.get("full"))


def read_pressure(root: Root) -> Pressure:
    """Pressure now. Blocking, quick: three kernel files."""
    cpu, memory, io = (
        parse(root.read(f"{FOLDER}/{name}", 4096)) for name in ("cpu", "memory", "io")
    )
    return Pressure(cpu, memory, io)
