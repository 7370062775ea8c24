"""Only the model's own name is swapped, and nothing of the bytes around it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.router.body import Asked, read, rewritten
from controller.router.names import LONG, MOST_STEPS, rename, restore

if TYPE_CHECKING:
    from tests.router.conftest import House

NUMBERS = '"seed": 123456789012345678901234567890, "x": 1e5, "y": 0.10, "z": "\\/"'


@pytest.mark.parametrize(
    ("text", "restored"),
    [('{"model":"a","x":"model"}', '{"model":"n","x":"model"}'),
     ('{"model" : "a\\"b"}', '{"model" : "n"}'),
     ('{"content":"\\"model\\":\\"a\\""}', '{"content":"\\"model\\":\\"a\\""}'),
     ("{}", "{}"), ('{"model":null}', '{"model":null}'),
     ('{"content":[{"input":{"model":"x"}}],"model":"a"}',
      '{"content":[{"input":{"model":"x"}}],"model":"n"}'),
     ('{"metadata":{"model":"x"},"a":"}","model":"a"}',
      '{"metadata":{"model":"x"},"a":"}","model":"n"}'),
     ('{"content_block":{"input":{"model":"x"}}}', '{"content_block":{"input":{"model":"x"}}}'),
     ('event: e\ndata: {"type":"t","response":{"model":"a"}}\n\n',
      'event: e\ndata: {"type":"t","response":{"model":"n"}}\n\n'),
     ('data: {"message":{"content":[],"model":"a"}}',
      'data: {"message":{"content":[],"model":"n"}}'),
     ('{"message":{"input":{"model":"x"},"model":"a"}}',
      '{"message":{"input":{"model":"x"},"model":"n"}}')],
)  # fmt: skip
def test_only_the_own_name_is_restored(text: str, restored: str) -> None:
    assert restore(text.encode(), b'"n"') == restored.encode()


KEYS = st.sampled_from(["model", "message", "response", "a", 'b"', "mo\\del", "x{", "]"])
TEXTS = st.sampled_from(["model", '"model":"x"', "{", "[", "\\", "m"])
DOCUMENTS = st.recursive(
    st.none() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def named(document: dict[str, Any]) -> dict[str, Any]:
    """`document` with the first name that is its own, or of what it tells of, restored."""
    for key, value in document.items():
        if key == "model" and isinstance(value, str):
            return {**document, key: "n"}
        inner = value.get("model") if isinstance(value, dict) else None
        if key in ("message", "response") and isinstance(inner, str):
            return {**document, key: {**value, "model": "n"}}
    return document


@given(st.dictionaries(KEYS, DOCUMENTS, max_size=5), st.sampled_from([None, 2]))
def test_whatever_is_around_a_name_stays(document: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(document, indent=indent).encode()
    assert json.loads(restore(text, b'"n"')) == named(document)


def test_the_search_for_a_name_is_bounded() -> None:
    text = b'{"a":[' + b"[]," * MOST_STEPS + b'{"model":"x"}],"model":"a"}'
    assert restore(text, b'"n"') == text.replace(b'"x"', b'"n"')  # no better guess than the first
    text = b'{"data":[' + b"1," * LONG + b'0],"model":"a"}'
    assert restore(text, b'"n"') == text.replace(b'"a"', b'"n"')


def test_a_name_is_swapped_only_where_it_is_plain_which() -> None:
    assert rename(b'{"a":"model", "model" : "m"}', b'"n"') is None
    assert rename(b'{"tools":[{"model":"x"}],"model":"m"}', b'"n"') is None
    assert rename(b'{"a":"\\"model\\"", "model" : "m" }', b'"n"') == (
        b'{"a":"\\"model\\"", "model" : "n" }'
    )


@pytest.mark.parametrize("upstream", ["m", "up", 'odd"名'])
@pytest.mark.parametrize("ask_usage", [False, True])
def test_what_is_not_swapped_keeps_its_bytes(upstream: str, ask_usage: bool) -> None:
    raw = ('{ "model": "m", ' + NUMBERS + ', "stream": true } \n').encode()
    asked = read(raw, asks_usage=True)
    assert isinstance(asked, Asked)
    sent = rewritten(asked, upstream, ask_usage=ask_usage)
    assert sent is not None
    usage = {"stream_options": {"include_usage": True}} if ask_usage else {}
    assert json.loads(sent) == {**json.loads(raw), "model": upstream, **usage}
    assert NUMBERS.encode() in sent


@pytest.mark.parametrize(
    ("options", "kept"),
    [("null", True), ("{ }", True), ('{"x": "}", "include_usage" : false}', True),
     ('{"x": {}}', False), ('{"x": "\\""}', False), ('{}, "y": {"stream_options": {}}', False),
     ('{}, "stream_options": null', False), ('{}, "y": "\\u005f"', False)],
)  # fmt: skip
def test_usage_is_asked_for_among_the_options_that_are_there(options: str, kept: bool) -> None:
    """Around them nothing changes, where it is plain which they are."""
    raw = "{" + NUMBERS + ', "stream_options" : ' + options + ', "stream": true, "model": "m" }\n'
    asked = read(raw.encode(), asks_usage=True)
    assert isinstance(asked, Asked)
    sent = rewritten(asked, "m", ask_usage=True)
    assert sent is not None
    told, meant = json.loads(sent), json.loads(raw)
    usage = {**(meant["stream_options"] or {}), "include_usage": True}
    same = {"seed", "stream_options"}
    assert told["stream_options"] == usage
    assert {k: told[k] for k in told.keys() - same} == {k: meant[k] for k in meant.keys() - same}
    assert (NUMBERS.encode() in sent) == kept


async def test_an_alias_leaves_the_arguments_of_tools_alone(house: House) -> None:
    """Anthropic's answers have their content before the model (case A28's counterpart)."""
    use = {"type": "tool_use", "input": {"model": "haiku"}}
    house.engine(body={"type": "message", "content": [use], "model": "m"})
    await house.start()
    wire = await house.wire()
    await wire.post("/v1/messages", {"model": "short", "messages": []})
    told = (await wire.answer()).json
    assert told == {"type": "message", "content": [use], "model": "short"}
