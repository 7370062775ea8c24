"""The agents' door without a database: it speaks the same documents and knows the state table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent.door import Answer
from sql.errors import DatabaseError, Refused, Unauthorized
from sql.states import SHARD

if TYPE_CHECKING:
    from agent.probes.scan import Scan


@dataclass
class PaperDoor:
    """What one node's row would be. Tests set `assignments` and bump `gen`, then read `states`."""

    secret: str | None = None
    token: str | None = None
    gen: int = 1
    assignments: list[Any] = field(default_factory=list)
    asks: list[dict[str, Any]] = field(default_factory=list)
    poll_ms: int = 100
    away: DatabaseError | None = None
    states: dict[int, str] = field(default_factory=dict)
    history: dict[int, list[str]] = field(default_factory=dict)
    words: dict[int, dict[str, Any]] = field(default_factory=dict)
    illegal: list[tuple[int, str, str]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    logs: dict[int, tuple[str, int]] = field(default_factory=dict)
    scans: dict[int, Scan] = field(default_factory=dict)
    collected: dict[int, dict[str, Any]] = field(default_factory=dict)
    told: list[tuple[str, Any]] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    enrolled: int = 0

    async def enroll(self, token: str, node: str, secret: str) -> None:
        if token != self.token:
            raise Unauthorized(f"this enrolment token does not admit node {node}")
        self.secret = secret
        self.enrolled += 1

    async def sync(self, secret: str, have_gen: int | None, report: dict[str, Any]) -> Answer:
        self._admit(secret)
        self.reports.append(report)
        for word in report["shards"]:
            self._take(word["shard"], word)
        live = [a for a in self.assignments if self._live(a)]
        return Answer(self.gen, None if have_gen == self.gen else live, self.poll_ms, self.asks)

    def _admit(self, secret: str) -> None:
        if self.away is not None:
            raise self.away
        if secret != self.secret:
            raise Unauthorized("no node has this token")

    def _live(self, assignment: Any) -> bool:
        shard = assignment.get("shard") if isinstance(assignment, dict) else None
        return bool(SHARD[self.states.get(shard, "assigned")])

    def _take(self, shard: int, word: dict[str, Any]) -> None:
        was = self.states.setdefault(shard, "assigned")
        if word["state"] != was and word["state"] not in SHARD[was]:
            self.illegal.append((shard, was, word["state"]))
            return
        self.states[shard] = word["state"]
        self.words[shard] = word
        if word["state"] != was:
            self.history.setdefault(shard, [was]).append(word["state"])

    async def report(self, secret: str, kind: str, document: Any) -> None:
        self._admit(secret)
        if kind in self.refused:
            raise Refused(f"{kind} are refused")
        self.facts[kind] = document
        self.told.append((kind, document))

    async def report_scan(self, secret: str, ask: int, found: Scan) -> None:
        self._admit(secret)
        self.scans[ask] = found
        self.asks = [a for a in self.asks if a["id"] != ask]

    async def report_collect(self, secret: str, ask: int, answer: dict[str, Any]) -> None:
        self._admit(secret)
        self.collected[ask] = answer
        self.asks = [a for a in self.asks if a["id"] != ask]

    async def report_log(self, secret: str, ask: int, text: str, offset: int) -> None:
        self._admit(secret)
        self.logs[ask] = (text, offset)
        self.asks = [a for a in self.asks if a["id"] != ask]

    def assign(self, *documents: Any) -> None:
        """A newer list."""
        self.assignments = list(documents)
        self.gen += 1
