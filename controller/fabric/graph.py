"""A scan as a graph: hosts, switches with their levels, rails, and each cable once.

Pure. Called by whoever answers for a fabric's map; problems.py and map.py read the result. The
order of the text does not change it. What the scan does not say stays None.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from controller.fabric import names, rails
from controller.fabric.model import CaPort, Graph, Host, Link, Switch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from controller.fabric.model import Device, Discovery, HostPort, LinkKind, Port
    from controller.fabric.names import Machine


def build(discovery: Discovery, hosts: Mapping[str, HostPort]) -> Graph:
    """The graph of a scan. `hosts`: port or node GUID -> what agents reported under it.

    Give both GUIDs of each port: an adapter without a cable is known by its node GUID only.
    """
    devices = {device.guid: device for device in discovery.devices}
    sharp = {device.guid for device in discovery.devices if names.is_aggregation(device)}
    adapters = [d for d in discovery.devices if d.kind == "ca" and d.guid not in sharp]
    links = _links(discovery.devices, devices, sharp)
    machines = names.machines(adapters, hosts)
    placed = _with_rails([_host(machine, hosts, devices) for machine in machines])
    switches = [d for d in discovery.devices if d.kind == "switch"]
    made = _switches(switches, links)
    return Graph(
        hosts=placed[0],
        switches=made,
        routers=tuple(d.guid for d in discovery.devices if d.kind == "router"),
        aggregation=tuple(sorted(sharp)),
        links=links,
        levels=max((s.level or 0 for s in made), default=0),
        rails=placed[1],
        unlisted=tuple(d.guid for d in discovery.devices if not d.listed and d.guid not in sharp),
        shared_descriptions=names.shared_descriptions(discovery.devices),
        duplicates=tuple(sorted({*discovery.duplicates, *_port_guids_twice(adapters)})),
        links_known=discovery.form != "list",
        device_ids={d.guid: d.device_id for d in adapters if d.device_id is not None},
        notes=discovery.notes,
    )


def _links(
    devices: Iterable[Device], known: Mapping[str, Device], sharp: set[str]
) -> tuple[Link, ...]:
    """Each cable once, though both of its ends list it."""
    found: dict[tuple[str, int, str, int], Link] = {}
    for device in devices:
        for port in device.ports if device.listed else ():
            if port.peer is None or port.peer_port is None or port.peer not in known:
                continue
            kind = _kind(device, known[port.peer], sharp)
            ends = (device.guid, port.number), (port.peer, port.peer_port)
            first, second = sorted(ends, key=lambda end: (_side(known[end[0]], sharp), end))
            key = (*first, *second)
            other = found.get(key)
            if other is None:
                ends_listed = 2 if first == second else 1
                found[key] = Link(*key, kind, port.width, port.speed, port.gbps, ends_listed)
            else:
                found[key] = _both(other, port)
    return tuple(found[key] for key in sorted(found))


def _both(link: Link, port: Port) -> Link:
    """The link with what its second end says; where the ends differ the slower one is true."""
    slower = port.gbps is not None and (link.gbps is None or port.gbps < link.gbps)
    if slower or (link.gbps is None and link.width is None and link.speed is None):
        link = link._replace(width=port.width, speed=port.speed, gbps=port.gbps)
    return link._replace(ends=2)


def _kind(one: Device, other: Device, sharp: set[str]) -> LinkKind:
    kinds = {one.kind, other.kind}
    if one.guid in sharp or other.guid in sharp:
        return "sharp"
    if "router" in kinds:
        return "router"
    if kinds == {"ca"}:
        return "direct"
    return "trunk" if kinds == {"switch"} else "host"


def _side(device: Device, sharp: set[str]) -> int:
    """Aggregation nodes and adapters stand first, so `a` of a host link is the host."""
    return 0 if device.guid in sharp else 1 if device.kind == "ca" else 2


def _host(machine: Machine, known: Mapping[str, HostPort], devices: Mapping[str, Device]) -> Host:
    ports = [
        _ca_port(adapter, port, known, devices)
        for adapter in machine.adapters
        for port in adapter.ports or (None,)
    ]
    ports.sort(key=lambda p: (names.natural(p.hca or ""), p.number, p.guid))
    return Host(machine.name, machine.node, machine.named, tuple(ports))


def _ca_port(
    adapter: Device, port: Port | None, known: Mapping[str, HostPort], devices: Mapping[str, Device]
) -> CaPort:
    found = names.known_port(adapter, port, known)
    hca = found.hca if found else names.host_and_hca(adapter.description)[1]
    matched, text = found is not None, adapter.description
    if port is None:
        return CaPort(adapter.guid, adapter.guid, 0, hca, text, matched)
    peer = devices.get(port.peer) if port.peer else None
    leaf = peer is not None and peer.kind == "switch"
    return CaPort(
        port.guid or adapter.guid,
        adapter.guid,
        port.number,
        hca,
        text,
        matched,
        leaf=port.peer if leaf else None,
        leaf_port=port.peer_port if leaf else None,
        peer=port.peer,
        width=port.width,
        speed=port.speed,
        gbps=port.gbps,
    )


def _with_rails(
    hosts: Sequence[Host],
) -> tuple[tuple[Host, ...], tuple[tuple[str, ...], ...] | None]:
    """The hosts in order of their names, each port with its rail."""
    found = rails.find(hosts)
    placed = [
        Host(host.name, host.node, host.named, tuple(_on_rail(p, found) for p in host.ports))
        for host in hosts
    ]
    placed.sort(key=lambda h: (not h.named, names.natural(h.name), h.name, h.node or ""))
    return tuple(placed), found.leaves


def _on_rail(port: CaPort, found: rails.Rails) -> CaPort:
    rail = found.of_leaf.get(port.leaf or "")
    of_hca = found.of_hca.get((port.device, port.number))
    if rail is None and of_hca is None:
        return port
    return replace(port, rail=rail, rail_of_hca=of_hca)


def _switches(devices: Sequence[Device], links: Sequence[Link]) -> tuple[Switch, ...]:
    attached = Counter(link.b for link in links if link.kind == "host")
    levels = _levels(links, attached)
    uplinks = Counter[str]()
    for link in links:
        low, high = levels.get(link.a), levels.get(link.b)
        if link.kind == "trunk" and low is not None and high is not None and low != high:
            uplinks[link.a if low < high else link.b] += 1
    called = names.switch_names(devices)
    made = [
        Switch(
            d.guid,
            called[d.guid][0],
            d.description,
            levels.get(d.guid),
            called[d.guid][1],
            attached[d.guid],
            uplinks[d.guid],
            d.listed,
        )
        for d in devices
    ]
    made.sort(key=lambda s: (s.level or 99, names.natural(s.name), s.guid))
    return tuple(made)


def _levels(links: Sequence[Link], leaves: Iterable[str]) -> dict[str, int]:
    """Steps of each switch from the nearest host: 1 for leaves."""
    beside: dict[str, set[str]] = {}
    for link in links:
        if link.kind == "trunk":
            beside.setdefault(link.a, set()).add(link.b)
            beside.setdefault(link.b, set()).add(link.a)
    levels = dict.fromkeys(leaves, 1)
    edge, level = set(levels), 1
    while edge:
        level += 1
        edge = {other for guid in edge for other in beside.get(guid, ()) if other not in levels}
        levels.update(dict.fromkeys(edge, level))
    return levels


def _port_guids_twice(adapters: Sequence[Device]) -> set[str]:
    """Port GUIDs that two adapters have: a cloned firmware, or two fabrics in one text."""
    owners: dict[str, set[str]] = {}
    for device in adapters:
        for port in device.ports:
            if port.guid is not None:
                owners.setdefault(port.guid, set()).add(device.guid)
    return {guid for guid, devices in owners.items() if len(devices) > 1}
