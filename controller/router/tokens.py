"""Token counts that an engine reports: read from a usage object, found in a plain answer. Pure.

Unknown is None: an engine that reports nothing is never billed as zero.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import orjson

_NAME = b'"usage"'
_OPENING = re.compile(rb'"usage"\s*:\s*\{')
_LONGEST = 8192  # a usage object with all details is under 1 KiB


class Tokens(NamedTuple):
    """What one request used, as the engine counted it (a tuple: made once per request)."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None


UNKNOWN = Tokens()


def read_usage(usage: Any) -> Tokens:
    """Counts of an OpenAI usage object; anything that is not a count becomes unknown."""
    if not isinstance(usage, dict):
        return UNKNOWN
    details = usage.get("prompt_tokens_details")
    return Tokens(
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")),
        _count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


class UsageFinder:
    """Finds the last usage object of a JSON answer that passes by in pieces, in bounded memory."""

    __slots__ = ("_captured", "_carry")

    def __init__(self) -> None:
        self._carry = b""
        self._captured: bytes | None = None

    def feed(self, piece: bytes) -> None:
        window = self._carry + piece if self._carry else piece
        at = window.rfind(_NAME)
        if at >= 0:
            self._captured = window[at : at + _LONGEST]
        elif self._captured is not None and len(self._captured) < _LONGEST:
            self._captured += piece[: _LONGEST - len(self._captured)]
        self._carry = window[-(len(_NAME) - 1) :] if at < 0 else piece[-(len(_NAME) - 1) :]

    def tokens(self) -> Tokens:
        """What was found; unknown when there was no complete usage object."""
        found = None if self._captured is None else _OPENING.match(self._captured)
        if found is None or self._captured is None:
            return UNKNOWN
        return read_usage(_balanced(self._captured, found.end() - 1))


def _balanced(text: bytes, start: int) -> Any:
    """The JSON object that begins at `start`; a usage object holds no braces in strings."""
    end = text.find(b"}", start) + 1
    while end > 0:
        candidate = text[start:end]
        if candidate.count(b"{") == candidate.count(b"}"):
            try:
                return orjson.loads(candidate)
            except orjson.JSONDecodeError:
                return None
        end = text.find(b"}", end) + 1
    return None
