"""Invented hardware as the values that probes return, so that reports are as long as real ones.

A big machine: eight cards behind NVSwitch in a rack-wide NVLink domain, eight InfiniBand and four
RoCE ports, filers, weights, checks. Called by fleet.py (slow facts) and by node.py (fast facts).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent import documents
from agent.probes import (
    card,
    cgroup,
    disks,
    domain,
    engines,
    found,
    host,
    ib,
    imex,
    imex_owner,
    pci,
    services,
)
from agent.probes.board import Layout
from agent.probes.imex_ctl import ImexNode
from agent.probes.inventory import ProbeConfig

if TYPE_CHECKING:
    from agent.health import Finding
    from ops.simulation.fleet import SimNode

DRIVER, CUDA = "580.95.05", "13.0"
LINKS = 18
OWNERS = (
    imex_owner.Owner(
        "systemd nvidia-imex.service", "`systemctl disable --now nvidia-imex.service`"
    ),
    imex_owner.Owner("process 4711 (nvidia-imex), started by the kubelet", "the ComputeDomain"),
)
_FLAGS = """
    fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush dts acpi mmx
    fxsr sse sse2 ss ht tm pbe syscall nx pdpe1gb rdtscp lm constant_tsc art arch_perfmon pebs bts
    rep_good nopl xtopology nonstop_tsc cpuid aperfmperf tsc_known_freq pni pclmulqdq dtes64
    monitor ds_cpl vmx smx est tm2 ssse3 sdbg fma cx16 xtpr pdcm pcid dca sse4_1 sse4_2 x2apic
    movbe popcnt tsc_deadline_timer aes xsave avx f16c rdrand lahf_lm abm 3dnowprefetch bmi1 avx2
    smep bmi2 erms invpcid cqm rdt_a avx512f avx512dq rdseed adx smap avx512ifma clflushopt clwb
    intel_pt avx512cd sha_ni avx512bw avx512vl xsaveopt xsavec xgetbv1 xsaves avx_vnni avx512_bf16
    wbnoinvd amx_bf16 avx512_fp16 amx_tile amx_int8"""
CHECKS = (
    ("driver", "driver 580.95.05, CUDA 13.0, 8 cards by NVML"),
    ("cards", "8 of 8 cards on PCI answer"),
    ("persistence", "persistence mode on 8 of 8 cards"),
    ("ecc", "no uncorrected error on 8 cards"),
    ("repairs", "no row remap pending or failed on 8 cards"),
    ("recovery", "the driver asks for no reset"),
    ("kernel-log", "no driver error since boot"),
    ("throttling", "no card is held down by heat or power"),
    ("pcie", "8 cards at x16 of x16"),
    ("fabric-manager", "nvidia-fabricmanager is active"),
    ("nvlink", "18 of 18 links up on 8 cards, bandwidth full"),
    ("nvlink-domain", "8 cards in one domain and clique"),
    ("imex", "READY, domain UP, 18 members, 2048 channels"),
    ("peer-access", "every pair of cards can read the other"),
    ("ports", "12 of 12 ports active"),
    ("subnet-manager", "8 ports see one subnet manager"),
    ("cpu", "AVX2 and AVX-512 on 192 CPUs"),
    ("memory", "2013 GiB usable, no limit of a control group"),
    ("disk", "1.0 TiB free below /var/lib/llmgw/weights"),
    ("engines", "vllm 0.32.0 starts"),
)
FACTS: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "model_type": "llama",
    "layers": 80,
    "hidden": 8192,
    "heads": 64,
    "kv_heads": 8,
    "head_size": 128,
    "intermediate": 28672,
    "vocabulary": 128256,
    "max_length": 131072,
    "dtype": "bfloat16",
    "kv_bytes_per_token": 327680,
    "tied_embeddings": False,
    "parameters": 70_553_706_496,
    "tensors": {"bfloat16": 141_107_412_992},
}


def uuid_of(node: str, index: int) -> str:
    """A card's UUID."""
    return f"GPU-{node}-{index}"


def _bus_id(index: int) -> str:
    return f"00000000:{0x19 + 0x11 * index:02x}:00.0"


def nics(node: SimNode) -> list[str]:
    """Names of all fabric cards, InfiniBand first."""
    return [f"mlx5_{number}" for number in range(node.group.infiniband + node.group.ethernet)]


def gpu(node: SimNode, index: int) -> card.Gpu:
    """A healthy card with everything that a driver can say of it; free and cool."""
    kind = node.group.gpus
    assert kind is not None, "only nodes with cards have cards"
    fabrics = nics(node)
    near = fabrics[index % len(fabrics)] if fabrics else None
    others = {str(other): f"NV{LINKS}" for other in range(kind.count) if other != index}
    to_nics = {name: "PIX" if name == near else "SYS" for name in fabrics}
    links = tuple(
        card.NvLink(link, True, 26.562, "switch", f"00000000:{0x60 + link % 4:02x}:00.0")
        for link in range(LINKS)
    )
    return card.Gpu(
        uuid=uuid_of(node.name, index),
        index=index,
        name=f"NVIDIA {kind.class_} simulated",
        pci_bus_id=_bus_id(index),
        memory_mib=kind.memory_mib,
        memory_used_mib=4,
        memory_kind="dedicated",
        utilization_percent=0.0,
        temperature_c=31.0,
        power_w=70.0,
        power_limit_w=700.0,
        clocks=card.Clocks(345, 1980, 2619, 2619),
        throttle=(),
        pcie=card.Pcie(5, 5, 16, 16),
        persistence=True,
        ecc=card.Ecc(True, 0, 0, 0, 0),
        repair=card.Repair(0, 0, False, False),
        fabric=_fabric(node, index),
        nvlinks=links,
        numa=index * 2 // kind.count,
        cpu_affinity="0-47,96-143" if index * 2 < kind.count else "48-95,144-191",
        paths=others | to_nics,
        nearest_nic=near,
        nic_path="PIX" if near else None,
        mig=False,
        processes=(),
    )


def _fabric(node: SimNode, index: int) -> card.Fabric:
    assert node.group.gpus is not None
    if node.number in node.group.joining and index * 2 >= node.group.gpus.count:
        return card.Fabric("in_progress")
    uuid, clique = node.domain if node.group.rack else (card.ZERO_UUID, 0)
    return card.Fabric("completed", "Success", uuid, clique, "full", "healthy")


def _port(node: SimNode, number: int) -> ib.IbPort:
    fast = number < node.group.infiniband
    guid = f"{0xA088C20300000000 + node.index * 64 + number:016x}"
    return ib.IbPort(
        hca=f"mlx5_{number}",
        port=1,
        link_layer="InfiniBand" if fast else "Ethernet",
        state="ACTIVE",
        phys_state="LinkUp",
        rate_gbps=400.0 if fast else 200.0,
        node_guid=guid,
        port_guid=guid,
        lid=1 + (node.index * 8 + number) % 40_000 if fast else None,
        sm_lid=1 if fast else None,
        gid_prefix="fe80:0000:0000:0000",
        netdev=f"ib{number}" if fast else f"eth{number}",
        numa=number % 2,
        pci_bus_id=f"0000:{0x18 + 0x11 * (number % 8):02x}:00.{number // 8}",
        board="MT_0000000838",
        firmware="28.43.2026",
        network=None if fast else node.group.network,
        fabric="compute" if fast else "storage",
        sm_guid=node.group.subnet_manager if fast else None,
        errors={"link_downed": 1, "symbol_error": 3} if number == 0 else {},
    )


def _imex(node: SimNode) -> imex.Imex:
    first = node.index - node.number % node.group.rack
    members = tuple(
        ImexNode(at, f"10.0.{(first + at) // 250}.{1 + (first + at) % 250}", "READY", DRIVER)
        for at in range(node.group.rack)
    )
    running = OWNERS[: 1 + (node.number in node.group.imex_twice)]
    return imex.Imex(
        "READY", "UP", DRIVER, members, channels=2048, has_major=True,
        owner=" and ".join(owner.name for owner in running), error=imex_owner.conflict(running),
        owners=tuple(owner.name for owner in running),
    )  # fmt: skip


def _space(node: SimNode) -> tuple[disks.Disk, ...]:
    local = [("/", "ext4", 1 << 20)] + [(f"/scratch{n}", "xfs", 7 << 20) for n in range(3)]
    shared = [("/home", "nfs4", 50 << 20), ("/models", "lustre", 900 << 20)]
    kinds = [(*disk, "local") for disk in local] + [(*disk, "shared") for disk in shared]
    return tuple(
        disks.Disk(mount, kind, place, total, total // 2, mount == "/models")
        for mount, kind, total, place in kinds
    )


def look(node: SimNode, findings: dict[int, tuple[Finding, ...]], missing: set[str]) -> found.Found:
    """One look at the machine; `findings` by the index of a card, `missing` by UUID."""
    group = node.group
    count = group.gpus.count if group.gpus else 0
    cards = tuple(c for c in (gpu(node, n) for n in range(count)) if c.uuid not in missing)
    memory = host.Memory(group.memory_mib, group.memory_mib * 9 // 10)
    rack = bool(count and group.rack)
    names = ("nvidia-fabricmanager", "nvidia-persistenced") if count else ()
    names += ("nvidia-imex",) if rack else ()
    return found.Found(
        host=host.Host(
            node.name,
            "Ubuntu 24.04.3 LTS (simulated)",
            "6.8.0-85-generic",
            host.Cpu(
                "Simulated 8592 Plus", tuple(_FLAGS.split()), max(1, round(group.cpus)), group.arch
            ),
            memory,
            layout=Layout(2, max(1, round(group.cpus / 2)), max(1, round(group.cpus / 4)), True, 0),
            numa_nodes=2,
            boot_id=f"5c0e4ad2-0000-4000-8000-{node.index:012x}",
            booted_at=1_760_000_000,
            product="simulated",
            virtual=False,
        ),
        limits=cgroup.Limits(),
        usable=memory,
        cpus=group.cpus,
        gpus=card.Gpus(cards, DRIVER, CUDA, None, "nvml" if count else None),
        findings={uuid_of(node.name, index): seen for index, seen in findings.items()},
        pci=pci.Pci(source="sysfs"),
        services={name: services.Service(name, "active", True) for name in names},
        domain=domain.verdict(cards),
        imex=_imex(node) if rack else None,
        ports=ib.Ports(tuple(_port(node, n) for n in range(len(nics(node))))),
        disks=_space(node),
        engines=tuple(
            engines.Engine(name, version, f"/opt/{name}/bin/python")
            for name, version in group.engines.items()
        ),
    )


def slow(node: SimNode, seen: found.Found) -> dict[str, Any]:
    """All slow facts of a look by kind, but the weights."""
    first, last = node.ports
    config = ProbeConfig(mgmt_addr=node.address, labels=node.labels, ports=(first, last))
    return {
        "host": documents.host_document(seen, config) | {"agent_version": "simulated"},
        "gpus": documents.gpu_documents(seen),
        "ports": documents.port_documents(seen.ports.ports),
        "engines": documents.engine_documents(seen.engines),
        "disks": documents.disk_documents(seen.disks),
        "checks": _checks(seen),
    }


def _checks(seen: found.Found) -> list[dict[str, Any]]:
    bad = [finding.text for findings in seen.findings.values() for finding in findings]
    checks: list[dict[str, Any]] = [
        {"name": name, "result": "pass", "evidence": evidence} for name, evidence in CHECKS
    ]
    if bad:
        held = {"result": "warn", "evidence": "; ".join(bad), "remedy": "Look at fans and inlets."}
        checks[7] |= held
    return checks if seen.gpus.cards else checks[-4:]


def weights(node: SimNode) -> list[dict[str, Any]]:
    """Models on the shared filer, the same for every node, with what their headers say."""
    return [
        {
            "source": f"hf:simulated/model-{number:02}",
            "path": f"/models/hub/models--simulated--model-{number:02}/snapshots/{number:040x}",
            "name": f"simulated/model-{number:02}",
            "revision": f"{number:040x}",
            "format": "safetensors",
            "bytes": 141_107_412_992 - number,
            "complete": True,
            "shared": True,
            "filer": "10.2.0.1@tcp:/models",
            "filer_path": f"/hub/models--simulated--model-{number:02}",
            "facts": FACTS,
        }
        for number in range(node.group.weights)
    ]
