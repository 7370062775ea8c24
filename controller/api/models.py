"""Handlers of the catalog: models, their scale, whole files."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from controller.api.known import of_a_model
from controller.api.paging import Page, page
from controller.catalog.apply import apply
from controller.catalog.definition import Catalog

if TYPE_CHECKING:
    from controller.api.call import Call
    from controller.catalog.apply import Written
    from controller.catalog.difference import Difference


async def models(call: Call) -> Page:
    """The catalog with what runs of it."""
    return await page(call.pool, call.cursors, "models", call.query, None)


async def prices(call: Call) -> Page:
    """What models cost and cost before, of one model where asked."""
    found = await page(call.pool, call.cursors, "prices", call.query, call.query.model)
    return await of_a_model(call, found)


async def add(call: Call) -> Any:
    """Adds a model, or changes the one of that name that the API declared."""
    catalog = Catalog(models=[call.body])
    written = await apply(
        call.pool, catalog, call.actor, origin="api", prune=False, source=call.source
    )
    (change,) = _changes(written)
    del change["kind"]
    return {"added": change.pop("name"), **change, **_notes(written)}


async def remove(call: Call) -> Any:
    """Takes a model out; its replicas drain."""
    name = call.path["name"]
    await call.value("model_remove", call.actor, name)
    left = await call.value("model_replicas", name)
    return {"removed": name, **({"replicas": left} if left else {})}


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
    written = await apply(
        call.pool,
        catalog,
        call.actor,
        origin="file",
        file=body.file,
        prune=True,
        dry_run=dry_run,
        source=call.source,
    )
    done = {"file": body.file, "dry_run": dry_run, "changes": _changes(written)}
    return done | _notes(written)


def _changes(written: Written) -> list[dict[str, Any]]:
    """Without differences where there are none, and without values that are not set."""
    return [
        {"action": change.action, "kind": change.kind, "name": change.name}
        | ({"differences": [_set(d) for d in change.differences]} if change.differences else {})
        for change in written.changes
    ]


def _set(difference: Difference) -> dict[str, Any]:
    return {name: value for name, value in asdict(difference).items() if value is not None}


def _notes(written: Written) -> dict[str, Any]:
    return {"notes": written.notes} if written.notes else {}
