"""Handlers of devices: marks on cards, checks, events, NVLink domains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.api.paging import Page, page

if TYPE_CHECKING:
    from controller.api.call import Call


async def mark(call: Call) -> Any:
    """The operator's word on a card."""
    at, body = call.path, call.body
    return await call.value("gpu_mark", call.actor, at["id"], at["gpu"], body.mark, body.reason)


async def forget(call: Call) -> Any:
    """Removes the row of a card that was taken out."""
    return await call.value("gpu_forget", call.actor, call.path["id"], call.path["gpu"])


async def doctor(call: Call) -> Page:
    """Checks of every node, or of one."""
    return await page(call.pool, call.cursors, "doctor", call.query, call.query.node)


async def events(call: Call) -> Page:
    """Changes of devices, newest first."""
    query = call.query
    return await page(call.pool, call.cursors, "events", query, query.node, query.since)


async def nvlink(call: Call) -> Page:
    """Nodes with multi-node NVLink by domain."""
    return await page(call.pool, call.cursors, "nvlink", call.query)
