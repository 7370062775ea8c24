"""What a card's state says of its health: one row per fault, and what is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent import health
from agent.probes import card

SOUND = card.Gpu(
    uuid="GPU-1",
    index=3,
    pci_bus_id="0000:3b:00.0",
    ecc=card.Ecc(enabled=True, corrected=9, uncorrected=0, uncorrected_aggregate=4),
    repair=card.Repair(corrected=1, uncorrected=2, pending=False, failed=False),
    throttle=("sw_power_cap", "sync_boost"),
    pcie=card.Pcie(gen=1, gen_max=5, width=16, width_max=16),
    fabric=card.Fabric(state="completed", status="Success", bandwidth="full", health="healthy"),
    nvlinks=tuple(card.NvLink(link, active=True) for link in range(4)),
)
FAULTS = [
    ({"problems": ("lost: nvidia-smi says 'GPU is lost'",)}, "lost", "reset", True),
    ({"problems": ("missing: 8 on PCI, 7 told",)}, "lost", "reset", True),
    ({"problems": ("NVML: no answer within 5 s",)}, "probe", "passing", True),
    ({"ecc": card.Ecc(uncorrected=2)}, "ecc_uncorrected", "reset", True),
    ({"repair": card.Repair(pending=True)}, "repair_pending", "reset", True),
    ({"repair": card.Repair(failed=True)}, "repair_failed", "hardware", True),
    ({"recovery_action": "GPU Reset"}, "recovery_action", "reset", True),
    ({"throttle": ("hw_thermal", "hw_slowdown")}, "throttle_hw_thermal", "passing", True),
    ({"throttle": ("hw_power_brake",)}, "throttle_power_brake", "passing", True),
    ({"throttle": ("hw_slowdown",)}, "throttle_hw_slowdown", "passing", True),
    ({"throttle": ("sw_thermal",)}, "throttle_sw_thermal", "passing", False),
    ({"pcie": card.Pcie(width=8, width_max=16)}, "pcie_width", "passing", False),
    ({"fabric": card.Fabric(state="in_progress")}, "fabric_in_progress", "passing", True),
    ({"fabric": card.Fabric(state="not_started")}, "fabric_not_started", "passing", False),
    (
        {"fabric": card.Fabric(state="completed", status="Unknown Error")},
        "fabric_failed",
        "reset",
        True,
    ),
    (
        {"fabric": card.Fabric(state="completed", health="unhealthy")},
        "fabric_unhealthy",
        "reset",
        True,
    ),
    ({"fabric": card.Fabric(health="limited")}, "fabric_limited", "passing", False),
    ({"fabric": card.Fabric(bandwidth="degraded")}, "fabric_bandwidth", "passing", False),
    ({"fabric": card.Fabric(faults=("route_unhealthy",))}, "fabric_route_unhealthy", "reset", True),
    (
        {"fabric": card.Fabric(faults=("incorrect configuration: no partition",))},
        "fabric_configuration",
        "reset",
        True,
    ),
    ({"fabric": card.Fabric(faults=("route_recovery",))}, "fabric_route_recovery", "passing", True),
    ({"fabric": card.Fabric(faults=("Access_Timeout",))}, "fabric_access_timeout", "passing", True),
    ({"fabric": card.Fabric(faults=("new word",))}, "fabric_fault", "passing", False),
]


def test_sound_card_has_no_finding():
    assert health.findings_of(SOUND) == ()
    assert health.findings_of(card.Gpu()) == ()


@pytest.mark.parametrize(("fields", "code", "kind", "unhealthy"), FAULTS)
def test_each_fault(fields, code, kind, unhealthy):
    [found] = health.findings_of(replace(SOUND, **fields))
    assert (found.code, found.kind, found.unhealthy) == (code, kind, unhealthy)
    assert ";" in found.text
    assert found.evidence


def test_history_is_no_finding():
    ecc = card.Ecc(enabled=False, corrected=1, corrected_aggregate=70, uncorrected_aggregate=5)
    assert health.findings_of(card.Gpu(ecc=ecc, repair=card.Repair(uncorrected=8))) == ()


def test_text_names_the_tool_of_the_vendor_and_the_card():
    [nvidia] = health.findings_of(card.Gpu(index=3, ecc=card.Ecc(uncorrected=1)))
    assert "nvidia-smi --gpu-reset --id 3" in nvidia.text
    [amd] = health.findings_of(card.Gpu(index=0, vendor="amd", ecc=card.Ecc(uncorrected=1)))
    assert "amd-smi" in amd.text


def test_links_down_among_active_ones_are_named():
    links = tuple(card.NvLink(link, active=link not in {2, 5}) for link in range(6))
    [found] = health.findings_of(card.Gpu(nvlinks=links))
    assert "NVLinks 2, 5" in found.text
    assert "4 of 6 active" in found.evidence
    assert not found.unhealthy


@pytest.mark.parametrize("active", [False, None])
def test_card_without_any_active_link_has_simply_no_nvlink(active):
    links = tuple(card.NvLink(link, active=active) for link in range(12))
    assert health.findings_of(card.Gpu(nvlinks=links)) == ()


@pytest.mark.parametrize("width", [0, None, 16])
def test_unknown_width_is_none(width):
    assert health.findings_of(card.Gpu(pcie=card.Pcie(width=width, width_max=16))) == ()


def test_E16_fabric_of_one_machine_and_of_none_are_sound():
    zero = card.Fabric(state="completed", status="SUCCESS", cluster_uuid=card.ZERO_UUID, clique=0)
    assert health.findings_of(card.Gpu(fabric=zero)) == ()
    assert health.findings_of(card.Gpu(fabric=card.Fabric(state="not_supported"))) == ()
    [waiting] = health.findings_of(card.Gpu(fabric=card.Fabric(state="in_progress")))
    assert "fabric manager" in waiting.text


def test_look_tells_what_it_could_judge():
    look = health.look_at(SOUND)
    assert look.answers
    assert look.pci_bus_id == "0000:3b:00.0"
    assert {"lost", "ecc_uncorrected", "fabric_failed", "nvlink_inactive"} <= look.told
    silent = health.look_at(card.Gpu(problems=("nvidia-smi: no answer within 10 s; killed",)))
    assert not silent.answers
    assert not silent.told  # a card that does not answer may still be lost, or have ECC errors


def test_every_finding_of_a_telling_card_can_heal():
    """A code that no look ever tells would stay for ever."""
    told = health.look_at(SOUND).told
    assert {code for _, code, _, _ in FAULTS} <= told


def test_long_words_of_a_driver_are_cut():
    [found] = health.findings_of(card.Gpu(recovery_action="x" * 10_000))
    assert len(found.evidence) < 400
