"""States of replicas and shards and the moves between them.

This table, `llmgw_core.transition` in Postgres and the diagrams in sql/README.md are one thing
written three times; tests/sql compares them. The database refuses any other move (LG002).
"""

from __future__ import annotations

from typing import Final

REPLICA: Final[dict[str, frozenset[str]]] = {
    "pending": frozenset({"starting", "gone"}),
    "starting": frozenset({"ready", "failed", "stopping"}),
    "ready": frozenset({"starting", "draining", "failed", "stopping"}),
    "draining": frozenset({"ready", "stopping", "failed"}),
    "stopping": frozenset({"gone"}),
    "failed": frozenset({"pending", "gone"}),
    "gone": frozenset(),
}
"""A replica is a serving unit. `failed` waits for its backoff, then it is placed again."""

SHARD: Final[dict[str, frozenset[str]]] = {
    "assigned": frozenset({"provisioning", "fetching", "starting", "ready", "stopped", "failed"}),
    "provisioning": frozenset({"assigned", "fetching", "starting", "stopped", "failed"}),
    "fetching": frozenset({"assigned", "provisioning", "starting", "stopped", "failed"}),
    "starting": frozenset({"assigned", "fetching", "ready", "draining", "stopped", "failed"}),
    "ready": frozenset({"assigned", "starting", "draining", "stopped", "failed"}),
    "draining": frozenset({"stopped", "failed"}),
    "stopped": frozenset(),
    "failed": frozenset(),
}
"""A shard is a replica's part on one node. Final states stay: a restart makes a new shard."""

SHARD_FINAL: Final = frozenset({"stopped", "failed"})
REPLICA_FINAL: Final = frozenset({"gone"})
