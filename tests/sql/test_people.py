"""People in the database: who may log in, how often they may fail, and for how long they stay."""

from __future__ import annotations

import pytest

from tests.sql.fleet import digest
from tests.sql.tenants import call, refused

HASH = "$argon2id$v=19$m=8,t=1,p=1$c2FsdA$aGFzaA"


@pytest.fixture
def ada(fleet):
    call(fleet, "llmgw.user_create_v1", "me", "ada", HASH, True, None)
    return fleet


def begin(fleet, name="ada", source="192.0.2.1"):
    statement = "select * from llmgw_core.login_begin_v1(%s, %s)"
    return tuple(fleet.controller.execute(statement, (name, source)).fetchone().values())


def end(fleet, person, token="t", source="192.0.2.1"):
    return call(fleet, "llmgw_core.login_end_v1", person, source, digest(token))


def find(fleet, token="t"):
    statement = "select name, admin from llmgw_core.session_find_v1(%s)"
    rows = fleet.controller.execute(statement, (digest(token),)).fetchall()
    return [tuple(row.values()) for row in rows]


def test_failures_are_counted_before_the_password_is_looked_at(ada):
    for _ in range(10):
        person, known, wait_s = begin(ada)
        assert (known, wait_s) == (HASH, None)
    person, known, wait_s = begin(ada)
    assert (person, known) == (None, None)
    assert 890 < wait_s <= 900
    # From elsewhere the owner gets in; so does another name from here.
    assert begin(ada, source="192.0.2.2")[1] == HASH
    assert begin(ada, "bob")[1:] == (None, None)


def test_one_address_and_one_name_have_bounds_of_their_own(ada):
    for number in range(50):
        assert begin(ada, f"name{number}")[2] is None
    assert begin(ada, "onemore")[2] > 0
    ada.admin.execute("delete from llmgw_core.login_failure")
    for number in range(200):
        assert begin(ada, source=f"10.0.{number}.1")[2] is None
    assert begin(ada, source="10.1.0.1")[2] > 0


def test_success_forgets_its_failures_and_time_the_others(ada):
    for _ in range(9):
        person, _, _ = begin(ada)
    end(ada, person)
    assert ada.value("select max(failures) from llmgw_core.login_failure") == 8
    left = "select count(*) from llmgw_core.login_failure where who = 'user ada from 192.0.2.1'"
    assert ada.value(left) == 0
    for _ in range(11):
        begin(ada)
    assert begin(ada)[2] > 0
    ada.admin.execute("update llmgw_core.login_failure set since = since - interval '901 s'")
    assert begin(ada)[2] is None


def test_sessions_end_by_time_by_idleness_and_with_the_password(ada):
    person, _, _ = begin(ada)
    end(ada, person)
    assert find(ada) == [("ada", True)]
    assert find(ada, "other") == []
    ada.admin.execute("update llmgw_core.session set seen_at = now() - interval '61 min'")
    assert find(ada) == []
    end(ada, person, "two")
    ada.admin.execute("update llmgw_core.session set expires_at = now()")
    assert find(ada, "two") == []
    end(ada, person, "three")
    call(ada, "llmgw.user_password_v1", "me", "ada", HASH)
    assert find(ada, "three") == []
    end(ada, person, "four")
    call(ada, "llmgw_core.session_end_v1", digest("four"))
    assert find(ada, "four") == []
    end(ada, person, "five")
    call(ada, "llmgw.user_remove_v1", "me", "ada")
    assert find(ada, "five") == []


def test_use_of_a_session_is_written_once_a_minute(ada):
    person, _, _ = begin(ada)
    end(ada, person)
    seen = ada.value("select seen_at from llmgw_core.session")
    find(ada)
    assert ada.value("select seen_at from llmgw_core.session") == seen
    ada.admin.execute("update llmgw_core.session set seen_at = seen_at - interval '2 min'")
    assert find(ada) == [("ada", True)]
    assert ada.value("select seen_at from llmgw_core.session") > seen


def test_housekeeping_forgets_what_is_over(ada):
    person, _, _ = begin(ada)
    end(ada, person)
    begin(ada, "bob")
    ada.admin.execute("select llmgw_core.logins_keep()")
    assert ada.value("select count(*) from llmgw_core.session") == 1
    ada.admin.execute("update llmgw_core.session set seen_at = now() - interval '2 h'")
    ada.admin.execute("update llmgw_core.login_failure set since = now() - interval '2 h'")
    ada.admin.execute("select llmgw_core.logins_keep()")
    assert ada.value("select count(*) from llmgw_core.session") == 0
    assert ada.value("select count(*) from llmgw_core.login_failure") == 0


@pytest.mark.parametrize("name", ["", "Ada", "a b", "-a", "x" * 101, "a\nb"])
def test_names_are_plain(fleet, name):
    said = refused(fleet, "llmgw.user_create_v1", "me", name, HASH, True, None)
    assert "small letters" in said


def test_a_name_is_taken_once(ada):
    assert "already" in refused(ada, "llmgw.user_create_v1", "me", "ada", HASH, True, None)
