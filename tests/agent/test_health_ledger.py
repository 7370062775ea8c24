"""Health over time: what counts, what heals, and what survives a restart of the agent (E08)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import health, health_changes, health_document, xids
from agent.health_ledger import MAX_CARDS, MAX_FINDINGS, QUIET_S, Ledger, observe
from agent.probes import card

ADDRESS = "0000:3b:00.0"
READ = xids.Cursor(1, 1.0)
SOUND = card.Gpu(
    uuid="GPU-1",
    pci_bus_id=ADDRESS,
    ecc=card.Ecc(uncorrected=0),
    repair=card.Repair(pending=False, failed=False),
    throttle=(),
)


def xid(number: int, at: float | None = None, text: str = "words") -> xids.Event:
    return xids.Event("xid", f"xid_{number}", number, ADDRESS, text=text, at=at)


class Machine:
    """One card looked at every 10 s; the kernel log was read before, unless `cursor` is None."""

    def __init__(self, cursor: xids.Cursor | None = READ) -> None:
        self.now, self.boot, self.driver, self.cursor = 1000.0, "boot-1", "535", cursor
        self.ledger = Ledger(boot_id="boot-1", driver="535", cursor=cursor)
        self.history: list[health_changes.Change] = []

    def look(self, *events: xids.Event, wait: float = 10.0, **fields) -> set[str]:
        """The codes that count after a look at a card with these fields."""
        self.now += wait
        gpu = card.Gpu(**{name: getattr(SOUND, name) for name in SOUND.__slots__} | fields)
        after = observe(
            self.ledger,
            {"GPU-1": health.look_at(gpu)},
            events,
            boot_id=self.boot,
            driver=self.driver,
            now=self.now,
            cursor=self.cursor,
        )
        self.history += health_changes.changes(self.ledger, after)
        # Each look goes through the document, as if the agent was restarted in between.
        self.ledger = health_document.from_document(
            json.loads(json.dumps(health_document.to_document(after)))
        )
        assert self.ledger == after
        return {finding.code for finding in self.ledger.findings("GPU-1")}

    def happened(self) -> list[tuple[str, str]]:
        return [(change.code, change.what) for change in self.history]


def test_E08_passing_error_returns_by_itself_and_a_real_one_stays():
    machine = Machine()
    assert machine.look(xid(31)) == {"xid_31"}
    assert not machine.ledger.healthy("GPU-1")
    assert machine.look(wait=QUIET_S - 30) == {"xid_31"}
    assert machine.look(wait=40) == set()
    assert machine.ledger.healthy("GPU-1")
    for _ in range(50):
        assert machine.look(ecc=card.Ecc(uncorrected=1), wait=3600) == {"ecc_uncorrected"}
    assert machine.look(ecc=card.Ecc(uncorrected=None)) == {"ecc_uncorrected"}
    machine.boot = "boot-2"
    assert machine.look() == set()
    assert machine.happened() == [
        ("xid_31", "found"),
        ("xid_31", "healed"),
        ("ecc_uncorrected", "found"),
        ("ecc_uncorrected", "healed"),
    ]
    assert all(change.evidence for change in machine.history)


def test_passing_error_starts_its_quiet_time_anew_with_each_event():
    machine = Machine()
    for _ in range(5):
        assert machine.look(xid(13), wait=QUIET_S - 1) == {"xid_13"}
    assert machine.ledger.cards["GPU-1"].entries["xid_13"].count == 5
    assert machine.look(wait=QUIET_S, problems=("NVML: no answer",)) == {"xid_13", "probe"}
    assert machine.happened() == [("xid_13", "found"), ("probe", "found")]


@pytest.mark.parametrize("number", [79, 119, 48, 95])
def test_E08_real_xid_stays_until_evidence_of_a_reset(number):
    machine, code = Machine(), f"xid_{number}"
    machine.look(xid(number))
    for _ in range(20):
        assert machine.look(wait=86400) == {code}
    machine.driver = None  # unknown is no evidence
    assert machine.look() == {code}
    machine.driver = "550"
    assert machine.look() == set()
    assert machine.history[-1].evidence == "the driver was loaded anew"


def test_reset_is_seen_in_the_kernel_log_and_in_its_order():
    done = xids.Event("reset", "reset", pci_bus_id=ADDRESS, at=60.0)
    machine = Machine()
    assert machine.look(xid(119, 50.0)) == {"xid_119"}
    assert machine.look(done) == set()
    assert machine.look(done, xid(119, 70.0)) == {"xid_119"}
    loaded = xids.Event("loaded", "loaded", text="550.54.15", at=80.0)
    assert machine.look(loaded) == set()
    other = xids.Event("reset", "reset", pci_bus_id="0000:5e:00.0", at=95.0)
    assert machine.look(xid(48, 90.0), other) == {"xid_48"}
    assert machine.look(loaded) == {"xid_48"}  # an old line, read again


def test_reset_is_seen_by_the_recovery_action_that_went():
    machine = Machine()
    assert machine.look(xid(119), recovery_action="GPU Reset") == {"xid_119", "recovery_action"}
    assert machine.look() == {"xid_119", "recovery_action"}  # perhaps it was just not told
    assert machine.look() == set()


def test_failed_repair_needs_a_reboot_and_a_clean_look():
    machine = Machine()
    assert machine.look(xid(64)) == {"xid_64"}
    machine.driver = "550"
    assert machine.look() == {"xid_64"}
    machine.boot = "boot-2"
    assert "xid_64" in machine.look(repair=card.Repair(failed=True))
    assert machine.look(repair=card.Repair(failed=True)) == {"xid_64", "repair_failed"}
    assert "xid_64" in machine.look(problems=("NVML: no answer",))
    assert machine.look() == {"probe"}
    assert machine.look() == set()


def test_failed_repair_follows_the_driver():
    machine = Machine()
    assert machine.look(repair=card.Repair(failed=True)) == {"repair_failed"}
    machine.boot = "boot-2"
    assert machine.look(repair=card.Repair(failed=None)) == {"repair_failed"}
    assert machine.look() == set()


def test_passing_state_needs_two_looks_to_count_and_two_to_heal():
    machine = Machine()
    assert machine.look(throttle=("hw_thermal",)) == set()
    assert machine.look() == set()
    assert machine.look(throttle=("hw_thermal",)) == set()
    assert machine.look(throttle=("hw_thermal",)) == {"throttle_hw_thermal"}
    assert machine.look() == {"throttle_hw_thermal"}
    assert machine.look(throttle=None) == {"throttle_hw_thermal"}
    assert machine.look() == {"throttle_hw_thermal"}
    assert machine.look() == set()


def test_E16_fabric_in_progress_counts_at_once_and_heals():
    machine = Machine()
    waiting, joined = card.Fabric(state="in_progress"), card.Fabric(state="completed")
    assert machine.look(fabric=waiting) == {"fabric_in_progress"}
    assert machine.look(fabric=joined) == {"fabric_in_progress"}
    assert machine.look(fabric=joined) == set()


def test_E20_lost_card_counts_at_once_and_is_not_healed_by_silence():
    machine = Machine()
    gone = ("lost: the driver holds 0000:3b:00.0 but its tools do not show it",)
    assert machine.look(problems=gone, ecc=card.Ecc(uncorrected=1)) == {"lost", "ecc_uncorrected"}
    silent = card.Ecc()
    assert "lost" in machine.look(problems=("nvidia-smi: killed",), ecc=silent)
    assert machine.look(ecc=silent) == {"ecc_uncorrected", "probe"}
    assert machine.look() == set()


def test_E10_driver_mismatch_heals_without_touching_the_rest():
    machine = Machine()
    machine.look(xid(79))
    mismatch = ("NVML: driver and library differ (upgraded?)",)
    assert machine.look(problems=mismatch) == {"probe", "xid_79"}
    machine.driver = "550"
    assert machine.look() == {"probe"}
    assert machine.look() == set()


def test_card_out_of_sight_keeps_what_is_known_of_it():
    ledger = observe(Ledger(), {}, [xid(79)], boot_id="a", driver="1", now=5.0)
    assert [finding.code for finding in ledger.findings(f"PCI-{ADDRESS}")] == ["xid_79"]
    look = health.look_at(SOUND)
    ledger = observe(ledger, {"GPU-1": look}, boot_id="a", driver="1", now=9.0)
    assert [finding.code for finding in ledger.findings("GPU-1")] == ["xid_79"]
    assert ledger.findings(f"PCI-{ADDRESS}") == ()


def test_old_passing_events_of_a_log_read_for_the_first_time_are_over():
    machine = Machine(cursor=None)
    assert machine.look(xid(31, at=20.0), xid(79, at=30.0)) == {"xid_79"}
    assert machine.look(xid(31, at=machine.now)) == {"xid_79", "xid_31"}


def test_log_is_read_on_in_one_boot_only():
    ledger = observe(
        Ledger(), {}, boot_id="a", driver=None, now=1.0, cursor=xids.Cursor(seq=7, at=0.5)
    )
    assert ledger.read_until("a") == xids.Cursor(7, 0.5)
    assert ledger.read_until("b") is None
    assert ledger.read_until(None) is None


def test_events_read_twice_are_counted_once():
    machine = Machine()
    machine.look(xid(79, at=30.0))
    machine.look(xid(79, at=30.0))
    assert machine.ledger.cards["GPU-1"].entries["xid_79"].count == 1


def test_recovered_nvlink_error_does_not_hide_a_fatal_one():
    machine = Machine()
    machine.look(xid(149, 1.0, "NETIR Fatal XC0"))
    machine.look(xid(149, 2.0, "NETIR Nonfatal XC0"), wait=QUIET_S)
    assert not machine.ledger.healthy("GPU-1")


def test_driver_of_nvidia_resets_no_card_of_amd():
    hang = xids.Event("amd", "amd_reset_failed", pci_bus_id=ADDRESS, at=5.0)
    machine = Machine()
    machine.look(hang)
    assert machine.look(xids.Event("loaded", "loaded", at=9.0)) == {"amd_reset_failed"}
    assert machine.look(xids.Event("reset", "reset", pci_bus_id=ADDRESS, at=9.5)) == set()


def test_degraded_card_stays_in_placement():
    machine = Machine()
    for _ in range(2):
        codes = machine.look(pcie=card.Pcie(width=8, width_max=16))
    assert codes == {"pcie_width"}
    assert machine.ledger.healthy("GPU-1")


def test_unknown_card_is_healthy():
    assert Ledger().healthy("GPU-x")
    assert Ledger().findings(None) == ()


def test_ledger_is_bounded():
    look = health.look_at(SOUND)
    seen = {f"GPU-{n}": look for n in range(3)}
    events = [xids.Event("xid", f"xid_{n}", n, uuid="GPU-0") for n in [*range(200, 400), 79]]
    events += [xids.Event("xid", "xid_79", 79, uuid=f"GPU-old-{n}") for n in range(200)]
    ledger = observe(Ledger(), seen, events, boot_id="a", driver="1", now=1.0)
    assert len(ledger.cards) == MAX_CARDS
    assert set(seen) <= set(ledger.cards)
    assert len(ledger.cards["GPU-0"].entries) == MAX_FINDINGS
    assert not ledger.healthy("GPU-0")


GARBAGE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["version", "cards", "entries", "cursor", "code", "kind", "since"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(GARBAGE, GARBAGE, GARBAGE)
def test_damaged_document_gives_a_ledger(whole, cards, entry):
    assert isinstance(health_document.from_document(whole), Ledger)
    health_document.from_document({"version": 1, "cards": {"GPU-1": cards}, "cursor": whole})
    document = {"version": 1, "cards": {"GPU-1": {"entries": [entry, whole]}}}
    health_document.from_document(document)


STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "events": st.lists(st.sampled_from([31, 45, 48, 63, 64, 79, 92, 149, 999]), max_size=3),
            "wait": st.sampled_from([1.0, 60.0, 400.0]),
            "ecc": st.sampled_from([card.Ecc(), card.Ecc(uncorrected=0), card.Ecc(uncorrected=3)]),
            "throttle": st.sampled_from([None, (), ("hw_thermal",), ("sw_thermal",)]),
            "problems": st.sampled_from([(), ("lost: gone",), ("NVML: late",)]),
        }
    ),
    max_size=12,
)


@settings(max_examples=120, deadline=None)
@given(STEPS)
def test_reset_findings_are_never_lost_without_evidence(steps):
    """One boot, one driver, no recovery action: an event of kind reset stays for good."""
    machine, expected = Machine(), set()
    for step in steps:
        events = [xid(number) for number in step.pop("events")]
        codes = machine.look(*events, **step)
        expected |= {e.code for e in events if xids.classify(e).kind in {"reset", "hardware"}}
        assert expected <= codes
        ecc = step["ecc"].uncorrected
        if ecc is not None:
            assert ("ecc_uncorrected" in codes) == (ecc > 0)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 5))
def test_more_looks_with_the_same_facts_change_nothing(steps, more):
    machine = Machine()
    for step in steps:
        machine.look(*[xid(number) for number in step.pop("events")], **step)
    if steps:
        machine.look(wait=0, **{k: v for k, v in steps[-1].items() if k != "wait"})
        facts = {k: v for k, v in steps[-1].items() if k != "wait"}
        codes = machine.look(wait=0, **facts)
        for _ in range(more):
            assert machine.look(wait=0, **facts) == codes


def test_order_of_cards_does_not_matter():
    looks = {f"GPU-{n}": health.look_at(SOUND) for n in range(5)}
    other = dict(reversed(looks.items()))
    one = observe(Ledger(), looks, boot_id="a", driver="1", now=1.0)
    assert one == observe(Ledger(), other, boot_id="a", driver="1", now=1.0)
    assert list(one.cards) == list(observe(Ledger(), other, boot_id="a", driver="1", now=1.0).cards)


def test_change_of_severity_is_a_change():
    machine = Machine()
    machine.look(xid(149, 1.0, "NETIR Nonfatal XC0"))
    machine.look(xid(149, 2.0, "NETIR Fatal XC0"))
    assert machine.happened() == [("xid_149", "found"), ("xid_149", "changed")]
