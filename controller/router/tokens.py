"""Token counts: read from what an engine says of them, found in a plain answer. Pure.

Unknown is None: an engine that reports nothing is never billed as zero.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

_NAME: Final = b'"usage"'
_OPENING: Final = re.compile(rb'"usage"\s*:\s*\{')
_MAY_OPEN: Final = re.compile(rb'"usage"\s*(?::\s*)?')
_ESCAPED: Final = re.compile(rb"\\.", re.DOTALL)
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

    Anthropic's `input_tokens` are without the cached ones, `prompt_tokens` with them, also where a
    gateway (LiteLLM) tells Anthropic's fields beside OpenAI's. Rerankers may tell a total only.
    """
    if not isinstance(usage, dict):
        return UNKNOWN
    get = usage.get
    prompt, completion = get("prompt_tokens"), get("completion_tokens")
    # Three of them, of which one is the total: the same at a look that costs a third.
    few = completion is not None and len(usage) == 3 and "total_tokens" in usage
    if prompt is not None and (few or _is_usual(usage)):
        return Tokens(_count(prompt), _count(completion))
    prompt, fresh = _count(prompt), _count(get("input_tokens"))
    completion = _first(completion, get("output_tokens"))
    read, made = _count(get("cache_read_input_tokens")), _count(get("cache_creation_input_tokens"))
    if prompt is None and fresh is not None:
        prompt = fresh + (read or 0) + (made or 0)
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
    completion = _all_made(get("total_tokens"), prompt, completion, reasoning)
    return Tokens(prompt, completion, cached, reasoning)


def _all_made(
    total: Any, prompt: int | None, completion: int | None, reasoning: int | None
) -> int | None:
    """What was reasoned is part of the completion; xAI counts it beside it, as its total tells,
    and bills it alike."""
    if reasoning and prompt is not None and completion is not None:
        return completion + (reasoning if total == prompt + completion + reasoning else 0)
    return completion


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
    """Finds the usage object of a JSON answer that passes by in pieces, in bounded memory.

    The answer's own one lies in no other object; what a client wrote and an engine tells again,
    metadata or the parameters of a tool, may hold a key of that name before it or behind it.
    """

    __slots__ = ("_captured", "_carry", "_nesting")

    def __init__(self) -> None:
        self._carry = b""  # what may be the beginning of one, or of its name
        self._captured: bytes | None = None  # the least nested so far, the last of several
        self._nesting = Nesting()  # how much deeper than that the text is by now

    def feed(self, piece: bytes) -> None:
        window = self._carry + piece if self._carry else piece
        passed = 0
        at = window.find(_NAME)
        while at >= 0 and not _may_open(window, at):
            if _OPENING.match(window, at):
                self._pass(window[passed:at])
                passed = at
                if self._captured is None or self._nesting.depth <= 0:
                    self._captured, self._nesting = b"", Nesting()
            at = window.find(_NAME, at + len(_NAME))
        keep = at if at >= 0 else max(passed, len(window) - len(_NAME) + 1)
        self._pass(window[passed:keep])
        self._carry = window[keep:]

    def _pass(self, text: bytes) -> None:
        """All of it comes behind what was captured, if anything was."""
        if text and self._captured is not None:
            room = _LONGEST - len(self._captured)
            if room > 0:
                self._captured += text[:room]
            self._nesting.feed(text)

    def tokens(self) -> Tokens:
        """What was found, once the answer is over; unknown when there was no complete object, or
        none but within others."""
        self._pass(self._carry)
        self._carry = b""
        nested = self._nesting.depth < -1  # an answer ends as many objects as it is in
        return UNKNOWN if self._captured is None or nested else _read_at(self._captured)


class Nesting:
    """Counts the objects that JSON text opens and ends; braces in its strings are none."""

    __slots__ = ("_escaping", "_quoted", "depth")

    def __init__(self) -> None:
        self.depth = 0
        self._quoted = 0  # 1: the next byte is in a string
        self._escaping = False  # the next byte follows a backslash

    def feed(self, text: bytes) -> None:
        if self._escaping:
            text = text[1:]
        text = _ESCAPED.sub(b"", text)
        self._escaping = text.endswith(b"\\")
        parts = text.split(b'"')
        for part in parts[self._quoted :: 2]:
            self.depth += part.count(b"{") - part.count(b"}")
        self._quoted ^= (len(parts) - 1) & 1


def _may_open(text: bytes, at: int) -> bool:
    """Whether `text` ends where the brace of what begins at `at` may come next."""
    return len(text) - at < _LONGEST and _MAY_OPEN.fullmatch(text, at) is not None


def find_usage(answer: bytes) -> Tokens:
    """What a whole JSON answer tells; unknown when there is no usage object of its own in it."""
    at = answer.rfind(_NAME)
    if at < 0:
        return UNKNOWN
    start = at + len(_NAME)
    end = answer.find(b"}", start) + 1
    flat = answer[start:end] if end else b""  # compiled, a slice may not end before it begins
    plain = flat[:2] == b":{" and flat.find(b"{", 2) < 0 and len(flat) < _LONGEST
    # One brace behind it: the answer's. Nearly all answers end so.
    if plain and answer.find(b"}", end) == answer.rfind(b"}"):
        return read_usage(_object(flat[1:]))
    usage = answer[at : at + _LONGEST]
    end = at + _length(usage)
    behind = Nesting()
    behind.feed(answer[end:])
    if end > at and behind.depth == -1:
        return _read_at(usage)
    finder = UsageFinder()
    finder.feed(answer)
    return finder.tokens()


def _read_at(text: bytes) -> Tokens:
    """The counts of the usage object that `text` begins with."""
    end = _length(text)
    if not end:
        return UNKNOWN
    begin = text.find(b"{")
    return read_usage(_object(text[begin:end]))


def _object(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _length(text: bytes) -> int:
    """Of the usage object that `text` begins with, and its name; 0 when it is not all there. It
    holds no braces in strings."""
    end = text.find(b"}") + 1 if _OPENING.match(text) else 0
    while end > 0:
        if text.count(b"{", 0, end) == text.count(b"}", 0, end):
            return end
        end = text.find(b"}", end) + 1
    return 0
