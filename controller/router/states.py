"""Where a request is, and where it may go from there: the table, and nothing else.

CHECKING   route, key, model: all within one callback
INFLATING  a compressed body is in a worker thread
RESERVING  Postgres is asked whether budgets and limits have something left for this request
LOOKING_UP Postgres is asked who holds the answer that this request goes on from
WAITING    for a replica or for an engine; the client has seen nothing of an engine's answer, so
           another attempt may follow (a stream may have had our own head and comments)
RELAYING   bytes of an engine's answer went out: what goes wrong now is told, never repeated
SETTLED    over: one usage row, counted once
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class State(IntEnum):
    """Integers: they are looked up on every move."""

    CHECKING = 0
    INFLATING = 1
    RESERVING = 2
    LOOKING_UP = 3
    WAITING = 4
    RELAYING = 5
    SETTLED = 6


MOVES: Final = {
    State.CHECKING: frozenset(
        (State.INFLATING, State.RESERVING, State.LOOKING_UP, State.WAITING, State.SETTLED)
    ),
    State.INFLATING: frozenset((State.RESERVING, State.LOOKING_UP, State.WAITING, State.SETTLED)),
    State.RESERVING: frozenset((State.LOOKING_UP, State.WAITING, State.SETTLED)),
    State.LOOKING_UP: frozenset((State.WAITING, State.SETTLED)),
    State.WAITING: frozenset((State.RELAYING, State.SETTLED)),
    State.RELAYING: frozenset((State.SETTLED,)),
    State.SETTLED: frozenset[State](),
}
