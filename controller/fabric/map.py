"""A fabric's graph as a JSON-ready document, and that document as lines for a terminal.

Pure. The document is `TopologyView.map` of the API; `llmgwctl topology` prints `to_text` of it.
Both are sorted, so two scans of the same fabric can be compared line by line.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from controller.fabric.names import natural
from controller.fabric.problems import counted
from controller.fabric.rates import slow_links

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from controller.fabric.model import CaPort, Graph, Host

WIDTH: Final = 96
"""Characters of host names in one line, before the rest is counted."""


def to_map(graph: Graph) -> dict[str, Any]:
    """The document. Keys that are not known are absent; `gbps` of a link is that of one cable.

    Links are between switches, routers and adapters wired back to back; the cable of a host is
    its port's `leaf` and `leaf_port`. `slow`: how many of a bundle are slower than usual.
    `named: false`: nothing tells which machine it is; `links_known: false`: a list without links.
    """
    slow = slow_links(graph)
    slow_ports = {(graph.links[i].a, graph.links[i].a_port) for i in slow}
    return _known(links_known=None if graph.links_known else False) | {
        "hosts": [_host(host, slow_ports) for host in graph.hosts],
        "switches": [
            _known(
                guid=s.guid, name=s.name, level=s.level, chassis=s.chassis, host_ports=s.host_ports
            )
            for s in graph.switches
        ],
        "links": _bundles(graph, set(slow)),
        "levels": graph.levels,
        "rails": len(graph.rails) if graph.rails else None,
    }


def _host(host: Host, slow: set[tuple[str, int]]) -> dict[str, Any]:
    return _known(
        name=host.name,
        node=host.node,
        matched=host.node is not None,
        named=None if host.named else False,
        ports=[_port(port, (port.device, port.number) in slow) for port in host.ports],
    )


def _port(port: CaPort, slow: bool) -> dict[str, Any]:
    return _known(
        guid=port.guid,
        hca=port.hca,
        leaf=port.leaf,
        leaf_port=port.leaf_port,
        peer=port.peer if port.leaf is None else None,
        gbps=port.gbps,
        rail=port.rail,
        slow=slow or None,
    )


def _bundles(graph: Graph, slow: set[int]) -> list[dict[str, Any]]:
    """Parallel cables as one entry: how many, and the speed of the slowest."""
    found: dict[tuple[str, str], list[int]] = {}
    for i, link in enumerate(graph.links):
        if link.kind in {"trunk", "router", "direct"}:
            found.setdefault((link.a, link.b), []).append(i)
    bundles = []
    for (a, b), members in sorted(found.items()):
        rates = [rate for i in members if (rate := graph.links[i].gbps) is not None]
        fewer = sum(i in slow for i in members)
        bundles.append(
            _known(a=a, b=b, count=len(members), gbps=min(rates, default=None), slow=fewer or None)
        )
    return bundles


def _known(**fields: Any) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def to_text(document: Mapping[str, Any]) -> list[str]:
    """Lines for a person: a summary, then one line for each leaf with its hosts.

    Takes what `to_map` made, also after a trip through JSON.
    """
    hosts, switches = document.get("hosts") or [], document.get("switches") or []
    trunks = Counter[str]()
    level = {s["guid"]: s.get("level") or 0 for s in switches}
    for link in document.get("links") or []:
        a, b = link["a"], link["b"]
        if level.get(a) and level.get(b) and level[a] != level[b]:
            trunks[a if level[a] < level[b] else b] += link["count"]
    at: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for host in hosts:
        for port in host["ports"]:
            at.setdefault(port.get("leaf") or "", []).append((_called(host), port))
    lines = [_summary(document)]
    rows = [_row(s, at[s["guid"]], trunks[s["guid"]]) for s in switches if s["guid"] in at]
    rows.sort(key=lambda row: (row[0] == "-", natural(row[0]), natural(row[1])))
    if rows:
        lines += ["", *_table([("RAIL", "LEAF", "PORTS", "GB/S", "UPLINKS", "HOSTS"), *rows])]
    alone = at.get("", [])
    if document.get("links_known") is False:
        lines += ["", "this scan is a list of devices: it knows of no links"]
    elif alone:
        lines += ["", f"not on a switch: {ranges([name for name, _ in alone])}"]
    return lines


def _called(host: Mapping[str, Any]) -> str:
    return str(host["name"]) if host.get("named", True) else "?"


def _summary(document: Mapping[str, Any]) -> str:
    hosts, switches = document.get("hosts") or [], document.get("switches") or []
    named = [host for host in hosts if host.get("named", True)]
    matched = sum(1 for host in named if host.get("matched"))
    levels = Counter(s.get("level") or 0 for s in switches)
    kinds = [
        counted(n, "leaf", "leaves") if k == 1 else f"{n} on level {k}" if k else f"{n} apart"
        for k, n in sorted(levels.items())
        if document.get("links_known") is not False
    ]
    cables = sum(link["count"] for link in document.get("links") or [])
    rails = f", {document['rails']} rails" if document.get("rails") else ", no rails"
    unnamed = len(hosts) - len(named)
    return (
        f"{counted(len(named), 'host')} ({matched} with an agent)"
        + (f" and {counted(unnamed, 'adapter')} of unknown hosts" if unnamed else "")
        + f", {counted(sum(len(host['ports']) for host in hosts), 'port')}"
        + f"; {counted(len(switches), 'switch', 'switches')}"
        + (f" ({', '.join(kinds)})" if kinds else "")
        + f", {counted(cables, 'cable')} between them{rails}"
    )


def _row(
    switch: Mapping[str, Any], ports: Sequence[tuple[str, Mapping[str, Any]]], uplinks: int
) -> tuple[str, ...]:
    rails = {port["rail"] for _, port in ports if port.get("rail") is not None}
    speeds = Counter(port["gbps"] for _, port in ports if port.get("gbps") is not None)
    slow = sum(1 for _, port in ports if port.get("slow"))
    rate = f"{speeds.most_common(1)[0][0]:g}" if speeds else "-"
    return (
        ",".join(str(rail) for rail in sorted(rails)) or "-",
        str(switch["name"]),
        str(len(ports)),
        f"{rate} ({slow} slow)" if slow else rate,
        str(uplinks),
        ranges([name for name, _ in ports]),
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def ranges(names: Iterable[str]) -> str:
    """Names with what they share written once: `dgx[01-04,06] login`; `2 x ?` for unknown ones."""
    counts = Counter(names)
    unknown = counts.pop("?", 0)
    grouped: dict[tuple[str, int], list[str]] = {}
    for name in counts:
        stem = name.rstrip("0123456789")
        grouped.setdefault((stem, len(name) - len(stem)), []).append(name[len(stem) :])
    keys = sorted(grouped, key=lambda key: (natural(key[0]), key))
    parts = [stem + _spans(grouped[stem, digits]) for stem, digits in keys]
    parts += [f"{unknown} x ?"] if unknown else []
    kept, length = 0, 0
    while kept < len(parts) and (kept == 0 or length + len(parts[kept]) <= WIDTH):
        length += len(parts[kept]) + 1
        kept += 1
    more = f" and {len(parts) - kept} more" if kept < len(parts) else ""
    return " ".join(parts[:kept]) + more


def _spans(numbers: Sequence[str]) -> str:
    """`01 02 03 07` -> `[01-03,07]`; all have the same number of digits."""
    if len(numbers) == 1:
        return numbers[0]
    spans: list[tuple[str, str]] = []
    for number in sorted(numbers):
        if spans and int(number) == int(spans[-1][1]) + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return "[" + ",".join(a if a == b else f"{a}-{b}" for a, b in spans) + "]"
