"""nvidia-smi's output as it should not be: values missing, cut, enormous, hostile (hypothesis)."""

from __future__ import annotations

import re
import time
from dataclasses import fields, is_dataclass
from itertools import cycle, repeat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.probes import smi, smi_card, smi_tree

TEXT = """==============NVSMI LOG==============

Driver Version                            : 570.86.15
CUDA Version                              : 12.8

Attached GPUs                             : 2
GPU 00000000:19:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Addressing Mode                       : None
    MIG Mode
        Current                           : Disabled
    GPU UUID                              : GPU-11111111-2222-3333-4444-555555555555
    GPU Recovery Action                   : None
    Clocks Event Reasons
        HW Slowdown                       : Active
            HW Thermal Slowdown           : Active
            HW Power Brake Slowdown       : Not Active
        SW Power Cap                      : Not Active
    FB Memory Usage
        Total                             : 81559 MiB
        Reserved                          : 551 MiB
        Used                              : 4 MiB
    Utilization
        GPU                               : 7 %
    ECC Mode
        Current                           : Enabled
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            DRAM Correctable              : 12
            SRAM Uncorrectable Parity     : 1
            SRAM Uncorrectable SEC-DED    : 2
            DRAM Uncorrectable            : 4
    Remapped Rows
        Correctable Error                 : 1
        Uncorrectable Error               : 2
        Pending                           : Yes
        Remapping Failure Occurred        : No
    Temperature
        GPU Current Temp                  : 66 C
    GPU Power Readings
        Power Draw                        : 690.00 W
        Current Power Limit               : 700.00 W
    Processes
        GPU instance ID                   : N/A
        Compute instance ID               : N/A
        Process ID                        : 4711
            Type                          : C
            Name                          : python: serve
            Used GPU Memory               : 1000 MiB
        GPU instance ID                   : N/A
        Compute instance ID               : N/A
        Process ID                        : 4712
            Type                          : C
            Name                          : /bin/x
            Used GPU Memory               : 20 MiB
GPU 00000000:3B:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    FB Memory Usage
        Total                             : 81559 MiB
"""
XML = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><driver_version>570.86.15</driver_version><cuda_version>12.8</cuda_version>
<attached_gpus>2</attached_gpus>
<gpu id="00000000:19:00.0"><product_name>NVIDIA A100</product_name><uuid>GPU-1</uuid>
<fb_memory_usage><total>81559 MiB</total><reserved>551 MiB</reserved></fb_memory_usage></gpu>
<gpu id="00000000:3B:00.0"><product_name>NVIDIA A100</product_name><uuid>GPU-2</uuid>
<fb_memory_usage><total>81559 MiB</total></fb_memory_usage></gpu>
</nvidia_smi_log>
"""
SPELLINGS = ["[N/A]", "N/A", "[Not Supported]", "ERR!", "", "12 345 MiB", "12345,5 MiB"]
XML_VALUE = re.compile(r">([^<>\n]+)</")
TEXT_VALUE = re.compile(r" : (.*)$", re.MULTILINE)


def flat(value, path=""):
    """A card as {path: value}, so that two can be compared field by field."""
    if not is_dataclass(value):
        return {path: value}
    found = {}
    for part in fields(value):
        found |= flat(getattr(value, part.name), f"{path}/{part.name}")
    return found


DERIVED = {"/memory_mib", "/memory_kind", "/memory_used_mib"}
"""The total less the reserve; its kind; and all three are none of a GB10's, told by its name."""


def lost_fields(before, after):
    was, now = flat(before), flat(after)
    return {path for path in was if was[path] != now[path]}


def replace_each(text, pattern, begin, spellings):
    """(what stood there, the text with one value replaced), for each value behind `begin`."""
    for match, spelling in zip(pattern.finditer(text, begin), spellings, strict=False):
        yield match[1], text[: match.start(1)] + spelling + text[match.end(1) :]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_E01_any_value_may_be_missing_and_costs_no_other_field(spelling):
    [whole, _] = smi.parse(TEXT).cards
    for value, text in replace_each(TEXT, TEXT_VALUE, TEXT.index("GPU 0000"), repeat(spelling)):
        found = smi.parse(text)
        assert len(found.cards) == 2
        lost = lost_fields(whole, found.cards[0]) - {"/problems"}
        assert len(lost) <= 1 or lost <= DERIVED, (value, lost)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["a10-535.129.03.q.txt", "h100-mig-linux-590.48.01.load-q.txt", "a100-sxm4-v12.q-x.xml",
     "rtx2080s-linux-610.57.04.q.txt", "tesla-t4.q-x.xml", "gtx-1070-ti.q-x.xml"],
)  # fmt: skip
def test_E01_each_value_of_a_captured_card(captures, name):
    text = (captures / "nvidia-smi" / name).read_text()
    text = re.sub(r"<supported_clocks>.*?</supported_clocks>", "", text, flags=re.DOTALL)
    pattern = XML_VALUE if name.endswith("xml") else TEXT_VALUE
    begin = text.index("<gpu " if name.endswith("xml") else "\nGPU 0")
    [whole] = smi.parse(text).cards
    for value, damaged in replace_each(text, pattern, begin, cycle(SPELLINGS)):
        [card] = smi.parse(damaged).cards
        lost = lost_fields(whole, card) - {"/problems"}
        assert len(lost) <= 1 or lost <= DERIVED, (value, lost)


@pytest.mark.parametrize("text", [TEXT, XML])
def test_whole_cards_before_a_cut_are_kept(text):
    for at in range(0, len(text), 7):
        found = smi.parse(text[:at], cut=True)
        assert len(found.cards) <= 2
        assert found.error is not None or "</nvidia_smi_log>" in text[:at]
        for card in found.cards:
            assert card.memory_mib in {None, 81008, 81559}
    first = text[: text.index("\n", text.rindex("00000000:3B") - 10) + 1]
    found = smi.parse(first)
    assert found.cards == smi.parse(text).cards[:1]
    assert found.error is not None


@pytest.mark.parametrize("text", [TEXT, XML])
def test_colours_carriage_returns_and_indents_change_nothing(text):
    expected = smi.parse(text).cards
    assert smi.parse(text.replace("\n", "\r\n")).cards == expected
    assert smi.parse("\ufeff" + text.replace("MiB", "\x1b[1mMiB\x1b[0m")).cards == expected
    assert smi.parse(text.replace("\n", "\n    ")).cards == expected
    assert smi.parse(text.replace("\n", "\n\n")).cards == expected


def test_line_of_a_wrapper_in_the_middle_of_a_card():
    text = TEXT.replace("    Temperature\n", "warning: low disk\nnote\n    Temperature\n")
    assert smi.parse(text).cards == smi.parse(TEXT).cards


@pytest.mark.parametrize("name", ["a & b", "<b>", "&lol;", "&#0;", "\x01", "\ufffd"])
def test_names_of_processes_as_the_driver_forgets_to_escape_them(name):
    process = f"<processes><process_info><pid>7</pid><process_name>{name}</process_name>"
    text = XML.replace("</gpu>", f"{process}</process_info></processes></gpu>")
    found = smi.parse(text)
    assert found.error is not None or len(found.cards) == 2


BOMB = "".join(
    f'<!ENTITY e{level} "{f"&e{level - 1};" * 10 if level else "x" * 99}">' for level in range(9)
)


@pytest.mark.parametrize(
    "text",
    [
        XML.replace('SYSTEM "nvsmi_device_v12.dtd"', f"[{BOMB}]").replace("A100", "&e8;"),
        XML.replace("<driver_version>", f"<!DOCTYPE x [{BOMB}]><driver_version>&e8;"),
        XML.replace('"nvsmi_device_v12.dtd"', '"file:///etc/passwd"').replace("A100", "&xxe;"),
        XML.replace("A100", "&e8;" * 1000),
        XML.replace("<uuid>", "<a>" * 100_000),
    ],
)
def test_no_entity_is_ever_replaced_and_no_depth_hurts(text):
    began = time.process_time()
    found = smi.parse(text)
    assert len(str(found)) < 10_000
    assert "root:" not in str(found)
    assert time.process_time() - began < 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "piece"),
    [
        ("", "x"),
        ("", "GPU 0000:01:00.0: handle for "),
        ("", "GPU 0000:01:00.0\n"),
        ("GPU 00000000:01:00.0\n", "    Total : 1 MiB\n"),
        ("<nvidia_smi_log>", "&"),
        ("<nvidia_smi_log>", "<gpu><uuid>1</uuid></gpu>"),
        ("<nvidia_smi_log><gpu>", "<process_info/>"),
    ],
)
def test_fifty_megabytes_are_bounded(head, piece):
    text = head + piece * (50 * 2**20 // len(piece))
    began = time.process_time()
    found = smi.parse(text)
    assert time.process_time() - began < 10, "2 s is usual; backtracking takes minutes"
    assert len(found.cards) <= smi_tree.MAX_CARDS + 1
    assert found.error is not None
    assert len(found.error) < 400


def test_a_card_with_many_processes_is_bounded():
    text = "GPU 0000:01:00.0\n    Processes\n" + "".join(
        f"        Process ID : {pid}\n            Type : C\n" for pid in range(1, 9000)
    )
    [card] = smi.parse(text).cards
    assert len(card.processes) == smi_tree.MAX_GROUP


def documents():
    """What there is to damage: our own examples, and small captures where they are at hand."""
    folder = Path(__file__).resolve().parents[4] / "shared/captures/nvidia-smi"
    names = ("gtx-1070-ti.q-x.xml", "h100-mig-linux-590.48.01.load-q.txt", "tesla-t4.q-x.xml")
    return [TEXT, XML, *(p.read_text() for n in names if (p := folder / n).is_file())]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_documents_never_raise(data):
    text = data.draw(st.sampled_from(documents()))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 400))
        text = text[:at] + data.draw(st.text(max_size=8)) + text[at + cut :]
    found = smi.parse(text, cut=data.draw(st.booleans()))
    for card in found.cards:
        assert card.memory_mib is None or card.memory_mib > 0
        assert card.utilization_percent is None or isinstance(card.utilization_percent, float)


TREES = st.recursive(
    st.text(max_size=6) | st.sampled_from(["N/A", "Yes", "12 MiB", "GPU is lost", "Active"]),
    lambda inner: st.dictionaries(
        st.sampled_from(sorted({s for v in smi_card.fields.FIELDS.values() for p in v
                                for s in p.split("/")})), inner, max_size=4)
    | st.lists(st.dictionaries(st.sampled_from(["pid", "index", "gpu_instance_id"]),
                               st.text(max_size=3), max_size=3), max_size=3),
)  # fmt: skip


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(
    ["processes", "mig_devices", "fabric", "ecc_errors", "pci", "uuid"]), TREES))  # fmt: skip
def test_any_tree_makes_a_card(tree):
    assert smi_card.read(tree, 0).index == 0


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200))
def test_lists_never_raise(text):
    smi.parse_list(text)
    smi.parse_list(f"GPU 0: x (UUID: GPU-1)\n  MIG {text} Device 0: (UUID: MIG-1)")
