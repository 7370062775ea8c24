"""Handlers of what runs and why: replicas, explanations, decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.api import scores
from controller.api.bodies import BIGGEST
from controller.api.errors import ApiError
from controller.api.known import of_a_model, unknown_model
from controller.api.paging import Page, PageQuery, page
from sql import queries

if TYPE_CHECKING:
    from controller.api.call import Call


async def replicas(call: Call) -> Page:
    """Replicas that are not gone."""
    found = await page(call.pool, call.cursors, "replicas", call.query, call.query.model, None)
    return await of_a_model(call, found)


async def replica(call: Call) -> Any:
    """One replica."""
    number = _number(call.path["id"])
    found = await page(call.pool, call.cursors, "replicas", PageQuery(), None, number)
    if not found:
        raise ApiError(
            404,
            f"there is no replica {number}, or it is gone: llmgwctl replicas lists those there "
            "are, llmgwctl decisions tells what became of others",
        )
    return found[0]


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= BIGGEST):
        raise ApiError(400, f"{text!r} is no replica id: these are numbers, see llmgwctl replicas")
    return int(text)


async def replace(call: Call) -> Any:
    """Another replica in this one's stead."""
    body, number = call.body, _number(call.path["id"])
    return await call.value("replace", call.actor, None, number, body.force, False, body.cancel)


async def replace_all(call: Call) -> Any:
    """A rolling restart of a model's replicas."""
    body, name = call.body, call.path["name"]
    return await call.value("replace", call.actor, name, None, body.force, body.stale, body.cancel)


async def explain(call: Call) -> Any:
    """The latest attempt to place a model."""
    found = await call.value("explain_placement", call.query.model)
    if found is None:
        name = call.query.model
        added = ApiError(404, f"model {name} was added this moment: ask again")
        raise await unknown_model(call, name) or added
    if call.query.scores:
        found["scores"] = [*await _chosen(call), *await scores.now(call.pool, call.query.model)]
    return found


async def _chosen(call: Call) -> list[Any]:
    """What decisions kept of the choice for each live replica."""
    rows = await call.pool.fetch(queries("placement")["chosen_scores"], call.query.model)
    return [row["row"] for row in rows]


async def decisions(call: Call) -> Page:
    """What was decided, newest first."""
    query = call.query
    found = await page(
        call.pool, call.cursors, "decisions", query, query.model, query.node, query.since
    )
    return await of_a_model(call, found)
