"""Which machine an adapter sits in: by GUIDs that agents reported, by descriptions only else.

Pure. Called by graph.py. Descriptions are free text: default (the model's name), shared by two
machines, stale after a move, or missing. So they group adapters that no agent knows, and only
where no two adapters claim to be the same device of the same host.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from controller.fabric.model import HostPort

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from controller.fabric.model import Device, Port

_HCA: Final = re.compile(
    r"HCA-[0-9]{1,4}|(?:mlx[45]|mthca|qib|hfi1|ipath|bnxt_re|irdma|efa|erdma|hns|ocrdma)[\w.]{1,30}"
    r"|(?:ib|roce)(?:[psox][0-9a-f]|[0-9])\w{0,30}",
    re.ASCII,
)
_NUMBERED: Final = re.compile(r"(HCA-|mlx[45]_)([0-9]{1,4})", re.ASCII)
_BLADE: Final = re.compile(
    r"[A-Z0-9]{1,8};(.{1,64}):([A-Za-z0-9_-]{1,32})((?:/[A-Z]{1,4}[0-9]{1,4})+)"
)
_NUMBERS: Final = re.compile(r"([0-9]+)")
_SHARP_ID: Final = 0xCF09
"""Device id of the aggregation node in a Quantum-2 switch, whatever it is called."""


def is_aggregation(device: Device) -> bool:
    """Whether it is the SHARP part of a switch, which looks like an adapter and is no host."""
    return device.kind == "ca" and (
        "aggregation node" in device.description.lower() or device.device_id == _SHARP_ID
    )


def host_and_hca(description: str) -> tuple[str | None, str | None]:
    """`node1 mlx5_0` -> (node1, mlx5_0); (None, None) for a model's name or any other text.

    The last word must be a device, else the text is no host's. One word alone is a host's name.
    """
    text = description.strip()
    host, _, hca = text.rpartition(" ")
    if host and _HCA.fullmatch(hca):
        return host.strip(), hca
    alone = bool(text) and not any(c.isspace() for c in text) and not _HCA.fullmatch(text)
    return (text, None) if alone and not re.match(r"MT[0-9]{4}", text) else (None, None)


def is_generic(host: str) -> bool:
    """A host name that every machine has before it gets its own."""
    return host.lower().split(".")[0] in {"localhost", "localhost6", "(none)", "linux", "unknown"}


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key with numbers by value: node2 before node10."""
    parts = _NUMBERS.split(text[:256])
    return tuple((1, int(p), p) if p.isdecimal() and p.isascii() else (0, 0, p) for p in parts)


def series(name: str) -> str:
    """`a05-p1-dgx-01-c09` -> `a#-p#-dgx-#-c#`: machines of one series differ in numbers only."""
    return _NUMBERS.sub("#", name.lower())


def hca_label(hca: str | None) -> tuple[int, str] | None:
    """What is the same for the same slot of two machines: HCA-5 counts from 1, mlx5_4 from 0."""
    numbered = _NUMBERED.fullmatch(hca or "")
    if numbered:
        return int(numbered[2]) - (numbered[1] == "HCA-"), ""
    return (0, hca) if hca else None


@dataclass(frozen=True, slots=True)
class Machine:
    """Adapters that sit in one machine, with what the agents call their ports."""

    name: str
    node: str | None
    named: bool
    adapters: tuple[Device, ...]


def known_port(device: Device, port: Port | None, known: Mapping[str, HostPort]) -> HostPort | None:
    """The agent's port behind a scanned one: by port GUID, else by the GUID of its device."""
    if port is not None and port.guid is not None and port.guid in known:
        return known[port.guid]
    found = known.get(device.guid)
    return found and HostPort(found.node, found.hca, port.number if port else found.port)


def machines(adapters: Sequence[Device], known: Mapping[str, HostPort]) -> list[Machine]:
    """Group adapters by machine; each adapter is in exactly one. The order does not matter."""
    shared = {host for host, _, _ in _claimed_twice(adapters)}
    nodes = {device.guid: _node(device, known) for device in adapters}
    hosts: dict[str, str | None] = {}
    for device in adapters:
        host, _ = host_and_hca(device.description)
        hosts[device.guid] = None if host is None or host in shared or is_generic(host) else host
    owners: dict[str, tuple[str, str]] = {}
    for chips in _boards(adapters):
        on_board = {nodes[d.guid] for d in chips} - {None}, {hosts[d.guid] for d in chips} - {None}
        whole = len(on_board[0]) <= 1 and len(on_board[1]) <= 1
        for device in chips:
            node, host = nodes[device.guid], hosts[device.guid]
            if whole:  # one board is in one machine; several names mean a board shared by hosts
                node, host = next(iter(on_board[0]), None), next(iter(on_board[1]), None)
            lone = chips[0].guid if whole else device.guid
            owners[device.guid] = (
                ("node", node) if node else ("host", host) if host else ("adapter", lone)
            )
    return _gather(adapters, owners)


def _gather(adapters: Sequence[Device], owners: Mapping[str, tuple[str, str]]) -> list[Machine]:
    grouped: dict[tuple[str, str], list[Device]] = {}
    for device in sorted(adapters, key=lambda d: d.guid):
        grouped.setdefault(owners[device.guid], []).append(device)
    return [
        Machine(name, name if kind == "node" else None, kind != "adapter", tuple(members))
        for (kind, name), members in grouped.items()
    ]


def _node(device: Device, known: Mapping[str, HostPort]) -> str | None:
    for port in (*device.ports, None):
        found = known_port(device, port, known)
        if found is not None:
            return found.node
    return None


def _boards(adapters: Sequence[Device]) -> list[list[Device]]:
    """Adapters of one system image GUID: chips or functions of one board."""
    boards: dict[str, list[Device]] = {}
    for device in sorted(adapters, key=lambda d: d.guid):
        boards.setdefault(device.system_guid or f"only {device.guid}", []).append(device)
    return list(boards.values())


def _claimed_twice(adapters: Iterable[Device]) -> dict[tuple[str, str, int], int]:
    """(host, HCA, port number) that more than one adapter claims, and how many do."""
    claims = Counter[tuple[str, str, int]]()
    for device in adapters:
        host, hca = host_and_hca(device.description)
        if host is not None:
            numbers = {port.number for port in device.ports} or {1}
            claims.update((host, hca or "", number) for number in numbers)
    return {claim: count for claim, count in claims.items() if count > 1}


def shared_descriptions(devices: Sequence[Device]) -> tuple[tuple[str, int], ...]:
    """Texts that ought to be unique and are not: of hosts' adapters, and of named switches."""
    adapters = [d for d in devices if d.kind == "ca" and not is_aggregation(d)]
    found: dict[str, int] = {}
    for (host, hca, _), count in _claimed_twice(adapters).items():
        text = f"{host} {hca}".strip()
        found[text] = max(count, found.get(text, 0))
    switches = Counter(
        d.description for d in devices if d.kind == "switch" and _BLADE.fullmatch(d.description)
    )
    found |= {text: count for text, count in switches.items() if count > 1}
    return tuple(sorted(found.items()))


def switch_names(switches: Sequence[Device]) -> dict[str, tuple[str, str | None]]:
    """Switch GUID -> (short name, chassis).

    `MF0;dir1:MCS8500/L01/U1` and `.../S01/U1` are blades of the chassis dir1. Where one blade is
    there twice, two chassis carry one name: then the system image GUID tells them apart, and
    where that cannot either there is no chassis.
    """
    blades: dict[str, dict[str, list[Device]]] = {}
    names: dict[str, tuple[str, str | None]] = {}
    for device in switches:
        match = _BLADE.fullmatch(device.description.strip())
        if match:
            blades.setdefault(match[1], {}).setdefault(match[3], []).append(device)
        else:
            text = device.description.strip() or device.guid
            names[device.guid] = (text, device.chassis and f"chassis {device.chassis}")
    for box, units in blades.items():
        unique = all(len(devices) == 1 for devices in units.values())
        boxes = Counter((d.system_guid, unit) for unit, ds in units.items() for d in ds)
        by_system = not unique and all(g and n == 1 for (g, _), n in boxes.items())
        sizes = Counter(d.system_guid for ds in units.values() for d in ds)
        for unit, devices in units.items():
            for device in devices:
                chassis = box if unique else f"{box} ({device.system_guid})" if by_system else None
                several = len(units) > 1 if unique else sizes[device.system_guid] > 1
                name = f"{box}{unit.removesuffix('/U1')}" if several else box
                names[device.guid] = (name, chassis if several else None)
    return names
