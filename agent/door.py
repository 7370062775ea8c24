"""The agent's door to the rest of the world: the functions in schema `agent`, and nothing else.

`Door` is what the loop needs; `SqlDoor` goes through Postgres. Errors are those of sql.errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from sql import queries

if TYPE_CHECKING:
    from agent.probes.scan import Scan
    from sql.pool import Pool

SCAN_S = 60.0
"""A map of a big fabric is megabytes of text."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of agent.sync."""

    gen: int
    assignments: list[Any] | None
    """None when the agent's generation is current."""
    poll_ms: int
    asks: list[dict[str, Any]] = field(default_factory=list)


class Door(Protocol):
    """What an agent may say and ask."""

    async def enroll(self, token: str, node: str, secret: str) -> None:
        """Exchange an enrolment token for the right to use `secret`."""
        ...

    async def sync(self, secret: str, have_gen: int | None, report: dict[str, Any]) -> Answer:
        """Heartbeat, report and poll."""
        ...

    async def report(self, secret: str, kind: str, document: Any) -> None:
        """Slow facts; `kind` is host, gpus, ports, engines, disks, weights, checks or events."""
        ...

    async def report_log(self, secret: str, ask: int, text: str, offset: int) -> None:
        """Answer a question for a log."""
        ...

    async def report_scan(self, secret: str, ask: int, found: Scan) -> None:
        """Answer a question for the map of a fabric."""
        ...

    async def report_collect(self, secret: str, ask: int, answer: dict[str, Any]) -> None:
        """Answer a question to remove downloads."""
        ...


class SqlDoor:
    """The door through Postgres. Every call has the pool's deadline."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._sql = queries("agent")

    async def enroll(self, token: str, node: str, secret: str) -> None:
        """agent.enroll"""
        await self._pool.fetchval(self._sql["enroll"], token, node, secret)

    async def sync(self, secret: str, have_gen: int | None, report: dict[str, Any]) -> Answer:
        """agent.sync"""
        row = await self._pool.fetchrow(self._sql["sync"], secret, have_gen, report)
        assert row is not None, "agent.sync returns one row or raises"
        return Answer(row["gen"], row["assignments"], row["poll_ms"], row["asks"] or [])

    async def report(self, secret: str, kind: str, document: Any) -> None:
        """agent.report_host, _gpus, _ports, _engines, _disks, _weights, _checks, _events"""
        await self._pool.fetchval(self._sql[f"report_{kind}"], secret, document)

    async def report_log(self, secret: str, ask: int, text: str, offset: int) -> None:
        """agent.report_log"""
        await self._pool.fetchval(self._sql["report_log"], secret, ask, text, offset)

    async def report_scan(self, secret: str, ask: int, found: Scan) -> None:
        """agent.report_scan"""
        await self._pool.fetchval(
            self._sql["report_scan"], secret, ask, found.text, found.took_ms, found.error,
            timeout_s=SCAN_S,
        )  # fmt: skip

    async def report_collect(self, secret: str, ask: int, answer: dict[str, Any]) -> None:
        """agent.report_collect"""
        await self._pool.fetchval(self._sql["report_collect"], secret, ask, answer)
