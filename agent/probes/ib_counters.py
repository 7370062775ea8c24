"""Counters of InfiniBand and RoCE ports: bytes moved, and the errors that operators watch.

Called by ib.py (errors) and, each sync, by inventory.py for the rates. All of them are in sysfs;
a value that cannot be read (no such counter, `N/A (no PMA)`, a card in reset) is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.probes.root import Root

Port = tuple[str, int]
"""Card and port number: `("mlx5_0", 1)`."""

CLASS: Final = "/sys/class/infiniband"
MAX_PORTS: Final = 512
"""A card may be split into hundreds of virtual ones; more are not looked at."""
OCTETS_PER_WORD: Final = 4
"""port_xmit_data and port_rcv_data count words of 32 bits, on InfiniBand and on RoCE."""
SATURATED: Final = frozenset({2**32 - 1, 2**64 - 1})
"""Where counters of old cards stop for ever: from there on nothing is known."""

DATA: Final = (
    ("counters_ext/port_xmit_data_64", "counters_ext/port_rcv_data_64", OCTETS_PER_WORD),
    ("counters/port_xmit_data", "counters/port_rcv_data", OCTETS_PER_WORD),
    ("hw_counters/tx_bytes", "hw_counters/rx_bytes", 1),
    ("hw_counters/tx_roce_only_bytes", "hw_counters/rx_roce_only_bytes", 1),
)
"""Sent, received and bytes per count: old kernels' wide counters, the usual ones, other makers'."""

LINK_ERRORS: Final = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors",
    "port_rcv_constraint_errors",
    "port_xmit_discards",
    "port_xmit_constraint_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "VL15_dropped",
)
"""In counters/: the cable, the link and the switch at its other end."""
TRANSPORT_ERRORS: Final = (
    "out_of_sequence",
    "packet_seq_err",
    "implied_nak_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "out_of_buffer",
    "duplicate_request",
    "rx_icrc_encapsulated",
    "req_transport_retries_exceeded",
    "req_rnr_retries_exceeded",
    "roce_adp_retrans",
    "roce_adp_retrans_to",
    "roce_slow_restart",
    "rx_discards_phy",
)
"""In hw_counters/: packets lost or sent again, the sign of a RoCE network that drops."""


@dataclass(frozen=True, slots=True)
class Counters:
    """A port's counters since its card was started; `errors` has every one that can be read."""

    tx_bytes: int | None = None
    rx_bytes: int | None = None
    errors: Mapping[str, int] = field(default_factory=dict)


def ports(root: Root) -> list[Port]:
    """Cards and ports in sysfs, at most MAX_PORTS, `mlx5_2` before `mlx5_10`. Blocking, quick."""
    found: list[Port] = []
    for hca in sorted(root.names(CLASS), key=_natural):
        numbers = (name for name in root.names(f"{CLASS}/{hca}/ports") if _is_number(name))
        found += [(hca, port) for port in sorted(map(int, numbers))]
        if len(found) >= MAX_PORTS:
            break
    return found[:MAX_PORTS]


def _is_number(name: str) -> bool:
    return re.fullmatch(r"[0-9]{1,3}", name, re.ASCII) is not None


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers within names by their size; zero-padded to compare as text."""
    return [(len(part), part) for part in re.split(r"([0-9]+)", name)]


def parse_count(text: str | None) -> int | None:
    """A counter's value, below 2^64; anything else is unknown."""
    stripped = (text or "").replace("\0", "").strip()
    if not re.fullmatch(r"[0-9]{1,20}", stripped, re.ASCII):
        return None
    value = int(stripped)
    return value if value < 2**64 else None


def read_counters(root: Root) -> dict[Port, Counters]:
    """All ports' counters now. Blocking, quick: some 30 small files a port."""
    return {(hca, port): _read(root, f"{CLASS}/{hca}/ports/{port}") for hca, port in ports(root)}


def _read(root: Root, place: str) -> Counters:
    for sent, received, octets in DATA:
        tx, rx = (
            _bytes(root, f"{place}/{sent}", octets),
            _bytes(root, f"{place}/{received}", octets),
        )
        if tx is not None or rx is not None:
            return Counters(tx, rx, read_errors(root, place))
    return Counters(errors=read_errors(root, place))


def _bytes(root: Root, path: str, octets: int) -> int | None:
    value = parse_count(root.read(path, 256))
    return value * octets if value is not None and value not in SATURATED else None


def read_errors(root: Root, place: str) -> dict[str, int]:
    """Error counters of the port whose sysfs directory is `place`. Blocking, quick."""
    files = [(name, f"{place}/counters/{name}") for name in LINK_ERRORS]
    files += [(name, f"{place}/hw_counters/{name}") for name in TRANSPORT_ERRORS]
    read = {name: parse_count(root.read(path, 256)) for name, path in files}
    return {name: value for name, value in read.items() if value is not None}


def not_zero(errors: Mapping[str, int]) -> dict[str, int]:
    """Those that have happened."""
    return {name: value for name, value in errors.items() if value}


def rates(
    before: Mapping[Port, Counters], after: Mapping[Port, Counters], seconds: float
) -> dict[Port, tuple[float | None, float | None]]:
    """Bytes per second sent and received by each port of `after`.

    Unknown (None) for a port that was not there before and for a counter that went backwards: it
    was reset in between, and how far it had come before that nobody knows.
    """
    found: dict[Port, tuple[float | None, float | None]] = {}
    for port, now in after.items():
        then = before.get(port, Counters())
        found[port] = (
            _per_second(then.tx_bytes, now.tx_bytes, seconds),
            _per_second(then.rx_bytes, now.rx_bytes, seconds),
        )
    return found


def _per_second(before: int | None, after: int | None, seconds: float) -> float | None:
    if before is None or after is None or after < before or not seconds > 0:
        return None
    return (after - before) / seconds
