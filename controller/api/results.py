"""Answers that are no rows of a view: the summary's parts and what a change came to."""

from __future__ import annotations

from typing import Any

from controller.api.views import PLAIN_NAMES, Answer


class GpuCapacity(Answer):
    """Cards of one class."""

    class_: str
    total: int
    used: int
    free: int
    unhealthy: int
    unavailable: int

    model_config = PLAIN_NAMES


class Unplaceable(Answer):
    """A model without a place."""

    name: str
    reason: str | None = None


class Failing(Answer):
    """A model with a replica whose latest launch failed."""

    name: str
    reason: str


class ModelTotals(Answer):
    """Models of the catalog."""

    total: int
    satisfied: int
    unplaceable: list[Unplaceable]
    failing: list[Failing]


class IdleReplica(Answer):
    """A replica that nobody has used for a while."""

    name: str
    replica: int
    idle_seconds: float
    gpus: int


class RouterTotals(Answer):
    """All routers over the last minute."""

    requests_per_s: float
    errors: int
    in_flight: int | None = None
    queue: int | None = None


class ControllerTotals(Answer):
    """Control and router processes alive, and who leads."""

    alive: int
    routers: int
    leader: str | None = None
    term: int | None = None
    since: str | None = None


class DatabaseFigures(Answer):
    """Postgres's own figures."""

    version: str
    notify_queue: float
    oldest_transaction_s: float | None = None


class GangCapacity(Answer):
    """Nodes that can work together; class is that of the cards of the largest gang."""

    kind: str
    key: str
    name: str | None = None
    nodes: int
    whole_free: int
    largest_gang: int
    class_: str | None = None

    model_config = PLAIN_NAMES


class Summary(Answer):
    """The fleet at a glance."""

    gpus: list[GpuCapacity]
    gangs: list[GangCapacity]
    nodes: dict[str, int]
    replicas: dict[str, int]
    models: ModelTotals
    idle_replicas: list[IdleReplica]
    router: RouterTotals
    controllers: ControllerTotals
    database: DatabaseFigures


class NodeState(Answer):
    """The operator's word that is now in force."""

    id: str
    state: str


class Enrolment(Answer):
    """An enrolment token, shown once."""

    token: str
    node: str | None = None
    uses: int
    expires_at: str


class Revoked(Answer):
    """What may no longer be used."""

    revoked: str


class DifferenceView(Answer):
    """One field of a changed object; absent: not set."""

    field: str
    was: Any = None
    now: Any = None


class Added(Answer):
    """A model that is in the catalog now; action is added, changed or unchanged."""

    added: str
    action: str
    differences: list[DifferenceView] | None = None
    notes: list[str] | None = None


class Removed(Answer):
    """A model that is in the catalog no more, and its replicas, which drain and go."""

    removed: str
    replicas: list[int] | None = None


class Scaled(Answer):
    """What is in force; idle_timeout in seconds."""

    model: str
    min: int
    max: int
    idle_timeout: float | None = None
    on_demand: bool


class Replacing(Answer):
    """Replicas that are to be replaced now, or (cancelled) no longer."""

    model: str
    replicas: list[int]
    force: bool
    cancelled: bool


class ChangeView(Answer):
    """What became of one object."""

    action: str
    kind: str
    name: str
    differences: list[DifferenceView] | None = None


class Applied(Answer):
    """What a catalog changed, or would, and what follows for replicas."""

    file: str
    dry_run: bool
    changes: list[ChangeView]
    notes: list[str] | None = None


class FreedPath(Answer):
    """A download that was removed."""

    path: str
    bytes: int


class KeptPath(Answer):
    """A download that was not, or not wholly, removed."""

    path: str
    reason: str


class NodeCollected(Answer):
    """What one node's agent did; `left` orphans were not asked for this time."""

    node: str
    freed_bytes: int
    freed: list[FreedPath]
    kept: list[KeptPath]
    error: str | None = None
    left: int | None = None


class Collected(Answer):
    """What came free, on all nodes and on each."""

    freed_bytes: int
    nodes: list[NodeCollected]


class NewKey(Answer):
    """A new key. ``key`` is shown this once; only its hash is kept."""

    id: str
    name: str
    key: str
    models: list[str] | None = None
    expires_at: str | None = None
    scope: str | None = None


class RotatedKey(Answer):
    """A new secret of a key. ``key`` is shown this once; the one before is good till old_until."""

    id: str
    key: str
    old_until: str


class MovedKey(Answer):
    """A key and where it is now; absent: in no scope."""

    id: str
    scope: str | None = None


class PartAt(Answer):
    """One shard's place: cards by index."""

    node: str
    gpus: list[int]


class WouldMove(Answer):
    """A replica that would serve from elsewhere."""

    model: str
    replica: int
    profile: str | None = None
    from_: list[PartAt]
    to: list[PartAt]

    model_config = PLAIN_NAMES


class WouldPlace(Answer):
    """A replica that would be there."""

    model: str
    profile: str | None = None
    at: list[PartAt]


class WouldStop(Answer):
    """A replica that would be there no more."""

    model: str
    replica: int
    at: list[PartAt]


class CauseView(Answer):
    """One code of one profile, counted over nodes."""

    profile: str
    code: str
    nodes: int
    of: int
    reason: str


class WouldNotFit(Answer):
    """Replicas without a place; before: how many have none now."""

    model: str
    replicas: int
    before: int
    reason: str | None = None
    causes: list[CauseView]


class WouldDrain(Answer):
    """A node to be drained, and replicas that would not leave it."""

    node: str
    left: list[int]


class GpusThen(Answer):
    """Cards of one class, now and then."""

    class_: str
    total: int
    free: int
    total_after: int
    free_after: int

    model_config = PLAIN_NAMES


class WhatIf(Answer):
    """What the planner would do; nothing of it was done. settled: false means more would follow."""

    moves: list[WouldMove]
    placed: list[WouldPlace]
    stopped: list[WouldStop]
    unplaced: list[WouldNotFit]
    drained: list[WouldDrain]
    gpus: list[GpusThen]
    emptied: list[str]
    under_way: int
    rounds: int
    settled: bool
    assumptions: list[str]
    notes: list[str]
