"""Which physical InfiniBand network a port is on: the GUID of its master subnet manager.

Called by inventory.py after ib.read. The prefix in a port's GID is the same on every network, so
`sminfo` asks the subnet manager itself; that needs root, and a reason stands in for the answer
where it fails. Pure parser and classifier, then `identify`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import trio

from agent.probes import ibstat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.probes.ib import IbPort
    from agent.probes.root import Root, ToolResult

TIMEOUT_S: Final = 5.0
"""A healthy manager answers in milliseconds; sminfo itself gives up after about 3 s."""
MAX_AT_ONCE: Final = 16
MAX_ASKED: Final = 64
"""Ports asked in one round: with all of them hanging it takes four deadlines."""
MASTER: Final = "MASTER"
_NEEDS_ROOT: Final = (
    "cannot open /dev/infiniband/umad*: run the agent as root, or let it read and write them"
)
_CAUSES: Final = (
    ("is ib_umad module loaded", "the kernel module ib_umad is not loaded: modprobe ib_umad"),
    ("permission denied", _NEEDS_ROOT),
    ("operation not permitted", _NEEDS_ROOT),
    ("can't open umad port", _NEEDS_ROOT),
    ("can't open mad port", _NEEDS_ROOT),
    ("failed to open", _NEEDS_ROOT),
    ("iberror: failed: query", "no subnet manager answers: see that one runs (opensm, UFM)"),
)
"""What the tools print, most telling first, and the sentence for an operator."""
_STATES: Final = ("NOTACTIVE", "DISCOVER", "STANDBY", MASTER)
_ANSWER: Final = re.compile(
    r"sm lid ([0-9]{1,10}) sm guid (0x[0-9a-f]{1,16})(?=[,\s\x1b])"
    r"(?:,? activity count ([0-9]{1,10}))?(?: priority ([0-9]{1,3}))?"
    r"(?: state ([0-9]{1,3}))?(?: SMINFO_([A-Z]{1,20}))?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class SmInfo:
    """A subnet manager: `guid` of the port it runs on, `state` MASTER, STANDBY, DISCOVER, ..."""

    lid: int
    guid: str
    activity: int | None = None
    priority: int | None = None
    state: str | None = None


def parse(text: str) -> SmInfo | None:
    """The answer in `sminfo`'s output; None when there is none."""
    match = _ANSWER.search(text[:65536])
    guid = ibstat.guid(match[2]) if match else None
    if match is None or guid is None:
        return None
    number = int(match[5]) if match[5] else None
    named = match[6].upper() if match[6] else None
    known = _STATES[number] if number is not None and number < len(_STATES) else None
    return SmInfo(
        lid=int(match[1]),
        guid=guid,
        activity=int(match[3]) if match[3] else None,
        priority=int(match[4]) if match[4] else None,
        state=named if named in _STATES else known or named,
    )


def why(result: ToolResult, where: str, tool: str = "sminfo") -> str:
    """What went wrong with one of the InfiniBand tools on the port `where`, and what to do."""
    if ibstat.not_installed(result):
        return f"{tool} is not installed: install the package infiniband-diags"
    if result.timed_out:
        return f"{result.error}; the card or its driver hangs: look for {where} in the kernel log"
    said = f"{result.stdout[:4096]}\n{result.stderr[:65536]}"
    cause = next((cause for spelling, cause in _CAUSES if spelling in said.lower()), None)
    complaint = ibstat.complaint(result) or result.error or "output not understood"
    return f"{tool} on {where}: {cause or complaint}"


def answer(port: IbPort, result: ToolResult) -> IbPort:
    """The port with its subnet manager, or with the reason why that is not known."""
    where = f"{port.hca}/{port.port}"
    found = parse(result.stdout)
    if found is None:
        return replace(port, sm_error=why(result, where))
    if found.state not in {MASTER, None}:
        handover = f"the subnet manager at LID {found.lid} is {found.state}, not {MASTER}"
        return replace(port, sm_error=f"{where}: {handover}: asked again in the next round")
    return replace(port, sm_guid=found.guid, sm_lid=port.sm_lid or found.lid, sm_error=None)


def not_asked(port: IbPort) -> str | None:
    """Why the network of a port is unknown without asking; None: known, or a manager can tell."""
    where = f"{port.hca}/{port.port}"
    if port.link_layer == "InfiniBand" and not port.active:
        if port.state in {"ACTIVE", "INIT"}:
            return f"{where}: no LID yet: see that a subnet manager runs on this fabric"
        words = filter(None, (port.state or "in an unknown state", port.phys_state))
        return f"{where} is {', '.join(words)}: see to its cable and switch port"
    if port.link_layer == "OmniPath":
        return f"{where}: Omni-Path does not answer sminfo: declare the fabric in the settings"
    if port.link_layer == "Ethernet" and port.network is None:
        netdev = port.netdev or "its interface"
        return f"{where}: no RoCE v2 address in a known network: give {netdev} an IP address"
    return None


async def identify(root: Root, ports: Sequence[IbPort]) -> tuple[IbPort, ...]:
    """The same ports, in order, with `sm_guid` or `sm_error` filled in."""
    found = {index: replace(port, sm_error=not_asked(port)) for index, port in enumerate(ports)}
    to_ask = [
        index
        for index, port in found.items()
        if port.link_layer == "InfiniBand" and port.sm_error is None
    ]
    limiter = trio.CapacityLimiter(MAX_AT_ONCE)

    async def ask(index: int) -> None:
        port = ports[index]
        argv = ["sminfo", "-C", port.hca, "-P", str(port.port)]
        async with limiter:
            found[index] = answer(port, await root.run(argv, TIMEOUT_S))

    async with trio.open_nursery() as nursery:
        for index in to_ask[:MAX_ASKED]:
            nursery.start_soon(ask, index)
    for index in to_ask[MAX_ASKED:]:
        error = f"not asked: more than {MAX_ASKED} active InfiniBand ports"
        found[index] = replace(found[index], sm_error=error)
    return tuple(found[index] for index in range(len(ports)))
