"""Rows of nodes and of what is in them -> `Node`. Pure; called by `mirror.py`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from controller.placement.ledger import pool_claim
from controller.placement.model import Claim, Gpu, Node
from controller.reconcile.rows import Notes, Row, each, whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def nodes(tables: Mapping[str, Sequence[Row]], notes: Notes) -> list[Node]:
    """The nodes of these rows with their cards, engines and weights."""
    cards: defaultdict[str, list[Gpu]] = defaultdict(list)
    for node_id, card in each(
        tables["gpus"], lambda r: (r["node_id"], _gpu(r)), "gpu", "node_id", notes
    ):
        cards[node_id].append(card)
    engines: defaultdict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
    failures: defaultdict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    for row in tables["engines"]:
        if row["versions"]:
            engines[row["node_id"]][row["engine"]] = tuple(row["versions"])
        for version, error in (row["failures"] or {}).items():
            failures[row["node_id"]][row["engine"], version] = error
    sources = {row["node_id"]: frozenset(row["sources"]) for row in tables["weights"]}

    def made(row: Row) -> Node:
        found = row["id"]
        on_disk = sources.get(found, frozenset())
        return _node(row, cards[found], engines[found], failures[found], on_disk)

    return each(tables["nodes"], made, "node", "id", notes)


def _gpu(row: Row) -> Gpu:
    made = Gpu(
        uuid=row["uuid"],
        index=row["index"],
        class_=row["class"],
        memory_mib=row["memory_mib"],
        memory_foreign_mib=row["memory_foreign_mib"],
        healthy=row["healthy"],
        problems=tuple(row["problems"]),
        numa=row["numa"],
        claims=tuple(Claim(shard, memory) for shard, memory in row["claims"] or ()),
        driver=row["driver_version"],
        cuda=row["cuda_version"],
        nearest_nic=row["nearest_nic"],
        island=row["island"],
        slice=row["slice"],
        unified=row["unified"],
        gone=row["gone"],
    )
    return whole(made)


def _node(
    row: Row,
    cards: list[Gpu],
    engines: dict[str, tuple[str, ...]],
    failures: dict[tuple[str, str], str],
    sources: frozenset[str],
) -> Node:
    flags, provisions = row["cpu_flags"], row["provisions"]
    made = Node(
        id=row["id"],
        state=row["state"],
        alloc_gen=row["alloc_gen"],
        state_reason=row["state_reason"],
        labels={str(key): str(value) for key, value in row["labels"].items()},
        arch=row["arch"],
        cpu_flags=None if flags is None else frozenset(flags),
        cpus=row["cpus_effective"],
        cpus_claimed=row["cpus"] or 0.0,
        memory_mib=row["memory_effective_mib"],
        memory_claimed_mib=(row["memory_mib"] or 0) + _pooled(cards),
        gpus=tuple(cards),
        ports=_ports(int(row["port_first"]), int(row["port_last"])),
        ports_taken=frozenset(row["ports"] or ()),
        engines=engines if row["reported"] else None,
        provisions=frozenset(provisions) if isinstance(provisions, list) else frozenset(),
        engine_failures=failures,
        sources_on_disk=sources,
        weights_free_mib=row["weights_free_mib"],
        mgmt_addr=row["mgmt_addr"],
        shards_live=row["shards"] or 0,
        models=frozenset(row["models"] or ()),
        nvlink_domain=row["nvlink_domain"],
        nvlink_reason=row["nvlink_reason"],
        imex_ready=row["imex_ready"],
        imex_reason=row["imex_reason"],
        fabrics={key: tuple(found["hcas"]) for key, found in (row["fabrics"] or {}).items()},
        declared={key: frozenset(found["names"]) for key, found in (row["fabrics"] or {}).items()},
    )
    return whole(made)


def _ports(first: int, last: int) -> tuple[int, int]:
    if not 1 <= first <= last <= 65535:
        raise ValueError(f"ports {first} to {last} are no range")
    return first, last


def _pooled(cards: list[Gpu]) -> int:
    """Host memory that is claimed through unified cards."""
    return sum(pool_claim(g, c.memory_mib) for g in cards if g.unified for c in g.claims)
