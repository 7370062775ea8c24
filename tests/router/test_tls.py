"""TLS on the client port: everything as without, plus handshakes, certificates and their ends."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import ssl
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio

from controller.router.config import Limits, Timeouts
from controller.router.plain import SHORT_BYTES
from controller.router.tls import server_context
from tests.certificates import certificate
from tests.router.wire import PATIENCE_S, Wire, chunk_of, post_bytes, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.router.conftest import House

PATH = "/v1/chat/completions"
MIB = 1024 * 1024


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Path]:
    """The two settings."""
    found = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    certificate(found["tls_cert"], found["tls_key"])
    return found


def trusting(pair: dict[str, Path]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(pair["tls_cert"]))
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


async def encrypted(house: House, pair: dict[str, Path]) -> Wire:
    """A connection with TLS; the socket under it is `raw`."""
    raw = await trio.open_tcp_stream("127.0.0.1", house.port)
    stream = trio.SSLStream(raw, trusting(pair), server_hostname="127.0.0.1")
    wire = Wire(stream)  # type: ignore[arg-type]
    wire.raw = raw
    house.wires.append(wire)
    with trio.fail_after(PATIENCE_S):
        await stream.do_handshake()
    return wire


async def test_requests_streams_and_pipelines_pass(house: House, pair: dict[str, Path]) -> None:
    await house.start(**pair)
    wire = await encrypted(house, pair)
    stream: Any = wire.stream
    assert stream.selected_alpn_protocol() == "http/1.1"
    assert stream.version() in ("TLSv1.2", "TLSv1.3")
    for streamed in (False, True):
        await wire.chat(stream=streamed)
        assert (await wire.answer()).status == 200
    for n in range(5):
        await wire.chat(headers={"x_request_id": f"id-{n}"})
    for n in range(5):
        assert (await wire.answer()).headers["x-request-id"] == f"id-{n}"
    await wire.chat(padding="x" * 5 * MIB)
    assert (await wire.answer()).status == 200
    await wire.chat(headers={"connection": "close"})
    assert (await wire.answer()).status == 200
    assert await wire.stream.receive_some(1) == b""  # without close_notify trio raises


async def test_httpx_and_curl_speak_to_it(house: House, pair: dict[str, Path]) -> None:
    await house.start(**pair)
    url = f"https://127.0.0.1:{house.port}/healthz"

    def use() -> int:
        with httpx.Client(verify=trusting(pair), timeout=PATIENCE_S) as client:
            return sum(client.get(url).status_code for _ in range(3))

    assert await trio.to_thread.run_sync(use) == 600
    if shutil.which("curl"):
        command = ["curl", "-sS", "--cacert", str(pair["tls_cert"]), url]
        done = await trio.run_process(command, capture_stdout=True)
        assert json.loads(done.stdout) == {"status": "ok"}


async def test_a_slow_reader_is_not_given_more_than_a_bound(
    house: House, pair: dict[str, Path]
) -> None:
    house.engine(text="x" * 50_000, tokens=600)  # 30 MB
    await house.start(**pair)
    wire = await encrypted(house, pair)
    await wire.chat(stream=True)
    await wire.until(b"xxxx")
    client = await until(lambda: next(iter(house.core.clients)))
    await until(lambda: client.pending > 256 * 1024)
    up = next(iter(house.core.fleet.everyone()))
    assert up.in_flight == 1
    assert client.pending < 700_000
    assert not house.engines[0].records[0].answered
    assert (await wire.answer_from_chunks()).endswith(b"data: [DONE]\n\n")
    assert (await house.row())["status"] == "ok"


@pytest.mark.parametrize("how", ["close_notify", "fin", "rst", "half-close"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_H05_leaving_is_noticed_however_it_is_done(
    house: House, pair: dict[str, Path], how: str, *, streaming: bool
) -> None:
    await house.start(**pair)
    wire = await encrypted(house, pair)
    fake = {"tokens": 3, "gap": 60} if streaming else {"delay": 60}
    await wire.chat(stream=streaming, headers={"x_fake": json.dumps(fake)})
    record = (await until(house.engines[0].chats))[0]
    if streaming:
        await wire.until(b"tok0")
    if how == "close_notify":
        await wire.stream.unwrap()  # the socket stays open
    elif how == "half-close":
        wire.raw.socket.shutdown(trio.socket.SHUT_WR)
    else:
        (wire.reset if how == "rst" else wire.close)()
    await until(lambda: record.closed)  # the engine would be at it for a minute
    await until(house.idle)
    assert (await house.row())["status"] == "client_closed"


async def test_H02_a_client_that_stopped_reading_does_not_hold_up_the_end(
    house: House, pair: dict[str, Path]
) -> None:
    house.engine(text="x" * 50_000, tokens=600)  # 30 MB
    await house.start(**pair, timeouts=Timeouts(drain_s=0.3))
    wire = await encrypted(house, pair)
    await wire.chat(stream=True)
    client = await until(lambda: next(iter(house.core.clients)))
    await until(lambda: client.pending > 256 * 1024)
    house.running.stop()
    await until(lambda: not house.core.clients)  # else for a minute
    assert house.idle()


async def test_H14_a_cut_answer_is_an_abort_and_no_orderly_end(
    house: House, pair: dict[str, Path]
) -> None:
    house.engine(die_at=SHORT_BYTES, die="fin", framing="chunked", text="x" * 2000)
    await house.start(**pair)
    wire = await encrypted(house, pair)
    await wire.chat()
    with pytest.raises(Exception, match="ended early"):
        await wire.answer()


async def test_A32_the_answer_to_a_refused_body_arrives(
    house: House, pair: dict[str, Path]
) -> None:
    """What is still sent meanwhile, and the client's own end, are no failures of TLS."""
    await house.start(**pair, limits=Limits(body_bytes=MIB))
    wire = await encrypted(house, pair)
    head = f"POST {PATH} HTTP/1.1\r\nhost: t\r\nauthorization: Bearer sk-test\r\n"
    await wire.send(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
    for _ in range(8):
        await wire.send(chunk_of(b"x" * MIB))
    answer = await wire.answer()
    assert (answer.status, answer.code) == (413, "request_too_large")
    await wire.stream.aclose()
    await until(lambda: not house.core.clients)
    assert house.core.stats.counts == {"accepted": 1}


async def test_plain_http_is_told_and_closed(house: House, pair: dict[str, Path]) -> None:
    await house.start(**pair)
    for request in (b"GET /healthz HTTP/1.1\r\nhost: t\r\n\r\n", post_bytes(PATH, b"x" * MIB)):
        wire = await house.wire()
        await wire.send(request)
        answer = await wire.answer()
        assert (answer.status, answer.code) == (400, "tls_required")
        assert await wire.closed()
        wire.close()
    rubbish = await house.wire()
    await rubbish.send(b"\xff" * 100)
    await rubbish.more()  # an alert
    assert await rubbish.closed()
    assert house.core.stats.counts["tls_handshake_failures"] == 3
    await until(lambda: not house.core.clients)


async def test_a_handshake_has_a_deadline(house: House, pair: dict[str, Path]) -> None:
    await house.start(**pair)
    silent, slow = await house.wire(), await house.wire()
    await slow.send(b"\x16\x03\x01")
    await until(lambda: len(house.core.clients) == 2)
    house.core.deadlines.sweep(time.monotonic() + Timeouts().handshake_s + 1)
    assert await silent.closed()
    assert await slow.closed()
    assert not house.core.clients
    wire = await encrypted(house, pair)
    assert (await wire.get("/healthz")).status == 200


async def test_many_handshakes_at_once_hold_up_nobody(house: House, pair: dict[str, Path]) -> None:
    """As when a load balancer comes back: who has shaken hands is served between them."""
    await house.start(**pair)
    wire = await encrypted(house, pair)
    outgoing = ssl.MemoryBIO()
    tls = trusting(pair).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1")
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    hello = outgoing.read()
    others = [await trio.open_tcp_stream("127.0.0.1", house.port) for _ in range(200)]
    await until(lambda: len(house.core.clients) == 201)
    house.wires += map(Wire, others)
    for other in others:
        os.write(other.socket.fileno(), hello)  # no await: the router sees all of them at once
    assert (await wire.get("/healthz")).status == 200
    served, _, _ = select.select([other.socket for other in others], [], [], 0)
    assert len(served) < 100
    for other in others:
        with trio.fail_after(PATIENCE_S):
            assert (await other.receive_some(1)) == b"\x16"  # each has its turn


async def test_old_versions_and_locked_keys_are_refused(pair: dict[str, Path]) -> None:
    context = server_context(*pair.values())
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    subprocess.run(
        ["openssl", "ec", "-aes128", "-passout", "pass:x", "-in", pair["tls_key"], "-out",
         pair["tls_key"]], check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    with pytest.raises(OSError, match="PEM"):
        server_context(*pair.values())


async def test_a_new_certificate_is_taken_at_sighup_and_a_bad_one_is_not(
    house: House, pair: dict[str, Path]
) -> None:
    await house.start(**pair, handle_signals=True)
    old = await encrypted(house, pair)
    first = pair["tls_cert"].read_bytes()
    pair["tls_cert"].write_text("rubbish")
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: house.running.reloads == 1)
    pair["tls_cert"].write_bytes(first)
    assert (await (await encrypted(house, pair)).get("/healthz")).status == 200
    certificate(pair["tls_cert"], pair["tls_key"], "new")
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: house.running.reloads == 2)
    new: Any = (await encrypted(house, pair)).stream  # trusts the new one alone
    assert dict(pair[0] for pair in new.getpeercert()["subject"]) == {"commonName": "new"}
    assert (await old.get("/healthz")).status == 200
