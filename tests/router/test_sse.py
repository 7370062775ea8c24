"""The event scanner: any cut gives the same events, bytes stay, bounds hold."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.router.sse import Scanner

ENDS = ["\n", "\r\n", "\r"]


def event(document: object, end: str = "\n", prefix: str = "data: ") -> bytes:
    text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
    return f"{prefix}{text}{end}{end}".encode()


def token(text: str, finish: str | None = None) -> dict[str, object]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return {"model": "up", "choices": [choice]}


USAGE = {"model": "up", "choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}


def run(scanner: Scanner, pieces: list[bytes]) -> bytes:
    return b"".join([scanner.feed(piece) for piece in pieces]) + scanner.finish()


@st.composite
def cut_streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A stream in one line-end style, and the same bytes in random pieces."""
    end = draw(st.sampled_from(ENDS))
    prefix = draw(st.sampled_from(["data: ", "data:"]))
    texts = draw(st.lists(st.text(max_size=6), min_size=1, max_size=5))
    parts = [event(token(text), end, prefix) for text in texts]
    parts.insert(draw(st.integers(0, len(parts))), f": ping{end}{end}".encode())
    parts.append(event(token("", "stop"), end, prefix))
    parts.append(event(USAGE, end, prefix))
    parts.append(event("[DONE]", end, prefix))
    whole = b"".join(parts)
    cuts = sorted(draw(st.sets(st.integers(1, len(whole) - 1), max_size=30)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    return whole, pieces


def verdict(scanner: Scanner) -> tuple[object, ...]:
    return scanner.usage, scanner.done, scanner.error, scanner.ended_well(), scanner.overflow


@given(cut_streams())
def test_any_cut_gives_the_same_bytes_and_the_same_verdict(
    stream: tuple[bytes, list[bytes]],
) -> None:
    whole, pieces = stream
    at_once, in_pieces = Scanner(10_000), Scanner(10_000)
    assert run(at_once, [whole]) == whole
    assert run(in_pieces, pieces) == whole
    assert verdict(at_once) == verdict(in_pieces)
    assert at_once.usage == USAGE["usage"]
    assert at_once.done


@given(cut_streams())
def test_dropping_usage_drops_that_event_and_nothing_else(
    stream: tuple[bytes, list[bytes]],
) -> None:
    whole, pieces = stream
    scanner = Scanner(10_000, drop_usage=True)
    out = run(scanner, pieces)
    assert scanner.usage == USAGE["usage"]
    assert b'"usage"' not in out
    start = whole.index(json.dumps(USAGE).encode())
    start = whole.rindex(b"data:", 0, start)
    stop = whole.index(b"data:", start + 5)
    assert out == whole[:start] + whole[stop:]


@given(cut_streams())
def test_the_name_is_restored_in_every_event(stream: tuple[bytes, list[bytes]]) -> None:
    whole, pieces = stream
    out = run(Scanner(10_000, model=b'"nick"'), pieces)
    assert out == whole.replace(b'"model": "up"', b'"model": "nick"')


@given(st.binary(max_size=200), st.lists(st.integers(1, 40), max_size=20))
def test_rubbish_passes_unchanged(data: bytes, sizes: list[int]) -> None:
    scanner = Scanner(10_000)
    pieces, rest = [], data
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert run(scanner, [*filter(None, pieces), rest]) == data


def test_an_error_first_and_an_error_later_differ() -> None:
    first, later = Scanner(1000), Scanner(1000)
    first.feed(event({"error": {"message": "full"}, "choices": []}))
    assert first.error == {"message": "full"}
    assert first.error_first
    later.feed(event(token("a")))
    later.feed(event({"error": "broke"}))
    assert later.error == "broke"
    assert not later.error_first


@pytest.mark.parametrize(
    "data",
    ['data: {"choices": [], "usage": null}\n\n', 'data: {"error": null}\n\n',
     'data: {"usage": {broken\n\n', "data: 5 \"error\"\n\n",
     'data: {"choices":[{"delta":{"content":"\\"usage\\": {\\"error\\":1}"}}]}\n\n'],
)  # fmt: skip
def test_what_looks_like_usage_or_error_is_not(data: str) -> None:
    scanner = Scanner(1000, drop_usage=True)
    assert scanner.feed(data.encode()) == data.encode()
    assert scanner.usage is None
    assert scanner.error is None


def test_usage_in_an_event_with_choices_stays() -> None:
    scanner = Scanner(1000, drop_usage=True)
    data = event({**token("x", "stop"), "usage": {"completion_tokens": 1}})
    assert scanner.feed(data) == data
    assert scanner.usage == {"completion_tokens": 1}


def test_what_is_pending_has_a_bound() -> None:
    scanner = Scanner(1000)
    for _ in range(11):
        scanner.feed(b"x" * 100)
    assert scanner.overflow


def test_a_stream_without_end_or_cut_by_the_engine_is_known() -> None:
    scanner = Scanner(1000)
    scanner.feed(event(token("a")))
    assert not scanner.ended_well()
    scanner.feed(event(token("", "abort")))
    assert scanner.ended_well()
    assert scanner.aborted()
