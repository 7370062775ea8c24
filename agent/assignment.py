"""An assignment as the agent understands it, checked field by field.

The database hands a list; each item is read on its own, so that one bad row costs one shard and
never the list (case D10). Called by shards and state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

START_DEADLINE_S = 1800.0
STOP_GRACE_S = 30.0
NVLINK, INFINIBAND, ROCE, NETWORK = "nvlink", "infiniband", "roce", "network"
TRANSPORTS = (NVLINK, INFINIBAND, ROCE, NETWORK)
_HCA = re.compile(r"[A-Za-z0-9_.-]+(:[0-9]+)?")


class BadAssignment(ValueError):
    """An item of the list makes no sense; the message names shard, field and value."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card given to a shard."""

    uuid: str
    index: int | None
    share: float | None = None
    """The part of its memory that the shard may take, of 1; None: all of it."""


@dataclass(frozen=True, slots=True)
class Gang:
    """How the shards of one replica on several nodes find each other and what they talk over."""

    head: str
    """Address of the node of rank 0."""
    master_port: int
    """Where they meet there; another one at each launch."""
    nodes: int
    transport: str
    hcas: tuple[str, ...] = ()
    """This node's ports on the fabric (`mlx5_0:1`), nearest to the shard's cards first."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One shard that this node shall run or stop. Times in seconds, memory in MiB."""

    shard: int
    replica: int
    model: str
    desired: str
    engine: str
    port: int
    host: str
    profile: str | None = None
    engine_version: str | None = None
    source: str | None = None
    rank: int = 0
    shards: int = 1
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] | None = None
    health_path: str | None = None
    gpus: tuple[Gpu, ...] = ()
    cpus: float | None = None
    memory_mib: int | None = None
    start_deadline_s: float = START_DEADLINE_S
    stop_grace_s: float = STOP_GRACE_S
    gang: Gang | None = None
    """None on one node."""

    @property
    def ports(self) -> tuple[int, ...]:
        """Where processes of this shard may listen."""
        if self.gang is None or self.rank > 0:
            return (self.port,)
        return (self.port, self.gang.master_port)

    @property
    def wanted(self) -> bool:
        """Whether it shall run."""
        return self.desired == "running"


def shard_of(document: object) -> int | None:
    """The shard an item speaks of, also when the rest of it is unreadable."""
    number = document.get("shard") if isinstance(document, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def parse(document: object, default_host: str) -> Assignment:
    """Read one item; raises BadAssignment naming the field. Unknown fields are ignored."""
    shard = shard_of(document)
    if shard is None or not isinstance(document, dict):
        raise BadAssignment(f"an assignment without a shard number: {str(document)[:200]}")
    take = _Fields(shard, document)
    desired = take.text("desired")
    if desired not in ("running", "stopped"):
        raise BadAssignment(f"shard {shard}: desired is {desired!r}, not running or stopped")
    port = take.whole("port")
    if not 0 < port < 65536:
        raise BadAssignment(f"shard {shard}: port {port} is not a TCP port")
    return Assignment(
        shard=shard,
        replica=take.whole("replica"),
        model=take.text("model"),
        desired=desired,
        engine=take.text("engine"),
        port=port,
        host=take.text("host", default_host),
        profile=take.text_or_none("profile"),
        engine_version=take.text_or_none("engine_version"),
        source=take.text_or_none("source"),
        rank=take.whole("rank", 0),
        shards=take.whole("shards", 1),
        args=take.texts("args") or (),
        env=take.environment(),
        command=take.texts("command"),
        health_path=take.text_or_none("health_path"),
        gpus=take.gpus(),
        cpus=take.number("cpus", None),
        memory_mib=None if document.get("memory_mib") is None else take.whole("memory_mib"),
        start_deadline_s=take.number("start_deadline_s", START_DEADLINE_S) or START_DEADLINE_S,
        stop_grace_s=take.number("stop_grace_s", STOP_GRACE_S) or 0.0,
        gang=None if document.get("gang") is None else _gang(shard, document),
    )


def _gang(shard: int, document: Mapping[str, Any]) -> Gang:
    """What the shard is told of the others; raises BadAssignment naming the field."""
    told = document["gang"]
    if not isinstance(told, dict):
        raise BadAssignment(f"shard {shard}: gang is {str(told)[:100]!r}, not a document")
    take = _Fields(shard, told, "gang.")
    gang = Gang(
        head=take.text("head"),
        master_port=take.whole("master_port"),
        nodes=take.whole("nodes"),
        transport=take.text("transport"),
        hcas=take.texts("hcas") or (),
    )
    if not 0 < gang.master_port < 65536:
        raise BadAssignment(f"shard {shard}: gang.master_port {gang.master_port} is not a TCP port")
    if gang.transport not in TRANSPORTS:
        raise BadAssignment(
            f"shard {shard}: gang.transport is {gang.transport!r}, none of {', '.join(TRANSPORTS)}"
        )
    if odd := [hca for hca in gang.hcas if not _HCA.fullmatch(hca)]:
        raise BadAssignment(f"shard {shard}: gang.hcas has {odd[0][:100]!r}, which names no port")
    rank, shards = document.get("rank") or 0, document.get("shards") or 1
    if gang.nodes != shards or not 0 <= rank < shards:
        raise BadAssignment(
            f"shard {shard}: rank {rank} of {shards} shards in a gang of {gang.nodes} nodes"
        )
    return gang


class _Fields:
    """Typed reads from one document."""

    def __init__(self, shard: int, document: Mapping[str, Any], inside: str = "") -> None:
        self._shard = shard
        self._document = document
        self._inside = inside

    def _bad(self, name: str, want: str) -> BadAssignment:
        found = str(self._document.get(name))[:100]
        return BadAssignment(f"shard {self._shard}: {self._inside}{name} is {found!r}, not {want}")

    def _checked(self, name: str, want: str, good: Callable[[Any], bool]) -> Any:
        value = self._document.get(name)
        if not good(value):
            raise self._bad(name, want)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A text that is not empty."""
        if default is not None and self._document.get(name) is None:
            return default
        value: str = self._checked(name, "a text", lambda v: isinstance(v, str) and v != "")
        return value

    def text_or_none(self, name: str) -> str | None:
        """A text, or None when absent."""
        return None if self._document.get(name) is None else self.text(name)

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        if default is not None and self._document.get(name) is None:
            return default
        good = self._checked(name, "a whole number", lambda v: type(v) is int)
        return int(good)

    def number(self, name: str, default: float | None) -> float | None:
        """A number that is not negative, or the default when absent."""
        if self._document.get(name) is None:
            return default
        return float(self._checked(name, "a number", lambda v: type(v) in (int, float) and v >= 0))

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of texts, or None when absent."""
        if self._document.get(name) is None:
            return None
        return tuple(
            self._checked(
                name,
                "a list of texts",
                lambda v: (
                    isinstance(v, list) and all(isinstance(i, str) and "\0" not in i for i in v)
                ),
            )
        )

    def environment(self) -> dict[str, str]:
        """`env` as a mapping of texts."""
        if self._document.get("env") is None:
            return {}
        pairs: dict[str, str] = self._checked(
            "env",
            "a mapping of texts to texts",
            lambda v: (
                isinstance(v, dict)
                and all(isinstance(i, str) and "\0" not in i for i in v.values())
                and not any("=" in k or "\0" in k or not k for k in v)
            ),
        )
        return dict(pairs)

    def gpus(self) -> tuple[Gpu, ...]:
        """`gpus` as cards; a card without a UUID cannot be handed out."""
        listed = self._document.get("gpus") or []
        if not isinstance(listed, list):
            raise self._bad("gpus", "a list")
        for item in listed:
            if not isinstance(item, dict) or not isinstance(item.get("uuid"), str):
                raise self._bad("gpus", "a list of cards with UUIDs")
            if not _is_share(item.get("share")):
                raise self._bad("gpus", "a list of cards with shares above 0 and up to 1")
        return tuple(Gpu(item["uuid"], item.get("index"), item.get("share")) for item in listed)


def _is_share(value: object) -> bool:
    return value is None or (type(value) in (int, float) and 0 < float(str(value)) <= 1)
