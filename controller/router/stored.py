"""Which replica holds a stored answer: chains of `/v1/responses` go back to it (case A29).

Known here for answers that passed through this process, in Postgres for all. An answer belongs to
the key that made it: for every other key it does not exist. Bounded: the oldest are forgotten
here, and then found in Postgres.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from itertools import islice
from typing import NamedTuple

KEPT = 50_000
_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_.:-]{1,200})"')
_SEARCHED_BYTES = 16_384


class Owner(NamedTuple):
    """Who holds an answer (the key of its replica's pool), and whose it is."""

    replica: str
    key_id: str


def response_id(beginning: bytes) -> str | None:
    """The id in the first bytes of an answer, plain or streamed; None when there is none."""
    found = _ID.search(beginning, 0, _SEARCHED_BYTES)
    return None if found is None else found[1].decode()


class Stored:
    """Answers by id, and those that Postgres has not been told of yet."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._owners: OrderedDict[str, Owner] = OrderedDict()
        self._untold: deque[tuple[str, Owner]] = deque(maxlen=kept)

    def __len__(self) -> int:
        return len(self._owners)

    def note(self, identity: str, owner: Owner) -> None:
        """An answer begins: its chain may go on as soon as the client has seen the id."""
        if identity in self._owners:
            return  # the first word counts, as in Postgres
        self.learn(identity, owner)
        self._untold.append((identity, owner))

    def learn(self, identity: str, owner: Owner) -> None:
        """What Postgres said of an answer."""
        self._owners[identity] = owner
        if len(self._owners) > self._kept:
            self._owners.popitem(last=False)

    def owner(self, identity: str) -> Owner | None:
        """None: this process does not know it."""
        return self._owners.get(identity)

    def untold(self, limit: int) -> list[dict[str, str]]:
        """Rows that Postgres should have; they stay until `told`."""
        return [{"id": name, **owner._asdict()} for name, owner in islice(self._untold, limit)]

    def told(self, rows: list[dict[str, str]]) -> None:
        """Postgres has these."""
        safe = {row["id"] for row in rows}
        while self._untold and self._untold[0][0] in safe:
            self._untold.popleft()
