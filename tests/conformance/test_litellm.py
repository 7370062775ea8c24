"""LiteLLM as a client library (not its proxy) through the router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import litellm
import pytest

from tests.conformance.conftest import KEY, MADE

if TYPE_CHECKING:
    from tests.conformance.conftest import Door

SAY = [{"role": "user", "content": "Say something."}]


both_engines = pytest.mark.parametrize("model", MADE)


def _ask(door: Door, model: str, **more: Any) -> Any:
    given = {"model": f"openai/{model}", "messages": SAY, "max_tokens": 8, "temperature": 0}
    return litellm.completion(**given, api_base=door.v1, api_key=KEY, num_retries=0, **more)


@both_engines
def test_a_chat_plain_and_streamed(door: Door, model: str) -> None:
    whole = _ask(door, model)
    assert whole.usage.completion_tokens == MADE[model]
    text = "".join(part.choices[0].delta.content or "" for part in _ask(door, model, stream=True))
    assert text == (whole.choices[0].message.content if model == "tiny" else "tok0 tok1 tok2 ")


@pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning")  # by litellm
@both_engines
def test_a_stream_tells_usage_when_it_is_asked_for(door: Door, model: str) -> None:
    parts = list(_ask(door, model, stream=True, stream_options={"include_usage": True}))
    assert parts[-1].usage.completion_tokens == MADE[model]


def test_embeddings(door: Door) -> None:
    # It sends `encoding_format: null` otherwise, which llama.cpp refuses.
    got = litellm.embedding(model="openai/tiny", input=["a"], api_base=door.v1, api_key=KEY,
                            encoding_format="float")  # fmt: skip
    assert len(got.data[0]["embedding"]) == 128


def test_the_messages_endpoint(door: Door) -> None:
    got = litellm.completion(model="anthropic/tiny", messages=SAY, max_tokens=8, api_key=KEY,
                             api_base=door.root)  # fmt: skip
    assert got.choices[0].message.content


def test_errors_become_its_own(door: Door) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/nothing", messages=SAY, api_base=door.v1, api_key=KEY,
                           num_retries=0)  # fmt: skip
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(model="openai/tiny", messages=SAY, api_base=door.v1, api_key="sk-wrong",
                           num_retries=0)  # fmt: skip
