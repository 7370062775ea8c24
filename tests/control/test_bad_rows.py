"""Rows that cannot be: one costs itself only, and is told of (D10)."""

from __future__ import annotations

import pytest

from tests.control.duties import cards, duty

GPU = {"gpu_class": "H100", "gpus": 1}
ENDING = {
    # name -> statements that a superuser typed, a word that the notes must name
    "unknown_state_of_a_replica": (
        "alter table llmgw_core.replica drop constraint replica_state_check;"
        " alter table llmgw_core.replica disable trigger all;"
        " update llmgw_core.replica set state = 'haunted' where id = {replica}",
        "haunted",
    ),
    "replica_without_a_time": (
        "alter table llmgw_core.replica alter created_at drop not null;"
        " update llmgw_core.replica set created_at = null where id = {replica}",
        "created_at",
    ),
    "replica_without_a_model": (
        "alter table llmgw_core.replica alter model drop not null;"
        " alter table llmgw_core.replica disable trigger replica_fixed;"
        " update llmgw_core.replica set model = null where id = {replica}",
        "model",
    ),
    "unknown_state_of_a_shard": (
        "alter table llmgw_core.shard drop constraint shard_state_check;"
        " alter table llmgw_core.shard disable trigger all;"
        " update llmgw_core.shard set state = 'haunted' where replica_id = {replica}",
        "haunted",
    ),
    "shard_without_a_time": (
        "alter table llmgw_core.shard alter state_at drop not null;"
        " alter table llmgw_core.shard disable trigger all;"
        " update llmgw_core.shard set state_at = null where replica_id = {replica}",
        "state_at",
    ),
    "shard_without_a_node": (
        "alter table llmgw_core.shard alter node_id drop not null;"
        " alter table llmgw_core.shard disable trigger all;"
        " update llmgw_core.shard set node_id = null where replica_id = {replica}",
        "node_id",
    ),
    "shard_without_a_port": (
        "alter table llmgw_core.shard alter port drop not null;"
        " alter table llmgw_core.shard disable trigger shard_fixed;"
        " update llmgw_core.shard set port = null where replica_id = {replica}",
        None,
    ),
    "node_without_ports": (
        "alter table llmgw_core.node alter port_first drop not null;"
        " update llmgw_core.node set port_first = null where id = 'bad'",
        "node",
    ),
    "node_with_odd_labels": (
        "alter table llmgw_core.node drop constraint node_labels_check;"
        """ update llmgw_core.node set labels = '["x"]' where id = 'bad'""",
        "node",
    ),
    "card_without_problems": (
        "alter table llmgw_core.gpu alter problems drop not null;"
        " update llmgw_core.gpu set problems = null where node_id = 'bad'",
        "gpu",
    ),
    "card_without_a_class": (
        "alter table llmgw_core.gpu alter class drop not null;"
        " update llmgw_core.gpu set class = null where node_id = 'bad'",
        "class",
    ),
    "profile_without_arguments": (
        "alter table llmgw_core.profile alter cpu_flags drop not null;"
        " update llmgw_core.profile set cpu_flags = null where model = 'old'",
        "profile",
    ),
    "profile_that_wants_no_number_of_cards": (
        "alter table llmgw_core.profile alter gpus drop not null;"
        " update llmgw_core.profile set gpus = null where model = 'old'",
        "gpus",
    ),
    "model_without_a_number": (
        "alter table llmgw_core.model alter min_replicas drop not null;"
        " update llmgw_core.model set min_replicas = null where name = 'old'",
        "min_replicas",
    ),
    "setting_without_a_value": (
        "alter table llmgw_core.setting alter value drop not null;"
        " update llmgw_core.setting set value = null where name in ('stable', 'guard')",
        None,
    ),
    "profile_of_negative_numbers": (
        "alter table llmgw_core.profile drop constraint profile_gpus_check;"
        " update llmgw_core.profile set gpus = -1 where model = 'old'",
        "gpus is -1",
    ),
    "profile_of_no_shard": (
        "alter table llmgw_core.profile drop constraint profile_shards_check;"
        " update llmgw_core.profile set shards = 0 where model = 'old'",
        "shards is 0",
    ),
    "model_of_negative_numbers": (
        "alter table llmgw_core.model drop constraint model_min_replicas_check;"
        " update llmgw_core.model set min_replicas = -1 where name = 'old'",
        "min_replicas is -1",
    ),
    "node_of_negative_ports": (
        "alter table llmgw_core.node drop constraint node_port_first_check;"
        " update llmgw_core.node set port_first = -5 where id = 'bad'",
        "ports -5 to 20099",
    ),
    "replica_of_negative_numbers": (
        "update llmgw_core.replica set restarts = -3 where id = {replica}",
        None,
    ),
    "replica_of_a_deleted_model": (
        "alter table llmgw_core.model disable trigger all;"
        " alter table llmgw_core.profile disable trigger all;"
        " delete from llmgw_core.model where name = 'old'",
        None,
    ),
    "card_in_two_minds": (
        "alter table llmgw_core.gpu_claim disable trigger all;"
        " update llmgw_core.gpu_claim set memory_mib = 5",
        None,
    ),
    "settings_of_nonsense": (
        "alter table llmgw_core.setting disable trigger setting_sane;"
        " update llmgw_core.setting set value = 'nan' where name in ('guard', 'backoff_base');"
        " update llmgw_core.setting set value = 0 where name in ('concurrency', 'start_deadline')",
        "setting concurrency is 0, which cannot be",
    ),
}


AFTER = {
    "unknown_state_of_a_replica": "haunted",
    "replica_of_a_deleted_model": "stopping",
}
"""Elsewhere what serves goes on serving: nobody gives it up for a row that cannot be read."""


@pytest.mark.parametrize("what", ENDING)
async def test_D10_one_bad_row_stops_nobody_else(asyncio_loop, database, fleet, what):
    statements, word = ENDING[what]
    bad = cards(fleet, "bad", 1)
    fleet.model("old", GPU)
    async with duty(database.settings()) as one:
        old, _ = fleet.running("old", bad, 0)
        fleet.admin.execute("update llmgw_core.setting set value = 0 where name = 'guard'")
        # The lease passes from the builder to the ticker.
        fleet.admin.execute("update llmgw_core.lease set expires_at = clock_timestamp()")
        fleet.admin.execute(statements.format(replica=old))
        cards(fleet, "good", 1)
        fleet.model("m", GPU)
        for _ in range(3):
            await one.tick()
        placed = (
            "select s.node_id from llmgw_core.shard s join llmgw_core.replica r"
            " on r.id = s.replica_id where r.model = 'm'"
        )
        assert fleet.value(placed) == "good"
        if word is not None:
            assert any(word in note for note in one.ticker.stats.notes), one.ticker.stats.notes
        state = fleet.value("select state from llmgw_core.replica where id = %s", old)
        assert state == AFTER.get(what, "ready")
        # The old replica keeps what it holds, so nobody is given its card.
        assert fleet.value("select count(*) from llmgw_core.gpu_claim where node_id = 'bad'") == 1


def shown(fleet):
    """What doctor and psql tell of rows that the leader leaves alone."""
    doctor = fleet.rows("select evidence as told from llmgw.doctor where node = 'tick'")
    trouble = fleet.rows("select why as told from llmgw.trouble where what = 'left alone'")
    return [row["told"] for row in (*doctor, *trouble)]


async def test_D10_a_note_is_logged_once_counted_and_shown_by_the_doctor(
    asyncio_loop, database, fleet, capsys
):
    statements, _ = ENDING["model_without_a_number"]
    fleet.model("old", GPU)
    fleet.admin.execute(statements)
    async with duty(database.settings()) as one:
        for _ in range(3):
            await one.tick()
        assert len(one.ticker.stats.notes) == 1
        assert shown(fleet) == [*one.ticker.stats.notes] * 2
        fleet.admin.execute("update llmgw_core.model set min_replicas = 1")
        await one.tick()
        assert one.ticker.stats.notes == ()
        assert shown(fleet) == []
