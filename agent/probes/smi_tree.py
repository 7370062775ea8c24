"""`nvidia-smi -q` (text) and `-q -x` (XML) as one kind of tree, whatever the driver. Pure.

Called by smi.py; smi_card.py reads the trees. A name becomes lower case with `_` for all that is no
letter or digit (`GPU Link Info` -> `gpu_link_info`). Leaves are stripped text; the repeated groups
`processes` and `mig_devices` are lists. Nothing here knows a field, so new ones cost nothing, and
nothing raises: `Document.error` says what could not be read.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias
from xml.etree import ElementTree as ET

from agent.probes import values

if TYPE_CHECKING:
    from collections.abc import Mapping

Tree: TypeAlias = "dict[str, str | Tree | list[Tree]]"

MAX_CHARS: Final = 8 * 2**20
"""What is read of one document: 16 cards with all their supported clocks are below 2 MiB."""
MAX_CARDS: Final = 256
MAX_GROUP: Final = 4096
"""Processes or MIG devices of one card."""
MAX_FIELDS: Final = 300_000
MAX_DEPTH: Final = 32
MAX_LEAF: Final = 1000
"""Characters kept of one value."""
MAX_LINE: Final = 4096
"""A longer line is no field of a card."""
BEGIN: Final = "<nvidia_smi_log"
END: Final = "</nvidia_smi_log>"

_CARD: Final = re.compile(
    r"GPU\s{1,4}((?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])", re.ASCII
)
_CARD_LINE: Final = re.compile(rf"^[ \t]{{0,40}}{_CARD.pattern}[ \t\r]{{0,40}}$", re.MULTILINE)
_SECTION: Final = re.compile(r"[A-Za-z][A-Za-z0-9 ()./_+-]{0,63}")
_OTHER: Final = re.compile(r"[^a-z0-9]+")
_ESCAPE: Final = re.compile(r"&amp;((?:amp|lt|gt|quot|apos|#[0-9]{1,7}|#x[0-9a-fA-F]{1,6});)")


@dataclass(slots=True)
class Document:
    """One output: fields above the cards, the cards, and why it is not whole (None: it is)."""

    top: Tree = field(default_factory=dict)
    cards: list[Tree] = field(default_factory=list)
    error: str | None = None


_NO_LINE: Final = re.compile("")
_WHOLE_LINE: Final = re.compile(
    r"|[^:]{1,80}: (None|N/A|Enabled|Disabled|Healthy|[0-9.]{1,12} (MiB|W|C|%|MHz))"
)
"""Last lines without an end that are no cut ones."""


class _Refused(Exception):
    """A document that no driver prints; reading on would only cost memory."""


def name(text: str) -> str:
    """A field's name in the tree: `ClusterUUID` -> `clusteruuid`, `SEC-DED` -> `sec_ded`."""
    return _OTHER.sub("_", text[:64].lower()).strip("_")


def read(text: str, *, cut: bool = False) -> Document | None:
    """The document in an output, or None where there is none. `cut`: the tool was stopped."""
    begin = text.find(BEGIN)
    card = None if begin >= 0 else _CARD_LINE.search(text)
    if begin < 0 and card is None and "=NVSMI LOG=" not in text[:MAX_CHARS]:
        return None
    if begin < 0:
        kept = values.settled(text, _NO_LINE if cut else _WHOLE_LINE)
        cut, text = cut or len(kept) < len(text), kept
    end = text.find(END, begin) if begin >= 0 else -1
    whole = text[max(begin, 0) : end + len(END) if end >= 0 else len(text)]
    document = (_read_xml if begin >= 0 else _read_text)(values.plain(whole[:MAX_CHARS]))
    if begin < 0 and cut and document.error is None:
        document.error = "the output is cut off"
    if len(whole) > MAX_CHARS:
        document.error = f"more than {MAX_CHARS} characters; the rest was not read"
    return document


def _read_xml(text: str) -> Document:
    """Cards up to the first mistake. Starting at the root element, no document type can be
    declared, hence no entity; ampersands that begin none are taken as themselves.
    """
    builder = _Builder()
    parser = ET.XMLParser(target=builder)  # noqa: S314 - no entity can be declared, see above
    error = None
    try:
        parser.feed(_ESCAPE.sub(r"&\1", text.replace("&", "&amp;")))
    except (ET.ParseError, ValueError, _Refused) as broken:
        error = f"not readable: {str(broken)[:100]}"
    if error is None and not builder.closed:
        error = "the document is cut off"
    return Document(builder.top, builder.cards, error)


class _Builder:
    """Takes the parser's calls and builds the tree; only whole cards get into `cards`."""

    def __init__(self) -> None:
        self.top: Tree = {}
        self.cards: list[Tree] = []
        self.closed = False
        self._open: list[Tree] = []
        self._text: list[str] = []
        self._fields = 0

    def start(self, _tag: str, attributes: Mapping[str, str]) -> None:
        node: Tree = {"id": attributes["id"][:64]} if "id" in attributes else {}
        if len(self._open) >= MAX_DEPTH:
            raise _Refused(f"more than {MAX_DEPTH} levels")
        self._open.append(node if self._open else self.top)
        self._text.clear()

    def data(self, text: str) -> None:
        if len(self._text) < MAX_LEAF:
            self._text.append(text[:MAX_LEAF])

    def end(self, tag: str) -> None:
        node = self._open.pop()
        if not self._open:
            self.closed = True
            return
        key, parent = name(tag), self._open[-1]
        if key == "gpu" and len(self._open) == 1:
            _add_card(self.cards, node)
        elif key in {"mig_device", "process_info"}:
            _append(parent, key, node)
        elif key not in parent:
            self._fields = _count(self._fields)
            parent[key] = _only_list(node) or node or "".join(self._text).strip()[:MAX_LEAF]
        self._text.clear()

    def close(self) -> None:
        """The parser's last call; what has been built stands."""


def _count(fields: int) -> int:
    if fields >= MAX_FIELDS:
        raise _Refused(f"more than {MAX_FIELDS} fields")
    return fields + 1


def _add_card(cards: list[Tree], card: Tree) -> None:
    if len(cards) >= MAX_CARDS:
        raise _Refused(f"more than {MAX_CARDS} cards")
    cards.append(card)


def _append(parent: Tree, key: str, item: Tree) -> None:
    group = parent.setdefault(key, [])
    if isinstance(group, list) and len(group) < MAX_GROUP:
        group.append(item)


def _only_list(node: Tree) -> list[Tree] | None:
    """`<processes>` of `<process_info>`s is just their list."""
    if len(node) == 1:
        [value] = node.values()
        if isinstance(value, list):
            return value
    return None


def _read_text(text: str) -> Document:
    outline = _Outline()
    error = None
    try:
        for line in io.StringIO(text):
            if line.strip() and len(line) < MAX_LINE:
                outline.take(line)
    except _Refused as refused:
        error = f"not readable: {refused}"
    return Document(outline.top, outline.cards, error or _missing_cards(outline))


def _missing_cards(outline: _Outline) -> str | None:
    """The text form has no end mark; the count in its head is the only sign of a cut."""
    attached = outline.top.get("attached_gpus")
    count = values.whole(attached) if isinstance(attached, str) else None
    if count is None or len(outline.cards) >= min(count, MAX_CARDS):
        return None
    return f"{len(outline.cards)} of {count} attached cards are shown"


@dataclass(slots=True)
class _Open:
    """A section that is still open: its indent, its node, and the group it is an item of."""

    indent: int
    node: Tree
    group: list[Tree] | None = None


class _Outline:
    """The tree of an indented text.

    The indent alone tells what belongs where: the column of the colon moves between drivers. Lines
    deeper than a value (`HW Thermal Slowdown` below `HW Slowdown : Active`) are its neighbours.
    """

    def __init__(self) -> None:
        self.top: Tree = {}
        self.cards: list[Tree] = []
        self._fields = 0
        self._open = [_Open(-1, self.top)]

    def take(self, line: str) -> None:
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        if bare.startswith("GPU") and (card := _CARD.fullmatch(bare)):
            node: Tree = {"id": card[1]}
            self._open = [_Open(indent, node)]
            _add_card(self.cards, node)
            return
        if indent <= self._open[0].indent:
            return  # what some wrapper prints in between belongs to no card
        while self._open[-1].indent >= indent:
            self._open.pop()
        at = bare.find(": ")
        if at >= 0 or bare.endswith(":"):
            self._leaf(name(bare[:at]), bare[at + 1 :].strip() if at >= 0 else "")
        elif _SECTION.fullmatch(bare):
            self._section(name(bare), indent)

    def _leaf(self, key: str, value: str) -> None:
        last = self._open[-1]
        if last.group is not None and key in last.node and len(last.group) < MAX_GROUP:
            last.node = {}  # a process has no head line: the next one begins with the first key
            last.group.append(last.node)
        if key not in last.node:
            self._fields = _count(self._fields)
            last.node[key] = value[:MAX_LEAF]

    def _section(self, key: str, indent: int) -> None:
        if len(self._open) >= MAX_DEPTH:
            return
        parent = self._open[-1].node
        before = parent.get(key)
        node: Tree = before if isinstance(before, dict) else {}
        opened = _Open(indent, node)
        if key == "mig_device":
            _append(parent, "mig_devices", node)
        elif key == "processes":
            opened.group = [node]
            parent[key] = opened.group
        else:
            parent[key] = node
        self._fields = _count(self._fields)
        self._open.append(opened)
