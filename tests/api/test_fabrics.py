"""Fabrics: the same rows as psql, the map of a scan, who is asked for a new one."""

from __future__ import annotations

import pytest
import trio

from controller.api import device_views as seen
from controller.api import maps, topology
from controller.fabric.model import HostPort
from tests.api.served import view_rows
from tests.fabric.made_fabric import Made, by_rails
from tests.sql.fleet import open_fleet, port

SM = "a088c20300009999"
KEY = f"ib:{SM}"
ID = f"ib-{SM}"


@pytest.fixture
def builder(database):
    with open_fleet(database) as opened:
        yield opened


def described(made: Made, text: str) -> Made:
    """The same fabric whose adapters all have one description: no name tells a host."""
    made.devices = {
        name: (letter, own, text if letter == "H" else description)
        for name, (letter, own, description) in made.devices.items()
    }
    return made


def hca_port(made: Made, name: str, **more):
    """What the agent of an adapter's host reports of it."""
    guids = {"node_guid": made.guid(name), "port_guid": made.port_guid(name)}
    follows = {"key": KEY, "sm_guid": SM, "sm_lid": 1, "fabric": "compute"}
    return port(name.split()[1], **guids, **follows, **more)


def cable(builder, made: Made, hosts: int = 4, **more):
    """Nodes n1 ... whose ports are those of node1 ... of the made fabric."""
    found = []
    for h in range(1, hosts + 1):
        node = builder.node(f"n{h}")
        names = [name for name in made.devices if name.startswith(f"node{h} ")]
        builder.report(node, "ports", [hca_port(made, name, **more) for name in names])
        found.append(node)
    return found


def asks(builder, node):
    """The fabric scans that a node is asked for."""
    return [ask for ask in builder.sync(node)["asks"] if ask["kind"] == "scan"]


def answered(builder, node, ask, text, error=None):
    """The agent's answer."""
    builder.agent.execute(
        "select agent.report_scan(%s, %s, %s, %s, %s)", (node.token, ask["id"], text, 1500, error)
    )


async def scanned(api, builder, nodes, text, error=None):
    """Asks for a scan and answers as the agent that was chosen."""
    started = await api.good("POST", f"/fabrics/{ID}/scan", {})
    seen.ScanStarted.model_validate(started)
    node = next(node for node in nodes if node.name == started["scanner"])
    [ask] = asks(builder, node)
    answered(builder, node, ask, text, error)
    return node


async def test_lists_show_what_psql_shows_page_after_page(api, builder, database):
    first, second = builder.node("n1"), builder.node("n2")
    roce = {"link_layer": "Ethernet", "key": "roce:10.1.0.0/16", "network": "10.1.0.0/16"}
    builder.report(first, "ports", [port("mlx5_0", fabric="a"), port("mlx5_1", **roce)])
    builder.report(second, "ports", [port("mlx5_0", key="ib:02", sm_guid="02", fabric="a")])
    rows = await api.good("GET", "/fabrics")
    with database.connect(database.read_url) as db:
        assert rows == view_rows(db, "fabrics", "key")
    assert [row["id"] for row in rows] == ["ib-01", "ib-02", "roce-10.1.0.0_16"]
    for row in rows:
        seen.FabricView.model_validate(row)
    assert "the name a is declared on 2 physical fabrics: ib:01, ib:02" in rows[0]["problems"]
    page = await api("GET", "/fabrics?limit=2")
    cursor = page.headers["x-llmgw-next-cursor"]
    rest = await api.good("GET", f"/fabrics?limit=2&cursor={cursor}")
    assert page.json() + rest == rows


async def test_a_fabric_without_a_scan_answers_with_its_live_ports(api, builder):
    made = by_rails(2, 1)
    node, _ = cable(builder, made, 2, errors={"symbol_error": 3})
    told = [{"hca": "mlx5_0", "port": 1, "tx_bytes": 1000, "rx_bytes": 10}]
    builder.sync(node, ports=told)
    found = await api.good("GET", f"/fabrics/{ID}/topology")
    seen.TopologyView.model_validate(found)
    assert found["live"][made.port_guid("node1 mlx5_0")] == {
        "node": "n1", "hca": "mlx5_0", "port": 1, "state": "ACTIVE", "phys_state": "LinkUp",
        "gbps": 400.0, "tx_bps": 8000, "rx_bps": 80, "errors": {"symbol_error": 3},
    }  # fmt: skip
    # Nobody measured the traffic of the other, nor scanned.
    assert {"tx_bps", "rx_bps"}.isdisjoint(found["live"][made.port_guid("node2 mlx5_0")])
    assert {"map", "map_age_seconds", "scanned_at", "error", "problems"}.isdisjoint(found)
    assert (found["sm"], found["sms"]) == (f"SM {SM} (LID 1)", [SM])
    assert (found["declared"], found["label"], found["scanning"]) == (["compute"], "compute", False)
    assert await api.good("GET", f"/fabrics/{KEY}/topology") == found


async def test_E11_a_scan_is_asked_of_one_agent_and_its_answer_is_the_map(api, builder):
    # Every adapter has the default description: only GUIDs tell whose it is.
    made = described(by_rails(4, 2), "MT4129 ConnectX7 Mellanox Technologies")
    nodes = cable(builder, made)
    started = await api.good("POST", f"/fabrics/{ID}/scan", {})
    again = await api.good("POST", f"/fabrics/{KEY}/scan", {})
    assert (again["scanner"], again["under_way"]) == (started["scanner"], True)
    asked = {node.name: asks(builder, node) for node in nodes}
    assert [name for name, of in asked.items() if of] == [started["scanner"]]
    assert (await api.good("GET", f"/fabrics/{ID}/topology"))["scanning"] is True
    node = next(node for node in nodes if node.name == started["scanner"])
    answered(builder, node, asked[node.name][0], made.text())
    found = await api.good("GET", f"/fabrics/{ID}/topology")
    seen.TopologyView.model_validate(found)
    assert [host["name"] for host in found["map"]["hosts"]] == ["n1", "n2", "n3", "n4"]
    assert all(host["matched"] for host in found["map"]["hosts"])
    assert found["map"]["rails"] == 2
    assert [p["hca"] for p in found["map"]["hosts"][0]["ports"]] == ["mlx5_0", "mlx5_1"]
    assert (found["scanning"], found["scanned_by"], found["took_ms"]) == (False, node.name, 1500)
    assert 0 <= found["map_age_seconds"] < 60
    assert len(found["live"]) == 8
    assert not [p for p in found.get("problems", []) if "description" not in p]


async def test_a_failed_scan_keeps_the_map_of_the_one_before(api, builder):
    made = by_rails(4, 2)
    nodes = cable(builder, made)
    await scanned(api, builder, nodes, made.text())
    first = await api.good("GET", f"/fabrics/{ID}/topology")
    refused = await scanned(api, builder, nodes, "", "ibnetdiscover: needs root")
    found = await api.good("GET", f"/fabrics/{ID}/topology")
    assert found["map"] == first["map"]
    assert (found["error"], found["scanned_by"]) == ("ibnetdiscover: needs root", refused.name)
    # Who failed last is asked last.
    assert (await api.good("POST", f"/fabrics/{ID}/scan", {}))["scanner"] != refused.name


async def test_a_text_without_a_device_is_no_map_and_says_so(api, builder):
    nodes = cable(builder, by_rails(1, 1), 1)
    await scanned(api, builder, nodes, "ibwarn: can't open UMAD port\n")
    found = await api.good("GET", f"/fabrics/{ID}/topology")
    assert "map" not in found
    assert any("no device in the text" in problem for problem in found["problems"])


async def test_a_port_that_went_down_is_told_against_the_map(api, builder):
    made = by_rails(4, 2)
    nodes = cable(builder, made)
    await scanned(api, builder, nodes, made.text())
    assert "problems" not in await api.good("GET", f"/fabrics/{ID}/topology")
    down = {"state": "DOWN", "phys_state": "Polling", "active": False, "key": None, "sm_guid": None}
    names = ("node2 mlx5_0", "node2 mlx5_1")
    changed = [hca_port(made, name) | (down if name == names[1] else {}) for name in names]
    builder.report(nodes[1], "ports", changed)
    found = await api.good("GET", f"/fabrics/{ID}/topology")
    assert found["live"][made.port_guid(names[1])]["state"] == "DOWN"
    [problem] = found["problems"]
    assert "n2 mlx5_1 (DOWN, Polling), in the scan at leaf1" in problem
    # A machine that is off says nothing: its last words are not held against the map.
    builder.silence(nodes[1], 3600)
    found = await api.good("GET", f"/fabrics/{ID}/topology")
    assert "problems" not in found
    assert found["live"][made.port_guid(names[1])]["state"] == "DOWN"


async def test_a_host_that_comes_later_gets_its_name_without_a_new_scan(api, builder):
    made = by_rails(3, 1)
    nodes = cable(builder, made, 2)
    await scanned(api, builder, nodes, made.text())
    before = await api.good("GET", f"/fabrics/{ID}/topology")
    assert [h["name"] for h in before["map"]["hosts"]] == ["n1", "n2", "node3"]
    late = builder.node("late")
    builder.report(late, "ports", [hca_port(made, "node3 mlx5_0")])
    after = await api.good("GET", f"/fabrics/{ID}/topology")
    assert [h["name"] for h in after["map"]["hosts"]] == ["late", "n1", "n2"]


async def test_another_subnet_manager_within_a_day_is_listed(api, builder):
    made = by_rails(1, 1)
    [node] = cable(builder, made, 1)
    builder.report(node, "ports", [hca_port(made, "node1 mlx5_0") | {"sm_guid": "b" * 16}])
    builder.report(node, "ports", [hca_port(made, "node1 mlx5_0")])
    found = await api.good("GET", f"/fabrics/{ID}/topology")
    assert found["sms"] == [SM, "b" * 16]
    builder.admin.execute("update llmgw_core.node_event set at = at - interval '25 h'")
    assert (await api.good("GET", f"/fabrics/{ID}/topology"))["sms"] == [SM]


async def test_what_cannot_be_scanned_is_refused_with_the_reason(api, builder):
    for verb, path, body in (
        ("GET", "/fabrics/nope/topology", None),
        ("POST", "/fabrics/nope/scan", {}),
    ):
        assert "llmgwctl fabrics" in await api.bad(404, verb, path, body)
    node = builder.node("n1")
    guid = "0a1b2c3d4e5f6071"
    roce = {"link_layer": "Ethernet", "key": "roce:10.1.0.0/16", "sm_guid": None, "sm_lid": None}
    ports = [port("mlx5_0", **roce, port_guid=guid), port("mlx5_1", **roce), port("mlx5_2")]
    builder.report(node, "ports", ports)
    for name in ("roce-10.1.0.0_16", "roce:10.1.0.0/16", "roce:10.1.0.0%2F16"):
        said = await api.bad(409, "POST", f"/fabrics/{name}/scan", {})
        assert "only maps InfiniBand" in said
        found = await api.good("GET", f"/fabrics/{name}/topology")
        seen.TopologyView.model_validate(found)
        assert set(found["live"]) == {guid, "n1/mlx5_1/1"}
        assert {"sm", "sms", "map"}.isdisjoint(found)
    builder.silence(node, 3600)
    assert "no live node" in await api.bad(409, "POST", "/fabrics/ib-01/scan", {})


async def test_a_scan_that_nobody_answers_fails_in_time(api, builder):
    cable(builder, by_rails(2, 1), 2)
    first = await api.good("POST", f"/fabrics/{ID}/scan", {})
    builder.admin.execute("update llmgw_core.fabric_scan set asked_at = asked_at - interval '1 h'")
    second = await api.good("POST", f"/fabrics/{ID}/scan", {})
    assert {first["scanner"], second["scanner"]} == {"n1", "n2"}


def row(name, **more):
    guids = {"port_guid": None, "node_guid": None}
    return {"node": name, "hca": "mlx5_0", "port": 1, "key": None, **guids, **more}


def test_hosts_are_named_by_both_guids_and_the_first_row_wins():
    found = topology.hosts([
        row("a", port_guid="1" * 16, node_guid="2" * 16),
        row("b", port_guid="1" * 16, node_guid="0" * 16),
        row("c", port_guid="2" * 16),
    ])  # fmt: skip
    assert found == {
        "1" * 16: HostPort("a", "mlx5_0", 1),
        "2" * 16: HostPort("c", "mlx5_0", 1),
    }


async def test_a_map_is_made_once_for_all_who_ask_and_few_are_kept():
    kept, read = maps.Maps(), []
    made = by_rails(2, 1).text()

    async def ask(key, version, known=None):
        async def text():
            read.append((key, version))
            await trio.lowlevel.checkpoint()
            return made, version

        return await kept.of(key, version, known or {}, text)

    found = []

    async def keep():
        found.append(await ask("k", "1"))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(keep)
    assert len(found) == 5
    assert len({id(one) for one in found}) == 1
    assert read == [("k", "1")]
    await ask("k", "2")
    known = {by_rails(2, 1).port_guid("node1 mlx5_0"): HostPort("n1", "mlx5_0", 1)}
    named = await ask("k", "2", known)
    assert named.document["hosts"][0]["name"] == "n1"
    assert read == [("k", "1"), ("k", "2"), ("k", "2")]
    for number in range(maps.MOST - 1):
        await ask(f"other{number}", "1")
    assert await ask("k", "2", known) is named  # and so it is the one asked for last
    await ask("one more", "1")
    assert await ask("k", "2", known) is named
    await ask("other0", "1")
    assert read.count(("other0", "1")) == 2


async def test_a_text_that_is_gone_is_no_map():
    async def nothing():
        return None

    assert await maps.Maps().of("k", "1", {}, nothing) is None
