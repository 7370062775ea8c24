"""Every named query parses and plans against the schema, with its caller's rights."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from sql import queries

FILES = sorted(
    entry.name.removesuffix(".sql") for entry in (resources.files("sql") / "queries").iterdir()
)
ROOT = Path(__file__).parents[2]
EVERY = [(file, name) for file in FILES for name in queries(file)]


@pytest.mark.parametrize("file", FILES)
def test_every_query_says_what_it_is_for(file):
    for name, text in queries(file).items():
        assert text.startswith("-- "), f"{file}.{name} has no comment line"


def test_every_query_plans_with_its_callers_rights(database):
    agent, controller = (
        database.connect(database.agent_url),
        database.connect(database.controller_url),
    )
    with agent, controller:
        generic = controller.info.server_version >= 160000
        for file, name in EVERY:
            connection = agent if file == "agent" else controller
            text = queries(file)[name]
            # The text goes as it is, without arguments, so that $1 reaches the server.
            connection.execute(f"prepare checked as {text}".encode())
            if generic:
                connection.execute(f"explain (generic_plan) {text}".encode())
            connection.execute("deallocate checked")


def test_code_asks_only_for_queries_that_there_are():
    asked = re.compile(r'queries\("(\w+)"\)\["(\w+)"\]')
    code = [p for top in ("controller", "agent", "ops", "sql") for p in (ROOT / top).rglob("*.py")]
    found = {(str(p), pair) for p in code for pair in asked.findall(p.read_text())}
    assert len(found) > 20
    assert [one for one in sorted(found) if one[1] not in EVERY] == []


def test_unknown_and_double_names_are_refused():
    with pytest.raises(FileNotFoundError):
        queries("nobody")


def test_nothing_leaves_state_in_a_session():
    """The pool resets nothing between two calls: a setting or lock of a session would stay."""
    texts = [*(ROOT / "sql/queries").glob("*.sql"), *(ROOT / "sql/functions").glob("*.sql")]
    state = re.compile(
        r"^\s*(set\s+(session|role|time|search_path)|listen\s|declare\s+\w+\s+cursor\s+with)"
        r"|set_config\([^)]*false\)|pg_(try_)?advisory_lock\(|create\s+temp",
        re.IGNORECASE | re.MULTILINE,
    )
    found = {path.name: match[0] for path in texts if (match := state.search(path.read_text()))}
    assert found == {}
