"""LangChain's chat models and embeddings through the router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.conformance.conftest import KEY, MADE

if TYPE_CHECKING:
    from tests.conformance.conftest import Door


both_engines = pytest.mark.parametrize("model", MADE)


def _chat(door: Door, model: str, **more: Any) -> Any:
    given: dict[str, Any] = {"model": model, "max_tokens": 8, "temperature": 0, "max_retries": 0}
    return ChatOpenAI(base_url=door.v1, api_key=KEY, **given, **more)


@both_engines
def test_a_chat_answers_and_counts(door: Door, model: str) -> None:
    answer = _chat(door, model).invoke("Say something.")
    assert answer.content
    assert answer.usage_metadata["output_tokens"] == MADE[model]


@both_engines
def test_a_chat_streams_with_usage(door: Door, model: str) -> None:
    chat = _chat(door, model, stream_usage=True)
    whole = None
    for part in chat.stream("Say something."):
        whole = part if whole is None else whole + part
    assert whole is not None
    said = chat.invoke("Say something.").content if model == "tiny" else "tok0 tok1 tok2 "
    assert whole.content == said
    assert whole.usage_metadata["output_tokens"] == MADE[model]


@both_engines
def test_a_batch_is_answered(door: Door, model: str) -> None:
    answers = _chat(door, model).batch(["one", "two", "three"])
    assert len(answers) == 3
    assert all(answer.content for answer in answers)


@pytest.mark.parametrize(("model", "sizes"), [("tiny", [128, 128]), ("fake", [2])])
def test_embeddings(door: Door, model: str, sizes: list[int]) -> None:
    made = OpenAIEmbeddings(
        base_url=door.v1, api_key=KEY, model=model, check_embedding_ctx_length=False
    )
    vectors = made.embed_documents(["the sea", "a dog"])
    assert [len(vector) for vector in vectors] == sizes


def test_the_anthropic_chat_model(door: Door) -> None:
    chat = ChatAnthropic(base_url=door.root, api_key=KEY, model="tiny", max_tokens=8)
    assert chat.invoke("Say something.").content
    assert "".join(str(part.text) for part in chat.stream("Say something."))
