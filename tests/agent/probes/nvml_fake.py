"""How tests start NVML's real child beside a driver library that misbehaves as told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from agent.probes import gpus

CHILD = Path(__file__).parent / "fake_nvml" / "child.py"
INFORMATION = "Model: \t NVIDIA H100 80GB HBM3\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\n"
ZERO = "00000000-0000-0000-0000-000000000000"


def child(**scenario: object) -> tuple[str, ...]:
    """A command; fake_nvml/pynvml.py says what a scenario may hold."""
    return (sys.executable, str(CHILD), json.dumps(scenario))


def uuid(index: int) -> str:
    """What the library calls a card."""
    return f"GPU-{index:08d}-aaaa-bbbb-cccc-0123456789ab"


def kernel_list(*indices: int, lost: tuple[int, ...] = ()) -> dict[str, str]:
    """The driver's own list in /proc for these cards; a lost one has forgotten its UUID."""
    return {
        f"{gpus.PROC_GPUS}/{index:04x}:1b:00.0/information": INFORMATION.format(
            uuid="GPU-????????-????" if index in lost else uuid(index),
            bus=f"{index:04x}:1b:00.0",
        )
        for index in indices
    }
