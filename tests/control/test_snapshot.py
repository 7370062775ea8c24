"""Rows become values: every field, unknown stays unknown, and what routers said of replicas."""

from __future__ import annotations

import uuid

import pytest

from controller.placement.model import Asked, Claim, Gpu, Model, Profile, Replica, Settings, Shard
from controller.reconcile import snapshot
from tests.control import looks

NODE = {
    "id": "n", "state": "ready", "state_reason": None, "alloc_gen": 3, "labels": {"rack": 1},
    "arch": "x86_64", "cpu_flags": ["avx2"], "cpus_effective": 8.0, "memory_effective_mib": 1024,
    "port_first": 20000, "port_last": 20009, "mgmt_addr": "10.0.0.1", "reported": True,
    "cpus": 2.0, "memory_mib": 100, "ports": [20001], "shards": 1, "models": ["m"],
    "nvlink_domain": "u.1", "nvlink_reason": None, "imex_ready": False,
    "imex_reason": "two owners", "provisions": ["vllm"],
    "fabrics": {"ib:01": {"hcas": ["mlx5_0:1"], "names": ["a"]}},
    "weights_free_mib": 900,
}  # fmt: skip
GPU = {
    "node_id": "n", "uuid": "G", "index": 0, "class": "H100", "memory_mib": 80, "healthy": True,
    "problems": ["hot"], "numa": 1, "memory_foreign_mib": 5, "claims": [[7, None], [8, 40]],
    "driver_version": "590.1", "cuda_version": "13.1", "nearest_nic": "mlx5_0", "island": 2,
    "slice": True, "unified": False, "gone": False,
}  # fmt: skip
MODEL = {
    "name": "m", "source": "hf:a/b", "min_replicas": 1, "max_replicas": 2, "idle_timeout_s": 60.0,
    "priority": 5,
}  # fmt: skip
DEMAND = {
    "model": "m", "waiting": 3, "in_flight": 4, "peak": 9, "wanted_at": 8.0, "concurrency": 16.0,
    "routers": 1,
}  # fmt: skip
PROFILE = {
    "model": "m", "name": "p", "position": 0, "engine": "vllm", "engine_version": "1",
    "fingerprint": "f", "pool": "o", "pool_labels": {"rack": ["1", "2"]}, "gpu_class": "H100",
    "gpus": 2, "gpu_memory_mib": 40, "share": True, "cpus": 1.0, "memory_mib": 10,
    "arch": "x86_64", "cpu_flags": ["avx2"], "shards": 1, "start_deadline_s": None,
    "stop_grace_s": None, "fabric": "any", "driver_min": "550", "cuda_min": None,
    "exclude_nodes": ["x"], "spread": "node", "args": ["-c"], "env": {"A": "B"}, "command": None,
    "health_path": "/health",
}  # fmt: skip
REPLICA = {
    "id": 5, "model": "m", "state": "starting", "profile": "p", "fingerprint": "f", "restarts": 2,
    "error": "e", "created_at": 1.0, "state_at": 2.0, "ready_at": 3.0, "backoff_until": 4.0,
    "drain_deadline": 5.0, "replace_asked": 7.0, "replace_force": False, "room_for": "other",
}  # fmt: skip
SHARD = {
    "id": 7, "replica_id": 5, "rank": 0, "node_id": "n", "state": "failed", "port": 20001,
    "error": "died", "state_at": 2.0, "exit_code": 1, "log_tail": "last words\n", "gpus": ["G"],
    "cpus": 2.0, "memory_mib": 512, "master_port": 20002,
}  # fmt: skip
TABLES = {
    "settings": [{"name": "backoff_base", "value": 2.0}, {"name": "start_deadline", "value": 9.0},
                 {"name": "silent_share_max", "value": 0.5}, {"name": "unheard_of", "value": 1.0}],
    "nodes": [NODE],
    "gpus": [GPU],
    "engines": [
        {"node_id": "n", "engine": "vllm", "versions": ["1", "2"], "failures": {"3": "no luck"}},
        {"node_id": "n", "engine": "sglang", "versions": None, "failures": {"4": "no space"}},
    ],
    "weights": [{"node_id": "n", "sources": ["hf:a/b"]}],
    "models": [MODEL],
    "demand": [DEMAND],
    "profiles": [PROFILE],
    "replicas": [REPLICA],
    "shards": [SHARD],
    "uses": [{"replica_id": 5, "in_flight": 3, "last_used_at": 6.0}],
}  # fmt: skip


def build(**tables):
    return looks.build({**TABLES, **tables})


def test_every_field_finds_its_place():
    seen, notes = build()
    assert notes == []
    (node,), (model,), (replica,) = seen.nodes, seen.models, seen.replicas
    assert node.gpus == (
        Gpu(
            "G",
            0,
            "H100",
            80,
            5,
            True,
            ("hot",),
            1,
            (Claim(7, None), Claim(8, 40)),
            True,
            False,
            "590.1",
            "13.1",
            "mlx5_0",
            2,
        ),
    )
    assert (node.id, node.state, node.alloc_gen, node.arch) == ("n", "ready", 3, "x86_64")
    assert (node.labels, node.cpu_flags) == ({"rack": "1"}, {"avx2"})
    assert (node.cpus, node.cpus_claimed) == (8.0, 2.0)
    assert (node.memory_mib, node.memory_claimed_mib) == (1024, 100)
    assert (node.ports, node.ports_taken, node.shards_live) == ((20000, 20009), {20001}, 1)
    assert node.provisions == {"vllm"}
    assert node.engine_failures == {("vllm", "3"): "no luck", ("sglang", "4"): "no space"}
    assert (node.engines, node.sources_on_disk) == ({"vllm": ("1", "2")}, {"hf:a/b"})
    assert node.mgmt_addr == "10.0.0.1"
    assert (node.models, node.nvlink_domain) == ({"m"}, "u.1")
    assert (node.imex_ready, node.imex_reason) == (False, "two owners")
    assert (node.fabrics, node.declared) == ({"ib:01": ("mlx5_0:1",)}, {"ib:01": {"a"}})
    spec = {
        "engine": "vllm", "engine_version": "1", "args": ["-c"], "env": {"A": "B"},
        "command": None, "health_path": "/health", "source": "hf:a/b", "start_deadline_s": 9.0,
        "stop_grace_s": 30.0,
    }  # fmt: skip
    profile = Profile(
        "p", "vllm", "f", "1", "o", {"rack": ("1", "2")}, "H100", 2, 40, True, 1.0, 10, "x86_64",
        ("avx2",), 1, "any", "550", None, frozenset({"x"}), None, "m", None,
        spec,
    )  # fmt: skip
    assert model == Model("m", "hf:a/b", 1, 2, 60.0, (profile,), 5, Asked(3, 4, 9, 8.0, 16.0, True))
    words = "died; last words: last words"
    shard = Shard(7, 0, "n", "failed", ("G",), 20001, words, 2.0, 2.0, 512, 20002)
    assert replica == Replica(
        5, "m", "starting", "p", "f", 1.0, 2.0, 3.0, 2, 4.0, "e", 5.0, None, (shard,),
        3, 6.0, 7.0, False, "other",
    )  # fmt: skip
    assert seen.settings == Settings(backoff_base_s=2.0, start_deadline_s=9.0, silent_share_max=0.5)


def test_unknown_stays_unknown():
    bare = dict.fromkeys(NODE) | {
        "id": "n", "state": "unreachable", "alloc_gen": 0, "labels": {}, "port_first": 1,
        "port_last": 2, "reported": False,
    }  # fmt: skip
    card = GPU | {"memory_mib": None, "memory_foreign_mib": None, "numa": None, "claims": None}
    seen, notes = build(nodes=[bare], gpus=[card], engines=[], weights=[])
    (node,) = seen.nodes
    assert notes == []
    assert (node.arch, node.cpu_flags, node.cpus, node.memory_mib) == (None,) * 4
    assert (node.engines, node.mgmt_addr, node.sources_on_disk) == (None, None, frozenset())
    assert (node.cpus_claimed, node.memory_claimed_mib, node.shards_live) == (0, 0, 0)
    (gpu,) = node.gpus
    assert (gpu.memory_mib, gpu.memory_foreign_mib, gpu.claims) == (None, None, ())
    # It has reported, and it has no engine: that is known.
    assert build(engines=[])[0].nodes[0].engines == {}


def test_E02_claims_on_unified_cards_are_claims_on_the_host():
    card = GPU | {"unified": True, "memory_mib": 900, "claims": [[7, None]]}
    (node,) = build(gpus=[card])[0].nodes
    assert node.memory_claimed_mib == 100 + 900
    (node,) = build(gpus=[card | {"claims": [[7, 30], [8, 40]]}])[0].nodes
    assert node.memory_claimed_mib == 100 + 70


def test_a_stop_without_grace_is_no_unknown_grace():
    at_once = PROFILE | {"stop_grace_s": 0.0, "start_deadline_s": 7.0}
    spec = build(profiles=[at_once])[0].models[0].profiles[0].spec
    assert (spec["stop_grace_s"], spec["start_deadline_s"]) == (0.0, 7.0)


@pytest.mark.parametrize(
    ("table", "row", "field"),
    [
        ("nodes", NODE, "state"), ("nodes", NODE, "port_last"), ("nodes", NODE, "alloc_gen"),
        ("gpus", GPU, "healthy"), ("gpus", GPU, "class"), ("gpus", GPU, "problems"),
        ("models", MODEL, "min_replicas"), ("models", MODEL, "source"),
        ("profiles", PROFILE, "engine"), ("profiles", PROFILE, "gpus"),
        ("profiles", PROFILE, "cpu_flags"), ("replicas", REPLICA, "state"),
        ("replicas", REPLICA, "created_at"), ("replicas", REPLICA, "restarts"),
        ("shards", SHARD, "state"), ("shards", SHARD, "rank"), ("shards", SHARD, "node_id"),
    ],
)  # fmt: skip
def test_D10_a_row_with_an_impossible_null_costs_itself_and_is_told(table, row, field):
    key = {"models": "name", "gpus": "uuid", "profiles": "name"}.get(table, "id")
    other = row | {key: "good" if isinstance(row[key], str) else 99}
    if table == "shards":  # of another replica
        other |= {"replica_id": 6}
    more = {"replicas": [REPLICA, REPLICA | {"id": 6}]} if table == "shards" else {}
    whole, none = build(**{table: [row, other], **more})
    assert none == []
    seen, notes = build(**{table: [row | {field: None}, other], **more})
    kind = table.removesuffix("s")
    assert notes[0].startswith(f"{kind} row {{")
    assert "is left out" in notes[0]
    counts = [
        (len(s.nodes), sum(len(n.gpus) for n in s.nodes), len(s.models),
         sum(len(m.profiles) for m in s.models), len(s.replicas))
        for s in (whole, seen)
    ]  # fmt: skip
    assert sum(counts[0]) - sum(counts[1]) in (1, 2)  # a node goes with its card


def test_what_is_asked_is_unknown_without_a_router_or_a_row():
    mute = DEMAND | {"routers": 0, "waiting": None, "in_flight": None, "peak": None}
    assert build(demand=[mute])[0].models[0].asked == Asked(0, 0, 0, 8.0, 16.0, False)
    assert not build(demand=[])[0].models[0].asked.heard


@pytest.mark.parametrize("value", [None])
def test_a_setting_without_a_value_is_the_programs(value):
    assert build(settings=[{"name": "stable", "value": value}])[0].settings == Settings()


@pytest.fixture
def said(fleet, pool):
    """in_flight and last use of replicas by id, as the tick reads them."""

    async def read() -> dict[int, tuple[int | None, bool]]:
        every = (await snapshot.read(pool)).snapshot.replicas
        return {r.id: (r.in_flight, r.last_used_at is not None) for r in every}

    return read


def router(fleet, ago_s: float) -> uuid.UUID:
    """A router that joined and was last heard of so many seconds ago."""
    name = uuid.uuid4()
    fleet.controller.execute(
        "select llmgw_core.controller_join_v1(%s, 'router', 'h', 1, '0')", (name,)
    )
    heard(fleet, name, ago_s)
    return name


def heard(fleet, name: uuid.UUID, ago_s: float) -> None:
    fleet.admin.execute(
        "update llmgw_core.controller set seen_at = clock_timestamp() - make_interval(secs => %s)"
        " where id = %s",
        (ago_s, name),
    )


def uses(fleet, name: uuid.UUID, replica: int, in_flight: int) -> None:
    document = f'[{{"replica_id": {replica}, "in_flight": {in_flight}, "last_used_age_ms": 5}}]'
    fleet.controller.execute("select llmgw_core.router_report_v1(%s, %s::jsonb)", (name, document))


def settled(fleet, ago_s: float) -> None:
    """The replicas' last move was so long ago."""
    fleet.admin.execute(
        "update llmgw_core.replica set state_at = clock_timestamp() - make_interval(secs => %s)",
        (ago_s,),
    )


async def test_without_any_router_nothing_runs(asyncio_loop, fleet, said):
    fleet.model("m")
    replica = fleet.replica("m")
    assert await said() == {replica: (0, False)}
    # A router long gone says nothing about now.
    gone = router(fleet, 0)
    uses(fleet, gone, replica, 4)
    heard(fleet, gone, 60)
    assert await said() == {replica: (0, True)}


async def test_what_runs_is_unknown_until_every_live_router_has_spoken_since_the_move(
    asyncio_loop, fleet, said
):
    fleet.model("m")
    replica = fleet.replica("m")
    settled(fleet, 4)
    one, two = router(fleet, 0), router(fleet, 4)
    uses(fleet, one, replica, 3)
    assert await said() == {replica: (None, True)}  # the other spoke before it can have known
    heard(fleet, two, 0)
    assert await said() == {replica: (3, True)}
    uses(fleet, two, replica, 2)
    assert await said() == {replica: (5, True)}
    settled(fleet, 2)
    assert await said() == {replica: (None, True)}
    # One falls silent: after ten seconds without presence it no longer counts.
    settled(fleet, 60)
    heard(fleet, two, 11)
    assert await said() == {replica: (3, True)}
