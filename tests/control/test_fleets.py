"""Fleets of YAML files, placed by a real tick in a real database: racks, fabrics, launch lines."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.assignment import parse
from agent.engines import Place, engine_of
from tests.agent.test_engines import program
from tests.control.duties import duty
from tests.fleets.told import fleet_of, report
from tests.sql.fleet import open_fleet

GANG = {"engine": "vllm", "gpus": 4, "shards": 4, "fabric": "nvlink-domain"}
PLACED = """
    select s.rank, s.node_id as node, s.port, s.master_port, s.spec->'gang' as gang,
        n.mgmt_addr, n.nvlink_domain, n.labels->>'rack' as rack,
        (select count(*) from llmgw_core.gpu_claim c where c.shard_id = s.id) as cards
    from llmgw_core.shard s join llmgw_core.node n on n.id = s.node_id
    join llmgw_core.replica r on r.id = s.replica_id where r.model = %s order by s.replica_id, rank
"""
REFUSED = "select node, code, have from llmgw.rejections where model = %s order by node, code"


@asynccontextmanager
async def ticking(database, fleet):
    """The fleet's rows, its nodes, and a way to tick until nothing is left to do."""
    with open_fleet(database) as rows:
        nodes = report(rows, fleet)
        async with duty(database.settings()) as leader:

            async def settle():
                while await leader.tick():
                    pass

            yield rows, nodes, settle


@pytest.fixture
async def rack(database, asyncio_loop):
    async with ticking(database, fleet_of("nvl72")) as found:
        yield found


@pytest.fixture
async def mixed(database, asyncio_loop):
    async with ticking(database, fleet_of("mixed")) as found:
        yield found


async def test_a_gang_of_4_trays_lands_in_one_domain_and_its_twin_in_the_other(rack):
    rows, _, settle = rack
    rows.model("m", GANG, min_replicas=2)
    await settle()
    found = rows.rows(PLACED, "m")
    assert [s["rank"] for s in found] == [0, 1, 2, 3] * 2
    assert [s["cards"] for s in found] == [4] * 8
    assert len({s["node"] for s in found}) == 8
    domains = [{s["nvlink_domain"] for s in found[at : at + 4]} for at in (0, 4)]
    assert [len(one) for one in domains] == [1, 1]
    assert domains[0] != domains[1], "a rack that fails takes one replica"
    for head, *others in (found[:4], found[4:]):
        told = {"head": head["mgmt_addr"], "master_port": head["master_port"], "nodes": 4}
        assert all(s["gang"] == told | {"transport": "nvlink", "hcas": []} for s in (head, *others))
        assert [s["master_port"] for s in others] == [None] * 3
        assert head["master_port"] != head["port"]


@pytest.mark.parametrize(
    ("engine", "more", "words"),
    [
        ("vllm", {}, "--nnodes 4 --node-rank 2 --master-addr {head} --master-port {meet} "
                     "--tensor-parallel-size 16"),
        ("sglang", {}, "--nnodes 4 --node-rank 2 --dist-init-addr {head}:{meet} --tp-size 16"),
        ("command", {"command": ["torchrun", "{rank}/{nodes}", "{head}:{master_port}"]},
         "2/4 {head}:{meet}"),
    ],
)  # fmt: skip
async def test_from_the_racks_file_to_the_third_trays_command_line(
    rack, tmp_path, engine, more, words
):
    rows, nodes, settle = rack
    for node in nodes.values():
        rows.report(node, "engines", [{"engine": engine, "version": "1"}])
    rows.model("m", GANG | {"engine": engine} | more, source="file:/w")
    await settle()
    head, _, third, _ = rows.rows(PLACED, "m")
    (document,) = rows.sync(nodes[third["node"]], have_gen=-1)["assignments"]
    assigned = parse(document, third["mgmt_addr"])
    program(tmp_path, {"vllm": "vllm", "sglang": "python3", "command": "torchrun"}[engine])
    launch = engine_of(engine).launch(assigned, Place(Path("/w"), search_path=str(tmp_path)))
    line = " ".join(launch.argv)
    assert words.format(head=head["mgmt_addr"], meet=head["master_port"]) in line
    assert launch.env["NCCL_MNNVL_ENABLE"] == "1"
    assert "NCCL_IB_HCA" not in launch.env
    assert launch.env["GLOO_SOCKET_IFNAME"] == "lo", "the interface of the management address"
    assert len(assigned.gpus) == 4


async def test_D13_a_whole_rack_but_one_tray_is_no_gang(mixed):
    rows, _, settle = mixed
    rows.model("six", GANG | {"shards": 6})
    await settle()
    assert rows.rows(PLACED, "six") == []
    told = {(r["node"], r["code"]): r["have"] for r in rows.rows(REFUSED, "six")}
    why = "cards 0, 1 in 6b1e0000-0000-4000-8000-000000000000.0, but cards 2, 3: joining the NVLink"
    assert told["tray-2", "nvlink_not_joined"].startswith(why)
    assert told["tray-0", "gang_too_small"].startswith("5 in NVLink domain 6b1e0000")
    assert {node for node, _ in told} == set(mixed[1]), "every node has its reason"
    rows.model("five", GANG | {"shards": 5})
    await settle()
    names = {s["node"] for s in rows.rows(PLACED, "five")}
    assert names == {f"tray-{i}" for i in (0, 1, 3, 4, 5)}


async def test_each_fabric_holds_its_own_gangs_with_its_ports(mixed):
    rows, _, settle = mixed
    two = {"engine": "vllm", "shards": 2}
    rows.model("ib", two | {"gpus": 8, "gpu_class": "H100"}, min_replicas=3)
    rows.model("roce", two | {"gpus": 2, "gpu_class": "L40S"})
    rows.model("wide", two | {"gpus": 8, "gpu_class": "H100", "shards": 5})
    await settle()
    found = rows.rows(PLACED, "ib")
    pairs = [{s["node"][:3] for s in found[at : at + 2]} for at in (0, 2, 4)]
    assert sorted(map(sorted, pairs)) == [["hgx"], ["hgx"], ["old"]], "never across two fabrics"
    assert {s["gang"]["transport"] for s in found} == {"infiniband"}
    assert found[0]["gang"]["hcas"] == [f"mlx5_{i}:1" for i in range(8)]
    found = rows.rows(PLACED, "roce")
    assert {s["node"][:4] for s in found} == {"edge"}
    assert (found[0]["gang"]["transport"], found[1]["gang"]["hcas"]) == (
        "roce", ["mlx5_0:1", "mlx5_1:1"],
    )  # fmt: skip
    codes = {(r["node"], r["code"]) for r in rows.rows(REFUSED, "wide")}
    assert {("hgx-0", "gang_too_small"), ("old-0", "gang_too_small")} <= codes
    assert ("cpu-0", "fabric_unknown") in codes


async def test_replicas_go_to_other_zones_and_work_without_cards_to_nodes_without(mixed):
    rows, _, settle = mixed
    rows.model("cards", {"engine": "vllm", "gpus": 1, "gpu_class": "H100"}, min_replicas=2)
    rows.model("cpu", {"engine": "vllm", "cpus": 1.0})
    await settle()
    assert {s["node"][:3] for s in rows.rows(PLACED, "cards")} == {"hgx", "old"}
    assert [s["node"][:3] for s in rows.rows(PLACED, "cpu")] == ["cpu"]


async def test_E17_two_owners_of_imex_keep_a_tray_out_of_gangs_only(database, asyncio_loop):
    fleet = fleet_of("nvl72", count=4, imex_twice=[1])
    async with ticking(database, fleet) as (rows, _, settle):
        rows.model("m", GANG)
        await settle()
        assert rows.rows(PLACED, "m") == []
        told = {(r["node"], r["code"]): r["have"] for r in rows.rows(REFUSED, "m")}
        assert told["tray-01", "imex_not_ready"] == (
            "IMEX has 2 owners that fight over it: systemd nvidia-imex.service and process 4711 "
            "(nvidia-imex), started by the kubelet; keep one, disable "
            "`systemctl disable --now nvidia-imex.service` or the ComputeDomain"
        )
        why = rows.value("select why_not from llmgw.nvlink where not usable")
        assert why == told["tray-01", "imex_not_ready"], "the same words on every page"
        rows.model("alone", {"engine": "vllm", "gpus": 4}, min_replicas=4)
        await settle()
        assert len({s["node"] for s in rows.rows(PLACED, "alone")}) == 4
