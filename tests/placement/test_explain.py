"""Refusals as people read them."""

from __future__ import annotations

from dataclasses import replace

from controller.placement import explain
from controller.placement.model import Attempt
from controller.placement.place import Planner
from tests.placement.made_fleet import GIB, gpu, model, node, profile, replica, whole


def attempt(nodes, *profiles):
    wanted = model("deepseek-v3", 1, *profiles)
    place, refused = Planner(nodes, [wanted], [], 0).place(wanted, replica(1, "pending"))
    return Attempt(wanted.name, place is not None, refused)


def test_the_sentence_of_a_model_names_nodes_numbers_and_the_next_step():
    nodes = [node(f"n{i}", memory_mib=(80 - i) * GIB) for i in range(12)]
    nodes += [node(f"c{i}", state="cordoned") for i in range(2)]
    assert explain.sentence(attempt(nodes, profile(memory_mib=160 * GIB))) == (
        "replica of deepseek-v3 not placed: 12 of 14 nodes lack memory "
        "(need 160 GiB, best 80 GiB of 80 GiB); see llmgwctl explain-placement deepseek-v3"
    )


def test_what_a_node_is_counts_less_than_what_it_has_left():
    nodes = [node(f"cpu{i}", cards=0) for i in range(9)]
    nodes.append(node("g1", gpus=(gpu(0, claims=whole(1)),)))
    assert explain.main_reason(attempt(nodes, profile())) == (
        "1 of 10 nodes have their cards taken (need 1 card, best 0 of 1 card not taken)"
    )


def test_what_every_node_lacks_by_nature_is_the_news():
    nodes = [node("g1", gpus=(gpu(0, claims=whole(1)), gpu(1))), node("g2", 2)]
    assert explain.main_reason(attempt(nodes, profile(gpus=8))).startswith(
        "2 of 2 nodes have too few cards (need 8 cards"
    )


def test_the_table_has_one_row_for_each_refusal():
    found = attempt(
        [node(state="draining", state_reason="kernel")], profile(pool="a", gpu_class="B200")
    )
    assert explain.table(found.refusals) == [
        ("p", "a", "n1", "the node is being drained: kernel"),
        ("p", "a", "n1", "no card of the wanted class: need B200, have H100"),
    ]


def test_placed_attempts():
    placed = attempt([node()], profile())
    assert explain.sentence(placed) == "replica of deepseek-v3 placed, nothing rejected"
    assert explain.main_reason(placed) is None
    along = attempt([node()], profile("a", gpu_class="B200"), profile("b"))
    assert explain.sentence(along).endswith("placed, 1 preferred profile rejected along the way")


def test_no_nodes():
    assert explain.main_reason(attempt([], profile())) == "no node has registered"


def test_unknown_codes_from_newer_rows_are_shown_as_they_are():
    found = attempt([node(state="lost")], profile())
    newer = [replace(r, code="fabric_split") for r in found.refusals]
    assert "are refused (fabric_split)" in explain.causes(newer)[0].sentence
