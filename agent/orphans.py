"""Processes that carry this agent's mark and belong to no shard it knows (case D04).

An agent killed between starting an engine and writing that down leaves one, and so does a leader
that died while no agent was watching. They hold memory and ports, so they are ended before anything
is started. Called by shards at start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from agent import procfs
from agent.process import Mark, alive, end_tree, marked_shard, tree

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent.state import Record

log = structlog.get_logger()


def orphaned_shards(node: str, agent_dir: str, records: Iterable[Record]) -> dict[int, list[int]]:
    """Shard numbers of marked processes outside every adopted tree, and their pids."""
    ours: set[int] = set()
    for record in records:
        if record.process is not None and alive(record.process):
            mark = Mark(record.shard, 0, node, agent_dir)
            ours |= {member.pid for member in tree(record.process, mark)}
    found: dict[int, list[int]] = {}
    for p in procfs.processes():
        shard = marked_shard(p.pid, node, agent_dir)
        if shard is not None and p.pid not in ours:
            found.setdefault(shard, []).append(p.pid)
    return found


async def sweep(node: str, agent_dir: str, records: Iterable[Record]) -> None:
    """End all orphans of this agent."""
    found = await trio.to_thread.run_sync(orphaned_shards, node, agent_dir, list(records))
    for shard, pids in found.items():
        log.warning("ending orphaned processes", shard=shard, pids=pids)
        left = await end_tree(None, Mark(shard, 0, node, agent_dir), 0)
        if left:
            log.error("orphaned processes survive SIGKILL", shard=shard, pids=left)
