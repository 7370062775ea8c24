"""One request as handlers see it, and the row of the route table that leads to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from controller.api.statements import statements

if TYPE_CHECKING:
    from pydantic import BaseModel

    from controller.api.maps import Maps
    from controller.api.paging import Cursors
    from sql.pool import Pool

REQUEST_S = 20.0
"""Deadline of one request; every database call inside has its own, shorter one."""


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request: ``query`` and ``body`` are values of the route's forms."""

    pool: Pool
    cursors: Cursors
    maps: Maps
    actor: str
    path: Mapping[str, str]
    query: Any
    body: Any
    verb: str = "GET"
    source: str | None = None
    """The address of who asks, for the audit."""
    session: bytes | None = None
    """The hash of the session by which they ask."""

    async def value(self, name: str, *args: object) -> Any:
        """The one value that a statement answers; what it changes is noted with the source."""
        statement = statements()[name]
        if self.verb == "GET":
            return await self.pool.fetchval(statement, *args)
        async with self.pool.transaction() as connection:
            await connection.fetchval(statements()["source"], self.source)
            return await connection.fetchval(statement, *args)


Handler = Callable[[Call], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Route:
    """A verb and a path below /api/v1, what goes in and what comes out."""

    verb: str
    path: str
    handler: Handler
    answer: Any
    """The answer's pydantic model, a list of it, or None for text."""
    summary: str
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    deadline_s: float = REQUEST_S
