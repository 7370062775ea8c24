"""The page of one node as text: machine, cards, wiring, ports, NVLink, disks. Pure: documents in.

Called by node.py. The document is NodePage of the admin API; what it lacks is unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from controller.cli.fleet import nodes_text
from controller.cli.output import lines
from controller.cli.words import gigabytes, joined, rate, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from controller.cli.session import Session

GPU_COLUMNS: Final = (
    "GPU", "CLASS", "MEMORY", "USED", "UTIL", "TEMP", "POWER", "NUMA", "NIC", "SHARD", "HEALTH",
)  # fmt: skip
PORT_COLUMNS: Final = (
    "PORT", "LINK", "STATE", "RATE", "FABRIC", "PHYSICAL", "TX", "RX", "ERRORS",
)  # fmt: skip
FEW: Final = 6
DISK_COLUMNS: Final = ("MOUNT", "FILESYSTEM", "KIND", "FREE", "TOTAL", "WEIGHTS")


def text(session: Session, node: dict[str, Any]) -> str:
    """The whole page."""
    return lines(
        nodes_text(session, [node]),
        *(f"{name}: {value}" for name, value in _facts(node) if value not in (None, "-", "")),
        *(f"warning: {warning}" for warning in node.get("warnings", [])),
        _section(cards(session, node.get("gpus", []))),
        *_evidence(node.get("gpus", [])),
        _section(matrix(session, node.get("gpus", []))),
        _section(_ports(session, node.get("ib_ports", []))),
        _section(_disks(session, node.get("disks", []))),
    )


def _section(table: str) -> str:
    return f"\n{table}" if table else ""


def _facts(node: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    load, machine = node.get("load", {}), node.get("machine", {})
    yield "why", node.get("state_reason")
    yield "host", joined(node[k] for k in ("hostname", "mgmt_addr", "os", "kernel") if k in node)
    yield "processor", joined(_processor(node, machine))
    yield "memory", _memory(node)
    yield "load", joined(_load(load))
    pressure = load.get("pressure", {})
    yield "pressure", joined(f"{k.replace('_', ' ')} {v:g} %" for k, v in pressure.items() if v)
    yield "labels", joined(f"{k}={v}" for k, v in node.get("labels", {}).items())
    yield "driver", _driver(node.get("gpus", []))
    yield "nvlink", _nvlink(node)
    yield "imex", _imex(node)
    yield "engines", joined(node.get("engines"))
    yield "weights", _few(node.get("models_on_disk", []))
    yield "agent", node.get("agent_version")


def _few(names: list[str]) -> str:
    """The first names and how many more; `llmgwctl weights` has all."""
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return f"{joined(names[:FEW])}{more}"


def _processor(node: dict[str, Any], machine: dict[str, Any]) -> Iterator[str]:
    if "cpu_model" in node:
        yield node["cpu_model"]
    if "arch" in node:
        yield node["arch"]
    if "cpus" in node:
        limit = node.get("cpus_effective")
        less = limit is not None and limit < node["cpus"]
        yield f"{node['cpus']:g} CPUs" + (f", {limit:g} usable" if less else "")
    if "sockets" in machine:
        yield f"{machine['sockets']} sockets"
    if "numa_nodes" in machine:
        yield f"{machine['numa_nodes']} NUMA nodes"


def _memory(node: dict[str, Any]) -> str | None:
    host, usable = node.get("memory_host_gb"), node.get("memory_gb")
    if host is None or usable is None or usable >= host:
        return gigabytes(usable if usable is not None else host)
    return f"{gigabytes(usable)} usable of {gigabytes(host)}"


def _load(load: dict[str, Any]) -> Iterator[str]:
    if "cpu_percent" in load:
        yield f"CPUs {load['cpu_percent']:g} % busy"
    if "load1" in load:
        yield f"average {load['load1']:g} over a minute"
    if "memory_percent" in load:
        yield f"memory {load['memory_percent']:g} % used"


def _driver(found: list[dict[str, Any]]) -> str | None:
    versions = {(c.get("driver_version"), c.get("cuda_version")) for c in found}
    known = [
        f"{driver}" + (f", CUDA {cuda}" if cuda else "")
        for driver, cuda in sorted(versions, key=str)
        if driver
    ]
    return joined(known)


def _nvlink(node: dict[str, Any]) -> str | None:
    state = node.get("nvlink_state")
    if state is None:
        return None
    domain = f"domain {node['nvlink_domain']}" if "nvlink_domain" in node else None
    return joined(part for part in (state, domain, node.get("nvlink_reason")) if part)


def _imex(node: dict[str, Any]) -> str | None:
    detail = node.get("imex_detail", {})
    parts = [
        node.get("imex"),
        f"domain {detail['domain_state']}" if "domain_state" in detail else None,
        f"{node['imex_channels']} channels" if "imex_channels" in node else None,
        f"owner {detail['owner']}" if "owner" in detail else None,
        detail.get("error"),
    ]
    return joined(part for part in parts if part)


def label(card: dict[str, Any]) -> str:
    """How a card is called in tables: its index, a slice with its profile."""
    index = "?" if "index" not in card else str(card["index"])
    return f"{index}:{card.get('mig_profile', 'slice')}" if "parent" in card else index


def cards(session: Session, found: list[dict[str, Any]]) -> str:
    """Cards and slices; empty without any."""

    def figure(card: dict[str, Any], name: str, unit: str) -> str:
        return f"{card[name]:g}{unit}" if name in card else "-"

    def nic(card: dict[str, Any]) -> str:
        path = f" ({card['nic_path']})" if "nic_path" in card else ""
        return f"{card['nearest_nic']}{path}" if "nearest_nic" in card else "-"

    rows = (
        (label(c), c["class"], figure(c, "memory_mb", " MiB"), figure(c, "memory_used_mb", " MiB"),
         figure(c, "utilization_percent", " %"), figure(c, "temperature_c", " C"),
         figure(c, "power_w", " W"), c.get("numa"), nic(c), c.get("shard"), _health(c))
        for c in found
    )  # fmt: skip
    return session.out.table(GPU_COLUMNS, rows) if found else ""


def _health(card: dict[str, Any]) -> str:
    problems = joined(card.get("problems"))
    if not card["healthy"]:
        return problems
    word = "partitioned" if card["state"] == "partitioned" else "ok"
    return word if problems == "-" else f"{word}, but {problems}"


def _evidence(found: list[dict[str, Any]]) -> Iterator[str]:
    """What stands behind the problems in the table, and how each one ends."""
    for card in found:
        for finding in card.get("findings", []) if "parent" not in card else ():
            if "evidence" in finding:
                ends = f" ({finding['kind']})" if "kind" in finding else ""
                yield f"gpu {label(card)} {finding['code']}{ends}: {finding['evidence']}"


def matrix(session: Session, found: list[dict[str, Any]]) -> str:
    """How the cards reach each other and the NICs; empty when nobody knows."""
    rows = [c for c in found if "index" in c and "parent" not in c and not _missing(c)]
    known = {peer for card in rows for peer in card.get("paths", {})}
    if not known:
        return ""
    others = [str(card["index"]) for card in rows]
    nics = sorted(known - set(others), key=_natural)
    headings = ("", *(f"GPU{name}" for name in others), *nics, "CPUS", "NUMA")

    def row(card: dict[str, Any]) -> Iterable[object]:
        me, paths = str(card["index"]), card.get("paths", {})
        yield f"GPU{me}"
        for name in (*others, *nics):
            yield "X" if name == me else paths.get(name)
        yield card.get("detail", {}).get("cpu_affinity")
        yield card.get("numa")

    return session.out.table(headings, (tuple(row(card)) for card in rows))


def _missing(card: dict[str, Any]) -> bool:
    """Whether its wiring is of the past: another card may have its index by now."""
    return any(finding["code"] == "missing" for finding in card.get("findings", []))


def _natural(name: str) -> tuple[str, int, str]:
    head = name.rstrip("0123456789")
    digits = name[len(head) :]
    return (head, int(digits) if digits else -1, name)


def _ports(session: Session, found: list[dict[str, Any]]) -> str:
    rows = (
        (f"{p['hca']}/{p['port']}", p.get("link_layer"), joined(_port_state(p)),
         f"{p['rate_gbps']:g} Gb/s" if "rate_gbps" in p else "-", p.get("fabric"),
         p.get("physical") or p.get("sm_error"), rate(p.get("tx_bytes")), rate(p.get("rx_bytes")),
         joined(f"{name} {n}" for name, n in sorted(p.get("errors", {}).items())))
        for p in sorted(found, key=lambda port: (_natural(port["hca"]), port["port"]))
    )  # fmt: skip
    return session.out.table(PORT_COLUMNS, rows) if found else ""


def _port_state(port: dict[str, Any]) -> Iterator[str]:
    yield from (port[name] for name in ("state", "phys_state") if name in port)


def _disks(session: Session, found: list[dict[str, Any]]) -> str:
    def gib(disk: dict[str, Any], name: str) -> str:
        return size(disk[name] * 2**30) if name in disk else "-"

    rows = (
        (d["mount"], d["filesystem"], d["kind"], gib(d, "free_gb"), gib(d, "total_gb"),
         "yes" if d["holds_weights"] else "")
        for d in found
    )  # fmt: skip
    return session.out.table(DISK_COLUMNS, rows) if found else ""
