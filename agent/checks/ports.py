"""Checks of InfiniBand and RoCE ports: are they up, on which network, with how many errors. Pure.

A port that the settings put on a fabric has to work; of another one that is down it is only said,
as many machines have more ports than cables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from agent.checks import labels
from agent.checks.verdict import Verdict, failed, passed, together, warned

if TYPE_CHECKING:
    from agent.probes.found import Found
    from agent.probes.ib import IbPort

MANY: Final[dict[str, int]] = {
    "symbol_error": 1000,
    "link_error_recovery": 20,
    "link_downed": 20,
    "port_rcv_errors": 1000,
    "port_rcv_remote_physical_errors": 1000,
    "local_link_integrity_errors": 10,
    "excessive_buffer_overrun_errors": 10,
    "port_xmit_discards": 1_000_000,
    "rx_icrc_encapsulated": 100,
    "req_transport_retries_exceeded": 100,
    "req_rnr_retries_exceeded": 1000,
    "rx_discards_phy": 1_000_000,
}
"""Counts since the card was started from which on a port is looked at. Others go up in normal use:
packets out of order, multicast that nobody wanted."""
_UNANSWERED: Final = ("no subnet manager answers", "no lid yet")


def _of(found: Found, *layers: str) -> list[IbPort]:
    return [port for port in found.ports.ports if port.link_layer in layers]


def infiniband(found: Found) -> Verdict | None:
    """InfiniBand (and Omni-Path) ports: active ones, ones that are not, and slow ones."""
    ports = _of(found, "InfiniBand", "OmniPath")
    verdicts = _up(ports, "has its cable and switch port in order? `ibstat` tells") if ports else []
    if found.ports.error:
        verdicts.append(warned(found.ports.error, "run `ibstat` by hand"))
    unknown = [port for port in found.ports.ports if port.link_layer is None]
    if unknown:
        words = f"kind of link not known: {labels.listed(map(labels.port, unknown))}"
        verdicts.append(warned(words, "run `ibstat` by hand"))
    return together(verdicts)


def roce(found: Found) -> Verdict | None:
    """Ethernet ports with RDMA: active, and with the address by which RoCE is routed."""
    ports = _of(found, "Ethernet")
    if not ports:
        return None
    verdicts = _up(ports, "has its cable and switch port in order? `rdma link` tells")
    bare = [port for port in ports if port.active and port.network is None]
    if bare:
        words = f"no RoCE v2 address: {labels.listed(map(_with_netdev, bare))}"
        remedy = "give the interface an IP address (`ip addr`), or declare no fabric for it"
        verdicts.append(warned(words, remedy))
    return together(verdicts)


def _with_netdev(port: IbPort) -> str:
    return f"{labels.port(port)} ({port.netdev})" if port.netdev else labels.port(port)


def _up(ports: Sequence[IbPort], asked: str) -> list[Verdict]:
    active = [port for port in ports if port.active]
    rates = sorted({port.rate_gbps for port in active if port.rate_gbps is not None})
    speed = f" at {' and '.join(f'{rate:g}' for rate in rates)} Gb/s" if rates else ""
    summary = f"{len(active)} of {labels.counted(len(ports), 'port')} active{speed}"
    down = [port for port in ports if not port.active]
    disabled = [port for port in down if port.phys_state == "Disabled" and port.fabric is None]
    wrong = [port for port in down if port not in disabled]
    needed = [port for port in wrong if port.fabric is not None]
    if disabled:
        summary += f", {len(disabled)} switched off"
    verdicts = []
    if needed:
        words = f"{summary}; on a declared fabric and not active: {_states(needed)}"
        remedy = f"each port of a declared fabric has to be active: {asked}"
        verdicts.append(failed(words, remedy))
    elif wrong:
        words = f"{summary}; not active: {_states(wrong)}"
        verdicts.append(warned(words, f"a port that should be used: {asked}"))
    else:
        verdicts.append(passed(summary))
    return verdicts + _slow(active)


def _states(ports: Sequence[IbPort]) -> str:
    return labels.listed(f"{labels.port(port)} {_state(port)}" for port in ports)


def _state(port: IbPort) -> str:
    words = " ".join(filter(None, (port.state or "?", port.phys_state)))
    if port.state == "ACTIVE":
        words += " without a LID"
    return words + (f" ({port.fabric})" if port.fabric else "")


def _slow(active: Sequence[IbPort]) -> list[Verdict]:
    """Ports below the best of their own board and fabric: a cable that lost lanes."""
    best: dict[tuple[str, str | None], float] = {}
    rated = [(p, p.board, p.rate_gbps) for p in active if p.board and p.rate_gbps is not None]
    for port, board, rate in rated:
        best[board, port.fabric] = max(rate, best.get((board, port.fabric), 0))
    slow = [
        f"{labels.port(port)} {rate:g} of {best[board, port.fabric]:g} Gb/s"
        for port, board, rate in rated
        if rate < best[board, port.fabric]
    ]
    remedy = "reseat or change the cable (`ibstat`, `ibdiagnet` or `mlxlink -d DEVICE` tell more)"
    return [warned(f"slower than others: {labels.listed(slow)}", remedy)] if slow else []


def port_errors(found: Found) -> Verdict | None:
    """Error counters that are high; they count from the start of the card."""
    ports = [port for port in found.ports.ports if port.active]
    if found.ports.error and not any(port.errors for port in ports):
        return None  # only a tool told of the ports, and it tells no counters
    high = [
        f"{labels.port(port)} {name} {value}"
        for port in ports
        for name, value in port.errors.items()
        if value >= MANY.get(name, value + 1)
    ]
    if high:
        remedy = (
            "look at them twice some minutes apart (`perfquery`, or `ethtool -S` for RoCE): where "
            "they grow, change the cable"
        )
        return warned(labels.listed(high), remedy)
    return (
        passed(f"no high error counter on {labels.counted(len(ports), 'port')}") if ports else None
    )


def subnet_manager(found: Found) -> Verdict | None:
    """Which physical network each InfiniBand port is on: known by its subnet manager."""
    ports = [
        port
        for port in _of(found, "InfiniBand", "OmniPath")
        if port.sm_guid or port.state in ("ACTIVE", "INIT", "ARMED")
    ]
    if not ports:
        return None
    known: dict[str, list[str]] = {}
    for port in ports:
        if port.physical:
            known.setdefault(port.physical, []).append(labels.port(port))
    found_words = "; ".join(f"{name}: {labels.listed(on)}" for name, on in known.items())
    silent = [port for port in ports if port.physical is None]
    verdicts = [passed(found_words)] if known else []
    return together([*verdicts, *_unidentified(silent)])


def _unidentified(silent: Sequence[IbPort]) -> list[Verdict]:
    dead: list[tuple[IbPort, str]] = []
    others: list[tuple[IbPort, str]] = []
    for port in silent:
        why = port.sm_error or "its subnet manager was not asked"
        (dead if any(w in why.lower() for w in _UNANSWERED) else others).append((port, why))
    verdicts = []
    if dead:
        remedy = "see that a subnet manager runs on this fabric (opensm, UFM, or in the switch)"
        verdicts.append(failed(_by_reason(dead), remedy))
    if others:
        declared = sorted({port.fabric for port, _ in others if port.fabric})
        names = f"; declared as {labels.listed(declared)}, not proven" if declared else ""
        remedy = "run the agent as root, with infiniband-diags installed (`sminfo`)"
        verdicts.append(warned(_by_reason(others) + names, remedy))
    return verdicts


def _by_reason(told: Sequence[tuple[IbPort, str]]) -> str:
    """Each reason once, with the ports that it is true of."""
    ports: dict[str, list[str]] = {}
    for port, why in told:
        plain = why.removeprefix(f"{labels.port(port)}: ")
        ports.setdefault(plain, []).append(labels.port(port))
    return "; ".join(f"{labels.listed(names)}: {why}" for why, names in ports.items())
