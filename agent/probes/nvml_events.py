"""XIDs as they happen, from a child process that waits for the driver's events.

Started once by the agent beside its other loops; health.py consumes what is sent. The child is
started again when it ends or falls silent, later and later while that goes on. Where no card has
events (old cards, some virtual ones) the kernel log is the only source, and this costs nothing.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog
import trio

from agent.probes import values
from agent.probes.nvml import HOME
from agent.probes.nvml_facts import parse
from agent.probes.root import kill, stuck_processes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

CHILD: Final = (sys.executable, "-P", "-m", "agent.probes.nvml_child", "--events")
SILENCE_S: Final = 60.0
"""The child says that it lives every 5 s; opening many sleeping cards takes some before that."""
RESTART_S: Final = 5.0
RESTART_MAX_S: Final = 600.0
"""Between starts: doubled after each that did not last, as on a machine without GPUs."""
MAX_LINE: Final = 64 * 1024
MAX_XID: Final = 2**31
ENDS: Final = ("error", "absent", "unsupported")
"""What a child says before it ends."""
log = structlog.get_logger()


class Xid(NamedTuple):
    """An error event of the driver: the card's address as sysfs writes it, and the XID's number."""

    pci_bus_id: str
    xid: int


async def xid_events(
    send: trio.MemorySendChannel[Xid],
    *,
    child: Sequence[str] = CHILD,
    silence_s: float = SILENCE_S,
    restart_s: float = RESTART_S,
) -> None:
    """Send each XID; runs until it is cancelled or nobody receives any more, and closes `send`.

    `silence_s`: a child that prints nothing for so long hangs in the driver and is killed.
    `restart_s`: the first wait before another one is started, seconds.
    """
    wait_s = restart_s
    async with send:
        while True:
            began = trio.current_time()
            try:
                watched, why = await watch(child, silence_s, send)
            except trio.BrokenResourceError:
                return
            # A lost card may end each child at once: only one that lasted counts as well again.
            lasted = watched and trio.current_time() - began > silence_s
            wait_s = restart_s if lasted else min(2 * wait_s, RESTART_MAX_S)
            log.debug("no XID events for now", why=why, again_in_s=wait_s)
            await trio.sleep(wait_s)


async def watch(
    child: Sequence[str], silence_s: float, send: trio.MemorySendChannel[Xid]
) -> tuple[bool, str]:
    """One life of the child: whether it watched any card, and why it ended."""
    if stuck := stuck_processes():
        return False, f"not started: {stuck}"
    try:
        process = await trio.lowlevel.open_process(
            list(child),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=HOME,
        )
    except OSError as error:
        return False, f"{child[0]}: cannot be started: {error}"
    assert process.stdout is not None
    watched, why = False, "the child ended or fell silent"
    try:
        async with aclosing(_facts(process.stdout, silence_s)) as facts:
            async for fact in facts:
                watched = watched or "watching" in fact
                why = str(next((fact[word] for word in ENDS if word in fact), why))
                if (event := xid(fact)) is not None:
                    await send.send(event)
    finally:
        await kill(process)
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(process.stdout)
    return watched, why


async def _facts(
    stream: trio.abc.ReceiveStream, silence_s: float
) -> AsyncGenerator[dict[str, Any], None]:
    """Lines as objects, until the end, silence, or a line without an end."""
    rest = b""
    while len(rest) < MAX_LINE:
        chunk: bytes | bytearray = b""
        with suppress(trio.BrokenResourceError), trio.move_on_after(silence_s):
            chunk = await stream.receive_some(4096)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if (fact := parse(line.decode("utf-8", errors="replace"))) is not None:
                yield fact


def xid(fact: dict[str, Any]) -> Xid | None:
    """The event of a line; None when it is none, or of a card without an address."""
    number, bus = fact.get("xid"), fact.get("pci_bus_id")
    address = values.pci_bus_id(bus) if isinstance(bus, str) else None
    if type(number) is not int or not 0 < number < MAX_XID or address is None:
        return None
    return Xid(address, number)
