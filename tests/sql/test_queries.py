"""Every named query parses and plans against the schema, with its caller's rights."""

from __future__ import annotations

from importlib import resources

import pytest

from sql import queries

FILES = sorted(
    entry.name.removesuffix(".sql") for entry in (resources.files("sql") / "queries").iterdir()
)
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


def test_unknown_and_double_names_are_refused():
    with pytest.raises(FileNotFoundError):
        queries("nobody")
