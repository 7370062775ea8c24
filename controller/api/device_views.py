"""Answers about devices: cards, ports, fabrics, NVLink domains, checks and events.

As in views.py, rows come from Postgres as JSON with nulls dropped: absent is unknown.
"""

from __future__ import annotations

from typing import Any

from controller.api.views import PLAIN_NAMES, Answer


class FindingView(Answer):
    """What an agent holds against a card; kind tells how it ends: passing, reset or hardware."""

    code: str
    kind: str | None = None
    text: str | None = None
    evidence: str | None = None
    unhealthy: bool


class GPUView(Answer):
    """One card, or a MIG slice (parent is the UUID of its card). Memory counts MiB.

    The fields from paths on are in the answer for one node only.
    """

    index: int | None = None
    uuid: str
    name: str
    class_: str
    state: str
    memory_mb: int | None = None
    memory_used_mb: int | None = None
    utilization_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    healthy: bool
    problems: list[str] | None = None
    numa: int | None = None
    nvlink_peers: list[int] | None = None
    nearest_nic: str | None = None
    nic_path: str | None = None
    fabric_state: str | None = None
    domain: str | None = None
    clique: int | None = None
    bandwidth: str | None = None
    shard: int | None = None
    memory_foreign_mb: int | None = None
    foreign_pids: list[Any] | None = None
    memory_kind: str | None = None
    vendor: str | None = None
    parent: str | None = None
    mig_profile: str | None = None
    island: int | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    pci_bus_id: str | None = None
    mark: str | None = None
    mark_reason: str | None = None
    mark_actor: str | None = None
    mark_at: str | None = None
    paths: dict[str, Any] | None = None
    detail: dict[str, Any] | None = None
    findings: list[FindingView] | None = None

    model_config = PLAIN_NAMES


class IBPortView(Answer):
    """An InfiniBand or RoCE port. tx_bytes and rx_bytes are per second, errors since the boot."""

    hca: str
    port: int
    state: str | None = None
    phys_state: str | None = None
    rate_gbps: float | None = None
    link_layer: str | None = None
    active: bool
    fabric: str | None = None
    physical: str | None = None
    sm_error: str | None = None
    errors: dict[str, int] | None = None
    tx_bytes: int | None = None
    rx_bytes: int | None = None
    key: str | None = None
    node_guid: str | None = None
    port_guid: str | None = None
    lid: int | None = None
    sm_lid: int | None = None
    netdev: str | None = None
    network: str | None = None
    vlan: int | None = None
    numa: int | None = None
    board: str | None = None
    firmware: str | None = None


class DiskView(Answer):
    """A filesystem of a node; shared ones are nobody's to spend."""

    mount: str
    filesystem: str
    kind: str
    source: str | None = None
    total_gb: float | None = None
    free_gb: float | None = None
    holds_weights: bool


class FabricView(Answer):
    """A physical fabric against the names that agents' settings declare."""

    id: str
    key: str
    label: str
    kind: str
    declared: list[str] | None = None
    physical: str | None = None
    nodes: int
    ports_active: int
    ports_total: int
    rate_gbps: float | None = None
    scanned_at: str | None = None
    scanned_by: str | None = None
    took_ms: int | None = None
    error: str | None = None
    scanning: bool
    problems: list[str] | None = None


class LivePort(Answer):
    """A port of the map as its node's agent last saw it; bits per second."""

    node: str
    hca: str
    port: int
    state: str | None = None
    phys_state: str | None = None
    gbps: float | None = None
    tx_bps: int | None = None
    rx_bps: int | None = None
    errors: dict[str, int] | None = None


class TopologyView(Answer):
    """The map of a fabric; map is absent until a scan has printed one.

    live is by port GUID, by node/hca/port where that is unknown. A scan that failed keeps the map
    of the one before, so map_age_seconds tells how old the map is.
    """

    id: str
    key: str
    label: str
    declared: list[str] | None = None
    scanned_at: str | None = None
    scanned_by: str | None = None
    took_ms: int | None = None
    error: str | None = None
    scanning: bool
    map: dict[str, Any] | None = None
    map_age_seconds: float | None = None
    live: dict[str, LivePort]
    problems: list[str] | None = None
    sm: str | None = None
    sms: list[str] | None = None


class ScanStarted(Answer):
    """Who scans a fabric now."""

    fabric: str
    scanner: str
    asked_at: str
    under_way: bool


class NvlinkView(Answer):
    """A node with multi-node NVLink and what keeps it out of its domain."""

    domain: str
    node: str
    node_state: str
    state: str
    gpus: int
    imex: str | None = None
    imex_channels: int | None = None
    usable: bool
    why_not: str


class CheckView(Answer):
    """One check of a node: pass, warn or fail, with the evidence and what to do."""

    node: str
    name: str
    result: str
    evidence: str
    remedy: str | None = None
    position: int
    at: str | None = None


class EventView(Answer):
    """One change of a device."""

    id: int
    at: str
    node: str
    kind: str
    object: str
    was: str | None = None
    now: str | None = None
    evidence: Any = None


class Marked(Answer):
    """A card after an operator's word."""

    node: str
    uuid: str
    index: int | None = None
    healthy: bool
    problems: list[str] | None = None


class Forgotten(Answer):
    """A card whose row is gone."""

    node: str
    uuid: str
    forgotten: bool
