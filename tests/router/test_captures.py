"""What real engines and providers answered, through our relays and our router: not a byte changes,
and the usage row tells what they told (cases A10, A22, A25, B07)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from controller.router.config import Limits
from controller.router.dialect import CHAT, MESSAGES, RESPONSES, TEXT, Dialect
from controller.router.plain import PlainRelay, open_relay
from controller.router.relay import Head, StreamRelay, Wish
from controller.router.tokens import UNKNOWN, Tokens, read_usage
from tests.router.captures import ROOT, Captured, engines_folder, events, raw_answers

if TYPE_CHECKING:
    from tests.router.conftest import House

ANTHROPIC = b"".join(
    b"event: " + event["type"].encode() + b"\ndata: " + json.dumps(event).encode() + b"\n\n"
    for event in (
        {"type": "message_start", "message": {"id": "msg_1", "type": "message", "model": "m",
            "role": "assistant", "content": [], "usage": {"input_tokens": 20,
            "cache_read_input_tokens": 5, "cache_creation_input_tokens": 4, "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "é"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 17}},
        {"type": "message_stop"},
    )
)  # fmt: skip


def anthropic() -> Captured:
    return Captured("anthropic", "", b"", 200, "text/event-stream", ANTHROPIC)


# What each stream must come to: prompt, completion, cached, reasoning.
STREAMS: list[tuple[str, Dialect, Tokens]] = [
    ("vllm-chat-stream.txt", CHAT, Tokens(29, 12)),
    ("llamacpp-chat-stream.txt", CHAT, Tokens(29, 12, 28)),
    ("llamacpp-chat-stream-nousage.txt", CHAT, Tokens(29, 4, 28)),  # from its timings
    ("transformers-serve-chat-stream.txt", CHAT, Tokens(29, 12)),  # no [DONE]
    ("vllm-completions-stream.txt", TEXT, Tokens(6, 6)),
    ("llamacpp-completions-stream.txt", TEXT, Tokens(6, 6, 5)),
    ("vllm-chat-stream-logprobs.txt", CHAT, Tokens(29, 3)),
    ("vllm-tools.txt", CHAT, Tokens(29, 48)),
    ("alibaba-qwen-reasoning.chunks.txt", CHAT, Tokens(24, 1355, 0, 1084)),
    ("alibaba-qwen-tool-call.chunks.txt", CHAT, Tokens(295, 22, 0)),
    ("deepseek-reasoning.chunks.txt", CHAT, Tokens(18, 219, 0, 205)),
    ("deepseek-reasoner-tool-call.chunks.txt", CHAT, Tokens(339, 83, 320, 39)),
    ("groq-tool-call.chunks.txt", CHAT, Tokens(210, 15)),
    ("openai-chat-text.chunks.txt", CHAT, Tokens(16, 300, 0, 0)),
    ("openai-completion-text.chunks.txt", TEXT, Tokens(14, 16)),
    ("xai-tool-call.chunks.txt", CHAT, Tokens(291, 222, 290, 196)),  # 26 and 196
    ("openai-responses-text.chunks.txt", RESPONSES, Tokens(7112, 463, 3072, 64)),
    ("anthropic", MESSAGES, Tokens(29, 17, 5)),
]
UNTOLD = [
    ("vllm-chat-stream-nousage.txt", 4),
    ("llama-cpp-python-chat-stream.txt", 12),
    ("anthropic-fallback-tool-call.sse", 6),
]


def stream(name: str) -> Captured:
    if name == "anthropic":
        return anthropic()
    if name.endswith(".sse"):
        body = (engines_folder() / name).read_bytes()
        return Captured(name, "", b"", 200, "text/event-stream", body)
    if name.endswith(".chunks.txt"):
        responses = "responses" in name
        return events(name, named=responses, done=not responses)
    return next(answer for answer in raw_answers(name) if answer.streamed)


def opened(captured: Captured, dialect: Dialect = CHAT) -> PlainRelay | StreamRelay:
    kind = captured.kind.encode()
    wish = Wish("m", b"r", False, False, False, dialect, None, None)
    length = None if captured.streamed else len(captured.body)
    head = Head(captured.status, [(b"content-type", kind)], length, kind)
    return open_relay(head, wish, Limits())


def relayed(relay: PlainRelay | StreamRelay, pieces: list[bytes]) -> bytes:
    """The body that a client gets (HTTP/1.0: no chunk marks in it)."""
    sent = b"".join(relay.feed(piece) for piece in pieces) + relay.finish()
    return sent.partition(b"\r\n\r\n")[2]


def shortened(body: bytes) -> bytes:
    """The first and last events: cutting a long stream everywhere takes for ever."""
    parts = body.split(b"\n\n")
    return body if len(parts) < 8 else b"\n\n".join(parts[:2] + parts[-6:])


@pytest.mark.parametrize(("name", "dialect", "tokens"), STREAMS, ids=[s[0] for s in STREAMS])
def test_A10_a_stream_cut_at_every_byte_is_the_same_stream(
    name: str, dialect: Dialect, tokens: Tokens
) -> None:
    captured = stream(name)
    whole = opened(captured, dialect)
    assert relayed(whole, [captured.body]) == captured.body
    assert (whole.outcome, whole.tokens()) == ("ok", tokens)
    body = shortened(captured.body)
    for at in range(1, len(body), 1 if len(body) < 6000 else 13):
        relay = opened(captured, dialect)
        assert relayed(relay, [body[:at], body[at:]]) == body
        assert (relay.outcome, relay.tokens()) == ("ok", tokens), at
    relay = opened(captured, dialect)
    assert relayed(relay, [bytes([byte]) for byte in body]) == body
    assert (relay.outcome, relay.tokens()) == ("ok", tokens)


@pytest.mark.parametrize(("name", "dialect", "tokens"), STREAMS, ids=[s[0] for s in STREAMS])
def test_a_stream_that_stops_before_its_end_is_partial(
    name: str, dialect: Dialect, tokens: Tokens
) -> None:
    """Every border of events before the last word of its API."""
    body = shortened(stream(name).body)
    borders = [at + 2 for at in range(len(body)) if body.startswith(b"\n\n", at)]
    for at in borders[:-3]:
        relay = opened(stream(name), dialect)
        sent = relayed(relay, [body[:at]])
        assert sent.startswith(body[:at])
        assert relay.outcome == "partial"
        last = sent[at:]
        assert last.startswith(b"data: {" if dialect in (CHAT, TEXT) else b"event: error\ndata: {")
        assert last.endswith(b"data: [DONE]\n\n") == (dialect in (CHAT, TEXT))


@pytest.mark.parametrize("name", ["anthropic", "openai-responses-text.chunks.txt"])
def test_A05_a_client_has_all_when_the_last_word_of_its_api_went_out(name: str) -> None:
    dialect = MESSAGES if name == "anthropic" else RESPONSES
    parts = [part + b"\n\n" for part in stream(name).body.split(b"\n\n")[:-1]]
    relay = opened(stream(name), dialect)
    for part in parts[:-1]:
        relay.feed(part)
        assert not relay.answered()
    relay.feed(parts[-1])
    assert relay.answered()


@pytest.mark.parametrize("pace", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "dialect"),
    [("anthropic", MESSAGES), ("openai-responses-text.chunks.txt", RESPONSES)],
)
def test_that_an_answer_was_begun_is_no_first_token(name: str, dialect: Dialect, pace: int) -> None:
    """It is told before the prompt is read: these APIs' time to the first token had been none."""
    captured = stream(name)
    parts = [part + b"\n\n" for part in captured.body.split(b"\n\n")[:-1]]
    first = next(number for number, part in enumerate(parts) if b"delta\n" in part)
    relay = opened(captured, dialect)
    assert first > 1
    for start in range(0, len(parts), pace):
        piece = b"".join(parts[start : start + pace])
        if relay.flow(piece) is None:
            relay.feed(piece)
        assert relay.begun == (first < start + pace)


@pytest.mark.parametrize(("name", "made"), UNTOLD)
def test_B07_a_stream_without_usage_is_counted_by_its_pieces(name: str, made: int) -> None:
    captured = stream(name)
    for pieces in ([captured.body], [part + b"\n\n" for part in captured.body.split(b"\n\n")[:-1]]):
        relay = opened(captured)
        relayed(relay, pieces)
        assert (relay.outcome, relay.tokens(), relay.made()) == ("ok", UNKNOWN, made)


def test_responses_that_fail_are_failures() -> None:
    captured = events("openai-responses-error-midstream.chunks.txt", named=True, done=False)
    relay = opened(captured, RESPONSES)
    assert relayed(relay, [captured.body]) == captured.body
    assert (relay.outcome, relay.code) == ("partial", "upstream_error_event")
    only = captured.body.split(b"\n\n")
    relay = opened(captured, RESPONSES)
    relayed(relay, [b"\n\n".join([*only[:2], only[3], b""])])  # without the error event
    assert relay.outcome == "partial"


def test_a_shutdown_abort_is_no_success() -> None:
    relay = opened(anthropic())
    relayed(
        relay, [b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\ndata: [DONE]\n\n']
    )
    assert (relay.outcome, relay.code) == ("partial", "engine_aborted")


def plain_names() -> list[str]:
    engines = ("vllm", "llamacpp", "llama-cpp-python", "transformers-serve")
    kinds = ("chat", "chat-n2-stop", "completions", "tools", "embeddings", "errors", "models",
             "responses-and-others", "chat-stream", "health")  # fmt: skip
    named = [f"{engine}-{kind}.txt" for engine in engines for kind in kinds]
    return [name for name in named if (ROOT / "engines" / name).exists()]


@pytest.mark.parametrize("name", plain_names())
def test_plain_answers_of_engines_pass_and_are_counted(name: str) -> None:
    for captured in raw_answers(name):
        body, relay = captured.body, opened(captured)
        if captured.streamed:
            continue
        assert relayed(relay, [body[:7], body[7:20], body[20:]]) == body
        expected = UNKNOWN
        if captured.status < 400 and captured.kind.startswith("application/json"):
            if captured.whole:
                document = json.loads(body, strict=False)
                usage = document.get("usage") if isinstance(document, dict) else None
                expected = read_usage(usage)
                assert (expected == UNKNOWN) == (usage is None)
            else:
                expected = Tokens(10)  # the embeddings
        assert relay.tokens() == expected, captured.name
        assert relay.outcome == ("ok" if captured.status < 400 else "error")


def usage_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((engines_folder() / name).read_bytes())["usage"]
    return found


def test_usage_objects_of_all_apis() -> None:
    assert read_usage(usage_of("deepseek-reasoning.json")) == Tokens(18, 345, 0, 315)
    assert read_usage(usage_of("groq-reasoning.json")) == Tokens(17, 649, None, 570)
    assert read_usage(usage_of("openai-chat-text.json")) == Tokens(16, 363, 0, 0)
    assert read_usage(usage_of("openai-embedding.json")) == Tokens(12)
    assert read_usage({"total_tokens": 56}) == Tokens(56)  # rerankers
    cached = {"cache_read_input_tokens": 28, "input_tokens": 1, "output_tokens": 6}
    assert read_usage(cached) == Tokens(29, 6, 28)  # llama.cpp at /v1/messages
    both = {"prompt_tokens": 1024, "completion_tokens": 17, "total_tokens": 1041,
            "prompt_tokens_details": {"cached_tokens": 1000}, "cache_read_input_tokens": 1000,
            "cache_creation_input_tokens": 4}  # fmt: skip
    assert read_usage(both) == Tokens(1024, 17, 1000)  # LiteLLM before Anthropic's models


REPLAYED = (
    "vllm-chat-stream.txt", "transformers-serve-chat-stream.txt", "groq-tool-call.chunks.txt",
    "llamacpp-completions-stream.txt", "openai-responses-text.chunks.txt", "anthropic",
)  # fmt: skip
PATHS = {
    CHAT: "/v1/chat/completions", TEXT: "/v1/completions",
    RESPONSES: "/v1/responses", MESSAGES: "/v1/messages",
}  # fmt: skip


async def test_the_router_relays_captures_and_writes_their_usage(house: House) -> None:
    engine = house.engine()
    await house.start()
    chosen = [entry for entry in STREAMS if entry[0] in REPLAYED]
    for number, (name, dialect, tokens) in enumerate(chosen):
        engine.default["raw"] = body = stream(name).body
        wire = await house.wire()
        asked = {"model": "m", "stream": True}
        if dialect in (CHAT, TEXT):
            asked["stream_options"] = {"include_usage": True}
        await wire.post(PATHS[dialect], asked)
        assert (await wire.answer()).body == body
        row = await house.row(number)
        assert (row["status"], row.get("estimated")) == ("ok", None)
        names = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
        assert Tokens(*(row.get(key) for key in names)) == tokens
