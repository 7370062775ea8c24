"""One replica as this router sees it: its connections, what runs there, and how healthy it is.

In flight is counted here and only here (`take`, then exactly one of `take_back` and `give_up`),
which is why it returns to zero (case A04).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog

from controller.router.breaker import BUSY, Breaker, Phase
from controller.router.clock import monotonic
from controller.router.engine_key import host_lines
from controller.router.scoring import drag, load, smoothed
from controller.router.signals import Signal
from controller.router.upstream import Cause, Failure, UpstreamConnection, begin_connecting

if TYPE_CHECKING:
    from controller.router.fleet import Fleet
    from controller.router.table import Replica
    from controller.router.upstream import Owner

log = structlog.get_logger(__name__)

Address = tuple[int, tuple[Any, ...]]  # family, socket address
NO_DEPTH: Final = 1 << 30
"""Depth of a replica that nobody bounds: never reached."""
MOST_DEPTH: Final = 1024  # deeper ones count as so deep when loads are compared
_UNREACHABLE: Final = frozenset((
    Cause.CONNECT_FAILED, Cause.CONNECT_TIMEOUT, Cause.CLOSED_UNANSWERED,
))  # fmt: skip


class Pool:
    """Connections to one replica: idle ones last in, first out."""

    __slots__ = (
        "_engine_key", "_fleet", "_idle", "_open", "address", "authority", "base", "breaker",
        "depth", "drag", "endpoint", "first_byte_s", "foreign", "gone", "host_lines", "id",
        "in_flight", "key", "last_used", "models", "ready", "signal", "since", "size", "sized",
        "weight",
    )  # fmt: skip

    def __init__(self, fleet: Fleet, replica: Replica, address: Address) -> None:
        self._fleet = fleet
        self.key = replica.key
        self.id = replica.id
        self.endpoint = replica.endpoint
        self.authority = replica.endpoint.authority
        self._engine_key = replica.engine_key
        self.host_lines = host_lines(self.authority, replica.engine_key)
        self.base = replica.endpoint.base
        self.address = address
        self.in_flight = 0
        self.depth = NO_DEPTH  # so many of ours at once; more wait in admission
        self.sized = False  # whether that tells how large it is
        self.size = NO_DEPTH  # how large it is taken to be among others, as a depth
        self.models: tuple[str, ...] = ()
        self.last_used: float | None = None  # monotonic end of the last request
        self.ready = replica.ready
        self.weight = replica.weight
        self.breaker = Breaker(fleet.config.breaker)
        self.signal = Signal()
        self.foreign = 0.0  # requests of others that it runs or has queued, as far as we know
        self.first_byte_s = 0.0  # moving average, 0 = unknown
        self.since = monotonic()  # its share grows from then on
        self.weigh(self.since)
        self.gone = False
        self._idle: dict[UpstreamConnection, None] = {}
        self._open: set[UpstreamConnection] = set()

    @property
    def place(self) -> str:
        """What the database calls it: its row, or what a static endpoint is, which may change."""
        if self.id is not None:
            return str(self.id)
        return f"{self.key}={(self.authority + self.base).decode()}"

    def is_of(self, replica: Replica, address: Address) -> bool:
        """Whether it is this replica's, where that is now."""
        return (
            self.key == replica.key
            and self.endpoint == replica.endpoint
            and self.address == address
        )

    def take(
        self, owner: Owner, request: bytes, total_due: float, *, fresh: bool, again: bool
    ) -> UpstreamConnection | None:
        """Send `request` on an idle or a new connection (`fresh`: on a new one in any case).

        `again`: the replica was given it before, so it is no probe. None when no socket could be
        had; `owner.on_failed` then follows in the next turn.
        """
        self.in_flight += 1
        if not self.breaker.closed and not again:
            self.breaker.sent(monotonic())
        if self._idle and not fresh:
            connection = self._idle.popitem()[0]
        else:
            try:
                sock = begin_connecting(self.address[1], self.address[0])
            except OSError:
                self._fleet.reactor.call_soon(partial(self._refused, owner))
                return None
            connection = self._fleet.connection(sock, self)
            self._open.add(connection)
        connection.start(owner, request, total_due)
        return connection

    def _refused(self, owner: Owner) -> None:
        self._leave()
        owner.on_failed(Failure(Cause.CONNECT_FAILED, reused=False))

    def take_back(self, connection: UpstreamConnection, *, reusable: bool) -> bool:
        """The answer is complete; whether the connection is kept for the next one."""
        self._leave()
        if (
            reusable
            and not self.gone
            and len(self._idle) < self._fleet.config.limits.idle_upstreams
        ):
            self._idle[connection] = None
            return True
        self._open.discard(connection)
        return False

    def give_up(self, connection: UpstreamConnection) -> None:
        """The answer will not be complete: the connection is spent."""
        self._leave()
        self._open.discard(connection)

    def answered(self, status: int) -> None:
        """An attempt's answer began with this status (of its first event, when that is an error).

        Told once per attempt, when the first of the body is there: what the replica's health is
        judged by, with `failed` and `busy`.
        """
        if status in BUSY:
            self.busy()
        elif status >= 500 or not self.breaker.spotless:
            now, before = monotonic(), self.breaker.phase
            self.breaker.answered(now, status)
            self._tell(before, f"status {status}")
            if before is Phase.HALF_OPEN and self.breaker.closed:
                self.since = now  # who waited for it must not come all at once (case C17)
                self.weigh(now)
                if self._fleet.room is not None:
                    self._fleet.room(self)

    def served(self) -> None:
        """An answer came to a good end, a moment ago."""
        if self.last_used is not None:
            self.breaker.good_at = self.last_used

    def useless(self, why: str) -> None:
        """It answered what no client can cause: that is as bad as no answer."""
        before = self.breaker.phase
        self.breaker.failed(monotonic())
        self._tell(before, why)

    def failed(self, cause: Cause) -> None:
        """An attempt failed here. Its whole time being over is the client's affair, not ours."""
        if cause is not Cause.TOTAL_TIMEOUT:
            before = self.breaker.phase
            self.breaker.failed(
                monotonic(),
                unreachable=cause in _UNREACHABLE,
                chance=self._fleet.random.random(),
            )
            self._tell(before, cause.value)

    def _tell(self, before: Phase, why: str) -> None:
        """One line when it trips and one when it is back; none for each probe in between."""
        phase = self.breaker.phase
        told = {"replica": self.key, "models": self.models}
        if phase is Phase.OPEN and before not in (Phase.OPEN, Phase.HALF_OPEN):
            pause_s, asked = self.breaker.pause_s, self.breaker.is_last_resort(monotonic())
            what = "fails some and is a last resort" if asked else "fails and gets probes only"
            log.warning(f"a replica {what}", **told, last=why, pause_s=pause_s)
        elif phase is Phase.CLOSED and before is Phase.HALF_OPEN:
            log.info("a replica that failed answers again", **told)

    def busy(self, retry_after_s: float | None = None) -> None:
        """It said that it has too much to do, and perhaps when to come back."""
        self.breaker.busy(monotonic(), retry_after_s or 0.0, self._fleet.random.random())

    def timed(self, first_byte_s: float) -> None:
        """An answer's first byte came so long after its request."""
        self.first_byte_s = smoothed(self.first_byte_s, first_byte_s)

    def weigh(self, now: float) -> None:
        """Take over what changed of its size, age and cache."""
        size = min(self.size, MOST_DEPTH)
        self.drag = drag(size, self.weight, self.signal.kv, now - self.since)

    def take_over(self, replica: Replica, now: float) -> None:
        """The table was read: the replica as it is there now."""
        if replica.ready and not self.ready:  # it came back, perhaps as another process
            self.since = now
            self.breaker.hurry()
            self.weigh(now)
        self.ready = replica.ready
        if replica.engine_key != self._engine_key:
            self._engine_key = replica.engine_key
            self.host_lines = host_lines(self.authority, replica.engine_key)
            self.breaker.hurry()  # it may be what was wrong
        depth = NO_DEPTH if replica.depth is None else max(1, replica.depth)
        self.depth, self.sized = depth, replica.sized
        if replica.weight != self.weight:
            self.weight = replica.weight
            self.weigh(now)

    def resize(self, size: int, now: float) -> None:
        """It is taken to be so large among others."""
        if size != self.size:
            self.size = size
            self.weigh(now)

    def as_json(self) -> dict[str, Any]:
        """What metrics and people want to know; unknown is absent."""
        known = self.signal.as_json()
        if self.first_byte_s:
            known["first_byte_s"] = self.first_byte_s
        return {
            "replica": self.key,
            "ready": self.ready,
            "in_flight": self.in_flight,
            "score": load(self),
            "breaker": self.breaker.shown(monotonic()).value,
            **known,
        }

    def forget(self, connection: UpstreamConnection) -> None:
        """An idle connection ended."""
        self._idle.pop(connection, None)
        self._open.discard(connection)

    def retire(self) -> None:
        """No new requests; idle connections close now, the others when they are done."""
        self.gone, self.ready = True, False
        for connection in self._idle:
            connection.close()
            self._open.discard(connection)
        self._idle.clear()

    def close(self) -> None:
        """Close everything (the process ends)."""
        self.retire()
        for connection in list(self._open):
            connection.close()
        self._open.clear()

    def _leave(self) -> None:
        self.in_flight -= 1
        self.last_used = monotonic()
        if self._fleet.room is not None:
            self._fleet.room(self)


class Target:
    """A model on one replica: what `choose` compares."""

    __slots__ = ("pool", "upstream_model")

    def __init__(self, pool: Pool, upstream_model: str) -> None:
        self.pool = pool
        self.upstream_model = upstream_model
