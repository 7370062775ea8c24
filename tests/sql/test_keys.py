"""Keys in the database: rotation with grace, IP lists, tags, and what changes are told."""

from __future__ import annotations

import psycopg
import pytest

from tests.sql.fleet import digest
from tests.sql.tenants import call, key, refused


def rotate(fleet, secret, grace_s, identity="abcdef"):
    return call(fleet, "llmgw.key_rotate_v1", "me", identity, digest(secret), grace_s)


def refuse_rotation(fleet, identity="abcdef", code="LG003"):
    args = ("me", identity, digest("more"), 3600.0)
    return refused(fleet, "llmgw.key_rotate_v1", *args, code=code)


def olds(fleet):
    rows = fleet.rows("select hash, until from llmgw_core.api_key_old order by until")
    return [(bytes(row["hash"]), row["until"]) for row in rows]


def test_a_key_carries_networks_and_tags(fleet):
    key(fleet, ips=["10.0.0.0/8", "2001:db8::/32", "192.0.2.7"], tags={"app": "chat"})
    [row] = fleet.rows("select ips, tags, scope, used_at, old_until from llmgw.keys")
    assert row["ips"] == ["10.0.0.0/8", "2001:db8::/32", "192.0.2.7/32"]
    assert (row["tags"], row["scope"], row["used_at"]) == ({"app": "chat"}, None, None)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("ips", ["10.0.0.1/8"], "10.0.0.1/8 is no network"),
        ("ips", ["nonsense"], "nonsense is no network"),
        ("ips", [f"10.0.0.{n}" for n in range(101)], "at most 100"),
        ("tags", [1], "tags an object"),
        ("tags", {"x": "y" * 5000}, "4096"),
        ("name", "", "a name is"),
    ],
)
def test_what_a_key_cannot_carry_is_refused_with_the_reason(fleet, field, value, said):
    with pytest.raises(psycopg.Error, match=said) as caught:
        key(fleet, **{field: value})
    assert caught.value.sqlstate == "LG003"
    assert fleet.value("select count(*) from llmgw.keys") == 0


def test_B17_a_second_rotation_neither_prolongs_nor_revives_the_first(fleet):
    key(fleet)
    first = rotate(fleet, "two", 60)
    second = rotate(fleet, "three", 3600)
    assert olds(fleet) == [(digest("abcdef"), first), (digest("two"), second)]
    third = rotate(fleet, "four", 30)  # from then on only the new one is good
    assert [until for _, until in olds(fleet)] == [third] * 3
    rotate(fleet, "five", 0)
    assert fleet.value("select count(*) from llmgw_core.api_key_old where until > now()") == 0
    assert fleet.value("select old_until from llmgw.keys") is None


def test_rotations_without_end_are_refused(fleet):
    key(fleet)
    for number in range(10):
        rotate(fleet, f"s{number}", 3600)
    assert "10 times" in refuse_rotation(fleet)
    assert fleet.value("select count(*) from llmgw_core.api_key where hash = %s", digest("s9")) == 1
    rotate(fleet, "more", 0)


def test_only_a_living_key_can_be_rotated(fleet):
    key(fleet)
    key(fleet, "gone00", ttl=0.0)
    assert "gone00 is expired" in refuse_rotation(fleet, "gone00")
    call(fleet, "llmgw.key_revoke_v1", "me", "abcdef")
    assert "abcdef is revoked" in refuse_rotation(fleet)
    assert "no key nope" in refuse_rotation(fleet, "nope", "LG005")


def test_every_change_of_a_key_is_told_and_a_second_look_is_not(fleet):
    key(fleet)

    def told(statement):
        seen = fleet.value("select pg_snapshot_xmin(pg_current_snapshot())::text")
        fleet.admin.execute(statement)
        changed = "select count(*) from llmgw_core.api_key where changed >= %s::text::xid8"
        return fleet.value(changed, seen) == 1

    assert told("update llmgw_core.api_key set models = '{m}'")
    assert not told("update llmgw_core.api_key set models = '{m}'")
    assert told("update llmgw_core.api_key set revoked_at = now()")


def test_a_key_that_may_be_in_use_is_not_deleted(fleet):
    key(fleet)
    with pytest.raises(psycopg.Error, match="revoke it"):
        fleet.admin.execute("delete from llmgw_core.api_key")
    fleet.admin.execute("update llmgw_core.api_key set revoked_at = now() - interval '2 h'")
    fleet.admin.execute("delete from llmgw_core.api_key")


def test_use_is_noted_and_what_is_unknown_is_left_out(fleet):
    key(fleet)
    call(fleet, "llmgw_core.keys_used_v1", ["abcdef", "nope"])
    used = fleet.rows("select key_id, used_at from llmgw_core.api_key_use")
    assert [row["key_id"] for row in used] == ["abcdef"]
    call(fleet, "llmgw_core.keys_used_v1", ["abcdef"])
    assert fleet.rows("select key_id, used_at from llmgw_core.api_key_use") == used


def test_secrets_are_forgotten_a_day_after_their_grace(fleet):
    key(fleet)
    rotate(fleet, "two", 60)
    rotate(fleet, "three", 60)
    past = "update llmgw_core.api_key_old set until = now() - interval '25 h' where hash = %s"
    fleet.admin.execute(past, (digest("two"),))
    fleet.admin.execute("select llmgw_core.keys_keep()")
    assert [secret for secret, _ in olds(fleet)] == [digest("abcdef")]


def test_the_audit_says_from_where(fleet, database):
    key(fleet)
    with database.connect(database.controller_url) as api, api.transaction():
        api.execute("select set_config('llmgw.source', '203.0.113.9', true)")
        api.execute("select llmgw.key_revoke_v1('ada', 'abcdef')")
    rows = fleet.rows("select actor, action, object, source from llmgw.audit order by id desc")
    assert [tuple(row.values()) for row in rows] == [
        ("ada", "revoke", "key abcdef", "203.0.113.9"),
        ("me", "create", "key abcdef", "127.0.0.1"),
    ]
