"""The network of a RoCE port: GIDs, routes, IPv6 addresses and VLANs as the kernel lists them."""

from __future__ import annotations

from ipaddress import IPv4Network as Net4
from ipaddress import ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import roce
from agent.probes.roce import Gid, Networks

PLACE = "/sys/class/infiniband/mlx5_0/ports/1"
ROUTES = (
    "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    "eth0\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    "eth0\t0000A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n"
    "ens1f0np0\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
    "ens1f0np0\t0000020A\t0100010A\t0003\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
    "ens1f1np1\t0402010A\t00000000\t0001\t0\t0\t0\tFEFFFFFF\t0\t0\t0\n"
    "odd\t0402010A\t00000000\t0001\t0\t0\t0\t00FF00FF\t0\t0\t0\n"
    "host\t0402010A\t00000000\t0005\t0\t0\t0\tFFFFFFFF\t0\t0\t0\n"
    "broken\t04\n"
)
TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.0.0.0/8 2 0 2
        +-- 10.1.0.0/16 2 0 2
           |-- 10.1.0.0
              /16 link UNICAST
           |-- 10.1.2.3
              /32 host LOCAL
           |-- 10.1.255.255
              /32 link BROADCAST
        |-- 10.2.0.0
           /16 universe UNICAST
Local:
  +-- 127.0.0.0/8 2 0 2
     |-- 127.0.0.0
        /8 host LOCAL
Id 1001:
     |-- 10.9.8.0
        /22 link UNICAST
        /24 link UNICAST
"""
INET6 = (
    "fd00000000010000000000000000000a 03 40 00 80 ens1f0np0\n"
    "fe8000000000000002155dfffe34072b 03 40 20 80 ens1f0np0\n"
    "00000000000000000000000000000001 01 80 10 80       lo\n"
    "nonsense\n"
)
VLANS = (
    "VLAN Dev name\t | VLAN ID\n"
    "Name-Type: VLAN_NAME_TYPE_RAW_PLUS_VID_NO_PAD\n"
    "storage        | 100  | ens1f0np0\n"
    "bond0.7        | 7  | bond0\n"
)


def gids(*rows: tuple[str, str, str]) -> dict[str, str]:
    """A port's GID table in sysfs."""
    files = {}
    for index, (gid, kind, netdev) in enumerate(rows):
        files[f"{PLACE}/gids/{index}"] = f"{gid}\n"
        if kind:
            files[f"{PLACE}/gid_attrs/types/{index}"] = f"{kind}\n"
        if netdev:
            files[f"{PLACE}/gid_attrs/ndevs/{index}"] = f"{netdev}\n"
    return files


LINK_LOCAL = "fe80:0000:0000:0000:0ac0:ebff:fe12:3456"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a01:0203"
UNUSED = ("0000:0000:0000:0000:0000:0000:0000:0000", "", "")


def test_connected_networks_by_interface():
    assert roce.parse_routes(ROUTES) == {
        "eth0": (Net4("192.168.0.0/24"),),
        "ens1f0np0": (Net4("10.1.0.0/16"),),
        "ens1f1np1": (Net4("10.1.2.4/31"),),
    }


def test_connected_networks_of_all_tables():
    nets = (Net4("10.1.0.0/16"), Net4("10.9.8.0/22"), Net4("10.9.8.0/24"))
    assert roce.parse_trie(TRIE) == nets


def test_ipv6_prefixes_and_vlans():
    assert roce.parse_if_inet6(INET6) == {
        "fd00000000010000000000000000000a": 64,
        "fe8000000000000002155dfffe34072b": 64,
    }
    assert roce.parse_vlans(VLANS) == {"storage": 100, "bond0.7": 7}


@pytest.mark.parametrize(
    ("name", "vlan"),
    [
        ("storage", 100),
        ("bond0.7", 7),
        ("ens1f0np0.40", 40),
        ("vlan0040", 40),
        ("ens1f0np0", None),
        ("eth0.0", None),
        ("eth0.9999", None),
        (None, None),
    ],
)
def test_vlan_of_an_interface(name, vlan):
    assert roce.vlan_of(name, roce.parse_vlans(VLANS)) == vlan


@pytest.mark.parametrize(
    ("gid", "address"),
    [
        (MAPPED, "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("fd00:0000:0001:0000:0000:0000:0000:000a", "fd00:0:1::a"),
        ("2001:db8::1", "2001:db8::1"),
        (LINK_LOCAL, None),
        ("::ffff:169.254.3.4", None),
        ("::ffff:127.0.0.1", None),
        ("::", None),
        ("ff02::1", None),
        ("none", None),
        (None, None),
    ],
)
def test_routable_addresses(gid, address):
    found = roce.address(gid)
    assert (str(found) if found else None) == address


def test_the_v2_address_of_the_usual_table(machine):
    rows = (
        (LINK_LOCAL, "IB/RoCE v1", "ens1f0np0"),
        (LINK_LOCAL, "RoCE v2", "ens1f0np0"),
        (MAPPED, "IB/RoCE v1", "ens1f0np0"),
        (MAPPED, "RoCE v2", "ens1f0np0"),
        UNUSED,
    )
    root = machine({**gids(*rows), "/proc/net/route": ROUTES})
    assert roce.find(root, PLACE, roce.read_networks(root)) == roce.Roce(
        "10.1.2.3", "ens1f0np0", "10.1.0.0/16", None
    )


def test_only_v1_or_link_local_is_no_network(machine):
    rows = ((LINK_LOCAL, "RoCE v2", "eth2"), (MAPPED, "IB/RoCE v1", "eth2"), (MAPPED, "", "eth2"))
    root = machine({**gids(*rows), "/proc/net/route": ROUTES})
    assert roce.find(root, PLACE, roce.read_networks(root)) is None


def test_ipv6_has_its_prefix_from_the_address(machine):
    rows = ((LINK_LOCAL, "RoCE v2", "ens1f0np0"), ("fd00:0:1::a", "RoCE v2", "ens1f0np0"))
    root = machine({**gids(*rows), "/proc/net/if_inet6": INET6, "/proc/net/route": ROUTES})
    found = roce.find(root, PLACE, roce.read_networks(root))
    assert (found.address, found.network) == ("fd00:0:1::a", "fd00:0:1::/64")


def test_an_interface_in_its_own_table_is_found_by_the_trie(machine):
    rows = (("::ffff:10.9.8.7", "RoCE v2", "bond0.7"),)
    root = machine(
        {
            **gids(*rows),
            "/proc/net/route": ROUTES,
            "/proc/net/fib_trie": TRIE,
            "/proc/net/vlan/config": VLANS,
        }
    )
    found = roce.find(root, PLACE, roce.read_networks(root))
    assert (found.network, found.vlan) == ("10.9.8.0/24", 7)


def test_an_address_in_no_known_network_says_so(machine):
    root = machine(gids((MAPPED, "RoCE v2", "ens1f0np0")))
    found = roce.find(root, PLACE, roce.read_networks(root))
    assert (found.address, found.netdev, found.network) == ("10.1.2.3", "ens1f0np0", None)


def test_the_network_of_the_own_interface_goes_before_a_smaller_one_of_another():
    networks = Networks(roce.parse_routes(ROUTES), roce.parse_trie(TRIE))
    assert roce.network(Gid(0, ip_address("10.1.2.5"), "ens1f0np0"), networks) == Net4(
        "10.1.0.0/16"
    )
    assert roce.network(Gid(0, ip_address("10.1.2.5"), "ens1f1np1"), networks) == Net4(
        "10.1.2.4/31"
    )


def test_an_address_with_a_known_network_goes_first():
    networks = Networks(roce.parse_routes(ROUTES), (), roce.parse_if_inet6(INET6))
    lost = Gid(2, ip_address("10.77.0.1"), "ens1f0np0")
    wide = Gid(3, ip_address("fd00:0:1::a"), "ens1f0np0")
    good = Gid(4, ip_address("10.1.2.3"), "ens1f0np0")
    assert roce.choose([lost, wide, good], networks) == good
    assert roce.choose([lost, wide], networks) == wide
    assert roce.choose([lost], networks) == lost
    assert roce.choose([], networks) is None


def test_the_table_of_show_gids(captures, machine):
    lines = (captures / "infiniband/show_gids.synthetic.txt").read_text().splitlines()
    files: dict[str, str] = {"/proc/net/route": ROUTES}
    for fields in (line.split() for line in lines if line.startswith("mlx5_")):
        place = f"/sys/class/infiniband/{fields[0]}/ports/{fields[1]}"
        kind = "RoCE v2" if "v2" in fields else "IB/RoCE v1"
        files[f"{place}/gids/{fields[2]}"] = f"{fields[3]}\n"
        files[f"{place}/gid_attrs/types/{fields[2]}"] = f"{kind}\n"
        if not fields[-1].startswith("v"):
            files[f"{place}/gid_attrs/ndevs/{fields[2]}"] = f"{fields[-1]}\n"
    root = machine(files)
    networks = roce.read_networks(root)
    found = roce.find(root, PLACE, networks)
    assert (found.address, found.netdev, found.network) == ("10.1.2.3", "ens1f0np0", "10.1.0.0/16")
    assert roce.find(root, "/sys/class/infiniband/mlx5_1/ports/1", networks) is None


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_mutated_tables_are_answers(data):
    text = data.draw(st.sampled_from([ROUTES, TRIE, INET6, VLANS]))
    at = data.draw(st.integers(0, len(text)))
    mutated = text[:at] + data.draw(st.text(max_size=20)) + text[data.draw(st.integers(at)) :]
    for parse in (roce.parse_routes, roce.parse_trie, roce.parse_if_inet6, roce.parse_vlans):
        parse(mutated)
    roce.address(mutated)
