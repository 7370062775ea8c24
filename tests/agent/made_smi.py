"""`nvidia-smi -q` and `-q -x` of cards that no capture has, written by the published format.

`card` is one card as nested sections, of which a test changes some; `text` and `xml` print cards.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Section = dict[str, Any]
RACK = "5a1c3b5e-0000-4111-8222-00000000abcd"
ZEROS = "00000000-0000-0000-0000-000000000000"
NONE = "N/A"


def card(at: int, name: str, total: object, reserved: object = "0 MiB", **more: Any) -> Section:
    """A healthy idle card of this memory; `more` replaces sections by their name with _ for blanks.

    Numbers become MiB; a section that is None is left out, as by a driver that does not know it.
    """
    sizes = [f"{size} MiB" if isinstance(size, int) else size for size in (total, reserved)]
    section: Section = {
        "Product Name": name,
        "Persistence Mode": "Enabled",
        "MIG Mode": {"Current": NONE, "Pending": NONE},
        "GPU UUID": f"GPU-{at:08d}-aaaa-4bbb-8ccc-0123456789ab",
        "Minor Number": str(at),
        "PCI": {
            "Bus Id": f"00000000:{0x10 + at:02X}:00.0",
            "GPU Link Info": {
                "PCIe Generation": {"Max": "5", "Current": "5"},
                "Link Width": {"Max": "16x", "Current": "16x"},
            },
        },
        "Clocks Event Reasons": {"Idle": "Active", "HW Slowdown": "Not Active"},
        "FB Memory Usage": {"Total": sizes[0], "Reserved": sizes[1], "Used": "4 MiB"},
        "Utilization": {"GPU": "0 %", "Memory": "0 %"},
        "ECC Mode": {"Current": "Enabled", "Pending": "Enabled"},
        "ECC Errors": {
            kind: {"SRAM Correctable": "0", "DRAM Correctable": "0", "DRAM Uncorrectable": "0"}
            for kind in ("Volatile", "Aggregate")
        },
        "Retired Pages": {"Single Bit ECC": NONE, "Pending Page Blacklist": NONE},
        "Remapped Rows": {
            "Correctable Error": "0",
            "Uncorrectable Error": "0",
            "Pending": "No",
            "Remapping Failure Occurred": "No",
        },
        "Temperature": {"GPU Current Temp": "31 C"},
        "GPU Power Readings": {"Average Power Draw": NONE, "Instantaneous Power Draw": "70.12 W"},
        "Clocks": {"Graphics": "345 MHz", "SM": "345 MHz", "Memory": "2619 MHz"},
        "Max Clocks": {"Graphics": "1980 MHz", "SM": "1980 MHz", "Memory": "2619 MHz"},
        "Fabric": fabric("N/A", NONE),
        "Processes": "None",
    }
    section |= {name.replace("_", " "): value for name, value in more.items()}
    return {name: value for name, value in section.items() if value is not None}


def fabric(state: str, status: str = "Success", uuid: str = NONE, clique: object = NONE) -> Section:
    """A fabric section of drivers from 550 on."""
    return {
        "State": state,
        "Status": status,
        "CliqueId": str(clique),
        "ClusterUUID": uuid,
        "Health": {"Bandwidth": NONE},
    }


def slice_(number: int, gi: int, total: int) -> Section:
    """A MIG device."""
    return {
        "Index": str(number),
        "GPU Instance ID": str(gi),
        "Compute Instance ID": "0",
        "Shared FB Memory Usage": {"Total": f"{total} MiB", "Used": "17 MiB"},
    }


def text(cards: Sequence[Section], driver: str = "580.95.05", cuda: str = "13.0") -> str:
    """What `nvidia-smi -q` prints."""
    top = {"Timestamp": "x", "Driver Version": driver, "CUDA Version": cuda}
    lines = ["", "==============NVSMI LOG==============", "", *_lines(top, 0), ""]
    lines += _lines({"Attached GPUs": str(len(cards))}, 0)
    for section in cards:
        lines += [f"GPU {section['PCI']['Bus Id']}", *_lines(section, 1), ""]
    return "\n".join(lines) + "\n"


def _lines(section: Mapping[str, Any], depth: int) -> Iterator[str]:
    for key, value in section.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                yield f"{'':{4 * depth}}{key}"
                yield from _lines(one, depth + 1)
            else:
                yield f"{'    ' * depth + key:<55}: {one}"


def xml(cards: Sequence[Section], driver: str = "580.95.05", cuda: str = "13.0") -> str:
    """What `nvidia-smi -q -x` prints of the same: names in lower case, some of them others."""
    body = "".join(
        f'\t<gpu id="{section["PCI"]["Bus Id"]}">\n{"".join(_elements(section))}\t</gpu>\n'
        for section in cards
    )
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n'
        f"<nvidia_smi_log>\n\t<driver_version>{driver}</driver_version>\n"
        f"\t<cuda_version>{cuda}</cuda_version>\n\t<attached_gpus>{len(cards)}</attached_gpus>\n"
        f"{body}</nvidia_smi_log>\n"
    )


_TAGS = {
    "GPU UUID": "uuid", "FB Memory Usage": "fb_memory_usage", "Bus Id": "pci_bus_id",
    "GPU Link Info": "pci_gpu_link_info", "PCIe Generation": "pcie_gen",
    "GPU Current Temp": "gpu_temp", "ClusterUUID": "cluster_uuid", "CliqueId": "clique_id",
    "Instantaneous Power Draw": "instant_power_draw", "Average Power Draw": "average_power_draw",
    "Processes": "processes", "Graphics": "graphics_clock", "SM": "sm_clock",
    "GPU": "gpu_util", "Idle": "clocks_event_reason_gpu_idle",
    "HW Slowdown": "clocks_event_reason_hw_slowdown",
    "Correctable Error": "remapped_row_corr", "Uncorrectable Error": "remapped_row_unc",
    "Remapping Failure Occurred": "remapped_row_failure",
}  # fmt: skip
_INSIDE = {
    ("PCIe Generation", "Max"): "max_link_gen", ("Link Width", "Max"): "max_link_width",
    ("PCIe Generation", "Current"): "current_link_gen", ("Link Width", "Current"):
    "current_link_width", ("MIG Mode", "Current"): "current_mig", ("MIG Mode", "Pending"):
    "pending_mig", ("ECC Mode", "Current"): "current_ecc", ("ECC Mode", "Pending"): "pending_ecc",
    ("Clocks", "Memory"): "mem_clock", ("Max Clocks", "Memory"): "mem_clock",
    ("Utilization", "Memory"): "memory_util", ("Remapped Rows", "Pending"): "remapped_row_pending",
}  # fmt: skip


def _elements(section: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    for key, value in section.items():
        tag = _INSIDE.get((inside, key)) or _TAGS.get(key) or re.sub(r"\W+", "_", key).lower()
        if value == "None":
            yield f"<{tag}></{tag}>\n"
        elif isinstance(value, dict):
            yield f"<{tag}>\n{''.join(_elements(value, key))}</{tag}>\n"
        elif isinstance(value, str):
            yield f"<{tag}>{value}</{tag}>\n"
