"""/healthz says that the process turns; /readyz says what keeps it from its work, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from sql.errors import DatabaseError

if TYPE_CHECKING:
    from controller.context import ControlContext
    from sql.pool import Pool

DATABASE_S = 2.0
SILENT_S = 10.0


async def reasons(context: ControlContext) -> list[str]:
    """Why this process is not ready; empty when it is. Takes at most DATABASE_S."""
    if context.pool is None:
        return list(context.loops.troubles())
    away = await _database_trouble(context.pool)
    found = [] if away is None else [away]
    if context.schema != "ok":
        found.append(context.schema)
    state = context.listening
    if not state.connected:
        found.append(f"not listening for changes: {state.error or 'not connected yet'}")
    elif state.heard_at is not None and trio.current_time() - state.heard_at > SILENT_S:
        found.append("the channel for changes is silent; polling goes on")
    found.extend(context.loops.troubles())
    return found


async def _database_trouble(pool: Pool) -> str | None:
    try:
        with trio.fail_after(DATABASE_S):
            await pool.fetchval("select 1")
    except (DatabaseError, trio.TooSlowError) as error:
        return f"the database is away: {str(error) or 'no answer in time'}"
    return None
