"""C10: when another model may answer, said by scopes and keys: the nearest that says anything."""

from __future__ import annotations

from itertools import product

import psycopg
import pytest
from psycopg.types.json import Jsonb

from controller.router.fallbacks import WORDS
from tests.sql.tenants import call, family, refused

LEVELS = ("org", "team", "user", "key")


@pytest.fixture
def acme(fleet):
    """acme/ml/alice with a key on each level; other; and a key in nothing."""
    family(fleet, {"keyorg": "acme", "keyteam": "acme/ml", "keyuser": "acme/ml/alice",
                   "keynone": None})  # fmt: skip
    return fleet


def say(fleet, place, said):
    call(fleet, "llmgw.scope_change_v1", "me", place, Jsonb({"fallback": said}))


def in_force(fleet, identity="keyuser"):
    [row] = fleet.rows(
        "select fallback, fallback_by from llmgw_core.usable_key where id = %s", identity
    )
    return row["fallback"], row["fallback_by"]


def marked(fleet, act):
    """Keys that routers read again because of what `act` does."""
    seen = fleet.value("select pg_snapshot_xmin(pg_current_snapshot())::text")
    act()
    statement = "select id from llmgw_core.api_key where changed >= %s::text::xid8 order by id"
    return [row["id"] for row in fleet.rows(statement, seen)]


def test_C10_the_nearest_word_wins_whoever_says_something(acme):
    places = dict(zip(LEVELS, ("acme", "acme/ml", "acme/ml/alice", "keyuser"), strict=True))
    for words in product((None, [], ["error"]), repeat=4):
        for level, said in zip(LEVELS, words, strict=True):
            function = f"llmgw.{'key' if level == 'key' else 'scope'}_change_v1"
            call(acme, function, "me", places[level], Jsonb({"fallback": said}))
        spoken = [(said, level) for level, said in zip(LEVELS, words, strict=True)]
        heard = [pair for pair in reversed(spoken) if pair[0] is not None]
        assert in_force(acme) == (heard[0] if heard else (None, None)), words


def test_C10_a_key_hears_those_above_it_only(acme):
    say(acme, "acme/ml", ["error"])
    assert in_force(acme, "keyorg") == (None, None)
    assert in_force(acme, "keynone") == (None, None)
    assert in_force(acme, "keyteam") == in_force(acme) == (["error"], "team")
    say(acme, "other", [])
    call(acme, "llmgw.key_move_v1", "me", "keyteam", "other")
    assert in_force(acme, "keyteam") == ([], "org")
    call(acme, "llmgw.scope_move_v1", "me", "acme/ml/alice", "other")
    assert in_force(acme) == ([], "org")
    call(acme, "llmgw.key_move_v1", "me", "keyteam", None)
    assert in_force(acme, "keyteam") == (None, None)


def test_C10_routers_are_told_of_what_is_said_above_a_key(acme):
    assert marked(acme, lambda: say(acme, "acme/ml", ["error"])) == ["keyteam", "keyuser"]
    assert marked(acme, lambda: say(acme, "acme/ml", ["error"])) == []
    assert marked(acme, lambda: say(acme, "acme/ml", [])) == ["keyteam", "keyuser"]
    by_hand = "update llmgw_core.scope set fallback = null where name = 'ml'"
    assert marked(acme, lambda: acme.admin.execute(by_hand)) == ["keyteam", "keyuser"]
    change = ("llmgw.key_change_v1", "me", "keynone", Jsonb({"fallback": []}))
    assert marked(acme, lambda: call(acme, *change)) == ["keynone"]
    assert marked(acme, lambda: call(acme, *change)) == []


@pytest.mark.parametrize("said", ["none", ["maybe"], [None], [["error"]], {}, True, 0, ["Error"]])
def test_C10_what_is_no_list_of_reasons_is_refused_with_the_words(acme, said):
    args = ("me", "acme", Jsonb({"fallback": said}))
    assert "scope acme" in refused(acme, "llmgw.scope_change_v1", *args)
    args = ("me", "keyorg", Jsonb({"fallback": said}))
    assert "no list of reasons" in refused(acme, "llmgw.key_change_v1", *args)
    assert in_force(acme, "keyorg") == (None, None)


def test_C10_the_words_are_the_routers(acme):
    say(acme, "acme", sorted(WORDS))
    assert in_force(acme, "keyorg")[0] == sorted(WORDS)
    args = ("me", "team", "t", "acme", None, ["error", "timeout", "error"])
    call(acme, "llmgw.scope_create_v1", *args)
    assert acme.value("select fallback from llmgw.scopes where name = 't'") == ["error", "timeout"]
    assert "no list" in refused(acme, "llmgw.scope_create_v1", *args[:2], "u", None, None, ["no"])
    for table in ("scope", "api_key"):
        for wrong in ("{maybe}", "{NULL}", "{error,error,error,error,error}"):
            with pytest.raises(psycopg.errors.CheckViolation):
                acme.admin.execute(f"update llmgw_core.{table} set fallback = '{wrong}'")


def test_C10_what_was_said_is_in_the_audit(acme):
    say(acme, "acme/ml", ["error"])
    say(acme, "acme/ml", None)
    said = acme.rows("select action, object, detail from llmgw.audit order by id desc limit 2")
    number = acme.value("select id from llmgw.scopes where path = 'acme/ml'")
    assert [row["detail"] for row in said] == [{"fallback": None}, {"fallback": ["error"]}]
    assert {(row["action"], row["object"]) for row in said} == {("change", f"scope {number}")}
    assert "no scope" in refused(acme, "llmgw.scope_change_v1", "me", "nope",
                                 Jsonb({"fallback": []}), code="LG005")  # fmt: skip
