"""Embeddings in the form that the client asked for, of engines that know only the other (A26).

OpenAI's libraries ask for base64 unless told otherwise, and some cannot read anything else. That
form is little-endian float32, without a header. Pure.
"""

from __future__ import annotations

import binascii
import re
import struct
from typing import Any, Final

import orjson

MOST_BYTES: Final = 4 * 1024 * 1024
"""Larger answers pass as they are: converting one would stop all other streams for too long."""
BASE64, FLOAT = "base64", "float"
_GIVEN: Final = re.compile(rb'"embedding"\s*:\s*(["\[])')


def form_of(document: dict[str, Any]) -> str | None:
    """What a request asks for, numbers unless told otherwise; None: what only its engine knows."""
    asked = document.get("encoding_format") or FLOAT
    return asked if asked in (BASE64, FLOAT) else None


def in_form(body: bytes, form: str) -> bytes:
    """The same answer with its embeddings so; untouched when they are, or when it has none."""
    given = _GIVEN.search(body)
    if given is None or (given[1] == b'"') == (form == BASE64):
        return body
    change = _packed if form == BASE64 else _numbers
    try:
        document = orjson.loads(body)
        for entry in document["data"]:
            entry["embedding"] = change(entry["embedding"])
        return orjson.dumps(document)
    except (ValueError, KeyError, TypeError, struct.error, OverflowError):
        return body  # not what it seemed: the client may make something of it


def _packed(vector: Any) -> Any:
    if not isinstance(vector, list):
        return vector
    return binascii.b2a_base64(struct.pack(f"<{len(vector)}f", *vector), newline=False).decode()


def _numbers(vector: Any) -> Any:
    if not isinstance(vector, str):
        return vector
    packed = binascii.a2b_base64(vector, strict_mode=True)
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))
