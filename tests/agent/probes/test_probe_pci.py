"""PCI devices: which are accelerators, how far two are apart, and trees in their many forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import pci
from agent.probes.pci import Pci, PciDevice

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from agent.probes.root import Root

SWITCH = ("0000:16:00.0", "0000:17:00.0")
GPU = PciDevice(
    "0000:19:00.0", "10de", "2330", "0302", 0, None, "pci0000:16", (*SWITCH, "0000:18:00.0")
)
TREE = "/sys/devices/pci0000:16/0000:16:00.0/0000:17:00.0/0000:18:00.0/0000:19:00.0"


def at(address: str, *parents: str, bridge: str | None = "pci0000:16", numa: int | None = 0):
    return PciDevice(address, "15b3", "1021", "0207", numa, None, bridge, parents)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (at("0000:1a:00.0", *SWITCH, "0000:18:01.0"), "PIX"),
        (at("0000:19:00.1", *SWITCH, "0000:18:00.0"), "PIX"),
        (at("0000:1d:00.0", *SWITCH, "0000:18:02.0", "0000:1b:00.0", "0000:1c:00.0"), "PXB"),
        (at("0000:20:00.0", "0000:16:01.0"), "PHB"),
        (at("0000:16:02.0"), "PHB"),
        (at("0000:41:00.0", "0000:40:00.0", bridge="pci0000:40"), "NODE"),
        (at("0000:91:00.0", "0000:90:00.0", bridge="pci0000:90", numa=1), "SYS"),
        (at("0000:91:00.0", bridge=None, numa=1), "SYS"),
        (at("0000:91:00.0", bridge=None, numa=0), None),
        (at("0000:91:00.0", bridge="pci0000:90", numa=None), None),
    ],
)
def test_distance(other: PciDevice, expected: str | None):
    assert pci.distance(GPU, other) == expected
    assert pci.distance(other, GPU) == expected


def test_distance_takes_any_spelling_of_an_address():
    nic = at("0000:1a:00.0", *SWITCH, "0000:18:01.0")
    found = Pci({GPU.address: GPU, nic.address: nic})
    assert found.distance("00000000:19:00.0", "0000:1A:00.0") == "PIX"
    assert found.distance("0000:19:00.0", "0000:77:00.0") is None
    assert found.distance(None, "0000:19:00.0") is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (TREE, ("pci0000:16", (*SWITCH, "0000:18:00.0"))),
        (
            "../../../devices/pci0008:00/0008:00:00.0/0008:01:00.0",
            ("pci0008:00", ("0008:00:00.0",)),
        ),
        ("/sys/devices/pci0000:00/0000:00:02.0", ("pci0000:00", ())),
        (
            "../devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0",
            ("pci10000:e0", ("10000:e0:06.0",)),
        ),
        (
            "/sys/devices/LNXSYSTM:00/VMBUS:01/47505500/pci0001:00/0001:00:00.0",
            ("pci0001:00", ()),
        ),
        ("/captured/sys/bus/pci/devices/0000:19:00.0", (None, None)),
        ("", (None, None)),
    ],
)
def test_tree_of_a_path(path: str, expected: tuple[object, object]):
    assert pci.parse_tree(path) == expected


def device(address: str, vendor: str, class_: str, number: str = "1234", *, virtual: bool = False):
    return PciDevice(address, vendor, number, class_, virtual=virtual)


def count(*devices: PciDevice) -> dict[str, int]:
    return Pci({found.address: found for found in devices}).accelerator_counts()


def test_accelerators_by_vendor_and_class():
    assert count(
        device("0000:01:00.0", "10de", "0302"),
        device("0000:02:00.0", "10de", "0300"),
        device("0000:02:00.1", "10de", "0403"),
        device("0000:03:00.0", "10de", "0680"),
        device("0000:04:00.0", "1002", "1200", "74a1"),
        device("0000:05:00.0", "1002", "0380", "740f"),
        device("0000:06:00.0", "8086", "0380"),
        device("0000:07:00.0", "1a03", "0300"),
    ) == {"nvidia": 2, "amd": 2}


def test_display_of_an_amd_processor_or_board_is_no_accelerator():
    assert (
        count(
            device("0000:04:00.0", "1002", "0300", "15e7"), device("0000:04:00.2", "1022", "1080")
        )
        == {}
    )
    assert count(device("0000:04:00.0", "1002", "0300", "515e")) == {}
    assert count(device("0000:04:00.0", "1002", "0300", "73df")) == {"amd": 1}


def test_virtual_functions_of_a_card_here_are_no_cards():
    assert count(
        device("0000:01:00.0", "10de", "0302"),
        device("0000:01:00.4", "10de", "0302", virtual=True),
    ) == {"nvidia": 1}


LSPCI = """\
0001:00:00.0 3D controller [0302]: NVIDIA Corporation GA100 [A100 SXM4 80GB] [10de:20b2] (rev a1)
0005:00:00.0 Bridge [0680]: NVIDIA Corporation Device [10de:1af1] (rev a1)
01:00.0 Processing accelerators [1200]: AMD/ATI Aqua Vanjaram [Instinct MI300X] [1002:74a1]
0008:01:00.0 3D controller: NVIDIA Corporation Device 2941 (rev a1)
noise
"""


def test_lspci_with_and_without_numbers():
    found = pci.parse_lspci(LSPCI)
    assert found.accelerator_counts() == {"nvidia": 2, "amd": 1}
    assert [switch.address for switch in found.nvswitches()] == ["0005:00:00.0"]
    assert found.devices["0000:01:00.0"].device == "74a1"
    assert found.devices["0008:01:00.0"].device == "2941"
    assert pci.parse_lspci("pcilib: Cannot open /proc/bus/pci").error is not None


def test_lspci_captures(captures: Path):
    hgx = pci.parse_lspci((captures / "nvidia-topo/a100x8.lspci-nn.txt").read_text())
    assert hgx.accelerator_counts() == {"nvidia": 8}
    assert len(hgx.nvswitches()) == 6
    tray = pci.parse_lspci((captures / "nvidia-topo/gb200-nvl72-tray.lspci.txt").read_text())
    assert [card.address[:4] for card in tray.accelerators()] == ["0008", "0009", "0018", "0019"]
    assert tray.nvswitches() == ()


def files(address: str, **values: str) -> dict[str, str]:
    return {f"/sys/bus/pci/devices/{address}/{name}": f"{v}\n" for name, v in values.items()}


CARD = {"vendor": "0x10de", "device": "0x2330", "class": "0x030200", "local_cpulist": "0-47"}


async def test_sysfs_with_a_tree(machine: Callable[..., Root], tmp_path: Path):
    root = machine({f"{TREE}/{name}": f"{v}\n" for name, v in (CARD | {"numa_node": "1"}).items()})
    listed = tmp_path / "root/sys/bus/pci/devices"
    listed.mkdir(parents=True)
    (listed / "0000:19:00.0").symlink_to(f"../../..{TREE.removeprefix('/sys')}")
    (tmp_path / f"root{TREE}/driver").symlink_to("../../../bus/pci/drivers/nvidia")
    found = await pci.read(root)
    card = found.devices["0000:19:00.0"]
    assert (card.vendor, card.device, card.class_, card.numa) == ("10de", "2330", "0302", 1)
    assert (card.host_bridge, card.parents) == (GPU.host_bridge, GPU.parents)
    assert (card.driver, card.cpus, found.source, found.error) == ("nvidia", "0-47", "sysfs", None)


async def test_sysfs_of_a_captured_machine_without_a_tree(machine: Callable[..., Root]):
    found = await pci.read(machine(files("0000:19:00.0", numa_node="-1", **CARD)))
    card = found.devices["0000:19:00.0"]
    assert (card.numa, card.host_bridge, card.parents, card.driver) == (None, None, None, None)
    assert found.accelerator_counts() == {"nvidia": 1}


async def test_only_numa_node_is_the_node_of_all(machine: Callable[..., Root]):
    node = {"/sys/devices/system/node/node0/cpulist": "0-7\n"}
    found = await pci.read(machine(files("0000:19:00.0", numa_node="-1", **CARD) | node))
    assert found.devices["0000:19:00.0"].numa == 0


async def test_unreadable_values_are_unknown(machine: Callable[..., Root]):
    bad = {"vendor": "?", "device": "", "class": "0x", "numa_node": "x", "local_cpulist": "0-x"}
    found = await pci.read(machine(files("0000:19:00.0", **bad)))
    assert found.devices["0000:19:00.0"] == PciDevice("0000:19:00.0")


async def test_lspci_stands_in_for_sysfs(machine: Callable[..., Root]):
    script = f"cat <<'EOF'\n{LSPCI}EOF\nexit 1"
    found = await pci.read(machine({}, {"lspci": script}))
    assert (found.source, found.accelerator_counts()) == ("lspci", {"nvidia": 2, "amd": 1})
    nothing = await pci.read(machine({}, {"lspci": "echo no bus >&2; exit 1"}))
    assert nothing.devices == {}
    assert "lspci" in (nothing.error or "")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300), st.integers(0, len(LSPCI)), st.integers(0, len(LSPCI)))
def test_fuzz(noise: str, start: int, end: int):
    mutated = LSPCI[:start] + noise + LSPCI[end:]
    found = pci.parse_lspci(mutated)
    assert all(count > 0 for count in found.accelerator_counts().values())
    pci.parse_tree(noise)
    pci.parse_tree(TREE[:start] + noise)


def test_huge_output_is_bounded():
    assert len(pci.parse_lspci(LSPCI * 200_000).devices) == 4
    assert pci.parse_lspci("x" * (50 * 2**20)).devices == {}
