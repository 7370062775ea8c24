"""The second duty: partitions ahead, old rows away, once a minute. Any controller may hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from sql import queries
from sql.errors import StaleTerm

if TYPE_CHECKING:
    from controller.loops import Loop
    from controller.reconcile.lease import Lease
    from sql.pool import Pool

EVERY_S = 60.0
ASK_S = 2.0
TIMEOUT_S = 60.0


async def run(pool: Pool, lease: Lease, loop: Loop) -> None:
    """Keep house for ever while the duty is ours. Raises sql.errors."""
    due_at = trio.current_time()
    while True:
        term = await lease.take()
        if term is not None and trio.current_time() >= due_at:
            try:
                await pool.fetchval(queries("control")["housekeep"], term, timeout_s=TIMEOUT_S)
            except StaleTerm as error:
                lease.step_down(str(error))
            due_at = trio.current_time() + EVERY_S
        loop.succeeded()
        await trio.sleep(ASK_S)
