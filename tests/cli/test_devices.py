"""What llmgwctl says of devices: checks, cards, ports, domains, fabrics, weights, a node's page."""

from __future__ import annotations

import json
import re

import pytest
import trio

from tests.api.served import view_rows
from tests.fabric.made_fabric import by_rails
from tests.sql.fleet import card, open_fleet, port

SM = "a088c20300009999"
KEY, ID = f"ib:{SM}", f"ib-{SM}"
CLUSTER = "b2c3d4e5-0000-4000-8000-00000000000a"
PATHS = {"0": {"1": "NV18", "mlx5_0": "PIX", "mlx5_10": "SYS"}, "1": {"0": "NV18", "mlx5_0": "SYS"}}
MACHINE = {
    "kernel": "6.8.0",
    "cpu_model": "AMD EPYC 9654",
    "cpus_host": 192,
    "cpus_effective": 64.0,
    "memory_host_mib": 1536 * 1024,
    "memory_effective_mib": 1024 * 1024,
    "warnings": ["no AVX2"],
    "machine": {"sockets": 2, "numa_nodes": 2},
    "nvlink": {"state": "joined", "domain": f"{CLUSTER}.7"},
    "imex": {"state": "READY", "domain_state": "UP", "channels": 1, "owner": "systemd"},
}
LOST = {"code": "xid_79", "kind": "reset", "text": "Xid 79: fell off the bus", "unhealthy": True,
        "evidence": "NVRM: Xid (PCI:0000:41:00): 79"}  # fmt: skip
HOT = {"code": "thermal", "kind": "passing", "text": "slowed down by heat", "unhealthy": False}


@pytest.fixture
def builder(database):
    with open_fleet(database) as opened:
        yield opened


def cards(*findings, **more):
    """Two cards of one machine, wired, the second with these findings."""
    return [
        card(0, paths=PATHS["0"], numa=0, nearest_nic="mlx5_0", nic_path="PIX",
             driver_version="570.1", cuda_version="12.8", detail={"cpu_affinity": "0-95"}, **more),
        card(1, paths=PATHS["1"], numa=1, findings=list(findings)),
    ]  # fmt: skip


@pytest.fixture
def machine(builder):
    """A node of which everything is known."""
    node = builder.node("gpu1", **MACHINE)
    builder.report(node, "gpus", cards(LOST, HOT))
    down = {"state": "DOWN", "phys_state": "Polling", "active": False, "key": None, "sm_guid": None}
    unknown = {"rate_gbps": None, "sm_error": "sminfo is not installed"}
    ports = [
        port("mlx5_0", fabric="compute", key=KEY, sm_guid=SM),
        port("mlx5_1", **down | unknown),
    ]
    builder.report(node, "ports", ports)
    disks = [{"mount": "/", "filesystem": "ext4", "kind": "local", "total_mib": 2048 * 1024,
              "free_mib": 1024 * 1024, "holds_weights": True}]  # fmt: skip
    builder.report(node, "disks", disks)
    checks = [
        {"name": "driver", "result": "pass", "evidence": "570.1"},
        {"name": "imex", "result": "warn", "evidence": "1 channel", "remedy": "Set more channels."},
        {"name": "gpu 1", "result": "fail", "evidence": "Xid 79", "remedy": "Reset the card."},
    ]
    builder.report(node, "checks", checks)
    builder.sync(
        node,
        gpus=[{"uuid": "GPU-0", "memory_used_mib": 1024, "memory_foreign_mib": 0, "power_w": 90.5}],
        load={"cpu_percent": 12.5, "load1": 3, "pressure": {"cpu_some": 1.5, "io_full": 0}},
        ports=[{"hca": "mlx5_0", "port": 1, "tx_bytes": 2**30, "errors": {"symbol_error": 4}}],
    )
    return node


def line_of(text: str, *words: str) -> str:
    """The one line that holds all of these."""
    [found] = [line for line in text.splitlines() if all(word in line for word in words)]
    return found


async def test_nothing_known_says_so(bare):
    for name, said in (
        ("doctor", "No checks have been reported."),
        ("events", "No events."),
        ("nvlink", "No node has multi-node NVLink."),
        ("fabrics", "No fabrics: no node has reported an active InfiniBand or RoCE port."),
        ("weights", "No weights have been reported."),
    ):
        assert await bare.good(name) == said + "\n"
        assert json.loads(await bare.good(name, "--json")) == []


async def test_E16_doctor_tells_failures_first_with_evidence_and_remedy(bare, builder, machine):
    builder.node("cpu1")
    done = await bare("doctor")
    assert done.code == 1
    rows = done.out.splitlines()
    assert rows[0].split() == ["NODE", "CHECK", "RESULT", "EVIDENCE"]
    assert rows[1].split() == ["gpu1", "gpu", "1", "fail", "Xid", "79"]
    assert rows[2].split() == ["gpu1", "imex", "warn", "1", "channel"]
    assert rows[3:5] == ["gpu1 gpu 1: Reset the card.", "gpu1 imex: Set more channels."]
    assert rows[5] == "2 nodes: 3 passed, 1 warn, 1 failed"
    one = await bare("doctor", "gpu1")
    assert one.code == 1
    assert "570.1" in one.out
    assert "last seen" in line_of(one.out, "agent")
    healthy = await bare.good("doctor", "cpu1")
    assert healthy.endswith("1 node: 1 passed, 0 warn, 0 failed\n")
    assert line_of(await bare.good("doctor", "cpu1", "--all"), "last seen")
    assert "570.1" in (await bare("doctor", "--all")).out
    document = (await bare("doctor", "--json")).document
    assert {c["result"] for c in document} == {"pass", "warn", "fail"}
    assert next(c for c in document if c["name"] == "gpu 1")["remedy"] == "Reset the card."
    nobody = await bare("doctor", "nobody")
    assert nobody.code == 1
    assert "no node nobody" in nobody.err


async def test_doctor_of_a_healthy_fleet_is_one_line(bare, builder):
    builder.node("cpu1")
    assert await bare.good("doctor") == "1 node: 1 passed, 0 warn, 0 failed\n"


async def test_E20_marks_overrule_and_are_kept_with_their_reason(bare, builder, machine):
    text = await bare.good("gpu", "mark", "gpu1", "0", "unhealthy", "--reason", "fan is loud")
    assert text.startswith("GPU 0 of node gpu1 is unhealthy (kept out of placement): marked")
    assert text.rstrip().endswith("fan is loud")
    assert "fan is loud (kept out of placement)" in await bare.good("nodes")
    back = await bare.good("gpu", "mark", "gpu1", "GPU-0", "healthy", "--reason", "replaced")
    assert back == "GPU GPU-0 of node gpu1 is healthy.\n"
    mark = ("gpu", "mark", "gpu1", "1", "healthy", "--reason", "tested")
    overruled = (await bare(*mark, "--json")).document
    assert (overruled["healthy"], overruled["index"]) == (True, 1)
    assert LOST["text"] in overruled["problems"]
    page = await bare.good("node", "gpu1")
    assert "ok, but Xid 79" in line_of(page, "ok, but")
    assert (await bare("gpu", "mark", "gpu1", "1", "broken", "--reason", "x")).code == 2
    assert (await bare("gpu", "mark", "gpu1", "1", "healthy")).code == 2
    for words in (("gpu1", "7"), ("nobody", "0")):
        refused = await bare("gpu", "mark", *words, "healthy", "--reason", "x")
        assert refused.code == 1
        assert words[0] in refused.err
    events = await bare.good("events", "--node", "gpu1")
    assert events.splitlines()[0].split() == ["AT", "NODE", "WHAT", "DEVICE", "FROM", "TO"]
    assert "gpu mark" in events


async def test_only_a_card_that_was_taken_out_can_be_forgotten(bare, builder, machine):
    refused = await bare("gpu", "forget", "gpu1", "1")
    assert refused.code == 1
    assert "still seen by its agent" in refused.err
    builder.report(machine, "gpus", cards()[:1])
    assert "missing" in line_of(await bare.good("nodes"), "gpu1 gpu 1")
    done = (await bare("gpu", "forget", "gpu1", "1", "--json")).document
    assert done == {"node": "gpu1", "uuid": "GPU-1", "forgotten": True}
    assert "gpu 1" not in await bare.good("nodes")
    assert "has no gpu 1" in (await bare("gpu", "forget", "gpu1", "1")).err


async def test_events_are_newest_first_and_of_one_node(bare, builder, machine, database):
    builder.node("n2", gpus=1)
    builder.report(machine, "gpus", cards())
    text = await bare.good("events")
    assert " ".join(text.splitlines()[1].split()[2:]) == (
        "gpu1 gpu health GPU-1 unhealthy: thermal, xid_79 healthy"
    )
    with database.connect(database.read_url) as db:
        assert json.loads(await bare.good("events", "--json")) == view_rows(
            db, "node_events", "id desc"
        )
    assert {e["node"] for e in json.loads(await bare.good("events", "--node", "n2", "--json"))} == {
        "n2"
    }
    assert len(json.loads(await bare.good("events", "--limit", "2", "--json"))) == 2
    builder.admin.execute("update llmgw_core.node_event set at = at - interval '2 h'")
    assert await bare.good("events", "--since", "1h") == "No events.\n"
    assert (await bare("events", "--since", "soon")).code == 2


async def test_nvlink_tells_what_keeps_a_tray_out(bare, builder, machine):
    waits = {"state": "WAITING_FOR_PEERS", "channels": 0}
    builder.node("gpu2", nvlink={"state": "in_progress", "reason": "joining"}, imex=waits)
    text = (await bare.good("nvlink")).splitlines()
    assert text[0].split() == [
        "DOMAIN",
        "NODE",
        "GPUS",
        "STATE",
        "IMEX",
        "CHANNELS",
        "KEPT",
        "OUT",
        "BY",
    ]
    assert text[1].split()[:4] == ["-", "gpu2", "0", "in_progress"]
    assert text[1].endswith("joining; IMEX is WAITING_FOR_PEERS; no IMEX channel device")
    assert text[2].split() == [f"{CLUSTER}.7", "gpu1", "2", "joined", "READY", "1", "-"]
    usable = {n["node"]: n["usable"] for n in json.loads(await bare.good("nvlink", "--json"))}
    assert usable == {"gpu1": True, "gpu2": False}


async def test_the_page_of_a_node_has_cards_matrix_ports_and_disks(bare, machine):
    text = await bare.good("node", "gpu1")
    assert "processor: AMD EPYC 9654, x86_64, 192 CPUs, 64 usable, 2 sockets, 2 NUMA nodes" in text
    assert "memory: 1024 GiB usable of 1536 GiB" in text
    assert "load: CPUs 12.5 % busy, average 3 over a minute\n" in text
    assert "pressure: cpu some 1.5 %" in text
    assert "driver: 570.1, CUDA 12.8" in text
    assert f"nvlink: joined, domain {CLUSTER}.7" in text
    assert "imex: READY, domain UP, 1 channels, owner systemd" in text
    assert "warning: no AVX2" in text
    first = line_of(text, "81920 MiB", "90.5 W")
    assert first.split()[-6:] == ["W", "0", "mlx5_0", "(PIX)", "-", "ok"]
    second = line_of(text, "81920 MiB", "Xid 79: fell off the bus, slowed down by heat")
    assert "gpu 1 xid_79 (reset): NVRM: Xid (PCI:0000:41:00): 79\n" in text
    assert second.split()[:6] == ["1", "H100", "81920", "MiB", "-", "-"]
    heading = line_of(text, "GPU0", "CPUS")
    assert heading.split() == ["GPU0", "GPU1", "mlx5_0", "mlx5_10", "CPUS", "NUMA"]
    rows = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    assert rows[1:] == [
        ["GPU0", "X", "NV18", "PIX", "SYS", "0-95", "0"],
        ["GPU1", "NV18", "X", "SYS", "-", "-", "1"],
    ]
    on = line_of(text, "mlx5_0/1")
    assert " ".join(on.split()) == (
        f"mlx5_0/1 InfiniBand ACTIVE, LinkUp 400 Gb/s compute SM {SM} (LID 1) 1.0 GiB/s - "
        "symbol_error 4"
    )
    off = line_of(text, "mlx5_1/1")
    assert "DOWN, Polling" in off
    assert "sminfo is not installed" in off
    assert line_of(text, "ext4").split() == [
        "/", "ext4", "local", "1.0", "TiB", "2.0", "TiB", "yes",
    ]  # fmt: skip
    assert not any(line.endswith(" ") for line in text.splitlines())
    document = json.loads(await bare.good("node", "gpu1", "--json"))
    assert document["gpus"][1]["findings"][0]["code"] == "xid_79"
    assert document["gpus"][0]["paths"]["1"] == "NV18"
    assert document["imex_detail"]["owner"] == "systemd"


async def test_the_page_of_a_slice_and_of_a_lost_card(bare, builder):
    node = builder.node("mig")
    whole = card(0, partitioned=True)
    part = card(0, uuid="MIG-1", parent="GPU-0", mig_profile="1g.10gb", memory_mib=9984)
    lost = {"uuid": "PCI-0000:41:00.0", "pci_bus_id": "0000:41:00.0", "findings": [LOST]}
    builder.report(node, "gpus", [whole, part, lost])
    text = await bare.good("node", "mig")
    assert line_of(text, "partitioned").split()[0] == "0"
    assert line_of(text, "9984 MiB").split()[0] == "0:1g.10gb"
    assert line_of(text, "unknown", "Xid 79").split()[0] == "?"
    assert "mig gpu PCI-0000:41:00.0: Xid 79: fell off the bus (kept out of placement)" in text
    assert "GPU0" not in text  # nobody knows any path


async def test_E20_a_missing_card_is_on_the_page_but_not_in_the_matrix(bare, builder):
    node = builder.node("n1")
    wired = [card(i, paths={str(j): "NV18" for j in range(3) if j != i}) for i in range(3)]
    builder.report(node, "gpus", wired)
    left = [card(0, paths={"1": "NV18"}), card(1, uuid="GPU-2", paths={"0": "NV18"})]
    builder.report(node, "gpus", left)  # the driver counts anew
    text = await bare.good("node", "n1")
    assert len([line for line in text.splitlines() if line.startswith("1 ")]) == 2
    assert line_of(text, "GPU0", "CPUS").split() == ["GPU0", "GPU1", "CPUS", "NUMA"]


async def test_a_node_that_said_nothing_has_a_page(bare, builder):
    builder.enrol("new")
    text = await bare.good("node", "new")
    assert text.splitlines()[1].split()[:2] == ["new", "unreachable"]
    assert "why: its agent has not been seen yet" in text
    assert len(text.splitlines()) == 3


async def test_weights_tell_what_is_whole_and_where_it_lies(bare, builder):
    node = builder.node("n1")
    builder.model("m", source="hf:org/m")
    weights = [
        {"source": "hf:org/m", "path": "/w/m", "bytes": 3 * 2**30, "complete": True,
         "format": "safetensors", "name": "org/m"},
        {"source": "file:/w/x.gguf", "path": "/w/x.gguf", "complete": False, "format": "gguf",
         "reason": "part 2 of 3 is not there"},
        {"path": "/nfs/big", "name": "big", "complete": True, "shared": True, "filer": "filer:/w",
         "facts": {"layers": 80}},
    ]  # fmt: skip
    builder.report(node, "weights", weights)
    text = await bare.good("weights")
    assert text.splitlines()[0].split() == [
        "NODE", "NAME", "FORMAT", "SIZE", "COMPLETE", "IN", "CATALOG", "WHERE", "PATH",
    ]  # fmt: skip
    assert line_of(text, "org/m").split() == [
        "n1", "hf:org/m", "safetensors", "3.0", "GiB", "yes", "yes", "local", "/w/m",
    ]  # fmt: skip
    assert "no: part 2 of 3 is not there" in line_of(text, "gguf")
    assert line_of(text, "/nfs/big").split() == [
        "n1", "big", "-", "-", "yes", "no", "shared", "filer:/w", "/nfs/big",
    ]  # fmt: skip
    rows = json.loads(await bare.good("weights", "--json"))
    assert next(w for w in rows if w["path"] == "/nfs/big")["facts"] == {"layers": 80}


async def test_fabrics_tell_names_against_what_is_there(bare, builder, machine, database):
    other = builder.node("n2")
    roce = {"link_layer": "Ethernet", "key": "roce:10.1.0.0/16", "rate_gbps": 25}
    ports = [port("mlx5_0", key="ib:02", sm_guid="02", fabric="compute"), port("mlx5_1", **roce)]
    builder.report(other, "ports", ports)
    text = (await bare.good("fabrics")).splitlines()
    assert text[0].split() == [
        "FABRIC", "KIND", "NODES", "PORTS", "RATE", "DECLARED", "SCANNED", "PROBLEMS",
    ]  # fmt: skip
    assert text[1].split() == [
        "ib-02", "InfiniBand", "1", "1/1", "active", "400", "Gb/s", "compute", "never", "1",
    ]  # fmt: skip
    assert text[3].split() == [
        "roce-10.1.0.0_16", "RoCE", "1", "1/1", "active", "25", "Gb/s", "-", "-", "-",
    ]  # fmt: skip
    told = f"the name compute is declared on 2 physical fabrics: ib:02, {KEY}"
    assert text[4:] == [f"ib-02: {told}", f"{ID}: {told}"]
    with database.connect(database.read_url) as db:
        assert json.loads(await bare.good("fabrics", "--json")) == view_rows(db, "fabrics", "key")


def cabled(builder, made):
    """A node on the fabric, `n1` for node1."""
    node = builder.node("n1")
    guids = {"node_guid": made.guid("node1 mlx5_0"), "port_guid": made.port_guid("node1 mlx5_0")}
    builder.report(node, "ports", [port(key=KEY, sm_guid=SM, fabric="compute", **guids)])
    return node


async def answering(builder, node, text, error):
    """The node's agent: answers the first scan that it is asked for."""
    while True:
        for ask in builder.sync(node)["asks"]:
            builder.agent.execute(
                "select agent.report_scan(%s, %s, %s, 2500, %s)",
                (node.token, ask["id"], text, error),
            )
            return
        await trio.sleep(0.05)


@pytest.mark.slow
async def test_topology_before_and_after_a_scan(bare, builder, nursery):
    made = by_rails(2, 1, 1)
    node = cabled(builder, made)
    assert await bare.good("topology", ID) == (
        f"fabric: compute ({KEY})\nsubnet manager: SM {SM} (LID 1)\nports of agents: 1, 1 active\n"
        f"scanned: never; llmgwctl topology {ID} --scan maps it\n"
    )
    nursery.start_soon(answering, builder, node, made.text(), None)
    text = await bare.good("topology", ID, "--scan")
    assert re.search(r"scanned: [0-9]+s ago by node n1 in 2\.5 s\n", text)
    assert "problem: 1 of 2 hosts with no agent that reported their GUIDs" in text
    assert "\n\n2 hosts (1 with an agent), 2 ports; 2 switches (1 leaf, 1 on level 2)" in text
    assert line_of(text, "leaf0").split() == ["-", "leaf0", "2", "400", "1", "n1", "node2"]
    document = json.loads(await bare.good("topology", KEY, "--json"))
    assert [host["name"] for host in document["map"]["hosts"]] == ["n1", "node2"]
    assert list(document["live"]) == [made.port_guid("node1 mlx5_0")]
    listed = line_of(await bare.good("fabrics"), ID)
    assert "20" in listed
    assert "never" not in listed
    # A scan that fails says why, and the map of before is still there.
    nursery.start_soon(answering, builder, node, "", "ibnetdiscover: not permitted: run as root")
    failed = await bare("topology", ID, "--scan", "--json")
    assert failed.code == 1
    assert "by node n1 failed: ibnetdiscover: not permitted" in failed.document["error"]
    text = await bare.good("topology", ID)
    assert re.search(r"scanned: [0-9]+s ago\n", text)
    assert "node n1: ibnetdiscover: not permitted: run as root" in line_of(text, "scan error at 20")
    assert "leaf0" in text
    text = await bare.good("fabrics")
    assert "failed 20" in line_of(text, "InfiniBand")
    assert f"{ID}: the latest scan failed: ibnetdiscover: not permitted: run as root" in text


@pytest.mark.slow
async def test_a_scan_that_does_not_come_in_time_is_a_timeout(bare, builder):
    cabled(builder, by_rails(1, 1, 1))
    late = await bare("topology", ID, "--scan", "--timeout", "1s")
    assert late.code == 124
    assert "the scan goes on" in late.err
    assert "under way" in await bare.good("fabrics")
    assert "scan: under way on node n1" in await bare.good("topology", ID)


async def test_what_has_no_map_is_refused_with_the_reason(bare, builder):
    unknown = await bare("topology", "nope")
    assert unknown.code == 1
    assert "no fabric nope: llmgwctl fabrics" in unknown.err
    node = builder.node("n1")
    builder.report(node, "ports", [port(link_layer="Ethernet", key="roce:10.1.0.0/16")])
    for name in ("roce-10.1.0.0_16", "roce:10.1.0.0/16"):
        assert "ports of agents: 1, 1 active\n" in await bare.good("topology", name)
        refused = await bare("topology", name, "--scan")
        assert refused.code == 1
        assert "only maps InfiniBand" in refused.err
