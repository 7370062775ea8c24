"""Rows of replicas and shards -> `Replica`. Pure; called by `mirror.py`."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from controller.placement.model import Replica, Shard
from controller.reconcile.rows import Notes, Row, each, whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TAIL = 600
"""Characters of an engine's last words that go into an error; the log has the rest."""


def replicas(tables: Mapping[str, Sequence[Row]], notes: Notes) -> list[Replica]:
    """The replicas of these rows with the shards of their launch; what runs on them comes later."""
    shards: defaultdict[int, list[Shard]] = defaultdict(list)
    for replica_id, shard in each(
        tables["shards"], lambda r: (r["replica_id"], _shard(r)), "shard", "replica_id", notes
    ):
        shards[replica_id].append(shard)
    parts = Counter(row["replica_id"] for row in tables["shards"])

    def made(row: Row) -> Replica:
        return _replica(row, shards[row["id"]], parts[row["id"]])

    return each(tables["replicas"], made, "replica", "id", notes)


def _shard(row: Row) -> Shard:
    error = row["error"]
    if row["state"] == "failed" and row["log_tail"]:
        error = f"{error or 'failed'}; last words: {row['log_tail'].strip()[-TAIL:]}"
    made = Shard(
        id=row["id"],
        rank=row["rank"],
        node_id=row["node_id"],
        state=row["state"],
        gpus=tuple(row["gpus"] or ()),
        port=row["port"],
        error=error,
        state_at=row["state_at"],
        cpus=row["cpus"],
        memory_mib=row["memory_mib"],
        master_port=row["master_port"],
    )
    return whole(made)


def _replica(row: Row, shards: list[Shard], parts: int) -> Replica:
    if len(shards) != parts:
        raise ValueError("one of its shards cannot be read")
    named = (
        "id",
        "model",
        "state",
        "profile",
        "fingerprint",
        "created_at",
        "state_at",
        "ready_at",
        "restarts",
    )
    more = ("backoff_until", "error", "drain_deadline")
    asked = ("replace_asked", "replace_force", "room_for")
    return whole(
        Replica(**{name: row[name] for name in named + more + asked}, shards=tuple(shards))
    )
