"""What nvidia-smi tells of wiring: `topo -m` (matrix), `topo -p2p` (pairs), `nvlink -s` (links).

Called by agent/probes/inventory.py and the doctor; wiring.py joins it with PCI. Parsers are pure,
never raise and look at the first LIMIT characters only: a matrix of 144 devices is 200 KiB.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from agent.probes import values
from agent.probes.card import NvLink, Path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agent.probes.root import Root, ToolResult

TIMEOUT_S: Final = 20.0
"""Without the persistence daemon the driver wakes every card first: seconds on eight of them."""
LIMIT: Final = 2 * 2**20
LINE_LIMIT: Final = 16384
MAX_LINES: Final = 8192
MAX_LABELS: Final = 512
MAX_LINKS: Final = 72

P2PKind = Literal["r", "w", "n", "a", "p"]
"""Read, write, NVLink, atomics, proprietary."""

_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-9;?]{0,32}[A-Za-z]|[()][A-Z0-9])")
_ROW: Final = re.compile(r"\s{0,16}[A-Za-z]{1,16}[0-9_]{1,16}\s")
_GPU: Final = re.compile(r"GPU[0-9]{1,4}")
_CELL: Final = re.compile(r"X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS|SOC")
_P2P_CELL: Final = re.compile(r"X|OK|CNS|GNS|TNS|DR|NS|U")
_LABEL: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]{0,63}")
_GLUED: Final = re.compile(r"(?:GPU[0-9]{1,4}|NIC[0-9]{1,4}|mlx[45]_(?:bond_)?[0-9]{1,4}){2,16}")
_PIECE: Final = re.compile(r"(?:GPU|NIC|mlx[45]_(?:bond_)?)[0-9]{1,4}")
_HEADER_WORDS: Final = frozenset({"CPU", "NUMA", "GPU", "Affinity", "ID"})
_LEGEND: Final = re.compile(
    r"\s{0,64}(NIC[0-9]{1,4})\s{0,16}[:=]\s{0,16}([A-Za-z][\w.:-]{0,63})\s*"
)
_NVLINK_GPU: Final = re.compile(r"GPU ([0-9]{1,4}): .{0,300}?(?:\(UUID: ([A-Za-z0-9-]{1,80})\))?")
_NVLINK: Final = re.compile(r"Link ([0-9]{1,3}): (.{1,40})")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A `topo -m` matrix. `gpus` are labels (`GPU0`), `nics` device names as far as known.

    Use `path` to ask it. The other mappings are by GPU label; an empty cell is left out.
    """

    gpus: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    cells: Mapping[tuple[str, str], Path] = field(default_factory=dict)
    cpu_affinity: dict[str, str] = field(default_factory=dict)
    numa: dict[str, int] = field(default_factory=dict)
    numa_memory: dict[str, int] = field(default_factory=dict)
    """The NUMA node that a card's own memory is (GH200, GB200)."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Device names by label, as the NIC legend has them; it may be partial."""
    error: str | None = None
    late: bool = False
    """The tool did not answer in time: it need not be asked more."""

    def path(self, a: str, b: str) -> Path | None:
        """How two devices (`GPU0`, `mlx5_0`) reach each other; either one's row may be missing."""
        return self.cells.get((a, b)) or self.cells.get((b, a))


@dataclass(frozen=True, slots=True)
class P2P:
    """A `topo -p2p` matrix: OK, CNS, GNS, TNS, DR, NS or U per ordered pair of GPU indices."""

    pairs: Mapping[tuple[int, int], str] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """NVLinks of one GPU as `nvlink -s` has them.

    None: the tool does not tell (MIG mode, lost card). Empty: it has none, or none is active;
    `note` is what the tool said instead of links.
    """

    index: int
    uuid: str | None = None
    links: tuple[NvLink, ...] | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class NvLinks:
    """NVLinks of all GPUs; nothing and no error when an old driver prints nothing."""

    gpus: tuple[GpuLinks, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    cells: tuple[str, ...]
    rest: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Table:
    """Rows below a header. `labels` are the columns as printed, `trailing` those behind them."""

    labels: tuple[str, ...]
    trailing: tuple[str, ...]
    rows: tuple[_Row, ...]


def _lines(text: str) -> list[str]:
    """Lines without colours. A last line that was cut off by LIMIT is dropped."""
    whole = text[:LIMIT] if len(text) <= LIMIT else text[:LIMIT].rpartition("\n")[0]
    lines = whole.replace("\0", "").splitlines()[:MAX_LINES]
    return [_ESCAPE.sub("", line[:LINE_LIMIT]).rstrip() for line in lines]


def _uncut(text: str) -> list[str]:
    """Lines of a matrix, without a last row that was cut off: `NV1` may have been `NV18`."""
    lines = _lines(text)
    if text.endswith("\n") or len(lines) < 2 or not _ROW.match(lines[-1]):
        return lines
    return lines if len(lines[-1].split()) >= len(lines[-2].split()) else lines[:-1]


def _first_line(text: str) -> str:
    return next((line.strip()[:200] for line in _lines(text) if line.strip()), "no output")


def parse_matrix(text: str) -> Matrix:
    """`nvidia-smi topo -m`; no header line means no matrix and the first line as the reason."""
    lines = _uncut(text)
    table = _table(lines, _CELL)
    if table is None:
        return Matrix(error=f"nvidia-smi topo -m: {_first_line(text)}")
    legend = (match for line in lines if (match := _LEGEND.fullmatch(line)))
    names = {match[1]: match[2] for match in legend}
    gpus = tuple(label for label in table.labels if _GPU.fullmatch(label))
    nics = tuple(names.get(label, label) for label in table.labels if not _GPU.fullmatch(label))
    cells: dict[tuple[str, str], Path] = {}
    matrix = Matrix(gpus, nics, cells, {}, {}, {}, names)
    for row in table.rows:
        label = names.get(row.label, row.label)
        for column, cell in zip(table.labels, row.cells, strict=False):
            if column != row.label and _CELL.fullmatch(cell) and cell != "X":
                cells[label, names.get(column, column)] = "SYS" if cell == "SOC" else cell
        if _GPU.fullmatch(row.label):
            matrix = _with_affinity(matrix, row.label, table.trailing, row.rest)
    if not cells and not table.rows:
        return replace(matrix, error="nvidia-smi topo -m: a header without rows")
    return matrix


def _with_affinity(
    matrix: Matrix, gpu: str, trailing: Sequence[str], rest: Sequence[str]
) -> Matrix:
    found = dict(zip(trailing, rest, strict=False))
    cpus = found.get("CPU Affinity", "")
    nodes = sorted(values.cpu_list(found.get("NUMA Affinity")) or ())
    memory = values.whole(found.get("GPU NUMA ID"))
    # Near two nodes is near none, but memory of coherent cards is listed as nodes: `0,2-17`.
    numa = nodes[0] if len(nodes) == 1 or (nodes and memory is not None) else None
    return replace(
        matrix,
        cpu_affinity=matrix.cpu_affinity | ({gpu: cpus} if values.cpu_list(cpus) else {}),
        numa=matrix.numa | ({gpu: numa} if numa is not None else {}),
        numa_memory=matrix.numa_memory | ({gpu: memory} if memory is not None else {}),
    )


def _table(lines: Sequence[str], cell: re.Pattern[str]) -> _Table | None:
    """The last header before the first row, and the rows by label, whatever stands between."""
    words: list[str] = []
    raw: list[str] = []
    broken = False
    for line in lines:
        tokens = line.split()
        if not tokens:
            continue
        if _is_row(tokens, words, cell, started=bool(raw)):
            raw.append(line)
        elif raw and "legend" in line.lower():
            break
        elif not raw and _is_header(tokens, cell):
            # A header may go over several lines; a note between them ends it.
            words = tokens if broken else words + tokens
            broken = False
        else:
            broken = True
    if not any(map(_is_gpu, words)):
        return None
    printed, trailing = _columns(words)
    labels = _unglued(printed, raw, cell)
    return _Table(labels, trailing, tuple(_rows(raw, labels, trailing)))


def _is_gpu(token: str) -> bool:
    return _GPU.fullmatch(token) is not None or (
        token.startswith("GPU") and _GLUED.fullmatch(token) is not None
    )


def _is_row(
    tokens: Sequence[str], header: Sequence[str], cell: re.Pattern[str], *, started: bool
) -> bool:
    """A device of the header and its cells; a lost card may have other words instead of cells."""
    if not header or not (tokens[0] in header or _is_name(tokens[0])):
        return False
    if any(map(cell.fullmatch, tokens[1:])):
        return True
    return tokens[0] in header and (started or not _is_header(tokens, cell))


def _is_header(tokens: Sequence[str], cell: re.Pattern[str]) -> bool:
    """Names of devices and of the columns behind them only: prose has words without a digit."""
    return all(
        (token in _HEADER_WORDS or _is_name(token)) and not cell.fullmatch(token)
        for token in tokens
    )


def _is_name(token: str) -> bool:
    named = len(token) <= 64 and _LABEL.fullmatch(token) is not None
    return (named and any(c in "0123456789_" for c in token)) or bool(_GLUED.fullmatch(token))


def _columns(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Device labels and the names of the columns behind them (`CPU Affinity`, ...)."""
    labels = [word for word in words if word not in _HEADER_WORDS][:MAX_LABELS]
    text = " ".join(words)
    trailing = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
    return labels, tuple(name for name in trailing if name in text)


def _unglued(printed: Sequence[str], raw: Sequence[str], cell: re.Pattern[str]) -> tuple[str, ...]:
    """Labels of the columns: `NIC28NIC29` are two where rows have as many cells, else one."""
    split = [
        part
        for label in printed
        for part in (_PIECE.findall(label) if _GLUED.fullmatch(label) else [label])
    ]
    cells = (sum(1 for token in line.split()[1:] if cell.fullmatch(token)) for line in raw)
    return tuple(split if max(cells, default=0) >= len(split) else printed)[:MAX_LABELS]


def _rows(raw: Sequence[str], labels: Sequence[str], trailing: Sequence[str]) -> Iterator[_Row]:
    """Rows by their label. The last one may have been cut off: then its last word is dropped."""
    widest = 0
    for line in raw[:MAX_LABELS]:
        tabs = line.count("\t") >= min(len(labels), 2)
        parts = [part.strip() for part in line.strip().split("\t")] if tabs else line.split()
        if not parts[0]:
            continue
        if line is raw[-1] and _is_gpu(parts[0]) and len(parts) < widest:
            parts.pop()
        widest = max(widest, len(parts))
        cells, rest = parts[1 : len(labels) + 1], parts[len(labels) + 1 :]
        if tabs:
            yield _Row(parts[0], tuple(cells), _tabbed(rest, len(trailing)))
        elif len(cells) == len(labels):
            yield _Row(parts[0], tuple(cells), _spaced(rest, trailing))
        # With blanks a missing cell moves the others: its mirror image in another row is sure.


def _tabbed(rest: Sequence[str], columns: int) -> tuple[str, ...]:
    """Cells behind the matrix. The driver prints two tabs before the last of three columns."""
    if columns == 3 and len(rest) > 3:
        return (rest[0], rest[1], rest[-1])
    return tuple(rest)


def _spaced(rest: Sequence[str], trailing: Sequence[str]) -> tuple[str, ...]:
    """Cells behind a matrix aligned with blanks, where an empty cell is not to be seen.

    With one for each column they stand in order. Otherwise only a list of CPUs is sure.
    """
    if len(rest) == len(trailing):
        return tuple(rest)
    return (rest[0],) if rest and re.search(r"[0-9][-,][0-9]", rest[0]) else ()


def parse_p2p(text: str) -> P2P:
    """`nvidia-smi topo -p2p r|w|n|a|p`."""
    table = _table(_uncut(text), _P2P_CELL)
    if table is None:
        return P2P(error=f"nvidia-smi topo -p2p: {_first_line(text)}")
    pairs: dict[tuple[int, int], str] = {}
    for row in table.rows:
        for column, cell in zip(table.labels, row.cells, strict=False):
            known = _GPU.fullmatch(row.label) and _GPU.fullmatch(column)
            if known and cell != "X" and _P2P_CELL.fullmatch(cell):
                pairs[int(row.label[3:]), int(column[3:])] = cell
    return P2P(pairs, None if table.rows else "nvidia-smi topo -p2p: a header without rows")


def parse_nvlinks(text: str) -> NvLinks:
    """`nvidia-smi nvlink -s`: bandwidth per link and direction in GB/s, or why there is none."""
    found: list[GpuLinks] = []
    for line in map(str.strip, _lines(text)):
        if match := _NVLINK_GPU.fullmatch(line):
            if len(found) >= MAX_LABELS:
                break
            found.append(GpuLinks(int(match[1]), match[2]))
        elif found and line:
            found[-1] = _with_line(found[-1], line)
    if not found and text.strip():
        return NvLinks(error=f"nvidia-smi nvlink -s: {_first_line(text)}")
    return NvLinks(tuple(found))


def _with_line(gpu: GpuLinks, line: str) -> GpuLinks:
    if match := _NVLINK.fullmatch(line):
        links = gpu.links or ()
        if len(links) >= MAX_LINKS or any(link.link == int(match[1]) for link in links):
            return gpu
        # A comma can only be a decimal one: no link has 1000 GB/s.
        speed = values.number(match[2].replace(",", "."), "gb/s")
        if not match[2].rstrip().lower().endswith("/s"):
            speed = None  # a line that is cut off: half a number is a wrong number
        active = False if "inactive" in match[2].lower() else None if speed is None else speed > 0
        return replace(gpu, links=(*links, NvLink(int(match[1]), active, speed)))
    lower = line.lower()
    if "all links are inactive" in lower or "does not have or support nvlink" in lower:
        return replace(gpu, links=gpu.links or (), note=line[:200])
    return gpu if gpu.links else replace(gpu, note=gpu.note or line[:200])


async def read_matrix(root: Root, timeout_s: float = TIMEOUT_S) -> Matrix:
    """Ask `nvidia-smi topo -m`; `error` says why there is none."""
    result = await root.run(["nvidia-smi", "topo", "-m"], timeout_s)
    found = replace(parse_matrix(_said(result)), late=result.timed_out)
    return replace(found, error=_why(result, found.error)) if found.error else found


async def read_p2p(root: Root, kind: P2PKind, timeout_s: float = TIMEOUT_S) -> P2P:
    """Ask `nvidia-smi topo -p2p`; `error` says why there is nothing."""
    result = await root.run(["nvidia-smi", "topo", "-p2p", kind], timeout_s)
    found = parse_p2p(_said(result))
    return replace(found, error=_why(result, found.error)) if found.error else found


async def read_nvlinks(root: Root, timeout_s: float = TIMEOUT_S) -> NvLinks:
    """Ask `nvidia-smi nvlink -s`; old drivers print nothing, which is no error."""
    result = await root.run(["nvidia-smi", "nvlink", "-s"], timeout_s)
    found = parse_nvlinks(_said(result))
    if found.gpus:
        return found
    return replace(found, error=_why(result, found.error or result.error))


def _said(result: ToolResult) -> str:
    return result.stdout if result.stdout.strip() else result.stderr


def _why(result: ToolResult, parsed: str | None) -> str | None:
    """A tool that never answered says so itself; otherwise what it printed is the reason."""
    return result.error if not _said(result).strip() and result.error else parsed
