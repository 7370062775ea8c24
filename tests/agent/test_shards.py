"""What is said to the database, in the order that it accepts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.assignment import BadAssignment, parse
from agent.process import Identity
from agent.shards import next_word, unlike, word_of
from agent.state import Record, record_from
from sql.states import SHARD, SHARD_FINAL

STATES = st.sampled_from(sorted(SHARD))


@given(known=STATES, actual=STATES)
def test_every_word_is_a_legal_move_and_the_words_arrive(known: str, actual: str) -> None:
    steps = 0
    while known != actual and steps < 5:
        word = next_word(known, actual)
        if word not in SHARD[known]:
            # Only where no way exists at all: the truth is said and the database decides.
            assert word == actual
            assert known in SHARD_FINAL or (known == "draining" and actual not in SHARD[known])
            return
        assert word == actual or word not in ("ready", "stopped", "failed")
        known, steps = word, steps + 1
    assert known == actual


def test_a_download_is_followed_by_starting_before_ready() -> None:
    assert next_word("fetching", "ready") == "starting"


@given(
    st.builds(
        Record,
        shard=st.integers(1, 2**40),
        assignment=st.dictionaries(st.text(), st.integers()),
        state=STATES,
        known=STATES,
        error=st.none() | st.text(),
        exit_code=st.none() | st.integers(-64, 255),
        log_tail=st.none() | st.text(),
        process=st.none() | st.builds(Identity, st.integers(1), st.integers(0), st.text()),
        was_running=st.booleans(),
    )
)
def test_a_record_survives_the_disk(record: Record) -> None:
    assert record_from(record.to_json()) == record
    word = word_of(record, with_tail=True)
    assert None not in word.values()
    assert ("exit_code" in word) <= (word["state"] in SHARD_FINAL)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
GOOD = {
    "shard": 1, "replica": 2, "model": "m", "desired": "running", "engine": "command",
    "port": 20001, "host": "h", "gpus": [{"uuid": "GPU-a", "index": 0}], "env": {"A": "b"},
}  # fmt: skip


@given(
    name=st.sampled_from(["desired", "port", "gpus", "env", "args", "cpus", "host", "x"]),
    value=JSON,
)
def test_D10_any_value_in_any_field_is_read_or_refused_by_name(name: str, value: object) -> None:
    try:
        a = parse({**GOOD, name: value}, "127.0.0.1")
    except BadAssignment as error:
        said = str(error)
    else:
        said = f"shard {a.shard}: {name}"
    assert f"shard 1: {name}" in said


@given(JSON)
def test_D10_any_document_is_read_or_refused(document: object) -> None:
    try:
        parse(document, "127.0.0.1")
    except BadAssignment:
        pass


def test_only_what_never_changes_makes_another_shard() -> None:
    assert not unlike(GOOD, {**GOOD, "desired": "stopped", "host": "x", "cpus": 2})
    assert not unlike(GOOD, {**GOOD, "gpus": [{"uuid": "GPU-a", "index": 5}]})
    assert unlike(GOOD, {**GOOD, "gpus": []})
    assert unlike(GOOD, {**GOOD, "replica": 3})
