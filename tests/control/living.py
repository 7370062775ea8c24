"""Agents without machines: each obeys its assignments, one step of each shard with every sync."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sql.states import SHARD, SHARD_FINAL

if TYPE_CHECKING:
    from tests.sql.fleet import Fleet, Node

ONWARD = {"assigned": "starting", "starting": "ready"}


@dataclass
class Agents:
    """The agents of a fleet's nodes; those in ``silent`` say nothing, their engines run on."""

    fleet: Fleet
    nodes: dict[str, Node] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    engines: dict[str, dict[int, str]] = field(default_factory=dict)
    """Node -> shard -> state, as the agent knows it."""
    gens: dict[str, int | None] = field(default_factory=dict)

    def join(self, name: str, gpus: int) -> None:
        """A new machine with so many empty cards."""
        self.nodes[name] = self.fleet.node(name, gpus=gpus, beat=False, ports=[20000, 20005])
        self.engines[name], self.gens[name] = {}, None
        self.sync(name)

    def work(self) -> None:
        """One sync of every agent that can be heard."""
        for name in self.nodes:
            if name not in self.silent:
                self.sync(name)

    def sync(self, name: str) -> None:
        """Tell, and take what is assigned; whatever is assigned no more ends."""
        known = self.engines[name]
        rows = self.fleet.rows("select uuid from llmgw_core.gpu where node_id = %s", name)
        answer = self.fleet.sync(
            self.nodes[name],
            self.gens[name],
            applied_gen=self.gens[name],
            shards=[{"shard": id_, "state": state, "pid": 1} for id_, state in known.items()],
            gpus=[{"uuid": row["uuid"], "memory_foreign_mib": 0} for row in rows],
        )
        for id_ in [id_ for id_, state in known.items() if state in SHARD_FINAL]:
            del known[id_]  # told
        if answer["assignments"] is not None:
            self._obey(known, answer["assignments"])
            self.gens[name] = answer["gen"]
        for id_, state in known.items():
            known[id_] = ONWARD.get(state, state)

    def _obey(self, known: dict[int, str], assignments: list[dict[str, object]]) -> None:
        wanted = {int(str(each["shard"])): each["desired"] for each in assignments}
        for id_ in known.keys() - wanted.keys():
            del known[id_]
        for id_, desired in wanted.items():
            if desired == "stopped":
                known[id_] = "stopped"
            else:
                known.setdefault(id_, "assigned")

    def end(self, number: int, state: str) -> None:
        """The engine of one of the live shards, by turns, comes to this end."""
        live = [
            (name, id_) for name, known in self.engines.items() for id_, said in known.items()
            if state in SHARD[said]
        ]  # fmt: skip
        if live:
            name, id_ = live[number % len(live)]
            self.engines[name][id_] = state
