"""A fleet in memory that obeys plans as commit_plan and the agents do, and refuses what they do.

Time passes by `tick`: decide, apply, let every shard take one step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from controller.placement.ledger import pool_claim
from controller.placement.model import (
    Claim,
    Create,
    Move,
    Place,
    Replica,
    Settings,
    Shard,
    Snapshot,
)
from controller.reconcile.decide import decide
from sql.states import REPLICA, SHARD_FINAL


@dataclass
class LiveShard:
    """A shard row with what the database keeps beside it."""

    shard: Shard
    replica: int
    gpu_memory_mib: int | None
    cpus: float
    memory_mib: int
    launch: int = 1
    desired: str = "running"

    @property
    def over(self):
        return self.shard.state in SHARD_FINAL

    @property
    def ports(self):
        return [p for p in (self.shard.port, self.shard.master_port) if p is not None]


def _pooled(node, live):
    """Host memory that live shards hold by unified cards."""
    held = [(g, s) for g in node.gpus if g.unified for s in live if g.uuid in s.shard.gpus]
    return sum(pool_claim(g, s.gpu_memory_mib) for g, s in held)


@dataclass
class Fleet:
    """`broken` nodes fail every shard; nodes in `states` have another word than ready."""

    nodes: dict
    models: dict
    replicas: dict = field(default_factory=dict)
    shards: dict = field(default_factory=dict)
    states: dict = field(default_factory=dict)
    broken: set = field(default_factory=set)
    now: float = 1000.0
    settings: Settings = field(default_factory=Settings)
    seed: int = 0
    in_flight: int | None = 0
    log: list = field(default_factory=list)

    def snapshot(self):
        return Snapshot(
            tuple(self._node(n) for n in self.nodes.values()),
            tuple(self.models.values()),
            self.seen_replicas(),
            self.settings,
        )

    def seen_replicas(self):
        return tuple(self._replica(r) for r in self.replicas.values() if r.state != "gone")

    def _node(self, node):
        live = [s for s in self.shards.values() if not s.over and s.shard.node_id == node.id]
        claims = {
            gpu: tuple(Claim(s.shard.id, s.gpu_memory_mib) for s in live if gpu in s.shard.gpus)
            for gpu in (g.uuid for g in node.gpus)
        }
        return replace(
            node,
            state=self.states.get(node.id, "ready"),
            gpus=tuple(replace(g, claims=claims[g.uuid]) for g in node.gpus),
            cpus_claimed=sum(s.cpus for s in live),
            memory_claimed_mib=sum(s.memory_mib for s in live) + _pooled(node, live),
            ports_taken=frozenset(p for s in live for p in s.ports),
            shards_live=len(live),
        )

    def _replica(self, replica):
        own = [s for s in self.shards.values() if s.replica == replica.id]
        newest = max((s.launch for s in own), default=0)
        shards = tuple(s.shard for s in own if s.launch == newest)
        return replace(replica, shards=shards, in_flight=self.in_flight)

    def tick(self):
        plan = decide(self.snapshot(), self.now, self.seed)
        self.apply(plan)
        self.work()
        self.now += 1.0
        return plan

    def settle(self, most=200):
        """Ticks until two plans in a row are empty; returns how many ticks it took."""
        quiet = 0
        for count in range(most):
            quiet = 0 if self.tick().items else quiet + 1
            if quiet == 2:
                return count
        raise AssertionError(f"not settled after {most} ticks: {self.log[-10:]}")

    def states_of(self, model="m"):
        return sorted(
            r.state for r in self.replicas.values() if r.model == model and r.state != "gone"
        )

    def nodes_of(self, model="m", state="ready"):
        return sorted(
            s.shard.node_id
            for s in self.shards.values()
            if s.desired == "running"
            and not s.over
            and self.replicas[s.replica].model == model
            and self.replicas[s.replica].state == state
        )

    def apply(self, plan):
        for item in plan.items:
            self.log.append(item)
            if isinstance(item, Create):
                id_ = len(self.replicas) + 1
                self.replicas[id_] = Replica(
                    id_, item.model, "pending", created_at=self.now, state_at=self.now
                )
            elif isinstance(item, Place):
                self._place(item)
            else:
                self._move(item)
        self.check()

    def _place(self, item):
        replica = self.replicas[item.replica_id]
        assert replica.state == "pending", item
        profile = next(p for p in self.models[item.model].profiles if p.name == item.profile)
        assert len(item.shards) == profile.shards, "all shards or none"
        assert len({s.node_id for s in item.shards}) == profile.shards, "a node for each"
        launch = 1 + max((s.launch for s in self.shards.values() if s.replica == replica.id),
                         default=0)  # fmt: skip
        for placed in item.shards:
            assert self.states.get(placed.node_id, "ready") == "ready", item
            id_ = len(self.shards) + 1
            shard = Shard(
                id_,
                placed.rank,
                placed.node_id,
                "assigned",
                placed.gpus,
                placed.port,
                None,
                self.now,
                master_port=placed.master_port,
            )
            self.shards[id_] = LiveShard(
                shard, replica.id, placed.gpu_memory_mib, placed.cpus or 0.0,
                placed.memory_mib or 0, launch,
            )  # fmt: skip
        self._set(
            replica, state="starting", profile=item.profile, fingerprint=item.fingerprint,
            backoff_until=None, ready_at=None, replace_asked=None, replace_force=False,
        )  # fmt: skip

    def _move(self, item):
        assert isinstance(item, Move)
        replica = self.replicas[item.replica_id]
        assert replica.state == item.from_state, item
        assert item.to_state in REPLICA[item.from_state], f"illegal {item}"
        ready_at = replica.ready_at if item.to_state in ("ready", "draining") else None
        self._set(
            replica,
            state=item.to_state,
            error=None if item.to_state == "ready" else item.error or replica.error,
            backoff_until=item.backoff_until,
            drain_deadline=item.drain_deadline,
            restarts=replica.restarts if item.restarts is None else item.restarts,
            ready_at=(ready_at or self.now) if item.to_state == "ready" else ready_at,
        )
        if item.to_state in ("stopping", "failed"):
            for shard in self.shards.values():
                if shard.replica == replica.id and not shard.over:
                    shard.desired = "stopped"

    def _set(self, replica, **facts):
        self.replicas[replica.id] = replace(replica, state_at=self.now, **facts)

    def work(self):
        """Every agent that can be heard brings its shards one step on."""
        for live in self.shards.values():
            silent = self.states.get(live.shard.node_id) in ("unreachable", "lost")
            if live.over or silent or live.shard.node_id not in self.nodes:
                continue
            self._step(live)

    def _step(self, live):
        state = live.shard.state
        if live.desired == "stopped":
            self.report(live, "stopped")
        elif live.shard.node_id in self.broken and state == "starting":
            self.report(live, "failed", "exit code 1: CUDA error")
        elif state in ("assigned", "starting"):
            self.report(live, {"assigned": "starting", "starting": "ready"}[state])

    def report(self, live, state, error=None):
        live.shard = replace(live.shard, state=state, error=error, state_at=self.now)

    def check(self):
        """What constraints and triggers of the schema hold."""
        for node in map(self._node, self.nodes.values()):
            live = [s for s in self.shards.values() if not s.over and s.shard.node_id == node.id]
            ports = [p for s in live for p in s.ports]
            assert len(ports) == len(set(ports)), f"port twice on {node.id}"
            assert all(node.ports[0] <= p <= node.ports[1] for p in ports)
            assert node.cpus is None or node.cpus_claimed <= node.cpus + 1e-6
            assert node.memory_mib is None or node.memory_claimed_mib <= node.memory_mib
            for gpu in node.gpus:
                whole = [c for c in gpu.claims if c.memory_mib is None]
                assert len(whole) <= 1, f"gpu twice: {gpu}"
                assert not whole or len(gpu.claims) == 1, f"gpu whole and shared: {gpu}"
                shared = sum(c.memory_mib or 0 for c in gpu.claims)
                assert not shared or shared <= gpu.memory_mib, f"gpu over-promised: {gpu}"
