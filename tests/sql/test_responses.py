"""Where answers of /v1/responses are kept."""

from __future__ import annotations

from psycopg.types.json import Jsonb

KEPT = "select id, key_id, replica from llmgw_core.stored_response order by id"


def put(fleet, *rows):
    fleet.controller.execute("select llmgw_core.responses_put_v1(%s)", (Jsonb(list(rows)),))


def test_A29_the_first_word_about_an_answer_counts(fleet):
    mine = {"id": "resp_a", "key_id": "mine", "replica": "1"}
    put(fleet, mine)
    put(fleet, mine, {"id": "resp_a", "key_id": "theirs", "replica": "2"})
    assert fleet.rows(KEPT) == [mine]


def test_an_id_that_no_engine_makes_harms_no_other_row(fleet):
    good = {"id": "resp_b", "key_id": "mine", "replica": "1"}
    put(fleet, {**good, "id": "x" * 300}, {**good, "id": ""}, good)
    assert fleet.rows(KEPT) == [good]


def test_answers_are_forgotten_with_the_history(fleet):
    for name in ("old", "new"):
        put(fleet, {"id": name, "key_id": "mine", "replica": "1"})
    fleet.admin.execute(
        "update llmgw_core.stored_response set created_at = created_at - interval '40 days'"
        " where id = 'old'"
    )
    fleet.admin.execute("select llmgw_core.housekeep_v1(%s)", (fleet.lead("housekeeping"),))
    assert [row["id"] for row in fleet.rows(KEPT)] == ["new"]
