"""The routing table: which names mean which model, and which replicas serve it. Immutable.

Built from rows (Postgres or `--endpoint`), swapped whole; `fleet.py` keeps the living side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.router.config import StaticEndpoint


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica listens, and under which path."""

    host: str
    port: int
    base: bytes  # put before the client's path; usually empty

    @property
    def authority(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode()


@dataclass(frozen=True, slots=True)
class Replica:
    """One serving unit: `key` names it here and in counters, `id` is its row (None: static)."""

    key: str
    id: int | None
    endpoint: Endpoint
    upstream_model: str  # the name the engine answers to
    ready: bool  # False: draining or unhealthy, finishes what it has
    depth: int | None = None  # this router sends it so many at once; None: no bound
    sized: bool = False  # its depth is its own, so that it tells how large it is among others
    weight: float = 1.0  # its share of the requests, against other replicas of the model
    engine_key: bytes = field(default=b"", repr=False)  # what its engine wants of us; mostly none


@dataclass(frozen=True, slots=True)
class Model:
    """A model that clients may ask for, with all its replicas."""

    name: str
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    created: int | None = None
    replicas: tuple[Replica, ...] = ()
    on_demand: bool = False
    """Without a ready replica, a request wakes it and waits."""


@dataclass(frozen=True, slots=True)
class RouteTable:
    """All models by name, and all names (aliases too) by what clients send."""

    models: tuple[Model, ...] = ()

    def names(self) -> dict[str, Model]:
        by_name = {alias: model for model in self.models for alias in model.aliases}
        by_name.update({model.name: model for model in self.models})
        return by_name


def parse_endpoint(url: str) -> Endpoint:
    """`http://host:port[/base]`; a base that ends in `/v1` is the same without it.

    Raises ValueError saying what is wrong with the URL.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme != "http":
        raise ValueError(f"endpoint {url!r}: engines are reached over http://, not {parts.scheme}")
    if not parts.hostname:
        raise ValueError(f"endpoint {url!r} names no host: write http://host:port")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"endpoint {url!r}: only http://host:port and a path are understood")
    try:
        port = 80 if parts.port is None else parts.port
    except ValueError:
        port = 0
    if not port:
        raise ValueError(f"endpoint {url!r}: its port is no number from 1 to 65535")
    base = parts.path.rstrip("/").removesuffix("/v1")
    return Endpoint(parts.hostname, port, base.encode())


def from_rows(
    models: Iterable[Mapping[str, Any]], replicas: Iterable[Mapping[str, Any]]
) -> RouteTable:
    """The table in rows of `route_models` and `route_replicas`.

    A replica without a usable endpoint or in another state than ready/draining is left out.
    """
    by_model: dict[str, list[Replica]] = {}
    for row in replicas:
        replica = _replica(row)
        if replica is not None:
            by_model.setdefault(row["model"], []).append(replica)
    return RouteTable(
        tuple(
            Model(
                row["name"],
                tuple(row["aliases"] or ()),
                tuple(row["fallbacks"] or ()),
                None if row.get("created_at") is None else int(row["created_at"]),
                replicas=tuple(by_model.get(row["name"], ())),
                on_demand=bool(row.get("on_demand")),
            )
            for row in models
        )
    )


def _replica(row: Mapping[str, Any]) -> Replica | None:
    if row["state"] not in ("ready", "draining") or not row["endpoint"]:
        return None
    try:
        endpoint = parse_endpoint(row["endpoint"])
    except ValueError:
        return None  # one bad row must not take the others' route away (case D10)
    identity = row["replica_id"]
    ready = row["state"] == "ready"
    return Replica(
        str(identity), identity, endpoint, row["model"], ready, row.get("share"),
        sized=row.get("depth_source") == "measured",
    )  # fmt: skip


def from_static(
    endpoints: Iterable[StaticEndpoint],
    aliases: Iterable[tuple[str, str]] = (),
    fallbacks: Iterable[tuple[str, tuple[str, ...]]] = (),
    unhealthy: frozenset[str] = frozenset(),
) -> RouteTable:
    """The table of `--endpoint` options; the unhealthy ones, by id, get nothing new.

    Raises ValueError for a bad URL or a double id.
    """
    by_model: dict[str, list[Replica]] = {}
    seen: set[str] = set()
    for entry in endpoints:
        if entry.id in seen:
            raise ValueError(f"endpoint id {entry.id!r} is used twice: give each its own")
        seen.add(entry.id)
        endpoint = parse_endpoint(entry.url)
        for name in entry.models:
            ready = entry.id not in unhealthy
            sized = entry.depth is not None
            replica = Replica(
                entry.id, None, endpoint, name, ready, entry.depth, sized, entry.weight,
                entry.engine_key,
            )  # fmt: skip
            by_model.setdefault(name, []).append(replica)
    named, others = list(aliases), dict(fallbacks)
    return RouteTable(
        tuple(
            Model(
                name,
                tuple(a for a, target in named if target == name),
                others.get(name, ()),
                replicas=tuple(found),
            )
            for name, found in by_model.items()
        )
    )


def merged(first: RouteTable, second: RouteTable) -> RouteTable:
    """Both tables; a model in both has the replicas of both, the rest from `first`."""
    extra = {model.name: model for model in second.models}
    models = [_joined(model, extra.pop(model.name, None)) for model in first.models]
    return RouteTable((*models, *extra.values()))


def _joined(model: Model, other: Model | None) -> Model:
    if other is None:
        return model
    return Model(
        model.name,
        model.aliases + other.aliases,
        model.fallbacks or other.fallbacks,
        model.created,
        model.replicas + other.replicas,
        model.on_demand,
    )
