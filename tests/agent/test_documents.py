"""Documents of a machine: what the database is told, unknown fields left out."""

from __future__ import annotations

import json
from dataclasses import replace

from agent import documents
from agent.health import Finding
from agent.probes.card import Ecc, Fabric, Gpu, Gpus, MigDevice, Pcie
from agent.probes.domain import Domain
from agent.probes.engines import Engine
from agent.probes.found import Found
from agent.probes.ib import IbPort, Ports
from agent.probes.imex import Imex
from agent.probes.inventory import ProbeConfig
from agent.xids import Event

CARD = Gpu(
    uuid="GPU-a", index=3, name="NVIDIA H100 80GB HBM3", pci_bus_id="0000:3b:00.0",
    memory_mib=81000, memory_kind="dedicated", paths={"0": "NV18", "mlx5_0": "PIX"},
    nearest_nic="mlx5_0", nic_path="PIX", numa=0, pcie=Pcie(width=16),
    ecc=Ecc(enabled=True, uncorrected=0), fabric=Fabric("completed", "Success", "u-1", 7),
)  # fmt: skip
LOST = Finding("lost", "reset", "the card is lost", "NVML code 15")


def test_a_card_with_everything():
    found = Found(gpus=Gpus((CARD,), "590.1", "13.1", source="nvml"), findings={"GPU-a": (LOST,)})
    [told] = documents.gpu_documents(found)
    assert told == {
        "uuid": "GPU-a", "index": 3, "name": "NVIDIA H100 80GB HBM3", "class": "H100",
        "vendor": "nvidia", "memory_mib": 81000, "memory_kind": "dedicated",
        "pci_bus_id": "0000:3b:00.0", "numa": 0, "driver_version": "590.1", "cuda_version": "13.1",
        "fabric_state": "completed", "cluster_uuid": "u-1", "clique": 7, "nearest_nic": "mlx5_0",
        "nic_path": "PIX", "paths": {"0": "NV18", "mlx5_0": "PIX"},
        "detail": {
            "pcie": {"width": 16}, "ecc": {"enabled": True, "uncorrected": 0},
            "fabric": {"status": "Success"},
        },
        "findings": [{"code": "lost", "kind": "reset", "text": "the card is lost",
                      "evidence": "NVML code 15", "unhealthy": True}],
    }  # fmt: skip
    json.dumps(told)


def test_E01_a_card_of_which_nothing_is_known_has_a_uuid_and_no_zero():
    [told] = documents.gpu_documents(Found(gpus=Gpus((Gpu(uuid="GPU-a"),))))
    assert told == {"uuid": "GPU-a", "vendor": "nvidia", "findings": []}


def test_E19_slices_are_units_and_their_card_is_none():
    parts = (MigDevice("MIG-1", profile="1g.10gb", memory_mib=9728), MigDevice(uuid=None))
    found = Found(gpus=Gpus((replace(CARD, mig=True, slices=parts),)))
    whole, part = documents.gpu_documents(found)
    assert whole["partitioned"] is True
    assert (part["uuid"], part["parent"], part["class"]) == ("MIG-1", "GPU-a", "H100-1g.10gb")
    assert (part["memory_mib"], part["index"], part["numa"]) == (9728, 3, 0)
    assert "partitioned" not in part


def test_a_card_in_mig_mode_is_no_unit_even_without_slices():
    """CUDA sees no device on it until instances are made."""
    [told] = documents.gpu_documents(Found(gpus=Gpus((replace(CARD, mig=True),))))
    assert told["partitioned"] is True


def test_E10_no_cards_with_a_reason_is_not_the_word_that_they_are_gone():
    assert documents.gpu_documents(Found(gpus=Gpus(error="mismatch"))) is None
    assert documents.gpu_documents(Found()) == []
    warned = documents.host_document(Found(gpus=Gpus(error="mismatch")), ProbeConfig())
    assert any("mismatch" in warning for warning in warned["warnings"])


def test_cards_of_two_vendors_share_no_driver_version():
    cards = (CARD, Gpu(uuid="GPU-b", index=0, vendor="amd", name="AMD Instinct MI300X"))
    found = Found(gpus=Gpus(cards, "590.1", "13.1", source="nvml"))
    nvidia, amd = documents.gpu_documents(found)
    assert nvidia["driver_version"] == "590.1"
    assert "driver_version" not in amd
    assert amd["class"] == "MI300X"
    alone = Found(gpus=Gpus(cards[1:], "6.8.5", source="amd-smi"))
    assert documents.gpu_documents(alone)[0]["driver_version"] == "6.8.5"


def test_the_rate_of_a_port_that_is_down_is_a_default_and_left_out():
    up = IbPort("mlx5_0", 1, "InfiniBand", "ACTIVE", "LinkUp", 400.0, sm_guid="0a", sm_lid=1, lid=2)
    down = IbPort("mlx5_1", 1, "InfiniBand", "DOWN", "Polling", 40.0)
    told = documents.port_documents((up, down))
    assert (told[0]["rate_gbps"], told[0]["active"], told[0]["key"]) == (400.0, True, "ib:0a")
    assert "rate_gbps" not in told[1]
    assert (told[1]["active"], "key" in told[1]) == (False, False)


def test_domain_and_imex_are_in_the_host():
    found = Found(
        domain=Domain("joined", "u-1.7", ("u-1.7",)),
        imex=Imex(state="READY", domain_state="UP", channels=1, owner="systemd nvidia-imex"),
        ports=Ports(),
    )
    told = documents.host_document(found, ProbeConfig(labels={"rack": "a"}, ports=(1, 2)))
    assert told["nvlink"] == {"state": "joined", "domain": "u-1.7"}
    assert told["imex"] == {
        "state": "READY", "domain_state": "UP", "channels": 1, "owner": "systemd nvidia-imex",
    }  # fmt: skip
    assert (told["labels"], told["ports"]) == ({"rack": "a"}, [1, 2])
    json.dumps(told)


def test_a_broken_engine_is_told_with_its_reason():
    told = documents.engine_documents((Engine("command"), Engine("vllm", path="/v/bin/python")))
    assert told[0] == {"engine": "command", "state": "installed"}
    assert told[1]["path"] == "/v/bin/python"


def test_E08_events_carry_their_meaning_and_their_card():
    event = Event("xid", "xid_79", 79, "0000:3b:00.0", text="GPU has fallen off the bus.", at=5.0)
    [told] = documents.event_documents([event], {"0000:3b:00.0": "GPU-a"})
    assert (told["kind"], told["object"], told["now"]) == ("xid", "GPU-a", "xid_79")
    assert told["evidence"]["text"] == "GPU has fallen off the bus."
    assert told["evidence"]["finding_kind"] in ("reset", "hardware")
    [loaded] = documents.event_documents([Event("loaded", "loaded")], {})
    assert (loaded["object"], "finding_kind" in loaded["evidence"]) == ("host", False)


def test_islands_are_cards_that_nvlink_joins():
    def card(index, *linked, path="NV4"):
        paths = {str(peer): path for peer in linked} | {"mlx5_0": "PIX"}
        return Gpu(uuid=f"GPU-{index}", index=index, paths=paths)

    cards = (card(0, 1), card(1, 0), card(2, 3), card(3, 2), card(4, 0, path="SYS"))
    told = documents.gpu_documents(Found(gpus=Gpus(cards)))
    assert [document.get("island") for document in told] == [0, 0, 1, 1, None]
    chain = (card(0, 1), card(1, 0, 2), card(2, 1))
    told = documents.gpu_documents(Found(gpus=Gpus(chain)))
    assert [document["island"] for document in told] == [0, 0, 0]
