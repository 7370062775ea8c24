"""Real control processes on one database: who leads, and what becomes of a dead leader (F07)."""

from __future__ import annotations

import signal
from contextlib import ExitStack

import httpx
import pytest

from tests.control.duties import beat, cards
from tests.control.process import PATIENCE_S, until

pytestmark = pytest.mark.slow
LEADER = """select c.pid, l.term, extract(epoch from l.acquired_at)::double precision as at
    from llmgw_core.lease l join llmgw_core.controller c on c.id = l.holder
    where l.name = 'tick' and l.expires_at > clock_timestamp()"""
NOW = "select extract(epoch from clock_timestamp())::double precision"
GPU = {"gpu_class": "H100", "gpus": 1}
LEASE = "update llmgw_core.setting set value = %s where name = 'lease_ttl'"
LONG_S, SOON_S = 90, 20
"""Of a lease two thirds are left at any time: who leads so soon did not wait for its end."""


@pytest.fixture
def closing():
    with ExitStack() as stack:
        yield stack


def leader(fleet, among):
    """The controller that leads, its term, and when it began by the database's clock."""

    def found():
        rows = fleet.rows(LEADER)
        by_pid = {one.process.pid: one for one in among}
        return rows and rows[0]["pid"] in by_pid and (by_pid[rows[0]["pid"]], rows[0])

    one, row = until(found, "one of these leads")
    return one, row["term"], row["at"]


def others(among, one):
    return [other for other in among if other is not one]


def placed(fleet, model):
    """Waits until a model has a shard, which takes a leader."""
    text = """select count(*) from llmgw_core.shard s
        join llmgw_core.replica r on r.id = s.replica_id where r.model = %s"""
    until(lambda: fleet.value(text, model), f"{model} is placed")


def fleet_families(one):
    """What the page says of the fleet; without what moves by itself."""
    names = ("llmgw_nodes", "llmgw_replicas", "llmgw_gpus_", "llmgw_model_", "llmgw_fleet_")
    return {key: value for key, value in one.metrics().items() if key[0].startswith(names)}


def test_two_controllers_share_the_work_and_a_resigned_duty_moves_at_once(
    database, fleet, start, closing
):
    fleet.admin.execute(LEASE, (LONG_S,))
    pair = [start(database.controller_url) for _ in range(2)]
    for one in pair:
        one.ready()
    node = cards(fleet, "a", 4)
    fleet.model("m", GPU)
    placed(fleet, "m")
    beat(fleet, node, 4)
    for one in pair:
        status, body = one.get("/api/v1/replicas")
        assert (status, '"m"' in body) == (200, True)
    until(lambda: fleet_families(pair[0]) == fleet_families(pair[1]), "equal fleet families")
    assert ("llmgw_replicas", (("model", "m"), ("state", "starting"))) in fleet_families(pair[0])
    led = [one.metrics()["llmgw_leader", (("duty", "tick"),)] for one in pair]
    assert sorted(led) == [0, 1]
    first, term, _ = leader(fleet, pair)
    ended_at = fleet.value(NOW)
    # A connection that stays open holds up no duty.
    idle = closing.enter_context(httpx.Client())
    idle.get(f"http://127.0.0.1:{first.admin}/healthz")
    first.signal(signal.SIGTERM)
    (second,) = others(pair, first)
    found, new_term, at = leader(fleet, [second])
    assert (found, new_term) == (second, term + 1)
    print(f"after an orderly end another leads within {at - ended_at:.2f} s")
    assert at - ended_at < SOON_S
    assert first.process.wait(PATIENCE_S) == 0
    beat(fleet, node, 4)
    fleet.model("after", GPU)
    placed(fleet, "after")
    duties = (
        "select count(distinct holder) from llmgw_core.lease where expires_at > clock_timestamp()"
    )
    until(lambda: fleet.value(duties) == 1, "every duty moved")


def test_F07_a_killed_leader_is_replaced_long_before_its_lease_ends(database, fleet, start):
    fleet.admin.execute(LEASE, (LONG_S,))
    three = [start(database.controller_url) for _ in range(3)]
    for one in three:
        one.ready()
    for round_ in (1, 2):
        first, term, _ = leader(fleet, three)
        killed_at = fleet.value(NOW)
        first.signal(signal.SIGKILL)
        three = others(three, first)
        _, new_term, at = leader(fleet, three)
        assert new_term == term + 1
        print(f"kill {round_}: taken over after {at - killed_at:.3f} s")
        assert 0 < at - killed_at < SOON_S
    cards(fleet, "a", 1)
    fleet.model("m", GPU)
    placed(fleet, "m")


def test_F07_a_frozen_leader_is_replaced_after_the_lease_and_steps_down(database, fleet, start):
    fleet.admin.execute(LEASE, (6,))
    pair = [start(database.controller_url) for _ in range(2)]
    for one in pair:
        one.ready()
    node = cards(fleet, "a", 2)
    fleet.model("m", GPU)
    placed(fleet, "m")
    first, term, _ = leader(fleet, pair)
    (second,) = others(pair, first)
    frozen_at = fleet.value(NOW)
    first.signal(signal.SIGSTOP)
    _, new_term, at = leader(fleet, [second])
    print(f"frozen: taken over after {at - frozen_at:.2f} s of a lease of 6 s")
    assert new_term == term + 1
    assert 1 < at - frozen_at < SOON_S
    beat(fleet, node, 2)
    fleet.model("late", GPU)
    first.signal(signal.SIGCONT)
    until(lambda: first.events("stepped down"), "the frozen one steps down")
    placed(fleet, "late")
    stale = "select count(*) from llmgw_core.decision where term = %s and at > to_timestamp(%s)"
    assert fleet.value(stale, term, at) == 0
    assert leader(fleet, [second])[1] == new_term
    first.ready()
    assert first.metrics()["llmgw_leader", (("duty", "tick"),)] == 0
