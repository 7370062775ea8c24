"""The request reader without sockets: any cut gives the same requests, nothing is ambiguous."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.router.config import Limits
from controller.router.http1 import MOST_FRAMING, RequestReader, answer, chunk

Said = tuple[str, bytes]  # of a request: its version and body
Seen = list[tuple[bytes, bytes, list[tuple[bytes, bytes]], Said, bool]]


def seen(reader: RequestReader) -> Seen:
    return [
        (r.method, r.target, r.headers, (r.version, r.body), r.keep_alive) for r in reader.ready
    ]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[bytes, list[Said], list[bytes]]:
    """Some requests as bytes, what they say, and the bytes in random pieces."""
    versions = st.sampled_from(("1.0", "1.1"))
    said = draw(st.lists(st.tuples(versions, st.binary(max_size=40)), min_size=1, max_size=4))
    data = b""
    for version, body in said:
        head = b"POST /v1/x?y=1 HTTP/%b\r\nHost: a\r\nX-Thing: %d\r\n" % (
            version.encode(),
            len(data),
        )
        if version == "1.0":
            head += b"Connection: keep-alive\r\n"
        if version == "1.1" and draw(st.booleans()):
            parts = [body[:7], body[7:]]
            framed = b"".join(chunk(part) for part in parts if part) + b"0\r\n\r\n"
            data += head + b"Transfer-Encoding: chunked\r\n\r\n" + framed
        else:
            data += head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    cuts = sorted(draw(st.sets(st.integers(1, len(data) - 1), max_size=40)))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return data, said, pieces


@given(conversations())
def test_any_cut_gives_the_same_requests(
    conversation: tuple[bytes, list[Said], list[bytes]],
) -> None:
    data, said, pieces = conversation
    at_once, in_pieces = RequestReader(Limits()), RequestReader(Limits())
    at_once.feed(data)
    for piece in pieces:
        in_pieces.feed(piece)
    assert seen(at_once) == seen(in_pieces)
    assert [(request.version, request.body) for request in at_once.ready] == said
    assert at_once.fault is in_pieces.fault is None
    assert not at_once.begun


@pytest.mark.parametrize(
    "pieces",
    [
        (b"GET /x HTTP/1.0\r\n", b"A: bcd HTTP/1.1\r\n\r\n"),
        (b"GET /x HTTP/1.1\r\nHost: a\r\n\r\nGET /x HTTP/1.0\r\n\r\n",),
        (b"\r\nGET /x HTTP/1.0\r\nA: HTTP/1.1\r\n\r\n",),
        (b"GET /x HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nA: HTTP/1.1\r\n\r\n",),
    ],
)
def test_no_version_is_read_but_in_a_requests_own_first_line(pieces: tuple[bytes, ...]) -> None:
    reader = RequestReader(Limits())
    for piece in pieces:
        reader.feed(piece)
    assert [request.version for request in reader.ready][-1:] == ["1.0"]
    assert reader.fault is None


@given(st.binary(max_size=300))
def test_rubbish_never_raises(data: bytes) -> None:
    reader = RequestReader(Limits(header_bytes=100, body_bytes=50))
    for start in range(0, len(data), 7):
        reader.feed(data[start : start + 7])


@given(st.integers(0, 30), st.booleans())
def test_the_body_limit_is_exact_in_both_framings(size: int, chunked: bool) -> None:
    reader = RequestReader(Limits(body_bytes=20))
    head = b"POST / HTTP/1.1\r\nhost: t\r\n"
    body = b"x" * size
    if chunked:
        framed = (chunk(body) if body else b"") + b"0\r\n\r\n"
        reader.feed(head + b"transfer-encoding: chunked\r\n\r\n" + framed)
    else:
        reader.feed(head + b"content-length: %d\r\n\r\n" % size + body)
    if size > 20:
        assert reader.fault is not None
        assert reader.fault.status == 413
    else:
        assert reader.ready[0].body == body


def test_chunk_extensions_and_trailers_are_bounded() -> None:
    head = b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
    for flood in (b"1;" + b"x" * 5000, b"0\r\n" + b"a: b\r\n" * 900):
        reader = RequestReader(Limits(body_bytes=2000))
        reader.feed(head)
        for start in range(0, len(flood), 100):
            reader.feed(flood[start : start + 100])
        assert reader.fault is not None
        assert reader.fault.status == 413


@pytest.mark.parametrize("flood", [b"0\r\nx: ", b"1;x="])
def test_a_flood_of_what_is_no_body_ends_soon(flood: bytes) -> None:
    """One trailer of 32 MiB took five seconds of CPU, without a key."""
    reader, came = RequestReader(Limits()), 0
    reader.feed(b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(10):
        reader.feed(chunk(b"y" * 100_000))
    reader.feed(flood)
    while reader.fault is None and came < 2 * MOST_FRAMING:
        reader.feed(b"y" * 1000)
        came += 1000
    assert reader.fault is not None
    assert reader.fault.status == 413
    assert came > MOST_FRAMING / 2


def test_trailers_are_not_headers() -> None:
    reader = RequestReader(Limits())
    reader.feed(
        b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
        b"1\r\nx\r\n0\r\nauthorization: Bearer evil\r\n\r\n"
    )
    request = reader.ready[0]
    assert request.authorization == b""
    assert request.headers == [(b"host", b"t"), (b"transfer-encoding", b"chunked")]


def test_two_lengths_are_refused() -> None:
    for headers in (
        b"content-length: 3\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked\r\ncontent-length: 3",
        b"content-length: 3\r\ncontent-length: 4",
        b"content-length: +3",
        b"transfer-encoding: chunked, gzip",
        b"transfer-encoding: gzip",
    ):
        reader = RequestReader(Limits())
        reader.feed(b"POST / HTTP/1.1\r\nhost: t\r\n" + headers + b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        assert reader.fault is not None, headers
        assert reader.fault.status in (400, 501)
        assert not reader.ready


def test_an_answer_says_its_length_and_whether_it_closes() -> None:
    data = answer(404, [(b"a", b"b")], b"{}", close=True)
    assert data == (
        b"HTTP/1.1 404 Not Found\r\na: b\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
    )
