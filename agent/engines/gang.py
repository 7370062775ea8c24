"""What engines share when a replica runs on several nodes: ranks, transport, parallelism, the door.

Only rank 0 has a door: it listens for clients and answers when the whole replica is ready. The
other ranks work for it. Called by the engines; looks at the node's interfaces and starts nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

import psutil

from agent.assignment import INFINIBAND, NETWORK, NVLINK, ROCE
from agent.engines.launch import CannotLaunch, has_option, option
from agent.readiness import Check

if TYPE_CHECKING:
    from agent.assignment import Assignment, Gang

SETTLED_S = 2.0
"""A rank without a door counts as ready when it has lived this long: what is wrong with a command
line shows at once, and whether the replica works is the head's to say."""


def gang_of(a: Assignment) -> Gang | None:
    """How to find the others; None on one node. CannotLaunch when nobody said."""
    if a.shards > 1 and a.gang is None:
        raise CannotLaunch(
            f"shard {a.shard} is one of {a.shards} of replica {a.replica} and was not told where "
            f"they meet: upgrade the controller, or use a profile with shards = 1"
        )
    return a.gang


def without_door(a: Assignment) -> Check | None:
    """The check of a rank that serves nobody; None for rank 0, whose engine knows its own."""
    return Check(a.host, a.port, None, lives_s=SETTLED_S) if a.rank > 0 else None


def own_address(host: str) -> str:
    """The node's own IP address behind its management address, which may be a name.

    Engines bind to it and look its interface up, and for that they want no name. A name that is
    unknown stays as it is. Blocks: name service may be slow.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return host
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
    except (OSError, UnicodeError):
        return host
    # Many distributions give the host's own name an address of the loopback too.
    ours = (a for a in found if not _is_loopback(a) and interface_of(a) is not None)
    return next(ours, host)


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None when none has."""
    loopback = _is_loopback(address)
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            own = found.address.partition("%")[0]
            if own == address or (loopback and _is_loopback(own)):
                return name
    return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def environment(a: Assignment, gang: Gang) -> dict[str, str]:
    """What NCCL and Gloo must know: the way between the nodes, and nothing but it."""
    found: dict[str, str] = {}
    interface = interface_of(own_address(a.host))
    if interface is not None:
        # NCCL takes names as beginnings unless told otherwise: eth1 would match eth10.
        found |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
    if gang.transport == NVLINK:
        found["NCCL_MNNVL_ENABLE"] = "1"
    elif gang.transport in (INFINIBAND, ROCE) and gang.hcas:
        found["NCCL_IB_HCA"] = "=" + ",".join(gang.hcas)
    elif gang.transport == NETWORK:
        # The nodes share no fabric: ports of different ones would be tried and never connect.
        found["NCCL_IB_DISABLE"] = "1"
    return found


def parallelism(
    a: Assignment, gang: Gang, tensor: tuple[str, ...], pipeline: tuple[str, ...], *, wide: bool
) -> list[str]:
    """Options that spread the model over all cards, as far as the profile has not said how.

    ``tensor`` and ``pipeline`` are the names of the two options, the first is used. ``wide``: one
    tensor over all nodes, else a tensor in each node and a pipeline between them. A CPU shard
    counts as one card.
    """
    cards = max(1, len(a.gpus))
    total = cards * gang.nodes
    if has_option(a.args, *tensor) and has_option(a.args, *pipeline):
        return []
    for given, missing in ((tensor, pipeline), (pipeline, tensor)):
        if has_option(a.args, *given):
            said = option(a.args, *given) or ""
            parts = total // int(said) if said.isdecimal() and int(said) else 0
            # What does not come out even is the profile's own idea: the engine will judge it.
            even = parts > 1 and parts * int(said) == total
            return [missing[0], str(parts)] if even else []
    if wide:
        return [tensor[0], str(total)]
    inside = [tensor[0], str(cards)] if cards > 1 else []
    return [*inside, pipeline[0], str(gang.nodes)]
