"""`replace` from the operator's word to the new replica, by the real tick on a real database."""

from __future__ import annotations

import psycopg
import pytest

from tests.control.duties import cards, duty

ASK = "select llmgw.replace_v1('eve', %s, %s, %s, %s, %s) as done"


def ask(fleet, *, of=None, replica=None, force=False, stale=False, cancel=False):
    return fleet.controller.execute(ASK, (of, replica, force, stale, cancel)).fetchone()["done"]


def state(fleet, replica):
    return fleet.value("select state from llmgw_core.replica where id = %s", replica)


def marked(fleet):
    query = "select id from llmgw.replicas where replace_asked is not null order by id"
    return [row["id"] for row in fleet.rows(query)]


def edit(fleet):
    fleet.model("m", {"gpus": 1, "fingerprint": "f2"})


@pytest.fixture
def one_card(fleet):
    """A model with one replica on a node of two cards, and its profile edited since."""
    node = cards(fleet, "n1", 2)
    fleet.model("m", {"gpus": 1})
    replica, _ = fleet.running("m", node, 0)
    edit(fleet)
    return node, replica


async def test_a_replacement_is_ready_before_the_old_one_goes(
    asyncio_loop, database, fleet, one_card
):
    node, old = one_card
    done = {"model": "m", "replicas": [old], "force": False, "cancelled": False}
    assert ask(fleet, replica=old) == done
    async with duty(database.settings()) as leader:
        while await leader.tick():
            pass
        assert state(fleet, old) == "ready"
        new = fleet.value("select max(id) from llmgw_core.replica")
        shard = fleet.value("select max(id) from llmgw_core.shard")
        assert (new, state(fleet, new)) == (old + 1, "starting")
        fleet.say(node, "starting", "ready", shard=shard, pid=101)
        await leader.tick()
        assert state(fleet, new) == "ready"
        await leader.tick()
        assert state(fleet, old) in ("draining", "stopping")
    assert fleet.value("select stale from llmgw.replicas where id = %s", new) is False
    event = fleet.rows("select actor, action, object from llmgw.events where action = 'replace'")
    assert event == [{"actor": "eve", "action": "replace", "object": f"replica {old}"}]


async def test_a_new_launch_takes_the_mark_away(asyncio_loop, database, fleet, one_card):
    node, old = one_card
    ask(fleet, of="m")
    shard = fleet.value("select max(id) from llmgw_core.shard")
    fleet.say(node, "failed", shard=shard)
    fleet.admin.execute("update llmgw_core.setting set value = 0.001 where name like 'backoff%'")
    async with duty(database.settings()) as leader:
        for _ in range(4):
            await leader.tick()
    assert state(fleet, old) == "starting"
    assert marked(fleet) == []


def test_who_is_marked(fleet):
    node = cards(fleet, "n1", 4)
    fleet.model("m", {"gpus": 1})
    first, _ = fleet.running("m", node, 0)
    edit(fleet)
    second = fleet.replica("m")
    item = fleet.place(second, fleet.part(node, 1), fingerprint="f2")
    assert fleet.commit(item) == ["ok"]
    waiting = fleet.replica("m")
    assert ask(fleet, of="m", stale=True)["replicas"] == [first]
    assert ask(fleet, of="m", cancel=True)["replicas"] == [first]
    assert marked(fleet) == []
    assert ask(fleet, of="m", force=True)["replicas"] == [first, second]
    assert marked(fleet) == [first, second]
    assert ask(fleet, replica=second, cancel=True)["replicas"] == [second]
    assert marked(fleet) == [first]
    with pytest.raises(psycopg.Error, match="pending: nothing of it runs") as refused:
        ask(fleet, replica=waiting)
    assert refused.value.sqlstate == "LG003"
    for wrong in ({"of": "nope"}, {"replica": 999}):
        with pytest.raises(psycopg.Error) as missing:
            ask(fleet, **wrong)
        assert missing.value.sqlstate == "LG005"
    assert fleet.value("select llmgw.replace('m')->'replicas'") == [first, second]


def test_a_drain_survives_what_its_agent_says(fleet):
    """D11: the operator's word is not the agent's to change, whoever comes back."""
    node = cards(fleet, "n1", 1)
    intent = "select intent || '/' || intent_reason from llmgw_core.node where id = 'n1'"
    fleet.value("select llmgw.drain('n1', 'fan')")
    fleet.report(node, "host", {"hostname": "n1", "mgmt_addr": "10.0.0.9"})
    fleet.sync(node, have_gen=0)
    assert fleet.value(intent) == "draining/fan"
    again = fleet.enrol("n1")  # a new disk: the agent enrols once more
    fleet.report(again, "host", {"hostname": "n1", "mgmt_addr": "10.0.0.9"})
    fleet.sync(again)
    assert fleet.value(intent) == "draining/fan"
    assert fleet.value("select state from llmgw.nodes where id = 'n1'") == "draining"
