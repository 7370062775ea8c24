"""Just-in-time compilation made each look at a view take seconds on a stock server."""

from __future__ import annotations

import psycopg

from sql import migrate

JIT = "select evidence, remedy from llmgw.doctor where node = 'database' and name = 'jit'"


def test_an_upgraded_database_compiles_no_queries(empty_database):
    migrate.upgrade(empty_database)
    with psycopg.connect(empty_database) as connection:
        assert connection.execute("show jit").fetchone() == ("off",)


def test_the_doctor_says_what_to_do_where_the_upgrade_could_not(fleet):
    assert fleet.rows(JIT) == []
    fleet.admin.execute("set jit = on")
    if fleet.value("select pg_jit_available()"):  # else the server was built without
        [row] = fleet.rows(JIT)
        assert "set jit = off" in row["remedy"]
    else:
        assert fleet.rows(JIT) == []
