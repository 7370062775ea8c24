"""Machines as the doctor is handed them, whole and healthy; tests break one thing at a time."""

from __future__ import annotations

from dataclasses import replace

from agent import doctor, health
from agent.probes import card, domain, gpus
from agent.probes.cgroup import Limits
from agent.probes.disks import Disk
from agent.probes.engines import Engine
from agent.probes.found import Found
from agent.probes.host import Cpu, Host, Memory
from agent.probes.ib import IbPort, Ports
from agent.probes.imex import Imex, ImexNode
from agent.probes.pci import Pci, PciDevice
from agent.probes.services import Service
from agent.probes.topo import P2P

SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
RACK = "b2daed23-0000-4000-8000-000000000001"
HOST = Host(
    hostname="n1",
    os="Ubuntu 24.04",
    kernel="6.8.0-45-generic",
    cpu=Cpu("Xeon 8480+", ("avx2", "avx512f", "lm"), 64, "x86_64"),
    memory=Memory(262_144, 200_000),
    virtual=False,
    wsl=False,
)
ENGINES = (Engine("command"), Engine("vllm", "0.11.0", "/opt/vllm/bin/python"))
DISKS = (Disk("/", "ext4", "local", 900_000, 400_000, holds_weights=True),)


def cpu_only(**changes: object) -> Found:
    """A server without any card; its display is soldered to the board."""
    found = Found(
        host=HOST,
        limits=Limits(),
        usable=HOST.memory,
        cpus=64.0,
        pci=Pci({"0000:02:00.0": PciDevice("0000:02:00.0", "102b", "0538", "0300")}, None, "sysfs"),
        disks=DISKS,
        engines=ENGINES,
    )
    return replace(found, **changes)


def address(index: int) -> str:
    return f"0000:{0x10 + index:02x}:00.0"


def gpu(index: int, **changes: object) -> card.Gpu:
    """A sound H100 of an HGX board, in no multi-node domain."""
    sound = card.Gpu(
        uuid=f"GPU-{index}",
        index=index,
        name="NVIDIA H100 80GB HBM3",
        pci_bus_id=address(index),
        memory_mib=81_079,
        temperature_c=41,
        throttle=(),
        pcie=card.Pcie(5, 5, 16, 16),
        persistence=True,
        ecc=card.Ecc(enabled=True, corrected=0, uncorrected=0),
        repair=card.Repair(0, 0, pending=False, failed=False),
        fabric=card.Fabric("completed", "Success", card.ZERO_UUID, 0, "full", "healthy"),
        nvlinks=tuple(card.NvLink(n, active=True, gb_per_s=26.562) for n in range(18)),
    )
    return replace(sound, **changes)


def nvidia(index: int, driver: str | None = "nvidia", device: str = "2330") -> PciDevice:
    return PciDevice(address(index), "10de", device, "0302", driver=driver)


def switches() -> dict[str, PciDevice]:
    places = [f"0000:8{n}:00.0" for n in range(4)]
    return {place: PciDevice(place, "10de", "22a3", "0680", driver="nvidia") for place in places}


def with_cards(cards: tuple[card.Gpu, ...], found: Found, **changes: object) -> Found:
    """The machine with these cards, and what follows from them."""
    keys = {key: one for one in cards if (key := gpus.key(one))}
    findings = {key: health.findings_of(one) for key, one in keys.items()}
    changed = replace(
        found,
        gpus=replace(found.gpus, cards=cards),
        domain=domain.verdict(cards),
        findings={key: some for key, some in findings.items() if some},
    )
    return replace(changed, **changes)


def hgx(**changes: object) -> Found:
    """Eight H100 with four NVSwitches and all services."""
    devices = {address(n): nvidia(n) for n in range(8)} | switches()
    services = ("nvidia-fabricmanager", "nvidia-persistenced")
    found = cpu_only(
        pci=Pci(devices, None, "sysfs"),
        signs=SIGNS,
        gpus=card.Gpus((), "565.57.01", "12.7", None, "nvml"),
        services={name: Service(name, "active", enabled=True) for name in services},
    )
    return with_cards(tuple(gpu(n) for n in range(8)), found, **changes)


def tray_gpu(index: int, **changes: object) -> card.Gpu:
    """A GB200 in a rack's domain."""
    fabric = card.Fabric("completed", "Success", RACK, 1, "full", "healthy")
    known = {"name": "NVIDIA GB200", "memory_mib": 189_000, "memory_kind": "coherent"}
    return gpu(index, **{"fabric": fabric, **known, **changes})


def imex(**changes: object) -> Imex:
    """All of two nodes ready and connected."""
    found = Imex(
        state="READY",
        domain_state="UP",
        version="570.86",
        nodes=(ImexNode(0, "10.0.0.1", "READY"), ImexNode(1, "10.0.0.2", "READY")),
        channels=1,
        has_major=True,
        owner="systemd nvidia-imex.service",
        owners=("systemd nvidia-imex.service",),
    )
    return replace(found, **changes)


def tray(**changes: object) -> Found:
    """A GB200 compute tray of four cards: no NVSwitch and no fabric manager of its own."""
    devices = {address(n): nvidia(n, device="2941") for n in range(4)}
    found = cpu_only(
        pci=Pci(devices, None, "sysfs"),
        signs=SIGNS,
        gpus=card.Gpus((), "570.86.15", "12.8", None, "nvml"),
        services={
            "nvidia-fabricmanager": Service("nvidia-fabricmanager", "absent"),
            "nvidia-imex": Service("nvidia-imex", "active", enabled=True),
        },
        imex=imex(),
        p2p=P2P({(a, b): "OK" for a in range(4) for b in range(4) if a != b}),
    )
    return with_cards(tuple(tray_gpu(n) for n in range(4)), found, **changes)


def port(index: int, **changes: object) -> IbPort:
    """An InfiniBand port at 400 Gb/s whose subnet manager is known."""
    sound = IbPort(
        hca=f"mlx5_{index}",
        port=1,
        link_layer="InfiniBand",
        state="ACTIVE",
        phys_state="LinkUp",
        rate_gbps=400.0,
        lid=10 + index,
        sm_lid=1,
        board="MT_0000000838",
        sm_guid="b83fd2030045a6c0",
    )
    return replace(sound, **changes)


def with_ports(*ports: IbPort, error: str | None = None) -> Found:
    return cpu_only(ports=Ports(ports, error))


def ask(found: Found, name: str) -> doctor.Check | None:
    """One check of a machine, None when it is left out."""
    return next((check for check in doctor.checks(found) if check.name == name), None)


def results(found: Found) -> dict[str, str]:
    return {check.name: check.result for check in doctor.checks(found)}


def expect(found: Found, name: str, result: str, *words: str) -> doctor.Check:
    """The check has this result and these words in its evidence or remedy."""
    check = ask(found, name)
    assert check is not None, f"{name} is left out"
    said = f"{check.evidence} -> {check.remedy}"
    assert check.result == result, said
    assert (check.remedy is None) == (result == "pass"), said
    for word in words:
        assert word.lower() in said.lower(), said
    return check
