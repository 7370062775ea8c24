"""The answers of the admin API as models: they document, and tests compare them with the SQL views.

Rows come from Postgres as JSON with nulls dropped: a field that is absent is unknown. Nothing here
changes a value on its way.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

PLAIN_NAMES = ConfigDict(extra="forbid", alias_generator=lambda name: name.removesuffix("_"))
"""For fields named after a keyword of Python's: class_ is class."""


class Answer(BaseModel):
    """Fields of an answer; an optional one is absent when unknown."""

    model_config = ConfigDict(extra="forbid")


class PricesView(Answer):
    """What a model's tokens cost now, in micros per million tokens, and since when."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    since: str


class PriceView(PricesView):
    """What a model's tokens cost for a time; no until: still. Absent prices are unknown, not 0."""

    model: str
    until: str | None = None
    set_by: str


class ModelView(Answer):
    """One model of the catalog and what runs of it."""

    name: str
    description: str | None = None
    aliases: list[str] | None = None
    source: str
    min_replicas: int
    max_replicas: int
    ready_replicas: int
    total_replicas: int
    fallbacks: list[str] | None = None
    profiles: list[str] | None = None
    on_demand: bool
    origin: str
    origin_file: str | None = None
    idle_timeout: float | None = None
    priority: int
    updated_at: str
    updated_by: str
    concurrency: float
    concurrency_source: str
    prices: PricesView | None = None


class ControllerView(Answer):
    """A control or router process. catalog: its file is applied, differs from that, or refused."""

    id: str
    role: str
    hostname: str
    pid: int
    version: str
    alive: bool
    started_at: str
    seen_ago: float
    leads: list[str] | None = None
    catalog_file: str | None = None
    catalog_digest: str | None = None
    catalog: str | None = None
    catalog_problem: str | None = None


class FetchView(Answer):
    """Weights on their way; percent is absent when the total is unknown."""

    source: str | None = None
    bytes_done: int
    bytes_total: int | None = None
    percent: float | None = None


class ShardView(Answer):
    """A replica's part on one node."""

    id: int
    node: str
    rank: int
    gpus: list[int]
    state: str
    error: str | None = None
    fetch: FetchView | None = None
    cpu_cores: float | None = None
    memory_bytes: int | None = None


class ReplicaView(Answer):
    """One serving unit; idle_seconds is -1 when no router has reported any use."""

    id: int
    model: str
    profile: str | None = None
    state: str
    pool: str | None = None
    nodes: list[str] | None = None
    age_seconds: float
    idle_seconds: float
    endpoint: str | None = None
    error: str | None = None
    reason: str | None = None
    restarts: int
    in_flight: int | None = None
    stale: bool
    backoff_until: str | None = None
    drain_deadline: str | None = None
    replace_asked: str | None = None
    shards: list[ShardView]
    depth: int
    depth_source: str


class RejectionView(Answer):
    """Why one candidate did not fit."""

    profile: str
    pool: str | None = None
    node: str | None = None
    code: str
    reason: str
    need: str | None = None
    have: str | None = None


class ScoreView(Answer):
    """Points of a node, which add up: of the choice for a replica, else as a candidate now."""

    node: str
    profile: str | None = None
    total: float
    parts: dict[str, float]
    replica: int | None = None
    at: str | None = None


class ExplainView(Answer):
    """The latest attempt to place a model; outcome tells satisfied from never attempted."""

    model: str
    placed: bool
    at: str | None = None
    checked_at: str | None = None
    outcome: str
    refused: int
    main_reason: str | None = None
    rejections: list[RejectionView] | None = None
    scores: list[ScoreView] | None = None


class DecisionView(Answer):
    """One item of a plan, or a refusal."""

    id: int
    at: str
    term: int
    kind: str
    model: str | None = None
    replica: int | None = None
    node: str | None = None
    reason: str
    detail: Any = None


class KeyView(Answer):
    """A client's key, without anything secret; models absent: every model, ips: from anywhere,
    fallback: as its scopes or the settings say.

    old_until: so long the secret from before a rotation is good too.
    """

    id: str
    name: str
    models: list[str] | None = None
    created_by: str
    created_at: str
    expires_at: str | None = None
    revoked_at: str | None = None
    state: str
    scope_id: int | None = None
    scope: str | None = None
    ips: list[str] | None = None
    tags: dict[str, str]
    rotated_at: str | None = None
    old_until: str | None = None
    used_at: str | None = None
    fallback: list[str] | None = None


class WeightView(Answer):
    """Model weights on a node's disk."""

    node: str
    source: str | None = None
    path: str
    bytes: int | None = None
    complete: bool
    in_catalog: bool
    name: str | None = None
    revision: str | None = None
    format: str | None = None
    reason: str | None = None
    shared: bool
    filer: str | None = None
    managed: bool
    facts: dict[str, Any] | None = None
    filer_path: str | None = None
    shared_bytes: int | None = None


class OrphanView(Answer):
    """A download on a node's disk that no model of the catalog and no live shard uses."""

    node: str
    source: str
    path: str
    bytes: int | None = None
    complete: bool
    name: str | None = None
    format: str | None = None
    shared: bool
    filer: str | None = None
    filer_path: str | None = None
