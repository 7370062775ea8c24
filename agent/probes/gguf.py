"""The header of a GGUF file: its metadata and the sums of its tensors.

Called by weights_files.py. Only the header is read, from a stream, with bounds on everything: a
damaged file may claim any length. gguf_config.py makes facts of it.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from agent.probes.gguf_types import TENSOR_TYPES

if TYPE_CHECKING:
    from pathlib import Path

MAGIC: Final = b"GGUF"
VERSIONS: Final = frozenset({2, 3})
MAX_HEADER: Final = 64 * 2**20
MAX_KEYS: Final = 65536
MAX_TENSORS: Final = 262144
MAX_ITEMS: Final = 3_000_000
"""Strings in arrays: vocabularies have some 300,000 and their merges twice as many."""
MAX_KEPT: Final = 1024
"""Bytes of a string and items of an array that are kept; longer ones are passed over."""
MAX_KEPT_ALL: Final = 65536
"""The same for all of a header together."""
MAX_NESTING: Final = 3
CHUNK: Final = 256 * 1024
SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING: Final = 8
ARRAY: Final = 9


class BadGguf(Exception):
    """The header cannot be used; the message says why."""


class CutOff(BadGguf):
    """The file ends within its header."""


@dataclass(frozen=True, slots=True)
class Gguf:
    """A header. `bytes` are those of the tensors, `size` what the whole file must have at least.

    `error`: why it is unusable; `cut`: why bytes are missing at the end.
    """

    meta: dict[str, Any] = field(default_factory=dict)
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    expert_bytes: int = 0
    types: dict[str, int] = field(default_factory=dict)
    vocab: int | None = None
    has_output: bool = False
    size: int = 0
    error: str | None = None
    cut: str | None = None


def read_gguf(path: Path) -> Gguf:
    """Read one file's header. Blocking; reads at most MAX_HEADER bytes."""
    try:
        with path.open("rb") as file:
            return parse_gguf(file, os.fstat(file.fileno()).st_size)
    except (OSError, ValueError) as error:
        return Gguf(error=f"cannot be read: {getattr(error, 'strerror', None) or error}")


def parse_gguf(file: BinaryIO, size: int) -> Gguf:
    """The header of a file of `size` bytes. Never raises for what is in it."""
    stream = _Stream(file)
    try:
        _check_start(stream)
        tensors, keys = stream.number("<Q"), stream.number("<Q")
        if tensors > MAX_TENSORS or keys > MAX_KEYS:
            raise BadGguf(f"claims {tensors} tensors and {keys} keys: its header is damaged")
        meta = _read_meta(stream, keys)
        return _read_tensors(stream, tensors, meta, size)
    except CutOff:
        return Gguf(cut=f"has {size} bytes and ends within its header: it was cut off")
    except BadGguf as error:
        return Gguf(error=str(error))


class _Stream:
    """Reads on through a file in chunks, skips without keeping, and stops at MAX_HEADER."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._buffer, self._at = file, b"", 0
        self.position = 0
        self.items = 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if self._at + count > len(self._buffer):
            self._fill(count)
        piece = self._buffer[self._at : self._at + count]
        self._at += count
        self.position += count
        return piece

    def _fill(self, count: int) -> None:
        if self.position + count > MAX_HEADER:
            raise BadGguf(f"has a header of more than {MAX_HEADER} bytes: it is damaged")
        rest = self._buffer[self._at :]
        self._buffer = rest + self._file.read(max(CHUNK, count - len(rest)))
        self._at = 0
        if len(self._buffer) < count:
            raise CutOff

    def skip(self, count: int) -> None:
        """Pass over bytes without holding them all."""
        while count > 0:
            step = min(count, CHUNK)
            self.take(step)
            count -= step

    def number(self, layout: str) -> Any:
        """One number."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self) -> str | None:
        """A string; None when it is longer than is worth keeping."""
        length = self.number("<Q")
        if length > MAX_KEPT:
            self.skip(min(length, MAX_HEADER + 1))
            return None
        return self.take(length).decode("utf-8", errors="replace")


def _check_start(stream: _Stream) -> None:
    magic, version = stream.take(4), stream.number("<I")
    if magic != MAGIC:
        raise BadGguf("is no GGUF file: it does not start with its four letters")
    if version & 0xFFFF == 0 and version:
        raise BadGguf("is a big-endian GGUF file: no engine of ours loads one here")
    if version not in VERSIONS:
        raise BadGguf(f"is a GGUF file of version {version}; versions 2 and 3 are understood")


def _read_meta(stream: _Stream, keys: int) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    kept = 0
    for _ in range(keys):
        key, kind = stream.text(), stream.number("<I")
        value = _value(stream, kind, 0)
        kept += len(key or "") + (len(value) if isinstance(value, str | list) else 1)
        if key is not None and value is not None and kept < MAX_KEPT_ALL:
            meta[key] = value
    return meta


def _value(stream: _Stream, kind: int, depth: int) -> Any:
    """One value; a list that is too long to keep is its length as `{"count": n}`."""
    if kind in SCALARS:
        return stream.number(SCALARS[kind])
    if kind == STRING:
        return stream.text()
    if kind != ARRAY or depth > MAX_NESTING:
        raise BadGguf(f"has a value of unknown type {kind}: its header is damaged")
    inner, count = stream.number("<I"), stream.number("<Q")
    if count > MAX_HEADER:
        raise BadGguf(f"claims an array of {count} items: its header is damaged")
    if inner in SCALARS:
        width = struct.calcsize(SCALARS[inner])
        if count > MAX_KEPT:
            stream.skip(width * count)
            return {"count": count}
        return list(struct.unpack(f"<{count}{SCALARS[inner][1]}", stream.take(width * count)))
    stream.items += count
    if stream.items > MAX_ITEMS:
        raise BadGguf(f"claims more than {MAX_ITEMS} strings: its header is damaged")
    if inner == STRING:
        _skip_texts(stream, count)
    else:
        for _ in range(count):
            _value(stream, inner, depth + 1)
    return {"count": count}


def _skip_texts(stream: _Stream, count: int) -> None:
    """Pass over the strings of a vocabulary: half a million of them, so without detours."""
    take, skip = stream.take, stream.skip
    for _ in range(count):
        length = int.from_bytes(take(8), "little")
        if length <= CHUNK:
            take(length)
        else:
            skip(min(length, MAX_HEADER + 1))


def _read_tensors(stream: _Stream, count: int, meta: dict[str, Any], size: int) -> Gguf:
    types: Counter[str] = Counter()
    parameters = total = experts = end = 0
    vocab, has_output = None, False
    for _ in range(count):
        name, shape, kind, offset = _tensor(stream)
        values, held = _measure(name, shape, kind)
        types[TENSOR_TYPES[kind][0]] += held
        parameters += values
        total += held
        end = max(end, offset + held)
        experts += held if "_exps." in name else 0
        if name == "token_embd.weight" and len(shape) == 2:
            vocab = shape[1]
        has_output = has_output or name == "output.weight"
    alignment = meta.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
        raise BadGguf(f"has an alignment of {str(alignment)[:20]}: its header is damaged")
    start = -(-stream.position // alignment) * alignment
    needed = start + end if count else stream.position
    cut = f"lacks its last {needed - size} bytes: it was cut off" if size < needed else None
    return Gguf(
        meta=meta,
        tensors=count,
        parameters=parameters,
        bytes=total,
        expert_bytes=experts,
        types=dict(types),
        vocab=vocab,
        has_output=has_output,
        size=needed,
        cut=cut,
    )


def add(parts: list[Gguf]) -> Gguf:
    """A file that was split, as one: the metadata is in its first part."""
    types: Counter[str] = Counter()
    for part in parts:
        types.update(part.types)
    return Gguf(
        meta=parts[0].meta,
        tensors=sum(part.tensors for part in parts),
        parameters=sum(part.parameters for part in parts),
        bytes=sum(part.bytes for part in parts),
        expert_bytes=sum(part.expert_bytes for part in parts),
        types=dict(types),
        vocab=next((part.vocab for part in parts if part.vocab), None),
        has_output=any(part.has_output for part in parts),
        size=sum(part.size for part in parts),
    )


def _tensor(stream: _Stream) -> tuple[str, list[int], int, int]:
    name, dimensions = stream.text() or "", stream.number("<I")
    if dimensions > 8:
        raise BadGguf(f"has a tensor of {dimensions} dimensions: its header is damaged")
    shape = [stream.number("<Q") for _ in range(dimensions)]
    kind, offset = stream.number("<I"), stream.number("<Q")
    if any(length >= 2**40 for length in shape) or offset >= 2**48:
        raise BadGguf(f"has a tensor {name[:60]!r} of absurd size: its header is damaged")
    return name, shape, kind, offset


def _measure(name: str, shape: list[int], kind: int) -> tuple[int, int]:
    """Values and bytes of a tensor; rows are whole numbers of blocks."""
    if kind not in TENSOR_TYPES:
        raise BadGguf(f"has a tensor {name[:60]!r} of unknown type {kind}: a newer kind of file?")
    _, block, held = TENSOR_TYPES[kind]
    values = prod(shape)
    if values >= 2**48 or (shape and shape[0] % block):
        raise BadGguf(f"has a tensor {name[:60]!r} that its type cannot hold: damaged")
    return values, values // block * held
