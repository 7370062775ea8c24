"""What is said to the database about a machine: a `Found` as the documents of agent.report_*. Pure.

Called by machine.py and by the `probe` command. Unknown fields are left out; the fields are those
that sql/functions/51 to 53 read.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import agent
from agent import xids
from agent.probes import gpus, host, warnings, wiring
from agent.probes.board import Layout
from agent.probes.fast import known

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from agent.health import Finding
    from agent.probes.card import Gpu, Gpus, MigDevice
    from agent.probes.disks import Disk
    from agent.probes.engines import Engine
    from agent.probes.found import Found
    from agent.probes.ib import IbPort
    from agent.probes.imex import Imex
    from agent.probes.inventory import ProbeConfig
    from agent.xids import Event

MAX_PAIRS: Final = 200
"""IMEX connections that are named when they are not up; a whole rack has 306."""


def host_document(found: Found, config: ProbeConfig) -> dict[str, Any]:
    """The host: figures of the machine beside what our control group leaves of them."""
    seen = found.host
    cpu = seen.cpu if seen else host.Cpu()
    memory = seen.memory if seen else host.Memory()
    return known(
        hostname=seen.hostname if seen else None,
        mgmt_addr=config.mgmt_addr,
        os=seen.os if seen else None,
        kernel=seen.kernel if seen else None,
        arch=cpu.arch,
        cpu_model=cpu.model,
        cpu_flags=list(cpu.flags) or None,
        cpus_host=cpu.count,
        cpus_effective=found.cpus,
        memory_host_mib=memory.total_mib,
        memory_effective_mib=found.usable.total_mib,
        memory_available_mib=found.usable.available_mib,
        labels=dict(config.labels),
        agent_version=agent.__version__,
        ports=list(config.ports) if config.ports else None,
        warnings=list(_warnings(found)),
        machine=_machine(found) | known(provision=list(config.provisions) or None),
        nvlink=_nvlink(found),
        imex=_imex(found.imex),
    )


def _warnings(found: Found) -> Iterator[str]:
    yield from warnings.cpu(found.host.cpu if found.host else host.Cpu())
    yield from warnings.disks(found.disks)
    answering = any(not card.problems for card in found.gpus.cards)
    yield from warnings.gpus(found.gpus.error, answering)
    yield from (warnings.nameless(card) for card in found.gpus.cards if gpus.key(card) is None)
    yield from warnings.unnamed_slices(found.gpus.cards)
    if found.ports.error:
        yield f"fabric ports: {found.ports.error}"


def _machine(found: Found) -> dict[str, Any]:
    """Facts for people that nothing decides on."""
    seen = found.host
    layout = seen.layout if seen else Layout()
    counts = found.pci.accelerator_counts()
    return known(
        sockets=layout.sockets,
        cores=layout.cores,
        smt=layout.smt,
        offline_cpus=layout.offline,
        numa_nodes=seen.numa_nodes if seen else None,
        boot_id=seen.boot_id if seen else None,
        booted_at=seen.booted_at if seen else None,
        product=seen.product if seen else None,
        virtual=seen.virtual if seen else None,
        wsl=seen.wsl if seen else None,
        coherent_mib=(seen.memory.coherent_mib or None) if seen else None,
        gpu_source=found.gpus.source,
        pci_accelerators=counts or None,
        nvswitches=len(found.pci.nvswitches()) or None,
        pci_error=found.pci.error,
        wiring_error=found.wiring_error,
        services_error=next((s.error for s in found.services.values() if s.state is None), None),
        services={
            name: service.state
            for name, service in found.services.items()
            if service.state not in (None, "absent")
        }
        or None,
    )


def _nvlink(found: Found) -> dict[str, Any]:
    verdict = found.domain
    return known(state=verdict.state, domain=verdict.key, reason=verdict.reason)


def _imex(seen: Imex | None) -> dict[str, Any] | None:
    if seen is None:
        return None
    return known(
        state=seen.state,
        domain_state=seen.domain_state,
        version=seen.version,
        channels=seen.channels,
        has_major=seen.has_major,
        owner=seen.owner,
        owners=list(seen.owners) or None,
        error=seen.error,
        nodes=[known(**asdict(node)) for node in seen.nodes] or None,
        not_connected=[list(pair) for pair in seen.connections[:MAX_PAIRS]] or None,
    )


def gpu_documents(found: Found) -> list[dict[str, Any]] | None:
    """Cards, and after each its MIG slices; None when they could not be asked for.

    None is not the word that the cards are gone: keep what was reported before.
    """
    documents = []
    grouped = wiring.islands(found.gpus.cards)
    for card in found.gpus.cards:
        if (key := gpus.key(card)) is None:
            continue  # nothing to file it under: a warning of the host names it
        whole = _card(card, key, found.gpus, found.findings.get(key, ()))
        whole |= known(island=grouped.get(id(card)))
        documents += [whole, *(_slice(card, part, whole) for part in card.slices if part.uuid)]
    return None if found.gpus.error and not documents else documents


def _card(card: Gpu, key: str, driver: Gpus, findings: Sequence[Finding]) -> dict[str, Any]:
    # On a machine with cards of two vendors the versions are those of NVIDIA's driver.
    of_driver = card.vendor == "nvidia" or driver.source not in ("nvml", "nvidia-smi")
    document = known(
        uuid=key,
        index=card.index,
        name=card.name,
        vendor=card.vendor,
        memory_mib=card.memory_mib,
        memory_kind=card.memory_kind,
        pci_bus_id=card.pci_bus_id,
        numa=card.numa,
        driver_version=driver.driver_version if of_driver else None,
        cuda_version=driver.cuda_version if of_driver else None,
        partitioned=True if card.mig else None,
        fabric_state=card.fabric.state,
        cluster_uuid=card.fabric.cluster_uuid,
        clique=card.fabric.clique,
        bandwidth=card.fabric.bandwidth,
        nearest_nic=card.nearest_nic,
        nic_path=card.nic_path,
        paths=dict(card.paths) or None,
        detail=_detail(card) or None,
    )
    document |= known(**{"class": gpus.gpu_class(card.name)})
    return document | {"findings": finding_documents(findings)}


def _detail(card: Gpu) -> dict[str, Any]:
    """What people look at when they look at one card."""
    parts = {
        "pcie": known(**asdict(card.pcie)),
        "clocks": known(**asdict(card.clocks)),
        "ecc": known(**asdict(card.ecc)),
        "repair": known(**asdict(card.repair)),
        "fabric": known(
            status=card.fabric.status,
            health=card.fabric.health,
            faults=list(card.fabric.faults) or None,
        ),
    }
    return {name: part for name, part in parts.items() if part} | known(
        cpu_affinity=card.cpu_affinity,
        numa_memory=card.numa_memory,
        power_limit_w=card.power_limit_w,
        persistence=card.persistence,
        recovery_action=card.recovery_action,
        mig=card.mig,
        throttle=list(card.throttle) if card.throttle else None,
        nvlinks=[known(**asdict(link)) for link in card.nvlinks or ()] or None,
    )


def _slice(card: Gpu, part: MigDevice, whole: Mapping[str, Any]) -> dict[str, Any]:
    """A slice: a unit of its own, of a class of its own, as healthy as its card."""
    kind = "-".join(filter(None, (gpus.gpu_class(card.name), part.profile or "MIG")))
    inherited = ("driver_version", "cuda_version", "numa", "pci_bus_id", "nearest_nic", "nic_path")
    return known(
        uuid=part.uuid,
        index=card.index,
        name=f"{card.name} MIG {part.profile}" if card.name and part.profile else card.name,
        vendor=card.vendor,
        memory_mib=part.memory_mib,
        memory_kind=card.memory_kind,
        parent=card.uuid,
        mig_profile=part.profile,
        findings=whole["findings"],
        **{"class": kind},
        **{name: whole.get(name) for name in inherited},
    )


def finding_documents(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Findings as the database keeps them."""
    return [asdict(finding) for finding in findings]


def port_documents(ports: Iterable[IbPort]) -> list[dict[str, Any]]:
    """Fabric ports. The rate of a port that is down is a default of its card and left out."""
    return [_port(port) for port in ports]


def _port(port: IbPort) -> dict[str, Any]:
    up = port.state in ("ACTIVE", "INIT", "ARMED")
    told = asdict(port) | {"active": port.active, "key": port.key, "errors": dict(port.errors)}
    return known(**(told | {"rate_gbps": port.rate_gbps if up else None}))


def disk_documents(space: Iterable[Disk]) -> list[dict[str, Any]]:
    """Filesystems, each once; one that does not answer has no sizes."""
    return [known(**asdict(disk)) for disk in space]


def engine_documents(found: Iterable[Engine]) -> list[dict[str, Any]]:
    """Engines that can be started here, and broken ones with what is wrong."""
    return [known(**{"state": "installed", **known(**asdict(engine))}) for engine in found]


def event_documents(events: Iterable[Event], uuids: Mapping[str, str]) -> list[dict[str, Any]]:
    """Error events of cards for the history. `uuids` are those of cards by PCI address."""
    return [_event(event, uuids) for event in events]


def _event(event: Event, uuids: Mapping[str, str]) -> dict[str, Any]:
    fault = event.what in ("xid", "sxid", "amd")
    means = xids.finding(event) if fault else None
    address = event.pci_bus_id
    return known(
        kind=event.what,
        object=event.uuid or uuids.get(address or "") or (f"PCI-{address}" if address else "host"),
        now=event.code,
        evidence=known(
            text=event.text[:500] or None,
            at_s=event.at,
            pid=event.pid,
            process=event.process,
            count=event.count,
            means=means.text if means else None,
            finding_kind=means.kind if means else None,
        ),
    )
