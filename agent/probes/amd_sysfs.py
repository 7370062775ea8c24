"""AMD cards as the kernel driver (amdgpu) shows them below /sys/class/drm. Blocking reads.

Called by agent/probes/amd.py: it fills what the tools leave out, stands in where no tool is
installed, and costs nothing, so that each sync can read use, temperature and power from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from agent.probes import values
from agent.probes.card import Clocks, Ecc, Gpu, Gpus, Pcie

if TYPE_CHECKING:
    from agent.probes.root import Root

DRM: Final = "/sys/class/drm"
MAX_CARDS: Final = 256
MAX_BLOCKS: Final = 64
AMD: Final = "0x1002"
_GENERATIONS: Final = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""PCIe generation by GT/s of a lane."""
_NAMES: Final[Mapping[str, str]] = {
    "66a1": "Instinct MI50",
    "738c": "Instinct MI100",
    "7408": "Instinct MI250X",
    "740c": "Instinct MI250",
    "740f": "Instinct MI210",
    "74a0": "Instinct MI300A",
    "74a1": "Instinct MI300X",
    "74a5": "Instinct MI325X",
    "75a0": "Instinct MI350X",
    "75a3": "Instinct MI355X",
}
"""Cards to compute with by PCI device, for drivers and tools that leave the product name empty."""


def unique_id(text: str | None) -> str | None:
    """An AMD card's UUID as ROCR_VISIBLE_DEVICES takes it: `GPU-` and 16 hex digits.

    Tools print it with or without 0x and leave out leading zeros; 0 and N/A are none.
    """
    match = re.fullmatch(r"(?:0x)?([0-9a-fA-F]{1,16})", (text or "").strip())
    if match is None or not int(match[1], 16):
        return None
    return f"GPU-{int(match[1], 16):016x}"


def product_name(*names: str | None, device: str | None = None) -> str | None:
    """The first that is a name: `Arcturus GL-XL [Instinct MI100]` is what stands in brackets.

    Old tools print numbers (`0x1002`) for names; `device` (PCI device number) names known cards.
    """
    for name in names:
        text = re.sub(r"\s+", " ", (name or "")[:200]).strip()
        if values.reason(text) is not None or re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", text):
            continue
        inner = re.fullmatch(r"[^\[\]]*\[([^\[\]/]{3,})[^\[\]]*\]", text)
        return inner[1].strip() if inner else text
    return _NAMES.get((device or "").strip().lower().removeprefix("0x").zfill(4))


def pcie_generation(gt_per_s: float | None) -> int | None:
    """PCIe generation of a speed in GT/s per lane."""
    return None if gt_per_s is None else _GENERATIONS.get(gt_per_s)


def parse_errors(text: str) -> tuple[int, int] | None:
    """Uncorrected and corrected errors of one block (`ue: 0`, `ce: 3`); None when not told."""
    found = dict(re.findall(r"\b(ue|ce):\s{0,8}([0-9]{1,18})\b", text[:4096]))
    return (int(found["ue"]), int(found["ce"])) if {"ue", "ce"} <= found.keys() else None


def read_cards(root: Root) -> Gpus:
    """Cards held by amdgpu, in order of their DRM number. Their index is unknown to the kernel."""
    names = [name for name in root.names(DRM) if re.fullmatch(r"card[0-9]{1,4}", name)]
    names.sort(key=lambda name: int(name[4:]))
    found = (_read_card(root, name) for name in names[:MAX_CARDS])
    cards = tuple(card for card in found if card is not None)
    version = values.version(root.read("/sys/module/amdgpu/version", 256)) if cards else None
    return Gpus(cards, driver_version=version, source="sysfs" if cards else None)


def _read_card(root: Root, name: str) -> Gpu | None:
    place = f"{DRM}/{name}/device"

    def text(file: str) -> str | None:
        return root.read(f"{place}/{file}", 4096)

    if (text("vendor") or "").strip() != AMD or text("mem_info_vram_total") is None:
        return None
    sensors = _sensors(root, place)
    numa = values.whole(text("numa_node"))
    cpus = (text("local_cpulist") or "").strip()
    return Gpu(
        vendor="amd",
        uuid=unique_id(text("unique_id")),
        name=product_name(text("product_name"), device=text("device")),
        pci_bus_id=_address(root, place),
        memory_mib=_mib(text("mem_info_vram_total")) or None,
        memory_used_mib=_mib(text("mem_info_vram_used")),
        utilization_percent=values.number(text("gpu_busy_percent"), "%"),
        temperature_c=_scaled(sensors, 1000, "junction", "edge"),
        power_w=_scaled(sensors, 1_000_000, "power1_average", "power1_input"),
        power_limit_w=_scaled(sensors, 1_000_000, "power1_cap"),
        clocks=Clocks(sm=_clock(sensors, "sclk"), memory=_clock(sensors, "mclk")),
        pcie=Pcie(
            gen=_generation(text("current_link_speed")),
            gen_max=_generation(text("max_link_speed")),
            width=values.whole(text("current_link_width")) or None,
            width_max=values.whole(text("max_link_width")) or None,
        ),
        ecc=_errors(root, place),
        numa=numa if numa is not None and numa >= 0 else None,
        cpu_affinity=cpus if values.cpu_list(cpus) else None,
    )


def _address(root: Root, place: str) -> str | None:
    """PCI address: the device is a link named so, and in a copy its uevent still says it."""
    linked = values.pci_bus_id((root.link(place) or "").rpartition("/")[2])
    event = root.read(f"{place}/uevent", 4096) or ""
    slot = re.search(r"^PCI_SLOT_NAME=(\S{1,32})$", event, re.MULTILINE)
    return linked or (values.pci_bus_id(slot[1]) if slot else None)


def _mib(text: str | None) -> int | None:
    size = values.whole(text)
    return None if size is None or size < 0 else size >> 20


def _generation(speed: str | None) -> int | None:
    return pcie_generation(values.number((speed or "").strip().split(" ")[0]))


def _sensors(root: Root, place: str) -> dict[str, int]:
    """Sensor values by file name, and temperatures and clocks by their label (junction, sclk)."""
    found: dict[str, int] = {}
    for monitor in root.names(f"{place}/hwmon")[:4]:
        folder = f"{place}/hwmon/{monitor}"
        for file in root.names(folder)[:256]:
            match = re.fullmatch(r"((?:temp|freq)[0-9]{1,2}|power1)_(input|average|cap)", file)
            value = values.whole(root.read(f"{folder}/{file}", 64)) if match else None
            if match is None or value is None:
                continue
            found[file] = value
            label = (root.read(f"{folder}/{match[1]}_label", 64) or "").strip()
            if label and match[2] == "input":
                found[label] = value
    return found


def _scaled(sensors: Mapping[str, int], divisor: int, *names: str) -> float | None:
    """The first sensor that is there. Junction is the hottest spot, by which the card throttles."""
    return next((sensors[name] / divisor for name in names if name in sensors), None)


def _clock(sensors: Mapping[str, int], label: str) -> int | None:
    hertz = sensors.get(label)
    return None if hertz is None else hertz // 1_000_000


def _errors(root: Root, place: str) -> Ecc:
    """Errors of all blocks since the driver was loaded; cards without RAS have no such files."""
    blocks = [name for name in root.names(f"{place}/ras") if name.endswith("_err_count")]
    texts = (root.read(f"{place}/ras/{name}", 4096) or "" for name in blocks[:MAX_BLOCKS])
    counts = [errors for text in texts if (errors := parse_errors(text)) is not None]
    if not counts:
        return Ecc()
    return Ecc(corrected=sum(ce for _, ce in counts), uncorrected=sum(ue for ue, _ in counts))
