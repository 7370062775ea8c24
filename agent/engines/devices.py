"""Which cards a process may see: the variables that CUDA and ROCm read. Pure.

UUIDs are right whatever happens to numbers: these change when a card is lost or the machine boots.
But some engines read the variable themselves and take numbers only; for them a UUID becomes its
number in PCI order where all cards of the node can be numbered (case E05).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.assignment import Assignment

CUDA: Final = "CUDA_VISIBLE_DEVICES"
ROCM: Final = "ROCR_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"
_AMD_UUID_DIGITS: Final = 16
_NO_NUMBER: Final = "invalid literal for int()"


def is_amd(uuid: str) -> bool:
    """`GPU-` and 16 hex digits is a card of AMD's; NVIDIA's UUIDs are longer and have dashes."""
    return uuid.startswith("GPU-") and len(uuid) == len("GPU-") + _AMD_UUID_DIGITS


def devices(a: Assignment, numbers: Mapping[str, int] | None = None) -> dict[str, str]:
    """The environment that shows only the cards given; none when none.

    `numbers` (UUID -> number in PCI order) is for an engine that reads numbers only; without the
    number of each card, as for a MIG slice, it gets UUIDs all the same: a wrong card is worse than
    an engine that ends with an error.
    """
    uuids = [gpu.uuid for gpu in a.gpus]
    if uuids and all(is_amd(uuid) for uuid in uuids):
        return {ROCM: ",".join(uuids)}
    if numbers and uuids and all(uuid in numbers for uuid in uuids):
        chosen = sorted(numbers[uuid] for uuid in uuids)
        return {CUDA: ",".join(map(str, chosen)), ORDER: "PCI_BUS_ID"}
    return {CUDA: ",".join(uuids)}


def hint(log: str | None, environment: Mapping[str, str]) -> str:
    """What to add to a failure when the engine could not read the UUIDs that it was given."""
    shown = environment.get(CUDA, "")
    if _NO_NUMBER not in (log or "") or not ("GPU-" in shown or "MIG-" in shown):
        return ""
    return (
        f"; {CUDA} is {shown[:200]} and this engine seems to read numbers only: use a version that "
        "takes UUIDs, or cards without MIG"
    )
