"""The header of a safetensors file: how many parameters and bytes its tensors have.

Called by weights_files.py. Eight bytes of length, a JSON header, then the data; only the first two
are read. A file shorter than its header promises was cut off; a header that contradicts itself is
refused, because the sums made from it would be wrong.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

MAX_HEADER: Final = 32 * 2**20
"""Bytes; the format allows 100 MB, the largest published ones have about ten."""
_BLANKS: Final = re.compile(r"[ \t\r\n]*")
MAX_DIMENSIONS: Final = 16
BITS: Final = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
}
SCALES: Final = (
    "scale",
    "scales",
    "scale_inv",
    "zeros",
    "qzeros",
    "zero_point",
    "g_idx",
    "absmax",
    "quant_map",
    "weight_shape",
    "inv_freq",
)
"""Ends of names that belong to a quantisation or are computed: bytes, but no parameters."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Sums over tensors. `error`: why the header is unusable; `cut`: the file is shorter than it.

    `elements` are numbers of values by dtype, without scales; a packed one holds several weights.
    """

    count: int = 0
    bytes: int = 0
    expert_bytes: int = 0
    elements: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    cut: str | None = None


def read_header(path: Path) -> Tensors:
    """Read one file's header. Blocking; reads at most MAX_HEADER bytes."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return parse_header(file.read(8), size, file.read)
    except (OSError, ValueError) as error:
        return Tensors(error=f"cannot be read: {getattr(error, 'strerror', None) or error}")


def parse_header(start: bytes, size: int, read: Any) -> Tensors:
    """Sums of a file of `size` bytes from its first eight and a function that reads on."""
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or size < 8 + length <= 8 + MAX_HEADER:
        return Tensors(cut=f"has {size} bytes, fewer than its header: it was cut off")
    if not 2 <= length <= MAX_HEADER:
        return Tensors(error=f"is no safetensors file: its header would have {length} bytes")
    try:
        text = read(length).decode()
        return _sum(_entries(text), size - 8 - length)
    except (ValueError, RecursionError) as error:
        return Tensors(error=f"is no safetensors file: {str(error)[:80] or 'too deep'}")


def _entries(text: str) -> Iterator[tuple[str, Any]]:
    """The header's entries one by one: parsed at once, 8 MiB of them would take 45 MiB.

    Raises ValueError for what is no JSON object.
    """
    decode, skip = json.JSONDecoder().raw_decode, _BLANKS.match
    at, comma = _next(text, 0, "{"), True
    while (blank := skip(text, at)) and text[blank.end() : blank.end() + 1] != "}":
        if not comma:
            raise ValueError("a comma is missing in its header")
        name, at = decode(text, blank.end())
        value, at = decode(text, _next(text, _next(text, at, ":"), ""))
        yield str(name), value
        at = _next(text, at, "")
        comma = text[at : at + 1] == ","
        at += comma


def _next(text: str, at: int, mark: str) -> int:
    """The place behind blanks and a mark that must be there."""
    blank = _BLANKS.match(text, at)
    at = blank.end() if blank else at
    if not text.startswith(mark, at):
        raise ValueError(f"its header lacks a {mark}")
    return at + len(mark)


def _tensor(found: Any) -> tuple[str, int, int, int] | None:
    """A tensor as (dtype, elements, begin, end), or None."""
    if not isinstance(found, dict):
        return None
    shape, offsets, dtype = found.get("shape"), found.get("data_offsets"), found.get("dtype")
    if not (_numbers(shape, MAX_DIMENSIONS) and _numbers(offsets, 2) and len(offsets) == 2):
        return None
    return str(dtype)[:16], prod(shape), offsets[0], offsets[1]


def _numbers(value: Any, most: int) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > most:
        return False
    return all(type(item) is int and 0 <= item < 2**48 for item in value)


def _sum(pairs: Iterable[tuple[str, Any]], available: int) -> Tensors:
    elements: Counter[str] = Counter()
    total = experts = end = count = 0
    for name, described in pairs:
        if name == "__metadata__":
            continue
        tensor = _tensor(described)
        if tensor is None:
            return Tensors(error=f"has a bad header: tensor {name[:80]!r} is not described")
        dtype, values, begin, stop = tensor
        bits = BITS.get(dtype)
        if stop < begin or (bits is not None and (values * bits + 7) // 8 != stop - begin):
            return Tensors(error=f"has a bad header: tensor {name[:80]!r} and its size disagree")
        count += 1
        total += stop - begin
        end = max(end, stop)
        experts += stop - begin if ".experts." in name else 0
        if not name.endswith(SCALES):
            elements[dtype] += values
    if total != end:
        return Tensors(error="has a bad header: its tensors overlap or leave gaps")
    cut = f"lacks its last {end - available} bytes: it was cut off" if available < end else None
    return Tensors(count, total, experts, dict(elements), cut=cut)


def add(parts: list[Tensors]) -> Tensors:
    """The sum of several files; their errors are the caller's to tell."""
    elements: Counter[str] = Counter()
    for part in parts:
        elements.update(part.elements)
    return Tensors(
        count=sum(part.count for part in parts),
        bytes=sum(part.bytes for part in parts),
        expert_bytes=sum(part.expert_bytes for part in parts),
        elements=dict(elements),
    )


def parameters(tensors: Tensors, bits: int | None) -> int | None:
    """Weights of a model. `bits` of its quantisation say how many lie in one packed integer."""
    total = 0
    for dtype, values in tensors.elements.items():
        size = BITS.get(dtype)
        if size is None:
            return None
        packed = dtype in {"I32", "U32", "U8"} and bits is not None and bits < size
        total += values * size // bits if packed and bits else values
    return total or None


FLOATS: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def main_dtype(tensors: Tensors) -> str | None:
    """The dtype that most values have, where it is one to compute in."""
    most = max(tensors.elements, key=lambda dtype: tensors.elements[dtype], default="")
    return FLOATS.get(most)
