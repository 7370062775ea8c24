"""Ports in sysfs: real trees of three machines, small hand-made ones, odd and broken ones."""

from __future__ import annotations

import shutil
import tarfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.probes import ib
from agent.probes.ib import IbPort
from agent.probes.root import Root

if TYPE_CHECKING:
    from pathlib import Path

CLASS = "/sys/class/infiniband"
IB_PORT = {
    "link_layer": "InfiniBand\n",
    "state": "4: ACTIVE\n",
    "phys_state": "5: LinkUp\n",
    "rate": "400 Gb/sec (4X NDR)\n",
    "lid": "0x33bf\n",
    "sm_lid": "0x1\n",
    "gids/0": "fe80:0000:0000:0000:a088:c203:00e3:142a\n",
}
ROCE_PORT = {
    **IB_PORT,
    "link_layer": "Ethernet\n",
    "lid": "0x0\n",
    "sm_lid": "0x0\n",
    "gids/0": "fe80:0000:0000:0000:a288:c2ff:fee3:142a\n",
    "gid_attrs/ndevs/0": "ens1f0np0\n",
    "gid_attrs/types/0": "IB/RoCE v1\n",
}


def card(name: str, *ports: dict[str, str], **files: str) -> dict[str, str]:
    """Files of a card below a prefix: of the card itself, and of its ports 1, 2, ..."""
    tree = {f"{CLASS}/{name}/{path.replace('__', '/')}": text for path, text in files.items()}
    for number, port in enumerate(ports, 1):
        tree |= {f"{CLASS}/{name}/ports/{number}/{path}": text for path, text in port.items()}
    return tree


def unpack(archive: Path, to: Path) -> Root:
    """A `ttar` archive as a machine; a last line that ends in EOF has no newline."""
    path, left = None, 0
    for line in archive.read_text().splitlines():
        if left and path is not None:
            with path.open("a") as file:
                file.write(line.removesuffix("EOF") if line.endswith("EOF") else f"{line}\n")
            left -= 1
        elif line.startswith("Path: "):
            path = to / line.removeprefix("Path: fixtures/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        elif line.startswith("Lines: "):
            left = int(line.removeprefix("Lines: "))
    return Root(prefix=to)


def by_name(ports: tuple[IbPort, ...]) -> dict[str, IbPort]:
    return {f"{port.hca}/{port.port}": port for port in ports}


def test_an_infiniband_port(machine):
    files = card(
        "mlx5_0",
        IB_PORT,
        board_id="MT_0000000838\n",
        fw_ver="28.41.1000\n",
        node_guid="a088:c203:00e3:142b\n",
        device__numa_node="1\n",
        device__uevent="DRIVER=mlx5_core\nPCI_SLOT_NAME=0000:1A:00.0\n",
        device__net__ib0__dev_port="0\n",
        device__net__ib0__x="",
    )
    assert ib.read_ports(machine(files), {"mlx5_*": "rail-a"}) == (
        IbPort(
            hca="mlx5_0",
            port=1,
            link_layer="InfiniBand",
            state="ACTIVE",
            phys_state="LinkUp",
            rate_gbps=400.0,
            node_guid="a088c20300e3142b",
            port_guid="a088c20300e3142a",
            lid=0x33BF,
            sm_lid=1,
            gid_prefix="fe80000000000000",
            netdev="ib0",
            numa=1,
            pci_bus_id="0000:1a:00.0",
            board="MT_0000000838",
            firmware="28.41.1000",
            fabric="rail-a",
        ),
    )


def test_a_roce_port(machine):
    port = {
        **ROCE_PORT,
        "gids/3": "0000:0000:0000:0000:0000:ffff:0a01:0203\n",
        "gid_attrs/types/3": "RoCE v2\n",
        "gid_attrs/ndevs/3": "ens1f0np0.40\n",
        "counters/link_downed": "2\n",
        "counters/symbol_error": "0\n",
        "hw_counters/out_of_sequence": "17\n",
    }
    route = (
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "ens1f0np0.40\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
    )
    root = machine({**card("mlx5_bond_0", port), "/proc/net/route": route})
    (found,) = ib.read_ports(root, {})
    assert (found.link_layer, found.active) == ("Ethernet", True)
    assert (found.network, found.vlan, found.netdev) == ("10.1.0.0/16", 40, "ens1f0np0.40")
    assert (found.physical, found.key) == ("RoCE 10.1.0.0/16", "roce:10.1.0.0/16")
    assert (found.port_guid, found.gid_prefix) == ("a288c2fffee3142a", None)
    assert found.errors == {"link_downed": 2, "out_of_sequence": 17}


def test_links_of_sysfs_name_the_pci_address(tmp_path):
    real = "sys/devices/pci0000:16/0000:16:02.0/0000:1a:00.0"
    places = {"mlx5_0": f"{real}/infiniband", "mlx5_2": f"{real}/mlx5_core.sf.4/infiniband"}
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    for name, place in places.items():
        port = tmp_path / place / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        (tmp_path / place / name / "device").symlink_to("../..")
        (tmp_path / "sys/class/infiniband" / name).symlink_to(f"../../../{place}/{name}")
    (tmp_path / real / "numa_node").write_text("0\n")
    found = by_name(ib.read_ports(Root(prefix=tmp_path), {}))
    assert {name: port.pci_bus_id for name, port in found.items()} == {
        "mlx5_0/1": "0000:1a:00.0",
        "mlx5_2/1": "0000:1a:00.0",
    }
    assert found["mlx5_0/1"].numa == 0


def test_a_device_link_alone_names_the_pci_address(machine, tmp_path):
    root = machine(card("mlx5_0", IB_PORT))
    (tmp_path / "root/sys/class/infiniband/mlx5_0/device").symlink_to("../../../0008:01:00.0")
    assert ib.read_ports(root, {})[0].pci_bus_id == "0008:01:00.0"


def test_omni_path_and_iwarp_are_told_by_the_card(machine):
    files = {
        **card("hfi1_0", IB_PORT),
        **card("opap3s0", IB_PORT),
        **card("card0", IB_PORT, board_id="HPE 100Gb with Intel Omni-Path Adapter\n"),
        **card("irdma0", ROCE_PORT, node_type="4: RNIC\n"),
        **card("irdma1", ROCE_PORT, node_type="1: CA\n"),
        **card("efa_0", {**ROCE_PORT, "link_layer": "Unknown\n"}),
    }
    found = ib.read_ports(machine(files), {})
    assert {port.hca: port.link_layer for port in found} == {
        "hfi1_0": "OmniPath",
        "opap3s0": "OmniPath",
        "card0": "OmniPath",
        "irdma0": "iWARP",
        "irdma1": "Ethernet",
        "efa_0": None,
    }


def test_two_ports_of_one_card_have_their_own_interfaces(machine):
    files = card("mlx4_0", IB_PORT, IB_PORT, device__net__ib0__dev_port="0\n") | card(
        "mlx4_0", device__net__ib1__dev_port="1\n", **{"device__net__ib1.8001__dev_port": "1\n"}
    )
    assert [port.netdev for port in ib.read_ports(machine(files), {})] == ["ib0", "ib1"]


@pytest.mark.parametrize(
    ("files", "active"),
    [
        ({}, True),
        ({"state": "2: INIT\n", "lid": "0xffff\n"}, False),
        ({"state": "1: DOWN\n"}, False),
        ({"sm_lid": "0x0\n"}, False),
        ({"lid": "0xffff\n"}, False),
        ({"lid": "", "sm_lid": ""}, True),
        ({"state": ""}, False),
    ],
)
def test_infiniband_is_active_with_a_subnet_manager_only(machine, files, active):
    (found,) = ib.read_ports(machine(card("mlx5_0", {**IB_PORT, **files})), {})
    assert found.active is active


def test_each_field_may_be_unknown_on_its_own(machine):
    whole = {**card("mlx5_0", IB_PORT, node_guid="0000:0000:0000:0000\n"), **card("odd")}
    (found,) = ib.read_ports(machine(whole), {})
    assert found.node_guid is None
    for path in IB_PORT:
        for broken in ("", "N/A (no PMA)\n", "\x1b[31m?\x1b[0m", "\0\0\0", "-1\n", "9" * 5000):
            (port,) = ib.read_ports(machine(card("mlx5_0", {**IB_PORT, path: broken})), {})
            lost = {name for name in ib.IbPort.__slots__ if getattr(port, name) is None}
            kept = set(ib.IbPort.__slots__) - lost
            assert {"hca", "port"} <= kept
            assert len(kept) >= 8, (path, broken)
        machine(card("mlx5_0", IB_PORT))


def test_cards_are_in_the_order_of_their_numbers(machine):
    names = ["mlx5_0", "mlx5_2", "mlx5_10", "mlx5_bond_0"]
    files: dict[str, str] = {}
    for name in reversed(names):
        files |= card(name, IB_PORT)
    assert [port.hca for port in ib.read_ports(machine(files), {})] == names


@pytest.mark.parametrize(
    ("declared", "fabric"),
    [
        ({}, None),
        ({"*": "all"}, "all"),
        ({"*": "all", "mlx5_*": "mellanox"}, "mellanox"),
        ({"mlx5_*": "stars", "mlx5_?": "marks"}, "marks"),
        ({"mlx5_0": "card", "mlx5_?/1": "first"}, "card"),
        ({"mlx5_0/1": "port", "mlx5_0": "card"}, "port"),
        ({"mlx5_0/2": "other", "mlx5_[0-3]": "rails"}, "rails"),
        ({"MLX5_0": "case", "mlx5_1": "no"}, None),
    ],
)
def test_the_most_specific_declaration_wins(declared, fabric):
    assert ib.declared_fabric(declared, "mlx5_0", 1) == fabric


def test_h100_tree_unpacked(captures, tmp_path):
    shutil.copytree(captures / "sysfs/h100-class-infiniband", tmp_path / "sys/class/infiniband")
    found = ib.read_ports(Root(prefix=tmp_path), {"mlx5_*": "pod"})
    assert [(port.hca, port.active, port.rate_gbps) for port in found] == [
        ("mlx5_0", True, 400.0),
        ("mlx5_4", True, 400.0),
    ]
    assert found[0].board == "MT_0000000838"
    assert found[0].errors == {
        "excessive_buffer_overrun_errors": 15,
        "port_rcv_errors": 14,
        "port_rcv_switch_relay_errors": 1,
        "roce_adp_retrans": 3,
    }
    assert {found[0].lid, found[0].port_guid, found[0].numa, found[0].key} == {None}


def test_h100_archive_has_a_roce_bond_among_eight_rails(captures, tmp_path):
    with tarfile.open(captures / "sysfs/h100-class-infiniband.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    found = ib.read_ports(Root(prefix=tmp_path), {})
    rails = ["mlx5_0", "mlx5_1", *(f"mlx5_{n}" for n in range(4, 10))]
    assert [port.hca for port in found] == [*rails, "mlx5_bond_0"]
    assert {port.link_layer for port in found[:-1]} == {"InfiniBand"}
    bond = found[-1]
    assert (bond.link_layer, bond.rate_gbps, bond.firmware) == ("Ethernet", 200.0, "32.38.3056")
    assert all(port.active for port in found)


def test_procfs_archive_has_three_makes(captures, tmp_path):
    found = by_name(ib.read_ports(unpack(captures / "sysfs/procfs-infiniband.ttar", tmp_path), {}))
    assert {name: (port.link_layer, port.rate_gbps) for name, port in found.items()} == {
        "hfi1_0/1": ("OmniPath", 100.0),
        "mlx4_0/1": ("InfiniBand", 40.0),
        "mlx4_0/2": ("InfiniBand", 40.0),  # its link_layer has an empty line after it
        "mlx5_0/1": ("InfiniBand", 25.0),
    }
    assert found["mlx5_0/1"].node_guid == "0a7fbc1245efd23b"
    assert found["mlx5_0/1"].phys_state == "ACTIVE"
    assert found["mlx5_0/1"].errors["local_ack_timeout_err"] == 131
    assert found["mlx4_0/1"].board == "SM_1141000001000"
    assert all(port.state == "ACTIVE" for port in found.values())


async def test_no_card_and_no_tool_is_no_error(machine):
    assert await ib.read(machine({}), {}) == ib.Ports()


async def test_sysfs_is_asked_before_the_tool(machine):
    root = machine(card("mlx5_0", IB_PORT), {"ibstat": "echo \"CA 'mlx5_9'\"; exit 1"})
    found = await ib.read(root, {})
    assert ([port.hca for port in found.ports], found.error) == (["mlx5_0"], None)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.dictionaries(
        st.sampled_from([*ROCE_PORT, "gids/1", "gid_attrs/types/1", "counters/link_downed"]),
        st.text(max_size=60) | st.sampled_from(["RoCE v2\n", "::ffff:10.0.0.1", "fd00::1"]),
    )
)
def test_any_content_of_files_is_an_answer(machine, files):
    root = machine(card("mlx5_0", {**ROCE_PORT, **files}))
    assert len(ib.read_ports(root, {"*": "x"})) == 1
