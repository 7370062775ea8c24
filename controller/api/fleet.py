"""Handlers of nodes: listing, the operator's word, enrolment."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, Any

from controller.api.errors import ApiError
from controller.api.paging import Page, page

if TYPE_CHECKING:
    from controller.api.call import Call

_WORDS = {"uncordon": "ready", "cordon": "cordoned", "drain": "draining"}


async def summary(call: Call) -> Any:
    """The fleet at a glance."""
    return await call.value("summary")


async def nodes(call: Call) -> Page:
    """Every node."""
    return await page(call.pool, call.cursors, "nodes", call.query)


async def node(call: Call) -> Any:
    """One node."""
    found = await call.value("node", call.path["id"])
    if found is None:
        raise ApiError(404, f"there is no node {call.path['id']}: llmgwctl nodes lists them")
    return found


async def controllers(call: Call) -> Page:
    """Control and router processes, the oldest first."""
    return await page(call.pool, call.cursors, "controllers", call.query)


async def set_state(call: Call) -> Any:
    """Cordon, drain or give back a node."""
    state = _WORDS.get(call.body.state, call.body.state)
    now = await call.value("node_set_intent", call.path["id"], state, call.body.reason, call.actor)
    return {"id": call.path["id"], "state": now}


async def enroll(call: Call) -> Any:
    """An enrolment token; only its hash is kept."""
    token = f"enroll-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(token.encode()).digest()
    body = call.body
    ends = await call.value("node_enroll", call.actor, body.node, digest, body.uses, body.ttl)
    bound = {"node": body.node} if body.node is not None else {}
    return {"token": token, **bound, "uses": body.uses, "expires_at": ends}


async def revoke(call: Call) -> Any:
    """Locks a node's agent out."""
    await call.value("node_revoke", call.actor, call.path["id"])
    return {"revoked": call.path["id"]}


async def weights(call: Call) -> Page:
    """Weights on the nodes' disks."""
    return await page(call.pool, call.cursors, "weights", call.query)
