"""What-if: the real planner on a changed snapshot, round after round."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.reconcile.added import AddNodes
from controller.reconcile.what_if import Change, NotThere, what_if
from tests.placement.made_fleet import GIB, model, node, profile
from tests.placement.simulated import Fleet


def settled(wanted=2, nodes=3, cards=1, **more):
    made = {f"n{i}": node(f"n{i}", cards) for i in range(1, nodes + 1)}
    one = Fleet(made, {"m": model("m", wanted)} | more)
    one.settle()
    return one


def ask(one, **change):
    return what_if(one.snapshot(), Change(**change), one.now, 0)


def at(name, *gpus):
    return [{"node": name, "gpus": list(gpus)}]


NOTHING = ("moves", "placed", "stopped", "unplaced", "drained", "emptied", "assumptions")


def test_no_change_to_a_settled_fleet_is_nothing():
    found = ask(settled())
    assert {name: found[name] for name in NOTHING} == {name: [] for name in NOTHING}
    assert (found["settled"], found["rounds"], found["under_way"]) == (True, 0, 0)
    assert found["gpus"] == [
        {"class": "H100", "total": 3, "free": 1, "total_after": 3, "free_after": 1}
    ]


def test_a_drain_moves_to_the_free_node():
    one = settled(1, nodes=2)
    (old,) = one.nodes_of()
    (other,) = {"n1", "n2"} - {old}
    found = ask(one, drain=[old])
    assert found["moves"] == [
        {"model": "m", "replica": 1, "profile": "p", "from": at(old, 0), "to": at(other, 0)}
    ]
    assert found["drained"] == [{"node": old, "left": []}]
    assert (found["emptied"], found["unplaced"], found["settled"]) == ([old], [], True)


def test_a_drain_without_room_tells_who_stays_and_why():
    one = settled(2, nodes=2)
    found = ask(one, drain=["n1"])
    (left,) = (d["left"] for d in found["drained"])
    assert len(left) == 1
    (waits,) = found["unplaced"]
    assert (waits["model"], waits["replicas"], waits["before"]) == ("m", 1, 0)
    assert {c["code"] for c in waits["causes"]} == {"node_draining", "gpu_taken"}
    assert "2 of 2 nodes have their cards taken" in waits["reason"]
    assert found["moves"] == found["stopped"] == []


def test_with_new_nodes_the_same_drain_works():
    one = settled(2, nodes=2)
    found = ask(one, drain=["n1"], add=[AddNodes(1, 1, "H100")])
    assert [m["to"] for m in found["moves"]] == [at("new-h100-1", 0)]
    assert found["unplaced"] == []
    assert found["assumptions"] == ["1 x 1 H100: each as n2 is, with nothing on it"] or (
        found["assumptions"] == ["1 x 1 H100: each as n1 is, with nothing on it"]
    )


def test_a_node_taken_out_has_its_replicas_moved_or_stopped():
    one = settled(2, nodes=3)
    first, second = one.nodes_of()
    (free,) = {"n1", "n2", "n3"} - {first, second}
    found = ask(one, remove=[first])
    assert [(m["from"], m["to"]) for m in found["moves"]] == [(at(first, 0), at(free, 0))]
    found = ask(one, remove=[first, second])
    assert len(found["moves"]) == 1
    assert len(found["stopped"]) == 1
    assert found["unplaced"][0]["replicas"] == 1
    assert found["gpus"][0]["total_after"] == 1
    everything = ask(one, remove=["n1", "n2", "n3"])
    assert everything["unplaced"][0]["reason"] == "no node has registered"


def test_many_nodes_taken_out_at_once_are_no_silence():
    """The guard against silent nodes believes an operator."""
    one = settled(5, nodes=10)
    gone = one.nodes_of()
    found = ask(one, remove=gone)
    assert len(found["moves"]) == 5
    assert found["notes"] == []


def test_scale_up_places_what_fits_and_counts_what_does_not():
    found = ask(settled(1, nodes=2), scale={"m": 4})
    assert len(found["placed"]) == 1
    assert found["unplaced"][0]["replicas"] == 2
    assert found["gpus"][0]["free_after"] == 0


def test_scale_down_frees():
    found = ask(settled(3, nodes=3), scale={"m": 1})
    assert len(found["stopped"]) == 2
    assert len(found["emptied"]) == 2
    assert found["gpus"][0]["free_after"] == 2


def test_a_new_model_and_one_on_demand():
    new = model("new", 2, profile("p", gpus=1))
    found = ask(settled(1, nodes=3), models=[new])
    assert [p["model"] for p in found["placed"]] == ["new", "new"]
    lazy = replace(new, min_replicas=0)
    found = ask(settled(1, nodes=3), models=[lazy])
    assert [p["model"] for p in found["placed"]] == ["new"]
    assert found["assumptions"] == ["model new is on demand: shown as if somebody asked for it"]


def test_a_replica_that_is_on_its_way_is_told_as_under_way():
    one = settled(1, nodes=2)
    one.models["m"] = model("m", 2)
    found = ask(one)
    assert found["under_way"] == 1
    assert len(found["placed"]) == 1


def test_new_nodes_of_a_class_that_nobody_has_are_assumptions():
    wanted = model("big", 1, profile("p", gpus=8, gpu_class="B300", gpu_memory_mib=200 * GIB))
    one = settled(1, nodes=1, big=wanted)
    unknown = ask(one, add=[AddNodes(1, 8, "B300")])
    (waits,) = unknown["unplaced"]
    assert "gpu_memory_unknown" in {c["code"] for c in waits["causes"]}
    assert len(unknown["assumptions"]) == 2
    known = ask(one, add=[AddNodes(1, 8, "B300", 288 * GIB)])
    assert [p["at"] for p in known["placed"]] == [at("new-b300-1", *range(8))]
    assert "every engine of the catalog" in known["assumptions"][0]


def test_more_cards_than_the_pattern_has():
    one = settled(1, nodes=1, big=model("big", 1, profile("p", gpus=4)))
    found = ask(one, add=[AddNodes(2, 4, "H100")])
    assert [p["at"] for p in found["placed"]] == [at("new-h100-1", 0, 1, 2, 3)] or (
        [p["at"] for p in found["placed"]] == [at("new-h100-2", 0, 1, 2, 3)]
    )


def test_new_racks_are_domains_of_their_own():
    joined = {"nvlink_domain": "rack.0", "imex_ready": True}
    rack = {f"t{i}": node(f"t{i}", 4, **joined) for i in range(2)}
    gang = model("g", 1, profile("p", gpus=4, shards=4, fabric="nvlink-domain"))
    one = Fleet(rack, {"g": gang})
    found = ask(one, add=[AddNodes(2, 4, "H100"), AddNodes(4, 4, "H100")])
    assert sum("new NVLink domain" in told for told in found["assumptions"]) == 2
    (placed,) = found["placed"]
    names = [part["node"] for part in placed["at"]]
    assert names == [f"new-h100-{i}" for i in sorted(int(n.rpartition("-")[2]) for n in names)]
    assert {"new-h100-1", "new-h100-2"}.isdisjoint(names)


def test_unknown_names_are_told_with_the_known_ones():
    for change, kind in (({"remove": ["x"]}, "node"), ({"drain": ["x"]}, "node"),
                         ({"scale": {"x": 1}}, "model")):  # fmt: skip
        with pytest.raises(NotThere) as refused:
            ask(settled(), **change)
        assert (refused.value.kind, refused.value.name) == (kind, "x")


def test_a_silent_node_cannot_be_drained_and_that_is_told():
    one = settled(1, nodes=2)
    one.states["n2"] = "unreachable"
    assert ask(one, drain=["n2"])["assumptions"] == [
        "node n2 is unreachable: nobody there does what a drain asks"
    ]


def test_enough_ends_it_early_and_says_so():
    one = settled(1, nodes=2)
    found = what_if(
        one.snapshot(), Change(scale={"m": 2}), one.now, 0, enough=iter([False, True]).__next__
    )
    assert (found["settled"], found["rounds"]) == (False, 1)


def test_shared_cards_and_host_memory_come_free():
    small = profile("s", gpus=1, share=True, gpu_memory_mib=30 * GIB, cpus=10.0)
    one = Fleet({"n1": node("n1", 1), "n2": node("n2", 1)}, {"m": model("m", 2, small)})
    one.settle()
    assert ask(one, drain=["n1"])["unplaced"] == []
    found = ask(one, drain=["n1"], scale={"m": 4})
    assert found["unplaced"][0]["replicas"] >= 1
    one.models["m"] = model("m", 4, small)
    one.settle()
    away = ask(one, scale={"m": 1}, models=[model("whole", 1, profile("p", gpus=1))])
    assert [p["model"] for p in away["placed"]] == ["whole"]


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "drain": st.lists(st.sampled_from(["n1", "n2"]), unique=True),
        "remove": st.lists(st.sampled_from(["n3"]), unique=True),
        "scale": st.dictionaries(st.sampled_from(["m", "k"]), st.integers(0, 6)),
        "add": st.lists(
            st.builds(AddNodes, st.integers(1, 3), st.integers(0, 4), st.just("H100")), max_size=2
        ),
    },
)


@given(st.integers(0, 4), st.integers(0, 3), CHANGES, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_any_change_settles_is_the_same_twice_and_changes_nothing(first, second, change, seed):
    one = Fleet(
        {f"n{i}": node(f"n{i}", i) for i in (1, 2, 3)},
        {
            "m": model("m", first, profile("p", cpus=8.0), profile("cpu", gpus=0, cpus=8.0)),
            "k": model("k", second, profile("two", gpus=2)),
        },
    )
    for _ in range(30):
        one.tick()
    seen = one.snapshot()
    wanted = Change(**change)
    found = what_if(seen, wanted, one.now, seed)
    assert found["settled"]
    assert found == what_if(one.snapshot(), wanted, one.now, seed)
    assert seen == one.snapshot()
    for row in found["gpus"]:
        assert 0 <= row["free_after"] <= row["total_after"]
    if not change and not found["under_way"]:
        assert found["moves"] == found["placed"] == found["stopped"] == []
