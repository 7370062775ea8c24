"""Requests that two readers could understand differently: each has one answer, and what an engine
gets is framed by us whatever the client wrote."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from controller.router.config import Limits
from controller.router.http1 import RequestReader
from tests.router.wire import chat_body, until

if TYPE_CHECKING:
    from tests.router.conftest import House

BODY = json.dumps(chat_body()).encode()
LENGTH = b"content-length: %d" % len(BODY)
CHUNKED = b"transfer-encoding: chunked"
IN_CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
PATH = b"/v1/chat/completions"
START = b"POST " + PATH + b" HTTP/1.1\r\nhost: t\r\nauthorization: Bearer sk-test\r\n"
HEAD = START[:-2]


def lined(*lines: bytes, body: bytes = BODY) -> bytes:
    """A request with these header lines."""
    return START + b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunks(text: bytes) -> bytes:
    return lined(CHUNKED, body=text)


def started(line: bytes, *lines: bytes, body: bytes = BODY) -> bytes:
    """A request with this first line and with no header but these lines."""
    return b"\r\n".join((line, b"authorization: Bearer sk-test", *lines)) + b"\r\n\r\n" + body


SIZE = b"%x" % len(BODY)
REFUSED = {
    "both framings": (lined(LENGTH, CHUNKED, body=IN_CHUNKS), 400),
    "both framings, turned": (lined(CHUNKED, LENGTH, body=IN_CHUNKS), 400),
    "two equal lengths": (lined(LENGTH, LENGTH), 400),
    "two lengths": (lined(LENGTH, b"content-length: 1"), 400),
    "a list of lengths": (lined(LENGTH + b", %d" % len(BODY)), 400),
    "no length": (lined(b"content-length:"), 400),
    "a negative length": (lined(b"content-length: -1"), 400),
    "a signed length": (lined(b"content-length: +1"), 400),
    "a hexadecimal length": (lined(b"content-length: 0x1"), 400),
    "a broken length": (lined(b"content-length: 1.0"), 400),
    "two numbers": (lined(b"content-length: 1 1"), 400),
    "foreign digits": (lined("content-length: ٣".encode()), 400),
    "a length over 64 bits": (lined(b"content-length: 99999999999999999999"), 400),
    "a length of 64 bits": (lined(b"content-length: 18446744073709551615"), 413),
    "TE xchunked": (lined(b"transfer-encoding: xchunked", body=IN_CHUNKS), 501),
    "TE identity": (lined(b"transfer-encoding: identity", body=IN_CHUNKS), 501),
    "TE chunked, identity": (lined(b"transfer-encoding: chunked, identity", body=IN_CHUNKS), 400),
    "TE identity, chunked": (lined(b"transfer-encoding: identity, chunked", body=IN_CHUNKS), 501),
    "TE gzip, chunked": (lined(b"transfer-encoding: gzip, chunked", body=IN_CHUNKS), 501),
    "TE twice": (lined(CHUNKED, CHUNKED, body=IN_CHUNKS), 400),
    "TE in two lines": (lined(b"transfer-encoding: identity", CHUNKED, body=IN_CHUNKS), 501),
    "TE with a parameter": (lined(CHUNKED + b";q=1", body=IN_CHUNKS), 501),
    "TE quoted": (lined(b'transfer-encoding: "chunked"', body=IN_CHUNKS), 501),
    "TE after a vertical tab": (lined(b"transfer-encoding: \x0bchunked", body=IN_CHUNKS), 400),
    "TE empty": (lined(b"transfer-encoding:", LENGTH), 400),
    "TE in HTTP/1.0": (started(b"POST %b HTTP/1.0" % PATH, CHUNKED, body=IN_CHUNKS), 400),
    "a folded header": (lined(b"x-a: b", b" c", LENGTH), 400),
    "a folded TE": (lined(b"transfer-encoding:", b" chunked", body=IN_CHUNKS), 400),
    "a first header with a blank": (started(b"POST %b HTTP/1.1" % PATH, b" host: t", LENGTH), 400),
    "a blank before the colon": (lined(b"content-length : %d" % len(BODY)), 400),
    "a blank in a name": (lined(b"x a: b", LENGTH), 400),
    "a header without colon": (lined(b"x-a", LENGTH), 400),
    "a header without name": (lined(b": b", LENGTH), 400),
    "a bare LF between headers": (lined(b"x-a: b\nx-b: c", LENGTH), 400),
    "bare LFs": (lined(LENGTH).replace(b"\r\n", b"\n"), 400),
    "a bare LF at the end": (START + LENGTH + b"\r\n\n" + BODY, 400),
    "a bare CR": (lined(b"x-a: b\rx-b: c", LENGTH), 400),
    "NUL in a value": (lined(b"x-a: b\0c", LENGTH), 400),
    "NUL in a name": (lined(b"x\0a: b", LENGTH), 400),
    "NUL in the target": (started(b"POST %b\0 HTTP/1.1" % PATH, b"host: t", LENGTH), 400),
    "a chunk size with 0x": (chunks(b"0x" + IN_CHUNKS), 400),
    "a chunk size with a sign": (chunks(b"+" + IN_CHUNKS), 400),
    "a negative chunk size": (chunks(b"-" + IN_CHUNKS), 400),
    "a blank before a chunk size": (chunks(b" " + IN_CHUNKS), 400),
    "a blank after a chunk size": (chunks(IN_CHUNKS.replace(b"\r\n", b" \r\n", 1)), 400),
    "a chunk size over 64 bits": (chunks(b"1" + b"0" * 16 + b"\r\n"), 400),
    "a chunk larger than the limit": (chunks(b"%x\r\n" % (2**40) + b"x" * 200_000), 413),
    "chunk sizes ended by LF": (chunks(IN_CHUNKS.replace(b"\r\n", b"\n")), 400),
    "a chunk extension ended by LF": (chunks(IN_CHUNKS.replace(b"\r\n", b";a\n", 1)), 400),
    "CR in a chunk extension": (chunks(IN_CHUNKS.replace(b"\r\n", b";a\rb\r\n", 1)), 400),
    "a chunk longer than its size": (chunks(IN_CHUNKS.replace(b"\r\n0", b"xx0")), 400),
    "a length as trailer": (chunks(IN_CHUNKS[:-2] + b"content-length: 1\r\n\r\n"), 400),
    "TE as trailer": (chunks(IN_CHUNKS[:-2] + CHUNKED + b"\r\n\r\n"), 400),
    "HTTP/0.9": (b"GET /healthz\r\n\r\n", 505),
    "HTTP/0.9 named": (started(b"POST %b HTTP/0.9" % PATH, b"host: t", LENGTH), 505),
    "HTTP/2.0": (started(b"POST %b HTTP/2.0" % PATH, b"host: t", LENGTH), 505),
    "HTTP/1.2": (started(b"POST %b HTTP/1.2" % PATH, b"host: t", LENGTH), 400),
    "HTTP/1.10": (started(b"POST %b HTTP/1.10" % PATH, b"host: t", LENGTH), 400),
    "http/1.1": (started(b"POST %b http/1.1" % PATH, b"host: t", LENGTH), 400),
    "two hosts": (lined(b"host: u", LENGTH), 400),
    "no host": (started(b"POST %b HTTP/1.1" % PATH, LENGTH), 400),
    "two keys": (lined(b"authorization: Bearer sk-narrow", LENGTH), 400),
    "a blank in the target": (started(b"POST %b x HTTP/1.1" % PATH, b"host: t", LENGTH), 400),
    "a tunnel": (started(b"CONNECT t:80 HTTP/1.1", b"host: t"), 501),
    "an unknown method": (started(b"STEAL %b HTTP/1.1" % PATH, b"host: t", LENGTH), 400),
}  # fmt: skip

SERVED = {
    "a length": lined(LENGTH),
    "zeros before a length": lined(b"content-length: 000%d" % len(BODY)),
    "blanks around a length": lined(b"content-length: \t %d \t" % len(BODY)),
    "chunks": chunks(IN_CHUNKS),
    "TE in capitals": lined(b"Transfer-Encoding: CHUNKED", body=IN_CHUNKS),
    "zeros before a chunk size": chunks(b"000" + IN_CHUNKS),
    "a chunk extension": chunks(IN_CHUNKS.replace(b"\r\n", b';a="b;c"\r\n', 1)),
    "trailers": chunks(IN_CHUNKS[:-2] + b"x-a: b\r\nauthorization: Bearer x\r\n\r\n"),
    "an absolute target": started(b"POST http://t%b HTTP/1.1" % PATH, b"host: u", LENGTH),
    "HTTP/1.0 without host": started(b"POST %b HTTP/1.0" % PATH, LENGTH),
    "a length that is for one hop": lined(b"connection: content-length", LENGTH),
    "empty lines before": b"\r\n\r\n" + lined(LENGTH),
}
HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: t\r\n\r\n"


@pytest.mark.parametrize("what", REFUSED)
async def test_what_can_be_read_in_two_ways_is_refused_and_ends_the_connection(
    house: House, what: str
) -> None:
    await house.start(limits=Limits(body_bytes=100_000))
    data, status = REFUSED[what]
    wire = await house.wire()
    await wire.send(data + HIDDEN)
    assert (await wire.answer()).status == status
    assert await wire.closed()
    assert not house.engines[0].records
    assert house.idle()


@pytest.mark.parametrize("what", SERVED)
async def test_an_engine_gets_our_framing_whatever_the_clients_was(house: House, what: str) -> None:
    await house.start()
    wire = await house.wire()
    await wire.send(SERVED[what])
    assert (await wire.answer()).status == 200
    (record,) = house.engines[0].records
    assert record.path == PATH.decode()
    assert record.body == BODY
    names = [name for name in record.headers if name in ("content-length", "transfer-encoding")]
    assert names == ["content-length"]
    assert record.headers["content-length"] == str(len(BODY))
    assert record.headers["host"] not in ("t", "u")
    assert await until(house.idle)


@pytest.mark.parametrize("what", [*REFUSED, *SERVED])
def test_a_request_sent_byte_by_byte_is_understood_the_same(what: str) -> None:
    data = REFUSED[what][0] if what in REFUSED else SERVED[what]
    whole, bytewise = (RequestReader(Limits(body_bytes=100_000)) for _ in range(2))
    whole.feed(data)
    for n in range(len(data)):
        bytewise.feed(data[n : n + 1])
    assert whole.fault == bytewise.fault
    seen = [[(r.method, r.target, r.body) for r in reader.ready] for reader in (whole, bytewise)]
    assert seen[0] == seen[1]
    assert (what in REFUSED) == (whole.fault is not None)
