"""Server-sent events passing by: where events end, usage, the stream's end, errors. Pure, bounded.

Bytes go through untouched, whatever line ends the engine uses and wherever TCP cuts them; only
whole events are handed on, so that an event can be dropped (usage that only we asked for), its
model name restored, and a broken stream ended cleanly after the last whole event.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import orjson

from controller.router.blame import told_by
from controller.router.dialect import CHAT, Dialect
from controller.router.names import restore
from controller.router.tokens import UNKNOWN, Tokens, read_timings, read_usage

if TYPE_CHECKING:
    from controller.router.errors import ApiError

# A line end is CRLF, LF, or a CR that no LF follows; two of them end an event.
_EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
ABORTED: Final = re.compile(rb'"finish_reason"\s*:\s*"abort"')
"""How vLLM ends what it runs when it is told to stop."""
_EMPTY: Final = re.compile(rb'"delta"\s*:\s*\{(?:\s*"content"\s*:\s*(?:""|null)\s*)?\}')
_TIMINGS: Final = re.compile(rb'"timings"\s*:\s*(\{[^{}]*\})')
_USAGE_OBJECT: Final = re.compile(rb'"usage"\s*:\s*\{')
_FINISHED: Final = re.compile(rb'"finish_reason"\s*:\s*"')
_MARK: Final = b"\xef\xbb\xbf"
"""A byte order mark, which a stream may begin with: no part of its first line."""
_OVERLAP: Final = 3  # an event end is at most 4 bytes, so it can start 3 bytes before new data


class Scanner:
    """Reads one stream in pieces and returns what to send on; its fields say what was seen."""

    __slots__ = (
        "_after_cr", "_before_last", "_between", "_choices", "_cut", "_dialect", "_drop_usage",
        "_dropped", "_finished", "_last", "_limit", "_model", "_part", "_parts", "_pending",
        "_searched", "_stop", "done", "error", "error_first", "overflow", "usage",
    )  # fmt: skip

    def __init__(
        self,
        limit: int,
        dialect: Dialect = CHAT,
        *,
        drop_usage: bool = False,
        model: bytes | None = None,
        choices: int = 1,
    ) -> None:
        """`limit`: bytes one event may have; `model`: JSON string to restore in every event;
        `choices`: so many answers are in it, each with an end of its own."""
        self._limit = limit
        self._dialect = dialect
        self._part = dialect.part
        self._stop = dialect.stop
        self._parts = 0
        self._drop_usage = drop_usage
        self._model = model
        self._pending = bytearray()
        self._searched = 0
        self._after_cr = False
        self._choices = choices
        self._finished: frozenset[int] = frozenset()  # which of several choices ended
        self._dropped = False
        self._cut = False  # its last event is not whole
        self._last = self._before_last = b""
        self.done = False
        self._between = self._passing  # at an event's border, and the next need not be looked at
        self.overflow = False
        self.error: Any = None
        self.error_first = False  # the error came before any other data
        self.usage: dict[str, Any] | None = None

    def feed(self, data: bytes) -> bytes:
        """The bytes of all events that are complete now; empty when none is or it was dropped."""
        return data if self.passes(data) else self._split(data)

    def passes(self, data: bytes) -> bool:
        """Whether these are whole events with nothing to read or change in them, as nearly all
        are: then they count as fed. Else nothing has happened, and `feed` takes them."""
        if (  # `find`, for `in` makes and clears an exception where the left side is bytes
            self._between
            and (data.startswith(b"data:") or data[:6] == b"event:")
            and data[-3:] == b"}\n\n"  # and so not [DONE]
            and (data.find(b'"usage"') < 0 or _USAGE_OBJECT.search(data) is None)
            and data.find(b'"error"') < 0
            and (self._stop is None or data.find(self._stop) < 0)
        ):
            self._parts += data.count(self._part)  # as _remember, without the price of a call
            self._before_last = self._last
            self._last = data
            return True
        return False

    def look_closer(self) -> None:
        """The next event does not pass, however plain it is."""
        self._between = False

    def finish(self) -> bytes:
        """The stream ended: what is pending counts as an event although no blank line ended it.

        Unless it is cut, when it is but bytes: where only its close ends an answer, a dying engine
        ends it anywhere.
        """
        raw = bytes(self._pending)
        self._pending.clear()
        self._searched = 0
        self._cut = not _is_whole(raw)
        return self._event(raw) if raw and not self._cut else raw

    @property
    def _passing(self) -> bool:
        """Whether an event without anything special passes as it is, and need not be the one that
        brings the first token."""
        return self._model is None and self._choices == 1 and self.spoke

    @property
    def spoke(self) -> bool:
        """Whether a token came, about: some APIs tell first, before a prompt is read, that an
        answer was begun."""
        return self._parts > 0 or self.done or not self._dialect.done

    @property
    def begun(self) -> bool:
        """Whether an event with data came; comments are none, nor is a bare `[DONE]`."""
        return bool(self._last)

    def ended_well(self) -> bool:
        """Whether the answer is complete: `[DONE]`, or its API's last word in the last two events
        (engines without `[DONE]` exist), or the ends of all its choices."""
        if self.done or self._cut:
            return self.done
        if self._choices > 1 and not self._dialect.done:
            return len(self._finished) >= self._choices
        ends = self._dialect.ends
        return bool(ends.search(self._last) or ends.search(self._before_last))

    def aborted(self) -> bool:
        """Whether the engine cut the answer and said so (vLLM at SIGTERM: looks complete)."""
        return bool(ABORTED.search(self._last) or ABORTED.search(self._before_last))

    def failure(self, error: ApiError) -> bytes:
        """The events that end this stream with an error."""
        return self._dialect.event(error, self._last)

    def tokens(self) -> Tokens:
        """What the engine told; llama.cpp's timings stand for a usage that is not there."""
        if self.usage is not None:
            return read_usage(self.usage)
        found = _TIMINGS.search(self._last) or _TIMINGS.search(self._before_last)
        return UNKNOWN if found is None else read_timings(found[1])

    def made(self) -> int:
        """Tokens that passed, about: one per event with a piece of the answer."""
        empty = len(_EMPTY.findall(self._last)) + len(_EMPTY.findall(self._before_last))
        opening = min(self._parts, self._dialect.opening)
        return max(0, self._parts - opening - (empty if self._parts > opening else 0))

    def _remember(self, data: bytes) -> None:
        self._parts += data.count(self._part)
        self._before_last, self._last = self._last, data

    def _split(self, data: bytes) -> bytes:
        out = []
        if self._after_cr:
            self._after_cr = False
            if data[:1] == b"\n":  # the second half of the CRLF that ended the last event
                out.append(b"" if self._dropped else b"\n")
                data = data[1:]
        pending = self._pending
        pending += data
        start, searched = 0, self._searched
        while found := _EVENT_END.search(pending, searched):
            searched = found.end()
            out.append(self._event(bytes(pending[start:searched])))
            start = searched
        self._after_cr = start > 0 and start == len(pending) and pending[-1] == 0x0D
        del pending[:start]
        self._searched = max(0, len(pending) - _OVERLAP)
        self._between = not pending and not self._after_cr and self._passing
        if len(pending) > self._limit:
            self.overflow = True
        return b"".join(out)

    def _event(self, raw: bytes) -> bytes:
        self._dropped = False
        data = _data_of(raw)
        if data is None:
            return raw
        if data.strip() == b"[DONE]":
            if not self.begun:  # the end of nothing: a client would take it for a whole answer
                self._dropped = True
                return b""
            self.done = True
            return raw
        several = self._choices > 1 and _FINISHED.search(data)
        if several or b'"error"' in data or _USAGE_OBJECT.search(data):
            self._read(data)
        if self._dialect.done and self._dialect.ends.search(data):
            self.done = True
        self._remember(raw)
        if self._dropped:
            return b""
        return raw if self._model is None else restore(raw, self._model)

    def _read(self, data: bytes) -> None:
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        if not isinstance(document, dict):
            return
        error = _error_in(document)
        if error:
            self.error = error
            self.error_first = self.error_first or not self._last
        if self._choices > 1:
            self._finished = self._finished.union(_finished_in(document))
        usage = _usage_in(document)
        if usage is not None:
            self.usage = usage if self.usage is None else {**self.usage, **usage}
            self._dropped = self._drop_usage and document.get("choices") == []


def _error_in(document: dict[str, Any]) -> Any:
    """What an event says went wrong: OpenAI, Anthropic (`error`), Responses (flat or within)."""
    kind = document.get("type")
    if kind == "response.failed":
        response = document.get("response")
        told = response.get("error") if isinstance(response, dict) else None
        return told or {"message": "the response failed"}
    return told_by(document) or (document if kind == "error" else None)


def _usage_in(document: dict[str, Any]) -> dict[str, Any] | None:
    """The usage object of an event, wherever its API has it, without what is null in it.

    Anthropic tells the prompt in `message_start`, with an output that has only begun, and the
    rest in `message_delta`: hence the union.
    """
    usage = document.get("usage")
    kind = document.get("type")
    for holder in ("response", "message", "x_groq"):
        inner = document.get(holder)
        if not isinstance(usage, dict) and isinstance(inner, dict):
            usage = inner.get("usage")
    if not isinstance(usage, dict):
        return None
    begun = "output_tokens" if kind == "message_start" else None
    return {name: v for name, v in usage.items() if v is not None and name != begun}


def _finished_in(document: dict[str, Any]) -> list[int]:
    """Which choices end with an event."""
    choices = document.get("choices")
    found = [one for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []
    ended = [one.get("index") for one in found if one.get("finish_reason")]
    return [index for index in ended if type(index) is int]


def _is_whole(raw: bytes) -> bool:
    """Whether an event without a blank line after it is all there."""
    data = _data_of(raw)
    if data is None or data.strip() == b"[DONE]":
        return True
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return True


def _data_of(raw: bytes) -> bytes | None:
    """The joined data lines of one event; None for comments and empty events."""
    found = _LINE_END.split(raw.removeprefix(_MARK))
    lines = [line[5:] for line in found if line[:5] == b"data:"]
    if not lines:
        return None
    return b"\n".join(line[1:] if line[:1] == b" " else line for line in lines)
