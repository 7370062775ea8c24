"""What a usage row says when the engine says little, or nonsense, or the client left."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from controller.router import bill
from controller.router.body import Asked
from controller.router.routes import Route, find
from controller.router.tokens import Tokens
from tests.router.wire import chat_body, until

if TYPE_CHECKING:
    from tests.router.conftest import House

PROMPT = len(json.dumps(chat_body())) // 4
ODD: list[Any] = [
    {}, {"prompt_tokens": "7", "completion_tokens": "3"}, {"prompt_tokens": -1}, [], "many", 5,
    {"prompt_tokens": 2**63, "completion_tokens": 2**63}, {"prompt_tokens": None, "x": {"y": None}},
    {"prompt_tokens": 7.5, "completion_tokens": True},
    {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
]  # fmt: skip


@pytest.mark.parametrize("usage", ODD, ids=range(len(ODD)))
async def test_B20_odd_usage_gives_a_marked_row_and_the_same_answer(
    house: House, usage: Any
) -> None:
    text = "word" * 400
    choice = {"index": 0, "message": {"role": "assistant", "content": text + "\\ud800"}}
    plain = json.dumps({"choices": [choice], "usage": usage}).replace("\\\\ud800", "\\ud800")
    delta = {"choices": [{"index": 0, "delta": {"content": "word"}}]}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage}
    chunks = [delta] * 401 + [last]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    engine = house.engine()
    await house.start()
    for number, raw in enumerate((plain, stream)):
        engine.default["raw"] = raw
        answer = await house.ask(stream=number == 1)
        assert answer.body == raw.encode()
        row = await house.row(number)
        assert (row["status"], row["estimated"]) == ("ok", True)
        assert 340 <= row["completion_tokens"] <= 400
        assert PROMPT <= row["prompt_tokens"] <= PROMPT + 10
    assert house.core.snapshot()["estimated"] == [["m", 2]]


async def test_half_a_usage_is_kept_and_completed(house: House) -> None:
    raw = b'{"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": "x"}}'
    house.engine(raw=raw + b" " * 700)
    await house.start()
    await house.ask()
    row = await house.row()
    assert (row["prompt_tokens"], row["estimated"]) == (11, True)
    assert row["completion_tokens"] > 100


@pytest.mark.parametrize(("path", "known"), [("/v1/embeddings", True), ("/tokenize", False)])
async def test_only_text_is_estimated(house: House, path: str, known: bool) -> None:
    house.engine(raw="{}")
    await house.start()
    wire = await house.wire()
    await wire.post(path, {"model": "m", "input": "x" * 400})
    assert (await wire.answer()).status == 200
    row = await house.row()
    assert (row.get("prompt_tokens", 0) > 100) == known
    assert row.get("estimated", False) == known
    assert "completion_tokens" not in row


async def test_B11_an_abort_is_billed_for_what_was_made(house: House) -> None:
    await house.start()
    engine = house.engines[0]
    wire = await house.wire()
    await wire.chat(stream=True, headers={"x_fake": json.dumps({"tokens": 300, "hold_after": 10})})
    await wire.until(b"tok9 ")
    wire.close()
    row = await house.row()
    assert (row["status"], row["estimated"]) == ("client_closed", True)
    assert PROMPT <= row["prompt_tokens"] <= PROMPT + 30
    assert 8 <= row["completion_tokens"] <= 10
    all_but = {"tokens": 30, "done": False, "usage": False, "end_delay": 60}
    slow = await house.wire()
    await slow.chat(stream=True, headers={"x_fake": json.dumps(all_but)})
    await slow.until(b"tok29")
    slow.close()
    full = await house.row(1)
    assert (full["status"], full["estimated"]) == ("client_closed", True)
    assert 28 <= full["completion_tokens"] <= 30
    await until(lambda: len(engine.chats()) == 2)


NOUGHTS = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
RESPONDS = [
    {"type": "response.created", "response": {"id": "resp_1", "usage": NOUGHTS}},
    *[{"type": "response.output_text.delta", "delta": "x"}] * 30,
]
MESSAGE = [
    {"type": "message_start", "message": {"id": "msg_1", "usage": NOUGHTS}},
    *[{"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}}] * 30,
]


@pytest.mark.parametrize(
    ("path", "events"), [("/v1/responses", RESPONDS), ("/v1/messages", MESSAGE)]
)
async def test_B11_noughts_where_a_stream_begins_are_no_usage(
    house: House, path: str, events: list[dict[str, Any]]
) -> None:
    """Engines that have not counted yet begin so: whoever left before the end paid nothing."""
    raw = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    house.engine(raw=raw, end_delay=60)
    await house.start()
    wire = await house.wire()
    await wire.post(path, chat_body(input="x" * 400, stream=True))
    await wire.until(json.dumps(events[0]).encode())
    for _ in events[1:]:
        await wire.until(json.dumps(events[1]).encode())
    wire.close()
    row = await house.row()
    assert (row["status"], row["estimated"], row["completion_tokens"]) == (
        "client_closed",
        True,
        30,
    )
    assert row["prompt_tokens"] > 100


def test_B11_an_abort_that_no_engine_saw_costs_nothing() -> None:
    route = find(b"POST", b"/v1/chat/completions")
    assert isinstance(route, Route)
    assert bill.unanswered(route, None, reached=False) == Tokens(0, 0)


def tokens_of(document: dict[str, Any], **how: Any) -> int:
    body = json.dumps(document, **how).encode()
    return bill.prompt_tokens(Asked(body, document, "m", stream=False))


def test_pictures_in_a_prompt_are_no_text() -> None:
    picture = "A" * 100_000
    text = {"role": "user", "content": "hello"}
    for part in (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "image", "source": {"type": "base64", "data": picture}},
        {"type": "input_audio", "input_audio": {"data": picture, "format": "wav"}},
    ):
        for separators in ((",", ":"), (", ", ": ")):
            several = [text, {"role": "user", "content": [part] * 3}]
            assert tokens_of({"messages": several}, separators=separators) < 200
            assert tokens_of({"input": several}, separators=separators) < 200
    assert tokens_of({"input": ["data:"] * 70 + ["x" * 400]}) >= 100


def test_media_beside_what_a_message_says_are_no_text() -> None:
    sound = "A" * 100_000
    for beside in (
        {"audio": {"id": "a", "data": sound}},
        {"images": [f"data:image/png;base64,{sound}"]},
        {"video": f"data:video/mp4;base64,{sound}"},
    ):
        assert tokens_of({"messages": [{"role": "assistant", "content": "hi", **beside}]}) < 200


@pytest.mark.parametrize("beside", [{}, {"name": "a"}, {"tool_calls": [], "reasoning": "so"}])
def test_text_that_looks_like_a_picture_is_text(beside: dict[str, Any]) -> None:
    said = '{"url": "data:image/png;base64,' + "A" * 4000 + '"}'
    assert tokens_of({"messages": [{"role": "user", "content": said, **beside}]}) >= 1000


@pytest.mark.parametrize("messages", [None, "x", [], [None], [{}], [{"content": None}]])
def test_messages_of_any_kind_are_counted(messages: Any) -> None:
    assert 4 <= tokens_of({"messages": messages}) <= 9
