"""Handlers of the catalog: models, their scale, whole files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.api.paging import Page, page
from controller.catalog.apply import apply
from controller.catalog.definition import Catalog

if TYPE_CHECKING:
    from controller.api.call import Call


async def models(call: Call) -> Page:
    """The catalog with what runs of it."""
    return await page(call.pool, call.cursors, "models", call.query, None)


async def prices(call: Call) -> Page:
    """What models cost and cost before, of one model where asked."""
    return await page(call.pool, call.cursors, "prices", call.query, call.query.model)


async def add(call: Call) -> Any:
    """Adds a model, or changes the one of that name that the API declared."""
    catalog = Catalog(models=[call.body])
    changes = await apply(call.pool, catalog, call.actor, origin="api", prune=False)
    return {"added": call.body.name, "action": changes[-1].action}


async def remove(call: Call) -> Any:
    """Takes a model out; its replicas drain."""
    await call.value("model_remove", call.actor, call.path["name"])
    return {"removed": call.path["name"]}


async def scale(call: Call) -> Any:
    """Changes how many replicas a model has."""
    body = call.body
    now = await call.value(
        "scale", call.actor, call.path["name"], body.min, body.max, body.idle_timeout
    )
    return {field: value for field, value in now.items() if value is not None}


async def apply_catalog(call: Call) -> Any:
    """Applies a catalog file, or shows what it would change."""
    body, dry_run = call.body, call.query.dry_run
    catalog = Catalog(pools=body.pools, models=body.models)
    changes = await apply(
        call.pool, catalog, call.actor, origin="file", file=body.file, prune=True, dry_run=dry_run
    )
    rows = [{"action": c.action, "kind": c.kind, "name": c.name} for c in changes]
    return {"file": body.file, "dry_run": dry_run, "changes": rows}
