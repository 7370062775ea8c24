"""NVML's errors that are not a card's: what they mean and what to do. Pure. Called by nvml.py.

An error at the start, or the same one for every card, is about the driver or about this process:
no card is written off for it (cases E10, E11).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agent.probes.nvml_facts import DRIVER_NOT_LOADED, MISMATCH, NO_PERMISSION, UNKNOWN

if TYPE_CHECKING:
    from agent.probes.nvml_facts import Answers

_SHARED: Final = frozenset({1, NO_PERMISSION, DRIVER_NOT_LOADED, MISMATCH, UNKNOWN})
"""Codes that, said for every card, are not about the cards."""


def explain(answers: Answers, *, loaded: bool) -> str | None:
    """Why NVML gave nothing, with advice; None when it gave something.

    `loaded` says whether the kernel has the driver.
    """
    if answers.error is not None:
        return advice(answers.error, answers.error_code, answers.control, loaded=loaded)
    codes = [answers.codes.get(index, {}).get("handle") for index in answers.facts]
    first = codes[0] if codes else None
    if first not in _SHARED or any(code != first for code in codes):
        return None
    if first == UNKNOWN and answers.control is None:
        return None  # the driver can be reached: then these are the cards' own errors
    said = answers.problems[min(answers.facts)][0]
    return advice(f"no GPU can be opened: {said}", first, answers.control, loaded=loaded)


def advice(error: str, code: int | None, control: str | None, *, loaded: bool) -> str:
    """The error with its meaning. `control` is why the driver's control device does not open."""
    if code == MISMATCH:
        return (
            f"NVML: {error}: the driver's library and its kernel module have different versions, "
            "as after an upgrade; running engines go on, new ones cannot start until the module is "
            "reloaded or the machine rebooted"
        )
    if control is not None and loaded:
        return (
            f"NVML: {error}: this process cannot open /dev/nvidiactl ({control}) although the "
            "driver is loaded, as in a container that lost its devices when systemd reloaded; "
            "the GPUs may be well: restart the agent's container, and start it with --device "
            "options or CDI so that it keeps them"
        )
    if code == DRIVER_NOT_LOADED:
        return f"NVML: {error}: load the kernel module (modprobe nvidia) and see dmesg if it fails"
    if code == UNKNOWN:
        return f"NVML: {error}: look for NVRM and Xid lines in dmesg"
    return error if error.startswith("NVML") else f"NVML: {error}"
