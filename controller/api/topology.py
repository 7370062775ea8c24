"""The answer for one fabric: its row, its map, and what agents say of its ports now. Pure.

Called by fabrics.py with rows of sql/queries/admin.sql. What nobody knows is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from controller.fabric.model import HostPort
from controller.fabric.problems import LivePort, problems

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from controller.api.maps import Built

    Row = Mapping[str, Any]

LIVE_FIELDS: Final = (
    "node", "hca", "port", "state", "phys_state", "gbps", "tx_bps", "rx_bps", "errors",
)  # fmt: skip
SCAN_FIELDS: Final = (
    "id", "key", "label", "declared", "scanned_at", "scanned_by", "took_ms", "error", "scanning",
)  # fmt: skip
_NO_GUIDS: Final = (None, "", "0" * 16)


def hosts(ports: Iterable[Row]) -> dict[str, HostPort]:
    """Which port an agent reported under a GUID; the first row wins, a port GUID over a node's."""
    rows = list(ports)
    found: dict[str, HostPort] = {}
    for name in ("port_guid", "node_guid"):
        for row in rows:
            if row[name] not in _NO_GUIDS:
                found.setdefault(row[name], HostPort(row["node"], row["hca"], row["port"]))
    return found


def answer(
    fabric: Row, ports: Iterable[Row], managers: list[str] | None, built: Built | None
) -> dict[str, Any]:
    """A `TopologyView` without the map's age."""
    here = live(ports, fabric["key"], built)
    of_ib = fabric["kind"] == "InfiniBand"
    return {name: fabric[name] for name in SCAN_FIELDS if name in fabric} | _known(
        map=None if built is None else built.document,
        live={name: _known(**{k: row[k] for k in LIVE_FIELDS}) for name, row in here.items()},
        problems=[*fabric.get("problems", ()), *_of_map(built, here)] or None,
        sm=fabric.get("physical") if of_ib else None,
        sms=managers or None,
    )


def live(ports: Iterable[Row], key: str, built: Built | None) -> dict[str, Row]:
    """The ports of this fabric by port GUID: those that are on it now, and those in its map.

    A port that is down follows no subnet manager, so the map alone knows that it belongs here.
    Where an agent knows no port GUID, `node/hca/port` stands for it.
    """
    mapped = frozenset[str]() if built is None else built.guids
    found: dict[str, Row] = {}
    for row in ports:
        guid = row["port_guid"]
        name = f"{row['node']}/{row['hca']}/{row['port']}" if guid in _NO_GUIDS else guid
        if row["key"] == key or name in mapped:
            found.setdefault(name, row)
    return found


def _of_map(built: Built | None, here: Mapping[str, Row]) -> Iterator[str]:
    """What is wrong with the map; nodes that nobody hears of say nothing against it."""
    if built is None:
        return
    now = {
        name: LivePort(row["node"], row["hca"], row["state"], row["phys_state"], row["gbps"])
        for name, row in here.items()
        if row["heard"]
    }
    if built.document is not None:
        yield from (problem.text for problem in problems(built.graph, now))
    yield from (f"the scan's text: {note}" for note in built.graph.notes)


def _known(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
