"""When a sync writes (F16): no version of a row can be removed while a snapshot is held open, and
each sync passes all of them. So what moves by itself is written once in ten seconds or a minute."""

from __future__ import annotations

import uuid

import pytest

TABLES = ("beat", "node_load", "shard")


@pytest.fixture
def busy(fleet):
    """A node with an engine that has said everything once, by its own clock set right."""
    fleet.model("m")
    node = fleet.node("n1", gpus=2)
    _, shard = fleet.running("m", node, 0)
    say(fleet, node, shard)
    return node, shard


def say(fleet, node, shard, number=0, foreign=0, ahead=0, **more):
    """A report as a real agent's; all that moves by itself moves with the number."""
    now = fleet.value("select extract(epoch from clock_timestamp())::float8")
    word = {
        "shard": shard,
        "state": "ready",
        "pid": 100,
        "cpu_cores": number,
        "memory_bytes": 2**30,
    }
    cards = [{"uuid": f"n1-{i}", "memory_used_mib": number, "power_w": number} for i in range(2)]
    cards[1]["memory_foreign_mib"] = foreign
    report = {"clock": now + ahead, "load": {"cpu_percent": number}, "gpus": cards}
    fleet.sync(node, **{**report, "shards": [word], **more})


def written(fleet, since):
    """Tables with another version than then; remembers the present ones."""
    now = {t: fleet.value(f"select xmin::text from llmgw_core.{t}") for t in TABLES}
    moved = [t for t in TABLES if now[t] != since.get(t)]
    since.update(now)
    return moved


def aged(fleet, node, seconds):
    """All that was written of the node becomes so much older."""
    fleet.silence(node, seconds)
    fleet.admin.execute(
        "update llmgw_core.node_load set at = at - make_interval(secs => %s)", (seconds,)
    )


def test_F16_what_moves_by_itself_is_written_once_in_an_interval(fleet, busy):
    node, shard = busy
    known: dict[str, str] = {}
    written(fleet, known)
    for number in range(1, 20):
        say(fleet, node, shard, number)
    assert written(fleet, known) == []
    for seconds, moved in ((5, []), (60, list(TABLES))):
        aged(fleet, node, seconds)
        written(fleet, known)
        say(fleet, node, shard, 20)
        assert written(fleet, known) == moved, seconds
    shown = fleet.rows("select cpu_cores from llmgw.shards")
    assert shown == [{"cpu_cores": 20}]
    assert fleet.value("select load->>'cpu_percent' from llmgw.nodes") == "20"


@pytest.mark.parametrize(
    "said",
    [
        {"boot": str(uuid.UUID(int=7))}, {"applied_gen": 99}, {"leaving": True}, {"ahead": 2},
        {"clock": None},
    ],
)  # fmt: skip
def test_F16_what_is_news_of_the_agent_is_written_at_once(fleet, busy, said):
    node, shard = busy
    known: dict[str, str] = {}
    written(fleet, known)
    say(fleet, node, shard, **said)
    assert written(fleet, known) == ["beat"]
    say(fleet, node, shard, **said)
    assert written(fleet, known) == []
    say(fleet, node, shard)
    assert written(fleet, known) == ["beat"], "and so is the return"


def test_F16_a_card_that_others_take_or_leave_is_written_at_once(fleet, busy):
    node, shard = busy
    states, known = [], {}
    for foreign, moved in ((500, []), (513, ["node_load"]), (900, []), (None, ["node_load"])):
        written(fleet, known)
        say(fleet, node, shard, foreign=foreign)
        assert written(fleet, known) == moved, foreign
        states.append(fleet.value("select state from llmgw.gpus where index = 1"))
    assert states == ["free", "foreign", "foreign", "unknown"]


def test_F16_each_percent_of_a_download_is_written_at_once(fleet):
    fleet.model("m")
    node = fleet.node("n1")
    fleet.commit(fleet.place(fleet.replica("m"), fleet.part(node)))
    fetch = {"source": "hf:a/b", "bytes_total": 1000}
    shown = []
    for done in (0, 9, 10, 11, 20):
        fleet.say(node, "fetching", shard=1, fetch={**fetch, "bytes_done": done})
        shown.append(fleet.value("select fetching->>'bytes_done' from llmgw_core.shard"))
    assert shown == ["0", "0", "10", "10", "20"]
    fleet.silence(node, 60)
    fleet.say(node, "fetching", shard=1, fetch={**fetch, "bytes_done": 21})
    assert fleet.value("select fetching->>'bytes_done' from llmgw_core.shard") == "21"


@pytest.mark.parametrize(
    ("setting", "value", "age", "beats"),
    [
        ("unreachable_after", 3, 0.9, True),  # never older than a third of that
        ("lost_after", 3, 0.9, True),
        ("unreachable_after", 1e9, 5, False),
        ("unreachable_after", 1e9, 10, True),  # and never older than ten seconds
        ("poll_idle", 20_000, 0, True),  # with the next sync it would be too late
        ("poll_idle", 10, 7, False),
        ("poll_idle", 10, 10, True),
        ("poll_idle", 10, -3600, True),  # the database's clock was set back
    ],
)
def test_F16_a_live_node_never_looks_silent(fleet, setting, value, age, beats):
    node = fleet.node("n1")
    fleet.admin.execute(
        "update llmgw_core.setting set value = %s where name = %s", (value, setting)
    )
    fleet.silence(node, age)
    before = fleet.value("select seen_at from llmgw_core.beat")
    fleet.sync(node)
    assert (fleet.value("select seen_at from llmgw_core.beat") != before) == beats
    assert 0 <= fleet.value("select silent_s from llmgw_core.node_state") < 12


def test_F16_a_node_that_was_silent_is_ready_with_its_first_word(fleet, busy):
    node, shard = busy
    for silent, state in ((31, "unreachable"), (121, "lost")):
        fleet.silence(node, silent)
        assert fleet.value("select state from llmgw.nodes") == state
        say(fleet, node, shard)
        assert fleet.value("select state from llmgw.nodes") == "ready"
