"""LangChain's chat models and embeddings through the router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.conformance.conftest import KEY

if TYPE_CHECKING:
    from tests.conformance.conftest import Door


def _chat(door: Door, **more: Any) -> Any:
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0, "max_retries": 0}
    return ChatOpenAI(base_url=door.v1, api_key=KEY, **given, **more)


def test_a_chat_answers_and_counts(door: Door) -> None:
    answer = _chat(door).invoke("Say something.")
    assert answer.content
    assert answer.usage_metadata["output_tokens"] == 8


def test_a_chat_streams_with_usage(door: Door) -> None:
    chat = _chat(door, stream_usage=True)
    whole = None
    for part in chat.stream("Say something."):
        whole = part if whole is None else whole + part
    assert whole is not None
    assert whole.content == chat.invoke("Say something.").content
    assert whole.usage_metadata["output_tokens"] == 8


def test_a_batch_is_answered_in_order(door: Door) -> None:
    answers = _chat(door).batch(["one", "two", "three"])
    assert len(answers) == 3
    assert all(answer.content for answer in answers)


def test_embeddings(door: Door) -> None:
    made = OpenAIEmbeddings(
        base_url=door.v1, api_key=KEY, model="tiny", check_embedding_ctx_length=False
    )
    vectors = made.embed_documents(["the sea", "a dog"])
    assert [len(vector) for vector in vectors] == [128, 128]


def test_the_anthropic_chat_model(door: Door) -> None:
    chat = ChatAnthropic(base_url=door.root, api_key=KEY, model="tiny", max_tokens=8)
    assert chat.invoke("Say something.").content
    assert "".join(str(part.text) for part in chat.stream("Say something."))
