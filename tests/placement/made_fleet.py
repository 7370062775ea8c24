"""Makes nodes, profiles, models and replicas with the few facts a test is about."""

from __future__ import annotations

from dataclasses import replace

from controller.placement.model import (
    Claim,
    Gpu,
    Model,
    Node,
    Profile,
    Replica,
    Settings,
    Shard,
    Snapshot,
)

GIB = 1024


def gpu(index=0, node="n1", **facts):
    """A healthy, free card of 80 GiB."""
    known = {"class_": "H100", "memory_mib": 80 * GIB, "memory_foreign_mib": 0, "healthy": True}
    return Gpu(index=index, **({"uuid": f"{node}-{index}"} | known | facts))


def node(name="n1", cards=2, **facts):
    """A ready node with cards, cores and memory to spare."""
    known = {
        "state": "ready",
        "alloc_gen": 7,
        "arch": "x86_64",
        "cpu_flags": frozenset({"avx2"}),
        "cpus": 32.0,
        "memory_mib": 256 * GIB,
        "gpus": tuple(gpu(i, name) for i in range(cards)),
        "engines": {"vllm": ("0.32.0",)},
        "mgmt_addr": "10.0.0.1",
    }
    return Node(id=name, **(known | facts))


def profile(name="p", **facts):
    """One card of any class by vLLM."""
    return Profile(name=name, **({"engine": "vllm", "fingerprint": f"f-{name}", "gpus": 1} | facts))


def model(name="m", wanted=1, *profiles, **facts):
    """A model that wants this many replicas."""
    known = {"source": f"hf:x/{name}", "max_replicas": max(wanted, 1), "idle_timeout_s": None}
    return Model(
        name=name, min_replicas=wanted, profiles=profiles or (profile(),), **(known | facts)
    )


def shard(state="ready", on="n1", rank=0, id_=1, **facts):
    """One shard of a launch."""
    return Shard(id=id_, rank=rank, node_id=on, state=state, **facts)


def replica(id_=1, state="ready", *shards, of="m", **facts):
    """A replica; without shards given, a launched one has one shard of the same state on n1."""
    launched = {
        "starting": "starting",
        "ready": "ready",
        "draining": "ready",
        "stopping": "draining",
    }
    if not shards and state in launched:
        shards = (shard(launched[state], id_=id_),)
    return Replica(id=id_, model=of, state=state, profile="p", shards=shards, **facts)


def snapshot(nodes=(), models=(), replicas=(), **settings):
    """A snapshot with the default numbers but for those given."""
    return Snapshot(tuple(nodes), tuple(models), tuple(replicas), replace(Settings(), **settings))


def whole(*shard_ids):
    """Claims of all of a card."""
    return tuple(Claim(id_, None) for id_ in shard_ids)
