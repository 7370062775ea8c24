"""Brings keys from Postgres into memory: those used last at start, those asked for, what changed.

A key that is not in memory is asked for once, however many requests wait for it, and many keys in
one statement. Refresh: each change of a key notes its transaction, and every transaction that was
not over when one refresh read is looked at by the next. Look-ups and refreshes take turns, so that
no answer from before a change comes into memory after it. The first refresh comes before the first
look-up: until then nobody knows what bounds a key, and its rows are not safe.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import structlog
import trio

from controller.router.clock import monotonic
from controller.router.errors import AUTH_UNAVAILABLE, BAD_KEY, ApiError
from controller.router.key_rows import KeyRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from controller.router.core import Core
    from controller.router.refresh import Pool

    Answered = Callable[[ApiError | None], None]

LOOKUP_S = 2.0
MOST_ASKED = 2000  # hashes; more are refused
FIRST_KEYS = 20_000
MOST_CHANGED = 20_000  # in one refresh; beyond, all that are here are read again
BATCH = 1000
USED_EVERY_S = 60.0
COMPLAIN_S = 5.0

log = structlog.get_logger(__name__)


class KeyReader:
    """One per process with a database."""

    def __init__(self, core: Core, pool: Pool, queries: Mapping[str, str]) -> None:
        self._core = core
        self._keys = core.keys
        self._pool = pool
        self._queries = queries
        self._rows = KeyRows()
        self._asked: dict[bytes, list[Answered]] = {}
        self._news = trio.Event()
        self._one_at_a_time = trio.Lock()
        self._begun = trio.Event()  # what must be known before a key may be used is known
        self._silent_until = 0.0
        self._mark: int | None = None  # transactions from here on are looked at by the next refresh

    # -- asked for -------------------------------------------------------------------------------

    def ask(self, digest: bytes, then: Answered) -> None:
        """Look a hash up; `then` is called in a turn of the reactor: None = find it again now."""
        waiting = self._asked.get(digest)
        if waiting is not None:
            waiting.append(then)
        elif len(self._asked) >= MOST_ASKED:
            self._core.stats.add("key_lookups_refused")
            self._core.reactor.call_soon(partial(then, AUTH_UNAVAILABLE))
        else:
            self._asked[digest] = [then]
            self._news.set()

    async def run(self) -> None:
        """Answer for ever; the database's errors are answers too."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            while self._asked:
                await self._look_up(list(islice(self._asked, BATCH)))

    async def _look_up(self, digests: list[bytes]) -> None:
        self._core.stats.add("key_lookups", len(digests))
        try:
            with trio.fail_after(LOOKUP_S):
                await self._begun.wait()
                async with self._one_at_a_time:
                    found = self._learn(
                        await self._pool.fetch(self._queries["keys_by_hash"], digests)
                    )
        except Exception as error:  # mostly the database is away; whatever it is, nobody waits on
            self._core.stats.add("key_lookups_failed", len(self._asked))
            self._complain(error)
            self._answer(list(self._asked), AUTH_UNAVAILABLE)  # who came meanwhile waits no longer
            return
        unknown = [digest for digest in digests if digest not in found]
        self._keys.cache.learn_unknown(unknown, monotonic())
        self._answer(found, None)
        self._answer(unknown, BAD_KEY)

    def _complain(self, error: Exception) -> None:
        """A line now and then: with Postgres away every key that is not here fails, in no time."""
        now = monotonic()
        if now >= self._silent_until:
            self._silent_until = now + COMPLAIN_S
            log.warning("keys cannot be looked up", error=repr(error), hashes=len(self._asked))

    def _answer(self, digests: Iterable[bytes], error: ApiError | None) -> None:
        for digest in digests:
            for then in self._asked.pop(digest, ()):
                self._core.reactor.call_soon(partial(then, error))

    # -- what changed ----------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Make the keys in memory equal to the database's. Raises sql.errors."""
        began = monotonic()
        if self._mark is None:
            mark, _ = await self._changed(0, 0)
            rows = await self._pool.fetch(self._queries["keys_first"], FIRST_KEYS)
            wanted = [row["id"] for row in rows]
            wanted.reverse()  # the last one learnt counts as the latest used
        else:
            async with self._one_at_a_time:  # a look-up's answer is here before, or knows it all
                mark, changed = await self._changed(self._mark, MOST_CHANGED + 1)
                wanted = self._concerned(changed, from_anew=mark < self._mark)
        for start in range(0, len(wanted), BATCH):
            await self._read_again(wanted[start : start + BATCH])
        self._mark = mark
        self._keys.read_at = began
        self._begun.set()

    async def _changed(self, mark: int, most: int) -> tuple[int, list[str]]:
        """From which transaction to ask next time, and keys changed by those from `mark` on."""
        args = str(mark), most
        [row] = await self._pool.fetch(self._queries["keys_changed"], *args)
        return int(row["mark"]), row["ids"]

    def _concerned(self, changed: list[str], *, from_anew: bool) -> list[str]:
        """Those of the changed keys that matter here; `from_anew`: after a restore transactions
        count from anew, and nothing is known."""
        cache = self._keys.cache
        if from_anew or len(changed) > MOST_CHANGED:
            return cache.ids
        running = self._core.running_keys()
        return [identity for identity in changed if identity in cache or identity in running]

    async def _read_again(self, ids: list[str]) -> None:
        async with self._one_at_a_time:
            rows = await self._pool.fetch(self._queries["keys_by_id"], ids)
            self._learn(rows)
            gone = set(ids).difference(row["id"] for row in rows)
            for identity in gone:
                self._keys.cache.drop(identity)
        if gone:
            self._core.keys_ended(gone)

    def _learn(self, rows: Iterable[Mapping[str, Any]]) -> set[bytes]:
        """Put keys of rows in force; the hashes of all their secrets."""
        found: set[bytes] = set()
        for row in rows:
            secrets = self._rows.secrets_of(row)
            self._keys.cache.learn(row["id"], secrets)
            found.update(secrets)
        return found

    # -- what was used ---------------------------------------------------------------------------

    async def tell_use(self) -> None:
        """Tell once a minute for ever which keys were used; its errors end this call."""
        while True:
            await trio.sleep(USED_EVERY_S)
            await self.tell_used()

    async def tell_used(self) -> None:
        """Tell Postgres which keys were used. What it did not take is told the next time: of a key
        that is used once a day nobody would know. Raises sql.errors."""
        used = self._keys.cache.take_used()
        try:
            while used:
                await self._pool.fetchval(self._queries["keys_used"], used[:BATCH])
                del used[:BATCH]
        finally:
            self._keys.cache.note_used(used)
