"""nvidia-smi's XML of many drivers: spellings, classes, and what stands in its place."""

from __future__ import annotations

import pytest

from agent.probes import card, gpus, inventory, smi, values
from agent.probes import card as card_values
from agent.probes.card import Ecc, Repair
from agent.probes.inventory import ProbeConfig

CARD = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">
<nvidia_smi_log>
<driver_version>610.57.04 [Deprecated; will be removed in CUDA 14.0. Use KMD Version instead]
</driver_version>
<cuda_version>13.3 [Deprecated; will be removed in CUDA 14.0. Use CUDA UMD Version instead]
</cuda_version>
<gpu id="0000000F:01:00.0">
  <product_name>NVIDIA H200</product_name>
  <uuid>GPU-11111111-2222-3333-4444-555555555555</uuid>
  <gpu_recovery_action>None</gpu_recovery_action>
  <fb_memory_usage><total>{total}</total><reserved>606 MiB</reserved><used>{used}</used>
  </fb_memory_usage>
  <utilization><gpu_util>{util}</gpu_util></utilization>
  <temperature><gpu_temp>{temperature}</gpu_temp></temperature>
  <gpu_power_readings><instant_power_draw>{power}</instant_power_draw></gpu_power_readings>
  <remapped_rows><remapped_row_pending>{pending}</remapped_row_pending></remapped_rows>
  <ecc_errors><volatile><dram_uncorrectable>{ecc}</dram_uncorrectable></volatile>
  <aggregate><dram_uncorrectable>7</dram_uncorrectable></aggregate></ecc_errors>
  <processes><process_info><pid>77</pid><used_memory>500 MiB</used_memory></process_info>
  <process_info><pid>77</pid><used_memory>20 MiB</used_memory></process_info></processes>
  <something_new><deep>1</deep></something_new>
</gpu></nvidia_smi_log>"""
GOOD = {
    "total": "143771 MiB",
    "used": "900 MiB",
    "util": "36 %",
    "temperature": "30 C",
    "power": "76.10 W",
    "pending": "No",
    "ecc": "0",
}
FIELD = {
    "total": "memory_mib",
    "used": "memory_used_mib",
    "util": "utilization_percent",
    "temperature": "temperature_c",
    "power": "power_w",
}


def gpu(**fields: str) -> card.Gpu:
    [found] = smi.parse(CARD.format(**(GOOD | fields))).cards
    return found


def test_card_of_a_new_driver():
    found = gpu()
    assert (found.memory_mib, found.memory_used_mib) == (143165, 900)
    assert (found.utilization_percent, found.temperature_c, found.power_w) == (36, 30, 76.1)
    assert found.pci_bus_id == "000f:01:00.0"
    assert found.processes == (card_values.Process(77, 520),)
    assert not found.problems


def test_deprecation_note_is_not_part_of_a_version():
    found = smi.parse(CARD.format(**GOOD))
    assert (found.driver_version, found.cuda_version) == ("610.57.04", "13.3")


@pytest.mark.parametrize("field", FIELD)
@pytest.mark.parametrize(
    "spelling",
    ["N/A", "[N/A]", "[Not Supported]", "Not Supported", "", "ERR!", "Unknown Error", "None",
     "Requested functionality has been deprecated", "Insufficient Permissions", "-5 MiBs", "12 €"],
)  # fmt: skip
def test_E01_each_field_may_be_unknown_on_its_own(field, spelling):
    found, whole = gpu(**{field: spelling}), gpu()
    assert getattr(found, FIELD[field]) is None
    for other in set(FIELD.values()) - {FIELD[field]}:
        assert getattr(found, other) == getattr(whole, other)
    sick = spelling in {"ERR!", "Unknown Error"} and field in {"total", "util", "temperature"}
    assert bool(found.problems) == sick


@pytest.mark.parametrize(
    ("printed", "expected"),
    [("12 345 MiB", 12345), ("12,345 MiB", 12345), ("12\u202f345 MiB", 12345), ("80 GiB", 81920),
     ("1024 KiB", 1), ("81559", 81559), ("66,5 MiB", 66), ("-1 MiB", None), ("7 MW", None)],
)  # fmt: skip
def test_E01_sizes_as_wrappers_localise_them(printed, expected):
    assert values.mib(printed) == expected


def test_E01_decimal_comma():
    assert gpu(power="66,92 W").power_w == 66.92


def test_memory_trouble_is_told_in_fields_for_health_to_judge():
    found = gpu(pending="Yes", ecc="3")
    assert found.problems == ()
    assert found.repair == Repair(pending=True)
    assert found.ecc == Ecc(uncorrected=3, uncorrected_aggregate=7)


def test_process_list_that_is_not_told_is_not_empty():
    text = CARD.format(**GOOD)
    listed = text[: text.index("<processes>")] + text[text.index("</processes>") + 12 :]
    assert smi.parse(listed).cards[0].processes is None


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("err-driver-not-running", "couldn't communicate with the NVIDIA driver"),
        ("err-version-mismatch", "Driver/library version mismatch"),
        ("err-gpu-lost", "Unable to determine the device handle"),
    ],
)
def test_error_instead_of_a_document(small, name, error):
    assert error in smi.parse((small / f"nvidia-smi/{name}.txt").read_text()).error


def test_E07_lost_card_is_found_beside_the_document(small):
    line = (small / "nvidia-smi/err-gpu-lost.txt").read_text()
    found = smi.parse(f"{line}\n{CARD.format(**GOOD)}")
    assert [(c.pci_bus_id, not c.problems) for c in found.cards] == [
        ("000f:01:00.0", True),
        ("0000:91:00.0", False),
    ]
    old = "Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.  Reboot"
    assert smi.parse(old).cards[0].pci_bus_id == "0000:01:00.0"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 NVL", "H100"), ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A100 80GB PCIe", "A100"), ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"), ("NVIDIA A10G", "A10G"), ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA GB200", "GB200"), ("NVIDIA GH200 480GB", "GH200"), ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 2080 SUPER", "RTX2080-SUPER"), ("GeForce GTX 1070 Ti", "GTX1070-Ti"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"), ("NVIDIA RTX A6000", "RTXA6000"),
        ("NVIDIA RTX 4000 SFF Ada Generation", "RTX4000-Ada"), ("Quadro P400", "P400"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000"),
        ("NVIDIA TITAN V", "TITANV"),
        ("Graphics Device", None), ("N/A", None), ("", None), (None, None), ("NVIDIA", None),
    ],
)  # fmt: skip
def test_class_from_the_name(name, word):
    assert gpus.gpu_class(name) == word


async def test_no_tool_and_no_driver_means_no_gpus(machine):
    assert await inventory.gpu_facts(machine({})) == ([], None)


async def test_tool_that_fails_says_why(machine):
    root = machine({}, {"nvidia-smi": "echo 'Failed to initialize NVML: Unknown Error'; exit 255"})
    assert (await inventory.gpu_facts(root))[0] == []
    facts = await inventory.slow_facts(root, ProbeConfig())
    assert facts.gpus is None, "no answer is not the word that all cards are gone"
    [warning] = facts.host["warnings"]
    assert "nvidia-smi -q -x: Failed to initialize NVML: Unknown Error; in a container" in warning
