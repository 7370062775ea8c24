"""The agent's life: sync -> apply -> report, at the pace that the database gives.

Postgres away: what runs keeps running, the sync is tried again with backoff. Assignments of a
lower generation than the highest ever seen are ignored: they are a late or an old database's word.
Called by __main__ and by the fleet simulation.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

import structlog
import trio

from agent import __version__
from agent.logfile import Part, read_from, tail, trim
from agent.loops import Backoff, Loops
from agent.process import KILL_S
from sql.errors import DatabaseAway, DatabaseError, Unauthorized

if TYPE_CHECKING:
    from agent.door import Answer, Door
    from agent.facts import Facts
    from agent.state import StateDir
    from agent.weights_collect import Collector
    from agent.work import Work

GAP_S = 0.2
"""At most five syncs a second, however fast shards change."""
MAX_ASKS = 20
LAST_SYNC_S = 5.0
TRIM_S = 10.0
FACTS_S = 60.0
GATHER_S = 1.0
"""Errors of cards come in bursts: one look for all of a second."""
LOAD_S = 5.0
STALE_S = 120.0
log = structlog.get_logger()


class Agent:
    """One node's agent, without settings and signals."""

    def __init__(
        self,
        *,
        node: str,
        secret: str,
        enrolment_token: str | None,
        door: Door,
        state: StateDir,
        shards: Work,
        facts: Facts,
        engine_log_bytes: int,
        collector: Collector,
    ) -> None:
        self.boot = str(uuid.uuid4())
        self.loops = Loops(f"{node} {self.boot}")
        self._node, self._secret, self._token = node, secret, enrolment_token
        self._door, self._state, self._shards, self._facts = door, state, shards, facts
        self._engine_log_bytes = engine_log_bytes
        self._gen: int | None = None
        """Applied by this process. None at first: the whole list is wanted."""
        self._highest = state.highest_gen()
        self._backoff = Backoff(f"{node} {self.boot}")
        self._admitted = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._scanning: int | None = None
        """The question that a fabric scan is under way for: one at a time."""
        self._collector, self._collecting = collector, False
        self._leaving = False

    async def run(self) -> None:
        """Restore, then run every loop for ever."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._shards.restore(nursery)
            for name, loop in (
                ("sync", self._sync_loop),
                ("load", self._load_loop),
                ("facts", self._facts_loop),
                ("events", self._facts.probes.watch),
                ("logs", self._logs_loop),
            ):
                nursery.start_soon(self.loops.supervise, name, loop)

    async def shut_down(self, *, keep: bool) -> None:
        """Before the end: leave the engines running, or stop all and say so in a last sync."""
        if keep:
            log.info("agent ends; engines keep running")
            return
        log.info("agent ends; stopping all engines")
        self._leaving = True  # said with every sync from here on: nothing more is placed here
        await self._shards.suspend(self._shards.longest_grace_s + KILL_S + LAST_SYNC_S)
        with trio.move_on_after(LAST_SYNC_S):
            try:
                while await self.sync_once() is None:
                    continue
            except DatabaseError as error:
                log.warning("the last sync failed", error=str(error))

    async def _sync_loop(self) -> None:
        while True:
            begun = trio.current_time()
            self._shards.news.take()  # before the report: what changes from here on wakes again
            try:
                pause_s = await self.sync_once()
            except DatabaseError as error:
                await self._failed(error)
                continue
            self._backoff.reset()
            self.loops.succeeded("sync")
            self._admitted.set()
            with trio.move_on_after(0 if pause_s is None else pause_s):
                await self._shards.news.wait()
            await trio.sleep_until(begun + GAP_S)

    async def sync_once(self) -> float | None:
        """One round trip. Seconds until the next; None when there is more to say at once."""
        words = self._shards.report()
        report = {
            "boot": self.boot,
            "applied_gen": self._gen,
            # The database's clock judges; this one is only shown as skew.
            "clock": time.clock_gettime(time.CLOCK_REALTIME),
            "agent_version": __version__,
            "shards": words,
            "leaving": self._leaving,
            **self._facts.fast(),
        }
        answer = await self._door.sync(self._secret, self._gen, report)
        more = await self._shards.told(words)
        await self._take(answer)
        for ask in answer.asks[:MAX_ASKS]:
            await self._answer(ask)
        return None if more else max(0.0, answer.poll_ms / 1000)

    async def _take(self, answer: Answer) -> None:
        if answer.assignments is None:
            return
        if self._highest is not None and answer.gen < self._highest:
            log.error(
                "assignments ignored: their generation is lower than one seen before; if the "
                "database was restored from a backup, stop the agent, remove the file `gen` in "
                "its state directory and start it again",
                gen=answer.gen,
                highest=self._highest,
                state_dir=str(self._state.path),
            )
            return
        self._shards.apply(answer.assignments)
        if answer.gen != self._highest:
            self._highest = answer.gen
            await trio.to_thread.run_sync(self._state.save_gen, answer.gen)
        self._gen = answer.gen

    async def _failed(self, error: DatabaseError) -> None:
        """Postgres said no or nothing; wait, and enrol when the node is unknown there."""
        if isinstance(error, Unauthorized) and self._token is not None:
            try:
                await self._enroll()
                return
            except DatabaseError as refusal:
                error = refusal
        pause_s = self._backoff.next_s()
        what = "database away" if isinstance(error, DatabaseAway) else "sync refused"
        log.warning(what, error=str(error), again_in_s=round(pause_s, 1))
        await trio.sleep(pause_s)

    async def _enroll(self) -> None:
        assert self._token is not None
        await self._door.enroll(self._token, self._node, self._secret)
        log.info("enrolled")
        # Another database, or this one after a revocation: its generations start anew.
        self._gen = self._highest = None
        await trio.to_thread.run_sync(self._state.save_gen, None)
        self._shards.unknown_again()
        self._facts.forget()

    async def _answer(self, ask: dict[str, Any]) -> None:
        """Answer one question; a bad one costs only itself, and a scan runs beside the sync."""
        try:
            if ask.get("kind") == "scan":
                self._begin_scan(int(ask["id"]), str(ask["hca"]), int(ask["port"]))
                return
            if ask.get("kind") == "collect":
                self._begin_collect(int(ask["id"]), [str(path) for path in ask["paths"]])
                return
            part = await trio.to_thread.run_sync(self._log_part, ask)
            await self._door.report_log(self._secret, int(ask["id"]), part.text, part.offset)
        except (KeyError, TypeError, ValueError, OSError) as error:
            log.warning("a question was not answered", ask=str(ask)[:200], error=repr(error))

    def _begin_scan(self, ask: int, hca: str, port: int) -> None:
        """Start the scan, unless one is under way: it is asked for with every sync until told."""
        if self._scanning is None and self._nursery is not None:
            self._scanning = ask
            self._nursery.start_soon(self._scan, ask, hca, port)

    async def _scan(self, ask: int, hca: str, port: int) -> None:
        try:
            found = await self._facts.probes.scan_fabric(hca, port)
            log.info("fabric scanned", hca=hca, port=port, ms=found.took_ms, error=found.error)
            await self._door.report_scan(self._secret, ask, found)
        except DatabaseError as error:
            log.warning("fabric scan not reported", error=str(error))
        finally:
            self._scanning = None

    def _begin_collect(self, ask: int, paths: list[str]) -> None:
        """Start removing downloads, unless that is under way."""
        if not self._collecting and self._nursery is not None:
            self._collecting = True
            self._nursery.start_soon(self._collect, ask, paths)

    async def _collect(self, ask: int, paths: list[str]) -> None:
        try:
            answer = await self._collector.collect(ask, paths)
            await self._door.report_collect(self._secret, ask, answer)
            self._facts.probes.woken.set()
        except DatabaseError as error:
            log.warning("removed downloads not reported", error=str(error))
        finally:
            self._collecting = False

    def _log_part(self, ask: dict[str, Any]) -> Part:
        shard = ask.get("shard")
        path = self._state.agent_log if shard is None else self._state.log_of(int(shard))
        if ask.get("from_offset") is not None:
            return read_from(path, int(ask["from_offset"]))
        return tail(path, int(ask["lines"]))

    async def _load_loop(self) -> None:
        while True:
            await self._facts.refresh(self._shards.pids())
            self.loops.succeeded("load")
            await trio.sleep(LOAD_S)

    async def _facts_loop(self) -> None:
        await self._admitted.wait()
        while True:
            try:
                await self._facts.report(self._door, self._secret)
                self.loops.succeeded("facts")
                pause_s = FACTS_S
            except DatabaseError as error:
                log.warning("facts not reported", error=str(error))
                pause_s = LAST_SYNC_S
            with trio.move_on_after(pause_s):
                await self._facts.probes.woken.wait()
                await trio.sleep(GATHER_S)

    async def _logs_loop(self) -> None:
        while True:
            await trio.to_thread.run_sync(self._trim_logs)
            self.loops.succeeded("logs")
            stale = {n: round(age) for n, age in self.loops.ages().items() if age > STALE_S}
            if stale:
                log.warning("loops without success", seconds=stale)
            await trio.sleep(TRIM_S)

    def _trim_logs(self) -> None:
        for path in self._state.logs.glob("*.log"):
            trim(path, self._engine_log_bytes)
        self._state.remove_old_logs()
