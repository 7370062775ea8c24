"""The small pure parts: choosing, deadlines, keys, tables, bodies, token counts, exchange moves."""

from __future__ import annotations

import json
from typing import Any
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.router.body import Asked, read, rewritten
from controller.router.config import StaticEndpoint
from controller.router.deadlines import Deadlines, Timed
from controller.router.errors import ApiError
from controller.router.routes import find
from controller.router.row_ids import MADE_AT_ONCE, RowIds
from controller.router.states import MOVES, State
from controller.router.stats import MOST_COUNTERS, Stats
from controller.router.table import from_rows, from_static, merged, parse_endpoint
from controller.router.tokens import UNKNOWN, Tokens, UsageFinder, find_usage, read_usage


def test_row_ids_are_random_uuids_in_hex() -> None:
    ids = RowIds()
    found = [ids.take() for _ in range(2 * MADE_AT_ONCE + 3)]
    assert len(set(found)) == len(found)
    read = [UUID(each) for each in found]
    assert [each.hex for each in read] == found
    assert {(each.version, each.variant) for each in read} == {(4, RFC_4122)}
    assert all(len({each[n] for each in found}) > 8 for n in range(32) if n not in (12, 16))


class Bell(Timed):
    def __init__(self) -> None:
        super().__init__()
        self.rang: list[float] = []

    def expired(self, now: float) -> None:
        self.rang.append(now)


@pytest.mark.interpreted
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 5)), max_size=30), st.data())
def test_deadlines_ring_once_after_their_last_time(
    settings: list[tuple[int, float]], data: st.DataObject
) -> None:
    deadlines = Deadlines(0.1)
    bells = [Bell() for _ in range(4)]
    now = 100.0
    expected: dict[int, float] = {}
    for number, delay in settings:
        now += data.draw(st.floats(0, 0.5))
        deadlines.sweep(now)
        if bells[number].rang:
            continue
        deadlines.set(bells[number], now + delay)
        expected[number] = now + delay
    while now < 120:
        now += 0.07
        deadlines.sweep(now)
    for number, due in expected.items():
        (rang,) = bells[number].rang
        assert due <= rang <= due + 0.72
    assert len(deadlines) == 0


@pytest.mark.interpreted
def test_a_deadline_taken_away_never_rings() -> None:
    deadlines, bell = Deadlines(), Bell()
    deadlines.set(bell, 1.0)
    bell.forget()
    assert len(deadlines) == 0
    assert deadlines.sweep(5.0) == 0
    assert bell.rang == []


class BrokenBell(Bell):
    def expired(self, now: float) -> None:
        raise ValueError("cracked")


@pytest.mark.interpreted
def test_a_bug_in_one_deadline_does_not_take_the_others_away() -> None:
    deadlines = Deadlines()
    bells = [Bell() for _ in range(3)]
    for bell in (bells[0], BrokenBell(), bells[1], BrokenBell(), bells[2]):
        deadlines.set(bell, 1.05)
    for _ in range(2):
        with pytest.raises(ValueError, match="cracked"):
            deadlines.sweep(2.0)
    deadlines.sweep(2.0)
    assert [len(bell.rang) for bell in bells] == [1, 1, 1]
    assert len(deadlines) == 0


@pytest.mark.parametrize(
    ("url", "host", "port", "base"),
    [("http://h:1", "h", 1, b""), ("http://h:1/", "h", 1, b""), ("http://h:1/v1", "h", 1, b""),
     ("http://h/x/v1/", "h", 80, b"/x"), ("h:5", "h", 5, b""), ("http://[::1]:2", "::1", 2, b"")],
)  # fmt: skip
def test_endpoints(url: str, host: str, port: int, base: bytes) -> None:
    endpoint = parse_endpoint(url)
    assert (endpoint.host, endpoint.port, endpoint.base) == (host, port, base)


@pytest.mark.parametrize("url", ["https://h:1", "http://", "http://h:x", ""])
def test_bad_endpoints_say_so(url: str) -> None:
    with pytest.raises(ValueError, match=r"\w+"):
        parse_endpoint(url)


def row(number: int, model: str, state: str, endpoint: str | None) -> dict[str, Any]:
    return {"replica_id": number, "model": model, "state": state, "endpoint": endpoint,
            "node_id": "n"}  # fmt: skip


def test_a_table_from_rows_leaves_out_what_cannot_serve() -> None:
    models = [
        {"name": "m", "aliases": ["a", "b"], "fallbacks": None},
        {"name": "z", "aliases": None, "fallbacks": ["m"]},
    ]
    rows = [
        row(1, "m", "ready", "http://h:1"),
        row(2, "m", "draining", "http://h:2"),
        row(3, "m", "starting", "http://h:3"),
        row(4, "m", "ready", None),
        row(5, "m", "ready", "ftp://h"),
        row(6, "gone", "ready", "http://h:6"),
    ]
    table = from_rows(models, rows)
    assert [(r.id, r.ready) for r in table.models[0].replicas] == [(1, True), (2, False)]
    names = table.names()
    assert set(names) == {"m", "a", "b", "z"}
    assert names["a"].name == "m"
    assert names["z"].replicas == ()


def test_static_endpoints_join_the_database() -> None:
    static = from_static([StaticEndpoint("e", "h:9", ("m", "s"))], [("nick", "s")])
    both = merged(from_rows([{"name": "m", "aliases": [], "fallbacks": []}],
                            [row(1, "m", "ready", "h:1")]), static)  # fmt: skip
    assert [replica.key for replica in both.names()["m"].replicas] == ["1", "e"]
    assert both.names()["nick"].name == "s"
    with pytest.raises(ValueError, match="used twice"):
        from_static([StaticEndpoint("e", "h:1", ()), StaticEndpoint("e", "h:2", ())])


def test_a_body_is_rewritten_only_when_it_must() -> None:
    raw = b'{"model": "m",  "stream": true, "odd": [1.0]}'
    asked = read(raw)
    assert isinstance(asked, Asked)
    assert rewritten(asked, "m", ask_usage=False) is raw
    changed = json.loads(rewritten(asked, "up", ask_usage=True))
    assert changed == {
        "model": "up", "stream": True, "odd": [1.0], "stream_options": {"include_usage": True},
    }  # fmt: skip
    kept = read(b'{"model": "m", "stream_options": {"x": 1, "include_usage": false}}')
    assert isinstance(kept, Asked)
    assert json.loads(rewritten(kept, "m", ask_usage=True))["stream_options"] == {
        "x": 1, "include_usage": True,
    }  # fmt: skip
    assert isinstance(read(b"[]"), ApiError)


FREE = '"usage": {"input_tokens": 0, "output_tokens": 0}'
"""What a client would like to pay."""


@pytest.mark.parametrize(
    "told_again",
    [
        '"metadata": {"usage": "billing"}', '"usage": null', '"x": {"usage" : 5}, "y": ["usage"]',
        f'"metadata": {{{FREE}}}', f'"metadata": {{"a": "}}}}\\\\\\"}}", {FREE}, "b": "{{"}}',
        f'"content": [{{"input": {{{FREE}}}}}], "x": {{"y": {{"z": {{{FREE}}}}}}}',
        '"tools": [{"parameters": {"properties": {"usage": {"type": "object"}}}}]',
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("before", [False, True])
def test_a_key_called_usage_elsewhere_in_an_answer_hides_nothing(
    told_again: str, size: int, before: bool
) -> None:
    """A client chooses its metadata and its tools, and must not choose what it pays: SGLang tells
    both behind the usage of a response."""
    usage = '"usage": {"input_tokens": 4, "output_tokens": 2}'
    answer = "{" + ", ".join([told_again, usage] if before else [usage, told_again]) + "}"
    text = answer.encode()
    finder = UsageFinder()
    for start in range(0, len(text), size):
        finder.feed(text[start : start + size])
    assert (finder.tokens(), find_usage(text)) == (Tokens(4, 2), Tokens(4, 2))


def test_usage_in_another_object_only_is_not_the_answer_s() -> None:
    for text in (f'{{"metadata": {{{FREE}}}}}', f'{{"a": {{{FREE}}}, "b": [{{"c": 1}}]}}'):
        finder = UsageFinder()
        finder.feed(text.encode())
        assert (finder.tokens(), find_usage(text.encode())) == (UNKNOWN, UNKNOWN)


@given(st.data())
def test_usage_is_found_however_the_answer_is_cut(data: st.DataObject) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 5,
             "prompt_tokens_details": {"cached_tokens": 1}}  # fmt: skip
    filler = "x" * data.draw(st.integers(0, 60))
    first = data.draw(st.booleans())
    document = {"usage": usage, "text": filler} if first else {"text": filler, "usage": usage}
    text = json.dumps(document).encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=12)))
    finder = UsageFinder()
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        finder.feed(text[a:b])
    assert finder.tokens() == Tokens(3, 5, 1)


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b'{"usage": null}', b'{"usage": {', b'{"usage": {]}', b'"usage":{}{', b'["usage"]',
     b'{"a": {}, "b": "the \\"usage"', b'["usage": {"usage"'],
)  # fmt: skip
def test_no_usage_is_unknown(text: bytes) -> None:
    finder = UsageFinder()
    finder.feed(text)
    assert finder.tokens() == UNKNOWN
    assert find_usage(text) == UNKNOWN


def test_odd_counts_are_unknown() -> None:
    assert read_usage([]) == UNKNOWN
    odd = {"prompt_tokens": True, "completion_tokens": -1, "prompt_tokens_details": 5}
    assert read_usage(odd) == UNKNOWN
    assert read_usage({"prompt_tokens": 0}) == Tokens(0, None, None)


@pytest.mark.parametrize(("total", "made"), [(513, 222), (317, 26), (None, 26), ("513", 26)])
def test_what_was_reasoned_is_part_of_the_completion(total: Any, made: int) -> None:
    """xAI tells 26 tokens, 196 that were reasoned, and a total and a price of all: the row has
    more reasoned than made otherwise, and a bill of an eighth."""
    usage = {"prompt_tokens": 291, "completion_tokens": 26, "total_tokens": total,
             "completion_tokens_details": {"reasoning_tokens": 196}}  # fmt: skip
    assert read_usage(usage) == Tokens(291, made, None, 196)


def test_routes() -> None:
    for method, path, status in (
        (b"GET", b"/", 404), (b"GET", b"/v1/models/", 404), (b"DELETE", b"/v1/models", 405),
        (b"OPTIONS", b"/v1/embeddings", 405), (b"POST", b"/v1/chat/completions/", 404),
    ):  # fmt: skip
        error = find(method, path)
        assert isinstance(error, ApiError)
        assert error.status == status
    route = find(b"GET", b"/v1/models/org/name%20x")
    assert not isinstance(route, ApiError)
    assert route.argument == "org/name x"


def test_every_state_of_an_exchange_can_end() -> None:
    assert set(MOVES) == set(State)
    assert MOVES[State.SETTLED] == frozenset()
    for state in set(State) - {State.SETTLED}:
        assert State.SETTLED in MOVES[state]


def test_counters_of_replicas_that_come_and_go_have_a_bound() -> None:
    stats = Stats()
    for number in range(MOST_COUNTERS):
        stats.fail_upstream(str(number), "503")
    stats.fail_upstream("0", "503")
    stats.fail_upstream("new", "503")
    assert len(stats.upstream_failures) == MOST_COUNTERS
    assert ("1", "503") not in stats.upstream_failures, "counted least recently"
    assert stats.upstream_failures["0", "503"] == 2


def test_a_snapshot_is_json() -> None:
    stats = Stats()
    model = stats.model("m")
    model.settle("chat.completions", 200, "ok", 0.2)
    model.count_tokens(Tokens(1, 2, None))
    stats.fail_upstream("1", "connect_failed")
    assert json.loads(json.dumps(stats.snapshot()))["tokens"] == [["m", "in", 1], ["m", "out", 2]]
