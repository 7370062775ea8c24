"""What is kept of a request that is over: counters, one usage row, one line. Once for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from controller.router.answer_id import answer_id
from controller.router.clock import monotonic
from controller.router.relay import StreamRelay
from controller.router.routes import Kind
from controller.router.usage import UsageRow

if TYPE_CHECKING:
    from controller.router.core import Core
    from controller.router.exchange import Exchange
    from controller.router.stats import ModelStats
    from controller.router.tokens import Tokens


NO_SCOPES: Final = (None, None, None)

log = structlog.get_logger(__name__)


class Ending:
    """How it ended."""

    __slots__ = ("code", "http_status", "outcome", "tokens")

    def __init__(self, outcome: str, http_status: int, code: str | None, tokens: Tokens) -> None:
        self.outcome = outcome  # ok, error, client_closed, partial
        self.http_status = http_status  # what the client saw; 499: it left before the end
        self.code = code
        self.tokens = tokens


def record(core: Core, exchange: Exchange, ending: Ending) -> None:
    """Count it, and note its row when it was for an engine and had a key.

    The line of the access log waits at the client for the bytes of the answer.
    """
    route, now = exchange.route, monotonic()
    seconds, first_s = now - exchange.started, _first_token_s(exchange, ending)
    stats = exchange.stats
    if stats is None:
        stats = core.stats.model("")
    else:
        attempts = exchange.attempts
        serving = stats
        if attempts is not None and attempts.serving != attempts.model:
            serving = core.stats.model(attempts.serving)  # it ran there (`move_in_flight`)
        serving.in_flight -= 1
        serving.count_tokens(ending.tokens)  # as its row does
        if first_s is not None:
            stats.ttft.observe(first_s)
            _observe_pace(exchange, ending, serving, seconds - first_s)
    name = "other" if route is None else route.name
    stats.settle(name, ending.http_status, ending.outcome, seconds)
    counts = exchange.key is not None and route is not None and route.kind is Kind.INFER
    told = core.access_lines is not None and core.access_lines.wants(ending.outcome)
    if not counts and not told:
        return
    try:
        row = _row(core, exchange, ending, now, first_s)
    except Exception:  # a bug of ours must not lose the row (case B20)
        log.exception("a usage row was not built as it should be", row=exchange.row_id)
        row = _least(core, exchange, ending, now)
    if counts:
        core.tenancy.rows += 1
        core.usage.add(row)
    if told:
        client = exchange.client
        target = None if exchange.attempts is None else exchange.attempts.target
        replica = None if target is None else target.pool.key
        request = exchange.request
        client.noted = (row, replica, client.address, len(request.body) or request.came)


def _first_token_s(exchange: Exchange, ending: Ending) -> float | None:
    """None: it does not stream, or what came first was an error, which is no token."""
    first, asked = exchange.delivery.first_byte, exchange.asked
    if first is None or asked is None or not asked.stream or ending.outcome == "error":
        return None
    return first - exchange.started


def _observe_pace(exchange: Exchange, ending: Ending, serving: ModelStats, seconds: float) -> None:
    """Count the mean time between a stream's tokens, `seconds` from its first to its end.

    A clock and a histogram per token would be a tenth of what relaying one costs. A stream that
    broke ends with a wait for something else, and an answer in one piece has no pace.
    """
    tokens = ending.tokens.completion
    whole = ending.outcome == "ok" and isinstance(exchange.delivery.relay, StreamRelay)
    if whole and tokens is not None and tokens > 1:
        serving.itl.observe(seconds / (tokens - 1))


def _row(
    core: Core, exchange: Exchange, ending: Ending, now: float, first_s: float | None
) -> UsageRow:
    """What is unknown is None."""
    asked, attempts, key = exchange.asked, exchange.attempts, exchange.key
    target = None if attempts is None else attempts.target
    return UsageRow(
        exchange.row_id,
        None if key is None else key.id,
        None if asked is None else asked.model[:256],
        None if attempts is None else attempts.serving,
        None if target is None else target.pool.id,
        "other" if exchange.route is None else exchange.route.name,
        ending.outcome,
        ending.http_status,
        asked is not None and asked.stream,
        ending.tokens,
        first_s,
        now - exchange.started,
        0 if attempts is None else attempts.count,
        ending.code,
        exchange.request_id,
        now,
        None if attempts is None else attempts.queued_s,
        core.keys.database_time(now),
        False,
        NO_SCOPES if key is None else (key.org, key.team, key.user),
        answer_id(exchange.delivery.beginning),
        None if attempts is None else attempts.failed,
    )


def _least(core: Core, exchange: Exchange, ending: Ending, now: float) -> UsageRow:
    """What cannot fail: whose it is and what it used."""
    return UsageRow(
        exchange.row_id, None if exchange.key is None else exchange.key.id, None, None, None,
        "other" if exchange.route is None else exchange.route.name, ending.outcome,
        ending.http_status, False, ending.tokens, None, now - exchange.started, 0, ending.code,
        b"", now, None, core.keys.database_time(now), True,
    )  # fmt: skip
