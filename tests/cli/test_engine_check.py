"""`llmgwctl engine-check`: what a router needs of an engine, told check by check."""

from __future__ import annotations

import pytest

from tests.cli.served import in_thread
from tests.fake_engine import FakeEngine

ALL = ["models", "health", "chat", "stream", "stream usage", "refusal"]


def failed(behaviour):
    with FakeEngine(behaviour) as engine:
        done = in_thread(["engine-check", engine.url, "--json", "--request-timeout", "30"])
    document = done.document
    assert [c["check"] for c in document["checks"]] == ALL
    wrong = {c["check"]: c["detail"] for c in document["checks"] if not c["ok"]}
    assert done.code == int(bool(wrong))
    assert document["ok"] is not bool(wrong)
    return wrong


@pytest.mark.parametrize(
    ("behaviour", "wrong"),
    [
        ({"done": False}, {"stream": "without data: [DONE]"}),
        ({"usage": False}, {"chat": "no answer with usage", "stream usage": "cannot be accounted"}),
        ({"error_first": True}, {"stream": "an event is an error", "stream usage": "error"}),
    ],
)
def test_what_is_wrong_is_named(behaviour, wrong):
    found = failed(behaviour)
    assert set(found) - {"refusal"} == set(wrong)
    for check, said in wrong.items():
        assert said in found[check]


def test_a_table_for_people():
    with FakeEngine() as engine:
        text = in_thread(["engine-check", f"{engine.url}/v1"]).out
    assert text.splitlines()[0].split() == ["CHECK", "RESULT", "TIME", "DETAIL"]
    assert "finish_reason" in text


def test_G02_nobody_there_and_no_address():
    gone = in_thread(["engine-check", "127.0.0.1:9", "--json"])
    assert gone.code == 1
    assert [c["ok"] for c in gone.document["checks"]] == [False]
    assert in_thread(["engine-check", "ftp://x"]).code == 2
