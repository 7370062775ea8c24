"""The values that decisions are made of: frozen, built by reconcile/snapshot.py, no I/O.

Memory is in MiB, times are seconds of the database's clock (unix epoch), ``None`` is "unknown":
a filter must refuse an unknown fact by name, never take it for zero or for plenty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAY_PLACE: Final = "ready"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a live shard holds of a card: all of it (``memory_mib`` None) or a share."""

    shard_id: int
    memory_mib: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card as the agent last saw it."""

    uuid: str
    index: int
    class_: str
    memory_mib: int | None
    memory_foreign_mib: int | None
    """Memory held by processes that are not ours."""
    healthy: bool
    problems: tuple[str, ...] = ()
    numa: int | None = None
    claims: tuple[Claim, ...] = ()
    slice: bool = False
    """A MIG slice: works alone, never together with other cards."""
    unified: bool = False
    """Its memory is the host's: what is claimed of it is claimed of the node (E02)."""
    driver: str | None = None
    cuda: str | None = None
    """Versions of the driver and of the newest CUDA that it serves."""
    nearest_nic: str | None = None
    island: int | None = None
    """Number of the group of cards that NVLink joins within the node; None without NVLink."""
    gone: bool = False
    """A slice of a MIG layout that is no more: whoever holds it has lost its device (E19)."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. ``state`` is the word that ``llmgwctl nodes`` shows."""

    id: str
    state: str
    alloc_gen: int
    """The generation that the plan was made on; commit_plan refuses the node if it moved on."""
    state_reason: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    arch: str | None = None
    cpu_flags: frozenset[str] | None = None
    cpus: float | None = None
    """Effective cores: the smaller of the host's and the cgroup's."""
    cpus_claimed: float = 0.0
    memory_mib: int | None = None
    memory_claimed_mib: int = 0
    gpus: tuple[Gpu, ...] = ()
    ports: tuple[int, int] = (20000, 20999)
    """First and last port that engines may get, both included."""
    ports_taken: frozenset[int] = frozenset()
    engines: Mapping[str, tuple[str, ...]] | None = None
    """Engine name -> installed versions ("" where the version is unknown)."""
    provisions: frozenset[str] = frozenset()
    """Engines that the agent may install when a profile names their version."""
    engine_failures: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(engine, version) that the agent could not install and does not try again yet -> why."""
    sources_on_disk: frozenset[str] = frozenset()
    weights_free_mib: int | None = None
    """Free space where weights lie."""
    mgmt_addr: str | None = None
    shards_live: int = 0
    models: frozenset[str] = frozenset()
    """Models with a live shard here."""
    nvlink_domain: str | None = None
    """`<ClusterUUID>.<CliqueId>` when every card has joined; else `nvlink_reason` says why not."""
    nvlink_reason: str | None = None
    imex_ready: bool | None = None
    """Whether IMEX is READY with a channel device and one owner; None without IMEX."""
    imex_reason: str | None = None
    """Why it is not, and what to do where the agent knows it."""
    fabrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Physical fabric -> active ports on it, as ``mlx5_0:1``."""
    declared: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Physical fabric -> names that the agent's settings give it."""
    agent_ended: bool = False
    """Its agent said that it ends and stops its engines, and has not come back."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One way to run a model, as it stands in the catalog."""

    name: str
    engine: str
    fingerprint: str
    engine_version: str | None = None
    pool: str | None = None
    pool_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label -> accepted values; all labels must match."""
    gpu_class: str | None = None
    gpus: int = 0
    gpu_memory_mib: int | None = None
    """Needed per card; with ``share`` it is also what the shard claims of the card."""
    share: bool = False
    cpus: float | None = None
    memory_mib: int | None = None
    arch: str | None = None
    cpu_flags: tuple[str, ...] = ()
    shards: int = 1
    fabric: str = "fabric"
    """What the nodes of one replica need between them: nvlink-domain, fabric or any."""
    driver_min: str | None = None
    cuda_min: str | None = None
    exclude_nodes: frozenset[str] = frozenset()
    weights_mib: int | None = None
    """Size of the model's weights, where a node that has them told it."""
    alone_of: str | None = None
    """The model whose replicas may not share a node; None where they may."""
    start_deadline_s: float | None = None
    """How long each stage of a start may take; None is the fleet's setting."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Engine arguments, environment, source ...: copied into the shard, not read by placement."""
    fit_mib: int | None = None
    """Memory of the smallest card on which the engine would start, by the estimate in `fit.py`;
    not read where the profile says ``gpu_memory_mib`` itself. None is unknown."""
    uncut: str | None = None
    """Why the engine starts on no card however large, by the model's facts; None where it does or
    nobody knows."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What clients ask of a model, on all live routers together (view llmgw.demand)."""

    waiting: int = 0
    in_flight: int = 0
    peak: int = 0
    """The most of both at once within the last minute (or two)."""
    wanted_at: float | None = None
    """When a request last found no replica and did not go on since."""
    concurrency: float | None = None
    """Requests at once that one replica serves; None is the fleet's default."""
    heard: bool = True
    """False while no router lives: then nobody can say that nothing is asked."""

    @property
    def load(self) -> int:
        """Requests that are here now."""
        return self.waiting + self.in_flight


@dataclass(frozen=True, slots=True)
class Model:
    """What the catalog wants of one model; profiles in order of preference."""

    name: str
    source: str
    min_replicas: int
    max_replicas: int
    idle_timeout_s: float | None
    profiles: tuple[Profile, ...]
    priority: int = 0
    asked: Asked = Asked()


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard of the replica's present launch, as the agent last reported it."""

    id: int
    rank: int
    node_id: str
    state: str
    gpus: tuple[str, ...] = ()
    port: int | None = None
    error: str | None = None
    state_at: float = 0.0
    cpus: float | None = None
    memory_mib: int | None = None
    """Host cores and memory that it claims: what comes free with it."""
    master_port: int | None = None
    """Where the shards of a gang meet; the head's only."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One serving unit."""

    id: int
    model: str
    state: str
    profile: str | None = None
    fingerprint: str | None = None
    created_at: float = 0.0
    state_at: float = 0.0
    ready_at: float | None = None
    restarts: int = 0
    backoff_until: float | None = None
    error: str | None = None
    drain_deadline: float | None = None
    drain_reason: str | None = None
    shards: tuple[Shard, ...] = ()
    in_flight: int | None = None
    """Requests running on all routers; None when some live router has not reported since the last
    move."""
    last_used_at: float | None = None
    replace_asked: float | None = None
    """When an operator asked for another in its stead; it is treated as on a draining node."""
    replace_force: bool = False
    """It may stop before the other is ready, where there is no room for both."""
    room_for: str | None = None
    """The model for which it is leaving."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The database's numbers that decisions use (table llmgw_core.setting)."""

    backoff_base_s: float = 1.0
    backoff_max_s: float = 300.0
    stable_s: float = 60.0
    start_deadline_s: float = 1800.0
    drain_deadline_s: float = 600.0
    min_residence_s: float = 60.0
    """A replica that was woken or added stays at least this long."""
    fairness_s: float = 30.0
    """So long a replica waits for a place before busy ones are asked to leave for it."""
    idle_timeout_s: float = 900.0
    """For on-demand models that set none."""
    concurrency: float = 8.0
    """Requests at once of a replica that nobody measured."""
    demand_stale_s: float = 10.0
    """So long after it found no replica a request still counts as wanting one."""
    silent_share_max: float = 0.2
    """Above this share of nodes falling silent at once nobody is declared lost."""
    guard: str | None = None
    """Why no silent node may be declared lost right now (new leader ...), or None."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one decision sees. Items of the tuples have a stable order (by id or name)."""

    nodes: tuple[Node, ...]
    models: tuple[Model, ...]
    replicas: tuple[Replica, ...]
    settings: Settings = Settings()
    unread_nodes: frozenset[str] = frozenset()
    """Nodes and models whose rows cannot be read: there, and nothing is done about them (D10)."""
    unread_models: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one candidate did not fit: code to count, numbers to compare, sentence to read."""

    model: str
    profile: str
    pool: str | None
    node: str | None
    code: str
    reason: str
    need: str | None = None
    have: str | None = None


@dataclass(frozen=True, slots=True)
class Create:
    """Make one pending replica of a model."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlacedShard:
    """One shard's place; ``basis`` is the node's alloc_gen that the choice was made on."""

    rank: int
    node_id: str
    basis: int
    gpus: tuple[str, ...]
    gpu_memory_mib: int | None
    port: int
    cpus: float | None
    memory_mib: int | None
    master_port: int | None = None
    """Where the shards of a gang meet; the head's only."""
    gang: Mapping[str, Any] | None = None
    """What the agent is told of the other shards; None on one node."""


@dataclass(frozen=True, slots=True)
class Place:
    """Give a pending replica its shards, all or none."""

    replica_id: int
    model: str
    profile: str
    fingerprint: str
    spec: Mapping[str, Any]
    shards: tuple[PlacedShard, ...]
    score: Mapping[str, float]
    reason: str
    pool: str | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """Bring a replica into another state."""

    replica_id: int
    model: str
    from_state: str
    to_state: str
    reason: str
    error: str | None = None
    backoff_until: float | None = None
    drain_deadline: float | None = None
    restarts: int | None = None
    room_for: str | None = None
    """The model for which it makes room, when that is why."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one decision found for a model that wanted a place."""

    model: str
    placed: bool
    refusals: Sequence[Refusal]
    """Every refused (profile, node). Placement hands a `placement.refused.Refusals` here, which
    works the sentences out when somebody reads them: most ticks only need its `digest`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do next and what was refused. Empty when the fleet is as wanted."""

    items: tuple[Create | Place | Move, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences for people, e.g. why the guard is holding."""
