"""Open descriptors of a router process: as many as it may need, else fewer clients.

A shell's usual limit, 1024, is reached by 500 streams: each has a client and an engine. Without one
for its engine a request fails, and so it looks as if the engine did.
"""

from __future__ import annotations

import resource

import structlog

BESIDES = 128
"""For all that is no request: Postgres, the spool, questions about health."""

log = structlog.get_logger(__name__)


def clients_for(connections: int) -> int:
    """Raise this process's limit for so many clients; how many there may be under what we got."""
    wanted = 2 * connections + BESIDES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft >= wanted:
        return connections
    bound = max(1, (soft - BESIDES) // 2)
    told = "fewer client connections than limits.connections: raise its limit of open files"
    log.warning(told, connections=bound, descriptors=soft, wanted=wanted)
    return bound
