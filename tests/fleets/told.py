"""Fleets of YAML files in a test's database: what their agents would have reported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops.simulation import hardware
from ops.simulation.fleet import Fleet, read

if TYPE_CHECKING:
    from ops.simulation.fleet import SimNode
    from tests.sql.fleet import Fleet as Rows
    from tests.sql.fleet import Node

KINDS = ("host", "gpus", "ports", "engines", "disks")


def fleet_of(name: str, **changes: Any) -> Fleet:
    """The fleet of ``tests/fleets/<name>.yaml``, with these fields of its first group changed."""
    found = read(Path(__file__).with_name(f"{name}.yaml"))
    first, *others = found.groups
    changed = first.model_validate(first.model_dump(by_alias=True) | changes)
    return found.model_copy(update={"groups": [changed, *others]})


def report(rows: Rows, fleet: Fleet) -> dict[str, Node]:
    """Enrols every node; each says what it has and that nobody uses its cards."""
    nodes = {node.name: rows.enrol(node.name) for node in fleet.nodes()}
    report_again(rows, fleet, nodes)
    return nodes


def report_again(rows: Rows, fleet: Fleet, nodes: dict[str, Node]) -> None:
    """All of them say what they have now."""
    for node in fleet.nodes():
        _report(rows, nodes[node.name], node)


def _report(rows: Rows, enrolled: Node, node: SimNode) -> None:
    facts = hardware.slow(node, hardware.look(node, {}, set()))
    for kind in KINDS:
        rows.report(enrolled, kind, facts[kind])
    used = [{"uuid": card.uuid, "memory_foreign_mib": 0} for card in node.cards()]
    rows.sync(enrolled, gpus=used)
