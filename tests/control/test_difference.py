"""What differs between two documents of the catalog."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.catalog.difference import HIDDEN, Difference, differences

PROFILE = {"name": "p", "gpus": 1, "env": {"A": "1", "TOKEN": "old"}}


def test_values_of_the_environment_are_not_told():
    now = PROFILE | {"env": {"B": "2", "TOKEN": "new"}}
    found = differences({"profiles": [PROFILE]}, {"profiles": [now]})
    assert found == (
        Difference("profiles.p.env.A", HIDDEN, None),
        Difference("profiles.p.env.B", None, HIDDEN),
        Difference("profiles.p.env.TOKEN", HIDDEN, HIDDEN),
    )


profiles = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from("pqr"),
            "gpus": st.integers(0, 1),
            "env": st.dictionaries(st.sampled_from("AB"), st.sampled_from("12")),
        }
    ),
    max_size=3,
    unique_by=lambda profile: profile["name"],
)
documents = st.fixed_dictionaries({"min_replicas": st.integers(0, 2), "profiles": profiles})


@given(documents, documents)
def test_something_is_told_exactly_when_something_differs(was, now):
    assert bool(differences(was, now)) == (was != now)
