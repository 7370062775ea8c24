"""The JSON body of a request: the few fields we read, and the rare rewrite. Pure.

Unknown fields pass through untouched, and the bytes themselves do, unless the model's name must
be swapped or usage asked for.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import orjson
import zstandard

from controller.router.errors import ApiError, invalid, too_large

CODINGS = frozenset((b"gzip", b"x-gzip", b"zstd", b"deflate"))


@dataclass(slots=True)
class Asked:
    """What the client wants, read from its body."""

    raw: bytes
    document: dict[str, Any]
    model: str
    stream: bool
    wants_usage: bool


def read(raw: bytes) -> Asked | ApiError:
    """The fields we route by; an error when the body is no JSON object or names no model."""
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return invalid("invalid_json", "The request body is not valid JSON.")
    if not isinstance(document, dict):
        return invalid("invalid_json", "The request body must be a JSON object.")
    model = document.get("model")
    if not isinstance(model, str) or not model:
        return invalid(
            "missing_model", "Name a model: the field 'model' is required.", param="model"
        )
    stream = document.get("stream") is True
    options = document.get("stream_options")
    wants_usage = isinstance(options, dict) and options.get("include_usage") is True
    return Asked(raw, document, model, stream, wants_usage)


def rewritten(asked: Asked, upstream_model: str, *, ask_usage: bool) -> bytes:
    """The body for the engine: the client's own bytes unless something must differ."""
    if upstream_model == asked.model and not ask_usage:
        return asked.raw
    document = dict(asked.document)
    document["model"] = upstream_model
    if ask_usage:
        options = document.get("stream_options")
        kept = options if isinstance(options, dict) else {}
        document["stream_options"] = {**kept, "include_usage": True}
    return orjson.dumps(document)


def inflate(coding: bytes, data: bytes, limit: int) -> bytes | ApiError:
    """Decode a compressed body without ever holding more than `limit` decoded bytes.

    Blocking (tens of ms for megabytes): call it in a worker thread.
    """
    try:
        decoded = _unzstd(data, limit) if coding == b"zstd" else _unzip(coding, data, limit)
    except (zlib.error, zstandard.ZstdError, EOFError):
        name = coding.decode("ascii", "replace")
        return invalid("invalid_encoding", f"The request body is not valid {name} data.")
    return too_large(limit, "decompressed request body") if len(decoded) > limit else decoded


def _unzip(coding: bytes, data: bytes, limit: int) -> bytes:
    machine = zlib.decompressobj(zlib.MAX_WBITS if coding == b"deflate" else zlib.MAX_WBITS | 16)
    decoded = machine.decompress(data, limit + 1)
    if len(decoded) <= limit and not machine.eof:
        raise EOFError
    return decoded


def _unzstd(data: bytes, limit: int) -> bytes:
    # The window bound keeps a small frame from asking for gigabytes of memory.
    machine = zstandard.ZstdDecompressor(max_window_size=2**27)
    with machine.stream_reader(BytesIO(data)) as reader:
        return reader.read(limit + 1)
