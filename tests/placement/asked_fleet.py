"""The simulated fleet with clients: so many requests at once of each model, spread evenly."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from controller.placement.model import Asked, Snapshot
from tests.placement.simulated import Fleet

MINUTE = 60


@dataclass
class AskedFleet(Fleet):
    """`load` requests of each model are there all the time; those without a replica wait."""

    load: dict = field(default_factory=dict)
    running: dict = field(default_factory=lambda: defaultdict(int))
    used: dict = field(default_factory=dict)
    peaks: dict = field(default_factory=lambda: defaultdict(list))
    wanted: dict = field(default_factory=dict)

    def snapshot(self):
        seen = super().snapshot()
        models = tuple(replace(m, asked=self._asked(m.name)) for m in seen.models)
        return Snapshot(seen.nodes, models, seen.replicas, seen.settings)

    def _asked(self, name):
        here = sum(self.running[r] for r in self.serving(name))
        waiting = 0 if self.serving(name) else self.load.get(name, 0)
        peak = max(self.peaks[name][-MINUTE:], default=0)
        return Asked(waiting, here, peak, self.wanted.get(name), 2.0)

    def serving(self, name):
        return [r.id for r in self.replicas.values() if r.model == name and r.state == "ready"]

    def _replica(self, replica):
        seen = super()._replica(replica)
        used = self.used.get(replica.id)
        return replace(seen, in_flight=self.running[replica.id], last_used_at=used)

    def _move(self, item):
        super()._move(item)
        moved = self.replicas[item.replica_id]
        self.replicas[moved.id] = replace(moved, room_for=item.room_for)

    def clients(self):
        """One second of requests: what drains finishes, the rest is spread over what is ready."""
        self.running.clear()
        for name in self.models:
            load, ready = self.load.get(name, 0), self.serving(name)
            self.peaks[name].append(load)
            if load and not ready:
                self.wanted[name] = self.now
            elif ready:
                self.wanted.pop(name, None)
            for number in range(load if ready else 0):
                self.running[ready[number % len(ready)]] += 1
        for id_ in self.running:
            self.used[id_] = self.now

    def tick(self):
        self.clients()
        return super().tick()
