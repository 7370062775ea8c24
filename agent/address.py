"""The address under which others reach this node, when nobody set one."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"


def address_towards(database_url: str) -> str | None:
    """Our address on the way to the database: routers come from that side. None when unknown.

    A connected UDP socket asks the routing table and sends nothing; the name look-up may block.
    """
    parts = urlsplit(database_url)
    try:
        host, port = parts.hostname, parts.port or 5432
        if not host:
            return LOOPBACK  # a Unix socket: everything is on this machine
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return None
