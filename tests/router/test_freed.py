"""What is over is let go of: no request, connection or error leaves anything in memory."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from controller.router.config import Limits, Retries, Timeouts
from controller.router.dialect import CHAT
from controller.router.plain import PlainRelay
from controller.router.relay import Head, Wish
from tests.router.conftest import NEVER_OPEN
from tests.router.wire import ShortAnswer, post_bytes, until

if TYPE_CHECKING:
    from tests.router.conftest import House

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"model": "short"},
    {"model": "nobody"},
    {"stream": True},
    {"stream": True, "model": "short"},
    {"fake": {"status": 500, "body": {"error": {"message": "no"}}}},
    {"stream": True, "fake": {"error_first": {"message": "no", "code": "503"}}},
    {"stream": True, "fake": {"die_at": 2, "die": "rst"}},
    {"fake": {"die_at": 20, "die": "fin"}},
    {"fake": {"gzip": True}, "model": "short"},
)


def test_an_answer_that_is_written_again() -> None:
    wish = Wish("m", b"id", True, False, False, CHAT, None, b'"other"')
    body = b'{"model":"m"}'
    held = sys.getrefcount(wish)
    for _ in range(100):
        relay = PlainRelay(Head(200, [], len(body), b"application/json"), wish, Limits())
        relay.feed(body)
        assert relay.finish().endswith(b'content-length: 17\r\n\r\n{"model":"other"}')
    del relay
    assert sys.getrefcount(wish) == held


async def _everything(house: House) -> None:
    """A request of each kind, one whose client leaves, and one that is none."""
    for fields in KINDS:
        try:
            await house.ask(**fields)
        except ShortAnswer:
            assert "die_at" in fields["fake"]
    wire = await house.wire()
    await wire.chat(stream=True, fake={"tokens": 50, "gap": 0.01})
    await wire.until(b"data: ")
    wire.reset()
    wire = await house.wire()
    await wire.send(post_bytes("/v1/chat/completions", b"{"))
    await wire.answer()
    await wire.send(b"\0\r\n\r\n")
    await wire.answer()
    wire.close()
    await until(lambda: house.idle() and not house.core.clients)


def _alive() -> Counter[str]:
    gc.collect()
    names = (str(type(thing)) for thing in gc.get_objects())
    return Counter(name for name in names if "controller.router." in name or "httptools" in name)


async def test_nothing_is_left_of_requests(house: House) -> None:
    await house.start(retries=Retries(ratio=1.0), breaker=NEVER_OPEN)
    left = []
    for times in (1, 4, 8):
        for _ in range(times):
            await _everything(house)
        house.core.deadlines.sweep(time.monotonic() + 10_000)  # idle ones too, and empty slots
        house.core.usage.undated.clear()
        left.append(_alive())
    assert not left[1] - left[0]
    assert not left[2] - left[0]


async def test_a_closed_connection_waits_for_no_deadline(house: House) -> None:
    """Its slot has it for a second, not for the ten minutes that an engine may take."""
    times = Timeouts(connect_s=1.0, client_idle_s=1.0, client_read_s=1.0)
    house.engine(hold=True)
    await house.start(timeouts=times)
    wire = await house.wire()
    await wire.chat()
    await until(lambda: house.engines[0].held() == 1)
    wire.close()
    await until(house.idle)
    await until(lambda: not len(house.core.deadlines))
