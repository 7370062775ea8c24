"""Where an answer ends, and what a connection is good for afterwards: odd engines, old clients."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from controller.router.config import Timeouts
from controller.router.plain import SHORT_BYTES
from controller.router.upstream import MOST_FRAMING
from tests.router.wire import PATIENCE_S, ShortAnswer, chat_body, post_bytes, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.router.conftest import House

PATH = "/v1/chat/completions"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def saying(house: House, answer: bytes, flood: bytes = b"") -> AsyncIterator[None]:
    """A router before an engine that says `answer`, then `flood` until its peer leaves."""

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(65536)
            await stream.send_all(answer)
            try:
                while flood:
                    await stream.send_all(flood)
            except trio.BrokenResourceError:
                pass

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        await house.start(f"http://127.0.0.1:{port}")
        yield
        nursery.cancel_scope.cancel()
    await until(house.idle)


@pytest.mark.parametrize(
    ("answer", "flood"),
    [(OK, b"x-h: %b\r\n" % (b"y" * 4000)), (OK + b"x-h: ", b"y" * 65536),
     (b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 1000), (CHUNKED + b"5;", b"y" * 65536)],
    ids=["headers", "a header", "1xx", "chunk extension"],
)  # fmt: skip
async def test_an_answer_that_never_comes_to_its_body_is_a_502_in_bounded_memory(
    house: House, answer: bytes, flood: bytes
) -> None:
    async with saying(house, answer, flood):
        with trio.fail_after(PATIENCE_S):
            told = await house.ask()
    assert (told.status, told.code) == (502, "upstream_failed")
    assert "not http" in told.json["error"]["message"]


async def test_trailers_that_never_end_are_a_cut_answer(house: House) -> None:
    begun = CHUNKED + b"%x\r\n%b\r\n0\r\n" % (SHORT_BYTES, b" " * SHORT_BYTES)
    async with saying(house, begun, b"x-t: %b\r\n" % (b"y" * 4000)):
        with pytest.raises(ShortAnswer):
            await house.ask()


async def test_framing_between_pieces_does_not_add_up(house: House) -> None:
    piece = b"1;%b\r\n" % (b"x" * 1000)
    pieces = b"".join(piece + b" \r\n" for _ in range(2 * MOST_FRAMING // 1000))
    async with saying(house, CHUNKED + pieces + b"0\r\n\r\n"):
        assert not (await house.ask()).body.strip()


async def test_transfer_encoding_identity_ends_with_the_close(house: House) -> None:
    async with saying(house, OK + b"transfer-encoding: identity\r\n\r\n{}"):
        assert (await house.ask()).body == b"{}"


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
@pytest.mark.parametrize("length", [b"", b"content-length: 2\r\n"])
async def test_an_answer_without_a_body_has_no_length(
    house: House, status: bytes, length: bytes
) -> None:
    async with saying(house, b"HTTP/1.1 %b\r\n%b\r\n" % (status, length)):
        wire = await house.wire()
        for _ in range(2):  # the client's connection stays
            await wire.chat()
            code, headers = await wire.head()
            assert code == int(status[:3])
            assert not {"content-length", "transfer-encoding", "connection"} & headers.keys()


async def test_a_stream_whose_engine_does_not_end_it_after_done_ends_soon(house: House) -> None:
    engine = house.engine(end_delay=60)
    await house.start(timeouts=Timeouts(comment_s=0.2))
    answer = await house.ask(stream=True)
    assert answer.events[-1] == "[DONE]"
    row = await house.row()
    assert (row["status"], row["completion_tokens"]) == ("ok", 3)
    await until(lambda: engine.records[0].closed is not None)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/nope", "/healthz"])
async def test_an_http10_client_that_would_stay_is_not_kept_waiting(
    house: House, path: str
) -> None:
    """It waits for the close where no header says that the connection stays."""
    await house.start()
    wire = await house.wire()
    auth = "authorization: Bearer sk-test\r\nconnection: keep-alive\r\n"
    await wire.send(f"GET {path} HTTP/1.0\r\n{auth}\r\n".encode())
    assert (await wire.answer()).headers["connection"] == "close"
    assert await wire.closed()


@pytest.mark.parametrize(
    ("version", "connection"), [(b"1.0", "upgrade"), (b"1.1", "upgrade, close")]
)
async def test_an_offer_to_upgrade_changes_neither_version_nor_close(
    house: House, version: bytes, connection: str
) -> None:
    await house.start()
    wire = await house.wire()
    data = post_bytes(PATH, chat_body(stream=True), connection=connection, upgrade="h2c")
    await wire.send(data.replace(b"HTTP/1.1", b"HTTP/" + version, 1))
    answer = await wire.answer()
    assert answer.headers["connection"] == "close"
    assert ("transfer-encoding" in answer.headers) == (version == b"1.1")
    assert answer.events[-1] == "[DONE]"
    assert await wire.closed()
