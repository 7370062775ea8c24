"""The doctor never raises, whatever it is handed, and its answers fit where they are stored."""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent import doctor
from agent.checks import labels, verdict
from agent.probes import card
from agent.probes.disks import Disk
from agent.probes.domain import Domain
from agent.probes.found import Found
from agent.probes.imex import Imex, ImexNode
from agent.probes.services import Service
from tests.agent.doctor_machines import (
    address,
    cpu_only,
    gpu,
    hgx,
    imex,
    port,
    tray,
    with_cards,
    with_ports,
)

MACHINES = (cpu_only(), hgx(), tray(), with_ports(port(0), port(1, state="DOWN")), Found())
ODD_TEXT = st.sampled_from(("", "\x1b[31mred\x00\n\tlost", "\ud800", "x" * 3000, "N/A", "Ü — 值"))


def well_formed(checks: tuple[doctor.Check, ...]) -> None:
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    for check in checks:
        assert re.fullmatch(r"[a-z0-9][a-z0-9 ]{0,59}", check.name)
        assert check.result in ("pass", "warn", "fail")
        assert (check.remedy is None) == (check.result == "pass"), check
        for text in (check.evidence, check.remedy or "-"):
            assert 0 < len(text) <= 500
            assert not re.search(r"[\x00-\x1f\x7f]", text)
            text.encode()
    json.dumps(doctor.to_documents(checks))
    assert doctor.to_text(checks, colour=True)


def mutants(found: Found):
    """The machine with one of its fields, or of a field's fields, away."""
    for part in fields(found):
        yield replace(found, **{part.name: None})
        whole = getattr(found, part.name)
        if is_dataclass(whole):
            for inner in fields(whole):
                yield replace(found, **{part.name: replace(whole, **{inner.name: None})})


@pytest.mark.parametrize("machine", MACHINES)
def test_any_field_away(machine):
    for found in mutants(machine):
        well_formed(doctor.checks(found))


def test_a_part_away_costs_no_check_of_the_others():
    whole = {check.name for check in doctor.checks(cpu_only())}
    for part in fields(Found):
        told = {
            check.name: check for check in doctor.checks(replace(cpu_only(), **{part.name: None}))
        }
        assert whole <= told.keys() | {"pressure"}
        assert not any("itself failed" in check.evidence for check in told.values())


def test_fault_of_a_check_is_its_own():
    sick = replace(hgx(), services={"nvidia-fabricmanager": 7})
    checks = doctor.checks(sick)
    well_formed(checks)
    failed = [check for check in checks if "itself failed" in check.evidence]
    assert [check.name for check in failed] == ["fabric manager"]
    assert {check.result for check in failed} == {"warn"}


maybe = st.sampled_from((None, True, False))
numbers = st.sampled_from((None, 0, 1, -1, 2**70))
odd_fabrics = st.builds(
    card.Fabric,
    state=st.sampled_from((None, "not_supported", "not_started", "in_progress", "completed")),
    status=st.none() | ODD_TEXT,
    cluster_uuid=st.sampled_from((None, card.ZERO_UUID, tray().gpus.cards[0].fabric.cluster_uuid)),
    clique=numbers,
    health=st.sampled_from((None, "unhealthy", "limited")),
    faults=st.lists(ODD_TEXT, max_size=3).map(tuple),
)
odd_gpus = st.builds(
    card.Gpu,
    uuid=st.none() | ODD_TEXT,
    index=numbers,
    name=st.none() | ODD_TEXT,
    vendor=st.sampled_from(("nvidia", "amd")),
    pci_bus_id=st.sampled_from((None, address(0), address(1), "odd")),
    memory_mib=numbers,
    throttle=st.sampled_from((None, (), ("hw_thermal", "sw_thermal"))),
    pcie=st.builds(card.Pcie, width=numbers, width_max=numbers),
    persistence=maybe,
    ecc=st.builds(card.Ecc, enabled=maybe, uncorrected=numbers),
    repair=st.builds(card.Repair, uncorrected=numbers, pending=maybe, failed=maybe),
    fabric=odd_fabrics,
    nvlinks=st.none()
    | st.lists(st.builds(card.NvLink, link=st.just(1), active=maybe), max_size=3).map(tuple),
    mig=maybe,
    problems=st.lists(ODD_TEXT | st.just("lost: gone"), max_size=2).map(tuple),
)
odd_imex = st.builds(
    Imex,
    state=st.none() | ODD_TEXT | st.just("READY"),
    domain_state=st.sampled_from((None, "UP", "DEGRADED", "DOWN", "?")),
    nodes=st.lists(st.builds(ImexNode, index=st.just(0), state=st.none() | ODD_TEXT)).map(tuple),
    connections=st.just(((0, 0, "X"), (0, 9, "Y"))),
    channels=numbers,
    has_major=maybe,
    owners=st.lists(ODD_TEXT, max_size=3).map(tuple),
    error=st.none() | ODD_TEXT,
)
odd_disks = st.builds(
    Disk,
    mount=st.just("/") | ODD_TEXT,
    filesystem=ODD_TEXT,
    kind=st.sampled_from(("local", "shared", "pseudo")),
    total_mib=numbers,
    free_mib=numbers,
    holds_weights=st.booleans(),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    base=st.sampled_from(MACHINES),
    cards=st.lists(odd_gpus, max_size=4).map(tuple),
    error=st.none() | ODD_TEXT,
    domain=st.builds(
        Domain,
        st.sampled_from(("joined", "none", "partial", "inconsistent", "in_progress", "unknown")),
        reason=st.none() | ODD_TEXT,
        fault=st.booleans(),
    ),
    seen=st.none() | odd_imex,
    disks=st.lists(odd_disks, max_size=3).map(tuple),
    state=st.sampled_from((None, "active", "inactive", "failed", "absent")),
)
def test_odd_machines_raise_nothing(base, cards, error, domain, seen, disks, state):
    found = replace(with_cards(cards, base), domain=domain, imex=seen, disks=disks)
    found = replace(
        found,
        gpus=replace(found.gpus, error=error),
        services={name: Service(name, state, error=error) for name in ("nvidia-fabricmanager",)},
    )
    checks = doctor.checks(found)
    well_formed(checks)
    assert not any("itself failed" in check.evidence for check in checks)


def test_huge_machines_have_short_answers():
    cards = tuple(gpu(n % 200, problems=(f"lost: {n}",), uuid=f"G{n}") for n in range(256))
    nodes = tuple(ImexNode(n, f"10.0.0.{n}", "UNAVAILABLE") for n in range(2048))
    pairs = tuple((n, n + 1, "NEVER_CONNECTED") for n in range(2000))
    found = with_cards(cards, tray(), imex=imex(nodes=nodes, connections=pairs))
    ports = with_ports(*(port(n, state="DOWN", sm_error="no") for n in range(512))).ports
    well_formed(doctor.checks(replace(found, ports=ports)))


def test_short_keeps_one_line_of_what_fits():
    assert verdict.short("a\n b\x1b[1m\x00c") == "a bc"
    assert verdict.short("\ud800") == "?"
    long = verdict.short("x" * 600)
    assert len(long) == 500
    assert long.endswith("x...")
    assert verdict.together(()) is None


def test_labels():
    assert labels.per_name([("0", "a"), ("1", "b"), ("2", "a")]) == "GPUs 0, 2: a; GPU 1: b"
    assert labels.listed(map(str, range(20))).endswith("15 and 4 more")
    assert labels.cards([card.Gpu()]) == "GPU ?"
