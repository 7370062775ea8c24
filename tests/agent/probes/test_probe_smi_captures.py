"""What nvidia-smi printed on real machines, drivers 418 to 610; values read off by eye."""

from __future__ import annotations

import pytest

from agent.probes import gpus, smi
from agent.probes.card import Ecc, Pcie, Process, Repair

MACHINES = {
    # file: class, cards, memory to plan with, driver, CUDA, MIG, fabric
    "a10-535.129.03.q.txt": ("A10", 1, 22516, "535.129.03", "12.2", None, "not_supported"),
    "a100-sxm4-v12.q-x.xml": ("A100", 1, 81051, "535.54.03", "12.2", True, "not_supported"),
    "a100x4-555.42.02.q.txt": ("A100", 4, 81157, "555.42.02", "12.5", False, "not_supported"),
    "a10g.q-x.xml": ("A10G", 1, 22593, "515.105.01", "11.7", None, None),
    "a40x10-550.127.05.q.txt": ("A40", 10, 45403, "550.127.05", "12.4", None, "not_supported"),
    "dual_2080-v13.q-x.xml": ("RTX2080", 2, 7786, "590.44.01", "13.1", None, "not_supported"),
    "gb200-fabric-joined-healthy.q-part.txt": ("GB200", 1, None, None, None, None, "completed"),
    "gtx-1070-ti.q-x.xml": ("GTX1070-Ti", 1, 4096, None, None, None, None),
    "gtx-1660-ti.q-x.xml": (None, 1, 5912, "418.43", "10.1", None, None),
    "h100-mig-linux-590.48.01.q.txt": ("H100", 1, 81080, "590.48.01", "13.1", True, "completed"),
    "h100-mig-linux-590.48.01.load-q.txt": (
        "H100", 1, 81080, "590.48.01", "13.1", True, "completed"),
    "h100x8-535.161.08.q.txt": ("H100", 8, 81008, "535.161.08", "12.2", False, "completed"),
    "h100x8-565.57.01.q.txt": ("H100", 8, 81105, "565.57.01", "12.7", False, "completed"),
    "h200-linux-590.48.01.q.txt": ("H200", 1, 143157, "590.48.01", "13.1", False, "completed"),
    "h200-linux-590.48.01.load-q.txt": ("H200", 1, 143157, "590.48.01", "13.1", False, "completed"),
    "l4-550.90.07.q.txt": ("L4", 1, 22478, "550.90.07", "12.4", None, "not_supported"),
    "l40s-linux-595.80.q.txt": ("L40S", 1, 45459, "595.80", "13.2", None, "not_supported"),
    "quadro-p400.q-x.xml": ("P400", 1, 1998, "418.43", "10.1", None, None),
    "rtx-3080-v12.q-x.xml": ("RTX3080", 1, 10067, "536.40", "12.2", None, "not_supported"),
    "rtx-3090-v12.q-x.xml": ("RTX3090", 1, 24260, "525.147.05", "12.0", None, "not_supported"),
    "rtx-4000-sff-ada-v13.q-x.xml": (
        "RTX4000-Ada", 1, 20015, "595.84", "13.2", None, "not_supported"),
    "rtx2080s-linux-610.57.04.q.txt": (
        "RTX2080-SUPER", 1, 7792, "610.57.04", "13.3", None, "not_supported"),
    "rtx2080s-windows-591.86.q.txt": (
        "RTX2080-SUPER", 1, 7987, "591.86", "13.1", None, "not_supported"),
    "rtx4080s-linux-595.71.05.q.txt": (
        "RTX4080-SUPER", 1, 15942, "595.71.05", "13.2", None, "not_supported"),
    "rtx4090x8-535.154.05.q.txt": (
        "RTX4090", 8, 24218, "535.154.05", "12.2", None, "not_supported"),
    "rtx4090x8-550.127.05.q.txt": (
        "RTX4090", 8, 24210, "550.127.05", "12.4", None, "not_supported"),
    "tesla-t4.q-x.xml": ("T4", 1, 14972, "515.105.01", "11.7", None, None),
}  # fmt: skip


@pytest.fixture
def read(captures):
    def parse(name):
        return smi.parse((captures / "nvidia-smi" / name).read_text())

    return parse


def test_every_document_of_the_collection_is_in_the_table(captures):
    names = {path.name for path in (captures / "nvidia-smi").iterdir()}
    documents = {name for name in names if name.endswith((".q-x.xml", "q.txt", "q-part.txt"))}
    assert set(MACHINES) <= documents


@pytest.mark.parametrize("name", MACHINES)
def test_machine(read, name):
    word, count, memory, driver, cuda, mig, fabric = MACHINES[name]
    found = read(name)
    assert (found.error, found.source, len(found.cards)) == (None, "nvidia-smi", count)
    assert (found.driver_version, found.cuda_version) == (driver, cuda)
    assert [card.index for card in found.cards] == list(range(count))
    assert len({card.pci_bus_id for card in found.cards} - {None}) == count
    for card in found.cards:
        assert gpus.gpu_class(card.name) == word
        assert (card.memory_mib, card.mig, card.fabric.state) == (memory, mig, fabric)
        assert card.memory_kind == ("dedicated" if memory else None)
        assert (card.problems, card.recovery_action) == ((), None)
        assert card.fabric.joined == {None: None, "completed": word == "GB200"}.get(fabric, False)


def test_any_further_document_has_cards_with_names(captures):
    for path in (captures / "nvidia-smi").iterdir():
        if path.name.endswith((".q-x.xml", "q.txt", "q-part.txt")):
            found = smi.parse(path.read_text(errors="replace"))
            assert found.cards, path.name
            assert all(card.name and card.pci_bus_id for card in found.cards), path.name


def test_all_of_one_card(read):
    [card] = read("a10-535.129.03.q.txt").cards
    assert card.uuid == "GPU-73d12ef7-f589-f867-4259-c7090ab44736"
    assert (card.pci_bus_id, card.memory_used_mib) == ("0000:07:00.0", 4)
    assert (card.utilization_percent, card.temperature_c) == (0, 33)
    assert (card.power_w, card.power_limit_w) == (43.89, 150)
    clocks = card.clocks
    assert (clocks.sm, clocks.sm_max, clocks.memory, clocks.memory_max) == (225, 1695, 405, 6251)
    assert card.pcie == Pcie(gen=4, gen_max=4, width=16, width_max=16)
    assert (card.persistence, card.throttle, card.processes) == (True, (), ())
    assert card.ecc == Ecc(True, 0, 0, 0, 0)
    assert card.repair == Repair(corrected=0, uncorrected=4, pending=True, failed=False)


def test_repairs_and_errors_of_four_cards(read):
    cards = read("a100x4-555.42.02.q.txt").cards
    assert sorted((c.repair.corrected, c.repair.pending) for c in cards) == [
        (0, False), (0, False), (1, False), (1, True)]  # fmt: skip
    assert [c.ecc.corrected for c in cards if c.repair.pending] == [353]
    assert {c.ecc.uncorrected for c in cards} == {0}


def test_counts_for_ever_are_not_those_since_the_driver_was_loaded(read):
    cards = read("a40x10-550.127.05.q.txt").cards
    assert {card.ecc.corrected for card in cards} == {0}
    assert sorted(c.ecc.corrected_aggregate for c in cards)[-4:] == [0, 10, 198, 10289]
    assert sum(card.throttle == ("sw_power_cap",) for card in cards) == 2


def test_throttled_machine(read):
    for card in read("h100x8-535.161.08.q.txt").cards:
        assert card.throttle == ("hw_power_brake", "hw_slowdown")
        assert card.clocks.sm < 200


def test_pages_retired_before_ampere(read):
    [card] = read("tesla-t4.q-x.xml").cards
    assert card.repair == Repair(corrected=0, uncorrected=0, pending=False, failed=None)
    assert card.ecc == Ecc(True, 0, 0, 0, 0)


def test_limit_that_driver_610_moved(read):
    assert read("rtx2080s-linux-610.57.04.q.txt").cards[0].power_limit_w == 250


def test_processes(read):
    [card] = read("h200-linux-590.48.01.load-q.txt").cards
    assert card.processes == (Process(10291, 2566), Process(10293, 1542), Process(10309, 28234))
    eight = read("rtx4090x8-535.154.05.q.txt").cards
    assert eight[2].processes == (Process(2146842, 23038),)
    assert [len(card.processes) for card in eight] == [1, 1, 1, 1, 1, 0, 1, 1]
    assert read("rtx-4000-sff-ada-v13.q-x.xml").cards[0].processes[3] == Process(34626, 183)
    windows = read("rtx2080s-windows-591.86.q.txt").cards[0].processes
    assert len(windows) == 10
    assert {process.memory_mib for process in windows} == {None}


def test_joined_and_healthy_fabric(read):
    [card] = read("gb200-fabric-joined-healthy.q-part.txt").cards
    fabric = card.fabric
    assert (fabric.status, fabric.clique) == ("Success", 1)
    assert fabric.cluster_uuid == "b2daed23-0000-0000-0000-000000000000"
    assert (fabric.bandwidth, fabric.health, fabric.faults) == ("full", "healthy", ())


def test_mig_devices_in_text_and_xml(read):
    [card] = read("h100-mig-linux-590.48.01.load-q.txt").cards
    assert [(s.index, s.gi, s.ci, s.memory_mib, s.memory_used_mib) for s in card.slices] == [
        (0, 2, 0, 40448, 11091), (1, 3, 0, 20096, 17), (2, 9, 0, 9984, 9),
        (3, 10, 0, 9984, 9)]  # fmt: skip
    assert [s.multiprocessors for s in card.slices] == [60, 32, 16, 16]
    assert card.utilization_percent is None
    assert card.processes == (Process(21180, 2296), Process(21181, 1272), Process(21198, 7484))
    [old] = read("a100-sxm4-v12.q-x.xml").cards
    assert [(s.index, s.gi, s.memory_mib) for s in old.slices] == [
        (0, 3, 19968), (1, 4, 19968), (2, 5, 19968), (3, 6, 19968)]  # fmt: skip


async def test_mig_devices_get_their_uuids_from_the_list(captures, machine):
    stem = captures / "nvidia-smi/h100-mig-linux-590.48.01"
    script = f'case "$*" in "-q -x") exit 2;; -q) cat {stem}.q.txt;; -L) cat {stem}.L.txt;; esac'
    found = await smi.read(machine({}, {"nvidia-smi": script}), 5)
    assert found.error is None
    assert [(s.profile, s.uuid[:12]) for s in found.cards[0].slices] == [
        ("3g.40gb", "MIG-00000000"), ("2g.20gb", "MIG-00000001"), ("1g.10gb", "MIG-00000002"),
        ("1g.10gb", "MIG-00000003")]  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
async def test_through_the_tool_in_either_form(captures, machine, name):
    """A driver that prints the one form for both questions, or refuses the other."""
    file = captures / "nvidia-smi" / name
    asked = "-q -x" if name.endswith("xml") else "-q"
    only = machine({}, {"nvidia-smi": f'[ "$*" = "{asked}" ] || exit 2; cat {file}'})
    both = machine({}, {"nvidia-smi": f"cat {file}; exit 14"})
    expected = smi.parse(file.read_text())
    assert await smi.read(only, 5) == expected
    assert await smi.read(both, 5) == expected
