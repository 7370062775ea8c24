"""The tree of scopes: kinds, names, moves, deletion, and what routers are told of it."""

from __future__ import annotations

import threading

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sql.fleet import open_fleet
from tests.sql.tenants import call, family, key, refused, scope


def mark(fleet):
    return fleet.value("select pg_snapshot_xmin(pg_current_snapshot())::text")


def changed_since(fleet, watermark):
    statement = "select id from llmgw_core.api_key where changed >= %s::text::xid8 order by id"
    return [row["id"] for row in fleet.rows(statement, watermark)]


@pytest.fixture
def acme(fleet):
    """acme/ml/alice with a key on each level, and other beside."""
    family(fleet, {"keyorg": "acme", "keyteam": "acme/ml", "keyuser": "acme/ml/alice",
                   "keyother": "other", "keynone": None})  # fmt: skip
    return fleet


def test_levels_may_be_left_out_and_are_asked_for_by_path_or_id(fleet):
    org = scope(fleet, "org", "acme", tags={"cost": "7"})
    user = scope(fleet, "user", "bob", "acme")
    alone = scope(fleet, "team", "ml")
    assert scope(fleet, "user", "eve", str(alone))
    rows = fleet.rows("select id, path, parent, tags from llmgw.scopes where id <= %s", alone)
    assert [tuple(row.values()) for row in rows] == [
        (org, "acme", None, {"cost": "7"}),
        (user, "acme/bob", org, {}),
        (alone, "ml", None, {}),
    ]
    key(fleet, scope="acme/bob")
    key(fleet, "abcdeg", scope=str(user))
    assert fleet.value("select keys from llmgw.scopes where path = 'acme/bob'") == 2


@pytest.mark.parametrize(
    ("kind", "parent"),
    [("org", "acme"), ("org", "acme/ml"), ("team", "acme/ml"), ("team", "acme/ml/alice"),
     ("user", "acme/ml/alice")],
)  # fmt: skip
def test_a_parent_is_of_a_higher_kind(acme, kind, parent):
    said = refused(acme, "llmgw.scope_create_v1", "me", kind, "new", parent, None)
    assert "org > team > user" in said


@pytest.mark.parametrize("name", ["", " x", "a/b", "12", "a\nb", "x" * 201])
def test_names_that_could_be_read_as_something_else_are_refused(fleet, name):
    said = refused(fleet, "llmgw.scope_create_v1", "me", "org", name, None, None)
    assert "a name is" in said


def test_names_are_unique_within_the_parent_among_the_living(acme):
    again = ("me", "team", "ml", "acme", None)
    assert "already in acme" in refused(acme, "llmgw.scope_create_v1", *again)
    scope(acme, "team", "ml", "other")
    assert "taken" in refused(acme, "llmgw.scope_move_v1", "me", "other/ml", "acme")
    scope(acme, "team", "mm", "acme")
    assert "taken" in refused(acme, "llmgw.scope_rename_v1", "me", "acme/mm", "ml")
    call(acme, "llmgw.scope_delete_v1", "me", "acme/ml")
    call(acme, "llmgw.scope_move_v1", "me", "other/ml", "acme")
    assert len(acme.rows("select 1 from llmgw.scopes where path = 'acme/ml'")) == 2


def test_nothing_comes_into_what_is_deleted(acme):
    number = acme.value("select id from llmgw.scopes where path = 'acme/ml'")
    call(acme, "llmgw.scope_delete_v1", "me", "acme")
    for gone in ("acme", "acme/ml", str(number)):
        tried = [
            refused(acme, "llmgw.scope_create_v1", "me", "user", "x", gone, None, code="LG005"),
            refused(acme, "llmgw.key_move_v1", "me", "keyother", gone, code="LG005"),
            refused(acme, "llmgw.scope_move_v1", "me", "other", gone, code="LG005"),
        ]
        assert tried == [f"there is no scope {gone}"] * 3
    with pytest.raises(psycopg.Error, match="deleted"):
        acme.admin.execute(
            "insert into llmgw_core.scope (kind, name, parent, created_by)"
            " values ('user', 'x', %s, 'me')",
            (number,),
        )


def test_deleting_keeps_history_and_revokes_what_is_below(acme):
    done = call(acme, "llmgw.scope_delete_v1", "me", "acme")
    assert (done["scopes"], done["keys"]) == (3, 3)
    states = acme.rows("select id, state, scope from llmgw.keys order by id")
    assert [tuple(row.values()) for row in states] == [
        ("keynone", "active", None),
        ("keyorg", "revoked", "acme"),
        ("keyother", "active", "other"),
        ("keyteam", "revoked", "acme/ml"),
        ("keyuser", "revoked", "acme/ml/alice"),
    ]
    assert acme.value("select count(*) from llmgw.scopes where deleted_at is not null") == 3
    said = acme.rows("select action, detail from llmgw.audit order by id desc limit 1")[0]
    assert (said["action"], said["detail"]["keys"]) == ("delete", 3)
    with pytest.raises(psycopg.Error, match="history"):
        acme.admin.execute("delete from llmgw_core.scope where name = 'acme'")


def test_routers_are_told_of_the_keys_below_a_move_and_of_no_others(acme):
    seen = mark(acme)
    call(acme, "llmgw.scope_move_v1", "me", "acme/ml", "other")
    assert changed_since(acme, seen) == ["keyteam", "keyuser"]
    seen = mark(acme)
    call(acme, "llmgw.scope_rename_v1", "me", "other", "another")
    assert changed_since(acme, seen) == []
    acme.admin.execute("update llmgw_core.scope set deleted_at = now() where name = 'alice'")
    assert changed_since(acme, seen) == ["keyuser"]
    assert acme.value("select path from llmgw.scopes where name = 'alice'") == "another/ml/alice"


KINDS = ("org", "team", "user")
TREE = st.lists(
    st.tuples(st.sampled_from(["create", "move"]), st.integers(0, 2), st.integers(0, 9),
              st.integers(-1, 9)), max_size=25,
)  # fmt: skip


def test_no_sequence_of_changes_makes_a_circle(database):
    with open_fleet(database) as fleet:

        @given(TREE)
        def walk(steps):
            fleet.admin.execute("truncate llmgw_core.scope cascade")
            made = []
            for number, (what, kind, which, parent) in enumerate(steps):
                up = str(made[parent % len(made)]) if made and parent >= 0 else None
                try:
                    if what == "create":
                        made.append(scope(fleet, KINDS[kind], f"s{number}", up))
                    elif made:
                        moved = str(made[which % len(made)])
                        call(fleet, "llmgw.scope_move_v1", "me", moved, up)
                except psycopg.Error as error:
                    if error.sqlstate != "LG003":
                        raise
            rows = fleet.rows("select chain, kind from llmgw_core.scope_line order by id")
            assert len(rows) == len(made)
            above = dict(zip(made, rows, strict=True))
            for row in rows:
                ranks = [KINDS.index(above[one]["kind"]) for one in row["chain"]]
                assert ranks == sorted(set(ranks))

        walk()


def test_a_key_made_while_its_scope_is_deleted_does_not_outlive_it(acme, database):
    """Whichever is first: the key is revoked with the scope, or refused."""
    with database.connect(database.controller_url) as other:
        other.autocommit = False
        other.execute("select llmgw.key_move_v1('me', 'keynone', 'acme/ml')")
        done = threading.Event()

        def delete():
            call(acme, "llmgw.scope_delete_v1", "me", "acme")
            done.set()

        thread = threading.Thread(target=delete)
        thread.start()
        waits = "select count(*) as n from pg_locks where locktype = 'advisory' and not granted"
        while not acme.admin.execute(waits).fetchone()["n"]:
            assert thread.is_alive()
        assert not done.is_set()
        other.commit()
        thread.join(60)
    assert acme.value("select state from llmgw.keys where id = 'keynone'") == "revoked"
