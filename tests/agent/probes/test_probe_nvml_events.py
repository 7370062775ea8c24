"""XIDs from a child that waits for them: restarted after a crash, passed over where unsupported."""

from __future__ import annotations

import pytest
import trio

from agent.probes.nvml_events import Xid, watch, xid, xid_events
from tests.agent.probes.nvml_fake import child


async def received(count: int, **options: object) -> list[Xid]:
    """The first events of a child."""
    send, receive = trio.open_memory_channel[Xid](0)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: xid_events(send, restart_s=0.01, **options))
            events = [await receive.receive() for _ in range(count)]
            nursery.cancel_scope.cancel()
    return events


def watching(**scenario: object) -> tuple[str, ...]:
    return (*child(**scenario), "--events")


async def test_xids_with_the_address_of_their_card():
    events = await received(3, child=watching(count=2, events=[[0, 31], 10, [1, 79], [1, 79]]))
    assert events == [("0000:1b:00.0", 31), ("0001:1b:00.0", 79), ("0001:1b:00.0", 79)]


async def test_card_without_events_is_passed_over():
    fail = {"0": {"events": 3}, "1": {"handle": 15}}
    events = await received(1, child=watching(count=3, fail=fail, events=[[2, 48]]))
    assert events == [Xid("0002:1b:00.0", 48)]


@pytest.mark.slow
@pytest.mark.parametrize("last", [15, 999, "crash"])
async def test_child_that_ends_is_started_again(last):
    events = await received(3, child=watching(events=[[0, 31], last]))
    assert events == [("0000:1b:00.0", 31)] * 3


@pytest.mark.slow
async def test_child_that_hangs_is_started_again():
    events = await received(2, child=watching(events=[[0, 31], "hang"]), silence_s=3.0)
    assert events == [("0000:1b:00.0", 31)] * 2


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (watching(init=12), "Unknown Error"),
        (watching(init=18), "RM mismatch"),
        (watching(fail={"0": {"events": 3}}), "Not Supported"),
        (watching(count=0), "no card"),
        (("/bin/sh", "-c", "head -c 200000 /dev/zero"), "ended or fell silent"),
        (("/nonexistent/python",), "cannot be started"),
    ],
)
async def test_machine_without_events_says_why(command, why):
    send, _ = trio.open_memory_channel[Xid](0)
    with trio.fail_after(60):
        watched, told = await watch(command, 30, send)
    assert not watched
    assert why in told


async def test_it_ends_when_nobody_listens():
    send, receive = trio.open_memory_channel[Xid](0)
    receive.close()
    with trio.fail_after(60):
        await xid_events(send, child=watching(events=[[0, 31]]))


@pytest.mark.parametrize(
    "fact",
    [
        {"alive": True},
        {"xid": 79},
        {"xid": 79, "pci_bus_id": None},
        {"xid": "79", "pci_bus_id": "0000:1b:00.0"},
        {"xid": True, "pci_bus_id": "0000:1b:00.0"},
        {"xid": 2**64, "pci_bus_id": "0000:1b:00.0"},
        {"xid": 79, "pci_bus_id": ["0000:1b:00.0"]},
    ],
)
def test_lines_that_are_no_event(fact):
    assert xid(fact) is None
