"""The verdict on a node's NVLink domain over all of its cards (E16)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes.card import ZERO_UUID, Fabric, Gpu
from agent.probes.domain import Domain, verdict

RACK = "b2daed23-0000-0000-0000-000000000000"
OTHER = "50000000-0000-0000-0000-000000000004"
JOINED = Fabric("completed", "Success", RACK, 1)
HGX = Fabric("completed", "Success", ZERO_UUID, 0)


def cards(*fabrics: Fabric) -> list[Gpu]:
    return [Gpu(index=at, fabric=fabric) for at, fabric in enumerate(fabrics)]


def test_rack_whose_cards_agree_is_joined():
    assert verdict(cards(*[JOINED] * 4)) == Domain("joined", f"{RACK}.1", (f"{RACK}.1",))


def test_upper_case_and_large_clique_numbers_are_the_same_domain():
    fabric = Fabric("completed", "SUCCESS", OTHER.upper(), 4_000_000_005)
    assert verdict(cards(fabric, fabric)).key == f"{OTHER}.4000000005"


def test_clique_zero_and_32766_are_cliques_like_others():
    for clique in (0, 32766):
        assert (
            verdict(cards(Fabric("completed", "Success", RACK, clique))).key == f"{RACK}.{clique}"
        )


def test_E16_one_machines_nvswitch_is_no_domain():
    found = verdict(cards(*[HGX] * 8))
    assert (found.state, found.key, found.cliques, found.fault) == ("none", None, (), False)
    assert found.reason.startswith("cards 0, 1, 2, 3, 4, 5, 6, 7: NVLink within this machine only")


def test_E16_cards_without_fabric_are_in_no_domain():
    assert verdict(cards(*[Fabric("not_supported")] * 2)).state == "none"
    assert verdict([]).state == "none"
    assert verdict([Gpu(vendor="amd", index=0)]).reason == "no NVIDIA card"


def test_E16_in_progress_on_a_machine_without_domain():
    found = verdict(cards(HGX, Fabric("in_progress"), Fabric("not_started")))
    assert (found.state, found.key) == ("in_progress", None)
    assert "card 1: joining the NVLink fabric is in progress still" in found.reason
    assert "card 2: joining the NVLink fabric has not been started" in found.reason


def test_E16_failed_and_empty_values_are_never_a_key():
    failed = verdict(cards(Fabric("completed", "Unknown Error", RACK, 1)))
    assert (failed.state, failed.key, failed.fault) == ("none", None, True)
    assert failed.reason == "card 0: joining the NVLink fabric failed: Unknown Error"
    for uuid in (None, "", "N/A", ZERO_UUID, ZERO_UUID.replace("-", "")):
        assert verdict(cards(Fabric("completed", "Success", uuid, 0))).state == "none"
    for fabric in (
        Fabric("completed", None, RACK, 1),
        Fabric("completed", "Success", RACK, None),
        Fabric("completed", "Success", "4000000003", 5),
    ):
        found = verdict(cards(fabric))
        assert (found.state, found.key, found.fault) == ("none", None, True)


def test_E16_two_cliques_in_one_node_are_inconsistent():
    second = Fabric("completed", "Success", RACK, 2)
    found = verdict(cards(JOINED, JOINED, second, Fabric()))
    assert (found.state, found.key, found.fault) == ("inconsistent", None, True)
    assert found.cliques == (f"{RACK}.1", f"{RACK}.2")
    assert f"cards 0, 1 in {RACK}.1, card 2 in {RACK}.2" in found.reason


def test_some_cards_joined_names_the_others():
    found = verdict(cards(JOINED, Fabric("in_progress"), JOINED, Fabric()))
    assert (found.state, found.key, found.fault) == ("partial", None, True)
    assert found.reason == (
        f"cards 0, 2 in {RACK}.1, but card 1: joining the NVLink fabric is in progress still; "
        "card 3: the driver does not tell the fabric state"
    )


def test_lost_card_without_index_is_named_by_its_address():
    lost = Gpu(pci_bus_id="0009:01:00.0", problems=("lost",))
    found = verdict([*cards(JOINED), lost])
    assert found.state == "partial"
    assert "card 0009:01:00.0: the driver does not tell" in found.reason


def test_old_driver_is_unknown_not_unjoined():
    found = verdict(cards(Fabric(), Fabric()))
    assert (found.state, found.fault) == ("unknown", False)
    assert found.reason == "cards 0, 1: the driver does not tell the fabric state"


def test_reset_that_is_due_makes_the_clique_stale():
    for action in ("GPU Reset", "GPU_RESET", "Drain and Reset"):
        node = [*cards(JOINED), Gpu(index=1, fabric=JOINED, recovery_action=action)]
        found = verdict(node)
        assert (found.state, found.key) == ("inconsistent", None)
        assert found.reason.startswith("card 1: a reset is due")
    healthy = Gpu(index=0, fabric=JOINED, recovery_action="Node Reboot")
    assert verdict([healthy]).state == "joined"
    assert verdict([Gpu(index=0, fabric=HGX, recovery_action="GPU Reset")]).state == "none"


def test_nodes_of_the_cluster_capture(captures):
    """`node: CliqueId : x` lines; node-11 has its values swapped and N/A, so it is not joined."""
    nodes: dict[str, dict[str, list[str]]] = {}
    for line in (captures / "nvidia-topo/pdsh-clique-grep.txt").read_text().splitlines():
        node, field, value = (part.strip() for part in line.split(":", 2))
        nodes.setdefault(node, {}).setdefault(field, []).append(value)
    keys = {}
    for node, fields in nodes.items():
        pairs = zip(fields["CliqueId"], fields["ClusterUUID"], strict=True)
        fabrics = [
            Fabric("completed", "Success", uuid, int(clique) if clique.isdigit() else None)
            for clique, uuid in pairs
        ]
        keys[node] = verdict(cards(*fabrics)).key
    assert keys["node-07"] == keys["node-08"] == f"{OTHER}.4000000005"
    assert keys["node-11"] is None
    assert keys["node-09"].split(".")[0] == keys["node-10"].split(".")[0]
    assert keys["node-09"] != keys["node-10"]


fabrics = st.builds(
    Fabric,
    st.sampled_from([None, "not_supported", "not_started", "in_progress", "completed"]),
    st.sampled_from([None, "Success", "N/A"]) | st.text(max_size=8),
    st.sampled_from([None, RACK, OTHER, ZERO_UUID]) | st.text(max_size=40),
    st.none() | st.integers(0, 2**32),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(fabrics, max_size=6))
def test_key_means_that_every_card_is_joined(found):
    node = cards(*found)
    judged = verdict(node)
    assert (judged.key is not None) == (judged.state == "joined")
    if judged.key:
        assert all(card.fabric.joined for card in node)
    else:
        assert judged.reason
