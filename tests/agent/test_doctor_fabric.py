"""Checks of NVLink, its fabric manager and domain, and of IMEX."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.probes import card
from agent.probes.imex import ImexNode
from agent.probes.pci import Pci
from agent.probes.services import Service
from agent.probes.topo import P2P
from tests.agent.doctor_machines import (
    HOST,
    address,
    ask,
    cpu_only,
    expect,
    gpu,
    hgx,
    imex,
    nvidia,
    tray,
    tray_gpu,
    with_cards,
)

MANAGER = "nvidia-fabricmanager"
WAITING = card.Fabric("in_progress", "N/A")
NO_SWITCHES = Pci({address(n): nvidia(n) for n in range(8)})


def manager(state: str | None, error: str | None = None) -> dict[str, Service]:
    return {MANAGER: Service(MANAGER, state, error=error)}


def waiting(**changes: object):
    return with_cards(tuple(gpu(n, fabric=WAITING) for n in range(8)), hgx(), **changes)


def test_fabric_manager_runs():
    expect(hgx(), "fabric manager", "pass", "4 NVSwitches", "active")


@pytest.mark.parametrize("state", ["inactive", "failed", "absent", None])
def test_E16_hgx_with_its_fabric_manager_down(state):
    found = waiting(services=manager(state))
    words = ("cannot join", "CUDA cannot start", "systemctl enable --now", "0, 1, 2, 3")
    expect(found, "fabric manager", "fail", *words)
    expect(found, "nvlink", "fail", "in_progress")
    expect(found, "nvlink domain", "fail", "in progress")


def test_fabric_manager_that_runs_while_cards_wait():
    expect(waiting(), "fabric manager", "warn", "still wait", "journalctl")


def test_fabric_manager_gone_since_the_cards_joined():
    expect(hgx(services=manager("inactive")), "fabric manager", "warn", "after a reset")
    expect(hgx(services=manager("failed", "core dumped")), "fabric manager", "fail", "core dumped")


def test_fabric_manager_out_of_sight():
    expect(hgx(services=manager(None, "no bus")), "fabric manager", "pass", "no bus")
    guest = hgx(pci=NO_SWITCHES, services=manager("absent"), host=replace(HOST, virtual=True))
    expect(guest, "fabric manager", "pass", "virtual machine")


def test_old_driver_with_nvswitches_needs_the_manager():
    cards = tuple(gpu(n, name="NVIDIA A100-SXM4-80GB", fabric=card.Fabric()) for n in range(8))
    found = with_cards(cards, hgx(), services=manager("inactive"))
    expect(found, "fabric manager", "fail", "without it CUDA cannot start")
    expect(with_cards(cards, hgx(), services={}), "fabric manager", "warn", "not asked for")
    blind = with_cards(cards, hgx(), pci=Pci(error="none"), services=manager("absent"))
    expect(blind, "fabric manager", "fail", "absent")


def test_cards_without_a_fabric_need_no_manager():
    cards = tuple(gpu(n, name="NVIDIA L40S", fabric=card.Fabric(), nvlinks=()) for n in range(8))
    found = with_cards(cards, hgx(), pci=NO_SWITCHES)
    for name in ("fabric manager", "nvlink", "nvlink domain", "imex", "p2p"):
        assert ask(found, name) is None


def test_healthy_tray_needs_no_manager():
    expect(tray(), "fabric manager", "pass", "trays of their own")
    expect(tray(), "nvlink domain", "pass", "4 cards in domain b2daed23", ".1")
    expect(tray(), "nvlink", "pass", "18 links active on 4 cards", "26.562 GB/s")
    expect(tray(), "p2p", "pass", "12 pairs")


@pytest.mark.parametrize(
    ("fabric", "result", "words"),
    [
        ({"bandwidth": "degraded"}, "warn", "degraded"),
        ({"health": "limited"}, "warn", "limited"),
        ({"health": "unhealthy"}, "fail", "unhealthy"),
        ({"faults": ("route_unhealthy",)}, "fail", "route"),
        ({"status": "Unknown Error"}, "fail", "Unknown Error"),
    ],
)
def test_nvlink_faults(fabric, result, words):
    sick = replace(gpu(0).fabric, **fabric)
    found = with_cards((gpu(0, fabric=sick), *(gpu(n) for n in range(1, 8))), hgx())
    expect(found, "nvlink", result, "GPU 0", words)


def test_nvlink_links_down():
    links = tuple(card.NvLink(n, active=n != 5) for n in range(18))
    found = with_cards((gpu(0, nvlinks=links), gpu(1)), hgx())
    expect(found, "nvlink", "warn", "GPU 0: inactive links: 5")
    dead = tuple(card.NvLink(n, active=False) for n in range(18))
    found = with_cards((gpu(0, nvlinks=dead), gpu(1)), hgx())
    expect(found, "nvlink", "fail", "no active NVLink on GPU 0")


def test_nvlink_without_a_bridge_is_no_fault():
    dead = tuple(card.NvLink(n, active=False) for n in range(4))
    cards = (gpu(0, name="Quadro", nvlinks=dead, fabric=card.Fabric()),)
    found = with_cards(cards, hgx(), pci=Pci({address(0): nvidia(0)}), services={})
    expect(found, "nvlink", "pass", "0 links active on 1 card")


def p2p(word: str, *, only: tuple[int, int] | None = None) -> P2P:
    pairs = {(a, b): "OK" for a in range(4) for b in range(4) if a != b}
    return P2P({pair: word if only in (None, pair) else "OK" for pair in pairs})


def test_p2p():
    expect(tray(p2p=p2p("NS")), "p2p", "fail", "12 of 12", "0->1 NS", "topo -p2p r")
    expect(tray(p2p=p2p("DR", only=(0, 2))), "p2p", "warn", "1 of 12", "0->2 DR")
    expect(tray(p2p=P2P(error="nvidia-smi: no such program")), "p2p", "warn", "no such program")
    expect(hgx(p2p=p2p("NS")), "p2p", "warn", "12 of 12")


def test_domain_of_a_single_machine_is_no_fault():
    expect(hgx(), "nvlink domain", "pass", "within this machine only")


def test_domain_faults():
    other = card.Fabric("completed", "Success", tray_gpu(0).fabric.cluster_uuid, 2)
    split = with_cards((tray_gpu(0), tray_gpu(1, fabric=other)), tray())
    expect(split, "nvlink domain", "fail", "different NVLink domains", ".2", "NMX")
    partial = with_cards((tray_gpu(0), tray_gpu(1, fabric=WAITING)), tray())
    expect(partial, "nvlink domain", "fail", "partial", "card 1")
    stale = with_cards((tray_gpu(0, recovery_action="GPU Reset"),), tray())
    expect(stale, "nvlink domain", "fail", "a reset is due")


def test_domain_of_a_rack_that_is_not_told():
    old = with_cards((tray_gpu(0, fabric=card.Fabric()),), tray(imex=None))
    expect(old, "nvlink domain", "warn", "does not tell", "update the driver")
    away = replace(tray_gpu(0).fabric, cluster_uuid=card.ZERO_UUID)
    expect(with_cards((tray_gpu(0, fabric=away),), tray()), "nvlink domain", "warn", "NMX")
    wait = with_cards((tray_gpu(0, fabric=WAITING),), tray())
    expect(wait, "nvlink domain", "fail", "switch trays")


def test_imex_ready():
    expect(tray(), "imex", "pass", "READY", "domain UP", "2 of 2", "systemd nvidia-imex.service")
    expect(tray(), "imex channel", "pass", "1 channel device")
    assert ask(cpu_only(), "imex") is None


def test_E17_two_owners_of_imex():
    owners = ("systemd nvidia-imex.service", "process 812 (nvidia-imex), started by containerd")
    error = "IMEX has 2 owners that fight over it: keep one, disable `systemctl disable ...`"
    two = imex(owners=owners, owner=" and ".join(owners), error=error)
    for machine in (tray(imex=two), hgx(imex=two)):
        expect(machine, "imex", "fail", "2 owners", "systemctl disable --now nvidia-imex")
    pods = imex(owners=("slurm job 1", "process 9, by the kubelet"), error=None)
    expect(tray(imex=pods), "imex", "fail", "slurm job 1", "turn the other off")


@pytest.mark.parametrize(
    ("changes", "result", "words"),
    [
        ({"state": "WAITING_FOR_PEERS"}, "warn", "waits for"),
        ({"state": None, "error": "nvidia-imex-ctl: no answer"}, "warn", "no answer"),
        ({"state": "UNAVAILABLE"}, "fail", "restart"),
        ({"state": "UNAVAILABLE", "owner": None, "owners": ()}, "warn", "enable --now"),
        ({"error": "something odd"}, "warn", "something odd"),
        ({"domain_state": "DOWN"}, "fail", "domain DOWN"),
    ],
)
def test_imex_states(changes, result, words):
    expect(tray(imex=imex(**changes)), "imex", result, words)


def test_imex_other_nodes():
    nodes = (ImexNode(0, "10.0.0.1", "READY"), ImexNode(1, "10.0.0.2", "UNAVAILABLE", None, "n2"))
    found = tray(imex=imex(nodes=nodes, domain_state="DEGRADED"))
    expect(found, "imex", "warn", "1 of 2 nodes READY", "n2 UNAVAILABLE")
    apart = imex(connections=((0, 1, "VERSION_MISMATCH"),), domain_state="DEGRADED")
    expect(tray(imex=apart), "imex", "warn", "10.0.0.1 -> 10.0.0.2 VERSION_MISMATCH")


def test_imex_missing_or_not_needed():
    expect(tray(imex=None), "imex", "warn", "no sign of IMEX", "nodes_config.cfg")
    expect(hgx(imex=imex(state="UNAVAILABLE")), "imex", "pass", "not needed")
    assert ask(hgx(imex=imex()), "imex channel") is None
    failed = {"nvidia-imex": Service("nvidia-imex", "failed", error="failed (exit-code)")}
    found = tray(services=failed, imex=imex(state=None, owner=None, owners=()))
    expect(found, "imex", "fail", "exit-code", "journalctl -u nvidia-imex")


def test_imex_channels():
    expect(tray(imex=imex(has_major=False)), "imex channel", "fail", "/proc/devices")
    expect(tray(imex=imex(channels=0)), "imex channel", "fail", "NVreg_CreateImexChannel0=1")
    expect(tray(imex=imex(channels=None)), "imex channel", "warn", "could not be looked at")
