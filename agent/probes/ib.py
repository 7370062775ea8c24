"""InfiniBand and RoCE ports: what each port of each card is, from sysfs, else from `ibstat`.

`read_ports` is blocking and quick, `read` is for the inventory and falls back on the tools. Which
physical network a port is on comes from roce.py here and from sminfo.py afterwards. Nothing
raises: each field of a port may be unknown on its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from agent.probes import ib_counters, ibstat, roce, values
from agent.probes.root import bounded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from agent.probes.root import Root

CLASS: Final = ib_counters.CLASS
SYSFS_TIMEOUT_S: Final = 10.0
"""A card asks its firmware for each counter: milliseconds, more while it resets."""
TOOL_TIMEOUT_S: Final = 10.0
LID_NONE: Final = (0, 0xFFFF)
"""LIDs that are no address: never set, and the "permissive" one of a port that awaits its SM."""

LinkLayer = Literal["InfiniBand", "Ethernet", "OmniPath", "iWARP"]
_OMNI_PATH: Final = re.compile(r"(?:hfi[0-9]|opa)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class IbPort:
    """One port of one card (HCA). GUIDs are 16 lower-case hex digits.

    `rate_gbps` is what the card prints: of a port that is down it is a default (10 or 40), not a
    speed. `errors` are the error counters that are not zero, since the card was started.
    `sm_error` says why the physical network is not known.
    """

    hca: str
    port: int
    link_layer: LinkLayer | None = None
    state: str | None = None
    phys_state: str | None = None
    rate_gbps: float | None = None
    node_guid: str | None = None
    port_guid: str | None = None
    lid: int | None = None
    sm_lid: int | None = None
    gid_prefix: str | None = None
    netdev: str | None = None
    numa: int | None = None
    pci_bus_id: str | None = None
    board: str | None = None
    firmware: str | None = None
    network: str | None = None
    vlan: int | None = None
    fabric: str | None = None
    sm_guid: str | None = None
    sm_error: str | None = None
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def routed_by_sm(self) -> bool:
        """Whether a subnet manager gives this port its address."""
        return self.link_layer in {"InfiniBand", "OmniPath"}

    @property
    def active(self) -> bool:
        """Usable now. On InfiniBand that needs a subnet manager: both LIDs, as far as known."""
        if self.state != "ACTIVE":
            return False
        return not self.routed_by_sm or not {self.lid, self.sm_lid} & set(LID_NONE)

    @property
    def physical(self) -> str | None:
        """The physical network in words; None when not known."""
        if self.sm_guid is not None:
            return f"SM {self.sm_guid}" + (f" (LID {self.sm_lid})" if self.sm_lid else "")
        return f"RoCE {self.network}" if self.network is not None else None

    @property
    def key(self) -> str | None:
        """The same for all ports on one physical network, and for no other; None when unknown."""
        if self.sm_guid is not None:
            return f"ib:{self.sm_guid}"
        return f"roce:{self.network}" if self.network is not None else None


@dataclass(frozen=True, slots=True)
class Ports:
    """All ports found. With an `error` there may be more of them, or they may be out of date."""

    ports: tuple[IbPort, ...] = ()
    error: str | None = None


def declared_fabric(declared: Mapping[str, str], hca: str, port: int) -> str | None:
    """The fabric an operator named for a port. Globs match `mlx5_0`, with a slash `mlx5_0/1`.

    The most specific one wins: a plain name, then the one with most letters, then fewest stars.
    """
    matches = (
        (glob, fabric)
        for glob, fabric in declared.items()
        if fnmatchcase(f"{hca}/{port}" if "/" in glob else hca, glob)
    )
    return max(matches, key=lambda match: _specific(match[0]), default=(None, None))[1]


def _specific(glob: str) -> tuple[bool, int, int, str]:
    literal = re.sub(r"\[[^\]]*\]|[*?]", "", glob)
    return literal == glob, len(literal), -glob.count("*"), glob


def read_ports(root: Root, declared: Mapping[str, str]) -> tuple[IbPort, ...]:
    """Every port in sysfs, by card and port number, `mlx5_2` before `mlx5_10`. Blocking, quick."""
    networks = roce.read_networks(root)
    return tuple(
        _read_port(root, networks, hca, port, declared) for hca, port in ib_counters.ports(root)
    )


def _read_port(
    root: Root, networks: roce.Networks, hca: str, port: int, declared: Mapping[str, str]
) -> IbPort:
    card, place = f"{CLASS}/{hca}", f"{CLASS}/{hca}/ports/{port}"
    layer = _link_layer(root, card, place)
    prefix, port_guid = _gid(_line(root, f"{place}/gids/0"), layer)
    found = roce.find(root, place, networks) if layer == "Ethernet" else None
    return IbPort(
        hca=hca,
        port=port,
        link_layer=layer,
        state=ibstat.state(_line(root, f"{place}/state")),
        phys_state=ibstat.phys_state(_line(root, f"{place}/phys_state")),
        rate_gbps=ibstat.rate(_line(root, f"{place}/rate")),
        node_guid=ibstat.guid(_line(root, f"{card}/node_guid")),
        port_guid=port_guid,
        lid=ibstat.lid(_line(root, f"{place}/lid")),
        sm_lid=ibstat.lid(_line(root, f"{place}/sm_lid")),
        gid_prefix=prefix,
        netdev=(found.netdev if found else None) or _netdev(root, card, place, port),
        numa=_numa(_line(root, f"{card}/device/numa_node")),
        pci_bus_id=_pci_bus_id(root, card),
        board=_line(root, f"{card}/board_id"),
        firmware=_line(root, f"{card}/fw_ver"),
        network=found.network if found else None,
        vlan=found.vlan if found else None,
        fabric=declared_fabric(declared, hca, port),
        errors=ib_counters.not_zero(ib_counters.read_errors(root, place)),
    )


def _line(root: Root, path: str) -> str | None:
    """A sysfs value: one line, some with blanks or an empty line after it. None when empty."""
    text = (root.read(path, 4096) or "").replace("\0", "").strip()
    return text.splitlines()[0].strip()[:200] if text else None


def _link_layer(root: Root, card: str, place: str) -> LinkLayer | None:
    """The kernel calls Omni-Path "InfiniBand" and iWARP "Ethernet"; the card tells them apart."""
    printed = (_line(root, f"{place}/link_layer") or "").lower()
    if (_line(root, f"{card}/node_type") or "").endswith("RNIC"):
        return "iWARP"
    if printed == "infiniband":
        return "OmniPath" if _omni_path(root, card) else "InfiniBand"
    return "Ethernet" if printed == "ethernet" else None


def _omni_path(root: Root, card: str) -> bool:
    names = (card.rpartition("/")[2], (root.link(f"{card}/device/driver") or "").rpartition("/")[2])
    board = (_line(root, f"{card}/board_id") or "").lower()
    return any(_OMNI_PATH.match(name) for name in names) or "omni-path" in board


def _gid(text: str | None, layer: LinkLayer | None) -> tuple[str | None, str | None]:
    """Prefix of the subnet and GUID of the port, the two halves of GID 0.

    RoCE has a GUID there only while the entry is link-local, and never a prefix of a subnet.
    """
    digits = (text or "").replace(":", "").lower()
    if not re.fullmatch(r"[0-9a-f]{32}", digits):
        return None, None
    prefix, port_guid = digits[:16], ibstat.guid(digits[16:])
    if layer in {"InfiniBand", "OmniPath"}:
        return ibstat.guid(prefix), port_guid
    return None, port_guid if prefix == "fe80000000000000" else None


def _netdev(root: Root, card: str, place: str, port: int) -> str | None:
    """The network interface of a port; cards with two ports have both interfaces in one place."""
    if first := _line(root, f"{place}/gid_attrs/ndevs/0"):
        return first[:15]
    folder = f"{card}/device/net"
    places = {name: _line(root, f"{folder}/{name}/dev_port") for name in root.names(folder)}
    own = [name for name, at in places.items() if at == str(port - 1)]
    only = [name for name, at in places.items() if at is None] if port == 1 else []
    # The shortest is the port itself; longer ones are its VLANs, partitions and representors.
    return min(own or only, key=lambda name: (len(name), name), default=None)


def _numa(text: str | None) -> int | None:
    node = values.whole(text)
    return node if node is not None and node >= 0 else None


def _pci_bus_id(root: Root, card: str) -> str | None:
    """From the links of sysfs, else from the card's event file (a copied tree has no links).

    A sub-function's own device is no PCI address; then it is the card above it in the path.
    """
    event = root.read(f"{card}/device/uevent", 4096) or ""
    slot = re.search(r"^PCI_SLOT_NAME=([0-9A-Fa-f:.]{1,20})", event, re.MULTILINE)
    device = (root.link(f"{card}/device") or "").rpartition("/")[2]
    parts = [*(root.link(card) or "").split("/"), device]
    addresses = filter(None, map(values.pci_bus_id, reversed(parts)))
    return next(addresses, None) or values.pci_bus_id(slot[1] if slot else None)


async def read(root: Root, declared: Mapping[str, str]) -> Ports:
    """All ports, from sysfs or, where that has none, from `ibstat` and `ibstatus`.

    No card and no tool is an answer without an error. Run sminfo.identify on the ports next.
    """
    look = partial(read_ports, root, declared)
    found = await bounded(look, key="infiniband", timeout_s=SYSFS_TIMEOUT_S)
    if found:
        return Ports(found)
    late = None if found is not None else f"{CLASS}: not read within {SYSFS_TIMEOUT_S:g} s"
    asked = await _ask_tools(root)
    ports = (
        replace(port, fabric=declared_fabric(declared, port.hca, port.port)) for port in asked.ports
    )
    return Ports(tuple(ports), late or asked.error)


async def _ask_tools(root: Root) -> Ports:
    result = await root.run(["ibstat"], TOOL_TIMEOUT_S)
    found = {(port.hca, port.port): port for port in _from_tool(ibstat.parse(result.stdout))}
    failure = ibstat.failure(result)
    if failure is None and not ibstat.not_installed(result):
        unread = None if found else ibstat.unread(result)
        return Ports(tuple(found.values()), unread)
    # ibstat ends at the first card it cannot read; ibstatus goes on with the next one.
    other = await root.run(["ibstatus"], TOOL_TIMEOUT_S)
    for port in _from_tool(ibstat.parse_ibstatus(other.stdout)):
        found.setdefault((port.hca, port.port), port)
    return Ports(tuple(found.values()), failure or ibstat.failure(other))


def _from_tool(printed: tuple[ibstat.Printed, ...]) -> Iterator[IbPort]:
    for one in printed:
        layer: LinkLayer | None = one.link_layer
        if layer == "InfiniBand" and _OMNI_PATH.match(one.hca):
            layer = "OmniPath"
        yield IbPort(
            hca=one.hca,
            port=one.port,
            link_layer=layer,
            state=one.state,
            phys_state=one.phys_state,
            rate_gbps=one.rate_gbps,
            node_guid=one.node_guid,
            port_guid=one.port_guid,
            lid=one.lid,
            sm_lid=one.sm_lid,
            gid_prefix=one.gid_prefix if layer in {"InfiniBand", "OmniPath"} else None,
            firmware=one.firmware,
        )
