"""The values of a fabric: what a scan lists, and the graph that is made of it. Frozen, no I/O.

GUIDs are 16 lower-case hex digits; speeds are Gb/s of one direction; ``None`` is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["switch", "ca", "router"]
LinkKind = Literal["host", "trunk", "direct", "sharp", "router"]
"""Adapter to switch, switch to switch, adapter to adapter, aggregation node, anything to a router.
"""


class Port(NamedTuple):
    """One port of a scanned device. A tuple, since a big fabric has some 200,000 of them."""

    number: int
    guid: str | None
    """The port's own GUID; switches have one for all ports, which is not repeated here."""
    lid: int | None
    peer: str | None
    """GUID of the device at the other end; None: no cable, or a link that is down."""
    peer_port: int | None
    peer_guid: str | None
    """GUID of the other end's port, where the line has it."""
    width: str | None
    speed: str | None
    gbps: float | None

    @property
    def down(self) -> bool:
        return self.peer is None


@dataclass(frozen=True, slots=True)
class Device:
    """A switch, adapter (CA) or router, as one scan lists it."""

    kind: Kind
    guid: str
    """The node GUID. A ports report (`-p`) has port GUIDs only, so there it is the port's."""
    system_guid: str | None = None
    """Equal for all chips of one adapter or one chassis; zero is kept as None."""
    description: str = ""
    lid: int | None = None
    port_count: int | None = None
    device_id: int | None = None
    chassis: str | None = None
    """Number of the chassis in grouped output (`-g`)."""
    ports: tuple[Port, ...] = ()
    listed: bool = True
    """False: only its neighbours name it; it has no lines of its own."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """Everything that one text said."""

    devices: tuple[Device, ...] = ()
    """Sorted by GUID."""
    form: Literal["topology", "ports", "list"] | None = None
    """The main form, `-p`, `-l`; None when no device was found. A list knows of no links."""
    duplicates: tuple[str, ...] = ()
    """GUIDs that two entries claim with different facts."""
    notes: tuple[str, ...] = ()
    """What could not be used, and what the tool complained about."""


@dataclass(frozen=True, slots=True)
class HostPort:
    """A port that an agent reported; looked up by its port GUID or its node GUID."""

    node: str
    hca: str
    port: int


@dataclass(frozen=True, slots=True)
class CaPort:
    """A port of a host, and where its cable ends."""

    guid: str
    """The port GUID, the node GUID where that is all the scan says."""
    device: str
    number: int
    hca: str | None
    """As the agent names it; else what follows the host's name in the description."""
    description: str
    matched: bool
    """An agent reported this GUID."""
    leaf: str | None = None
    """GUID of the switch; None: not cabled, or cabled to something else (`peer`)."""
    leaf_port: int | None = None
    peer: str | None = None
    width: str | None = None
    speed: str | None = None
    gbps: float | None = None
    rail: int | None = None
    """1, 2 ...: the rail of its leaf; None in a fabric without rails."""
    rail_of_hca: int | None = None
    """The rail that this HCA has on the other hosts of its series."""


@dataclass(frozen=True, slots=True)
class Host:
    """Adapters of one machine."""

    name: str
    """The node's id; else the name in the descriptions; else a GUID."""
    node: str | None
    named: bool
    """False: nothing tells which machine it is, so each adapter is a host of its own."""
    ports: tuple[CaPort, ...]


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch chip: a whole switch, or one blade of a director."""

    guid: str
    name: str
    description: str
    level: int | None
    """1: a leaf, with hosts; 2, 3 ...: steps from the nearest host; None: no host to be reached."""
    chassis: str | None
    host_ports: int
    """Cables to hosts."""
    uplinks: int
    """Cables to switches of a higher level."""
    listed: bool


class Link(NamedTuple):
    """One cable. `a` is the adapter of a host or aggregation link, else the lower GUID."""

    a: str
    a_port: int
    b: str
    b_port: int
    kind: LinkKind
    width: str | None
    speed: str | None
    gbps: float | None
    ends: int
    """How many of its ends list it: 1 or 2."""


@dataclass(frozen=True, slots=True)
class Graph:
    """One physical fabric."""

    hosts: tuple[Host, ...] = ()
    switches: tuple[Switch, ...] = ()
    routers: tuple[str, ...] = ()
    aggregation: tuple[str, ...] = ()
    """GUIDs of SHARP aggregation nodes: part of a switch, no hosts."""
    links: tuple[Link, ...] = ()
    levels: int = 0
    rails: tuple[tuple[str, ...], ...] | None = None
    """GUIDs of the leaves of rail 1, 2 ...; None when the fabric is not cabled by rails."""
    unlisted: tuple[str, ...] = ()
    """GUIDs of devices that only neighbours name (aggregation nodes left out)."""
    shared_descriptions: tuple[tuple[str, int], ...] = ()
    """Descriptions that name one thing and stand on several: text, how often."""
    duplicates: tuple[str, ...] = ()
    links_known: bool = True
    """False for a list of devices: missing links mean nothing then."""
    device_ids: dict[str, int] = field(default_factory=dict)
    """GUID -> model of an adapter, to compare like with like."""
    notes: tuple[str, ...] = ()

    @property
    def leaves(self) -> tuple[Switch, ...]:
        return tuple(s for s in self.switches if s.level == 1)

    @property
    def uncabled(self) -> tuple[tuple[Host, CaPort], ...]:
        """Ports of hosts without a link; adapters without any port line count as port 0."""
        if not self.links_known:
            return ()
        return tuple((h, p) for h in self.hosts for p in h.ports if p.peer is None)

    @property
    def without_hosts(self) -> tuple[Switch, ...]:
        """Switches from which no host can be reached."""
        return tuple(s for s in self.switches if s.level is None) if self.links_known else ()
