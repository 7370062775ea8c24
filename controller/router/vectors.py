"""Embeddings as base64 for clients that asked so, of engines that know only numbers (case A26).

OpenAI's libraries ask for base64 unless told otherwise, and some cannot read anything else. The
form is little-endian float32, without a header. Pure.
"""

from __future__ import annotations

import binascii
import re
import struct
from typing import Any

import orjson

MOST_BYTES = 4 * 1024 * 1024
"""Larger answers pass as they are: converting one would stop all other streams for too long."""
_NUMBERS = re.compile(rb'"embedding"\s*:\s*\[\s*[-0-9]')


def as_base64(body: bytes) -> bytes:
    """The same answer with each embedding packed; untouched when there is nothing to pack."""
    if _NUMBERS.search(body) is None:
        return body
    try:
        document = orjson.loads(body)
        for entry in document["data"]:
            entry["embedding"] = _packed(entry["embedding"])
    except (orjson.JSONDecodeError, KeyError, TypeError, struct.error, OverflowError):
        return body  # not what it seemed: the client may make something of it
    return orjson.dumps(document)


def _packed(numbers: Any) -> Any:
    if not isinstance(numbers, list):
        return numbers
    return binascii.b2a_base64(struct.pack(f"<{len(numbers)}f", *numbers), newline=False).decode()
