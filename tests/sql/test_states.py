"""One state table, written thrice: sql/states.py, llmgw_core.transition, sql/README.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sql.states import REPLICA, SHARD
from tests.sql.fleet import refusal_of

README = Path(__file__).parents[2] / "sql" / "README.md"
TABLES = {"replica": REPLICA, "shard": SHARD}
MOVE = re.compile(r"^\s*(\w+) --> (\w+)\s*$", re.MULTILINE)


def moves_in_python(kind):
    return {(start, end) for start, ends in TABLES[kind].items() for end in ends}


def diagram(kind):
    """Moves drawn in the README; a move of the group ``live`` is one of each state inside it."""
    blocks = re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", README.read_text(), re.DOTALL)
    found = [block for block in blocks if f"%% {kind}" in block]
    assert len(found) == 1, f"sql/README.md needs one state diagram marked '%% {kind}'"
    inner, _, outer = found[0].rpartition("}")
    moves = set(MOVE.findall(inner))
    live = {state for move in moves for state in move}
    for start, end in MOVE.findall(outer):
        moves |= {(state, end) for state in (live if start == "live" else {start})}
    return moves


@pytest.mark.parametrize("kind", TABLES)
def test_python_sql_and_readme_have_the_same_moves(kind, fleet):
    rows = fleet.rows(
        "select from_state, to_state from llmgw_core.transition where kind = %s", kind
    )
    assert {(row["from_state"], row["to_state"]) for row in rows} == moves_in_python(kind)
    assert diagram(kind) == moves_in_python(kind)


@pytest.mark.parametrize("kind", TABLES)
def test_the_check_constraint_knows_the_same_states(kind, fleet):
    rule = fleet.value(
        "select string_agg(pg_get_constraintdef(oid), ' ') from pg_constraint"
        " where conrelid = %s::regclass and contype = 'c' and pg_get_constraintdef(oid) ~ 'state'",
        f"llmgw_core.{kind}",
    )
    states = set(re.findall(r"'(\w+)'::text", rule)) - {"running"}
    assert states == set(TABLES[kind])


@pytest.mark.parametrize("kind", TABLES)
def test_triggers_let_legal_moves_pass_and_refuse_all_others_even_the_owner(kind, fleet):
    fleet.model("m")
    node = fleet.node("n1")
    fleet.running("m", node)
    table = TABLES[kind]
    admin = fleet.admin
    for start in table:
        for end in table:
            # A direct write of a start state needs the trigger off; the move itself has it on.
            with admin.transaction(force_rollback=True):
                admin.execute("set local session_replication_role = replica")
                admin.execute(f"update llmgw_core.{kind} set state = %s", (start,))
                admin.execute("set local session_replication_role = origin")
                legal = start == end or end in table[start]
                state = refusal_of(admin, f"update llmgw_core.{kind} set state = %s", (end,))
                assert state == (None if legal else "LG002"), f"{kind} {start} -> {end}"
