"""Log tails: the question waits in Postgres for the node's next sync, the answer is polled.

Agents listen on nothing, so a first answer takes as long as the agent's pace; with a question open
it comes every quarter of a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson
import trio
from quart import Response

from controller.api.errors import ApiError, translate
from sql import queries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from controller.api.call import Call

ANSWER_S: Final = 35.0
"""The slowest pace that the database gives an agent is 30 s."""
POLL_S: Final = 0.1
FOLLOW_POLL_S: Final = 0.5
FOLLOW_S: Final = 3600.0
_SILENT: Final = ("unreachable", "lost")


async def logs(call: Call) -> Response:
    """The tail as text, or server-sent events when followed."""
    node, shard, lines = call.path["id"], call.query.shard, call.query.lines
    await _reachable(call, node, shard)
    text, offset = await _ask(call, node, shard, lines, None)
    if call.query.follow:
        events = _follow(call, node, shard, text, offset)
        answer = Response(events, content_type="text/event-stream; charset=utf-8")
        answer.timeout = None  # FOLLOW_S bounds it
        return answer
    return Response(text, content_type="text/plain; charset=utf-8")


async def _reachable(call: Call, node: str, shard: int | None) -> None:
    row = await call.pool.fetchrow(queries("admin")["log_target"], node, shard)
    if row is None:
        raise ApiError(404, f"there is no node {node}: llmgwctl nodes lists them")
    if not row["has_shard"]:
        raise ApiError(404, f"node {node} has no shard {shard}: llmgwctl --json replicas has ids")
    if row["state"] in _SILENT:
        raise ApiError(
            409,
            f"node {node} is {row['state']} ({row['state_reason']}), so its agent cannot be asked: "
            "the logs are on the node, below the agent's state directory",
        )


async def _ask(
    call: Call, node: str, shard: int | None, lines: int, offset: int | None
) -> tuple[str, int]:
    """Asks and waits; answers text and where the next part begins."""
    number = await call.value("log_ask", node, shard, lines, offset)
    with trio.move_on_after(ANSWER_S):
        while True:
            row = await call.pool.fetchrow(queries("admin")["log_answer"], number)
            if row is None or row["answered"]:
                break
            await trio.sleep(POLL_S)
        if row is not None:
            return row["answer"] or "", row["answer_offset"] or 0
    raise ApiError(
        504,
        f"the agent of node {node} did not answer within {ANSWER_S:.0f} s: "
        f"llmgwctl node {node} shows when it was last seen",
    )


def _event(document: dict[str, Any], name: str | None = None) -> bytes:
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(document) + b"\n\n"


async def _follow(
    call: Call, node: str, shard: int | None, text: str, offset: int
) -> AsyncIterator[bytes]:
    ends = trio.current_time() + FOLLOW_S
    yield _event({"text": text, "offset": offset})
    while trio.current_time() < ends:
        await trio.sleep(FOLLOW_POLL_S)
        try:
            text, offset = await _ask(call, node, shard, 10_000, offset)
        except Exception as error:
            known = translate(error)
            if known is None:
                raise
            yield _event({"error": known.message}, "error")
            return
        # A comment keeps clients and proxies from taking a quiet log for a dead connection.
        yield _event({"text": text, "offset": offset}) if text else b": quiet\n\n"
    yield _event({"error": "followed for an hour: ask again to go on"}, "error")
