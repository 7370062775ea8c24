"""nvidia-smi asked and read: spellings, classes, lost cards, and what stands in their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent import documents
from agent.probes import card, gpus, inventory, smi, values
from agent.probes.card import Ecc, Process, Repair
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
    assert found.processes == (Process(77, 520),)
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
    found = await inventory.read_gpus(machine({}))
    assert (found.cards, found.error) == ((), None)


async def test_tool_that_fails_says_why(machine):
    root = machine({}, {"nvidia-smi": "echo 'Failed to initialize NVML: Unknown Error'; exit 255"})
    found = await inventory.look(root, ProbeConfig())
    told = documents.gpu_documents(found)
    assert told is None, "no answer is not the word that all cards are gone"
    [warning] = documents.host_document(found, ProbeConfig())["warnings"]
    assert "nvidia-smi -q -x: Failed to initialize NVML: Unknown Error; in a container" in warning


async def test_error_beside_good_output_is_no_error(machine):
    text = CARD.format(**GOOD)
    root = machine({"/out": text}, {"nvidia-smi": f"cat <<'X'\n{text}\nX\nexit 14"})
    found = await smi.read(root, 5)
    assert (len(found.cards), found.error, found.source) == (1, None, "nvidia-smi")


@pytest.mark.parametrize(
    ("code", "said", "next_step"),
    [
        (18, "Failed to initialize NVML: Driver/library version mismatch", "reload its kernel"),
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
         "modprobe nvidia"),
        (3, "Something this driver says", "installed whole"),
        (4, "Something this driver says", "may open /dev/nvidia"),
        (6, "No devices were found", "`lspci`"),
        (15, "Something this driver says", "Xid 79"),
        (255, "Failed to initialize NVML: Unknown Error", "restart the container"),
        (1, "Something else", None),
    ],
)  # fmt: skip
async def test_E10_E11_reason_of_a_refusal_says_what_to_do_next(machine, code, said, next_step):
    found = await smi.read(machine({}, {"nvidia-smi": f'echo "{said}"; exit {code}'}), 5)
    assert found.cards == ()
    assert found.error.startswith(f"nvidia-smi -q -x: {said}")
    assert (next_step or "") in found.error
    assert (";" in found.error) == (next_step is not None)


async def test_E10_driver_that_works_again_is_read_again(machine):
    tool = {"nvidia-smi": 'echo "Driver/library version mismatch"; exit 18'}
    assert (await smi.read(machine({}, tool), 5)).error
    tool = {"nvidia-smi": f"cat <<'X'\n{CARD.format(**GOOD)}\nX"}
    assert (await smi.read(machine({}, tool), 5)).driver_version == "610.57.04"


@pytest.mark.slow
async def test_hanging_tool_is_not_asked_a_second_time(machine):
    script = 'echo "$*" >> "$(dirname "$0")/asked"; exec sleep 60'
    root = machine({}, {"nvidia-smi": script})
    found = await smi.read(root, 2.0)
    assert "no answer within 2 s" in found.error
    assert Path(root.path, "asked").read_text() == "-q -x\n"


TEXT = """GPU 0000000F:01:00.0
    Product Name : {name}
    Addressing Mode : {mode}
    FB Memory Usage
        Total : {total}
        Used : {total}
    GPU Power Readings
        Current Power Limit : N/A
    Temperature
        GPU Current Temp : 51 C
"""


async def test_text_where_the_xml_is_broken(machine):
    text = TEXT.format(name="NVIDIA H200", mode="None", total="143771 MiB")
    broken = CARD.format(**GOOD).replace("</processes>", "<weird & name>")
    script = f'if [ "$*" = "-q -x" ]; then cat <<\'X\'\n{broken}\nX\n'
    script += f"else cat <<'X'\n{text}\nX\nfi"
    found = await smi.read(machine({}, {"nvidia-smi": script}), 5)
    assert (found.error, found.cards[0].memory_mib) == (None, 143771)


@pytest.mark.parametrize("total", ["N/A", "Not Supported", "[N/A]", "122570 MiB", ""])
@pytest.mark.parametrize("name", ["NVIDIA GB10", "NVIDIA Thor", "Orin (nvgpu)", "Tegra X1"])
def test_E02_part_without_memory_of_its_own(name, total):
    """Some drivers print the host's memory for it: both must give the same card."""
    [found] = smi.parse(TEXT.format(name=name, mode="ATS", total=total)).cards
    assert (found.memory_kind, found.memory_mib, found.memory_used_mib) == ("unified", None, None)
    assert (found.pci_bus_id, found.temperature_c) == ("000f:01:00.0", 51)
    assert (found.power_limit_w, found.problems) == (None, ())


@pytest.mark.parametrize(
    ("mode", "total", "kind"),
    [
        ("ATS", "97871 MiB", "coherent"),
        ("HMM", "97871 MiB", "dedicated"),
        ("None", "97871 MiB", "dedicated"),
        ("ATS", "N/A", None),
        ("None", "[Insufficient Permissions]", None),
    ],
)
def test_kind_of_memory(mode, total, kind):
    [found] = smi.parse(TEXT.format(name="NVIDIA GH200 480GB", mode=mode, total=total)).cards
    assert found.memory_kind == kind


LOST = "Unable to determine the device handle for "


@pytest.mark.parametrize(
    ("line", "address"),
    [
        (f"{LOST}GPU0000:91:00.0: Unknown Error", "0000:91:00.0"),
        (f"{LOST}GPU 0000:01:00.0: GPU is lost.  Reboot the system", "0000:01:00.0"),
        (f"{LOST}GPU1: 0000:23:00.0: Unknown Error\nNo devices were found", "0000:23:00.0"),
        (f"{LOST}GPU 00020000:23:00.0: GPU requires reset", "20000:23:00.0"),
        ("GPU 00000000:3B:00.0: GPU is lost", "0000:3b:00.0"),
    ],
)
@pytest.mark.parametrize("place", ["alone", "before", "after", "stderr"])
def test_E07_lost_cards_of_all_wordings(line, address, place):
    document = "" if place == "alone" else CARD.format(**GOOD)
    text = f"{line}\n{document}" if place == "before" else f"{document}\n{line}"
    found = smi.parse(document, line) if place == "stderr" else smi.parse(text)
    [lost] = [card for card in found.cards if card.problems]
    assert lost.pci_bus_id == address
    assert lost.problems[0].startswith("lost: nvidia-smi says")
    assert len(found.cards) == 1 + bool(document)
    assert found.error is None or not document


def test_E07_line_about_a_card_that_is_shown_goes_to_that_card():
    found = smi.parse(CARD.format(**GOOD), f"{LOST}GPU000F:01:00.0: Unknown Error")
    assert [card.problems for card in found.cards] == [("lost: nvidia-smi says 'Unknown Error'",)]


def test_E07_card_whose_values_are_all_lost():
    found = gpu(total="GPU is lost", used="GPU is lost", util="GPU is lost")
    assert [problem[:4] for problem in found.problems] == ["lost", "lost"]
