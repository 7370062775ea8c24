"""Each hard rule by itself: a profile, a node, and the code and numbers it answers."""
# ruff: noqa: E501  a table row is easier to compare on one line

from __future__ import annotations

import pytest

from controller.placement.filters import free_ports, refusals
from controller.placement.model import Claim
from controller.placement.reasons import PHRASES, SENTENCES, Code
from tests.placement.made_fleet import GIB, gpu, node, profile, whole

HOST_RULES = [
    ({}, {}, None, None, None),
    ({}, {"state": "cordoned", "state_reason": "disk swap"}, "node_cordoned", "ready", "disk swap"),
    ({}, {"state": "draining"}, "node_draining", "ready", "draining"),
    ({}, {"state": "unreachable", "state_reason": "silent for 31 s"}, "node_unreachable", "ready", "silent for 31 s"),
    ({}, {"state": "lost"}, "node_lost", "ready", "lost"),
    ({}, {"state": "enrolling"}, "node_not_ready", "ready", "enrolling"),
    ({"pool_labels": {"zone": ("a", "b")}}, {"labels": {"zone": "b"}}, None, None, None),
    ({"pool_labels": {"zone": ("a", "b")}}, {"labels": {"zone": "c"}}, "pool_mismatch", "zone=a|b", "zone=c"),
    ({"pool_labels": {"zone": ("a",)}}, {}, "pool_mismatch", "zone=a", "no zone"),
    ({"arch": "amd64"}, {"arch": "x86_64"}, None, None, None),
    ({"arch": "arm64"}, {"arch": "x86_64"}, "arch_mismatch", "arm64", "x86_64"),
    ({"arch": "arm64"}, {"arch": None}, "arch_unknown", "arm64", None),
    ({"cpu_flags": ("avx2", "amx_tile")}, {}, "cpu_flag_missing", "avx2, amx_tile", "amx_tile"),
    ({"cpu_flags": ("avx2",)}, {"cpu_flags": None}, "cpu_flags_unknown", "avx2", None),
    ({"engine": "sglang"}, {}, "engine_missing", "sglang", "vllm"),
    ({}, {"engines": {}}, "engine_missing", "vllm", "none"),
    ({}, {"engines": None}, "engines_unknown", "vllm", None),
    ({"engine": "command"}, {"engines": None}, None, None, None),
    ({"engine_version": "0.32.0"}, {}, None, None, None),
    ({"engine_version": "0.33.0"}, {}, "engine_version", "vllm 0.33.0", "0.32.0"),
    ({"engine_version": "0.33.0"}, {"engines": {"vllm": ("",)}}, "engine_version", "vllm 0.33.0", "unknown"),
    ({"engine_version": "0.33.0"}, {"provisions": frozenset({"vllm"})}, None, None, None),
    ({"engine_version": "0.33.0"}, {"provisions": frozenset({"vllm"}), "engines": {}}, None, None, None),
    ({"engine_version": "0.33.0"}, {"provisions": frozenset({"sglang"})}, "engine_version", "vllm 0.33.0", "0.32.0"),
    ({"engine_version": "0.33.0"}, {"provisions": frozenset({"vllm"}), "engines": None}, "engines_unknown", "vllm", None),
    ({}, {"provisions": frozenset({"vllm"}), "engines": {}}, "engine_missing", "vllm",
     "none; the node would install a version that the profile names"),
    ({"engine_version": "0.33.0"}, {"provisions": frozenset({"vllm"}), "engine_failures": {("vllm", "0.33.0"): "no luck"}},
     "engine_failed", "vllm 0.33.0", "no luck"),
    ({"engine_version": "0.34.0"}, {"provisions": frozenset({"vllm"}), "engine_failures": {("vllm", "0.33.0"): "no luck"}}, None, None, None),
    ({"engine_version": "0.32.0"}, {"engine_failures": {("vllm", "0.32.0"): "no luck"}}, None, None, None),
    ({"engine": "command", "engine_version": "1"}, {"provisions": frozenset({"command"})}, None, None, None),
    ({"cpus": 8.0}, {"cpus_claimed": 24.0}, None, None, None),
    ({"cpus": 8.0}, {"cpus_claimed": 25.0}, "cpus", "8 cores", "7 of 32 cores"),
    ({"cpus": 8.0}, {"cpus": None}, "cpus_unknown", "8 cores", None),
    ({"memory_mib": 160 * GIB}, {"memory_claimed_mib": 96 * GIB}, None, None, None),
    ({"memory_mib": 160 * GIB}, {"memory_claimed_mib": 176 * GIB}, "memory", "160 GiB", "80 GiB of 256 GiB"),
    ({"memory_mib": 512}, {"memory_mib": None}, "memory_unknown", "512 MiB", None),
    ({}, {"ports": (20000, 20001), "ports_taken": frozenset({20000, 20001})}, "port_range_full", "1 port", "20000-20001"),
    ({}, {"mgmt_addr": None}, "address_unknown", None, None),
    ({"uncut": "28 heads in 8 parts"}, {}, "model_uncut", None, "28 heads in 8 parts"),
    ({"shards": 2}, {}, None, None, None),
    ({"shards": 2}, {"ports": (20000, 20001), "ports_taken": frozenset({20000})}, "port_range_full", "2 ports", "20000-20001"),
]  # fmt: skip


@pytest.mark.parametrize(("wants", "has", "code", "need", "have"), HOST_RULES)
def test_host_rule(wants, has, code, need, have):
    found = refusals(profile(**wants), node(**has))
    assert [(r.code, r.need, r.have) for r in found] == ([(code, need, have)] if code else [])


ONE, TWO = {"gpus": 1}, {"gpus": 2}
BIG = {"gpus": 1, "gpu_memory_mib": 40 * GIB}
SHARED = BIG | {"share": True}
CARD_RULES = [
    ({"gpus": 0}, [], []),
    (ONE, [{}], []),
    (ONE, [], [("gpu_count", "1 card", "0 cards")]),
    (ONE | {"gpu_class": "A100"}, [{}], [("gpu_class", "A100", "H100")]),
    (ONE | {"gpu_class": "A100"}, [], [("gpu_count", "1 card of A100", "0 cards")]),
    (TWO, [{}], [("gpu_count", "2 cards of one class", "1 card (1 H100)")]),
    (TWO, [{}, {"class_": "A100"}], [("gpu_count", "2 cards of one class", "2 cards (1 A100, 1 H100)")]),
    (ONE, [{"healthy": False, "problems": ("Xid 79",)}], [("gpu_unhealthy", "1 card", "gpu 0: Xid 79")]),
    (BIG, [{"memory_mib": 24 * GIB}], [("gpu_memory", "40 GiB", "24 GiB")]),
    (BIG, [{"memory_mib": None}], [("gpu_memory_unknown", "40 GiB", "gpu 0")]),
    (ONE, [{"memory_mib": None}], []),
    (ONE, [{"memory_foreign_mib": None}], [("gpu_foreign_unknown", "1 card", "gpu 0")]),
    (ONE, [{"memory_foreign_mib": 300}], []),
    (ONE, [{"memory_foreign_mib": 600}], [("gpu_foreign_use", "1 card", "gpu 0: 600 MiB of 80 GiB held by others")]),
    (ONE, [{"claims": whole(5)}], [("gpu_taken", "1 card", "0 of 1 card not taken")]),
    (ONE, [{"claims": (Claim(5, 100),)}], [("gpu_taken", "1 card", "0 of 1 card not taken")]),
    (SHARED, [{"claims": (Claim(5, 40 * GIB),)}], []),
    (SHARED, [{"claims": whole(5)}], [("gpu_taken", "1 card with 40 GiB each", "0 of 1 card not taken")]),
    (SHARED, [{"claims": (Claim(5, 41 * GIB),)}], [("gpu_taken", "1 card with 40 GiB each", "39 GiB of 80 GiB free")]),
    (SHARED, [{"memory_foreign_mib": 30 * GIB}], []),
    # Neither two taken nor two unhealthy cards alone stop two of four: together they do, and both say so.
    (TWO | {"gpus": 3}, [{}, {}, {"claims": whole(5)}, {"healthy": False}],
     [("gpu_unhealthy", "3 cards of one class", "gpu 3: no cause reported"),
      ("gpu_taken", "3 cards of one class", "3 of 4 cards not taken")]),
]  # fmt: skip


@pytest.mark.parametrize(("wants", "has", "expected"), CARD_RULES)
def test_card_rule(wants, has, expected):
    cards = tuple(gpu(i, **facts) for i, facts in enumerate(has))
    found = refusals(profile(**wants), node(gpus=cards))
    assert [(r.code, r.need, r.have) for r in found] == expected


def test_all_rules_speak_and_none_stops_the_others():
    bad = node(
        cards=0,
        state="cordoned",
        arch=None,
        cpus=None,
        memory_mib=None,
        engines=None,
        mgmt_addr=None,
    )
    found = refusals(profile(arch="arm64", cpus=1.0, memory_mib=1), bad)
    assert [r.code for r in found] == [
        Code.NODE_CORDONED, Code.ARCH_UNKNOWN, Code.ENGINES_UNKNOWN, Code.CPUS_UNKNOWN,
        Code.MEMORY_UNKNOWN, Code.ADDRESS_UNKNOWN, Code.GPU_COUNT,
    ]  # fmt: skip


def test_D01_a_card_with_foreign_memory_is_not_free():
    card = gpu(memory_foreign_mib=60 * GIB)
    (reason,) = refusals(profile(gpu_memory_mib=40 * GIB), node(gpus=(card,)))
    assert reason.code == Code.GPU_FOREIGN_USE
    assert "60 GiB of 80 GiB held by others" in reason.sentence
    assert refusals(profile(gpu_memory_mib=40 * GIB), node(gpus=(gpu(),))) == ()


def test_D28_each_card_is_checked_with_what_it_has_left():
    small = {"memory_mib": 24 * GIB}
    cards = (gpu(0, claims=(Claim(9, 4 * GIB),), **small), gpu(1, **small))
    split = profile(gpus=2, share=True, gpu_memory_mib=22 * GIB)
    (reason,) = refusals(split, node(gpus=cards))
    assert (reason.code, reason.have) == (Code.GPU_TAKEN, "20 GiB of 24 GiB free")
    cards = (gpu(0, memory_foreign_mib=4 * GIB, **small), gpu(1, **small))
    (reason,) = refusals(split, node(gpus=cards))
    assert reason.have == "gpu 0: 4 GiB of 24 GiB held by others"


def test_the_lowest_free_ports_are_next():
    assert free_ports(node(ports_taken=frozenset({20000, 20002})), 2) == [20001, 20003]
    assert free_ports(node(ports=(20000, 20001)), 9) == [20000, 20001]


def test_every_code_has_a_sentence_and_a_phrase():
    assert set(SENTENCES) == set(PHRASES) == {str(code) for code in Code}


def test_E19_slices_serve_shards_of_one_card_only():
    slices = tuple(gpu(i, class_="H100-1g.10gb", slice=True, memory_mib=9 * GIB) for i in range(3))
    has = node(gpus=slices)
    assert refusals(profile(gpu_memory_mib=8 * GIB), has) == ()
    (reason,) = refusals(profile(gpus=2), has)
    assert (reason.code, reason.have) == (Code.GPU_SLICE, "gpu 0, gpu 1, gpu 2")
    (reason,) = refusals(profile(shards=2), has)
    assert reason.code == Code.GPU_SLICE, "nor with slices of other nodes"
    mixed = node(gpus=(*slices, gpu(8), gpu(9)))
    assert refusals(profile(gpus=2), mixed) == ()


def test_E02_a_unified_card_takes_from_the_host():
    card = gpu(memory_mib=120 * GIB, memory_foreign_mib=12 * GIB, unified=True)
    has = node(gpus=(card,), memory_mib=128 * GIB)
    share = {"share": True, "gpu_memory_mib": 40 * GIB}
    assert refusals(profile(**share), has) == (), "the operating system is one of the others"
    assert refusals(profile(), has) == ()
    full = node(gpus=(card,), memory_mib=128 * GIB, memory_claimed_mib=100 * GIB)
    (reason,) = refusals(profile(**share), full)
    assert (reason.code, reason.need, reason.have) == (
        Code.MEMORY, "40 GiB", "28 GiB of 128 GiB",
    )  # fmt: skip
    (reason,) = refusals(profile(memory_mib=GIB), full)
    assert (reason.code, reason.need) == (Code.MEMORY, "121 GiB"), "alone it takes all of it"
    crowded = node(gpus=(gpu(memory_mib=120 * GIB, memory_foreign_mib=100 * GIB, unified=True),))
    (reason,) = refusals(profile(**share), crowded)
    assert reason.code == Code.GPU_FOREIGN_USE
    unknown = node(gpus=(gpu(memory_mib=None, unified=True),))
    assert Code.MEMORY_UNKNOWN in {r.code for r in refusals(profile(), unknown)}


def test_floors_of_drivers_and_cuda():
    has = node(gpus=(gpu(0, driver="550.90.07", cuda="12.4"), gpu(1, driver=None, cuda=None)))
    assert refusals(profile(driver_min="550.54"), has) == ()
    assert refusals(profile(driver_min="550.90.07", cuda_min="12.4"), has) == ()
    (reason,) = refusals(profile(driver_min="570"), has)
    assert (reason.code, reason.need, reason.have) == (
        Code.GPU_DRIVER, "570 or later", "550.90.07, unknown",
    )  # fmt: skip
    (reason,) = refusals(profile(cuda_min="13.0"), has)
    assert (reason.code, reason.have) == (Code.GPU_CUDA, "12.4, unknown")
    assert refusals(profile(gpus=2, driver_min="550"), has)[0].code == Code.GPU_DRIVER


def test_nodes_that_a_profile_excludes_or_fills_once():
    assert refusals(profile(exclude_nodes=frozenset({"n2"})), node("n1")) == ()
    (reason,) = refusals(profile(exclude_nodes=frozenset({"n1"})), node("n1"))
    assert reason.code == Code.NODE_EXCLUDED
    (reason,) = refusals(profile(alone_of="m"), node(models=frozenset({"m", "o"})))
    assert (reason.code, reason.have) == (Code.MODEL_ON_NODE, "m")
    assert refusals(profile(alone_of="m"), node(models=frozenset({"o"}))) == ()


def test_D23_weights_that_do_not_fit_on_the_disk():
    wants = profile(spec={"source": "hf:a/b"}, weights_mib=140 * GIB)
    (reason,) = refusals(wants, node(weights_free_mib=100 * GIB))
    assert (reason.code, reason.need, reason.have) == (Code.DISK, "140 GiB", "100 GiB")
    there = node(weights_free_mib=100 * GIB, sources_on_disk=frozenset({"hf:a/b"}))
    assert refusals(wants, there) == ()
    assert refusals(wants, node(weights_free_mib=140 * GIB)) == ()
    assert refusals(wants, node(weights_free_mib=None)) == ()
    assert refusals(profile(spec={"source": "hf:a/b"}), node(weights_free_mib=1)) == ()
