"""The classes of XIDs, SXIDs and AMD's events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import xids


def xid(number: int, text: str = "words") -> xids.Event:
    return xids.Event("xid", f"xid_{number}", number, "0000:3b:00.0", text=text)


@pytest.mark.parametrize("number", [8, 13, 31, 32, 43, 45, 68, 69, 94, 96, 104, 127, 137])
def test_application_xids_pass(number):
    found = xids.classify(xid(number))
    assert (found.cause, found.kind) == ("application", "passing")


@pytest.mark.parametrize("number", [43, 45])
def test_end_of_a_killed_application_keeps_no_card_out(number):
    assert not xids.finding(xid(number)).unhealthy


@pytest.mark.parametrize("number", [38, 46, 109, 119, 120, 155, 158])
def test_driver_xids_need_a_reset(number):
    found = xids.classify(xid(number))
    assert (found.cause, found.kind, found.unhealthy) == ("driver", "reset", True)


@pytest.mark.parametrize(
    "number", [48, 62, 74, 79, 95, 110, 136, 140, 143, 144, 149, 156, 167, 171, 172]
)
def test_hardware_xids_need_a_reset(number):
    found = xids.classify(xid(number))
    assert (found.cause, found.kind, found.unhealthy) == ("hardware", "reset", True)


def test_failed_repair_stays_and_a_noted_one_is_only_an_event():
    assert xids.classify(xid(64)).kind == "hardware"
    noted = xids.finding(xid(63, "Row Remapper: New row marked for remapping"))
    assert (noted.kind, noted.unhealthy) == ("passing", False)


@pytest.mark.parametrize("number", [0, 1, 14, 999, 999999])
def test_unknown_number_is_shown_and_passes(number):
    found = xids.finding(xid(number))
    assert (found.kind, found.unhealthy) == ("passing", False)
    assert f"XID {number}" in found.text


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x025001c6 0x00000000)", "reset"),
        ("RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008)", "passing"),
        ("words without severity", "reset"),
        ("", "passing"),  # NVML gives no words; the recovery action decides
    ],
)
def test_nvlink_errors_carry_their_severity(text, kind):
    assert xids.classify(xid(149, text)).kind == kind


def test_recovery_action_is_read_from_its_xid():
    text = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    assert xids.recovery_action(text) == "Node Reboot Required"
    found = xids.finding(xid(154, text))
    assert "Node Reboot Required" in found.text
    assert found.unhealthy
    assert not xids.finding(xid(154, "")).unhealthy


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Non-fatal, Link 32 egress non-posted PRIV error (First)", "passing"),
        ("Fatal, Link 30 sourcetrack timeout error", "reset"),
        ("Severity 0 Engine instance 32", "passing"),
    ],
)
def test_sxids_by_their_severity(text, kind):
    event = xids.Event("sxid", "sxid_12028", 12028, "0000:05:00.0", text=text)
    assert xids.finding(event).kind == kind


def test_number_that_nvml_told():
    found = xids.finding(xids.from_nvml("0000:3b:00.0", 79))
    assert (found.code, found.kind) == ("xid_79", "reset")
    assert found.evidence


def test_events_of_amd():
    kinds = {code: xids.classify(xids.Event("amd", code)).kind for code in xids._AMD}
    assert kinds["amd_ring_timeout"] == "passing"
    assert kinds["amd_reset_failed"] == "reset"


def test_every_row_says_what_to_do():
    for number, row in xids.XIDS.items():
        assert row.words, number
        assert row.action, number
        assert row.kind != "hardware" or row.unhealthy


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**9), 10**9), st.text(max_size=400))
def test_any_event_gives_a_finding(number, text):
    found = xids.finding(xid(number, text))
    assert found.evidence
    assert len(found.evidence) <= 400
