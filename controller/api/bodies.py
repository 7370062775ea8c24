"""What requests may carry: bodies and query parameters, unknown fields refused."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from controller.api.paging import PageQuery
from controller.catalog.definition import Catalog, Model
from controller.catalog.profile import MOST_GPUS, Strict
from controller.catalog.units import Mebibytes, Seconds  # noqa: TC001 - pydantic needs them

NODE_ID: Final = r"^[a-z0-9][a-z0-9._-]{0,62}$"
BIGGEST: Final = 2**63 - 1
DAY_S: Final = 86400.0


class NoQuery(Strict):
    """A path without query parameters."""


class ReplicasQuery(PageQuery):
    """Which replicas."""

    model: str | None = None


class PricesQuery(PageQuery):
    """Whose prices."""

    model: str | None = None


class DecisionsQuery(PageQuery):
    """Which decisions, newest first."""

    limit: int = Field(100, ge=1, le=5000, description="rows of a page")
    model: str | None = None
    node: str | None = None
    since: Seconds | None = Field(None, description='how far back, as "24h"')


class DoctorQuery(PageQuery):
    """Whose checks."""

    node: str | None = None


class EventsQuery(PageQuery):
    """Which changes of devices, newest first."""

    limit: int = Field(100, ge=1, le=5000, description="rows of a page")
    node: str | None = None
    since: Seconds | None = Field(None, description='how far back, as "24h"')


class ExplainQuery(Strict):
    """Which model."""

    model: str = Field(min_length=1)
    scores: bool = Field(False, description="points of what was chosen and of what could be now")


class LogsQuery(Strict):
    """Which log and how much of it."""

    shard: int | None = Field(None, ge=1, le=BIGGEST, description="absent: the agent's own log")
    lines: int = Field(100, ge=1, le=10_000)
    follow: bool = Field(False, description="server-sent events until the client leaves")


class ApplyQuery(Strict):
    """Whether to keep it."""

    dry_run: bool = False


class NodeStateBody(Strict):
    """The operator's word on a node."""

    state: Literal["ready", "uncordon", "cordoned", "cordon", "draining", "drain"]
    reason: str | None = Field(None, max_length=500)


class MarkBody(Strict):
    """The operator's word on a card."""

    mark: Literal["healthy", "unhealthy"]
    reason: str = Field(min_length=1, max_length=500)


class OrphansQuery(PageQuery):
    """Whose downloads."""

    node: str | None = None


class CollectBody(Strict):
    """Which downloads that nobody needs are to be removed; nothing given: all of them."""

    node: str | None = Field(None, min_length=1, description="absent: every node")
    paths: list[Annotated[str, Field(min_length=1, max_length=4096)]] | None = Field(
        None, min_length=1, max_length=1000, description="absent: all orphans"
    )


class EnrollBody(Strict):
    """An enrolment token for one node, or for any new nodes."""

    node: str | None = Field(None, pattern=NODE_ID, description="absent: any new node")
    uses: int = Field(1, ge=1, le=10_000)
    ttl: Seconds = Field(3600.0, gt=0, description='how long it admits, as "1h"')


class ScaleBody(Strict):
    """How many replicas."""

    min: int = Field(ge=0, le=10_000)
    max: int | None = Field(None, ge=1, le=10_000, description="absent: follows min, at least 1")
    idle_timeout: Seconds | None = Field(None, gt=0, description="absent: stays")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max {self.max} is under min {self.min}: raise max or lower min")
        return self


class ReplaceBody(Strict):
    """Another replica in its stead: ready first, one at a time."""

    force: bool = Field(False, description="may stop first where there is no room for both")
    cancel: bool = Field(False, description="takes back what was asked")


class ReplaceModelBody(ReplaceBody):
    """Replicas of a model."""

    stale: bool = Field(False, description="only those whose profile was edited since")


class AddNodesBody(Strict):
    """Machines that the fleet might get."""

    count: int = Field(ge=1, le=5000)
    gpus: int = Field(ge=0, le=MOST_GPUS, description="cards of each; 0: a machine without")
    class_: str | None = Field(None, min_length=1, max_length=100, description="of its cards")
    memory: Mebibytes | None = Field(None, description="of each card; absent: as others have")

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=lambda name: name.removesuffix("_")
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.gpus and self.class_ is None:
            raise ValueError('it has cards of no class: say which, as "class": "H100"')
        return self


class WhatIfBody(Strict):
    """What would be otherwise; empty: what is under way anyway."""

    add_nodes: list[AddNodesBody] = Field(default_factory=list, max_length=50)
    remove_nodes: list[str] = Field(default_factory=list, max_length=5000)
    drain_nodes: list[str] = Field(default_factory=list, max_length=5000)
    scale: dict[str, int] = Field(default_factory=dict, description="model -> replicas")
    models: list[Model] = Field(default_factory=list, description="added, or in place of theirs")
    seed: int | None = Field(None, description="settles ties; absent: as the leader's term does")

    @model_validator(mode="after")
    def _counts(self) -> Self:
        for name, count in self.scale.items():
            if not 0 <= count <= 10_000:
                raise ValueError(f"scale of {name}: {count} is not between 0 and 10000")
        twice = set(self.remove_nodes) & set(self.drain_nodes)
        if twice:
            raise ValueError(f"node {min(twice)} is both drained and removed: drop one")
        return self


class CatalogBody(Catalog):
    """A whole catalog file; what it declared before and no longer does is removed."""

    file: str = Field(
        min_length=1, max_length=1000, description="absolute name under which it is kept"
    )


class Nothing(Strict):
    """A body without fields."""
