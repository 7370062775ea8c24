"""Which profile, node, cards and port are chosen, and why."""

from __future__ import annotations

from controller.placement.model import Claim
from controller.placement.place import Planner
from tests.placement.made_fleet import GIB, gpu, model, node, profile, replica, shard, whole


def planned(nodes, wanted, *pending, there=(), seed=0):
    planner = Planner(nodes, [wanted], there, seed)
    return [planner.place(wanted, r)[0] for r in (pending or (replica(1, "pending"),))]


def nodes_of(places):
    return [place.shards[0].node_id for place in places]


def test_first_profile_that_fits_wins_and_the_better_one_is_told_of():
    wanted = model("m", 1, profile("h200", gpu_class="H200"), profile("h100", gpu_class="H100"))
    planner = Planner([node()], [wanted], [], 0)
    place, refused = planner.place(wanted, replica(1, "pending"))
    assert place is not None
    assert (place.profile, place.fingerprint) == ("h100", "f-h100")
    assert [(r.profile, r.node, r.code) for r in refused] == [("h200", "n1", "gpu_class")]


def test_a_place_says_all_that_the_shard_needs():
    wanted = model(
        "m", 1, profile(gpus=2, cpus=4.0, memory_mib=1024, pool="a", spec={"args": ["x"]})
    )
    (place,) = planned([node(ports_taken=frozenset({20000}))], wanted)
    (placed,) = place.shards
    assert (placed.node_id, placed.basis, placed.gpus, placed.port) == (
        "n1",
        7,
        ("n1-0", "n1-1"),
        20001,
    )
    assert (placed.cpus, placed.memory_mib, placed.gpu_memory_mib) == (4.0, 1024, None)
    assert (place.pool, place.spec) == ("a", {"args": ["x"]})
    assert place.reason.startswith("on n1 gpu 0, 1 by profile p: ")


def test_after_a_failure_another_port_is_tried():
    """A stranger on a port is known to nobody before an engine wants it (D04)."""
    free = range(20000, 20004)
    tried, port = [], 20000
    for failures in range(1, 30):
        last = shard("failed", id_=failures, port=port)
        again = replica(1, "pending", last, restarts=failures)
        (place,) = planned([node(ports=(20000, 20003))], model(), again, seed=failures)
        assert place.shards[0].port in free
        assert place.shards[0].port != port
        port = place.shards[0].port
        tried.append(port)
    assert set(tried) == set(free)


def test_a_range_of_one_port_is_tried_again_after_a_failure():
    again = replica(1, "pending", shard("failed", port=20000), restarts=2)
    (place,) = planned([node(ports=(20000, 20000))], model(), again)
    assert place.shards[0].port == 20000


def test_lowest_free_healthy_card():
    cards = (gpu(0, claims=whole(9)), gpu(1, healthy=False), gpu(2), gpu(3))
    (place,) = planned([node(gpus=cards)], model())
    assert place.shards[0].gpus == ("n1-2",)


def test_shares_fill_the_card_that_is_shared_already():
    cards = (gpu(0), gpu(1, claims=(Claim(9, 30 * GIB),)), gpu(2))
    wanted = model("m", 3, profile(share=True, gpu_memory_mib=25 * GIB))
    places = planned([node(gpus=cards)], wanted, *(replica(i, "pending") for i in (1, 2, 3)))
    assert [p.shards[0].gpus[0] for p in places] == ["n1-1", "n1-1", "n1-0"]
    assert {p.shards[0].gpu_memory_mib for p in places} == {25 * GIB}


def test_best_fit_keeps_whole_nodes_whole():
    used = node("n2", gpus=(gpu(0, "n2", claims=whole(9)), gpu(1, "n2")), shards_live=1)
    assert nodes_of(planned([node("n1"), used, node("n3")], model())) == ["n2"]


def test_work_without_cards_goes_to_the_smallest_machine_that_does():
    wanted = model("m", 1, profile(gpus=0, cpus=4.0, memory_mib=8 * GIB))
    sizes = [256, 16, 64, 2048]
    nodes = [node(f"n{g}", cards=0, cpus=64.0, memory_mib=g * GIB) for g in sizes]
    for seed in range(5):
        assert nodes_of(planned(nodes, wanted, seed=seed)) == ["n16"]


def test_replicas_of_one_model_spread_over_nodes():
    pending = [replica(i, "pending") for i in (1, 2, 3)]
    assert set(nodes_of(planned([node("n1"), node("n2"), node("n3")], model(), *pending))) == {
        "n1",
        "n2",
        "n3",
    }


def test_live_replicas_count_for_the_spread():
    there = [replica(8, "ready", shard(on="n1"))]
    assert nodes_of(planned([node("n1"), node("n2")], model(), there=there)) == ["n2"]


def test_weights_on_disk_attract_but_do_not_stack_replicas():
    nodes = [node("n1"), node("n2", sources_on_disk=frozenset({"hf:x/m"})), node("n3")]
    places = planned(nodes, model(), replica(1, "pending"), replica(2, "pending"))
    assert nodes_of(places)[0] == "n2"
    assert nodes_of(places)[1] != "n2"
    assert places[0].score["weights"] > 0


def test_work_without_cards_leaves_nodes_with_cards_alone():
    wanted = model("m", 1, profile(gpus=0, cpus=2.0))
    assert nodes_of(planned([node("n1", shards_live=3), node("n2", cards=0)], wanted)) == ["n2"]


def test_after_repeated_failures_another_node_is_tried():
    nodes = [node("n1", sources_on_disk=frozenset({"hf:x/m"})), node("n2")]
    once = replica(1, "pending", shard("failed", "n1"), restarts=1)
    often = replica(1, "pending", shard("failed", "n1"), restarts=3)
    assert nodes_of(planned(nodes, model(), once)) == ["n1"]
    assert nodes_of(planned(nodes, model(), often)) == ["n2"]


def test_cards_of_one_shard_are_of_one_class():
    cards = (gpu(0, class_="A100"), gpu(1), gpu(2), gpu(3, class_="A100"), gpu(4))
    (place,) = planned([node(gpus=cards)], model("m", 1, profile(gpus=2)))
    assert place.shards[0].gpus == ("n1-1", "n1-2")


def test_the_seed_settles_ties_and_nothing_else_does():
    nodes = [node(f"n{i}") for i in range(20)]
    first = [nodes_of(planned(nodes, model(), seed=s))[0] for s in range(10)]
    again = [nodes_of(planned(list(reversed(nodes)), model(), seed=s))[0] for s in range(10)]
    assert first == again
    assert len(set(first)) > 3


def test_a_node_that_reaches_a_shape_left_by_others_is_still_found():
    # n1 moves on from the shape "one card taken" before the second model is judged at all.
    nodes = [node("n1", cards=3), node("n2", cards=3)]
    one, other = model("one", 3, profile()), model("other", 3, profile(cpus=1.0))
    planner = Planner(nodes, [one, other], [], 0)
    places = [planner.place(one, replica(i, "pending", of="one"))[0] for i in range(3)]
    places += [planner.place(other, replica(i, "pending", of="other"))[0] for i in range(3)]
    assert all(places)
    assert planner.place(other, replica(9, "pending", of="other"))[0] is None


def test_no_nodes_and_no_profiles_are_reasons_too():
    wanted = model()
    place, refused = Planner([], [wanted], [], 0).place(wanted, replica(1, "pending"))
    assert place is None
    assert [(r.profile, r.node, r.code) for r in refused] == [("p", None, "no_nodes")]
    bare = model("bare", 1, profile())
    bare = type(bare)(bare.name, bare.source, 1, 1, None, ())
    place, refused = Planner([node()], [bare], [], 0).place(bare, replica(1, "pending", of="bare"))
    assert place is None
    assert [r.code for r in refused] == ["no_profiles"]


def test_digest_follows_codes_and_not_numbers():
    def digest(**facts):
        wanted = model("m", 1, profile(memory_mib=512 * GIB))
        return (
            Planner([node(**facts)], [wanted], [], 0).place(wanted, replica(1, "pending"))[1].digest
        )

    assert digest(memory_claimed_mib=1) == digest(memory_claimed_mib=2 * GIB)
    assert digest() != digest(state="cordoned")


def test_replicas_that_may_not_share_a_node_do_not_within_one_plan():
    fleet = [node("n1", cards=4), node("n2", cards=4)]
    pending = [replica(i, "pending") for i in (1, 2, 3)]
    wanted = model("m", 3, profile(alone_of="m"))
    first, second, third = planned(fleet, wanted, *pending)
    assert sorted(nodes_of([first, second])) == ["n1", "n2"]
    assert third is None
    wanted = model("m", 1, profile(exclude_nodes=frozenset({"n1"})))
    assert nodes_of(planned(fleet, wanted)) == ["n2"]


def test_a_node_that_has_the_engine_is_preferred_to_one_that_must_install_it():
    may = frozenset({"vllm"})
    wanted = model("m", 1, profile(engine_version="0.33.0"), source="hf:a/b")
    has = node("n1", engines={"vllm": ("0.33.0",)}, provisions=may)
    lacks = node("n2", provisions=may, sources_on_disk=frozenset({"hf:a/b"}))
    for nodes in ([has, lacks], [lacks, has]):
        (place,) = planned(nodes, wanted)
        assert place.shards[0].node_id == "n1"
        assert "engine" not in place.score
    (place,) = planned([lacks], wanted)
    assert place.score["engine"] == -45
    planner = Planner([node("n3"), lacks], [wanted], [], 0)
    assert planner.place(wanted, replica(1, "pending"))[0].shards[0].node_id == "n2"


def test_a_version_that_failed_on_one_node_is_placed_on_another():
    may, why = frozenset({"vllm"}), {("vllm", "0.33.0"): "no luck"}
    wanted = model("m", 1, profile(engine_version="0.33.0"))
    bad = node("n1", provisions=may, engine_failures=why)
    planner = Planner([bad], [wanted], [], 0)
    place, refused = planner.place(wanted, replica(1, "pending"))
    assert place is None
    assert [(r.code, r.reason) for r in refused] == [
        ("engine_failed", "the engine could not be installed: need vllm 0.33.0: no luck")
    ]
    (place,) = planned([bad, node("n2", provisions=may)], wanted)
    assert place.shards[0].node_id == "n2"
