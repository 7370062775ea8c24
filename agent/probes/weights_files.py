"""What the files of one model say: its format, whether all of it is there, its facts.

Called by weights_scan.py with the files that it found. Blocking; reads headers and small JSON files
only, each once as long as its path, size and time stay the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from agent.probes import gguf, safetensors_header
from agent.probes.gguf_config import as_config, quantization
from agent.probes.model_facts import MAX_CONFIG, model_facts, parse_config
from agent.probes.safetensors_header import Tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from agent.probes.gguf import Gguf

T = TypeVar("T")

MAX_INDEX: Final = 64 * 2**20
MAX_PARTS: Final = 100_000
MAX_NAMED: Final = 3
"""Missing files named in a reason."""
CHUNK: Final = 2**20
_SHARD: Final = re.compile(rb':\s{0,9}"([^"\\]{1,255}\.(?:safetensors|bin))"')
_PART: Final = re.compile(r"(.+)-(\d{1,6})-of-(\d{1,6})\.(gguf|safetensors|bin)")
_POINTER: Final = b"version https://git-lfs"
HUB_PYTORCH: Final = re.compile(r"pytorch_model.*\.bin")
PYTORCH: Final = re.compile(r"(pytorch_model|consolidated|model).*\.(bin|pth|pt)")
ENGINE: Final = re.compile(r"rank\d{1,4}\.engine")


@dataclass(frozen=True, slots=True)
class File:
    """A file of a model, links followed. `name` is relative to the model's directory."""

    name: str
    path: Path
    size: int
    mtime_ns: int
    inode: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Model:
    """What the files came to. `reason` says what is missing or wrong; `cut`: bytes are missing."""

    format: str
    complete: bool
    facts: dict[str, Any]
    reason: str | None = None
    cut: bool = False


class Memory:
    """What files said, by path, size and time: an unchanged tree is not read again."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[tuple[int, int], object]] = {}
        self._used: set[tuple[str, str]] = set()

    def ask(self, file: File, read: Callable[[Path], T]) -> T:
        """What `read` says of the file, now or when it was last read as it is."""
        key = (str(file.path), read.__name__)
        mark = (file.size, file.mtime_ns)
        self._used.add(key)
        known = self._known.get(key)
        if known is None or known[0] != mark:
            known = self._known[key] = (mark, read(file.path))
        return cast("T", known[1])

    def forget_unused(self) -> None:
        """Drop what was not asked for since the last call: those files are gone."""
        self._known = {key: self._known[key] for key in self._used if key in self._known}
        self._used = set()


def read_config(path: Path) -> tuple[dict[str, Any], str | None]:
    """A JSON file of a model; empty with a reason when it is none."""
    try:
        with path.open("rb") as file:
            return parse_config(file.read(MAX_CONFIG + 1))
    except (OSError, ValueError) as error:
        return {}, f"cannot be read: {getattr(error, 'strerror', None) or error}"


def read_index(path: Path) -> tuple[frozenset[str], bool]:
    """The files that an index names, and whether it is whole. Read in pieces: some have 20 MB."""
    found: set[str] = set()
    rest, read = b"", 0
    try:
        with path.open("rb") as file:
            while read < MAX_INDEX and (piece := file.read(CHUNK)):
                read += len(piece)
                rest += piece
                found.update(m[1].decode("utf-8", "replace") for m in _SHARD.finditer(rest))
                rest = rest[-300:]
    except (OSError, ValueError):
        return frozenset(found), False
    return frozenset(found), rest.rstrip().endswith(b"}")


def read_tensors(path: Path) -> Tensors:
    """The header of a safetensors file."""
    return replace(found, error=POINTER) if _is_pointer(path, found := _header(path)) else found


def _header(path: Path) -> Tensors:
    return safetensors_header.read_header(path)


def read_gguf(path: Path) -> Gguf:
    """The header of a GGUF file."""
    found = gguf.read_gguf(path)
    return replace(found, error=POINTER) if _is_pointer(path, found) else found


POINTER: Final = "is a Git LFS pointer instead of the file: run git lfs pull there"


def _is_pointer(path: Path, found: Tensors | Gguf) -> bool:
    if found.error is None and found.cut is None:
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except (OSError, ValueError):
        return False


def read_archive_end(path: Path) -> bool:
    """Whether a PyTorch archive lacks its end; the format before archives cannot tell."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"PK\x03\x04":
                return False
            file.seek(-22, 2)
            return file.read(4) != b"PK\x05\x06"
    except (OSError, ValueError):
        return True


def gguf_groups(files: Iterable[File]) -> dict[str, list[File]]:
    """GGUF files by model: the parts of a split one together, under the name of the first."""
    groups: dict[str, list[File]] = {}
    for file in sorted(files, key=lambda file: file.name):
        match = _PART.fullmatch(file.name)
        groups.setdefault(f"{match[1]}/{int(match[3])}" if match else file.name, []).append(file)
    return {group[0].name: group for group in groups.values()}


def gguf_model(files: list[File], memory: Memory) -> Model:
    """One GGUF model: a file, or all parts of a split one."""
    missing = _missing_parts([file.name for file in files])
    heads = [memory.ask(file, read_gguf) for file in files]
    reason = missing or _first_fault(files, heads)
    good = [head for head in heads if head.error is None and head.tensors]
    facts: dict[str, Any] = {}
    if good and heads[0] in good and "general.architecture" in heads[0].meta:
        whole = gguf.add([heads[0], *[head for head in heads[1:] if head in good]])
        facts = model_facts(as_config(whole))
        facts |= {
            "architecture": facts.get("model_type") and whole.meta["general.architecture"],
            "quantization": quantization(whole),
        }
        if missing is None:
            facts |= _sums(whole.parameters, whole.bytes, whole.expert_bytes)
    facts = {key: value for key, value in facts.items() if value is not None}
    cut = missing is not None or any(head.cut for head in heads)
    return Model("gguf", reason is None, facts, reason, cut)


def folder_model(files: list[File], broken: Iterable[str], memory: Memory) -> Model | None:
    """The model in a directory, or None when there is none. `broken` are links to nothing."""
    here = {file.name: file for file in files}
    config = _config(here, memory)
    tensors = [file for file in files if file.name.endswith(".safetensors")]
    index = _index(here, "safetensors", memory)
    gone = sorted(name for name in broken if name.endswith((".safetensors", ".bin", ".gguf")))
    if tensors or index is not None:
        model = _safetensors(tensors, index, memory)
    elif torch := [f for f in files if (PYTORCH if config else HUB_PYTORCH).fullmatch(f.name)]:
        model = _pytorch(torch, _index(here, "bin", memory), memory)
    elif config and (engines := [f for f in files if ENGINE.fullmatch(f.name)]):
        model = Model("other", True, {"tensor_bytes": sum(file.size for file in engines)})
    elif config and ("architectures" in config or "model_type" in config):
        model = Model("other", False, {}, "holds no weights: only its configuration is there", True)
    else:
        return None
    if gone and model.complete:
        model = replace(model, complete=False, cut=True, reason=f"{_some(gone)}: the link is dead")
    return replace(model, facts=_facts(config, model.facts))


def _config(here: Mapping[str, File], memory: Memory) -> dict[str, Any]:
    for name in ("config.json", "params.json", "adapter_config.json"):
        if name in here:
            found, _ = memory.ask(here[name], read_config)
            break
    else:
        return {}
    if "quantization_config" not in found and "hf_quant_config.json" in here:
        quant, _ = memory.ask(here["hf_quant_config.json"], read_config)
        return {**found, "quantization_config": quant}
    return found


def _facts(config: dict[str, Any], sums: dict[str, Any]) -> dict[str, Any]:
    """Facts of the configuration, with what only the tensors can tell."""
    base = config.get("base_model_name_or_path")
    facts: dict[str, Any] = {}
    if isinstance(base, str) and "peft_type" in config and base.isprintable():
        facts = {"adapter_of": base[:200]}
    elif config:
        facts = model_facts(config)
        if "dtype" not in facts and sums.get("dtype"):
            facts = model_facts({**config, "dtype": sums["dtype"]})
    elements = sums.get("elements")
    if isinstance(elements, Tensors):
        quant = facts.get("quantization") or {}
        count = safetensors_header.parameters(elements, quant.get("bits"))
        facts |= _sums(count, elements.bytes, elements.expert_bytes)
    elif "tensor_bytes" in sums:
        facts["tensor_bytes"] = sums["tensor_bytes"]
    return facts


def _sums(parameters: int | None, held: int, experts: int) -> dict[str, Any]:
    found = {"parameters": parameters, "tensor_bytes": held, "expert_bytes": experts or None}
    return {key: value for key, value in found.items() if value is not None}


def _index(
    here: Mapping[str, File], kind: str, memory: Memory
) -> tuple[str, frozenset[str], bool] | None:
    """The index of a sharded model: its name, the files it names, whether it is whole."""
    end = f".{kind}.index.json"
    names = sorted(name for name in here if name.endswith(end) and "/" not in name)
    preferred = (
        f"model.{kind}.index.json" if kind == "safetensors" else f"pytorch_model.{kind}.index.json"
    )
    name = preferred if preferred in here else next(iter(names), None)
    if name is None:
        return None
    shards, whole = memory.ask(here[name], read_index)
    return name, frozenset(s for s in shards if s.endswith(kind)), whole


def _safetensors(
    files: list[File], index: tuple[str, frozenset[str], bool] | None, memory: Memory
) -> Model:
    loaded = _loaded(files, index)
    heads = [memory.ask(file, read_tensors) for file in loaded]
    missing = _missing(files, index) or _missing_parts([file.name for file in loaded])
    reason = missing or _first_fault(loaded, heads)
    whole = safetensors_header.add([head for head in heads if head.error is None])
    sums: dict[str, Any] = {"dtype": safetensors_header.main_dtype(whole)}
    if reason is None:
        sums["elements"] = whole
    cut = missing is not None or any(head.cut for head in heads)
    return Model("safetensors", reason is None, sums, reason, cut)


def _loaded(files: list[File], index: tuple[str, frozenset[str], bool] | None) -> list[File]:
    """The files that an engine loads: some repositories hold the same weights twice."""
    if index is not None:
        return [file for file in files if file.name in index[1]]
    files = [file for file in files if "/" not in file.name] or files
    usual = [f for f in files if not f.name.startswith(("consolidated", "adapter_model"))]
    return usual or files


def _pytorch(
    files: list[File], index: tuple[str, frozenset[str], bool] | None, memory: Memory
) -> Model:
    if index is not None:
        files = [file for file in files if file.name in index[1]]
    missing = _missing(files, index) or _missing_parts([file.name for file in files])
    short = [file.name for file in files if memory.ask(file, read_archive_end)]
    reason = missing or (f"{_some(short)}: cut off" if short else None)
    sums = {"tensor_bytes": sum(file.size for file in files)} if reason is None else {}
    return Model("pytorch", reason is None, sums, reason, reason is not None)


def _missing(files: list[File], index: tuple[str, frozenset[str], bool] | None) -> str | None:
    """Which files that an index names are not there."""
    if index is None:
        return None
    name, wanted, whole = index
    if not whole or not wanted:
        return f"{name} is cut off or names no files: fetch it again"
    gone = sorted(wanted - {file.name for file in files if file.size})
    return f"{len(gone)} of {len(wanted)} files of {name} missing: {_some(gone)}" if gone else None


def _missing_parts(names: list[str]) -> str | None:
    """Which parts of `-00001-of-00003` are not there."""
    have: dict[tuple[str, int, str], set[int]] = {}
    for match in filter(None, map(_PART.fullmatch, names)):
        have.setdefault((match[1], int(match[3]), match[4]), set()).add(int(match[2]))
    for (stem, count, kind), parts in have.items():
        gone = [part for part in range(1, min(count, MAX_PARTS) + 1) if part not in parts]
        if gone:
            text = ", ".join(str(part) for part in gone[:MAX_NAMED])
            return f"{len(gone)} of {count} parts of {stem}.{kind} missing: {text}"
    return None


def _first_fault(files: list[File], heads: Iterable[Tensors | Gguf]) -> str | None:
    for file, head in zip(files, heads, strict=True):
        if (fault := head.cut if head.error is None else head.error) is not None:
            return f"{file.name} {fault}"
    return None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
