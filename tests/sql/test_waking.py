"""What holds up a model on its way: the words that waiting clients are told."""

from __future__ import annotations

from psycopg.types.json import Jsonb

WHY = "select state, why, failures from llmgw.waking where model = %s"


def told(fleet, model="m"):
    """(state, why, failures) of a model, None when nothing is on its way."""
    rows = fleet.rows(WHY, model)
    return tuple(rows[0].values()) if rows else None


def refused(fleet, *refusals):
    """The latest attempt to place `m` came to this."""
    attempt = {"model": "m", "placed": False, "digest": "00", "refusals": list(refusals)}
    fleet.controller.execute(
        "select llmgw_core.record_attempts_v1(%s, %s)", (fleet.lead(), Jsonb([attempt]))
    )


def refusal(node, code="gpu_taken", reason="cards are taken by other replicas: need 1, have 0"):
    return {"model": "m", "profile": "p", "node": node, "code": code, "reason": reason}


def test_every_stage_of_a_start_is_told(fleet):
    fleet.model("m")
    assert told(fleet) is None
    node = fleet.node("n1")
    replica = fleet.replica("m")
    assert told(fleet) == ("pending", "it is being placed", 0)
    assert fleet.commit(fleet.place(replica, fleet.part(node))) == ["ok"]
    shard = fleet.value("select max(id) from llmgw_core.shard")
    assert told(fleet) == ("starting", "its node has not begun yet", 0)
    fleet.say(node, "provisioning", shard=shard)
    assert told(fleet)[1] == "its engine is being installed"
    fetch = {"source": "hf:a/b", "bytes_done": 43}
    fleet.say(node, "fetching", shard=shard, fetch=fetch)
    assert told(fleet)[1] == "its weights are being fetched"
    fleet.say(node, "fetching", shard=shard, fetch={**fetch, "bytes_total": 100})
    assert told(fleet)[1] == "its weights are being fetched (43 %)"
    fleet.say(node, "starting", shard=shard)
    assert told(fleet)[1] == "its engine is starting"
    fleet.say(node, "ready", shard=shard)
    fleet.move(replica, "ready")
    assert told(fleet) is None
    fleet.replica("m")  # one more on its way: the model serves
    assert told(fleet) is None


def test_a_crash_is_told_with_its_last_line(fleet):
    fleet.model("m")
    node = fleet.node("n1")
    replica = fleet.replica("m")
    fleet.commit(fleet.place(replica, fleet.part(node)))
    shard = fleet.value("select max(id) from llmgw_core.shard")
    log = "loading\n\x1b[31mCUDA out of memory\x1b[0m \r\n\n"
    fleet.say(node, "starting", shard=shard)
    fleet.say(node, "failed", shard=shard, error="the engine exited with code 1", log_tail=log)
    fleet.move(replica, "failed", restarts=2, backoff_until=4e9)
    last = " [31mCUDA out of memory [0m"  # nothing in it steers a terminal
    assert told(fleet) == ("failed", f"the engine exited with code 1: {last}", 2)
    assert fleet.value("select retry_s from llmgw.waking") > 1e6
    # A replica that is further on says more than one that failed.
    fleet.replica("m")
    assert told(fleet)[0] == "pending"


def test_a_start_that_failed_without_an_engine_tells_why(fleet):
    fleet.model("m")
    node = fleet.node("n1")
    replica = fleet.replica("m")
    fleet.commit(fleet.place(replica, fleet.part(node)))
    fleet.move(replica, "failed", reason="start deadline exceeded", restarts=1)
    assert told(fleet) == ("failed", "start deadline exceeded", 1)


def test_D17_who_has_no_place_is_told_what_takes_it_and_no_other_models_name(fleet):
    fleet.model("m")
    fleet.model("secret-model")
    node = fleet.node("n1")
    other, _ = fleet.running("secret-model", node)
    fleet.replica("m")
    refused(fleet, refusal("n1"), refusal("n2"))
    assert told(fleet) == (
        "pending",
        "there is no place for it: cards are taken by other replicas: need 1, have 0"
        " (2 of 2 candidates)",
        0,
    )
    fleet.move(other, "draining", room_for="m")
    state, why, _ = told(fleet)
    assert (state, "makes room for it" in why, "secret" in why) == ("pending", True, False)
