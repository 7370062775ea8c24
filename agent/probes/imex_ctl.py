"""What `nvidia-imex-ctl` prints, as values: one word, a table with a matrix, or JSON. Pure.

Called by agent/probes/imex.py. The forms are told apart by their content, not by what was asked,
because older releases ignore options. Nothing here raises; a domain of 1,000 nodes stays small.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agent.probes import values

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

_STATES = """INITIALIZING STARTING_AUTH_SERVER WAITING_FOR_PEERS WAITING_FOR_RECOVERY INIT_GPU READY
    SHUTTING_DOWN UNAVAILABLE"""
STATES: Final = frozenset(_STATES.split())
CELLS: Final[Mapping[str, str]] = {
    "C": "CONNECTED",
    "N": "NEVER_CONNECTED",
    "R": "RECOVERING",
    "D": "DISCONNECTED",
    "A": "AUTHENTICATING",
    "I": "INVALID",
    "!V!": "VERSION_MISMATCH",
    "!M!": "NODE_MAP_MISMATCH",
}
"""Letters of the matrix in the words that the JSON form uses. Letters we do not know stay."""
CONNECTED: Final = "CONNECTED"
READY: Final = "READY"
UNKNOWN: Final = "UNKNOWN"
"""Our word for a pair of running nodes whose connection was not told."""

TEXT_LIMIT: Final = 8 * 2**20
"""Characters read of a table: 1,000 nodes are 4 MiB of matrix."""
JSON_LIMIT: Final = 2 * 2**20
"""Characters of JSON that are read (180 nodes): as Python values it takes ten times as much."""
MAX_NODES: Final = 2048
MAX_PAIRS: Final = 4096
"""Broken connections that are kept: 64 nodes without any connection."""
MAX_WORD: Final = 64
MAX_NAME: Final = 255

_ANSI: Final = re.compile(r"\x1b\[[0-9;?]{0,32}[A-Za-z]")
_WHOLE_LINE: Final = re.compile(
    rf"|.*\}}|.* - ({'|'.join(_STATES.split())})|({'|'.join(_STATES.split())})"
    r"|Domain State: (UP|DOWN|DEGRADED)"
)
"""Last lines without an end that are no cut ones."""
_OPENING: Final = re.compile(r"^[ \t]{0,8}\{", re.MULTILINE)
"""Where JSON begins; warnings may stand before it."""
_WORD: Final = re.compile(r"[A-Z][A-Z0-9_]{1,63}")


@dataclass(frozen=True, slots=True)
class ImexNode:
    """A member of the domain. `host` is its line in nodes_config.cfg: an address, seldom a name."""

    index: int
    host: str | None = None
    state: str | None = None
    version: str | None = None
    hostname: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One output. `own` is the index of the node that was asked, where the tool marks it.

    `connections` names pairs (from, to, word) that are not connected, those between running nodes
    first. `complete` is False when there were too many to keep.
    """

    state: str | None = None
    domain_state: str | None = None
    nodes: tuple[ImexNode, ...] = ()
    connections: tuple[tuple[int, int, str], ...] = ()
    complete: bool = True
    own: int | None = None
    error: str | None = None

    @property
    def told(self) -> bool:
        """Whether it speaks of the domain, not only of the daemon asked."""
        return bool(self.nodes) or self.domain_state is not None


def parse(text: str) -> Answer:
    """Any output of the tool. What cannot be read gives an answer that holds only `error`."""
    stripped = _ANSI.sub("", text[:TEXT_LIMIT].replace("\x00", "")).lstrip()
    if "\n" in stripped:
        stripped = values.settled(stripped, _WHOLE_LINE)
    stripped = stripped.strip()
    if opening := _OPENING.search(stripped):
        return _parse_json(stripped[opening.start() :].lstrip())
    if state := parse_state(stripped):
        return Answer(state=state)
    answer = _parse_table(stripped)
    if answer.told:
        return answer
    lines = (line.strip() for line in values.plain(stripped[:65536]).splitlines())
    first = next((line for line in lines if any(map(str.isalnum, line))), None)
    return Answer(error=f"nvidia-imex-ctl: {first[:200] if first else 'no output in words'}")


def parse_state(text: str) -> str | None:
    """The one word of `-q`; a word we do not know is kept, a sentence is none."""
    lines = [line.strip() for line in text[:4096].splitlines() if line.strip()]
    return lines[-1] if lines and len(lines) < 4 and _is_state(lines[-1]) else None


def _is_state(word: str) -> bool:
    return word in STATES or ("_" in word and _WORD.fullmatch(word) is not None)


class _Pairs:
    """Broken connections met while reading, those between running nodes apart.

    Connected pairs are not stored: a matrix of 1,000 nodes has a million of them.
    """

    def __init__(self, nodes: Mapping[int, ImexNode]) -> None:
        self.running = {index for index, node in nodes.items() if node.state == READY}
        self.between: list[tuple[int, int, str]] = []
        self.others: list[tuple[int, int, str]] = []
        self.told: dict[int, Collection[int]] = {}

    def row(self, index: int, peers: Collection[int], words: Iterable[str]) -> None:
        """What one node says of its peers, in the same order."""
        if len(self.told) >= MAX_NODES:
            return
        self.told[index] = peers
        for peer, word in zip(peers, words, strict=False):
            if word != CONNECTED and peer != index:
                kept = self.between if {index, peer} <= self.running else self.others
                if len(kept) <= MAX_PAIRS:
                    kept.append((index, peer, word))

    def all(self) -> tuple[tuple[tuple[int, int, str], ...], bool]:
        """Broken pairs and pairs of running nodes nobody told of; whether all could be kept."""
        found = [*self.between]
        for index in sorted(self.running):
            missing = self.running.difference(self.told.get(index, ()), {index})
            found += [(index, peer, UNKNOWN) for peer in sorted(missing)]
            if len(found) > MAX_PAIRS:
                break
        found = [*sorted(found), *self.others]
        return tuple(found[:MAX_PAIRS]), len(found) <= MAX_PAIRS


def _parse_table(text: str) -> Answer:
    nodes: dict[int, ImexNode] = {}
    columns: list[int] = []
    pairs: _Pairs | None = None
    own, domain = None, None
    for line in text.splitlines():
        plain = line.strip()
        low = plain[:24].lower()
        if low.startswith("node #"):
            if (node := _node(plain)) is not None and len(nodes) < MAX_NODES:
                nodes.setdefault(node.index, node)
                own = node.index if "*" in plain else own
        elif low.startswith("nodes from"):
            columns = [int(word) for word in plain.split()[2 : MAX_NODES + 2] if _small(word)]
            pairs = pairs or _Pairs(nodes)
        elif low.startswith("domain state"):
            domain = _word(plain.partition(":")[2].split()) or domain
            columns = []  # what follows is no matrix any more
        elif columns and pairs is not None and plain[:1].isdigit():
            _row(plain, columns, pairs)
    found = tuple(nodes[index] for index in sorted(nodes))
    broken, complete = (pairs or _Pairs(nodes)).all()
    return Answer(_own_state(found, own), domain, found, broken, complete, own)


def _node(line: str) -> ImexNode | None:
    """`Node #1   * 10.0.0.2 *  - READY  - Version: 580.1  - Hostname: a`; stars mark who answers.

    Older releases print neither version nor host name; of a dead node the version is empty.
    """
    first, *fields = (part.strip() for part in (line[6:1024] + " ").split(" - "))
    head = first.replace("*", " ").split()
    if not head or not _small(head[0]):
        return None
    host = head[1] if len(head) > 1 else (fields.pop(0).strip("* ") if fields else "")
    named = {name.strip().lower(): text for name, _, text in (f.partition(":") for f in fields)}
    bare = next((field for field in fields if ":" not in field), "")
    return ImexNode(
        int(head[0]),
        _name(host),
        _word(bare.rstrip("- ").split()),
        _name(named.get("version")),
        _name(named.get("hostname")),
    )


def _row(line: str, columns: list[int], pairs: _Pairs) -> None:
    index, *letters = line.split()
    if _small(index):
        words = (CELLS.get(letter, letter[:MAX_WORD]) for letter in letters)
        short = len(letters) < len(columns)
        pairs.row(int(index), columns[: len(letters)] if short else columns, words)


def _parse_json(text: str) -> Answer:
    if len(text) > JSON_LIMIT:
        return Answer(error=f"nvidia-imex-ctl: {len(text)} characters of JSON are too many to read")
    try:
        document, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        return Answer(error=f"nvidia-imex-ctl: JSON not readable: {str(error)[:200]}")
    if not isinstance(document, dict):
        return Answer(error="nvidia-imex-ctl: JSON without nodes")
    entries = dict(_indexed(document.get("nodes")))
    nodes = {index: _json_node(index, entry) for index, entry in sorted(entries.items())}
    domain = _word([document.get("status")])
    if not nodes and domain is None:
        return Answer(error="nvidia-imex-ctl: JSON without nodes and without a domain state")
    pairs = _Pairs(nodes)
    for index in nodes:
        links = dict(_indexed(entries[index].get("connections")))
        words = {peer: _word([link.get("status")]) for peer, link in links.items()}
        told = {peer: word for peer, word in words.items() if word}
        pairs.row(index, tuple(told), told.values())
    broken, complete = pairs.all()
    found = tuple(nodes.values())
    return Answer(_own_state(found, None), domain, found, broken, complete)


def _json_node(index: int, entry: Mapping[str, Any]) -> ImexNode:
    return ImexNode(
        index,
        _name(entry.get("host")),
        _word([entry.get("status")]),
        _name(entry.get("version")),
        _name(entry.get("hostName", entry.get("hostname"))),
    )


def _indexed(value: object) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Entries of a map by index (`{"0": {...}}`) or of a list, those that are objects."""
    pairs: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    for number, (key, entry) in enumerate(pairs):
        if number >= MAX_NODES:
            return
        if isinstance(entry, dict) and _small(str(key)):
            yield int(str(key)), entry


def _own_state(nodes: tuple[ImexNode, ...], own: int | None) -> str | None:
    """The state of the node that was asked; where it is not marked, the state all nodes share."""
    states = {node.state for node in nodes if own is None or node.index == own}
    return next(iter(states)) if len(states) == 1 else None


def _small(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 6


def _word(words: Iterable[object]) -> str | None:
    first = next((word for word in words if isinstance(word, str) and word.strip()), None)
    return first.strip()[:MAX_WORD] if isinstance(first, str) else None


def _name(text: object) -> str | None:
    if not isinstance(text, str) or values.reason(text) is not None:
        return None
    return text.strip()[:MAX_NAME]
