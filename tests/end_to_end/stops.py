"""Sees stop decisions in the moment in which routers hear of them, and races requests with them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Collection

    from tests.conftest import Database

PATIENCE_S = 60.0
STOPS = ("draining", "stopping")
"""The second cannot be taken back."""

MOVES = """select id, model, replica, detail->>'to_state' from llmgw.decisions
    where id > %s and kind = 'move' order by id"""


class Move(NamedTuple):
    """One decision."""

    id: int
    replica: int
    to_state: str


class Stops:
    """Listens as routers do and reads the decisions on each hint, for a `with` block's length."""

    def __init__(self, database: Database) -> None:
        self._listening = database.connect()
        self._listening.execute("listen llmgw")
        self._reading = database.connect()
        self._moves: dict[str, list[Move]] = defaultdict(list)
        self._more = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join(PATIENCE_S)
        self._listening.close()
        self._reading.close()

    def next(self, model: str, after: int, states: Collection[str]) -> int:
        """Waits for a stop of the model's newest replica, decided after that decision; its id."""
        end = time.monotonic() + PATIENCE_S
        with self._more:
            while (found := self._find(model, after, states)) is None:
                left = end - time.monotonic()
                assert left > 0, f"no stop of {model} in {PATIENCE_S} s: {self._moves[model][-5:]}"
                self._more.wait(left)
        return found.id

    def _find(self, model: str, after: int, states: Collection[str]) -> Move | None:
        moves = self._moves[model]
        newest = max((move.replica for move in moves), default=0)
        new = (m for m in moves if m.id > after and m.replica == newest and m.to_state in states)
        return next(new, None)

    def _listen(self) -> None:
        seen = 0
        while not self._over:
            found = self._reading.execute(MOVES, (seen,)).fetchall()
            with self._more:
                for seen, model, replica, to_state in found:
                    self._moves[model].append(Move(seen, replica, to_state))
                self._more.notify_all()
            for _ in self._listening.notifies(timeout=0.5, stop_after=1):
                pass
