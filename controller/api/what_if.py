"""Handlers that ask the planner without letting it do anything: what-if, and points of nodes."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from controller.api.errors import ApiError
from controller.catalog.checks import Known, check
from controller.catalog.definition import Catalog
from controller.catalog.faults import nearest
from controller.reconcile import catalog_rows, snapshot
from controller.reconcile.added import AddNodes
from controller.reconcile.rows import Notes
from controller.reconcile.what_if import Change, NotThere, what_if
from sql import queries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.api.call import Call
    from controller.catalog.definition import Model as Definition
    from controller.placement.model import Model, Settings

THINK_S: Final = 20.0
"""After this long the answer says how far it came."""
DEADLINE_S: Final = 60.0
_ONE: Final = trio.CapacityLimiter(1)
"""One at a time: it takes a core, which the tick and other requests need too."""


async def ask(call: Call) -> Any:
    """What would move, fit and not fit."""
    body = call.body
    models = await _models(call, body.models) if body.models else None
    seen = await snapshot.read(call.pool)
    seed = body.seed
    if seed is None:
        seed = await call.pool.fetchval(queries("placement")["term"]) or 0
    known = () if models is None else models(seen.snapshot.settings)
    added = [AddNodes(n.count, n.gpus, n.class_, n.memory) for n in body.add_nodes]
    drained = list(dict.fromkeys(body.drain_nodes))
    removed = list(dict.fromkeys(body.remove_nodes))
    change = Change(added, removed, drained, body.scale, known)
    until = time.monotonic() + THINK_S
    think = partial(
        what_if, seen.snapshot, change, seen.now, seed, enough=lambda: time.monotonic() > until
    )
    try:
        found: dict[str, Any] = await trio.to_thread.run_sync(
            think, abandon_on_cancel=True, limiter=_ONE
        )
    except NotThere as error:
        right = nearest(error.name, error.known, error.kind)
        raise ApiError(404, f"{error}: {right}") from None
    found["notes"] = [*seen.notes, *found["notes"]]
    return found


async def _models(call: Call, definitions: Sequence[Definition]) -> Any:
    """How to make the planner's models of these definitions. Raises CatalogError."""
    catalog = Catalog(models=list(definitions))
    there = await call.pool.fetchval(queries("catalog")["known"])
    names = {model.name for model in definitions}
    kept = [row for row in there["models"] if row["name"] not in names]
    known = Known(
        models=frozenset(row["name"] for row in kept),
        aliases={alias: row["name"] for row in kept for alias in row["aliases"]},
        pools=frozenset(row["name"] for row in there["pools"]),
    )
    check(catalog, known)
    texts = queries("placement")
    rows = await call.pool.fetch(texts["pool_labels"])
    labels = {row["name"]: row["labels"] for row in rows}
    sources = sorted({model.source for model in definitions})
    facts = await call.pool.fetch(texts["facts_of"], sources)
    return partial(_planned, definitions, labels, facts)


def _planned(
    definitions: Sequence[Definition],
    labels: dict[str, Any],
    facts: Sequence[Any],
    settings: Settings,
) -> tuple[Model, ...]:
    """The same as the snapshot makes of what is in the catalog."""
    documents = [definition.document() for definition in definitions]
    profiles = [
        profile | {"model": document["name"], "pool_labels": labels.get(profile["pool"])}
        for document in documents for profile in document["profiles"]
    ]  # fmt: skip
    tables = {"facts": facts, "models": documents, "profiles": profiles}
    notes = Notes()
    made = catalog_rows.models(tables, {"start_deadline": settings.start_deadline_s}, notes)
    assert not notes, notes
    return tuple(made)
