"""Answers about machines, as views.py and device_views.py describe theirs."""

from __future__ import annotations

from typing import Any

from controller.api.device_views import (  # noqa: TC001 - pydantic needs them at run time
    DiskView,
    GPUView,
    IBPortView,
)
from controller.api.views import Answer


class LoadView(Answer):
    """Fast facts of a node; absent when older than 60 s."""

    cpu_percent: float | None = None
    cpus: float | None = None
    load1: float | None = None
    load5: float | None = None
    load15: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_percent: float | None = None
    age_seconds: float
    pressure: dict[str, float] | None = None


class ProvisionView(Answer):
    """An engine being installed, or that could not be."""

    engine: str
    version: str | None = None
    state: str
    error: str | None = None


class NodeView(Answer):
    """One machine."""

    id: str
    state: str
    state_reason: str | None = None
    gpu_total: int
    gpu_free: int
    gpu_classes: list[str] | None = None
    memory_gb: float | None = None
    replicas: int
    last_seen_ago: float | None = None
    hostname: str | None = None
    mgmt_addr: str | None = None
    os: str | None = None
    agent_version: str | None = None
    warnings: list[str] | None = None
    disk_free_gb: float | None = None
    disk_total_gb: float | None = None
    unhealthy_gpus: list[str] | None = None
    engines: list[str] | None = None
    provision: list[ProvisionView] | None = None
    models_on_disk: list[str] | None = None
    labels: dict[str, str] | None = None
    load: LoadView | None = None
    gpus: list[GPUView] | None = None
    fabrics: list[str] | None = None
    ib_ports: list[IBPortView] | None = None
    nvlink_domain: str | None = None
    nvlink_state: str | None = None
    nvlink_reason: str | None = None
    imex: str | None = None
    imex_channels: int | None = None
    kernel: str | None = None
    arch: str | None = None
    cpu_model: str | None = None
    cpus: float | None = None
    cpus_effective: float | None = None
    memory_host_gb: float | None = None
    machine: dict[str, Any] | None = None


class NodePage(NodeView):
    """One machine with everything about it: disks and IMEX besides, cards with their wiring."""

    disks: list[DiskView] | None = None
    imex_detail: dict[str, Any] | None = None
