"""Ports that the kernel gives to outgoing connections, beside those that engines may be given.

An outgoing connection that holds an engine's port (or held it a minute ago) keeps the engine from
starting there. Called by inventory.py; judged by agent/checks/host.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from agent.probes.root import Root

    Range = tuple[int, int]

_SYSCTL: Final = "/proc/sys/net/ipv4/"
_RANGE: Final = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class LocalPorts:
    """Ranges with both ends included. Kept ones are never given to outgoing connections."""

    engines: Range
    outgoing: Range
    kept: tuple[Range, ...] = ()

    @property
    def shared(self) -> int:
        """How many ports of engines the kernel may give away."""
        first = max(self.engines[0], self.outgoing[0])
        last = min(self.engines[1], self.outgoing[1])
        kept = {port for a, b in self.kept for port in range(max(a, first), min(b, last) + 1)}
        return max(last - first + 1, 0) - len(kept)


def read(root: Root, engines: Range | None) -> LocalPorts | None:
    """What the kernel's settings say; None where they cannot be read or no ports are set."""
    numbers = (root.read(f"{_SYSCTL}ip_local_port_range", 64) or "").split()
    if engines is None or len(numbers) != 2 or not all(n.isdecimal() for n in numbers):
        return None
    kept = root.read(f"{_SYSCTL}ip_local_reserved_ports") or ""
    return LocalPorts(engines, (int(numbers[0]), int(numbers[1])), _ranges(kept))


def _ranges(text: str) -> tuple[Range, ...]:
    """``3000,4000-4099`` as ranges; what is not understood is left out: nothing is kept by it."""
    found = (_RANGE.fullmatch(part.strip()) for part in text.split(","))
    return tuple((int(m[1]), min(int(m[2] or m[1]), 65535)) for m in found if m)
