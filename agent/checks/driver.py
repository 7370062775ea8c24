"""Check `driver`: is there a driver for every kind of card, does it answer, and if not, why not.

A node without cards passes and says so; one whose cards cannot be asked never does (case E04).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from agent.checks import labels, machine
from agent.checks.verdict import Verdict, failed, passed, together, warned

if TYPE_CHECKING:
    from agent.probes.found import Found
    from agent.probes.pci import PciDevice

_IN_CONTAINER: Final = (
    "in a container restart it, and give it its cards by --device options or CDI so that it keeps "
    "them; on a host look for NVRM and Xid lines in `dmesg`"
)
_FELL_OFF: Final = "look for Xid 79 in `dmesg`, then reboot; check the card's slot and power"
_REMEDIES: Final = (
    (
        ("mismatch", "different versions"),
        "stop the engines and reload the driver (`rmmod nvidia_uvm nvidia_drm nvidia_modeset "
        "nvidia && modprobe nvidia`), or reboot",
    ),
    (("nvidiactl", "container", "unknown error"), _IN_CONTAINER),
    (("permission",), "let the agent's user read and write the cards: `ls -l /dev/nvidia*`"),
    (
        ("communicate with", "not loaded", "no such device"),
        "load the driver (`modprobe nvidia`) and read `dmesg` if that fails: after a kernel "
        "upgrade it has to be built anew (`dkms status`)",
    ),
    (
        ("libnvidia-ml", "library not found", "shared library"),
        "install the driver's own libnvidia-ml.so.1, of the same version as its kernel module; "
        "a container gets it by --gpus or CDI",
    ),
    (
        ("hung", "no answer", "not finished", "killed", "timed out"),
        "look for Xid lines in `dmesg`; a driver that hangs needs a reboot",
    ),
    (("lost", "fallen off"), _FELL_OFF),
)
"""Words of an error, first match counts, and what to do."""
_ASK_BY_HAND: Final = "run `nvidia-smi` by hand and look for NVRM lines in `dmesg`"
_INSTALL: Final = (
    "install NVIDIA's driver (`apt install nvidia-driver-...`, or your distribution's package), "
    "then `modprobe nvidia`; a container gets it from its host by --gpus or CDI"
)
_WSL: Final = (
    "install NVIDIA's driver in Windows, none inside Linux, run `wsl --update` and "
    "`wsl --shutdown` in Windows, then try `/usr/lib/wsl/lib/nvidia-smi`"
)
_NO_NVML: Final = (
    "let the agent load libnvidia-ml.so.1 (`ldconfig -p | grep nvidia-ml`): nvidia-smi tells less, "
    "and each question to it takes seconds"
)
_HANDED_ON: Final = "leave it so, or bind the cards to their own driver if the node should use them"


def driver(found: Found) -> Verdict | None:
    """The drivers of all kinds of cards here."""
    verdicts = [*_nvidia(found), *_amd(found), *_handed_on(found)]
    return together(verdicts) or passed(_no_gpu(found))


def _no_gpu(found: Found) -> str:
    if machine.pci_known(found):
        return "no GPU on the PCI bus: this is a CPU-only node"
    why = found.pci.error or "no reason given"
    return (
        "no GPU and no sign of a driver: taken as a CPU-only node, though the PCI bus could not "
        f"be read ({why})"
    )


def _handed_on(found: Found) -> Iterator[Verdict]:
    kept = machine.handed_on(found)
    if kept:
        count = labels.counted(len(kept), "card")
        yield warned(f"{count} kept for virtual machines: {_addresses(kept)}", _HANDED_ON)


def _nvidia(found: Found) -> Iterator[Verdict]:
    cards = [gpu for gpu in found.gpus.cards if gpu.vendor == "nvidia"]
    on_pci = machine.on_pci(found, "nvidia")
    if machine.answering(found, "nvidia"):
        yield _nvidia_works(found)
    elif machine.in_wsl(found):
        yield failed(_wsl_words(found), _WSL)
    elif cards or found.signs:
        yield from _nvidia_silent(found, on_pci)
    elif on_pci:
        yield _nvidia_missing(found, on_pci)
    elif error := _nvidia_error(found):
        yield _only_tools(found, error, "NVIDIA", _remedy(error))


def _nvidia_works(found: Found) -> Verdict:
    gpus = found.gpus
    version = f"NVIDIA driver {gpus.driver_version or 'of unknown version'}"
    cuda = f", CUDA {gpus.cuda_version}" if gpus.cuda_version else ""
    words = f"{version}{cuda}, by {gpus.source or 'an unknown source'}"
    if gpus.source == "nvidia-smi":
        return warned(f"{words} instead of NVML{_because(gpus.error)}", _NO_NVML)
    if gpus.error:
        return warned(f"{words}; {gpus.error}", _remedy(gpus.error))
    return passed(words)


def _because(error: str | None) -> str:
    return f": {error}" if error else ""


def _nvidia_silent(found: Found, on_pci: Sequence[PciDevice]) -> Iterator[Verdict]:
    """The driver is here and no card answers."""
    cards = [gpu for gpu in found.gpus.cards if gpu.vendor == "nvidia"]
    problems = [problem for gpu in cards for problem in gpu.problems]
    why = _nvidia_error(found) or next(iter(problems), None)
    signs = f"NVIDIA's driver is here ({labels.listed(found.signs or ('it names cards',))})"
    if not cards and not on_pci and machine.handed_on(found, "nvidia"):
        return  # said of these cards already
    count = f", {labels.counted(len(on_pci), 'NVIDIA card')} on the PCI bus" if on_pci else ""
    if not on_pci and machine.pci_known(found):
        count = ", no NVIDIA card on the PCI bus"  # a module is only loaded where there was one
    said = why or "the driver shows no card and gives no reason"
    lost = any(problem.startswith("lost") for problem in problems)
    remedy = _FELL_OFF if lost else _remedy(said)
    yield failed(f"{signs}{count}, but no card answers: {said}", remedy)


def _nvidia_missing(found: Found, on_pci: Sequence[PciDevice]) -> Verdict:
    """Cards on PCI, and nothing that says that their driver is loaded."""
    count = labels.counted(len(on_pci), "NVIDIA card")
    words = f"{count} on the PCI bus ({_addresses(on_pci)}) and no driver that answers"
    holders = sorted({device.driver for device in on_pci if device.driver})
    error = _nvidia_error(found)
    if holders == ["nvidia"]:
        words += f", though the kernel module nvidia holds them{_because(error)}"
        return failed(words, _remedy(error) if error else _IN_CONTAINER)
    if holders:
        remedy = f"keep {holders[0]} from loading (/etc/modprobe.d, `blacklist {holders[0]}`), then"
        return failed(f"{words}; held by {labels.listed(holders)}", f"{remedy} {_INSTALL}")
    return failed(words + _because(error), _remedy(error) if error else _INSTALL)


def _nvidia_error(found: Found) -> str | None:
    error = found.gpus.error
    if error and ("nvidia" in error.lower() or "nvml" in error.lower() or not _amd_here(found)):
        return None if _is_amd(error) else error
    return None


def _amd_here(found: Found) -> bool:
    cards = any(gpu.vendor == "amd" for gpu in found.gpus.cards)
    return cards or bool(machine.on_pci(found, "amd"))


def _is_amd(error: str) -> bool:
    return error.startswith(("amd-smi", "rocm-smi"))


def _only_tools(found: Found, error: str, vendor: str, remedy: str) -> Verdict:
    """A tool that fails on a machine where nothing else speaks of a card."""
    if machine.pci_known(found):
        words = f"no {vendor} card on the PCI bus: this is a CPU-only node, but its tools say"
        return warned(f"{words}: {error}", f"remove {vendor}'s tools if the node is to have no GPU")
    return failed(f"{error}; whether there is a card is not known", remedy)


def _wsl_words(found: Found) -> str:
    device = "/dev/dxg" in found.signs
    seen = "Windows offers /dev/dxg" if device else "Windows offers no GPU (no /dev/dxg)"
    return f"in WSL: {seen}, but no card answers{_because(found.gpus.error)}"


def _remedy(error: str) -> str:
    said = error.lower()
    return next((do for words, do in _REMEDIES if any(w in said for w in words)), _ASK_BY_HAND)


_AMD_INSTALL: Final = (
    "load AMD's driver (`modprobe amdgpu`), or install it and ROCm (`amdgpu-install`); a container "
    "needs /dev/kfd and /dev/dri"
)
_AMD_TOOLS: Final = "install amd-smi (`apt install amd-smi-lib`): the kernel tells less than it"


def _amd(found: Found) -> Iterator[Verdict]:
    on_pci = machine.on_pci(found, "amd")
    error = found.gpus.error
    if machine.answering(found, "amd"):
        yield _amd_works(found)
    elif on_pci or any(gpu.vendor == "amd" for gpu in found.gpus.cards):
        loaded = any(device.driver == "amdgpu" for device in on_pci)
        count = labels.counted(len(on_pci), "AMD card")
        words = f"{count} on the PCI bus ({_addresses(on_pci)})"
        held = ", held by amdgpu" if loaded else ", without the driver amdgpu"
        yield failed(f"{words}{held}, but none answers{_because(error)}", _AMD_INSTALL)
    elif error and _is_amd(error):
        yield _only_tools(found, error, "AMD", _AMD_INSTALL)


def _amd_works(found: Found) -> Verdict:
    gpus = found.gpus
    if machine.answering(found, "nvidia"):
        return passed("AMD cards answer as well")  # driver and source are those of NVIDIA's
    words = f"AMD driver {gpus.driver_version or 'of unknown version'}, by {gpus.source or '?'}"
    if gpus.source == "sysfs" or gpus.error:
        return warned(words + _because(gpus.error), _AMD_TOOLS)
    return passed(words)


def _addresses(devices: Sequence[PciDevice]) -> str:
    return labels.listed(device.address for device in devices)
