"""What a request used: the engine's counts, and where it gave none an estimate that says so. Pure.

An estimate is better than nothing for budgets and graphs, as long as nobody takes it for a count.
The rules: four bytes are a token of the prompt, base64 in it left out (its price depends on the
model); a streamed answer has a token per event that carries a piece; a plain one has a token per
four bytes beyond the JSON around it. Nothing is made up for an engine that failed: nobody pays.
Usage of noughts is none: some engines tell it where a stream begins, and some at the end, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from controller.router.tokens import UNKNOWN, Tokens, find_usage

if TYPE_CHECKING:
    from controller.router.body import Asked
    from controller.router.routes import Route

BYTES_PER_TOKEN: Final = 4
ENVELOPE_BYTES: Final = 300
"""About so many bytes of a plain answer are not its text."""
MOST_MEDIA: Final = 64
"""So many pieces of base64 are left out of a prompt."""
_MEDIA: Final = b'"data:', b'"data":"', b'"data": "'
_MAY_BE_MEDIA: Final = b'"data'
_OF_TEXT: Final = frozenset((
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content",
    "refusal",
))  # fmt: skip
"""Fields of a message that hold no media where its content is a text. Others may: engines that
speak send their sound beside the text, and get it back with the next request."""


class Answer(Protocol):
    """What the relay of an answer knows of its tokens."""

    @property
    def outcome(self) -> str: ...

    def tokens(self) -> Tokens: ...

    def made(self) -> int | None: ...


def used(route: Route, asked: Asked, answer: Answer) -> Tokens:
    """The tokens of an answer, whole or cut."""
    told = answer.tokens()
    if answer.outcome != "ok" or (told.complete and told.prompt):
        return told
    return _completed(route, asked, told, answer.made())


def used_whole(route: Route, asked: Asked, body: bytes) -> Tokens:
    """The tokens of a plain answer that came in one piece."""
    told = find_usage(body)
    if told.complete and told.prompt:
        return told
    return _completed(route, asked, told, plain_tokens(len(body)) if body else None)


def unanswered(route: Route, asked: Asked | None, *, reached: bool) -> Tokens:
    """The tokens of a request whose client left before an answer; `reached`: an engine had it."""
    if asked is None or not reached:
        return Tokens(0, 0)
    # How much of a plain answer was made by then, nobody knows.
    return _completed(route, asked, UNKNOWN, 0 if asked.stream else None)


def _completed(route: Route, asked: Asked, told: Tokens, made: int | None) -> Tokens:
    prompt, completion = told.prompt, told.completion
    if not prompt and route.reads:  # none is empty: who tells noughts has not counted, or not yet
        prompt, completion = prompt_tokens(asked), completion or None
    if completion is None and route.writes:
        completion = made
    if prompt is told.prompt and completion is told.completion:
        return told
    return Tokens(prompt, completion, told.cached, told.reasoning, estimated=True)


def prompt_tokens(asked: Asked) -> int:
    """About so many tokens are in a JSON request."""
    if asked.prompt is not None:
        return asked.prompt
    body = asked.raw
    size = len(body)
    # One look for what all begin with; `rfind` takes a fifth of the time that `find` does.
    has_media = not _is_text(asked.document) and body.rfind(_MAY_BE_MEDIA) >= 0
    for opening in _MEDIA if has_media else ():
        at = body.find(opening)
        for _ in range(MOST_MEDIA):
            if at < 0:
                break
            end = body.find(b'"', at + len(opening))
            size -= max(0, end - at)
            at = body.find(opening, end) if end > 0 else -1
    return -(-size // BYTES_PER_TOKEN)


def _is_text(document: dict[str, Any]) -> bool:
    """Whether all its messages are texts and nothing else: then no media are to be looked for."""
    messages = document.get("messages")
    if type(messages) is not list:
        return False
    for message in messages:
        if type(message) is not dict or type(message.get("content")) is not str:
            return False
        if not message.keys() <= _OF_TEXT:
            return False
    return True


def plain_tokens(size: int) -> int:
    """About so many tokens are in `size` bytes of a plain answer."""
    return -(-max(0, size - ENVELOPE_BYTES) // BYTES_PER_TOKEN)
