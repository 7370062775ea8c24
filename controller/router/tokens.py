"""Token counts: read from what an engine says of them, found in a plain answer. Pure.

Unknown is None: an engine that reports nothing is never billed as zero.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

_NAME: Final = b'"usage"'
_OPENING: Final = re.compile(rb'"usage"\s*:\s*\{')
_MAY_OPEN: Final = re.compile(rb'"usage"\s*(?::\s*(?:\{|\Z)|\Z)')
_LONGEST: Final = 8192  # a usage object with all details is under 1 KiB


class Tokens:
    """What one request used, as the engine counted it. No tuple: compiled code makes and reads
    one in a tenth of the time."""

    __slots__ = ("cached", "completion", "estimated", "prompt", "reasoning")

    def __init__(
        self,
        prompt: int | None = None,
        completion: int | None = None,
        cached: int | None = None,
        reasoning: int | None = None,
        estimated: bool = False,
    ) -> None:
        self.prompt = prompt
        self.completion = completion
        self.cached = cached  # of the prompt
        self.reasoning = reasoning  # of the completion
        self.estimated = estimated  # something of it is ours, not the engine's

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and self.as_values() == other.as_values()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Tokens{self.as_values()}"

    def as_values(self) -> tuple[int | None, int | None, int | None, int | None, bool]:
        """All of it, in the order of the arguments."""
        return self.prompt, self.completion, self.cached, self.reasoning, self.estimated

    @property
    def complete(self) -> bool:
        """Whether the engine told both sides."""
        return self.prompt is not None and self.completion is not None


UNKNOWN: Final = Tokens()
MOST: Final = 1_000_000_000
"""No model takes or makes so many in one request: a larger number is nonsense, not a bill."""
_USUAL: Final = {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
"""What most answers tell, and nothing else: read without looking for all other forms."""


def read_usage(usage: Any) -> Tokens:
    """Counts of a usage object in OpenAI's, Responses' or Anthropic's form; what is no count
    becomes unknown.

    Anthropic's `input_tokens` are without the cached ones, OpenAI's with them. Rerankers may tell
    a total only.
    """
    if not isinstance(usage, dict):
        return UNKNOWN
    get = usage.get
    prompt, completion = get("prompt_tokens"), get("completion_tokens")
    # Three of them, of which one is the total: the same at a look that costs a third.
    few = completion is not None and len(usage) == 3 and "total_tokens" in usage
    if prompt is not None and (few or _is_usual(usage)):
        return Tokens(_count(prompt), _count(completion))
    prompt = _first(prompt, get("input_tokens"))
    completion = _first(completion, get("output_tokens"))
    read, made = _count(get("cache_read_input_tokens")), _count(get("cache_creation_input_tokens"))
    if prompt is not None:
        prompt += (read or 0) + (made or 0)
    elif "prompt_tokens" not in usage and "input_tokens" not in usage:
        total = _count(get("total_tokens"))
        prompt = None if total is None else _count(total - (completion or 0))
    cached = _first(
        _detail(usage, ("prompt_tokens_details", "input_tokens_details"), "cached_tokens"),
        read,
        get("prompt_cache_hit_tokens"),
    )
    told = ("completion_tokens_details", "output_tokens_details")
    reasoning = _first(_detail(usage, told, "reasoning_tokens"), get("reasoning_tokens"))
    return Tokens(prompt, completion, cached, reasoning)


def _is_usual(usage: dict[str, Any]) -> bool:
    return usage.keys() <= _USUAL and not usage.get("prompt_tokens_details")


def read_timings(text: bytes) -> Tokens:
    """Counts of llama.cpp's `timings` object."""
    try:
        timings = orjson.loads(text)
    except orjson.JSONDecodeError:
        return UNKNOWN
    fresh, cached = _count(timings.get("prompt_n")), _count(timings.get("cache_n"))
    prompt = None if fresh is None else fresh + (cached or 0)
    return Tokens(prompt, _count(timings.get("predicted_n")), cached)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MOST else None


def _first(*values: Any) -> int | None:
    for value in values:
        count = _count(value)
        if count is not None:
            return count
    return None


def _detail(usage: dict[str, Any], holders: tuple[str, ...], name: str) -> Any:
    for holder in holders:
        inner = usage.get(holder)
        if isinstance(inner, dict):
            return inner.get(name)
    return None


class UsageFinder:
    """Finds the last usage object of a JSON answer that passes by in pieces, in bounded memory."""

    __slots__ = ("_before", "_captured", "_carry")

    def __init__(self) -> None:
        self._carry = b""
        self._captured: bytes | None = None
        self._before: bytes | None = None  # the one that came before that, if it was an object

    def feed(self, piece: bytes) -> None:
        window = self._carry + piece if self._carry else piece
        at = _last(window)
        if at >= 0:
            self._before = self._object()
            self._captured = window[at : at + _LONGEST]
        elif self._captured is not None and len(self._captured) < _LONGEST:
            self._captured += piece[: _LONGEST - len(self._captured)]
        self._carry = window[-(len(_NAME) - 1) :] if at < 0 else piece[-(len(_NAME) - 1) :]

    def tokens(self) -> Tokens:
        """What was found; unknown when there was no complete usage object."""
        text = self._object()
        return UNKNOWN if text is None else _read_at(text)

    def _object(self) -> bytes | None:
        """The last one captured that is an object, or its beginning."""
        text = self._captured
        return text if text is not None and _OPENING.match(text) else self._before


def find_usage(answer: bytes) -> Tokens:
    """What a whole JSON answer tells; unknown when there is no usage object in it."""
    at = answer.rfind(_NAME)
    if at < 0:
        return UNKNOWN
    start = at + len(_NAME)
    flat = answer[start : answer.find(b"}", start) + 1]
    if flat[:2] == b":{" and flat.find(b"{", 2) < 0 and len(flat) < _LONGEST:
        return read_usage(_object(flat[1:]))
    at = _last(answer)
    return UNKNOWN if at < 0 else _read_at(answer[at : at + _LONGEST])


def _last(text: bytes) -> int:
    """Where the last usage object begins, or may do where the text ends; below 0: there is none.
    A client's own metadata, told again behind it, may have a key of that name."""
    at = text.rfind(_NAME)
    while at >= 0 and _MAY_OPEN.match(text, at) is None:
        at = text.rfind(_NAME, 0, at)
    return at


def _read_at(text: bytes) -> Tokens:
    """The counts of the usage object that `text` begins with."""
    found = _OPENING.match(text)
    return UNKNOWN if found is None else read_usage(_balanced(text, found.end() - 1))


def _object(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _balanced(text: bytes, start: int) -> Any:
    """The JSON object that begins at `start`; a usage object holds no braces in strings."""
    end = text.find(b"}", start) + 1
    while end > 0:
        candidate = text[start:end]
        if candidate.count(b"{") == candidate.count(b"}"):
            return _object(candidate)
        end = text.find(b"}", end) + 1
    return None
