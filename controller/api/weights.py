"""Downloads that nobody needs: listing is a read, removing a verb of its own.

The node's agent removes, and judges again by what it knows; the question waits in Postgres for its
next sync, as those for logs do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson
import trio

from controller.api.paging import Page, page
from sql import queries

if TYPE_CHECKING:
    from controller.api.call import Call

COLLECT_S: Final = 90.0
"""The slowest pace of an agent is 30 s, and removing a terabyte from a filer takes a while."""
POLL_S: Final = 0.2
WITHDRAW_S: Final = 2.0


async def orphans(call: Call) -> Page:
    """Downloads whose source is no model of the catalog and that no live shard uses."""
    return await page(call.pool, call.cursors, "weight_orphans", call.query, call.query.node)


async def collect(call: Call) -> dict[str, Any]:
    """Asks each node that holds some, waits, and answers per node what came free."""
    body = call.body
    asked = await call.value("weights_collect", call.actor, body.node, body.paths)
    answers: dict[int, dict[str, Any]] = {}
    numbers = [one["ask"] for one in asked if "ask" in one]
    try:
        with trio.move_on_after(COLLECT_S):
            await _answers(call, numbers, answers)
    finally:
        # An agent that comes back later must not remove what is needed by then.
        with trio.move_on_after(WITHDRAW_S) as bounded:
            bounded.shield = True
            await call.value("ask_withdraw", [n for n in numbers if n not in answers])
    nodes = [_node(one, answers.get(one.get("ask", 0))) for one in asked]
    return {"freed_bytes": sum(node["freed_bytes"] for node in nodes), "nodes": nodes}


async def _answers(call: Call, numbers: list[int], answers: dict[int, dict[str, Any]]) -> None:
    statement = queries("admin")["weights_collected"]
    while len(answers) < len(numbers):
        waiting = [number for number in numbers if number not in answers]
        for row in await call.pool.fetch(statement, waiting):
            answers[row["id"]] = orjson.loads(row["answer"])
        if len(answers) < len(numbers):
            await trio.sleep(POLL_S)


def _node(asked: dict[str, Any], answer: dict[str, Any] | None) -> dict[str, Any]:
    found = answer or {}
    freed = [{"path": f["path"], "bytes": int(f["bytes"])} for f in found.get("freed", ())]
    kept = [{"path": k["path"], "reason": k["reason"]} for k in found.get("kept", ())]
    node = {"node": asked["node"], "freed": freed, "kept": kept}
    node["freed_bytes"] = sum(one["bytes"] for one in freed)
    if "error" in asked:
        node["error"] = asked["error"]
    elif answer is None:
        node["error"] = (
            f"the agent of node {asked['node']} did not answer within {COLLECT_S:.0f} s and is no "
            "longer asked; what it removed before is missing in llmgwctl weights soon"
        )
    return node | ({"left": asked["left"]} if asked.get("left") else {})
