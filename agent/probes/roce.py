"""Which IP network a RoCE port is on: its v2 GID gives the address, the kernel the prefix.

Called by ib.py for ports whose link is Ethernet. A GID is an address only (`::ffff:10.1.2.3`), so
the network's size is read from the routes. Pure parsers, then blocking readers; nothing raises.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from agent.probes.root import Root

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_GIDS: Final = 256
READ_LIMIT: Final = 2**20
"""Characters of a routing table; one line of a connected network is below 130."""
_TRIE_LEAF: Final = re.compile(r"\|-- ([0-9.]{7,15})\s*")
_TRIE_LINK: Final = re.compile(r"/([0-9]{1,2}) link UNICAST\s*")


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table that is an address for RoCE v2."""

    index: int
    address: Address
    netdev: str | None = None


@dataclass(frozen=True, slots=True)
class Networks:
    """Networks this machine is connected to.

    `ipv4` is by interface, `unnamed` without (the routing trie knows no names), `ipv6` by address.
    """

    ipv4: Mapping[str, tuple[ipaddress.IPv4Network, ...]] = field(default_factory=dict)
    unnamed: tuple[ipaddress.IPv4Network, ...] = ()
    ipv6: Mapping[str, int] = field(default_factory=dict)
    vlans: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Roce:
    """Where a RoCE port is: its address, interface, network (`10.1.0.0/16`) and VLAN."""

    address: str
    netdev: str | None = None
    network: str | None = None
    vlan: int | None = None


def address(gid: str | None) -> Address | None:
    """The routable address in a GID; None for link-local ones, unused entries and nonsense."""
    try:
        parsed = ipaddress.IPv6Address((gid or "").strip())
    except ValueError:
        return None
    found: Address = parsed.ipv4_mapped or parsed
    if found.is_link_local or found.is_loopback or found.is_multicast or found.is_unspecified:
        return None
    return found


def is_v2(kind: str | None) -> bool:
    """Whether a GID's type is RoCE v2 (`IB/RoCE v1` is not routable)."""
    return (kind or "").strip().lower() == "roce v2"


def choose(gids: Iterable[Gid], networks: Networks) -> Gid | None:
    """The entry to go by: one with a known network first, IPv4 first, the first in the table."""
    return min(
        gids,
        key=lambda gid: (network(gid, networks) is None, gid.address.version, gid.index),
        default=None,
    )


def network(gid: Gid, networks: Networks) -> Network | None:
    """The network of an address: of its interface if that is known, the smallest that holds it."""
    found = gid.address
    if isinstance(found, ipaddress.IPv6Address):
        length = networks.ipv6.get(found.exploded.replace(":", ""))
        return ipaddress.IPv6Network((found, length), strict=False) if length else None
    named = networks.ipv4.get(gid.netdev or "", ())
    holding = [net for net in named if found in net] or [
        net for net in networks.unnamed if found in net
    ]
    return max(holding, key=lambda net: net.prefixlen, default=None)


def parse_routes(text: str) -> dict[str, tuple[ipaddress.IPv4Network, ...]]:
    """Connected networks in /proc/net/route by interface; routes by way of a gateway are not."""
    found: dict[str, set[ipaddress.IPv4Network]] = {}
    for line in text[:READ_LIMIT].splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or fields[2] != "00000000":
            continue
        net = _network(_little_endian(fields[1]), _little_endian(fields[7]))
        if net is not None:
            found.setdefault(fields[0], set()).add(net)
    return {name: tuple(sorted(nets)) for name, nets in found.items()}


def _little_endian(word: str) -> int | None:
    if not re.fullmatch(r"[0-9A-Fa-f]{8}", word):
        return None
    return int.from_bytes(bytes.fromhex(word), "little")


def _network(destination: int | None, mask: int | None) -> ipaddress.IPv4Network | None:
    """None for a host's route, the default route and masks with holes."""
    if destination is None or mask is None:
        return None
    length = mask.bit_count()
    if not 0 < length < 32 or mask != (2**32 - 1) << (32 - length) & (2**32 - 1):
        return None
    return ipaddress.IPv4Network((destination & mask, length))


def parse_trie(text: str) -> tuple[ipaddress.IPv4Network, ...]:
    """Connected networks in /proc/net/fib_trie: all tables, so those of a VRF too; no names."""
    return tuple(sorted(set(_trie_networks(text[:READ_LIMIT].splitlines()))))


def _trie_networks(lines: Iterable[str]) -> Iterator[ipaddress.IPv4Network]:
    destination: ipaddress.IPv4Address | None = None
    for line in map(str.strip, lines):
        if leaf := _TRIE_LEAF.fullmatch(line):
            destination = _ipv4(leaf[1])
        elif line.startswith("+--"):
            destination = None
        elif destination is not None and (link := _TRIE_LINK.fullmatch(line)):
            length = int(link[1])
            if 0 < length < 32:
                yield ipaddress.IPv4Network((destination, length), strict=False)


def _ipv4(text: str) -> ipaddress.IPv4Address | None:
    try:
        return ipaddress.IPv4Address(text)
    except ValueError:
        return None


def parse_if_inet6(text: str) -> dict[str, int]:
    """Prefix length by IPv6 address (32 digits) in /proc/net/if_inet6, but for single hosts."""
    found: dict[str, int] = {}
    for line in text[:READ_LIMIT].splitlines():
        match = re.match(r"([0-9a-f]{32}) [0-9a-f]+ ([0-9a-f]{2}) ", line.strip().lower())
        if match and 0 < (length := int(match[2], 16)) < 128:
            found[match[1]] = length
    return found


def parse_vlans(text: str) -> dict[str, int]:
    """VLAN of each interface in /proc/net/vlan/config (`name | id | device below`)."""
    found: dict[str, int] = {}
    for line in text[:READ_LIMIT].splitlines():
        parts = [part.strip() for part in line.split("|")]
        if len(parts) == 3 and (vlan := _vlan(parts[1])) is not None:
            found[parts[0]] = vlan
    return found


def vlan_of(name: str | None, vlans: Mapping[str, int]) -> int | None:
    """VLAN of an interface, by the kernel's list (root only), else by its name (`eth0.100`)."""
    if not name:
        return None
    match = re.fullmatch(r"(?:.{1,12}\.|vlan)0{0,3}([1-9][0-9]{0,3})", name)
    return vlans.get(name, _vlan(match[1]) if match else None)


def _vlan(text: str) -> int | None:
    number = int(text) if re.fullmatch(r"[0-9]{1,4}", text, re.ASCII) else 0
    return number if 0 < number < 4095 else None


def read_networks(root: Root) -> Networks:
    """What the machine is connected to. Blocking, quick."""
    return Networks(
        ipv4=parse_routes(root.read("/proc/net/route") or ""),
        unnamed=parse_trie(root.read("/proc/net/fib_trie") or ""),
        ipv6=parse_if_inet6(root.read("/proc/net/if_inet6") or ""),
        vlans=parse_vlans(root.read("/proc/net/vlan/config") or ""),
    )


def read_gids(root: Root, place: str) -> Iterator[Gid]:
    """RoCE v2 addresses of the port at `place` in sysfs. Unused entries refuse to be read."""
    indices = (name for name in root.names(f"{place}/gids") if re.fullmatch(r"[0-9]{1,5}", name))
    for index in sorted(map(int, indices))[:MAX_GIDS]:
        found = address(root.read(f"{place}/gids/{index}", 256))
        if found is not None and is_v2(root.read(f"{place}/gid_attrs/types/{index}", 256)):
            netdev = (root.read(f"{place}/gid_attrs/ndevs/{index}", 256) or "").strip()
            yield Gid(index, found, netdev[:15] or None)


def find(root: Root, place: str, networks: Networks) -> Roce | None:
    """Where the RoCE port at `place` in sysfs is; None without a v2 address. Blocking, quick."""
    gid = choose(read_gids(root, place), networks)
    if gid is None:
        return None
    net = network(gid, networks)
    return Roce(
        address=str(gid.address),
        netdev=gid.netdev,
        network=str(net) if net else None,
        vlan=vlan_of(gid.netdev, networks.vlans),
    )
