"""Servers that answer as no server should, and some do: nothing wrong is taken for weights (D25).

A file whose parts do not meet, or that was cut, has a plausible size: an engine may well load it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from agent.weights import NoWeights
from tests.agent.file_server import DATA, SHA, Server, nothing, raw, running, weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZE = len(DATA)
CUT = raw(200, DATA[:300_000], f"Content-Length: {SIZE}")
REST = "bytes=300000-"
CHUNKED = "Transfer-Encoding: chunked"


def rest(start: int, *, said: str | None = None, body: bytes | None = None) -> bytes:
    """A 206 that brings what follows `start`."""
    came = DATA[start:] if body is None else body
    place = said or f"bytes {start}-{start + len(came) - 1}/{SIZE}"
    return raw(206, came, f"Content-Length: {len(came)}", f"Content-Range: {place}")


def chunks(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + end


WHOLE_AFTER_ALL: dict[str, tuple[list[bytes], list[str | None]]] = {
    "the whole file as if it were the rest": ([CUT, rest(0)], [None, REST, None]),
    "the rest from an earlier byte": ([CUT, rest(1000)], [None, REST, None]),
    "the rest from a later byte": ([CUT, rest(300_001)], [None, REST, None]),
    "the rest of an unknown place": (
        [CUT, raw(206, DATA[300_000:], f"Content-Length: {SIZE - 300_000}")],
        [None, REST, None],
    ),
    "several ranges at once": (
        [CUT, raw(206, b"--x\r\n", "Content-Type: multipart/byteranges; boundary=x")],
        [None, REST, None],
    ),
    "the file again, ranges being unknown": (
        [CUT, raw(200, DATA, f"Content-Length: {SIZE}")],
        [None, REST],
    ),
    "a part of the rest": (
        [CUT, rest(300_000, body=DATA[300_000:500_000]), rest(500_000)],
        [None, REST, "bytes=500000-"],
    ),
    "a rest without its length": (
        [CUT, raw(206, DATA[300_000:600_000], f"Content-Range: bytes 300000-{SIZE - 1}/{SIZE}")],
        [None, REST, "bytes=600000-"],
    ),
    "a rest of a file of unknown size": (
        [CUT, rest(300_000, said=f"bytes 300000-{SIZE - 1}/*")],
        [None, REST],
    ),
    "chunks": ([raw(200, chunks(DATA[:5], DATA[5:]), CHUNKED)], [None]),
    "chunks that are cut": (
        [raw(200, chunks(DATA[:300_000], end=b""), CHUNKED)],
        [None, REST],
    ),
}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with running(made.http):
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(("answers", "asked"), WHOLE_AFTER_ALL.values(), ids=WHOLE_AFTER_ALL.keys())
async def test_D25_parts_that_do_not_meet_are_never_served(
    server: Server, tmp_path: Path, answers: list[bytes], asked: list[str | None]
) -> None:
    server.raw = list(answers)
    path = await weights(tmp_path).ensure(f"{server.url}/m.gguf", nothing)
    assert path.read_bytes() == DATA
    assert server.ranges == asked
    assert [p.name for p in path.parent.iterdir() if ".part" in p.name] == []


async def test_D25_a_file_whose_end_nobody_can_tell_needs_a_checksum(
    server: Server, tmp_path: Path
) -> None:
    server.raw = [raw(200, DATA[:300_000]), raw(200, DATA)]
    here = weights(tmp_path)
    with pytest.raises(NoWeights, match=r"tells no size, .* put #sha256=HEX behind the source"):
        await here.ensure(f"{server.url}/m.gguf", nothing)
    told: list[dict[str, object]] = []
    path = await here.ensure(f"{server.url}/m.gguf#sha256={SHA}", told.append)
    assert path.read_bytes() == DATA
    assert {"bytes_total"} & {key for word in told for key in word} == set()


async def test_D25_a_coded_file_is_refused(server: Server, tmp_path: Path) -> None:
    server.raw = [raw(200, DATA[:100], "Content-Encoding: gzip", "Content-Length: 100")]
    with pytest.raises(NoWeights, match="comes as gzip, though the bytes of the file itself"):
        await weights(tmp_path).ensure(f"{server.url}/m.gguf", nothing)


@pytest.mark.slow
async def test_a_server_that_always_cuts_and_never_goes_on_is_given_up(
    server: Server, tmp_path: Path
) -> None:
    server.raw = [CUT, rest(0)] * 9
    with trio.fail_after(60), pytest.raises(NoWeights, match="failed 5 times without progress"):
        await weights(tmp_path).ensure(f"{server.url}/m.gguf", nothing)


async def test_D22_a_download_that_was_killed_before_it_was_verified_is_not_repeated(
    server: Server, tmp_path: Path
) -> None:
    source = f"{server.url}/m.gguf#sha256={SHA}"
    path = await weights(tmp_path).ensure(source, nothing)
    (path.parent / "m.gguf.part").write_bytes(DATA)
    (path.parent / "m.gguf.part.json").write_text('"\\"v1\\""')
    path.unlink()
    (path.parent / "source.json").unlink()
    server.ranges.clear()
    server.raw = [raw(416, b"", f"Content-Range: bytes */{SIZE}", "Content-Length: 0")]
    assert await weights(tmp_path).ensure(source, nothing) == path
    assert server.ranges == [f"bytes={SIZE}-"]
    assert path.read_bytes() == DATA
