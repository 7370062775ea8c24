"""All shards of the node: what the database assigns against what runs.

`apply` takes a list, `report` gives the words for the next sync and `told` records that they
arrived. Each shard has its own task and each item is read on its own (case D10). Called by loop.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import structlog
import trio

from agent.assignment import Assignment, BadAssignment, parse, shard_of
from agent.orphans import sweep
from agent.state import Record
from agent.supervise import Shard, Site
from sql.states import SHARD, SHARD_FINAL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent.work import News

MAX_TAILS = 16
"""Log tails in one report: 4 KiB each, and a report is bounded to 256 KiB."""
FIXED = ("replica", "model", "engine", "rank", "port", "source", "args", "command")
WAYPOINTS = (
    *("starting", "draining", "fetching", "provisioning", "assigned"),
    *("ready", "stopped", "failed"),
)
"""States in the order in which a way may lead through them: nobody is called ready in passing."""
log = structlog.get_logger()


def next_word(known: str, actual: str) -> str:
    """The next state to report on the shortest legal way from what the database knows.

    A fast start may pass `fetching`, `starting` and `ready` within one poll, and the database
    refuses the jump. Without a legal way the truth is said and the database decides.
    """
    before: dict[str, str] = {known: known}
    queue = deque([known])
    while queue and actual not in before:
        here = queue.popleft()
        for there in (state for state in WAYPOINTS if state in SHARD.get(here, ())):
            if there not in before:
                before[there] = here
                queue.append(there)
    if actual not in before:
        return actual
    step = actual
    while before[step] not in (known, step):
        step = before[step]
    return step


def word_of(record: Record, *, with_tail: bool) -> dict[str, Any]:
    """What a report says of one shard; unknown fields are absent."""
    said = next_word(record.known, record.state)
    word: dict[str, Any] = {"shard": record.shard, "state": said}
    if said == record.state:
        word["error"] = record.error
        word["fetch"] = record.fetch if said in ("fetching", "provisioning") else None
        if said in SHARD_FINAL:
            word["exit_code"] = record.exit_code
            word["log_tail"] = record.log_tail if with_tail else None
    if record.process is not None:
        word["pid"] = record.process.pid
        word["cpu_cores"] = record.usage.get("cpu_cores")
        memory = record.usage.get("memory_bytes")
        word["memory_bytes"] = None if memory is None else int(memory)
    return {name: value for name, value in word.items() if value is not None}


def unlike(old: Any, new: Any) -> bool:
    """Whether two assignments of one number are different shards (a shard never changes these)."""
    cards = [[gpu["uuid"] for gpu in doc.get("gpus") or []] for doc in (old, new)]
    return cards[0] != cards[1] or any(old.get(name) != new.get(name) for name in FIXED)


class Shards:
    """The shards of one node."""

    def __init__(self, site: Site, default_host: str) -> None:
        self._site = site
        self._default_host = default_host
        self._tasks: dict[int, Shard] = {}
        self._records: dict[int, Record] = {}
        self._dropped: set[int] = set()
        self._replacing: dict[int, dict[str, Any]] = {}
        self._nursery: trio.Nursery | None = None
        self.bad_rows = 0
        """Items of assignment lists that could not be read, since the start."""

    async def restore(self, nursery: trio.Nursery) -> None:
        """Take up what an earlier agent left: adopt, start what ran before, stop orphans.

        Runs before the first sync and needs no database. Tasks live in `nursery`.
        """
        self._nursery = nursery
        records, problems = await trio.to_thread.run_sync(self._site.state.load)
        for problem in problems:
            self.bad_rows += 1
            log.error("bad state file", problem=problem)
        readable: dict[int, Assignment] = {}
        for record in records:
            self._records[record.shard] = record
            try:
                readable[record.shard] = parse(record.assignment, self._default_host)
            except BadAssignment as error:
                record.process = None  # nobody can watch it: the sweep ends it
                self._bad(record.shard, record.assignment, error)
        await sweep(self._site.node, str(self._site.state.path), records)
        for shard, assignment in readable.items():
            record = self._records[shard]
            if record.was_running or record.process or not assignment.wanted:
                self._begin(record, assignment)

    def apply(self, documents: Iterable[object]) -> None:
        """Make the node run what a newer list says; shards missing from it are stopped."""
        named: set[int] = set()
        for document in documents:
            shard = shard_of(document)
            named.add(-1 if shard is None else shard)
            self.apply_more(document)
        for shard in self._records.keys() - named:
            self._replacing.pop(shard, None)
            self._drop(shard)

    def apply_more(self, document: object) -> None:
        """Apply one item; whatever is wrong with it stays with it."""
        try:
            self._apply_one(parse(document, self._default_host), document)
        except BadAssignment as error:
            self._bad(shard_of(document), document, error)
        except Exception:
            log.exception("assignment not applied", shard=shard_of(document))

    def _apply_one(self, assignment: Assignment, document: Any) -> None:
        record = self._records.get(assignment.shard)
        if record is not None and unlike(record.assignment, document):
            self._replace(record, document)
            return
        if record is None:
            record = Record(assignment.shard, document)
            self._records[assignment.shard] = record
        if record.state in SHARD_FINAL:
            return  # a restart is a new shard
        task = self._tasks.get(assignment.shard)
        if task is None:
            task = self._begin(record, assignment)
        if not assignment.wanted:
            record.assignment = document
            task.stop()

    def _begin(self, record: Record, assignment: Assignment) -> Shard:
        assert self._nursery is not None, "restore() comes first"
        task = self._make(record, assignment)
        self._tasks[record.shard] = task
        if not assignment.wanted:
            task.stop()
        self._nursery.start_soon(self._live, task)
        return task

    def _make(self, record: Record, assignment: Assignment) -> Shard:
        """The task of a shard; the fleet simulation makes another kind."""
        return Shard(self._site, record, assignment)

    async def _live(self, task: Shard) -> None:
        try:
            await task.run()
        except Exception:
            log.exception("shard task ended by a fault of the agent", shard=task.record.shard)
        if task.record.shard in self._dropped:
            await self._forget(task.record.shard)

    def _replace(self, record: Record, document: dict[str, Any]) -> None:
        """Another database gave the number to another shard: end the old one, then begin."""
        log.error("shard number means another shard now", shard=record.shard)
        self._replacing[record.shard] = document
        self._drop(record.shard)

    def _bad(self, shard: int | None, document: object, error: BadAssignment) -> None:
        self.bad_rows += 1
        log.error("bad assignment", shard=shard, error=str(error), bad_rows=self.bad_rows)
        if shard is None:
            return
        if shard in self._tasks:
            # A running engine is not stopped for an unreadable row, only when that row says so.
            if isinstance(document, dict) and document.get("desired") == "stopped":
                self._tasks[shard].stop()
            return
        kept = document if isinstance(document, dict) else {}
        record = self._records.setdefault(shard, Record(shard, kept))
        record.state, record.error = "failed", str(error)
        self._site.news.tell()

    def _drop(self, shard: int) -> None:
        self._dropped.add(shard)
        task = self._tasks.get(shard)
        if task is not None and not task.finished.is_set():
            task.stop()
            return
        assert self._nursery is not None
        self._nursery.start_soon(self._forget, shard)

    async def _forget(self, shard: int) -> None:
        self._dropped.discard(shard)
        self._tasks.pop(shard, None)
        record = self._records.pop(shard, None)
        if record is not None:
            await trio.to_thread.run_sync(self._site.state.forget, record)
            self._site.news.tell()
        document = self._replacing.pop(shard, None)
        if document is not None:
            self.apply_more(document)

    def report(self) -> list[dict[str, Any]]:
        """The words of all known shards."""
        tails = 0
        words = []
        for record in self._records.values():
            if record.shard in self._replacing:
                continue  # its end would be taken for that of the shard that has its number now
            fresh = record.known != record.state and tails < MAX_TAILS
            tails += fresh and record.log_tail is not None
            words.append(word_of(record, with_tail=fresh))
        return words

    async def told(self, words: list[dict[str, Any]]) -> bool:
        """The database has these words. True when there is already more to say."""
        more = False
        for word in words:
            record = self._records.get(word["shard"])
            if record is None:
                continue
            if record.known != word["state"]:
                record.known = word["state"]
                await trio.to_thread.run_sync(self._site.state.save, record)
            more = more or record.known != record.state
        return more

    def unknown_again(self) -> None:
        """The node was enrolled anew: nothing is known of what the database remembers."""
        for record in self._records.values():
            record.known = "assigned"

    async def suspend(self, timeout_s: float) -> None:
        """Stop every engine because the agent ends; the shards stay assigned."""
        tasks = [task for task in self._tasks.values() if not task.finished.is_set()]
        for task in tasks:
            task.suspend()
        with trio.move_on_after(timeout_s):
            for task in tasks:
                await task.finished.wait()

    @property
    def longest_grace_s(self) -> float:
        """The longest time that a running shard may take to stop."""
        return max((t.assignment.stop_grace_s for t in self._tasks.values()), default=0.0)

    def pids(self) -> set[int]:
        """All processes of engines, as seen last."""
        leaders = {r.process.pid for r in self._records.values() if r.process is not None}
        return leaders.union(*(r.pids for r in self._records.values()))

    @property
    def news(self) -> News:
        """Told when a shard changes."""
        return self._site.news

    def environments(self) -> set[str]:
        """Names of environments that live shards run in or wait for (agent.provision)."""
        live = [r.assignment for r in self._records.values() if r.state not in SHARD_FINAL]
        return {f"{a.get('engine')}-{a.get('engine_version')}" for a in live}

    def sources(self) -> set[str]:
        """Sources that shards of this node name, those that are over included."""
        return _sources_of(self._records.values())

    def sources_in_use(self) -> set[str]:
        """Sources that live shards name. One that is over is known until the next list comes."""
        return _sources_of(r for r in self._records.values() if r.state not in SHARD_FINAL)


def _sources_of(records: Iterable[Record]) -> set[str]:
    found = (record.assignment.get("source") for record in records)
    return {source for source in found if isinstance(source, str)}
