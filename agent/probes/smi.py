"""nvidia-smi as GPUs: the way in where NVML's Python library cannot be used, or gives no answer.

Called by inventory.py. `-q -x` is asked first; where that is refused or broken, `-q`; where cards
are cut into MIG devices `-L` as well, which alone names their UUIDs. Parsing is pure and raises
nothing: smi_tree.py makes a tree of either form, smi_card.py a card of a tree.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

import trio

from agent.probes import smi_card, smi_tree, values
from agent.probes.card import Gpu, Gpus
from agent.probes.root import bounded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agent.probes.card import MigDevice
    from agent.probes.root import Root, ToolResult

SOURCE: Final = "nvidia-smi"
TIMEOUT_S: Final = 20.0
"""Without the persistence daemon the driver wakes every card first: seconds on eight of them."""
PARSE_TIMEOUT_S: Final = 5.0
LEAST_S: Final = 0.2
"""With less time left than this no further call is begun."""
MAX_LINES: Final = 10_000
_LOST: Final = re.compile(
    r"GPU(?:[0-9]{1,3}:)?[ \t]{0,4}"
    r"((?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])"
    r"[ \t]{0,4}:[ \t]{0,4}([^\n]{1,120})"
)
_LOST_WORDS: Final = ("lost", "unknown error", "requires reset", "fallen off")
_LISTED_CARD: Final = re.compile(r"GPU ([0-9]{1,4}): .{0,200}\(UUID: (GPU-[0-9A-Za-z-]{1,60})\)")
_LISTED_SLICE: Final = re.compile(
    r"\s{0,8}MIG (\S{1,40})\s{1,40}Device\s{1,8}([0-9]{1,4}): \(UUID: (MIG-[0-9A-Za-z/-]{1,100})\)"
)
_HINTS: Final = (
    # What is printed, the exit status that means the same, and what to do.
    (
        "version mismatch",
        18,
        "the driver was upgraded while in use: reload its kernel modules or reboot",
    ),
    (
        "communicate with the nvidia driver",
        9,
        "load the driver (`modprobe nvidia`; `dmesg` says why it fails) or install one that fits "
        "this kernel",
    ),
    (
        "initialize nvml: unknown error",
        None,
        "in a container this is lost access to the devices, often after a systemd daemon-reload: "
        "restart the container",
    ),
    (
        "no devices were found",
        6,
        "the driver is loaded and has no card: `lspci` and `dmesg` say whether the machine has one",
    ),
    ("insufficient permission", 4, "run the agent as a user who may open /dev/nvidia*"),
    (
        "libnvidia-ml",
        12,
        "install the driver's own libnvidia-ml.so.1, of the same version as its kernel module",
    ),
    ("gpu is lost", 15, "a card has fallen off the bus: reboot, and look for Xid 79 in `dmesg`"),
    ("not available", 3, "this driver cannot be asked that: is it installed whole?"),
    ("power cables", 8, "check the external power cables of the cards"),
    ("interrupt", 10, "the kernel has an interrupt problem with a card: see `dmesg`"),
)
_GOOD: Final = frozenset({0, 14})
"""14 only warns that a card's infoROM is corrupted."""


def parse(text: str, stderr: str = "", *, cut: bool = False, option: str = "-q -x") -> Gpus:
    """Cards of `-q -x` or `-q` output, whichever it is. Other text gives no cards and says why.

    Lines about lost cards may stand before, after or instead of the document. `cut` says that the
    tool was stopped while it wrote; `option` is for the words of errors only.
    """
    lost = {**_lost_cards(stderr), **_lost_cards(text)}
    document = smi_tree.read(text, cut=cut)
    if document is None:
        why = _first_line(text) or _first_line(stderr) or "no output"
        return Gpus(cards=tuple(lost.values()), error=_error(option, why), source=SOURCE)
    cards = [smi_card.read(tree, index) for index, tree in enumerate(document.cards)]
    cards = [_with_problems(card, lost.pop(card.pci_bus_id or "", None)) for card in cards]
    error = document.error or (None if cards else "no GPU in the document")
    return Gpus(
        cards=(*cards, *lost.values()),
        driver_version=_version(document.top, "kmd_version", "driver_version"),
        cuda_version=_version(document.top, "cuda_umd_version", "cuda_version"),
        error=_error(option, error) if error else None,
        source=SOURCE,
    )


def _lost_cards(text: str) -> dict[str, Gpu]:
    """Cards that an error line names, by address."""
    found = {}
    for match in islice(_LOST.finditer(text[: smi_tree.MAX_CHARS]), smi_tree.MAX_CARDS):
        address, message = values.pci_bus_id(match[1]), match[2].strip().rstrip(".")
        before = text[max(0, match.start() - 16) : match.start()]
        said = any(word in message.lower() for word in _LOST_WORDS)
        if address is not None and (said or "handle for" in before):
            denied = values.reason(message) == "permission"
            problem = f"{'no access' if denied else 'lost'}: nvidia-smi says {message!r}"
            found[address] = Gpu(pci_bus_id=address, problems=(problem,))
    return found


def _with_problems(card: Gpu, lost: Gpu | None) -> Gpu:
    return card if lost is None else replace(card, problems=(*lost.problems, *card.problems))


def _version(top: smi_tree.Tree, *keys: str) -> str | None:
    texts = (top.get(key) for key in keys)
    found = (values.version(text) for text in texts if isinstance(text, str))
    return next((version for version in found if version), None)


def _first_line(text: str) -> str | None:
    """The first line with a word or a number in it; frames of tables have none."""
    lines = (values.plain(line).strip() for line in text[:65536].splitlines())
    return next((line[:200] for line in lines if any(map(str.isalnum, line))), None)


def _error(option: str, why: str, exit_code: int | None = None) -> str:
    """Why, and what to do next where that is known."""
    said = why.lower()
    hint = next((hint for words, code, hint in _HINTS if words in said), None)
    if hint is None and exit_code is not None:
        hint = next((hint for _, code, hint in _HINTS if code == exit_code), None)
    return f"nvidia-smi {option}: {why}" + (f"; {hint}" if hint else "")


Listed = tuple[int, str, list[tuple[int, str, str]]]
"""A card of `-L`: its number, its UUID, and (number, profile, UUID) of its MIG devices."""


def parse_list(text: str) -> list[Listed]:
    """Cards and MIG devices of `nvidia-smi -L`."""
    cards: list[Listed] = []
    for line in text[: smi_tree.MAX_CHARS].split("\n", MAX_LINES)[:MAX_LINES]:
        plain = values.plain(line[:1000]).rstrip()
        if card := _LISTED_CARD.fullmatch(plain):
            cards.append((int(card[1]), card[2], []))
        elif cards and (device := _LISTED_SLICE.fullmatch(plain)):
            cards[-1][2].append((int(device[2]), device[1], device[3]))
    return cards


def name_slices(cards: Sequence[Gpu], listed: Sequence[Listed]) -> tuple[Gpu, ...]:
    """Cards whose MIG devices have the UUIDs and profiles of `-L`.

    A card is found by its UUID, or by its number where that is not unique; a device by its number.
    The layout may have changed between both calls: a device that is not listed keeps no UUID.
    """
    return tuple(
        replace(card, slices=tuple(_named_slices(card, listed))) if card.slices else card
        for card in cards
    )


def _named_slices(card: Gpu, listed: Sequence[Listed]) -> Iterator[MigDevice]:
    same = [entry for entry in listed if entry[1] == card.uuid]
    if len(same) != 1:
        same = [entry for entry in same or listed if entry[0] == card.index]
    named = {number: (profile, uuid) for _, _, devices in same for number, profile, uuid in devices}
    for device in card.slices:
        profile, uuid = named.get(-1 if device.index is None else device.index, (None, None))
        yield replace(device, profile=device.profile or profile, uuid=device.uuid or uuid)


async def read(root: Root, timeout_s: float = TIMEOUT_S, *, fast: bool = False) -> Gpus:
    """Ask the nvidia-smi in the root's PATH; `timeout_s` is for all its calls together.

    No such tool means no cards and no error. `fast` changes nothing: one call tells everything.
    """
    del fast
    deadline = trio.current_time() + timeout_s
    found, again = await _ask(root, "-q -x", timeout_s)
    left = deadline - trio.current_time()
    if again and left > LEAST_S:
        other, _ = await _ask(root, "-q", left)
        found = _better(found, other)
    left = deadline - trio.current_time()
    if any(device.uuid is None for card in found.cards for device in card.slices):
        listed = await root.run(["nvidia-smi", "-L"], left) if left > LEAST_S else None
        if listed is not None:
            found = replace(found, cards=name_slices(found.cards, parse_list(listed.stdout)))
    return found


async def _ask(root: Root, option: str, timeout_s: float) -> tuple[Gpus, bool]:
    """What one form tells, and whether asking for the other one may tell more."""
    result = await root.run(["nvidia-smi", *option.split()], timeout_s)
    if result.exit_code is None and not result.stdout:
        missing = result.error is None or result.error.endswith("no such program in PATH")
        return Gpus(error=None if missing else result.error), False
    # In a thread: a tool gone wild prints megabytes, and reading them must not hold up the loop.
    work = partial(parse, result.stdout, result.stderr, cut=result.exit_code is None, option=option)
    found = await bounded(work, key="nvidia-smi document", timeout_s=PARSE_TIMEOUT_S)
    if found is None:
        size = len(result.stdout)
        return Gpus(error=f"nvidia-smi {option}: {size} characters not read in time"), True
    again = found.error is not None and result.exit_code is not None
    return replace(found, error=_why(found, result, option)), again


def _why(found: Gpus, result: ToolResult, option: str) -> str | None:
    """The document's own error, the deadline or the exit status: what says most."""
    whole = any(card.memory_mib or card.name for card in found.cards)
    if result.exit_code is None:
        return result.error
    if result.exit_code in _GOOD:
        return found.error
    if found.error is None:
        return _error(option, f"exit status {result.exit_code}", result.exit_code)
    said = found.error.partition(": ")[2]
    return found.error if whole or "; " in said else _error(option, said, result.exit_code)


def _better(first: Gpus, second: Gpus) -> Gpus:
    """The more cards that say something of themselves the better; lost ones of both are kept."""

    def told(found: Gpus) -> int:
        return sum(card.name is not None or card.uuid is not None for card in found.cards)

    best, other = (second, first) if told(second) > told(first) else (first, second)
    if told(second) == told(first) > 0 and second.error is None:
        best, other = second, first
    known = {card.pci_bus_id for card in best.cards}
    lost = [c for c in other.cards if c.problems and c.pci_bus_id not in known]
    return replace(best, cards=(*best.cards, *lost)) if lost else best
