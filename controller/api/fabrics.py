"""Handlers of physical fabrics: listing, the map of one, a new scan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import trio

from controller.api import topology as answers
from controller.api.errors import ApiError
from controller.api.paging import Page, page
from sql import queries

if TYPE_CHECKING:
    from controller.api.call import Call
    from controller.api.maps import Built
    from controller.fabric.model import HostPort

MAP_S: Final = 60.0
"""Deadline of a request for a map that is not made yet: the biggest takes 10 s of one core."""
TEXT_S: Final = 20.0
"""Deadline of the statement that reads a scan's text of up to 32 MiB."""


async def fabrics(call: Call) -> Page:
    """Physical fabrics against declared names."""
    return await page(call.pool, call.cursors, "fabrics", call.query, None)


async def topology(call: Call) -> dict[str, Any]:
    """The map of a fabric and its ports as agents see them now."""
    asked = call.path["id"]
    fabric = await call.value("fabrics", None, 1, asked)
    if fabric is None:
        raise ApiError(404, f"there is no fabric {asked}: llmgwctl fabrics lists them")
    key = fabric["key"]
    ports = [dict(row) for row in await call.pool.fetch(queries("admin")["fabric_ports"], key)]
    managers = await call.value("fabric_managers", key)
    scan = await call.pool.fetchrow(queries("admin")["fabric_version"], key)
    built = None
    if scan is not None:
        known = await trio.to_thread.run_sync(answers.hosts, ports)
        built = await _map(call, key, scan["version"], known)
    found = await trio.to_thread.run_sync(answers.answer, fabric, ports, managers, built)
    return found | ({} if scan is None else {"map_age_seconds": scan["age_s"]})


async def _map(call: Call, key: str, version: str, known: dict[str, HostPort]) -> Built | None:
    async def text() -> tuple[str, str] | None:
        statement = queries("admin")["fabric_output"]
        row = await call.pool.fetchrow(statement, key, timeout_s=TEXT_S)
        return None if row is None else (row["output"], row["version"])

    return await call.maps.of(key, version, known, text)


async def scan(call: Call) -> Any:
    """Asks one node on the fabric to map it."""
    return await call.value("fabric_scan", call.actor, call.path["id"])
