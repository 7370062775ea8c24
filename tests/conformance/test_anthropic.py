"""Anthropic's own Python library through the router's /v1/messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from tests.conformance.conftest import KEY, PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conformance.conftest import Door
    from tests.fake_engine import FakeEngine

ASK: dict[str, Any] = {
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "Say something."}],
}


@pytest.fixture
def client(door: Door) -> Iterator[Any]:
    with anthropic.Anthropic(
        base_url=door.root, api_key=KEY, max_retries=0, timeout=PATIENCE_S
    ) as made:
        yield made


def test_a_message_plain_and_streamed(client: Any) -> None:
    whole = client.messages.create(model="tiny", **ASK)
    assert whole.type == "message"
    assert whole.content[0].text
    assert whole.usage.output_tokens > 0
    with client.messages.stream(model="tiny", **ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text
    assert final.stop_reason in ("max_tokens", "end_turn")
    assert final.usage.output_tokens > 0


def test_the_fake_engine_s_message_plain_and_streamed(client: Any, told: FakeEngine) -> None:
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "fake",
               "content": [{"type": "text", "text": "hello"}], "stop_reason": "end_turn",
               "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 2}}  # fmt: skip
    told.default = {"body": message}
    assert client.messages.create(model="fake", **ASK).content[0].text == "hello"
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hey"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None},
         "usage": {"output_tokens": 17}},
        {"type": "message_stop"},
    ]  # fmt: skip
    lines = (f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    told.default = {"raw": "".join(lines)}
    with client.messages.stream(model="fake", **ASK) as stream:
        assert "".join(stream.text_stream) == "hey"
        assert stream.get_final_message().usage.output_tokens == 17


def test_a_bearer_token_opens_too(door: Door) -> None:
    with anthropic.Anthropic(base_url=door.root, auth_token=KEY, max_retries=0) as client:
        assert client.messages.create(model="tiny", **ASK).content


def test_models_are_listed_in_its_shape(client: Any) -> None:
    names = {model.id for model in client.models.list()}
    assert {"tiny", "org/fake:1"} <= names
    assert client.models.retrieve("tiny").type == "model"


def test_errors_become_the_library_s_own(client: Any, door: Door) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="nothing", **ASK)
    assert unknown.value.body["type"] == "error"
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError) as refused:
        client.with_options(api_key="sk-wrong").messages.create(model="tiny", **ASK)
    assert refused.value.body["error"]["type"] == "authentication_error"


def test_an_error_inside_a_stream_is_raised(client: Any, told: FakeEngine) -> None:
    start = (
        'event: message_start\ndata: {"type":"message_start","message":{"id":"m","type":"message",'
        '"role":"assistant","model":"fake","content":[],"stop_reason":null,"stop_sequence":null,'
        '"usage":{"input_tokens":3,"output_tokens":1}}}\n\n'
    )
    told.default = {"raw": start, "framing": "close"}
    with (
        pytest.raises(anthropic.APIError),
        client.messages.stream(model="fake", **ASK) as stream,
    ):
        list(stream)
