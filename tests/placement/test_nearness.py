"""Which cards of a node go together: NVLink islands, then NUMA nodes, big groups kept whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.placement import score
from controller.placement.model import Claim
from controller.placement.nearness import closeness, nearest
from tests.placement.made_fleet import GIB, gpu, node, profile, whole


def hgx(taken=(), islands=(0,) * 8, numas=(0, 0, 0, 0, 1, 1, 1, 1)):
    """Eight cards; ``taken`` are held by others."""
    return node(
        gpus=tuple(
            gpu(i, island=islands[i], numa=numas[i], claims=whole(5) if i in taken else ())
            for i in range(8)
        )
    )


def picked(has, count):
    return [card.index for card in nearest(profile(gpus=count), has)]


@pytest.mark.parametrize(
    ("has", "count", "expected"),
    [
        (hgx(), 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (hgx(), 4, [0, 1, 2, 3]),
        (hgx(taken={1}), 4, [4, 5, 6, 7]),
        (hgx(taken={1}), 2, [0, 2]),
        (hgx(taken={1}), 1, [0]),
        (hgx(taken={0, 4}), 4, [1, 2, 3, 5]),
        (hgx(islands=(0, 0, 1, 1, 2, 2, 3, 3)), 2, [0, 1]),
        (hgx(taken={0}, islands=(0, 0, 1, 1, 2, 2, 3, 3)), 2, [2, 3]),
        (hgx(taken={0}, islands=(0, 0, 1, 1, 2, 2, 3, 3)), 1, [1]),
        (hgx(islands=(None,) * 8), 4, [0, 1, 2, 3]),
        (hgx(taken={0}, islands=(None,) * 8), 4, [4, 5, 6, 7]),
        (hgx(islands=(None,) * 8, numas=(None,) * 8), 3, [0, 1, 2]),
        (hgx(taken=set(range(7))), 2, []),
    ],
)
def test_the_right_cards_of_eight(has, count, expected):
    assert picked(has, count) == expected


def test_a_shared_card_in_use_goes_before_an_untouched_one():
    cards = (gpu(0), gpu(1, claims=(Claim(7, 10 * GIB),)), gpu(2, claims=(Claim(8, 30 * GIB),)))
    wants = profile(share=True, gpu_memory_mib=10 * GIB)
    assert [c.index for c in nearest(wants, node(gpus=cards))] == [2]


def test_a_node_where_they_go_together_scores_higher():
    wants = profile(gpus=4)
    near, numa = hgx(), hgx(islands=(None,) * 8)
    apart = hgx(islands=(None,) * 8, numas=(0, 1) * 4, taken={0, 1})
    parts = [score.base(wants, has)["near"] for has in (near, numa, apart)]
    assert parts == [score.NEAR, score.NEAR / 2, 0.0]
    assert closeness([gpu(0)]) == 1.0


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 2) | st.none(), st.integers(0, 1) | st.none()),
        min_size=1, max_size=8,
    ),
    st.integers(1, 8),
)  # fmt: skip
def test_as_many_as_wanted_whenever_there_are_enough(cards, count):
    has = node(
        gpus=tuple(
            gpu(i, island=island, numa=numa, claims=whole(5) if held else ())
            for i, (held, island, numa) in enumerate(cards)
        )
    )
    free = sum(not held for held, _, _ in cards)
    found = picked(has, count)
    assert len(found) == (count if free >= count else 0)
    assert len(set(found)) == len(found)
    assert not any(cards[i][0] for i in found)
