"""Which replica holds a stored answer: chains of `/v1/responses` go back to it (case A29).

Known here for answers that passed through this process, in Postgres for all. An answer belongs to
the key that made it: for every other key it does not exist. Bounded: the oldest are forgotten
here, and then found in Postgres.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
import trio

from controller.router.clock import monotonic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.router.refresh import Pool

KEPT = 50_000
_FORM = r"resp_[A-Za-z0-9_.:-]{1,200}"
_ID = re.compile(rf'"id"\s*:\s*"({_FORM})"'.encode())
_NAME = re.compile(_FORM)
_SEARCHED_BYTES = 16_384
BATCH_ROWS = 1000
WITHIN_S = 2.0
"""Of the database, which may be there and say nothing: its client has waited long enough."""
COMPLAIN_S = 5.0
AGAIN_S = 0.3
"""An answer that another router has just begun may not be in Postgres yet."""


log = structlog.get_logger(__name__)


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
        self.news = trio.Event()

    def __len__(self) -> int:
        return len(self._owners)

    def note(self, identity: str, owner: Owner) -> None:
        """An answer begins: its chain may go on as soon as the client has seen the id."""
        if identity in self._owners:
            return  # the first word counts, as in Postgres
        self.learn(identity, owner)
        self._untold.append((identity, owner))
        self.news.set()

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


class StoredLog:
    """The same in Postgres, where every router finds it."""

    def __init__(self, stored: Stored, pool: Pool, queries: Mapping[str, str]) -> None:
        self._stored = stored
        self._pool = pool
        self._queries = queries
        self._silent_until = -1e9

    async def run(self) -> None:
        """Tell Postgres of each new answer at once; its errors end this call (it is supervised)."""
        while True:
            self._stored.news = trio.Event()
            while rows := self._stored.untold(BATCH_ROWS):
                await self._pool.fetchval(self._queries["responses_put"], rows)
                self._stored.told(rows)
            await self._stored.news.wait()

    async def find(self, identity: str) -> Owner | Missing | None:
        """Who holds an answer that this process does not know; None when nobody can say."""
        if _NAME.fullmatch(identity) is None:
            return Missing()  # none was ever noted, and Postgres takes no NUL
        try:
            owner = await self._look_up(identity)
            if owner is None:
                await trio.sleep(AGAIN_S)
                owner = await self._look_up(identity)
        except Exception as error:  # mostly the database is away; whatever it is, nobody waits on
            self._complain(error)
            return None
        return owner or Missing()

    async def _look_up(self, identity: str) -> Owner | None:
        with trio.fail_after(WITHIN_S):
            rows = await self._pool.fetch(self._queries["response_owner"], identity)
        if not rows:
            return None
        owner = Owner(rows[0]["replica"], rows[0]["key_id"])
        self._stored.learn(identity, owner)
        return owner

    def _complain(self, error: Exception) -> None:
        """A line now and then: with Postgres away every chain that began elsewhere fails."""
        now = monotonic()
        if now >= self._silent_until:
            self._silent_until = now + COMPLAIN_S
            log.warning("previous responses cannot be looked up", error=repr(error))


class Missing:
    """Nobody holds it."""


def previous(document: dict[str, Any]) -> str | None:
    """The answer that a request goes on from; None when it begins anew."""
    found = document.get("previous_response_id")
    return found if isinstance(found, str) and found else None
