"""Paths between cards and NICs, and the nearest NIC of each card."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import topo
from agent.probes.card import Gpu, NvLink
from agent.probes.pci import Pci, PciDevice
from agent.probes.topo import GpuLinks, Matrix, NvLinks
from agent.probes.wiring import rank, wire

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Port:
    hca: str
    pci_bus_id: str | None = None
    numa: int | None = None
    active: bool = True
    link_layer: str | None = "InfiniBand"


def cards(count: int, **values: object) -> list[Gpu]:
    return [replace(Gpu(uuid=f"GPU-{i}", index=i), **values) for i in range(count)]


def nearest(found: tuple[Gpu, ...]) -> list[tuple[str | None, str | None]]:
    return [(card.nearest_nic, card.nic_path) for card in found]


def matrix(rows: dict[str, dict[str, str]]) -> Matrix:
    nics = tuple(dict.fromkeys(nic for cells in rows.values() for nic in cells))
    cells = {(gpu, nic): path for gpu, row in rows.items() for nic, path in row.items()}
    return Matrix(tuple(rows), nics, cells)


def test_ranks_are_ordered():
    paths = ["NV18", "NV4", "NV1", "PIX", "PXB", "PHB", "NODE", "SYS", None]
    shuffled = [*paths[4:], *paths[:4]]
    assert sorted(shuffled, key=rank) == paths
    assert rank("NV") == rank("XGMI") == rank(None)


def test_each_card_has_its_rail_by_the_matrix():
    rails = [f"mlx5_{i}" for i in range(8)]
    rows = {
        f"GPU{i}": {nic: "PIX" if at == i else "NODE" for at, nic in enumerate(rails)}
        for i in range(8)
    }
    assert nearest(wire(cards(8), Pci(), matrix(rows), NvLinks(), ())) == [
        (f"mlx5_{i}", "PIX") for i in range(8)
    ]


def test_equal_nics_are_shared_out_in_natural_order():
    rails = [f"mlx5_{i}" for i in (10, 11, 2, 3)]
    found = wire(cards(4, numa=0), Pci(), Matrix(), NvLinks(), [Port(n, numa=0) for n in rails])
    assert [nic for nic, _ in nearest(found)] == ["mlx5_2", "mlx5_3", "mlx5_10", "mlx5_11"]
    assert {path for _, path in nearest(found)} == {None}


def test_cards_with_less_choice_choose_first():
    rows = {"GPU0": {"mlx5_0": "PXB", "mlx5_1": "PXB"}, "GPU1": {"mlx5_0": "PXB"}}
    assert nearest(wire(cards(2), Pci(), matrix(rows), NvLinks(), ())) == [
        ("mlx5_1", "PXB"),
        ("mlx5_0", "PXB"),
    ]


def test_E07_a_lost_card_does_not_move_the_rails_of_others():
    rails = [Port(f"mlx5_{i}", numa=0) for i in range(4)]
    lost = Gpu(pci_bus_id="0000:19:00.0", problems=("lost",))
    found = wire([lost, *cards(4, numa=0)[1:]], Pci(), Matrix(), NvLinks(), rails)
    assert [nic for nic, _ in nearest(found)] == [None, "mlx5_1", "mlx5_2", "mlx5_3"]
    assert found[0].paths == {}


def test_active_ports_come_before_idle_ones_and_infiniband_before_ethernet():
    rows = {"GPU0": {"mlx5_0": "PIX", "mlx5_1": "NODE", "mlx5_2": "NODE", "mlx5_9": "PIX"}}
    ports = [
        Port("mlx5_0", active=False),
        Port("mlx5_1", link_layer="Ethernet"),
        Port("mlx5_2"),
    ]
    assert nearest(wire(cards(1), Pci(), matrix(rows), NvLinks(), ports)) == [("mlx5_2", "NODE")]
    two_ports = [Port("mlx5_0", active=False), Port("mlx5_0", active=True), *ports[1:]]
    assert nearest(wire(cards(1), Pci(), matrix(rows), NvLinks(), two_ports)) == [("mlx5_0", "PIX")]


def test_nic_known_by_the_matrix_only_counts():
    rows = {"GPU0": {"mlx5_0": "PIX", "mlx5_9": "NODE"}}
    idle = [Port("mlx5_0", active=False)]
    assert nearest(wire(cards(1), Pci(), matrix(rows), NvLinks(), idle)) == [("mlx5_9", "NODE")]


def grace(numa: bool) -> tuple[list[Gpu], list[Port]]:
    tray = [
        replace(card, numa=i // 2 if numa else None, pci_bus_id=f"00{(8, 9, 18, 19)[i]:02}:01:00.0")
        for i, card in enumerate(cards(4))
    ]
    ports = [
        Port("mlx5_0", numa=0),
        Port("mlx5_1", numa=0),
        Port("mlx5_2", numa=0, link_layer="Ethernet"),
        Port("mlx5_3", numa=1, link_layer="Ethernet"),
        Port("mlx5_4", numa=1),
        Port("mlx5_5", numa=1),
    ]
    return tray, ports


def test_gb200_ranks_by_numa_node(captures: Path):
    text = (captures / "nvidia-topo/gb200x4-all-sys-nics.topo-m.txt").read_text()
    tray, ports = grace(numa=True)
    found = wire(tray, Pci(), topo.parse_matrix(text), NvLinks(), ports)
    assert nearest(found) == [(f"mlx5_{i}", "NODE") for i in (0, 1, 4, 5)]
    assert found[0].paths["mlx5_4"] == "SYS"
    assert found[0].paths["1"] == "NV18"
    assert [card.cpu_affinity for card in found] == ["0-71", "0-71", "72-143", "72-143"]
    unknown = wire(grace(numa=False)[0], Pci(), topo.parse_matrix(text), NvLinks(), ports)
    assert {path for _, path in nearest(unknown)} == {"SYS"}


def test_captured_matrices(captures: Path):
    def read(name: str, count: int) -> tuple[Gpu, ...]:
        text = (captures / f"nvidia-topo/{name}.topo-m.txt").read_text()
        return wire(cards(count), Pci(), topo.parse_matrix(text), NvLinks(), ())

    dgx = read("h100x8-dgx-mlx5-columns", 8)
    assert nearest(dgx) == [(f"mlx5_{i}", "PIX") for i in range(8)]
    assert (dgx[7].numa, dgx[7].paths["0"], dgx[7].paths["mlx5_9"]) == (1, "NV18", "NODE")
    oci = read("h100x4-oci-nic-legend", 4)
    assert [nic for nic, _ in nearest(oci)] == ["mlx5_0", "mlx5_3", "mlx5_2", "mlx5_1"]
    [one] = read("h200-linux-590.48.01", 1)
    assert (one.numa, one.nearest_nic, dict(one.paths)) == (0, None, {})


def tree(address: str, *parents: str, numa: int = 0) -> PciDevice:
    bridge = f"pci{parents[0][:7]}" if parents else None
    return PciDevice(address, numa=numa, cpus="0-47", host_bridge=bridge, parents=parents)


def test_pci_tree_stands_in_for_the_matrix():
    devices = [
        tree("0000:03:00.0", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0"),
        tree("0000:04:00.0", "0000:00:01.0", "0000:01:00.0", "0000:02:01.0"),
        tree("0000:83:00.0", "0000:80:01.0", numa=1),
    ]
    pci = Pci({device.address: device for device in devices})
    both = [
        Gpu(index=0, vendor="amd", pci_bus_id="0000:03:00.0"),
        Gpu(index=1, vendor="amd", pci_bus_id="0000:83:00.0"),
    ]
    found = wire(both, pci, Matrix(), NvLinks(), [Port("mlx5_0", "0000:04:00.0")])
    assert dict(found[0].paths) == {"1": "SYS", "mlx5_0": "PIX"}
    assert nearest(found) == [("mlx5_0", "PIX"), ("mlx5_0", "SYS")]
    assert (found[1].numa, found[0].cpu_affinity) == (1, "0-47")


def test_what_nvml_says_stands():
    links = (NvLink(0, active=True),)
    told = Gpu(
        index=0, numa=3, cpu_affinity="0-1", numa_memory=4, nvlinks=links, paths={"1": "NV6"}
    )
    rest = Matrix(
        gpus=("GPU0", "GPU1"),
        cells={("GPU0", "GPU1"): "SYS"},
        cpu_affinity={"GPU0": "2-3"},
        numa={"GPU0": 0},
        numa_memory={"GPU0": 9},
    )
    other = NvLinks((GpuLinks(0, None, ()), GpuLinks(1, None, (NvLink(5, active=True),))))
    first, second = wire([told, Gpu(index=1)], Pci(), rest, other, ())
    assert first == told
    assert second.nvlinks == (NvLink(5, active=True),)
    assert dict(second.paths) == {"0": "SYS"}


def test_links_are_joined_by_uuid_before_index():
    links = NvLinks(
        (GpuLinks(0, "GPU-1", (NvLink(7),)), GpuLinks(1, "GPU-0", (NvLink(8),)), GpuLinks(2))
    )
    found = wire(cards(3), Pci(), Matrix(), links, ())
    assert [card.nvlinks for card in found] == [(NvLink(8),), (NvLink(7),), None]


def test_nothing_known_is_nothing_said():
    found = wire([Gpu(), Gpu(index=0)], Pci(), Matrix(), NvLinks(), [Port("mlx5_0")])
    assert found == (Gpu(), Gpu(index=0))


CELLS = st.sampled_from(["NV18", "PIX", "PXB", "PHB", "NODE", "SYS", "?"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(CELLS, min_size=4, max_size=4), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(-1, 2), st.booleans()), min_size=0, max_size=4),
)
def test_fuzz(rows: list[list[str]], ports: list[tuple[int, bool]]):
    found = wire(
        cards(4, numa=0),
        Pci(),
        matrix({f"GPU{i}": {f"n{j}": c for j, c in enumerate(r)} for i, r in enumerate(rows)}),
        NvLinks(),
        [Port(f"n{i}", numa=numa, active=active) for i, (numa, active) in enumerate(ports)],
    )
    assert len(found) == 4
    assert all(card.nearest_nic for card in found[: len(rows)])


@pytest.mark.parametrize("count", [1, 8])
def test_many_nics_are_bounded(count: int):
    ports = [Port(f"mlx5_{i}", numa=0) for i in range(3000)]
    found = wire(cards(count, numa=0), Pci(), Matrix(), NvLinks(), ports)
    assert len({card.nearest_nic for card in found}) == count
