"""`rocm-smi -a --json`: cards under keys that each ROCm version spells anew. Pure.

Called by agent/probes/amd.py where amd-smi is missing. All values are text. Printed without
`--json` the same keys stand behind `GPU[0] :`, so that form is read as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from agent.probes import values
from agent.probes.amd_json import document, said
from agent.probes.amd_sysfs import pcie_generation, product_name, unique_id
from agent.probes.card import Clocks, Gpu, Gpus, Pcie

MAX_CARDS: Final = 256
MAX_LINES: Final = 50_000
_LINE: Final = re.compile(r"GPU\[([0-9]{1,4})\]\s{0,16}:\s{0,16}([^:]{1,80}):(.{0,200})")
_WHOLE_LINE: Final = re.compile(r"=*")
_LINK: Final = re.compile(r"\(([0-9.]{1,5}) ?GT/s x([0-9]{1,2})\)")


def parse(text: str) -> Gpus:
    """Cards of the JSON form or of the text form; the reason when there is neither."""
    found = document(text)
    if isinstance(found, dict):
        cards = {
            int(name[4:]): _fields(fields)
            for name, fields in found.items()
            if isinstance(fields, dict) and re.fullmatch(r"card[0-9]{1,4}", name)
        }
        system = found.get("system")
        version = _fields(system).get("driver version") if isinstance(system, dict) else None
    else:
        cards, version = _parse_lines(text)
    if not cards:
        return Gpus(error=f"rocm-smi: {said(text)}", source="rocm-smi")
    return Gpus(
        tuple(_card(index, cards[index]) for index in sorted(cards)[:MAX_CARDS]),
        driver_version=values.version(version),
        source="rocm-smi",
    )


def _fields(fields: Mapping[str, object]) -> dict[str, str]:
    """Values by key in lower case (`Card series` became `Card Series`), N/A left out."""
    named = ((key.strip().rstrip(":").lower(), str(value)[:200]) for key, value in fields.items())
    return {key: value.strip() for key, value in named if values.reason(value) is None}


def _parse_lines(text: str) -> tuple[dict[int, dict[str, str]], str | None]:
    cards: dict[int, dict[str, object]] = {}
    version = None
    for line in values.settled(text, _WHOLE_LINE)[: 4 * 2**20].splitlines()[:MAX_LINES]:
        if match := _LINE.match(line[:400]):
            if int(match[1]) in cards or len(cards) < MAX_CARDS:
                cards.setdefault(int(match[1]), {}).setdefault(match[2].strip(), match[3].strip())
        elif line.startswith("Driver version:"):
            version = line.partition(":")[2].strip()
    return {index: _fields(fields) for index, fields in cards.items()}, version


def _card(index: int, fields: Mapping[str, str]) -> Gpu:
    def first(*keys: str) -> str | None:
        return next((fields[key] for key in keys if key in fields), None)

    numa = values.whole(first("(topology) numa node"))
    link = _LINK.search(first("pcie clock level") or "")
    return Gpu(
        vendor="amd",
        index=index,
        uuid=unique_id(first("unique id")),
        name=product_name(
            *map(fields.get, ("card series", "device name", "marketing name", "card model")),
            device=first("gpu id", "device id"),
        ),
        pci_bus_id=values.pci_bus_id(first("pci bus")),
        memory_mib=_mib(first("vram total memory (b)")) or None,
        memory_used_mib=_mib(first("vram total used memory (b)")),
        utilization_percent=values.number(first("gpu use (%)"), "%"),
        # Junction is the hottest spot, by which the card throttles; old cards have edge only.
        temperature_c=values.number(
            first("temperature (sensor junction) (c)", "temperature (sensor edge) (c)"), "c"
        ),
        power_w=values.number(
            first(
                "current socket graphics package power (w)",
                "average graphics package power (w)",
                "average socket power (w)",
            ),
            "w",
        ),
        power_limit_w=values.number(first("max graphics package power (w)"), "w"),
        clocks=Clocks(
            sm=_mhz(first("sclk clock speed")),
            memory=_mhz(first("mclk clock speed")),
        ),
        pcie=Pcie(
            gen=pcie_generation(values.number(link[1])) if link else None,
            width=int(link[2]) if link else None,
        ),
        numa=numa if numa is not None and numa >= 0 else None,
    )


def _mib(text: str | None) -> int | None:
    size = values.whole(text)
    return None if size is None or size < 0 else size >> 20


def _mhz(text: str | None) -> int | None:
    """`(1402Mhz)`."""
    speed = values.number((text or "").strip("() "), "mhz")
    return None if speed is None or not 0 <= speed < 1e6 else int(speed)
