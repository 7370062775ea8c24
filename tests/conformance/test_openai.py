"""OpenAI's own Python library through the router."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.conformance.conftest import KEY, PATIENCE_S
from tests.control.process import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conformance.conftest import Door
    from tests.fake_engine import FakeEngine

SAY: list[Any] = [{"role": "user", "content": "Say something."}]
FIXED = {"max_tokens": 8, "temperature": 0}


@pytest.fixture
def client(door: Door) -> Iterator[Any]:
    with openai.OpenAI(base_url=door.v1, api_key=KEY, max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def test_models_are_listed_and_found_by_every_name(client: Any) -> None:
    assert {"tiny", "fake", "org/fake:1"} <= {model.id for model in client.models.list()}
    for name in ("tiny", "org/fake:1"):
        assert client.models.retrieve(name).id == name


def test_a_chat_plain_and_streamed_says_the_same(client: Any) -> None:
    whole = client.chat.completions.create(model="tiny", messages=SAY, **FIXED)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens == 8
    stream = client.chat.completions.create(model="tiny", messages=SAY, stream=True, **FIXED)
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert all(chunk.choices for chunk in chunks), "nobody asked for usage"
    assert all(chunk.usage is None for chunk in chunks)


def test_the_engine_behind_it_wants_a_key_that_no_client_has(door: Door) -> None:
    """llama.cpp with --api-key: what all tests here reach by the router, none reaches itself."""
    base = f"http://127.0.0.1:{door.engine_port}/v1"
    with (
        openai.OpenAI(base_url=base, api_key=KEY, max_retries=0, timeout=PATIENCE_S) as made,
        pytest.raises(openai.AuthenticationError),
    ):
        made.chat.completions.create(model="tiny", messages=SAY, **FIXED)


def test_a_stream_tells_usage_when_it_is_asked_for(client: Any) -> None:
    with client.chat.completions.create(
        model="tiny", messages=SAY, stream=True, stream_options={"include_usage": True}, **FIXED
    ) as stream:
        chunks = list(stream)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8


def test_completions(client: Any) -> None:
    whole = client.completions.create(model="tiny", prompt="the", **FIXED)
    parts = client.completions.create(model="tiny", prompt="the", stream=True, **FIXED)
    assert "".join(p.choices[0].text for p in parts if p.choices) == whole.choices[0].text


def test_A26_embeddings_in_each_encoding(client: Any) -> None:
    asked = ["the sea", "a dog"]
    default = client.embeddings.create(model="tiny", input=asked)
    floats = client.embeddings.create(model="tiny", input=asked, encoding_format="float")
    for one, other in zip(default.data, floats.data, strict=True):
        assert len(one.embedding) == len(other.embedding) == 128
        assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(one.embedding, other.embedding,
                                                                   strict=True))  # fmt: skip
    assert default.data[0].embedding != default.data[1].embedding


def test_A26_an_engine_that_knows_only_floats(client: Any, told: FakeEngine) -> None:
    answer = client.embeddings.create(model="fake", input="x")
    assert answer.data[0].embedding == [0.5, -0.25]


def test_responses_plain_and_streamed(client: Any) -> None:
    whole = client.responses.create(model="tiny", input="Say something.", max_output_tokens=8)
    assert whole.output_text
    kinds = []
    with client.responses.create(
        model="tiny", input="Say something.", max_output_tokens=8, stream=True
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_errors_become_the_library_s_own(client: Any, door: Door) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nothing", messages=SAY)
    assert unknown.value.code == "model_not_found"
    wrong = client.with_options(api_key="sk-wrong")
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=[{"role": "user"}] * 3, n=-1)


def test_an_error_inside_a_stream_is_raised(client: Any, told: FakeEngine) -> None:
    told.default = {"error_at": 2, "tokens": 5}
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(model="fake", messages=SAY, stream=True))


def test_A07_a_stream_that_breaks_is_raised(client: Any, told: FakeEngine) -> None:
    told.default = {"die_at": 2, "die": "rst", "tokens": 5}
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(model="fake", messages=SAY, stream=True))


def test_a_client_that_stops_reading_frees_the_engine(client: Any, told: FakeEngine) -> None:
    told.default = {"tokens": 500, "gap": 0.05}
    stream = client.chat.completions.create(model="fake", messages=SAY, stream=True)
    next(iter(stream))
    stream.close()
    cut = told.chats()[-1]
    until(lambda: cut.closed, "the engine learns it", PATIENCE_S)
    told.default = {}
    assert client.chat.completions.create(model="fake", messages=SAY).choices


def test_tool_calls_pass_untouched(client: Any, told: FakeEngine) -> None:
    call = {"id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}  # fmt: skip
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    told.default = {"body": {
        "id": "c", "object": "chat.completion", "created": 1, "model": "fake",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }}  # fmt: skip
    tools: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}}]  # fmt: skip
    answer = client.chat.completions.create(model="fake", messages=SAY, tools=tools)
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city": "Köln"}'
    assert told.chats()[-1].document["tools"] == tools


async def test_the_asynchronous_client(door: Door) -> None:
    import asyncio

    import trio

    async def both() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=door.v1, api_key=KEY, max_retries=0) as client:
            whole = await client.chat.completions.create(model="tiny", messages=SAY, **FIXED)
            stream = await client.chat.completions.create(
                model="tiny", messages=SAY, stream=True, **FIXED
            )
            parts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
            return whole.choices[0].message.content, "".join(parts)

    whole, parts = await trio.to_thread.run_sync(lambda: asyncio.run(both()))
    assert whole == parts
