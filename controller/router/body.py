"""The body of a request: the few fields we read, and the rare rewrite. Pure.

Unknown fields pass through untouched, and the bytes themselves do, unless the model's name must
be swapped, usage asked for, or an engine could read another model in them than we did.
"""

from __future__ import annotations

import re
import zlib
from io import BytesIO
from itertools import product
from typing import Any, Final

import orjson
import zstandard

from controller.router.errors import ApiError, invalid, too_large
from controller.router.multipart import find_fields
from controller.router.names import rename
from controller.router.unzip import MOST_MEMBERS, decompressor

CODINGS: Final = frozenset((b"gzip", b"x-gzip", b"zstd", b"deflate"))
MOST_DEPTH: Final = 254
"""So deep orjson writes a document (it reads 1024); real requests stay below 20."""
LONG_BYTES: Final = 2**20
MOST_MARKS: Final = 1_000_000
"""A longer document may have so many commas and opening brackets: 32 MiB of nothing but `[],` took
a second of every client's time and 1 GB. Twenty megabytes of plain text have fewer."""
_READ: Final = re.compile(rb'"(?:model|stream)"')
_LETTER: Final = re.compile(rb"\\u00(?:6[1-9A-Fa-f]|7[0-9Aa])")
_ASK_USAGE: Final = b',"stream_options":{"include_usage":true}'
_OPTIONS: Final = b'"stream_options"'
_FLAT_OPTIONS: Final = re.compile(rb'"stream_options"\s*:\s*(null|\{(?:[^{}"\\]|"[^"\\]*")*\})')
_TOO_MANY: Final = f"The request body has more than {MOST_MARKS} commas and brackets: send several."
_TWO_MODELS: Final = (
    "The field 'model' comes in capitals, too, and engines differ on that: send one."
)
_WANTED: Final = frozenset((b"model", b"stream"))
_OTHER_CASES: Final = frozenset(map("".join, product(*zip("model", "MODEL", strict=True)))) - {
    "model"
}
"""Go's parser, and so engines written in it, takes these for it, too, and has the last one."""
_BACKSLASH: Final = ord("\\")
_TRUE: Final = frozenset(("1", "t", "true", "y", "yes", "on"))  # as pydantic reads a form


class Asked:
    """What the client wants, read from its body."""

    __slots__ = ("ask_usage", "document", "model", "model_at", "prompt", "raw", "stream")

    def __init__(
        self,
        raw: bytes,
        document: dict[str, Any],
        model: str,
        stream: bool,
        ask_usage: bool = False,
        model_at: tuple[int, int] | None = None,
    ) -> None:
        self.raw = raw
        self.document = document
        self.model = model
        self.stream = stream
        self.ask_usage = ask_usage  # it streams and did not ask for usage, so we must
        self.model_at = model_at  # in a form: where the name lies in `raw`
        self.prompt: int | None = None  # tokens of it, about; known once `raw` is gone

    def let_go(self, prompt: int) -> None:
        """No engine gets it any more: of what may be long, its `prompt` tokens are left."""
        self.raw, self.document, self.prompt = b"", {}, prompt


def read(raw: bytes, *, asks_usage: bool = False) -> Asked | ApiError:
    """The fields we route by; an error when the body is no JSON object or names no model.

    `asks_usage`: whether `stream_options` exists at this endpoint.
    """
    if len(raw) > LONG_BYTES and _marks(raw) > MOST_MARKS:
        return invalid("request_too_large", _TOO_MANY, status=413)
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return invalid("invalid_json", f"The request body is not valid JSON: {error}.")
    if not isinstance(document, dict):
        return invalid("invalid_json", "The request body must be a JSON object.")
    get = document.get
    model = get("model")
    if not isinstance(model, str) or not model:
        return _no_model()
    if not _OTHER_CASES.isdisjoint(document):
        return invalid("ambiguous_model", _TWO_MODELS, param="model")
    stream = get("stream")
    if stream is not None and type(stream) is not bool:
        return invalid("invalid_type", "The field 'stream' must be true or false.", param="stream")
    options = get("stream_options")
    if options is not None and not isinstance(options, dict):
        return invalid(
            "invalid_type", "The field 'stream_options' must be an object.", param="stream_options"
        )
    if _suspect(raw, names_stream="stream" in document):
        kept = _unambiguous(raw, document)
        if kept is None:
            return too_deep()
        raw = kept
    if not stream:
        return Asked(raw, document, model, False)
    wants_usage = options is not None and options.get("include_usage") is True
    return Asked(raw, document, model, True, asks_usage and not wants_usage)


def read_form(raw: bytes, content_type: bytes) -> Asked | ApiError:
    """The same from a form with a file, at the audio endpoints."""
    fields = find_fields(raw, content_type, _WANTED)
    if isinstance(fields, ApiError):
        return fields
    model = fields.get(b"model")
    if model is None or not model.value:
        return _no_model()
    stream = b"stream" in fields and fields[b"stream"].value.lower() in _TRUE
    return Asked(raw, {}, model.value, stream, model_at=(model.start, model.end))


def choices(document: dict[str, Any]) -> int:
    """How many answers are asked for in one: `n`, of each prompt where it is a list of them."""
    number, prompts = document.get("n"), document.get("prompt")
    each = number if type(number) is int and number > 1 else 1
    if isinstance(prompts, list) and prompts and type(prompts[0]) is not int:
        return each * len(prompts)
    return each


def rewritten(asked: Asked, upstream_model: str, *, ask_usage: bool) -> bytes | None:
    """The body for the engine: the client's own bytes unless something must differ.

    None when it must, and the document is too deep to be written again.
    """
    if upstream_model == asked.model and not ask_usage:
        return asked.raw
    if asked.model_at is not None:
        start, end = asked.model_at
        return asked.raw[:start] + upstream_model.encode() + asked.raw[end:]
    body = _spliced(asked, upstream_model, ask_usage=ask_usage)
    return body or _written_again(asked, upstream_model, ask_usage=ask_usage)


def _spliced(asked: Asked, upstream_model: str, *, ask_usage: bool) -> bytes | None:
    """The client's bytes with nothing but that changed, no number's spelling either; None where
    it is not plain how. `read` has left no key that is spelled with escapes."""
    body: bytes | None = asked.raw
    if upstream_model != asked.model:
        body = rename(asked.raw, orjson.dumps(upstream_model))
    if body is None or not ask_usage:
        return body
    if "stream_options" not in asked.document:
        end = body.rindex(b"}")
        return body[:end] + _ASK_USAGE + body[end:]
    found = _FLAT_OPTIONS.search(body)
    if found is None or body.find(_OPTIONS) != body.rfind(_OPTIONS) or b"\\u005" in body:
        return None
    return body[: found.start(1)] + orjson.dumps(_with_usage(asked)) + body[found.end(1) :]


def _with_usage(asked: Asked) -> dict[str, Any]:
    """The options of its stream, and that usage is wanted."""
    return {**(asked.document.get("stream_options") or {}), "include_usage": True}


def _written_again(asked: Asked, upstream_model: str, *, ask_usage: bool) -> bytes | None:
    document = dict(asked.document)
    document["model"] = upstream_model
    if ask_usage:
        document["stream_options"] = _with_usage(asked)
    return _dumped(document)


def too_deep() -> ApiError:
    """Its body would have to be written again, and cannot be."""
    return invalid("invalid_json", f"The request body nests deeper than {MOST_DEPTH} levels.")


def _marks(raw: bytes) -> int:
    """What bounds how many values there are, at a look that costs 1 ms for a megabyte."""
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def _suspect(raw: bytes, *, names_stream: bool) -> bool:
    """Whether a key that we read may be there twice, somewhere: a look that costs little."""
    if raw.find(b'"model"') != raw.rfind(b'"model"'):
        return True
    if names_stream and raw.find(b'"stream"') != raw.rfind(b'"stream"'):
        return True
    # Looked for as a number: looking for bytes takes five times as long.
    return _BACKSLASH in raw and _escapes(raw)


def _escapes(raw: bytes) -> bool:
    """Letters as `\\u0061`: no encoder makes them, but a key could be spelled so. (That of .NET
    makes `\\u0060` of each backtick, and prompts are full of those.)"""
    return (b"\\u006" in raw or b"\\u007" in raw) and _LETTER.search(raw) is not None


def _unambiguous(raw: bytes, document: dict[str, Any]) -> bytes | None:
    """The bytes to send; None when the document is too deep to be written again.

    Of a key that comes twice we read the last value, as the engines' parsers do; so that no other
    parser can choose another, such a body is sent as we read it. Two spellings of a key are told
    by escaped letters.
    """
    ours = _dumped(document)
    if ours is None or _escapes(raw):
        return ours
    return ours if len(_READ.findall(ours)) < len(_READ.findall(raw)) else raw


def _dumped(document: dict[str, Any]) -> bytes | None:
    try:
        return orjson.dumps(document)
    except orjson.JSONEncodeError:
        return None


def _no_model() -> ApiError:
    return invalid(
        "missing_model", "Name a model: the field 'model' must be a string.", param="model"
    )


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
    decoded = b""
    for _ in range(MOST_MEMBERS):
        machine = decompressor(coding)
        decoded += machine.decompress(data, limit + 1 - len(decoded))
        data = machine.unused_data
        if len(decoded) > limit or (machine.eof and not data):
            return decoded
        if not machine.eof:
            break
    raise EOFError


def _unzstd(data: bytes, limit: int) -> bytes:
    # The window bound keeps a small frame from asking for gigabytes of memory.
    machine = zstandard.ZstdDecompressor(max_window_size=2**27)
    with machine.stream_reader(BytesIO(data), read_across_frames=True) as reader:
        return reader.read(limit + 1)
