"""Maps of fabrics, made from the texts of scans in a worker thread and kept while they are true.

One `Maps` belongs to one admin app (server.py); fabrics.py asks it. The biggest fabric costs some
seconds of one core and 100 MB, so one map is made at a time and a few are kept.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import trio

from controller.fabric import graph, ibnetdiscover
from controller.fabric.map import to_map

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from controller.fabric.model import Graph, HostPort

    Text = Callable[[], Awaitable[tuple[str, str] | None]]

MOST: Final = 4
"""Fabrics whose maps are kept; the one asked for longest ago goes first."""


@dataclass(frozen=True, slots=True)
class Built:
    """What one text came to. `document` is None when no device was in it: `graph.notes` say why."""

    graph: Graph
    document: dict[str, Any] | None
    guids: frozenset[str]
    """Of the ports of hosts."""


def build(text: str, hosts: Mapping[str, HostPort]) -> Built:
    """The map of a text, hosts named by GUID. Pure, takes seconds for a big fabric."""
    found = ibnetdiscover.parse(text)
    made = graph.build(found, hosts)
    guids = frozenset(port.guid for host in made.hosts for port in host.ports)
    return Built(made, to_map(made) if found.devices else None, guids)


def digest(hosts: Mapping[str, HostPort]) -> bytes:
    """Equal for equal hosts: a map whose hosts have other names now is made anew."""
    lines = sorted(f"{guid} {at.port} {at.hca} {at.node}" for guid, at in hosts.items())
    return hashlib.sha256("\n".join(lines).encode()).digest()


class Maps:
    """The maps of one app by fabric: the newest of each, of at most `MOST` fabrics."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[str, bytes], Built]] = {}
        self._making = trio.Lock()

    async def of(
        self, key: str, version: str, hosts: Mapping[str, HostPort], text: Text
    ) -> Built | None:
        """The map of a fabric; `text` answers (text, version) and is asked when it must be made.

        None when the text is gone by then. What `text` raises passes through.
        """
        mark = await trio.to_thread.run_sync(digest, hosts)
        known = self._known(key, (version, mark))
        if known is not None:
            return known
        async with self._making:
            known = self._known(key, (version, mark))  # another request may have made it meanwhile
            if known is not None:
                return known
            read = await text()
            if read is None:
                return None
            built = await trio.to_thread.run_sync(build, read[0], hosts)
            self._keep(key, (read[1], mark), built)
            return built

    def _known(self, key: str, mark: tuple[str, bytes]) -> Built | None:
        entry = self._kept.get(key)
        if entry is None or entry[0] != mark:
            return None
        self._kept[key] = self._kept.pop(key)  # now the one asked for last
        return entry[1]

    def _keep(self, key: str, mark: tuple[str, bytes], built: Built) -> None:
        self._kept.pop(key, None)
        self._kept[key] = mark, built
        while len(self._kept) > MOST:
            del self._kept[next(iter(self._kept))]
