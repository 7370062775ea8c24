"""nvidia-smi topo -m, topo -p2p and nvlink -s: every form of header, and what stands instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import topo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from agent.probes.root import Root

TABS = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPXB\tNODE\t0-55,112-167\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNODE\tPIX\t56-111\t1\t\tN/A\n"
    "NIC0\tPXB\tNODE\t X \tSYS\n"
    "NIC1\tNODE\tPIX\tSYS\t X \n\n"
    "Legend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n\n"
    "NIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_bond_0\n"
)
BLANKS = """\
Note: GPU0 detected at startup
        GPU0
GPU1    NIC0    NIC28NIC29      CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU1    NV12     X      SOC     PHB     PIX     0-3,8    1               N/A
GPU0     X      NV12    PXB     NODE    SYS     0-3,8    0               N/A

NIC Legend:
  NIC28: mlx5_28
"""


def test_tabs_colours_and_the_nic_legend():
    found = topo.parse_matrix(TABS)
    assert (found.gpus, found.nics) == (("GPU0", "GPU1"), ("mlx5_0", "mlx5_bond_0"))
    assert found.path("GPU0", "GPU1") == "NV18"
    assert found.path("GPU1", "mlx5_bond_0") == found.path("mlx5_bond_0", "GPU1") == "PIX"
    assert found.path("GPU0", "GPU0") is None
    assert found.cpu_affinity == {"GPU0": "0-55,112-167", "GPU1": "56-111"}
    assert (found.numa, found.numa_memory, found.error) == ({"GPU0": 0, "GPU1": 1}, {}, None)


def test_blanks_a_note_a_broken_header_and_glued_labels():
    found = topo.parse_matrix(BLANKS)
    assert found.nics == ("NIC0", "mlx5_28", "NIC29")
    assert [found.path("GPU0", nic) for nic in found.nics] == ["PXB", "NODE", "SYS"]
    assert [found.path("GPU1", nic) for nic in found.nics] == ["SYS", "PHB", "PIX"]
    assert found.numa == {"GPU0": 0, "GPU1": 1}


def test_glued_labels_that_are_one_column():
    found = topo.parse_matrix(
        "        GPU0    NIC0    NIC28NIC29    NIC30    CPU Affinity\n"
        "GPU0     X      PXB     SYS     NODE    0-55\n"
    )
    assert found.path("GPU0", "NIC30") == "NODE"
    assert found.path("GPU0", "NIC0") == "PXB"


@pytest.mark.parametrize(
    ("row", "cpus", "numa", "memory"),
    [
        ("0-71\t0\t\tN/A", "0-71", 0, None),
        ("\t\t\t\tN/A", None, None, None),
        ("\t\t\tN/A", None, None, None),
        ("0-71\t0,2-17\t\t2", "0-71", 0, 2),
        ("0-71\t0-1\t\tN/A", "0-71", None, None),
        ("0-71\tN/A\t\tN/A", "0-71", None, None),
        ("72-143\t1\t\t10", "72-143", 1, 10),
    ],
)
def test_affinity_cells(row: str, cpus: str | None, numa: int | None, memory: int | None):
    found = topo.parse_matrix(
        f"\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t{row}\n"
    )
    got = (found.cpu_affinity, found.numa, found.numa_memory)
    assert tuple(cells.get("GPU0") for cells in got) == (cpus, numa, memory)
    assert found.error is None


def test_empty_affinity_between_blanks_is_unknown():
    found = topo.parse_matrix(
        "        GPU0    GPU1    CPU Affinity    NUMA Affinity   GPU NUMA ID\n"
        "GPU0     X      PHB                                     N/A\n"
        "GPU1    PHB      X      0-15            0               N/A\n"
    )
    assert (found.cpu_affinity, found.numa) == ({"GPU1": "0-15"}, {"GPU1": 0})
    assert found.path("GPU0", "GPU1") == "PHB"


def test_E07_one_lost_card_does_not_hide_the_others():
    found = topo.parse_matrix(
        "\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\n"
        "Unable to determine the device handle for GPU0000:91:00.0: Unknown Error\n"
        "GPU0\t X \tERR!\tNV4\t0-3\t0\n"
        "GPU1\tERR!\tERR!\tERR!\t\t\n"
        "GPU2\tNV4\tERR!\t X \t0-3\t0\n"
    )
    assert found.path("GPU0", "GPU2") == "NV4"
    assert found.path("GPU0", "GPU1") is None
    assert found.numa == {"GPU0": 0, "GPU2": 0}


@pytest.mark.parametrize("end", range(TABS.index("GPU1\tNV18"), TABS.index("NIC0\tPXB")))
def test_cut_off_rows_lie_about_nothing(end: int):
    whole, cut = topo.parse_matrix(TABS), topo.parse_matrix(TABS[:end])
    names = {"NIC0": "mlx5_0", "NIC1": "mlx5_bond_0"}
    for (a, b), path in cut.cells.items():
        assert whole.path(names.get(a, a), names.get(b, b)) == path


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0\1\2\xff",
        "ERROR: Option -m is missing its value. Please run 'nvidia-smi -h' for help.\n",
        "GPU0 is lost. Reboot the system to recover this GPU",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
    ],
)
def test_what_is_no_matrix_says_why(text: str):
    found = topo.parse_matrix(text)
    assert (found.gpus, found.cells) == ((), {})
    assert found.error is not None
    assert found.error.startswith("nvidia-smi topo -m: ")


P2P = " \tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tCNS\tX\n\nLegend:\n\n  X    = Self\n  NS   = No\n"


def test_p2p_pairs_are_ordered_and_the_legend_is_none():
    assert topo.parse_p2p(P2P).pairs == {(0, 1): "OK", (1, 0): "CNS"}
    assert topo.parse_p2p("\tGPU0\nGPU0\tX\n").error is None
    assert topo.parse_p2p("Invalid combination of options.").pairs == {}


NVLINK = """\
GPU 0: NVIDIA H100 PCIe (UUID: GPU-a1bf2ff6-a98d-edac-a422-0bd80fbd9724)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
\t Link 2: 26,562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-000000000001)
Nvlink queries are not supported for Devices in MIG mode
GPU 2: NVIDIA L40S (UUID: GPU-00000000-0000-0000-0000-000000000002)
Device does not have or support Nvlink
GPU 3: NVIDIA GeForce RTX 2080 SUPER
NVML: Unable to retrieve Nvlink information as all links are inActive
"""


def test_links_and_what_stands_instead():
    first, mig, none, inactive = topo.parse_nvlinks(NVLINK).gpus
    assert [(link.link, link.active, link.gb_per_s) for link in first.links or ()] == [
        (0, True, 26.562),
        (1, False, None),
        (2, True, 26.562),
    ]
    assert first.uuid == "GPU-a1bf2ff6-a98d-edac-a422-0bd80fbd9724"
    assert (mig.links, none.links, inactive.links) == (None, (), ())
    assert (mig.note or "").endswith("in MIG mode")
    assert (inactive.index, inactive.uuid) == (3, None)
    assert topo.parse_nvlinks("") == topo.NvLinks()
    assert "not found" in (topo.parse_nvlinks("nvlink: not found").error or "")


def test_matrix_captures(captures: Path):
    def read(name: str) -> topo.Matrix:
        return topo.parse_matrix((captures / f"nvidia-topo/{name}.topo-m.txt").read_text())

    dgx = read("h100x8-dgx-mlx5-columns")
    assert [dgx.path(f"GPU{i}", f"mlx5_{i}") for i in range(8)] == ["PIX"] * 8
    assert [dgx.numa[f"GPU{i}"] for i in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    oci = read("h100x4-oci-nic-legend")
    assert oci.nics == ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    assert (oci.path("GPU3", "mlx5_1"), oci.path("mlx5_0", "mlx5_1")) == ("PXB", "PIX")
    tray = read("gb200x4-all-sys-nics")
    assert {tray.path("GPU3", nic) for nic in tray.nics} == {"SYS"}
    assert tray.cpu_affinity["GPU2"] == "72-143"
    for name, cpus in (("h200-linux-590.48.01", "0-23"), ("l40s-linux-595.80", "0-7")):
        one = read(name)
        assert (one.gpus, one.cpu_affinity, one.error) == (("GPU0",), {"GPU0": cpus}, None)
    assert read("two-gpu-no-nic").path("GPU1", "GPU0") == "NV18"
    assert "Option -m" in (read("rtx2080s-windows-591.86").error or "")


def test_link_captures(captures: Path):
    folder = captures / "nvidia-topo"
    found = topo.parse_nvlinks((folder / "a100x8.nvlink-s.txt").read_text())
    assert [len(gpu.links or ()) for gpu in found.gpus] == [12] * 8
    h200 = topo.parse_nvlinks((folder / "h200-linux-590.48.01.nvlink-s.txt").read_text())
    assert {link.gb_per_s for link in h200.gpus[0].links or ()} == {26.562}
    mig = topo.parse_nvlinks((folder / "h100-mig-linux-590.48.01.nvlink-s.txt").read_text())
    assert mig.gpus[0].links is None
    tray = topo.parse_p2p((folder / "gb200x4.topo-p2p-ok.txt").read_text())
    assert (len(tray.pairs), set(tray.pairs.values())) == (12, {"OK"})


async def test_tools_that_fail_say_why(machine: Callable[..., Root]):
    none = machine({})
    assert "no such program" in ((await topo.read_matrix(none)).error or "")
    assert "no such program" in ((await topo.read_nvlinks(none)).error or "")
    tool = f"cat <<'EOF'\n{TABS}EOF\nexit 14"
    assert (await topo.read_matrix(machine({}, {"nvidia-smi": tool}))).error is None
    hangs = machine({}, {"nvidia-smi": "sleep 60"})
    assert "no answer within" in ((await topo.read_p2p(hangs, "n", 0.2)).error or "")
    quiet = machine({}, {"nvidia-smi": "exit 0"})
    assert await topo.read_nvlinks(quiet) == topo.NvLinks()
    angry = machine({}, {"nvidia-smi": "echo Insufficient Permissions >&2; exit 4"})
    assert "Insufficient Permissions" in ((await topo.read_matrix(angry)).error or "")


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([TABS, BLANKS, P2P, NVLINK]),
    st.text(max_size=60),
    st.integers(0, 600),
    st.integers(0, 600),
)
def test_fuzz(text: str, noise: str, start: int, end: int):
    mutated = text[:start] + noise + text[end:]
    matrix = topo.parse_matrix(mutated)
    assert matrix.error is not None or matrix.gpus
    topo.parse_p2p(mutated)
    topo.parse_nvlinks(mutated)


@pytest.mark.parametrize("piece", ["GPU0 ", "GPU0\t X \n", "\x1b[", "NIC1NIC2", "GPU 0: (UUID: "])
def test_huge_output_is_bounded(piece: str):
    huge = piece * (4 * 2**20 // len(piece))
    assert len(topo.parse_matrix(huge).cells) == 0
    topo.parse_p2p(huge)
    topo.parse_nvlinks(huge)
