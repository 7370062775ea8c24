"""Parts of a card as nvidia-smi of different ages prints them: fabric, repairs, MIG devices."""

from __future__ import annotations

import pytest

from agent.probes import card, smi
from agent.probes.card import Ecc, Process, Repair

FABRIC = """GPU 00000000:01:00.0
    Product Name : NVIDIA GB200
    GPU Recovery Action : {action}
    Fabric
        State : {state}
        Status : {status}
        CliqueId : {clique}
        ClusterUUID : {uuid}
        Health
            Summary : {summary}
            Bandwidth : {bandwidth}
            Route Recovery in progress : {recovery}
            Route Unhealthy : {route}
            Access Timeout Recovery : {timeout}
            Incorrect Configuration : {wrong}
"""
JOINED = {
    "action": "None", "state": "Completed", "status": "Success", "clique": "32766",
    "uuid": "B2DAED23-0000-0000-0000-000000000001", "summary": "Healthy", "bandwidth": "Full",
    "recovery": "False", "route": "False", "timeout": "False", "wrong": "None",
}  # fmt: skip


def fabric(**words: str) -> card.Fabric:
    [found] = smi.parse(FABRIC.format(**(JOINED | words))).cards
    return found.fabric


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        ({}, True),
        ({"uuid": "00000000-0000-0000-0000-000000000000", "clique": "0"}, False),
        ({"state": "In Progress", "status": "N/A", "uuid": "N/A", "clique": "N/A"}, False),
        ({"state": "Not Started"}, False),
        ({"state": "N/A", "status": "N/A"}, False),
        ({"state": "[Not Supported]"}, False),
        ({"status": "Insufficient Resources"}, False),
        ({"uuid": "32766", "clique": "b2daed23-0000-0000-0000-000000000001"}, False),
        ({"uuid": ""}, False),
        ({"state": "ERR!"}, None),
        ({"state": ""}, None),
        ({"state": "A word of driver 700"}, None),
    ],
)
def test_E16_joined_only_when_all_of_it_is_said(words, joined):
    assert fabric(**words).joined is joined


def test_faults_of_a_fabric():
    found = fabric(
        summary="Limited Capacity", bandwidth="Degraded", recovery="True", route="True",
        timeout="True", wrong="Incorrect SYSGUID",
    )  # fmt: skip
    assert (found.health, found.bandwidth) == ("limited", "degraded")
    assert found.faults == (
        "route_unhealthy", "route_recovery", "access_timeout_recovery",
        "incorrect configuration: Incorrect SYSGUID",
    )  # fmt: skip
    assert fabric().faults == ()
    assert fabric().cluster_uuid == "b2daed23-0000-0000-0000-000000000001"


@pytest.mark.parametrize(
    ("printed", "action"),
    [("None", None), ("N/A", None), ("Reset", "GPU Reset"), ("GPU_RESET", "GPU Reset"),
     ("Reboot", "Node Reboot"), ("Drain P2P", "Drain P2P"), ("Drain and Reset", "Drain and Reset"),
     ("Something New", "Something New")],
)  # fmt: skip
def test_recovery_action(printed, action):
    [found] = smi.parse(FABRIC.format(**(JOINED | {"action": printed}))).cards
    assert found.recovery_action == action


OLD = """GPU 00000001:00:00.0
    Product Name                          : Tesla V100-PCIE-16GB
    GPU Reset Status
        Reset Required                    : Yes
    Clocks Throttle Reasons
        Idle                              : Active
        HW Slowdown                       : Active
            HW Thermal Slowdown           : Not Active
            HW Power Brake Slowdown       : Active
        SW Thermal Slowdown               : Active
    ECC Errors
        Volatile
            Single Bit
                Device Memory             : 1
                Register File             : N/A
                Total                     : 5
            Double Bit
                Device Memory             : 2
                Total                     : 2
        Aggregate
            Single Bit
                Total                     : 50
            Double Bit
                Total                     : N/A
    Retired Pages
        Single Bit ECC                    : 3
        Double Bit ECC                    : 1
        Pending Page Blacklist            : Yes
    Power Readings
        Power Draw                        : 24.07 W
        Power Limit                       : 250.00 W
        Enforced Power Limit              : 200.00 W
    Processes                             : N/A
"""


def test_card_before_ampere():
    [found] = smi.parse(OLD).cards
    assert found.ecc == Ecc(None, 5, 2, 50, None)
    assert found.repair == Repair(corrected=3, uncorrected=1, pending=True, failed=None)
    assert found.throttle == ("sw_thermal", "hw_power_brake", "hw_slowdown")
    assert (found.power_w, found.power_limit_w) == (24.07, 200)
    assert (found.recovery_action, found.processes) == ("GPU Reset", None)
    assert found.problems == ()


SHARED = """GPU 00000000:01:00.0
    Product Name : NVIDIA A100-SXM4-40GB
    GPU UUID : GPU-1
    MIG Mode
        Current : Enabled
    MIG Device
        Index : 0
        GPU Instance ID : 1
        Compute Instance ID : 0
        Device Attributes
            Shared
                Multiprocessor count : 14
        FB Memory Usage
            Total : 20096 MiB
            Used : 300 MiB
    MIG Device
        Index : 1
        GPU Instance ID : 1
        Compute Instance ID : 1
        Device Attributes
            Shared
                Multiprocessor count : 28
        FB Memory Usage
            Total : 20096 MiB
            Used : 300 MiB
    MIG Device
        Index : 2
        GPU Instance ID : 9
        Compute Instance ID : 0
        FB Memory Usage
            Total : 4864 MiB
    Processes
        GPU instance ID : 1
        Compute instance ID : 0
        Process ID : 9
            Type : C
            Used GPU Memory : 100 MiB
        GPU instance ID : 1
        Compute instance ID : 1
        Process ID : 9
            Type : C
            Used GPU Memory : 50 MiB
        GPU instance ID : 1
        Compute instance ID : 1
        Process ID : 9
            Type : G
            Used GPU Memory : 50 MiB
"""


def test_instances_that_share_memory_get_their_part_and_a_pid_is_added_up():
    [found] = smi.parse(SHARED).cards
    assert [(s.memory_mib, s.memory_used_mib) for s in found.slices] == [
        (6698, 100), (13397, 200), (4864, None)]  # fmt: skip
    assert found.processes == (Process(9, 150),)


LISTED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-0)
  MIG 7g.40gb     Device  0: (UUID: MIG-wrong)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-1)
  MIG 1c.3g.20gb  Device  0: (UUID: MIG-a)
  MIG 1g.5gb+me   Device  2: (UUID: MIG-GPU-1/9/0)
"""


def test_list_names_the_devices_of_the_card_with_that_uuid():
    [found] = smi.name_slices(smi.parse(SHARED).cards, smi.parse_list(LISTED))
    assert [(s.profile, s.uuid) for s in found.slices] == [
        ("1c.3g.20gb", "MIG-a"), (None, None), ("1g.5gb+me", "MIG-GPU-1/9/0")]  # fmt: skip


async def test_E19_layout_that_is_gone_when_the_list_is_asked(machine):
    script = f"[ \"$*\" = -L ] && exit 1; cat <<'X'\n{SHARED}\nX"
    [found] = (await smi.read(machine({}, {"nvidia-smi": script}), 5)).cards
    assert [s.uuid for s in found.slices] == [None, None, None]
