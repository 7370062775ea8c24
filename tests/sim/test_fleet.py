"""Fleet files: what they say and what they refuse."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ops.simulation.fleet import Fleet, uniform


def test_nodes_have_names_and_addresses_of_their_own():
    nodes = uniform(1200, 8).nodes()
    assert len({node.name for node in nodes}) == len({node.address for node in nodes}) == 1200
    assert nodes[7].name == "gpu-0007"
    assert [card.index for card in nodes[7].cards()] == list(range(8))


def test_a_typo_is_named():
    with pytest.raises(ValidationError, match="cpuss"):
        Fleet.model_validate(yaml.safe_load("groups: [{name: a, count: 1, cpuss: 3}]"))


def test_two_nodes_of_one_name_are_refused():
    with pytest.raises(ValueError, match="one name"):
        Fleet.model_validate({"groups": [{"name": "a", "count": 2}]}).nodes()


@given(st.integers(1, 4000))
def test_addresses_are_valid_loopback(count):
    last = uniform(count, 1).nodes()[-1].address
    parts = [int(part) for part in last.split(".")]
    assert parts[0] == 127
    assert all(0 <= part <= 255 for part in parts)
    assert last != "127.0.0.1"
