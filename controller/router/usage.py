"""One row per client request, kept from its end until `report.py` has written it to Postgres.

A row is rendered once, to the bytes that Postgres gets, and kept in the spool (`spool.py`) where
there is one with room, else in memory: bounded, the oldest rows go and are counted.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import orjson

from controller.router.clock import monotonic
from controller.router.tokens import Tokens

if TYPE_CHECKING:
    from controller.router.spool import Spool
    from controller.router.stats import Stats

AT: Final = 1
"""Where in a rendered row its time is, in unix seconds."""


class UsageRow:
    """What is known of a finished request; None is unknown. No tuple, as `Tokens`."""

    __slots__ = (
        "at", "attempts", "degraded", "ended", "endpoint", "error_code", "http_status", "key_id",
        "model", "model_asked", "queue_s", "replica_id", "request_id", "row_id", "scopes",
        "status", "stream", "tokens", "total_s", "tried", "ttft_s", "upstream_id",
    )  # fmt: skip

    def __init__(
        self,
        row_id: str,
        key_id: str | None,
        model_asked: str | None,
        model: str | None,
        replica_id: int | None,
        endpoint: str,
        status: str,
        http_status: int,
        stream: bool,
        tokens: Tokens,
        ttft_s: float | None,
        total_s: float,
        attempts: int,
        error_code: str | None,
        request_id: bytes,
        ended: float,
        queue_s: float | None,
        at: float | None,
        degraded: bool = False,
        scopes: tuple[int | None, ...] = (None, None, None),
        upstream_id: str | None = None,
        tried: list[Any] | None = None,
    ) -> None:
        self.row_id = row_id  # a UUID in hex
        self.key_id = key_id  # None: refused before it was known; it is for the access log
        self.model_asked = model_asked
        self.model = model
        self.replica_id = replica_id
        self.endpoint = endpoint
        self.status = status  # ok, error, client_closed, partial
        self.http_status = http_status
        self.stream = stream
        self.tokens = tokens
        self.ttft_s = ttft_s
        self.total_s = total_s
        self.attempts = attempts
        self.error_code = error_code
        self.request_id = request_id
        self.ended = ended  # monotonic
        self.queue_s = queue_s
        self.at = at  # unix seconds of the database's clock; fixed, so a repeat is the same row
        self.degraded = degraded  # what was known could not all be kept
        self.scopes = scopes  # org, team and user when it began
        self.upstream_id = upstream_id  # what the engine called its answer
        self.tried = tried  # [replica, model, why, ms] of attempts that failed

    def as_values(self) -> tuple[Any, ...]:
        """The row as `usage_flush` takes it.

        Values without names: a dictionary costs six times as much.
        """
        tokens = self.tokens
        return (
            self.row_id, self.at, self.key_id, self.model_asked, self.model,
            self.replica_id, self.endpoint, self.status, self.http_status, self.error_code,
            self.stream, tokens.prompt, tokens.cached, tokens.completion, _ms(self.ttft_s),
            _ms(self.total_s), self.attempts, self.request_id.decode(), tokens.reasoning,
            tokens.estimated, _ms(self.queue_s), self.degraded, *self.scopes, self.upstream_id,
            self.tried,
        )  # fmt: skip

    def rendered(self) -> bytes | None:
        """The row in JSON that jsonb accepts; None when something of it can be no JSON."""
        try:
            data = orjson.dumps(self.as_values())
        except (TypeError, ValueError):
            return None
        return data if data.rfind(b"\\u0000") < 0 else data.replace(b"\\u0000", b"\\ufffd")

    def cleaned(self) -> UsageRow:
        """The same row of values that can be rendered, marked as degraded (case B20)."""
        return UsageRow(
            self.row_id, _clean(self.key_id), _clean(self.model_asked), _clean(self.model),
            _clean(self.replica_id), _clean(self.endpoint), _clean(self.status),
            _clean(self.http_status), self.stream, Tokens(*map(_clean, self.tokens.as_values())),
            self.ttft_s, self.total_s, _clean(self.attempts), _clean(self.error_code),
            _clean(self.request_id), self.ended, self.queue_s, self.at, True, self.scopes,
            _clean(self.upstream_id), None,
        )  # fmt: skip


def _ms(seconds: float | None) -> float | None:
    """In milliseconds, to the microsecond."""
    return seconds and int(seconds * 1e6 + 0.5) / 1000


def _clean(value: Any) -> Any:
    """The value, or None for one that is no JSON; text without halves of characters."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace").encode()
    if isinstance(value, int) and abs(value) >= 2**63:
        return None
    return None if isinstance(value, list) else value


class UsageLog:
    """Rows of finished requests, oldest first."""

    def __init__(self, limit: int, stats: Stats) -> None:
        self.undated: deque[UsageRow] = deque(maxlen=limit)
        """Rows that ended before the database's clock was known: all of them in static mode."""
        self.spool: Spool | None = None
        self._memory: deque[bytes] = deque(maxlen=limit)
        self._stats = stats
        self._taken = 0  # rows of the last batch that are in memory
        self._of_spool = False  # where the last batch is
        self.dropped = 0

    def __len__(self) -> int:
        return len(self.undated) + len(self._memory) + self.spooled

    @property
    def spooled(self) -> int:
        """Rows that survive this process."""
        return 0 if self.spool is None else len(self.spool)

    def add(self, row: UsageRow) -> None:
        if row.at is None:
            self.dropped += len(self.undated) == self.undated.maxlen
            self.undated.append(row)
            return
        record = row.rendered()
        if record is None:
            row = row.cleaned()
            record = row.rendered()
        if row.degraded:
            self._stats.usage_row("degraded")
        if record is None:
            self.dropped += 1
        elif self.spool is None:
            self._remember(record)
        elif not self.spool.append(record):
            self._stats.usage_row("unspooled")
            self._remember(record)

    def _remember(self, record: bytes) -> None:
        if len(self._memory) == self._memory.maxlen:
            self.dropped += 1
            self._taken = max(0, self._taken - 1)  # the one that goes may be under way
        self._memory.append(record)

    def date(self, clock_offset: float) -> None:
        """Give a time to rows that ended before the database's clock was known (in `ended`'s
        seconds plus `clock_offset`)."""
        while self.undated:
            row = self.undated.popleft()
            row.at = row.ended + clock_offset
            self.add(row)

    def oldest_age_s(self, clock_offset: float | None) -> float | None:
        """Of the oldest row that waits; the offset as in `date`."""
        now = monotonic()
        if self.undated:
            return now - self.undated[0].ended
        if clock_offset is None:
            return None
        spooled = None if self.spool is None else self.spool.oldest()
        first = [*islice(self._memory, 1), *([] if spooled is None else [spooled])]
        found = [orjson.loads(row)[AT] for row in first]
        return now + clock_offset - min(found) if found else None

    def spool_as_json(self) -> dict[str, Any]:
        """What is on disk; no numbers where there is no spool."""
        if self.spool is None:
            return {}
        return {
            "spool_rows": len(self.spool),
            "spool_bytes": self.spool.size,
            "spool_full": int(self.spool.trouble is not None),
        }

    def batch(self, limit: int) -> list[bytes]:
        """The oldest rows; they stay until `written` says that they are safe."""
        self._of_spool = not self._memory
        if self._of_spool:
            return [] if self.spool is None else self.spool.batch(limit)
        records = list(islice(self._memory, limit))
        self._taken = len(records)
        return records

    def written(self) -> None:
        """Forget the rows of the last batch: Postgres has them."""
        if self._of_spool:
            assert self.spool is not None
            self.spool.acknowledge()
        while self._taken:
            self._memory.popleft()
            self._taken -= 1
