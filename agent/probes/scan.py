"""One scan of the InfiniBand fabric: runs `ibnetdiscover` on a port and keeps what it prints.

Called by the agent's loop when the controller has chosen this node to scan its fabric. The
controller's parser turns the text into a graph; here is only the run, with its deadline and cap.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from agent.probes import ibstat, sminfo

if TYPE_CHECKING:
    from agent.probes.root import Root, ToolResult

TIMEOUT_S: Final = 120.0
OUTPUT_LIMIT: Final = 16 * 2**20
"""A fabric with 40 switches and 600 cards prints 300 kB: room for fifty times that."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What a scan printed, how long it took, and why it may be incomplete or empty."""

    text: str
    took_ms: int
    error: str | None = None


async def scan(root: Root, hca: str, port: int, timeout_s: float = TIMEOUT_S) -> Scan:
    """Scan the fabric behind a port. What is good in the output is kept beside an error."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", hca) or not 0 < port < 256:
        return Scan("", 0, f"no scan: {hca[:64]!r} port {port} is not the name of a port")
    began = trio.current_time()
    argv = ["ibnetdiscover", "-C", hca, "-P", str(port)]
    result = await root.run(argv, timeout_s, output_limit=OUTPUT_LIMIT)
    took_ms = round(1000 * (trio.current_time() - began))
    # Postgres stores no NUL in text.
    text = result.stdout.replace("\0", "\N{REPLACEMENT CHARACTER}")
    return Scan(text, took_ms, _error(result, f"{hca}/{port}"))


def _error(result: ToolResult, where: str) -> str | None:
    """A scan that ends well may still have passed over parts of the fabric: it warns of them."""
    if has_nodes(result.stdout):
        if result.error is not None:
            return f"{result.error}; what was found before is kept"
        missed = ibstat.complaint(result)
        return f"ibnetdiscover on {where}: not all of it answered: {missed}" if missed else None
    if result.timed_out:
        return f"{result.error}; a large fabric needs a longer deadline, or a switch hangs"
    if result.error is None and ibstat.complaint(result) is None:
        return f"ibnetdiscover on {where}: printed no node of a fabric"
    return sminfo.why(result, where, "ibnetdiscover")


def has_nodes(text: str) -> bool:
    """Whether there is a switch, router or card in the output of ibnetdiscover."""
    return re.search(r"^(?:Switch|Ca|Rt)\s{1,20}[0-9]{1,5}\s", text, re.MULTILINE) is not None
