"""One shard on this node: fetch, start, watch, stop. One task each, so no shard can stop another.

The engine runs in a session of its own and lives on when this agent dies; the next agent adopts it
by pid, start time and boot. Whatever ends a shard, its whole tree is gone before `stopped` or
`failed` is said: at that word the database gives cards and port to others. Called by shards.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import structlog
import trio

from agent import procfs
from agent.engines import ENGINES, CannotLaunch, Place, devices, engine_of, hint
from agent.http_get import NoAnswer, get
from agent.logfile import TAIL_BYTES, tail
from agent.process import Identity, Mark, alive, end_tree, ended, exit_code, spawn, tree
from agent.progress import Progress
from agent.provision import NoEngine
from agent.readiness import TIMEOUT_S, Check, foreign_listener, not_ready_because
from agent.weights import NoWeights
from agent.work import News
from sql.states import SHARD_FINAL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from agent.assignment import Assignment
    from agent.state import Record, StateDir
    from agent.weights import Weights

    Provisioner = Callable[[Assignment, Callable[[dict[str, Any]], None]], Awaitable[Path | None]]

HEALTH_S = 5.0
FIRST_CHECK_S = 0.05
SLOWEST_CHECK_S = 1.0
MISSES = 3
"""A ready engine may miss this many checks in a row: one slow answer takes nothing away."""
BLOCKED_RETRY_S = 5.0
NO_METRICS = frozenset({401, 403, 404, 501})
"""Answers of an engine that shows no metrics, or none to us."""
FROZEN_S = 120.0
"""An engine that was ready and makes no progress for so long is ended: it holds cards and serves
nobody. Long work (a compile, a long prompt) does not keep it from answering its health path."""
TAIL_LINES = 40


class Failed(Exception):
    """The shard has failed; the message is for people."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


async def unnumbered() -> Mapping[str, int]:
    """For a node whose cards have no numbers, or none at all."""
    return {}


async def nothing_held(_: Sequence[str]) -> str | None:
    """For a node whose cards nobody can look at, or without any."""
    return None


async def as_it_is(_: Assignment, __: Callable[[dict[str, Any]], None]) -> Path | None:
    """For a node that installs nothing: engines are where settings and PATH say."""
    return None


@dataclass(frozen=True, slots=True)
class Site:
    """What all shards of one agent share."""

    node: str
    state: StateDir
    weights: Weights
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of engines, without the agent's secrets."""
    engine_paths: Mapping[str, str] = field(default_factory=dict)
    news: News = field(default_factory=News)
    numbering: Callable[[], Awaitable[Mapping[str, int]]] = unnumbered
    """Numbers of the cards by UUID; empty when they cannot be told for all."""
    released: Callable[[Sequence[str]], Awaitable[str | None]] = nothing_held
    """Waits until memory of these cards is free of ended processes; returns why it is not."""
    provision: Provisioner = as_it_is
    """The environment of the engine's version, built when it must; raises NoEngine."""

    def mark(self, a: Assignment) -> Mark:
        """The mark of everything that belongs to a shard."""
        return Mark(a.shard, a.replica, self.node, str(self.state.path))


class Shard:
    """The life of one shard. `record` is what is known of it, on disk and for reports."""

    def __init__(self, site: Site, record: Record, assignment: Assignment) -> None:
        self.record = record
        self.assignment = assignment
        self._site = site
        self._mark = site.mark(assignment)
        self._work = trio.CancelScope()
        self._suspended = False
        self._why_stopped: str | None = None
        self._cpu: tuple[float, int] | None = None
        self._devices: Mapping[str, str] = {}
        self._progress: Progress | None = Progress()
        self.finished = trio.Event()
        self.log = structlog.get_logger().bind(
            shard=assignment.shard, replica=assignment.replica, model=assignment.model
        )

    @property
    def final(self) -> bool:
        """Whether this shard is over for good."""
        return self.record.state in SHARD_FINAL

    def stop(self) -> None:
        """Stop it for good; `run` ends when all of it is gone."""
        self._work.cancel()

    def suspend(self) -> None:
        """Stop it because the agent ends: the next agent starts it again.

        Not so a part of a gang: it cannot join those who met without it, so it is over.
        """
        self._suspended = self.assignment.shards == 1
        self._why_stopped = "its agent ended (on_exit = stop)"
        self._work.cancel()

    async def run(self) -> None:
        """Live until final, suspended, or cancelled by the end of the agent, which leaves it be."""
        try:
            await self._live()
        finally:
            self.finished.set()

    async def _live(self) -> None:
        if self.final:
            return
        try:
            with self._work:
                await self._serve()
        except Failed as error:
            await self._fail(str(error), error.exit_code)
        except Exception as error:
            self.log.exception("shard task failed")
            await self._fail(f"the agent failed on this shard: {error!r}", None)
        else:
            await (self._suspend() if self._suspended else self._stop())

    async def _serve(self) -> None:
        await trio.lowlevel.checkpoint()  # told to stop before it began
        leader = await self._adopted() or await self._start()
        await self._watch(leader)

    async def _adopted(self) -> Identity | None:
        """The process of an earlier agent when it still runs; None when there is none to adopt."""
        leader = self.record.process
        if leader is None:
            return None
        if await trio.to_thread.run_sync(alive, leader):
            self.log.info("engine adopted", pid=leader.pid, state=self.record.state)
            if self.record.state == "assigned":
                await self._set("starting")
            return leader
        if leader.boot_id != procfs.boot_id():
            if self.assignment.shards > 1:
                raise Failed("the node was restarted: all shards of the replica must start anew")
            self.log.info("node was restarted; engine starts again")
            self.record.process = None
            return None
        raise Failed(f"the engine (pid {leader.pid}) ended while no agent was watching")

    async def _start(self) -> Identity:
        a = self.assignment
        try:
            home = await self._site.provision(a, partial(self._on, "provisioning"))
            path = await self._weights(a)
        except (NoEngine, NoWeights) as error:
            raise Failed(str(error)) from error
        self.record.fetch = None
        await self._set("starting")
        for port in a.ports:
            holder = await trio.to_thread.run_sync(foreign_listener, port)
            if holder:
                raise Failed(f"port {port} is held by {holder}, which is not of this shard")
        numbers = await self._site.numbering() if a.gpus and _wants_numbers(a) else {}
        try:
            leader = await trio.to_thread.run_sync(self._spawn, path, home, numbers)
        except CannotLaunch as error:
            raise Failed(str(error)) from error
        except OSError as error:
            raise Failed(f"the engine {a.engine} cannot be started: {error}") from error
        self.log.info("engine started", pid=leader.pid, port=a.port)
        self._site.news.tell()
        return leader

    async def _weights(self, a: Assignment) -> Path | None:
        if a.source is None:
            return None
        return await self._site.weights.ensure(a.source, partial(self._on, "fetching"))

    def _on(self, state: str, progress: dict[str, Any]) -> None:
        moved = self.record.state != state
        self.record.state, self.record.fetch = state, progress
        if moved:
            self._site.news.tell()

    def _spawn(
        self, source_path: Path | None, home: Path | None, numbers: Mapping[str, int]
    ) -> Identity:
        """Runs in a thread to its end, so that no start goes unrecorded."""
        a, site = self.assignment, self._site
        place = Place(source_path, site.engine_paths, site.env.get("PATH", ""), home)
        launch = engine_of(a.engine).launch(a, place)
        folder = site.state.run_of(a.shard)
        folder.mkdir(mode=0o700, exist_ok=True)
        # Cards and mark come last: no profile may widen what was given, or hide a process.
        self._devices = devices(a, numbers)
        env = {**site.env, **launch.env, **a.env, **self._devices, **self._mark.environment()}
        self.record.process = spawn(launch.argv, env, folder, site.state.log_of(a.shard))
        self.record.was_running = True
        site.state.save(self.record)
        return self.record.process

    async def _watch(self, leader: Identity) -> None:
        """Wait for its end or its start deadline; raises Failed."""
        outcome: list[Failed] = []
        async with trio.open_nursery() as nursery:

            async def until_exit() -> None:
                code = await ended(leader)
                outcome.append(Failed(_exit_words(code), code))
                nursery.cancel_scope.cancel()

            async def until_overdue() -> None:
                outcome.append(Failed(await self._check(leader)))
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_exit)
            nursery.start_soon(until_overdue)
        raise outcome[0]

    async def _check(self, leader: Identity) -> str:
        """Keep `starting` and `ready` true; returns why when it is not ready in time."""
        check = engine_of(self.assignment.engine).check(self.assignment)
        limit_s = self.assignment.start_deadline_s
        if self.assignment.shards > 1:
            limit_s = math.inf  # the controller judges: it knows what the others still bring
        begun, delay, misses = trio.current_time(), FIRST_CHECK_S, 0
        while True:
            reason = await not_ready_because(check, leader, self._mark)
            reason = reason or await self._stalled_because(check)
            if reason is None:
                misses, delay = 0, HEALTH_S
                if self.record.state != "ready":
                    await self._set("ready")
                    self.log.info("engine ready", after_s=round(trio.current_time() - begun, 2))
            elif self.record.state == "ready":
                misses, delay = misses + 1, SLOWEST_CHECK_S
                if misses >= MISSES:
                    begun, limit_s = trio.current_time(), min(limit_s, FROZEN_S)
                    await self._set("starting", f"was ready and is not any more: {reason}")
            elif trio.current_time() - begun >= limit_s:
                return f"not ready after {limit_s:g} s: {reason}"
            else:
                delay = min(SLOWEST_CHECK_S, delay * 1.5)
            await trio.to_thread.run_sync(self._measure, leader)
            left = begun + limit_s - trio.current_time()
            await trio.sleep(delay if self.record.state == "ready" else max(0.01, min(delay, left)))

    async def _stalled_because(self, check: Check) -> str | None:
        """Why a healthy engine counts as hanging; None when it moves, or tells nothing."""
        if check.path is None or self._progress is None:
            return None
        try:
            said = await get(
                check.address, check.port, "/metrics", timeout_s=TIMEOUT_S, bearer=check.bearer
            )
        except NoAnswer:
            return None
        if said.status != 200:
            if said.status in NO_METRICS:
                self._progress = None  # its log need not show that we ask
            return None
        text = bytes(said.body).decode(errors="replace")
        return self._progress.stalled_because(text, trio.current_time())

    def _measure(self, leader: Identity) -> None:
        """Memory and CPU of the whole tree; unknown until two looks are a second apart."""
        found = [procfs.process(member.pid) for member in tree(leader, self._mark)]
        members = [p for p in found if p is not None]
        now, ticks = time.monotonic(), sum(p.cpu_ticks for p in members)
        self.record.pids = {p.pid for p in members}
        self.record.usage["memory_bytes"] = sum(p.rss_bytes for p in members)
        if self._cpu is None:
            self._cpu = (now, ticks)
            return
        before, ticks_before = self._cpu
        if now - before < 1.0:
            return
        self._cpu = (now, ticks)
        if ticks >= ticks_before:  # fewer: a member ended and took its share along
            cores = (ticks - ticks_before) / procfs.TICKS_PER_S / (now - before)
            self.record.usage["cpu_cores"] = round(cores, 3)

    async def _set(self, state: str, error: str | None = None) -> None:
        record = self.record
        record.state, record.error = state, error
        record.was_running = state in ("starting", "ready") or (
            record.was_running and state == "assigned"
        )
        await trio.to_thread.run_sync(self._site.state.save, record)
        self._site.news.tell()

    async def _clear(self, grace_s: float) -> str | None:
        """End everything of this shard. Says `blocked` and goes on while something remains.

        Returns what is still held of its cards although nothing of it lives, None for nothing.
        """
        record, held = self.record, None
        while left := await end_tree(record.process, self._mark, grace_s):
            state = "starting" if record.state == "ready" else record.state
            words = ", ".join(f"{pid} ({procfs.command_line(pid)})" for pid in left)
            await self._set(state, f"blocked: leftover pid {words} survives SIGKILL")
            self.log.error("leftover processes survive SIGKILL", pids=left)
            grace_s = 0
            await trio.sleep(BLOCKED_RETRY_S)
        if record.process is not None:
            exit_code(record.process, reap=True)  # of our own child; nothing of its tree is left
        if record.process is not None and self.assignment.gpus:
            # At `stopped` the database gives the cards away: their memory must be free by then.
            held = await self._site.released([gpu.uuid for gpu in self.assignment.gpus])
            if held is not None:
                self.log.error("card memory not released", why=held)
        record.process = None
        record.usage.clear()
        record.pids = set()
        return held

    async def _fail(self, message: str, code: int | None) -> None:
        held = await self._clear(0)
        log = self._site.state.log_of(self.assignment.shard)
        part = await trio.to_thread.run_sync(tail, log, TAIL_LINES, TAIL_BYTES)
        self.record.exit_code, self.record.log_tail = code, part.text or None
        self.record.fetch = None
        message += hint(part.text, self._devices) + (f"; {held}" if held else "")
        await self._set("failed", message)
        self.log.warning("shard failed", error=message, exit_code=code)

    async def _stop(self) -> None:
        if self.record.state in ("starting", "ready"):
            await self._set("draining")
        held = await self._clear(self.assignment.stop_grace_s)
        self.record.fetch = None
        await self._set("stopped", "; ".join(filter(None, (self._why_stopped, held))) or None)
        self.log.info("shard stopped")

    async def _suspend(self) -> None:
        # `assigned` is said first: routers leave before the engine does.
        await self._set("assigned")
        await self._clear(self.assignment.stop_grace_s)
        await self._set("assigned")
        self.log.info("shard stopped until the next start of the agent")


def _wants_numbers(a: Assignment) -> bool:
    known = ENGINES.get(a.engine)
    return known is not None and known.numbers_only


def _exit_words(code: int | None) -> str:
    if code is None:
        return "the engine ended; its exit code is unknown because an earlier agent started it"
    if code < 0:
        return f"the engine was ended by signal {-code}"
    return f"the engine exited with code {code}"
