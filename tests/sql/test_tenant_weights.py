"""What a scope at the top of its tree says of its turns in a queue."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql.tenants import call, family, refused


@pytest.fixture
def acme(fleet):
    """acme/ml/alice with a key, other with one, and a key in nothing."""
    family(fleet, {"keyuser": "acme/ml/alice", "keyother": "other", "keynone": None})
    return fleet


def weigh(fleet, place, weight):
    call(fleet, "llmgw.scope_change_v1", "me", place, Jsonb({"weight": weight}))


def weights(fleet):
    rows = fleet.rows("select id, weight from llmgw_core.usable_key order by id")
    return {row["id"]: row["weight"] for row in rows}


def test_a_key_has_the_weight_of_the_scope_at_its_top(acme):
    assert weights(acme) == {"keynone": None, "keyother": 1, "keyuser": 1}
    weigh(acme, "acme", 3)
    weigh(acme, "other", 0.5)
    assert weights(acme) == {"keynone": None, "keyother": 0.5, "keyuser": 3}
    call(acme, "llmgw.scope_move_v1", "me", "acme/ml/alice", "other")
    assert weights(acme)["keyuser"] == 0.5
    call(acme, "llmgw.scope_move_v1", "me", "other/alice", None)
    assert weights(acme)["keyuser"] == 1
    weigh(acme, "alice", 4)
    assert weights(acme)["keyuser"] == 4
    call(acme, "llmgw.scope_move_v1", "me", "alice", "acme/ml")  # what it said counts no more
    assert weights(acme)["keyuser"] == 3
    weigh(acme, "acme", None)
    assert weights(acme)["keyuser"] == 1


def test_routers_read_the_keys_below_again(acme):
    seen = acme.value("select pg_snapshot_xmin(pg_current_snapshot())::text")
    weigh(acme, "acme", 3)
    statement = "select id from llmgw_core.api_key where changed >= %s::text::xid8"
    assert [row["id"] for row in acme.rows(statement, seen)] == ["keyuser"]


@pytest.mark.parametrize("wrong", [0, 0.009, 100.1, 1e300, "2", "much", [1], {}, True])
def test_what_is_no_weight_is_refused(acme, wrong):
    said = refused(acme, "llmgw.scope_change_v1", "me", "acme", Jsonb({"weight": wrong}))
    assert "scope acme: a weight is a number from 0.01 to 100" in said
    assert weights(acme)["keyuser"] == 1


def test_below_the_top_there_is_none(acme):
    said = refused(acme, "llmgw.scope_change_v1", "me", "acme/ml/alice", Jsonb({"weight": 2}))
    assert "scope acme/ml/alice takes its turns as a part of acme" in said
    shown = acme.rows("select path, weight from llmgw.scopes order by path")
    assert [row["weight"] for row in shown] == [1, None, None, 1]
    with pytest.raises(psycopg.errors.CheckViolation):
        acme.admin.execute("update llmgw_core.scope set weight = 0")
