"""Where a JSON text names its model: one name is swapped, and all that looks like it stays. Pure.

Tools' arguments, their schemas and metadata may have a `model` of their own. What is around the
name passes byte for byte: written again, a number beyond 64 bits would come out as another.
"""

from __future__ import annotations

import re
from typing import Final

LONG: Final = 65_536
"""A longer text with one `model` only is not looked through: 10 ms for a megabyte."""
MOST_STEPS: Final = 10_000
"""So many strings and brackets are looked at before an answer's own name: 2 ms at most."""
_KEY: Final = b'"model"'
_NAMED: Final = re.compile(rb'"model"\s*:\s*("[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)
_STEP: Final = re.compile(rb'[{}\[\]]|"[^"\\]*(?:\\.[^"\\]*)*"(\s*:)?', re.DOTALL)
_HOLDERS: Final = frozenset((b'"message"', b'"response"'))  # what an event tells of, with its model


def rename(body: bytes, name_json: bytes) -> bytes | None:
    """`body`, a JSON object with a `model`, with that name replaced; None when it is not plain
    which of several keys that is. No key may be spelled with escaped letters."""
    found = _NAMED.search(body)
    if found is None or body.find(_KEY) != body.rfind(_KEY):
        return None
    return _replaced(body, found, name_json)


def restore(text: bytes, name_json: bytes) -> bytes:
    """`text`, an answer or an event, with the name of its model replaced by `name_json`."""
    found = _own(text)
    return text if found is None else _replaced(text, found, name_json)


def _replaced(text: bytes, found: re.Match[bytes], name_json: bytes) -> bytes:
    return text[: found.start(1)] + name_json + text[found.end(1) :]


def _own(text: bytes) -> re.Match[bytes] | None:
    """The `model` of the document itself, or of the message or response that it tells of."""
    first = _NAMED.search(text)
    if first is None or _is_plain(text, first):
        return first
    around: list[bytes] = []  # the key of each bracket that is open
    key = b""
    for number, step in enumerate(_STEP.finditer(text)):
        word = step[0]
        if word in (b"{", b"["):
            around.append(key)
            key = b""
        elif word in (b"}", b"]"):
            if around:
                around.pop()
        elif step[1] is None:
            key = b""
        else:
            key = word[: -len(step[1])]
            inside = len(around) == 1 or (len(around) == 2 and around[1] in _HOLDERS)
            found = _NAMED.match(text, step.start()) if key == _KEY and inside else None
            if found is not None:
                return found
        if number > MOST_STEPS:
            return first
    return None


def _is_plain(text: bytes, first: re.Match[bytes]) -> bool:
    """Whether the first is the one at a look that costs little, as in most events."""
    start = first.start()
    outermost = text.count(b"{", 0, start) == 1 and text.find(b"[", 0, start) < 0
    return (outermost and text.find(b"}", 0, start) < 0) or (
        len(text) > LONG and text.find(_KEY, first.end()) < 0
    )
