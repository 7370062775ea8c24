"""What a probe found as a page for people. Pure: the documents in, text out.

Called by the `probe` command. What nobody knows is `-`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Document = dict[str, Any]
WIDE = 200
"""Characters of a cell; a reason may be long, a page should stay readable."""


def page(found: Mapping[str, Any]) -> str:
    """The whole page."""
    host = found["host"]
    sections = (
        ("Host", _host(host, found.get("load") or {})),
        ("GPUs", _gpus(found["gpus"], host)),
        ("Use of GPUs", _use(found["gpus"] or [], found.get("gpu_use") or [])),
        ("Findings", _findings(found["gpus"] or [])),
        ("Wiring", _matrix(found["gpus"] or [])),
        ("Multi-node NVLink", _nvlink(host)),
        ("Fabric ports", _ports(found["ports"])),
        ("Disks", _disks(found["disks"])),
        ("Engines", _engines(found["engines"])),
        ("Weights", _weights(found["weights"])),
        ("Warnings", [f"  {warning}" for warning in host.get("warnings", [])]),
    )
    return "\n\n".join("\n".join([title, *lines]) for title, lines in sections if lines) + "\n"


def table(rows: Iterable[Sequence[object]]) -> list[str]:
    """Aligned columns, two blanks apart and before; the first row is the heading."""
    cells = [["-" if c in (None, "") else str(c)[:WIDE] for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _pairs(pairs: Iterable[tuple[str, object]]) -> list[str]:
    known = [(name, str(value)) for name, value in pairs if value not in (None, "", [])]
    width = max((len(name) for name, _ in known), default=0)
    return [f"  {name.ljust(width)}  {value}" for name, value in known]


def _mib(value: float | None) -> str | None:
    return None if value is None else f"{value / 1024:.1f} GiB"


def _of(part: str | None, whole: str | None) -> str | None:
    return whole if part is None or part == whole else f"{part} usable of {whole or '-'}"


def _host(host: Document, load: Document) -> list[str]:
    machine = host.get("machine", {})
    count, usable = host.get("cpus_host"), host.get("cpus_effective")
    cpus = None if count is None else f"{count:g}"
    memory = _mib(host.get("memory_effective_mib")), _mib(host.get("memory_host_mib"))
    return _pairs(
        (
            ("name", host.get("hostname")),
            ("address", host.get("mgmt_addr")),
            ("system", ", ".join(filter(None, (host.get("os"), host.get("kernel"))))),
            ("product", machine.get("product")),
            ("processor", ", ".join(filter(None, (host.get("cpu_model"), host.get("arch"))))),
            ("CPUs", _of(None if usable is None else f"{usable:g}", cpus)),
            ("sockets, NUMA nodes", _joined(machine.get("sockets"), machine.get("numa_nodes"))),
            ("memory", _of(*memory)),
            ("available", _mib(host.get("memory_available_mib"))),
            ("load", _joined(*(load.get(name) for name in ("load1", "load5", "load15")))),
            ("pressure", _named(load.get("pressure"))),
            ("services", _named(machine.get("services"))),
            ("PCI accelerators", _named(machine.get("pci_accelerators"))),
            ("labels", _named(host.get("labels"))),
        )
    )  # fmt: skip


def _joined(*values: object) -> str | None:
    return ", ".join("-" if v is None else str(v) for v in values) if any(
        v is not None for v in values
    ) else None  # fmt: skip


def _named(values: Mapping[str, object] | None) -> str | None:
    return ", ".join(f"{name} {value}" for name, value in (values or {}).items()) or None


def _label(card: Document) -> str:
    index = card.get("index", "?")
    return f"{index}:{card.get('mig_profile', 'slice')}" if "parent" in card else f"{index}"


def _gpus(cards: list[Document] | None, host: Document) -> list[str]:
    if cards is None:
        return ["  cannot be asked; see the warnings"]
    if not cards:
        return ["  none"]
    source = host.get("machine", {}).get("gpu_source")
    versions = {(c.get("driver_version"), c.get("cuda_version")) for c in cards}
    driver, cuda = next(iter(versions)) if len(versions) == 1 else (None, None)
    rows: list[Sequence[object]] = [
        ("GPU", "CLASS", "MEMORY", "KIND", "BUS", "NUMA", "NIC", "HEALTH", "UUID")
    ]
    for card in cards:
        nic = card.get("nearest_nic")
        grave = [f["code"] for f in card["findings"] if f["unhealthy"]]
        light = [f["code"] for f in card["findings"] if not f["unhealthy"]]
        health = f"unhealthy: {', '.join(grave)}" if grave else ", ".join(["ok", *light])
        rows.append(
            (
                _label(card), card.get("class"), _memory(card),
                "partitioned" if card.get("partitioned") else card.get("memory_kind"),
                card.get("pci_bus_id"), card.get("numa"),
                f"{nic} {card.get('nic_path', '')}".strip() if nic else None, health, card["uuid"],
            )
        )  # fmt: skip
    told = ", ".join(
        f"{name} {value}"
        for name, value in (("driver", driver), ("CUDA", cuda), ("told by", source))
        if value
    )
    return [*([f"  {told}"] if told else []), *table(rows)]


def _memory(card: Document) -> str | None:
    return None if "memory_mib" not in card else f"{card['memory_mib']} MiB"


def _use(cards: list[Document], told: list[Document]) -> list[str]:
    """What cards do and how they are; a column that no card fills is left out."""
    use = {document["uuid"]: document for document in told}
    rows = [_use_row(card, use.get(card["uuid"], {})) for card in cards]
    names = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    if not names:
        return []
    numbered = zip(cards, rows, strict=True)
    return table(
        [("GPU", *names), *((_label(card), *map(row.get, names)) for card, row in numbered)]
    )


def _use_row(card: Document, use: Document) -> dict[str, str | None]:
    detail = card.get("detail", {})
    clocks, pcie = detail.get("clocks", {}), detail.get("pcie", {})
    gen, width = _with(pcie.get("gen"), "", "gen "), _with(pcie.get("width"), "", "x")
    ecc, repair, links = detail.get("ecc", {}), detail.get("repair", {}), detail.get("nvlinks")
    active = sum(link.get("active") is True for link in links or ())
    return {
        "USED": _with(use.get("memory_used_mib"), " MiB"),
        "FOREIGN": _with(use.get("memory_foreign_mib"), " MiB"),
        "BUSY": _with(use.get("utilization_percent"), " %"),
        "TEMP": _with(use.get("temperature_c"), " C"),
        "POWER": _slash(use.get("power_w"), detail.get("power_limit_w"), " W"),
        "SM CLOCK": _slash(clocks.get("sm"), clocks.get("sm_max"), " MHz"),
        "PCIE": _joined_words(gen, width),
        "NVLINKS": f"{active}/{len(links)}" if links else None,
        "ECC": "off" if ecc.get("enabled") is False else _with(ecc.get("uncorrected"), " bad"),
        "REPAIRS": _joined_words(
            _slash(repair.get("uncorrected"), repair.get("corrected"), ""),
            "pending" if repair.get("pending") else None,
            "failed" if repair.get("failed") else None,
        ),
        "THROTTLE": ", ".join(detail.get("throttle", ())) or None,
    }


def _with(value: float | None, unit: str, before: str = "") -> str | None:
    return None if value is None else f"{before}{round(value, 1):.10g}{unit}"


def _slash(part: float | None, whole: float | None, unit: str) -> str | None:
    if part is None:
        return None
    return f"{part:g}{unit}" if whole is None else f"{part:g}/{whole:g}{unit}"


def _joined_words(*words: str | None) -> str | None:
    return " ".join(word for word in words if word) or None


def _findings(cards: list[Document]) -> list[str]:
    return [
        f"  GPU {_label(card)}: {finding['text']} ({finding['evidence']})"
        for card in cards
        if "parent" not in card
        for finding in card["findings"]
    ]


def _matrix(cards: list[Document]) -> list[str]:
    whole = [card for card in cards if "parent" not in card and "index" in card]
    seen = {name for card in whole for name in card.get("paths", {})}
    if not seen:
        return []
    others = [str(card["index"]) for card in whole]
    nics = sorted(seen - set(others), key=lambda name: (len(name), name))
    rows: list[Sequence[object]] = [("", *(f"GPU{o}" for o in others), *nics, "CPUS", "NUMA")]
    for card in whole:
        me, paths = str(card["index"]), card.get("paths", {})
        cells = ("X" if name == me else paths.get(name) for name in (*others, *nics))
        rows.append(
            (f"GPU{me}", *cells, card.get("detail", {}).get("cpu_affinity"), card.get("numa"))
        )
    return table([tuple(" " if c == "" else c for c in row) for row in rows])


def _nvlink(host: Document) -> list[str]:
    nvlink, imex = host.get("nvlink", {}), host.get("imex")
    if nvlink.get("state") in (None, "none") and imex is None:
        return []
    imex = imex or {}
    return _pairs(
        (
            ("domain", _joined(nvlink.get("state"), nvlink.get("domain"))),
            ("why", nvlink.get("reason")),
            ("IMEX", imex.get("state")),
            ("IMEX domain", imex.get("domain_state")),
            ("IMEX nodes", len(imex["nodes"]) if "nodes" in imex else None),
            ("IMEX channels", imex.get("channels")),
            ("IMEX owner", imex.get("owner")),
            ("IMEX error", imex.get("error")),
        )
    )


def _ports(ports: list[Document]) -> list[str]:
    if not ports:
        return []
    rows: list[Sequence[object]] = [
        ("PORT", "LINK", "STATE", "RATE", "FABRIC", "PHYSICAL", "ERRORS")
    ]
    for port in ports:
        state = ", ".join(filter(None, (port.get("state"), port.get("phys_state"))))
        gbps = port.get("rate_gbps")
        rows.append(
            (
                f"{port['hca']}/{port['port']}", port.get("link_layer"), state,
                None if gbps is None else f"{gbps:g} Gb/s", port.get("fabric"),
                port.get("key") or port.get("sm_error"), _named(port.get("errors")),
            )
        )  # fmt: skip
    return table(rows)


def _disks(disks: list[Document]) -> list[str]:
    rows: Iterator[Sequence[object]] = (
        (d["mount"], d["filesystem"], d["kind"], _mib(d.get("free_mib")), _mib(d.get("total_mib")),
         "yes" if d.get("holds_weights") else "")
        for d in disks
    )  # fmt: skip
    head = ("MOUNT", "FILESYSTEM", "KIND", "FREE", "TOTAL", "WEIGHTS")
    return table([head, *rows]) if disks else []


def _engines(engines: list[Document]) -> list[str]:
    rows = ((e["engine"], e.get("version"), e["state"], e.get("error") or e.get("path"))
            for e in engines)  # fmt: skip
    return table([("ENGINE", "VERSION", "STATE", "WHERE"), *rows]) if engines else []


def _weights(weights: list[Document]) -> list[str]:
    rows = (
        (w.get("name") or w.get("source"), w.get("format"), _bytes(w.get("bytes")),
         "whole" if w["complete"] else w.get("reason"), w["path"])
        for w in weights
    )  # fmt: skip
    return table([("NAME", "FORMAT", "SIZE", "COMPLETE", "PATH"), *rows]) if weights else []


def _bytes(count: int | None) -> str | None:
    return None if count is None else f"{count / 2**30:.2f} GiB"
